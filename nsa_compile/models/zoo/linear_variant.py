"""Linear attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern
from nsa_compile.models.zoo.recurrent_variant import Recurrent

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class LinearPattern(Pattern):
    """Nothing: the state is as large as a head's keys and values make it."""


class Linear(Recurrent):
    """Linear attention (arXiv 2006.16236)."""

    pattern = LinearPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.linear import LinearAttention

        return LinearAttention(model)

    def beside(self, model: NSAConfig) -> int:
        return model.n_heads * model.head_dim  # the normaliser's product

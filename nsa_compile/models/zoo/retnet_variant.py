"""RetNet, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern
from nsa_compile.models.zoo.recurrent_variant import Recurrent

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class RetNetPattern(Pattern):
    """Nothing: decays are fixed. The paper's heads are 256 wide, and their values, v_head_dim, twice that."""


class RetNet(Recurrent):
    """Multi-scale retention (arXiv 2307.08621)."""

    pattern = RetNetPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.retnet import Retention

        return Retention(model)

    def beside(self, model: NSAConfig) -> int:
        return model.dim * model.n_heads * model.value_dim  # the output's gate

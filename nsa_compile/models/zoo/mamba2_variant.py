"""Mamba-2, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.zoo.recurrent_variant import Recurrent

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class Mamba2Pattern(Pattern):
    """Sizes of Mamba-2, beside head_dim = 128, its state N, v_head_dim = 64, its P, and heads that are together twice
    as wide as the model. There are no heads of keys and values; n_kv_heads says nothing here.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    conv: int = 4
    """Tokens that the short convolution reads, the token's own included."""
    groups: int = 1
    """Groups of heads that share B and C, its keys and queries."""

    def __post_init__(self) -> None:
        require_int(self, "conv", 1)
        require_int(self, "groups", 1)


class Mamba2(Recurrent):
    """A state space model as attention (arXiv 2405.21060)."""

    pattern = Mamba2Pattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.mamba2 import Mamba2Layer

        return Mamba2Layer(model)

    def mistake(self, model: NSAConfig) -> str | None:
        if model.n_heads % model.pattern.groups == 0:
            return None
        return f"n_heads = {model.n_heads} must be a multiple of pattern.groups = {model.pattern.groups}"

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        inner, of_groups = model.n_heads * model.value_dim, model.pattern.groups * model.head_dim
        channels = inner + 2 * of_groups
        projections = model.dim * (inner + channels + model.n_heads + inner)
        return [projections, channels * model.pattern.conv, self.products * inner * model.head_dim]

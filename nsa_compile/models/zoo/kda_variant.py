"""Kimi delta attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.zoo.recurrent_variant import Delta

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class KDAPattern(Pattern):
    """Sizes of KDA, beside its heads, of keys and of values, of 128.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    conv: int = 4
    """Tokens that the short convolution reads, the token's own included."""
    gate_rank: int | None = None
    """Width between the two projections of the decay, and of the output's gate; null takes that of a value head."""

    def __post_init__(self) -> None:
        require_int(self, "conv", 1)
        if self.gate_rank is not None:
            require_int(self, "gate_rank", 1)


class KDA(Delta):
    """The delta rule with a decay of each channel (arXiv 2510.26692)."""

    pattern = KDAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.kda import KimiDeltaAttention

        return KimiDeltaAttention(model)

    def beside(self, model: NSAConfig) -> int:
        rank = model.pattern.gate_rank or model.value_dim
        low_rank = 2 * model.dim + model.n_heads * (model.head_dim + model.value_dim)
        return super().beside(model) + rank * low_rank

"""Gated linear attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int, require_positive
from nsa_compile.models.zoo.recurrent_variant import Recurrent

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class GLAPattern(Pattern):
    """Sizes of GLA, beside its 4 heads, whose keys are together half as wide as the model, and values as wide as it.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    gate_rank: int = 16
    """Width between the two projections that decide how much is forgotten."""
    gate_temperature: float = 16.0
    """Root of a sigmoid that a decay is, ``τ``: the higher, the nearer to 1 it begins."""

    def __post_init__(self) -> None:
        require_int(self, "gate_rank", 1)
        require_positive(self, "gate_temperature")


class GLA(Recurrent):
    """Gated linear attention (arXiv 2312.06635)."""

    pattern = GLAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.gla import GatedLinearAttention

        return GatedLinearAttention(model)

    def beside(self, model: NSAConfig) -> int:
        decay = model.pattern.gate_rank * (model.dim + model.n_kv_heads * model.head_dim)
        return decay + model.dim * model.n_heads * model.value_dim

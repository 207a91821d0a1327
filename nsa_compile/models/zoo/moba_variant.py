"""MoBA, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class MoBAPattern(Pattern):
    """Blocks of MoBA, as the paper has them for sequences of 8,192 tokens.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 512
    """Tokens of a block, ``B``."""
    num_selected: int = 3
    """Blocks that a query attends to, ``k``, its own included."""

    def __post_init__(self) -> None:
        require_int(self, "block", 1)
        require_int(self, "num_selected", 1)


class MoBA(AttentionVariant):
    """Mixture of block attention (arXiv 2502.13189)."""

    pattern = MoBAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.moba import MoBAttention

        return MoBAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import selected_pairs

        return selected_pairs(seq_len, seq_len, model.pattern.num_selected, model.pattern.block)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before, projections

        gate = blocks_before(model.pattern.block, seq_len) / seq_len * model.n_heads * model.head_dim
        return [projections(model, kv_sets=1), gate]

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", k = {settings['num_selected']}"

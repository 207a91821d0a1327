"""Plain grouped-query attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern
from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class GQAPattern(Pattern):
    """Nothing: every token attends to all before it."""


class GQA(AttentionVariant):
    """Grouped-query attention (arXiv 2305.13245) as a decode step."""

    pattern = GQAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.gqa import GroupedQueryAttention

        return GroupedQueryAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs

        return causal_pairs(seq_len, seq_len)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]

"""MiniMax sparse attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.zoo.indexed_variant import Indexed

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class MSAPattern(Pattern):
    """Blocks and index branch of MiniMax-M3.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 128
    """Tokens of a block, ``B``."""
    num_selected: int = 16
    """Blocks that a group of heads attends to, ``k``, the query's own included."""
    index_dim: int = 128
    """Width of a query or key of the index branch; even, because RoPE rotates pairs."""

    def __post_init__(self) -> None:
        for name in ("block", "num_selected", "index_dim"):
            require_int(self, name, 1)
        if self.index_dim % 2:
            raise ValueError(f"index_dim = {self.index_dim} must be even, because RoPE rotates pairs of channels")


class MSA(Indexed):
    """Blocks ranked for each group of heads by their best token (arXiv 2606.13392)."""

    pattern = MSAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.msa import MSAttention

        return MSAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import selected_pairs

        return selected_pairs(seq_len, seq_len, model.pattern.num_selected, model.pattern.block)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections
        from nsa_compile.ops.flops import causal_pairs

        width = model.pattern.index_dim
        indexer = model.dim * (model.n_kv_heads + 1) * width
        ranking = causal_pairs(seq_len, seq_len) / seq_len * model.n_kv_heads * width
        return [projections(model, kv_sets=1), indexer, ranking]

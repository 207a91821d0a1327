"""Qwen sparse attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.zoo.indexed_variant import Indexed

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class QSAPattern(Pattern):
    """Blocks and indexer of Qwen3.8-Flash-Next: 2,048 tokens and up to three more.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 4
    """Tokens of a block, ``c``."""
    num_selected: int = 512
    """Complete blocks that a query attends to, ``k``, beside the one that is not complete."""
    index_heads: int = 4
    """Heads of the indexer's queries."""
    index_dim: int = 128
    """Width of a head of the indexer; even, because RoPE rotates pairs."""

    def __post_init__(self) -> None:
        for name in ("block", "num_selected", "index_heads", "index_dim"):
            require_int(self, name, 1)
        if self.index_dim % 2:
            raise ValueError(f"index_dim = {self.index_dim} must be even, because RoPE rotates pairs of channels")


class QSA(Indexed):
    """Short blocks ranked by pooled keys (Qwen3.8-Flash-Next)."""

    pattern = QSAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.qsa import QSAttention

        return QSAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        block, chosen = model.pattern.block, model.pattern.num_selected
        return sum(min(chosen, (t + 1) // block) * block + (t + 1) % block for t in range(seq_len))

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before, projections

        p = model.pattern
        indexer = model.dim * (p.index_heads + 1) * p.index_dim
        complete = blocks_before(p.block, seq_len + 1) / seq_len  # at each token those that end with it, too
        return [projections(model, kv_sets=1), indexer, complete * p.index_heads * p.index_dim]

"""InfLLM-V2, described: its sizes and its useful work. Imports no torch."""

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
class InfLLMPattern(Pattern):
    """Blocks of InfLLM-V2 as in MiniCPM4.1: 96 of 64 tokens.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    pool_block: int = 32
    """Tokens pooled into one key, ``l``."""
    pool_stride: int = 16
    """Tokens between the starts of neighbouring pooled keys, ``d``; divides ``l`` and ``B``."""
    block: int = 64
    """Tokens of a block, ``B``."""
    num_selected: int = 64
    """Blocks that a group of heads attends to, ``k``, the first ones included, beside the window."""
    num_initial: int = 1
    """Blocks at the start of the sequence that are always selected; they count towards ``k``."""
    window: int = 2048
    """Tokens of the last blocks, the query's own counted as whole; a multiple of ``B``."""
    dense_len: int = 8192
    """Position from which a query no longer sees all tokens."""

    def __post_init__(self) -> None:
        for name in ("pool_block", "pool_stride", "block", "num_selected", "window"):
            require_int(self, name, 1)
        for name in ("num_initial", "dense_len"):
            require_int(self, name, 0)
        for name in ("pool_block", "block"):
            if getattr(self, name) % self.pool_stride:
                raise ValueError(
                    f"{name} = {getattr(self, name)} must be a multiple of pool_stride = {self.pool_stride}"
                )
        if self.window % self.block:
            raise ValueError(f"window = {self.window} must be a multiple of block = {self.block}")
        if self.num_initial > self.num_selected:
            raise ValueError(
                f"num_initial = {self.num_initial} must be at most num_selected = {self.num_selected}, towards which "
                "the first blocks count"
            )


class InfLLM(AttentionVariant):
    """First, last and best blocks by pooled keys, dense at first (arXiv 2509.24663)."""

    pattern = InfLLMPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.infllm_v2 import InfLLMAttention

        return InfLLMAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs, selected_pairs

        p = model.pattern
        dense = min(seq_len, p.dense_len)
        sparse = [
            selected_pairs(length, length, p.num_selected + p.window // p.block, p.block) for length in (seq_len, dense)
        ]
        return causal_pairs(dense, dense) + sparse[0] - sparse[1]

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections
        from nsa_compile.ops.flops import compressed_pairs

        p = model.pattern
        blocks = max(0, (seq_len - p.pool_block) // p.pool_stride + 1)
        # Queries that see all rank nothing.
        ranking = sum(
            sign * compressed_pairs(length, blocks, p.pool_block, p.pool_stride)
            for sign, length in ((1, seq_len), (-1, min(seq_len, p.dense_len)))
        )
        return [projections(model, kv_sets=1), ranking / seq_len * model.n_heads * model.head_dim]

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", k = {settings['num_selected']}, w = {settings['window']}"

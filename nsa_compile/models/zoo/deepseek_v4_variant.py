"""The compressed attentions of DeepSeek-V4, described: their sizes and their useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.variant import AttentionVariant
from nsa_compile.models.zoo.indexed_variant import Indexed

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class HCAPattern(Pattern):
    """Sizes of HCA in DeepSeek-V4-Flash, beside its 64 heads of head_dim = 512 and rope_theta = 160,000.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 128
    """Tokens that an entry stands for, ``m'``."""
    window: int = 128
    """Tokens of the sliding window, ``w``, the query's own included."""
    q_rank: int = 1024
    """Width of the latent that queries are made of."""
    rope_dim: int = 64
    """Channels of head_dim that carry the position, the last ones."""
    out_groups: int = 8
    """Groups of heads whose outputs are projected by themselves."""
    out_rank: int = 1024
    """Width of what a group's outputs are projected to."""

    def __post_init__(self) -> None:
        for name in ("block", "window", "q_rank", "rope_dim", "out_groups", "out_rank"):
            require_int(self, name, 1)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim} must be even, because RoPE rotates pairs of channels")


@dataclass(frozen=True)
class CSAPattern(HCAPattern):
    """Sizes of CSA in DeepSeek-V4-Flash, beside its 64 heads of head_dim = 512 and rope_theta = 160,000.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 4
    """Tokens that an entry stands for, ``m``; it is made of these and the ``m`` before."""
    num_selected: int = 512
    """Entries that a query attends to, ``k``, beside the window."""
    index_heads: int = 64
    """Heads of the indexer."""
    index_dim: int = 128
    """Width of a head of the indexer; its last rope_dim channels carry the position."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_selected", "index_heads", "index_dim"):
            require_int(self, name, 1)
        if self.rope_dim > self.index_dim:
            raise ValueError(f"rope_dim = {self.rope_dim} must be at most index_dim = {self.index_dim}")


def _mistake(model: NSAConfig) -> str | None:
    p = model.pattern
    if model.n_kv_heads != 1:
        return f"n_kv_heads = {model.n_kv_heads} must be 1: all queries share one head of keys"
    if model.value_dim != model.head_dim:
        return f"v_head_dim = {model.v_head_dim} must be null: keys are values"
    if p.rope_dim > model.head_dim:
        return f"pattern.rope_dim = {p.rope_dim} must be at most head_dim = {model.head_dim}"
    if model.n_heads % p.out_groups:
        return f"pattern.out_groups = {p.out_groups} must divide n_heads = {model.n_heads}"
    return None


def _projections(model: NSAConfig) -> list[float]:
    """Multiplies a token of queries, the key, the compressor without its gates' sum, and the output."""
    p, width = model.pattern, model.n_heads * model.head_dim
    halves = 2 if isinstance(p, CSAPattern) else 1
    queries = p.q_rank * (model.dim + width)
    out = width * p.out_rank + p.out_groups * p.out_rank * model.dim
    return [queries, model.dim * model.head_dim, 2 * halves * model.dim * model.head_dim, out]


class HCA(AttentionVariant):
    """A window and all entries, each of many tokens (arXiv 2606.19348)."""

    pattern = HCAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.deepseek_v4 import HCAttention

        return HCAttention(model)

    def mistake(self, model: NSAConfig) -> str | None:
        return _mistake(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.models.flops import blocks_before
        from nsa_compile.ops.flops import window_pairs

        # A token sees the block that ends with it, too.
        return window_pairs(seq_len, seq_len, model.pattern.window) + blocks_before(model.pattern.block, seq_len + 1)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        return _projections(model)


class CSA(Indexed):
    """A window and the entries of few tokens that an indexer chooses (arXiv 2606.19348)."""

    pattern = CSAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.deepseek_v4 import CSAttention

        return CSAttention(model)

    def mistake(self, model: NSAConfig) -> str | None:
        return _mistake(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import window_pairs

        p = model.pattern
        entries = sum(min(p.num_selected, (t + 1) // p.block) for t in range(seq_len))
        return window_pairs(seq_len, seq_len, p.window) + entries

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before

        p = model.pattern
        indexer = p.q_rank * p.index_heads * p.index_dim + model.dim * (p.index_heads + 4 * p.index_dim)
        complete = blocks_before(p.block, seq_len + 1) / seq_len  # at each token those that end with it, too
        return [*_projections(model), indexer, complete * p.index_heads * (p.index_dim + 1)]

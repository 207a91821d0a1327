"""DeepSeek sparse attention, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.zoo.indexed_variant import Indexed

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class DSAPattern(Pattern):
    """Sizes of DeepSeek-V3.2, beside its 128 heads of head_dim = 192 and v_head_dim = 128.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    num_selected: int = 2048
    """Tokens that a query attends to, ``k``."""
    q_rank: int = 1536
    """Width of the latent that queries are made of."""
    kv_rank: int = 512
    """Width of the latent of keys and values, which is cached."""
    rope_dim: int = 64
    """Channels of a query or key that carry the position: those of head_dim that no latent makes."""
    index_heads: int = 64
    """Heads of the indexer."""
    index_dim: int = 128
    """Width of a head of the indexer; its first rope_dim channels carry the position."""

    def __post_init__(self) -> None:
        for name in ("num_selected", "q_rank", "kv_rank", "rope_dim", "index_heads", "index_dim"):
            require_int(self, name, 1)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim} must be even, because RoPE rotates pairs of channels")
        if self.rope_dim > self.index_dim:
            raise ValueError(f"rope_dim = {self.rope_dim} must be at most index_dim = {self.index_dim}")


class DSA(Indexed):
    """Tokens chosen by a lightning indexer, on MLA (arXiv 2512.02556)."""

    pattern = DSAPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.dsa import DSAttention

        return DSAttention(model)

    def mistake(self, model: NSAConfig) -> str | None:
        if model.pattern.rope_dim < model.head_dim:
            return None
        return f"pattern.rope_dim = {model.pattern.rope_dim} must be below head_dim = {model.head_dim}"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import window_pairs

        # As many tokens as a window of that width has.
        return window_pairs(seq_len, seq_len, model.pattern.num_selected)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.ops.flops import causal_pairs

        p, heads, content = model.pattern, model.n_heads, model.head_dim - model.pattern.rope_dim
        latents = model.dim * (p.q_rank + p.kv_rank + p.rope_dim)
        queries, out = p.q_rank * heads * model.head_dim, heads * model.value_dim * model.dim
        # A key and a value of each head for each token, as if they were made once.
        keys = p.kv_rank * heads * (content + model.value_dim)
        indexer = p.q_rank * p.index_heads * p.index_dim + model.dim * (p.index_dim + p.index_heads)
        ranking = causal_pairs(seq_len, seq_len) / seq_len * p.index_heads * (p.index_dim + 1)
        return [latents, queries, keys, out, indexer, ranking]

"""Attentions with an indexer, and HCA, which shares its entries with one, described: sizes, useful work and the
indexer's loss, which is their statistic. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nsa_compile.models.pattern import Pattern
from nsa_compile.models.variant import LayerRow, Panel, Picture
from nsa_compile.models.zoo.zoo_variant import ZooVariant

if TYPE_CHECKING:
    from torch import Tensor

    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import NSATransformer


@dataclass(frozen=True)
class IndexerRow(LayerRow):
    """How well the indexer of one layer foretells its attention.

    Attributes:
        layer: counted from 0.
        indexer_loss: its mean loss over the tokens, in nats.
    """

    indexer_loss: float


class Indexed(ZooVariant):
    """Base of the attentions whose layers have an indexer, and its loss for one of their own."""

    auxiliary = True
    shown_sizes: ClassVar = {"k": "num_selected"}
    row = IndexerRow
    columns: ClassVar = {"layer": "layer", "indexer_loss": "indexer's loss"}
    legend = "KL divergence of the indexer's ranking from what attention gives the keys, in nats."
    pictures = (
        Picture("indexer", "Loss of each layer's indexer.", [[Panel("indexer_loss", share=False, label="nats")]]),
    )

    def statistics(self, model: NSATransformer, tokens: Tensor) -> list[Any]:
        import torch

        rows = []
        with torch.no_grad():
            x = model.embedding(tokens)
            for number, block in enumerate(model.blocks):
                x, loss = block(x, return_auxiliary=True)
                rows.append(IndexerRow(number, loss.item()))
        return rows


def _require_even(pattern: Pattern, name: str) -> None:
    if getattr(pattern, name) % 2:
        raise ValueError(f"{name} = {getattr(pattern, name)} must be even, because RoPE rotates pairs of channels")


def _require_room_in_index(pattern: Any) -> None:
    if pattern.rope_dim > pattern.index_dim:
        raise ValueError(f"rope_dim = {pattern.rope_dim} must be at most index_dim = {pattern.index_dim}")


@dataclass(frozen=True)
class DSAPattern(Pattern):
    """Sizes of DeepSeek-V3.2, beside its 128 heads of head_dim = 192 and v_head_dim = 128."""

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
        super().__post_init__()
        _require_even(self, "rope_dim")
        _require_room_in_index(self)


class DSA(Indexed):
    """Tokens chosen by a lightning indexer, on MLA (arXiv 2512.02556)."""

    pattern = DSAPattern
    selects = "tokens"
    layer_class = "dsa:DSAttention"

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


@dataclass(frozen=True)
class MSAPattern(Pattern):
    """Blocks and index branch of MiniMax-M3."""

    block: int = 128
    """Tokens of a block, ``B``."""
    num_selected: int = 16
    """Blocks that a group of heads attends to, ``k``, the query's own included."""
    index_dim: int = 128
    """Width of a query or key of the index branch; even, because RoPE rotates pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_even(self, "index_dim")


class MSA(Indexed):
    """Blocks ranked for each group of heads by their best token (arXiv 2606.13392)."""

    pattern = MSAPattern
    layer_class = "msa:MSAttention"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import selected_pairs

        return selected_pairs(seq_len, seq_len, model.pattern.num_selected, model.pattern.block)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.ops.flops import causal_pairs

        width = model.pattern.index_dim
        indexer = model.dim * (model.n_kv_heads + 1) * width
        ranking = causal_pairs(seq_len, seq_len) / seq_len * model.n_kv_heads * width
        return [*super().multiplies(model, seq_len), indexer, ranking]


@dataclass(frozen=True)
class QSAPattern(Pattern):
    """Blocks and indexer of Qwen3.8-Flash-Next: 2,048 tokens and up to three more."""

    block: int = 4
    """Tokens of a block, ``c``."""
    num_selected: int = 512
    """Complete blocks that a query attends to, ``k``, beside the one that is not complete."""
    index_heads: int = 4
    """Heads of the indexer's queries."""
    index_dim: int = 128
    """Width of a head of the indexer; even, because RoPE rotates pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_even(self, "index_dim")


class QSA(Indexed):
    """Short blocks ranked by pooled keys (Qwen3.8-Flash-Next)."""

    pattern = QSAPattern
    layer_class = "qsa:QSAttention"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        block, chosen = model.pattern.block, model.pattern.num_selected
        return sum(min(chosen, (t + 1) // block) * block + (t + 1) % block for t in range(seq_len))

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before

        p = model.pattern
        indexer = model.dim * (p.index_heads + 1) * p.index_dim
        complete = blocks_before(p.block, seq_len + 1) / seq_len  # at each token those that end with it, too
        return [*super().multiplies(model, seq_len), indexer, complete * p.index_heads * p.index_dim]


@dataclass(frozen=True)
class HCAPattern(Pattern):
    """Sizes of HCA in DeepSeek-V4-Flash, beside its 64 heads of head_dim = 512 and rope_theta = 160,000."""

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
        super().__post_init__()
        _require_even(self, "rope_dim")


@dataclass(frozen=True)
class CSAPattern(HCAPattern):
    """Sizes of CSA in DeepSeek-V4-Flash, beside its 64 heads of head_dim = 512 and rope_theta = 160,000."""

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
        _require_room_in_index(self)


class HCA(ZooVariant):
    """A window and all entries, each of many tokens (arXiv 2606.19348)."""

    shown_sizes: ClassVar = {"w": "window"}
    pattern: ClassVar[type[Pattern]] = HCAPattern
    layer_class = "deepseek_v4:HCAttention"

    def mistake(self, model: NSAConfig) -> str | None:
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

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.models.flops import blocks_before
        from nsa_compile.ops.flops import window_pairs

        # A token sees the block that ends with it, too.
        return window_pairs(seq_len, seq_len, model.pattern.window) + blocks_before(model.pattern.block, seq_len + 1)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        """Multiplies a token of queries, the key, the compressor without its gates' sum, and the output."""
        p, width = model.pattern, model.n_heads * model.head_dim
        halves = 2 if isinstance(p, CSAPattern) else 1
        queries = p.q_rank * (model.dim + width)
        out = width * p.out_rank + p.out_groups * p.out_rank * model.dim
        return [queries, model.dim * model.head_dim, 2 * halves * model.dim * model.head_dim, out]


class CSA(Indexed, HCA):
    """A window and the entries of few tokens that an indexer chooses (arXiv 2606.19348)."""

    pattern = CSAPattern
    shown_sizes: ClassVar = {"k": "num_selected", "w": "window"}
    selects = "entries"
    layer_class = "deepseek_v4:CSAttention"

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
        return [*super().multiplies(model, seq_len), indexer, complete * p.index_heads * (p.index_dim + 1)]

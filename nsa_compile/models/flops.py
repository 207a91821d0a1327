"""How much arithmetic a training step has to do: matrix-multiplication FLOPs in closed form.

Only useful work is counted: the keys the pattern lets a query see, not the ones a dense kernel would compute and mask.
Model FLOPs utilisation (MFU) is this number times tokens per second, divided by the machine's matmul rate.
"""

from __future__ import annotations

from nsa_compile.models.config import NSAConfig, SparsePattern
from nsa_compile.ops.flops import compressed_pairs, selected_pairs, window_pairs


def compressed_blocks(pattern: SparsePattern, seq_len: int) -> int:
    """Compressed blocks that a sequence completes."""
    return max(0, (seq_len - pattern.compress_block) // pattern.compress_stride + 1)


def visible_compressed(pattern: SparsePattern, seq_len: int) -> int:
    """Query-key pairs of the compressed branch: blocks ``j`` with ``j·d + l − 1 ≤ t``, summed over ``t < seq_len``."""
    blocks = compressed_blocks(pattern, seq_len)
    return compressed_pairs(seq_len, blocks, pattern.compress_block, pattern.compress_stride)


def visible_selected(pattern: SparsePattern, seq_len: int) -> int:
    """Query-key pairs of the selected branch: ``n`` blocks, the query's own only up to itself, summed over ``t``."""
    return selected_pairs(seq_len, seq_len, pattern.num_selected, pattern.select_block)


def visible_window(pattern: SparsePattern, seq_len: int) -> int:
    """Query-key pairs of the sliding window: ``min(t + 1, w)`` summed over ``t < seq_len``."""
    return window_pairs(seq_len, seq_len, pattern.window)


def blocks_before(block: int, seq_len: int) -> int:
    """Blocks of ``block`` tokens that end before the one that the query lies in, summed over ``t < seq_len``."""
    full, rest = divmod(seq_len, block)
    return block * full * (full - 1) // 2 + full * rest


def projections(config: NSAConfig, kv_sets: int) -> int:
    """Multiplies a token of the projections of a layer: queries, ``kv_sets`` of keys and values, output."""
    heads, groups, key_dim, value_dim = config.n_heads, config.n_kv_heads, config.head_dim, config.value_dim
    return config.dim * (heads * key_dim + kv_sets * groups * (key_dim + value_dim) + heads * value_dim)


def forward_flops_per_token(config: NSAConfig, seq_len: int) -> float:
    """Forward matmul FLOPs per token, averaged over a sequence; a multiply and an add count as two."""
    swiglu = 3 * config.dim * config.hidden_dim
    multiplies: float = config.dim * config.vocab_size + config.n_layers * swiglu
    for layer in config.layers():
        pairs = layer.variant.pairs(layer, seq_len) / seq_len
        multiplies += sum(layer.variant.multiplies(layer, seq_len))
        multiplies += pairs * layer.n_heads * (layer.head_dim + layer.value_dim)
    return 2.0 * multiplies


def training_flops_per_token(config: NSAConfig, seq_len: int) -> float:
    """Forward and backward matmul FLOPs per token: the backward pass does twice the work of the forward pass."""
    return 3.0 * forward_flops_per_token(config, seq_len)

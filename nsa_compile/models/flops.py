"""How much arithmetic a training step has to do: matrix-multiplication FLOPs in closed form.

Only useful work is counted: the keys the pattern lets a query see, not the ones a dense kernel would compute and mask.
Model FLOPs utilisation (MFU) is this number times tokens per second, divided by the machine's matmul rate.
"""

from __future__ import annotations

from nsa_compile.models.config import NSAConfig, SparsePattern
from nsa_compile.ops.flops import causal_pairs, compressed_pairs, selected_pairs, window_pairs


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


def attention_pairs(config: NSAConfig, seq_len: int) -> int:
    """Query-key pairs one head of one layer works on in a sequence of ``seq_len`` tokens."""
    if config.attention == "dense":
        return causal_pairs(seq_len, seq_len)
    visible = {"compressed": visible_compressed, "selected": visible_selected, "window": visible_window}
    return sum(visible[branch](config.pattern, seq_len) for branch in config.branches)


def forward_flops_per_token(config: NSAConfig, seq_len: int) -> float:
    """Forward matmul FLOPs per token, averaged over a sequence; a multiply and an add count as two."""
    dim, heads, groups = config.dim, config.n_heads, config.n_kv_heads
    key_dim, value_dim = config.head_dim, config.value_dim
    sparse = config.attention == "nsa"
    kv_sets = len(config.branches) if sparse and not config.shared_kv else 1

    multiplies: float = dim * heads * key_dim  # query projection
    multiplies += kv_sets * dim * groups * (key_dim + value_dim)
    multiplies += heads * value_dim * dim  # output projection
    multiplies += 3 * dim * config.hidden_dim  # SwiGLU
    if sparse:
        multiplies += dim * heads * len(config.branches)  # gates
        if config.phi == "mlp" and "compressed" in config.branches:
            blocks_per_token = compressed_blocks(config.pattern, seq_len) / seq_len
            multiplies += blocks_per_token * groups * (_phi(config, key_dim) + _phi(config, value_dim))
    multiplies += attention_pairs(config, seq_len) / seq_len * heads * (key_dim + value_dim)
    return 2.0 * (config.n_layers * multiplies + dim * config.vocab_size)


def _phi(config: NSAConfig, width: int) -> int:
    """Multiplies of the compression MLP for one block of keys or values, ``[l, width] -> [width]``."""
    hidden = config.phi_hidden or 2 * width
    return (config.pattern.compress_block + 1) * width * hidden


def training_flops_per_token(config: NSAConfig, seq_len: int) -> float:
    """Forward and backward matmul FLOPs per token: the backward pass does twice the work of the forward pass."""
    return 3.0 * forward_flops_per_token(config, seq_len)

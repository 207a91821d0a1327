"""Arithmetic of the attention operators for `torch.utils.flop_counter`: only keys that a query sees are counted."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "attention_backward_flops",
    "attention_flops",
    "causal_pairs",
    "compressed_pairs",
    "selected_pairs",
    "window_pairs",
]


def attention_flops(q_shape: Sequence[int], v_shape: Sequence[int], pairs: int) -> int:
    """Scores and output for `pairs` query-key pairs a head; a multiply and an add count as two."""
    batch, _, heads, dim = q_shape
    return 2 * batch * heads * pairs * (dim + v_shape[-1])


def attention_backward_flops(q_shape: Sequence[int], v_shape: Sequence[int], pairs: int) -> int:
    """The scores again, dq and dk (D wide), dp and dv (Dv wide): five products, as torch counts its own attention."""
    batch, _, heads, dim = q_shape
    return 2 * batch * heads * pairs * (3 * dim + 2 * v_shape[-1])


def causal_pairs(queries: int, keys: int) -> int:
    """`min(s + 1, keys)` summed over `0 <= s < queries`."""
    queries = max(0, queries)
    ramp = min(queries, keys)
    return ramp * (ramp + 1) // 2 + (queries - ramp) * keys


def window_pairs(queries: int, keys: int, window: int) -> int:
    return causal_pairs(queries, keys) - causal_pairs(queries - window, keys)


def compressed_pairs(queries: int, blocks: int, block_size: int, stride: int) -> int:
    """Block j is seen by the queries from `j * stride + block_size - 1` on."""
    first = queries - block_size + 1  # the queries that see block 0
    seen = min(blocks, -(-first // stride)) if first > 0 else 0
    return seen * first - stride * seen * (seen - 1) // 2


def selected_pairs(queries: int, keys: int, num_blocks: int, block_size: int) -> int:
    """As if every query chose `num_blocks` blocks, its own among them, of those that begin no later than itself."""
    if num_blocks == 0:
        return 0
    dense = min(queries, num_blocks * block_size)  # up to here there are not more blocks than chosen ones
    full, rest = divmod(queries - dense, block_size)
    own = full * causal_pairs(block_size, block_size) + causal_pairs(rest, rest)
    others = (queries - dense) * (num_blocks - 1) * block_size
    return min(causal_pairs(dense, dense) + others + own, causal_pairs(queries, keys))

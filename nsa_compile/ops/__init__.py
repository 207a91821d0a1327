"""The three branches of Native Sparse Attention as operators (arXiv 2502.11089, section 3.3).

Layout `[B, S, H, D]`: query head `g * h + i` belongs to key/value head `g`, and query s stands at position s. All of
them are differentiable once, can be vmapped and compiled, and use memory linear in S. They run in C++ on the CPU and in
Triton on CUDA; where these cannot be used, a slower implementation in plain torch takes over with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nsa_compile.ops.checks import default_scale
from nsa_compile.ops.compressed import compressed_attention as _compressed_attention
from nsa_compile.ops.dispatch import force_implementation
from nsa_compile.ops.selected import selected_attention as _selected_attention
from nsa_compile.ops.window import window_attention as _window_attention

__all__ = ["compressed_attention", "force_implementation", "selected_attention", "window_attention"]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Each query attends to the last `window` keys up to its own position.

    Args:
        q: `[B, S, Hq, D]`.
        k: `[B, T, G, D]`; v: `[B, T, G, Dv]`.
        window: keys a query sees, its own position included; S or more means plain causal attention.
        scale: factor of the scores, `1 / sqrt(D)` by default.

    Returns:
        The output `[B, S, Hq, Dv]` and the log-sum-exp of the scores `[B, S, Hq]`; both carry gradients. A query that
        sees no key has an output of 0 and a log-sum-exp of -inf.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or a window below 1.
    """
    return _window_attention(q, k, v, window, default_scale(q, scale))


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    stride: int,
    scale: float | None = None,
    select_block: int = 1,
    offsets: Sequence[int] = (),
    weights: Sequence[int] = (),
    num_selected: int = 0,
    num_initial: int = 0,
    num_local: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over compressed blocks (eq. 8), and the selection blocks that its weights choose (eq. 9-12).

    Query s sees the compressed blocks j that end no later than itself, `j * stride + block_size - 1 <= s`. With p the
    softmax weights summed over the heads of a group, selection block b has the score
    `sum_k weights[k] * p[b * (select_block // stride) + offsets[k]]`.

    Args:
        q: `[B, S, Hq, D]`.
        k: `[B, N, G, D]`; v: `[B, N, G, Dv]`: compressed keys and values.
        block_size: tokens of a compressed block; stride: tokens between the starts of neighbouring ones.
        scale: factor of the scores, `1 / sqrt(D)` by default.
        select_block: tokens of a selection block, a multiple of `stride`.
        offsets, weights: the compressed blocks that count for a selection block; offsets ascend.
        num_selected: blocks a query gets, 0 for no selection.
        num_initial, num_local: blocks at the start, and up to the query's own, that are always taken; they count
            towards `num_selected`.

    Returns:
        The output `[B, S, Hq, Dv]`, the log-sum-exp `[B, S, Hq]` and the indices `[B, S, G, num_selected]`, int32: the
        forced blocks, ascending, then the others, best first and ties to the lower index, then -1. Output
        and log-sum-exp carry gradients.

    Raises:
        ValueError: arguments that do not fit together, naming the argument, its value and the rule.
    """
    return _compressed_attention(
        q, k, v, block_size, stride, default_scale(q, scale), select_block, list(offsets), list(weights), num_selected,
        num_initial, num_local,
    )  # fmt: skip


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block_size: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Each query attends to the keys of its chosen blocks, up to its own position.

    Args:
        q: `[B, S, Hq, D]`.
        k: `[B, T, G, D]`; v: `[B, T, G, Dv]`.
        indices: `[B, S, G, n]`, int32 or int64: a set of blocks for each query and group. Duplicates count once;
            negative ones and ones beyond the keys stand for nothing.
        block_size: keys of a block.
        scale: factor of the scores, `1 / sqrt(D)` by default.

    Returns:
        The output `[B, S, Hq, Dv]` and the log-sum-exp `[B, S, Hq]`; both carry gradients.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or a block size below 1.
    """
    return _selected_attention(q, k, v, indices, block_size, default_scale(q, scale))

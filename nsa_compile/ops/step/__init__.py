"""`nsa_compile::step_attention`: attention of one query of each sequence to rows of a cache, and the blocks that its
weights choose (arXiv 2502.11089, eq. 8 to 12). What generates a token runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops import checks, cpp, flops
from nsa_compile.ops.dispatch import Kernel, choose_kernel, register_kernel

__all__ = ["step_attention"]


# Not `custom_op`: what surrounds an operator of that takes as long as the kernel does for a short context.
_library = torch.library.Library("nsa_compile", "FRAGMENT")
_library.define(
    "step_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? indices, Tensor? allowed, Tensor? forced,"
    " int block_size, float scale, int ratio, int[] offsets, int[] weights, int num_selected)"
    " -> (Tensor out, Tensor chosen)"
)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, indices: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    return choose_kernel("step", q).forward(q, k, v, mask, indices, *others)


_library.impl("step_attention", _compute, "CompositeExplicitAutograd")


def step_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    indices: Tensor | None,
    allowed: Tensor | None,
    forced: Tensor | None,
    block_size: int,
    scale: float,
    ratio: int,
    offsets: Sequence[int],
    weights: Sequence[int],
    num_selected: int,
) -> tuple[Tensor, Tensor]:
    """Attention of one query a sequence, without a gradient.

    Args:
        q: `[B, 1, Hq, D]`; heads `g * h … (g + 1) * h - 1` read group g.
        k: `[B, T, G, D]`, of any strides, as v; v: `[B, T, G, Dv]`.
        mask: booleans that broadcast to `[B, G, h, T]`, with indices to `[B, G, h, n * block_size]`: the rows that each
            head keeps. None: all.
        indices: int32 or int64 `[B, G, n]`: only rows of these blocks of `block_size` rows are read, none of which may
            come twice. Negative ones and ones beyond the rows stand for nothing. None: all.
        allowed, forced: booleans that broadcast to `[B, G, blocks]`, of the blocks to choose from.
        block_size: rows of a block that `indices` count.
        scale: factor of the scores.
        ratio, offsets, weights: with p the weights of the rows, summed over the heads of a group, block b has the score
            `Σ weights[i] · p[b · ratio + offsets[i]]`, in the order of the offsets.
        num_selected: blocks to choose: those allowed and forced, ascending, then the best of those allowed, ties to the
            lower index, then -1. 0: none; then `allowed` and `forced` are not read.

    Returns:
        The output `[B, 1, Hq, Dv]`, zeros where nothing is kept, and the chosen blocks, int32 `[B, G, num_selected]`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    _check(q, k, v, mask, indices, allowed, forced, block_size, num_selected)
    chosen = (ratio, list(offsets), list(weights), num_selected)
    return torch.ops.nsa_compile.step_attention(q, k, v, mask, indices, allowed, forced, block_size, scale, *chosen)


@torch.library.register_fake("nsa_compile::step_attention", lib=_library)
def _(q, k, v, mask, indices, allowed, forced, block_size, scale, ratio, offsets, weights, num_selected):
    _check(q, k, v, mask, indices, allowed, forced, block_size, num_selected)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(q.shape[0], k.shape[2], num_selected, dtype=torch.int32)


@register_flop_formula(torch.ops.nsa_compile.step_attention)
def _flops(
    q: Any, k: Any, v: Any, mask: Any, indices: Any, allowed: Any, forced: Any, block_size: int, *rest: Any,
    out_shape: Any = None,
) -> int:  # fmt: skip
    return flops.attention_flops(q, v, k[1] if indices is None else min(k[1], indices[2] * block_size))


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, indices: Tensor | None, allowed: Tensor | None,
    forced: Tensor | None, block_size: int, num_selected: int,
) -> None:  # fmt: skip
    checks.check_attention(q, k, v)
    checks.check_minimum("block_size", block_size, 1)
    if q.shape[1] != 1:
        raise ValueError(f"q has {q.shape[1]} queries a sequence; it must have 1")
    groups, heads = k.shape[2], q.shape[2] // k.shape[2]
    if mask is not None:
        places = k.shape[1] if indices is None else indices.shape[-1] * block_size
        _check_booleans("mask", mask, (q.shape[0], groups, heads, places))
    if indices is not None:
        checks.check_indices(q, k, indices[:, None])
    if num_selected:
        if allowed is None or forced is None:
            raise ValueError("allowed and forced must be given to choose blocks")
        for name, x in (("allowed", allowed), ("forced", forced)):
            _check_booleans(name, x, (q.shape[0], groups, allowed.shape[-1]))


def _check_booleans(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    fits = x.dim() == len(shape) and all(size in (1, wanted) for size, wanted in zip(x.shape, shape, strict=True))
    if x.dtype != torch.bool or not fits:
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; it must be torch.bool and broadcast to {list(shape)}")


cpp.register_step_kernel("step")
register_kernel(Kernel("step", "portable", "portable torch", partial(import_module, f"{__name__}.portable")))

"""Attention to scores of a program on the CPU: a kernel is written, compiled and kept for each program.

What it is made for are the types of the tensors that scores read, too, and which of their dimensions they have.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.scored import portable
from nsa_compile.ops.scored.source import Bounds, LeafType, bounds_of_integers, generate
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["backward", "forward", "places", "prepare"]

logger = logging.getLogger("nsa_compile")

# Vectors of integers are as long as those of numbers, and quotients of integers are computed in floating point.
_LARGEST = {torch.float32: 2**30, torch.float64: 2**50}


def prepare() -> None:
    cpp.check_compiler()
    cpp.check_vectors()


def forward(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str, tiles: Tensor | None,
    *, softmax: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    leaves = [_readable(x) for x in leaves]
    if not _fits(program, None, leaves, v):
        return portable.forward(q, k, v, leaves, program, tiles, softmax=softmax)
    shape = q[0].shape[:3]
    out = cpp.empty(v, *shape, v.shape[2])
    sums = [cpp.empty(v, *shape, dtype=compute_dtype(v)) for _ in range(2)] if softmax else []
    unit = cpp.uses_matrix_unit(v.dtype)
    library = _library("forward", program, None, _types(leaves, v), len(q), (), v.dtype, unit, softmax)
    tensors = (*q, *_with_heads(k, v), *_expanded(leaves, q, v), _used(tiles), out, *(sums or (None, None)))
    cpp.call("scored", "forward", _sizes(q, v), tensors, [x.shape[3] for x in q], library=library)
    return out, *sums


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor,
    leaves: Sequence[Tensor], out: Tensor | None, lse: Tensor | None, program: str, derivatives: str,
    tiles: Tensor | None, wanted: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    asked = [leaves[i] for i in wanted]
    leaves = [_readable(x) for x in leaves]
    if not _fits(program, derivatives, leaves, v):
        return portable.backward(
            grad_out, grad_lse, q, k, v, leaves, out, lse, program, derivatives, tiles, wanted
        )  # fmt: skip
    dq = [cpp.empty(x, *x.shape) for x in q]
    dk, dv = [x.new_zeros(x.shape) for x in k], v.new_zeros(v.shape)
    sums = [x.new_zeros(x.shape, dtype=compute_dtype(v)) for x in asked]
    targets = zip(sums, _expanded(sums, q, v), strict=True)
    unit = cpp.uses_matrix_unit(v.dtype)
    softmax = lse is not None
    library = _library(
        "backward", program, derivatives, _types(leaves, v), len(q), tuple(wanted), v.dtype, unit, softmax
    )
    tensors = (
        grad_out, grad_lse, *q, *_with_heads(k, v), *_expanded(leaves, q, v), _used(tiles), out, lse, *dq,
        *_with_heads(dk, dv), *(x if isinstance(y, cpp.View) else y for x, y in targets),
    )  # fmt: skip
    shapes = [size for x in sums for size in x.shape]
    cpp.call("scored", "backward", _sizes(q, v), tensors, [x.shape[3] for x in q], shapes, library=library)
    return [*dq, *dk, dv, *(total.to(x.dtype) for total, x in zip(sums, asked, strict=True))]


def places(
    q: Sequence[Tensor], k: Sequence[Tensor], leaves: Sequence[Tensor], program: str, tiles: Tensor | None, count: int
) -> Tensor:
    leaves = [_readable(x) for x in leaves]
    if not _fits(program, None, leaves, k[0]):
        return portable.places(q, k, leaves, program, tiles, count)
    n, s, m, width = q[0].shape
    found = cpp.empty(k[0], n, s, count, dtype=torch.int64)
    unit = cpp.uses_matrix_unit(k[0].dtype)
    library = _library("places", program, None, _types(leaves, k[0]), len(q), (), k[0].dtype, unit, softmax=True)
    tensors = (*q, *(x.unsqueeze(2) for x in k), *_expanded(leaves, q, k[0]), _used(tiles), found)
    sizes = cpp.Sizes(n, s, k[0].shape[1], m, 1, width, count)
    cpp.call("scored", "forward", sizes, tensors, [x.shape[3] for x in q], library=library)
    return found


@cache
def _library(
    part: str,
    program: str,
    derivatives: str | None,
    leaves: tuple[LeafType, ...],
    products: int,
    wanted: tuple[int, ...],
    dtype: torch.dtype,
    matrix_unit: bool,
    softmax: bool,
) -> ctypes.CDLL:
    engine = "Vectors<double>" if dtype == torch.float64 else "Amx" if matrix_unit else "Vectors<float>"
    text = generate(program, derivatives, leaves, products, wanted, softmax=softmax)
    return cpp.load_generated("scored", part, f"using Engine = {engine};\n\n{text}")


def _readable(x: Tensor) -> Tensor:
    """A tensor of a dtype that the kernels read."""
    return x if x.dtype.is_floating_point or x.dtype in (torch.bool, torch.int64) else x.long()


def _types(leaves: Sequence[Tensor], v: Tensor) -> tuple[LeafType, ...]:
    return tuple(
        LeafType(x.dtype, by_row=_by_distance(x, v) or x.shape[1] > 1 or x.shape[2] > 1, by_key=x.shape[3] > 1)
        for x in leaves
    )


def _by_distance(leaf: Tensor, v: Tensor) -> bool:
    return leaf.shape[3] not in (1, v.shape[1])


def _fits(program: str, derivatives: str | None, leaves: Sequence[Tensor], v: Tensor) -> bool:
    """Whether the kernels' integers hold all of the program's."""
    bounds: list[Bounds | None] = []
    for x in leaves:
        integer = not x.dtype.is_floating_point and x.dtype != torch.bool
        least, most = x.aminmax() if integer and x.numel() else (0, 0)
        bounds.append((int(least), int(most)) if integer else None)
    found = _bounds(program, derivatives, _types(leaves, v), tuple(bounds))
    if found is None or max(map(abs, found)) > _LARGEST[compute_dtype(v)]:
        _warn(program)
        return False
    return True


_bounds = cache(bounds_of_integers)


@cache
def _warn(program: str) -> None:
    logger.warning(
        "scored attention uses the slow portable implementation: the integers of its scores may be too large for the "
        "C++ kernels. They are computed by\n%s",
        program,
    )


def _sizes(q: Sequence[Tensor], v: Tensor) -> cpp.Sizes:
    n, s, m, width = q[0].shape
    return cpp.Sizes(n, s, v.shape[1], m, 1, width, v.shape[2])


def _with_heads(k: Sequence[Tensor], v: Tensor) -> list[Tensor]:
    return [x.unsqueeze(2) for x in (*k, v)]


def _expanded(leaves: Sequence[Tensor], q: Sequence[Tensor], v: Tensor) -> list[Tensor | cpp.View]:
    """With strides of 0 along the dimensions that they lack; a step from query to query goes back in distances."""
    n, s, m, _ = q[0].shape
    expanded: list[Tensor | cpp.View] = []
    for x in leaves:
        if _by_distance(x, v):
            of_sequence, _, of_head, of_key = x.expand(n, 1, m, -1).stride()
            expanded.append(cpp.View(x, (s - 1) * of_key, (of_sequence, -of_key, of_head, of_key)))
        else:
            expanded.append(x.expand(n, s, m, v.shape[1]))
    return expanded


def _used(tiles: Tensor | None) -> Tensor | None:
    return None if tiles is None else tiles.bool()

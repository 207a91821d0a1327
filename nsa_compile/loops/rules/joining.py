"""Rules for what joins tensors and parts them: cat, stack, split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nsa_compile.loops.body import Axis, Body, Val
from nsa_compile.loops.rules import aten, place_of, rule, with_dim
from nsa_compile.loops.rules.movement import select, slice_rows


@rule(aten.cat.default)
def _cat(body: Body, a: Any) -> Val:
    parts: list[Val] = [x for x in a.tensors if not (len(x.dims) == 1 and x.dims[0] == 0)]
    rank = len(parts[0].dims)
    dim = place_of(a.dim, rank)
    parts = [p for p in parts if p.dims[dim] != 0] or parts[:1]
    parts = _alike(body, parts, dim)
    if all(isinstance(p.dims[dim], int) for p in parts):
        size = sum(d for p in parts if isinstance(d := p.dims[dim], int))
        return Val(body.emit(aten.cat.default, [p.node for p in parts], dim), with_dim(parts[0].dims, dim, size))
    while len(parts) > 1 and _is_filler(body, parts, dim):
        parts[:2] = [_extended(body, parts[0], parts[1], dim)]
    if len(parts) == 1:
        return parts[0]
    first = parts[0].dims[dim]
    counted = all(isinstance(d := p.dims[dim], int) or body.constant_count(d) is not None for p in parts[1:])
    if isinstance(first, Axis) and first.root is not None and len(first.segments) == 1 and counted:
        whole, *new = parts
        if all(isinstance(p.dims[dim], int) for p in new):  # in one write
            new = [_cat(body, SimpleNamespace(tensors=new, dim=dim))]
        for part in new:
            whole = _appended(body, whole, part, dim)
        return whole
    # pyrefly: ignore[missing-attribute]
    segments = tuple(s for p in parts for s in body._as_axis(p, dim).dims[dim].segments)
    fixed = [dim not in p.zero and isinstance(p.dims[dim], Axis) for p in parts]
    zero = frozenset() if any(fixed) else frozenset({dim})
    node = body.emit(aten.cat.default, [p.node for p in parts], dim)
    return Val(node, with_dim(parts[0].dims, dim, Axis(segments)), zero)


def _is_filler(body: Body, parts: list[Val], dim: int) -> bool:
    """Whether the second part is rows of one number, of which there are more or fewer at other steps."""
    first, second = parts[0].dims[dim], parts[1].dims[dim]
    is_one_number = parts[1].node.target is torch.full and isinstance(parts[1].node.args[1], int | float)
    return isinstance(second, Axis) and isinstance(first, Axis) and len(first.segments) == 1 and is_one_number


def _extended(body: Body, value: Val, filler: Val, dim: int) -> Val:
    """Rows with others of one number behind them: that number in rows that do not exist, of which some then do."""
    axis = value.dims[dim]
    assert isinstance(axis, Axis)
    stop = axis.only.stop + body.count_of(filler.dims[dim])
    longer = Axis.of(max(axis.size, int(stop[body.at].max())), axis.only.start, axis.only.stop)
    number: Any = filler.node.args[1]
    filled = body.filled(body.padded(value, dim, longer), dim, number)
    return Val(filled.node, with_dim(value.dims, dim, Axis.of(longer.size, axis.only.start, stop)), filled.zero)


def _appended(body: Body, whole: Val, part: Val, dim: int) -> Val:
    """Rows written behind those that exist."""
    axis = whole.dims[dim]
    assert isinstance(axis, Axis)
    if isinstance(part.dims[dim], Axis):
        part = body.fixed(part, dim)
    count = part.dims[dim]
    assert isinstance(count, int)
    segment = axis.only
    needed = int(np.where(body.at, segment.stop + count, 0).max())
    grown = Axis.of(max(needed, segment.size), segment.start, segment.stop, axis.root)
    whole = body.padded(whole, dim, grown)
    after = Axis.of(grown.size, segment.start, segment.stop + count, axis.root)
    position = np.clip(segment.stop, 0, grown.size - count)
    return Val(body.written(whole.node, dim, position, part.node), with_dim(whole.dims, dim, after))


def _alike(body: Body, parts: list[Val], dim: int) -> list[Val]:
    """Tensors that are joined along one dimension, in one layout along the others."""
    for d in range(len(parts[0].dims)):
        if d != dim:
            parts = aligned(body, parts, d)
    return parts


def aligned(body: Body, parts: list[Val], d: int) -> list[Val]:
    """Values in one layout along a dimension; where all have the same constant size, a fixed one."""
    sizes = [p.dims[d] for p in parts]
    axes = [s for s in sizes if isinstance(s, Axis)]
    if not axes:
        return parts
    if any(isinstance(s, int) and s != 1 for s in sizes):
        return [body.fixed(p, d) for p in parts]
    like = axes[0]
    return [body.moved(p, d, like) if isinstance(p.dims[d], Axis) else p for p in parts]


@rule(aten.stack.default)
def _stack(body: Body, a: Any) -> Val:
    parts = a.tensors
    for d in range(len(parts[0].dims)):
        parts = aligned(body, parts, d)
    dim = a.dim % (len(parts[0].dims) + 1)
    dims = (*parts[0].dims[:dim], len(parts), *parts[0].dims[dim:])
    return Val(body.emit(aten.stack.default, [p.node for p in parts], dim), dims)


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(body: Body, a: Any) -> list[Val]:
    """Slices, one behind the other."""
    dim = place_of(a.dim, len(a.self.dims))
    parts = []
    start = np.zeros(body.length, np.int64)
    for shape in a.shapes:
        stop = start + shape[dim]
        # pyrefly: ignore[bad-keyword-argument]
        parts.append(slice_rows(body, SimpleNamespace(self=a.self, dim=dim, start=start, end=stop, step=1)))
        start = stop
    return parts


@rule(aten.unbind.int)
def _unbind(body: Body, a: Any) -> list[Val]:
    dim = place_of(a.dim, len(a.self.dims))
    # pyrefly: ignore[bad-keyword-argument]
    return [select(body, SimpleNamespace(self=a.self, dim=dim, index=i)) for i in range(len(a.shapes))]

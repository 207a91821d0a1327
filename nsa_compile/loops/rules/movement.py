"""Rules for what moves elements: views, permutations, slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nsa_compile.loops.body import Axis, Body, Dim, Segment, Table, Val
from nsa_compile.loops.rules import aten, dim_of, place_of, rule, sizes_of, with_dim
from nsa_compile.loops.state import NotFollowed


@rule(
    aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.contiguous.default
)
def _copied(body: Body, a: Any) -> Val:
    if a.func is aten.detach.default:
        return Val(body.emit(aten.detach.default, a.self.node), a.self.dims, a.self.zero)
    return a.self


@rule(aten._to_copy.default)
def _to_copy(body: Body, a: Any) -> Val:
    kind = {k: x for k in ("dtype", "device") if (x := getattr(a, k)) is not None}
    return Val(body.emit(aten._to_copy.default, a.self.node, **kind), a.self.dims, a.self.zero, a.self.is_score)


@rule(aten.unsqueeze.default)
def unsqueeze(body: Body, a: Any) -> Val:
    dim = a.dim % (len(a.self.dims) + 1)
    zero = frozenset(z + (z >= dim) for z in a.self.zero)
    dims = (*a.self.dims[:dim], 1, *a.self.dims[dim:])
    return Val(body.emit(aten.unsqueeze.default, a.self.node, dim), dims, zero, a.self.is_score)


@rule(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
def _squeeze(body: Body, a: Any) -> Val:
    value, rank = a.self, len(a.self.dims)
    asked = getattr(a, "dim", None)
    wanted = range(rank) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = []
    for dim in sorted({d % rank for d in wanted}, reverse=True):
        if isinstance(value.dims[dim], Axis) and len(a.shapes[0]) < rank and body.constant_count(value.dims[dim]) == 1:
            value = body.fixed(value, dim)
        if value.dims[dim] == 1:
            gone.append(dim)
    stays = [value.dims[d] for d in {d % rank for d in wanted} if d not in gone]
    # A trace takes it that a size which changes is not 1.
    if len(a.shapes[0]) != rank - len(gone) or any((body.count_of(dim)[body.at] == 1).any() for dim in stays):
        raise NotFollowed("drops a dimension that grows, at the steps at which it has one row")
    return _permuted(body, value, [d for d in range(rank) if d not in gone], squeeze=gone)


def _permuted(body: Body, value: Val, order: list[int], squeeze: Sequence[int] = ()) -> Val:
    node = value.node
    if squeeze:
        node = body.emit(aten.squeeze.dims, node, list(squeeze))
    elif order != list(range(len(order))):
        node = body.emit(aten.permute.default, node, order)
    zero = frozenset(i for i, d in enumerate(order) if d in value.zero)
    return Val(node, tuple(value.dims[d] for d in order), zero, value.is_score)


@rule(aten.permute.default)
def _permute(body: Body, a: Any) -> Val:
    if not all(isinstance(d, int) for d in a.dims):  # einsum leaves out dimensions of size 1, at the first step perhaps
        raise NotFollowed("puts dimensions in another order at some steps than at others")
    return _permuted(body, a.self, [d % len(a.self.dims) for d in a.dims])


@rule(aten.transpose.int, aten.t.default)
def _transpose(body: Body, a: Any) -> Val:
    rank = len(a.self.dims)
    order = list(range(rank))
    first, second = (a.dim0 % rank, a.dim1 % rank) if a.func is aten.transpose.int else (0, rank - 1)
    order[first], order[second] = order[second], order[first]
    return _permuted(body, a.self, order)


@rule(aten.expand.default)
def _expand(body: Body, a: Any) -> Val:
    value = a.self
    shape = a.shapes[0]
    missing = len(shape) - len(value.dims)
    dims: list[Dim] = []
    for d, size in enumerate(shape):
        own = value.dims[d - missing] if d >= missing else 1
        dims.append(own if own != 1 else dim_of(body, size))
    zero = frozenset(z + missing for z in value.zero)
    return Val(body.emit(aten.expand.default, value.node, sizes_of(dims)), tuple(dims), zero)


@rule(aten.repeat.default)
def _repeat(body: Body, a: Any) -> Val:
    value, missing = a.self, len(a.repeats) - len(a.self.dims)
    dims: list[Dim] = []
    times: list[int] = []
    for d, n in enumerate(a.repeats):
        own = value.dims[d - missing] if d >= missing else 1
        if own == 1:
            dims.append(dim_of(body, np.broadcast_to(np.asarray(n), (body.length,))))
            times.append(sizes_of(dims[-1:])[0])
        elif isinstance(n, int) and (n == 1 or isinstance(own, int)):
            dims.append(own if isinstance(own, Axis) else own * n)
            times.append(n)
        else:
            raise NotFollowed("repeats a dimension that grows, or does so another number of times at each step")
    zero = frozenset(z + missing for z in value.zero)
    return Val(body.emit(aten.repeat.default, value.node, times), tuple(dims), zero)


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(body: Body, a: Any) -> Val:
    def viewed(value: Val) -> Val:
        dims = _regrouped(body, list(value.dims), a.shapes[0])
        return Val(body.emit(aten.reshape.default, value.node, sizes_of(dims)), tuple(dims), is_score=value.is_score)

    try:
        return viewed(a.self)
    except NotFollowed:
        value = a.self
        for d, dim in enumerate(value.dims):
            if isinstance(dim, Axis):
                value = _trimmed(body, value, d) if body.constant_count(dim) is None else body.fixed(value, d)
        return viewed(value)


def _trimmed(body: Body, value: Val, dim: int) -> Val:
    """Without the rows of the buffer that exist at no step."""
    axis = value.dims[dim]
    assert isinstance(axis, Axis)
    last = int(axis.only.stop[body.at].max())
    node = body.emit(aten.slice.Tensor, value.node, dim, 0, last)
    return Val(
        node, with_dim(value.dims, dim, Axis.of(last, axis.only.start, axis.only.stop)), value.zero, value.is_score
    )


def _regrouped(body: Body, dims: list[Dim], shape: list[Table]) -> list[Dim]:
    """The dimensions of a view: groups of old ones that become groups of new ones of the same number of elements."""
    at = body.at
    found: list[Dim] = []
    i = j = 0
    while i < len(dims) or j < len(shape):
        old, new = dims[i : i + 1], shape[j : j + 1]
        i, j = i + 1, j + 1
        a = body.count_of(old[0])[at].copy() if old else np.ones(at.sum(), np.int64)
        b = new[0][at].copy() if new else np.ones(at.sum(), np.int64)
        while (a != b).any():
            if ((a < b).any() and i < len(dims)) or (j >= len(shape) and i < len(dims)):
                a *= body.count_of(dims[i])[at]
                old.append(dims[i])
                i += 1
            elif j < len(shape):
                b *= shape[j][at]
                new.append(shape[j])
                j += 1
            else:
                raise NotFollowed("joins or parts dimensions that grow")
        found += _group(body, old, new)
    return found


def _group(body: Body, old: list[Dim], new: list[Table]) -> list[Dim]:
    if len(old) == len(new) == 1:
        return old
    at = body.at
    fixed = [(int(n[at][0]) if len(n[at]) and (n[at] == n[at][0]).all() else None) for n in new]
    axes = [d for d in old if isinstance(d, Axis)]
    if not axes:
        if None in fixed:
            raise NotFollowed("parts a dimension by a size that changes from step to step")
        return [f for f in fixed if f is not None]
    if len(axes) > 1:
        raise NotFollowed("joins dimensions that grow")
    (axis,) = axes
    before = math.prod(d for d in old[: old.index(axis)] if isinstance(d, int))
    behind = math.prod(d for d in old[old.index(axis) + 1 :] if isinstance(d, int))
    joined = axis
    if behind != 1:
        joined = Axis(tuple(Segment(s.size * behind, s.start * behind, s.stop * behind) for s in axis.segments))
    if before != 1:
        joined = Axis(joined.segments * before)
    # Which of the new dimensions grows, and what the others are
    result: list[Dim] = []
    rest: Axis | None = joined
    for k, size in enumerate(fixed):
        behind_new = 1
        for f in fixed[k + 1 :]:
            behind_new = behind_new * f if f is not None else 0
        if size == 1:
            result.append(1)
        elif size and rest is not None and len(rest.segments) % size == 0 and len(rest.segments) > 1:
            rest = Axis(rest.segments[: len(rest.segments) // size], rest.root)
            result.append(size)
        elif rest is not None and (size is None or behind_new == 1) and behind_new:
            result.append(_parted(rest, behind_new))
            rest = None
        elif rest is None and size is not None:
            result.append(size)
        else:
            raise NotFollowed("joins or parts dimensions that grow")
    if math.prod(sizes_of(result)) != math.prod(sizes_of(old)) or (rest is not None):
        raise NotFollowed("joins or parts dimensions that grow")
    return result


def _parted(axis: Axis, rows: int) -> Axis:
    if rows == 1:
        return axis
    for s in axis.segments:
        if s.size % rows or (s.start % rows).any() or (s.stop % rows).any():
            raise NotFollowed("parts a dimension that grows into rows that it does not consist of")
    return Axis(tuple(Segment(s.size // rows, s.start // rows, s.stop // rows) for s in axis.segments))


@rule(aten.select.int)
def select(body: Body, a: Any) -> Val:
    value, dim = a.self, place_of(a.dim, len(a.self.dims))
    index = np.broadcast_to(np.asarray(a.index), (body.length,))
    axis = value.dims[dim]
    if isinstance(axis, Axis):
        position = _in_buffer(axis, np.where(index < 0, axis.count + index, index))
    else:
        position = np.where(index < 0, axis + index, index)
        number = _outside_number(body, value)
        if number is not None and value.dims == tuple(value.example.shape):
            position = np.clip(position, 0, axis - 1)
            row = body.row_of(number, dim, np.where(body.at, position, position))
            return Val(row, (*value.dims[:dim], *value.dims[dim + 1 :]))
    one = body.taken(value, dim, _held(body, position), 1)
    node = body.emit(aten.squeeze.dim, one.node, dim)
    zero = frozenset(z - (z > dim) for z in value.zero if z != dim)
    return Val(node, (*value.dims[:dim], *value.dims[dim + 1 :]), zero)


def _in_buffer(axis: Axis, row: Table) -> Table:
    """Where in its buffer a row is."""
    position = np.zeros(len(row), np.int64)
    before, size = 0, 0
    for s in axis.segments:
        position = np.where(row >= before, size + s.start + row - before, position)
        before, size = before + s.stop - s.start, size + s.size
    return position


def _held(body: Body, position: Table) -> Table:
    return np.maximum(position, 0)


def _outside_number(body: Body, value: Val) -> int | None:
    return next((number for number, node in body.additional.items() if node is value.node), None)


@rule(aten.slice.Tensor)
def slice_rows(body: Body, a: Any) -> Val:
    value, dim = a.self, place_of(a.dim, len(a.self.dims))
    if not isinstance(a.step, int):
        raise NotFollowed("takes every n-th row, and n changes from step to step")
    own = value.dims[dim]
    count = body.count_of(own)
    start = bound_of(a.start, 0, count)
    stop = np.maximum(bound_of(a.end, count, count), start)
    if not start[body.at].any() and (stop == count)[body.at].all() and a.step == 1:
        return value
    if a.step != 1:
        if isinstance(own, int) and is_constant(body, start) and is_constant(body, stop):
            bounds = int(start[body.at][0]), int(stop[body.at][0])
            size = len(range(*bounds, a.step))
            return Val(body.emit(aten.slice.Tensor, value.node, dim, *bounds, a.step), with_dim(value.dims, dim, size))
        return _every_nth(body, value, dim, start, stop, a.step)
    if isinstance(own, int):
        if is_constant(body, start) and is_constant(body, stop):
            first, last = int(start[body.at][0]), int(stop[body.at][0])
            node = body.emit(aten.slice.Tensor, value.node, dim, first, last)
            return Val(node, with_dim(value.dims, dim, last - first))
        axis = Axis.of(own, start, stop)
        if body.constant_count(axis) == 1:
            if (number := _outside_number(body, value)) is not None:
                row = body.row_of(number, dim, np.clip(start, 0, own - 1))
                return Val(body.emit(aten.unsqueeze.default, row, dim), with_dim(value.dims, dim, 1))
            return body.taken(value, dim, start, 1)
        return Val(value.node, with_dim(value.dims, dim, axis))
    if len(own.segments) > 1:
        return _slice_of_several(body, value, dim, own, start, stop)
    segment = own.only
    axis = Axis.of(segment.size, segment.start + start, segment.start + stop, own.root)
    sliced = Val(value.node, with_dim(value.dims, dim, axis))
    return body.fixed(sliced, dim) if body.constant_count(axis) == 1 else sliced


def _every_nth(body: Body, value: Val, dim: int, start: Table, stop: Table, step: int) -> Val:
    """The rows from `start` on that are `step` apart: those of a buffer of every such row."""
    own = value.dims[dim]
    if isinstance(own, Axis) and len(own.segments) > 1:
        value = body.from_the_first(value, dim)
        own = value.dims[dim]
    before = own.only.start if isinstance(own, Axis) else 0
    first, last, at = before + start, before + stop, body.at & (stop > start)
    phase = int(first[at][0]) % step if at.any() else 0
    if (first[at] % step != phase).any():
        raise NotFollowed("steps over rows, from one on that changes from step to step")
    size = value.example.shape[dim]
    node = body.emit(aten.slice.Tensor, value.node, dim, phase, size, step)
    begin = (first - phase) // step
    end = np.where(stop > start, -((phase - last) // step), begin)
    axis = Axis.of(node.meta["example_value"].shape[dim], begin, end)
    return Val(node, with_dim(value.dims, dim, axis), value.zero)


def _slice_of_several(body: Body, value: Val, dim: int, axis: Axis, start: Table, stop: Table) -> Val:
    """Of segments one behind the other, some of them."""
    edges = np.cumsum([np.zeros(body.length, np.int64), *(s.stop - s.start for s in axis.segments)], axis=0)
    at = body.at
    first = next((i for i, e in enumerate(edges) if (e == start)[at].all()), None)
    last = next((i for i in range(len(edges) - 1, -1, -1) if (edges[i] == stop)[at].all()), None)
    if first is None or last is None or last <= first:
        raise NotFollowed("cuts through rows of several caches, one behind the other")
    sizes = [s.size for s in axis.segments]
    begin, end = sum(sizes[:first]), sum(sizes[:last])
    node = body.emit(aten.slice.Tensor, value.node, dim, begin, end)
    zero = value.zero
    return Val(node, with_dim(value.dims, dim, Axis(axis.segments[first:last])), zero)


def bound_of(value: Any, default: Any, count: Table) -> Table:
    """A bound of a slice at each step, counted from the front."""
    bound = np.asarray(default if value is None else value)
    bound = np.where(bound < 0, bound + count, bound)
    return np.clip(bound, 0, count)


def is_constant(body: Body, table: Table) -> bool:
    """Whether a number is the same at the steps of the operator at hand."""
    here = table[body.at]
    return bool((here == here[0]).all())

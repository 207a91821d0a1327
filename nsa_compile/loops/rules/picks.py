"""Rules for what is picked and placed by an index."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import fx

from nsa_compile.ir.aten import is_inexact
from nsa_compile.loops.body import Axis, Body, Dim, Table, Val
from nsa_compile.loops.rules import aten, call, nodes_of, place_of, rule, with_dim
from nsa_compile.loops.rules.elementwise import broadcast, number_of, pointwise
from nsa_compile.loops.rules.joining import aligned
from nsa_compile.loops.rules.movement import bound_of, unsqueeze
from nsa_compile.loops.rules.row_numbers import range_of, refuse_no_rows
from nsa_compile.loops.state import NotFollowed


def _from_behind(body: Body, index: Val, axis: Dim) -> Val:
    """Numbers of rows, of which some may count from behind the last row that exists."""
    found = range_of(body, index.node)
    if not (index.grows or isinstance(axis, Axis)) or (found is not None and (found[0] >= 0).all()):
        return index
    count = body._tensor(axis.count) if isinstance(axis, Axis) else axis
    behind = body.emit(aten.add.Tensor, index.node, count)
    is_behind = body.emit(aten.lt.Scalar, index.node, 0)
    return Val(body.emit(aten.where.self, is_behind, behind, index.node), index.dims)


def _shifted(body: Body, index: Val, axis: Dim, size: int) -> Val:
    """Numbers of rows that exist as numbers of rows of the buffer; what is no number of a row becomes one."""
    node = index.node
    if index.grows or isinstance(axis, Axis):
        refuse_no_rows(body, index, axis)
    if isinstance(axis, Axis):
        segment = axis.only
        if segment.start.any():
            node = body.emit(aten.add.Tensor, node, body._tensor(segment.start))
    if index.grows or isinstance(axis, Axis):
        node = body.emit(aten.clamp.default, node, 0, size - 1)
    return Val(node, index.dims)


@rule(aten.index_select.default)
def _index_select(body: Body, a: Any) -> Val:
    dim = place_of(a.dim, len(a.self.dims))
    index = _shifted(body, a.index, a.self.dims[dim], a.self.example.shape[dim])
    node = body.emit(aten.index_select.default, a.self.node, dim, index.node)
    zero = frozenset(z for z in a.self.zero if z != dim)
    return Val(node, with_dim(a.self.dims, dim, index.dims[0] if index.dims else 1), zero)


def _in_order(body: Body, value: Val, dim: int, rows: Callable[[fx.Node, fx.Node], fx.Node]) -> Val:
    """Rows in another order: `rows` says which of them stands in each place, of the places and how many rows exist."""
    value = body.from_the_first(value, dim)
    own, size = value.dims[dim], value.example.shape[dim]
    count = body.count_of(own)
    index = rows(body.positions(size, value.example.device), body._tensor(count))
    node = body.emit(aten.index_select.default, value.node, dim, index)
    new = Axis.of(size, 0, count) if isinstance(own, Axis) else own
    return Val(node, with_dim(value.dims, dim, new), value.zero - {dim})


@rule(aten.flip.default)
def _flip(body: Body, a: Any) -> Val:
    """Of rows that grow the last one that exists comes first."""
    value, dims = a.self, [d % len(a.self.dims) for d in a.dims]
    growing = [d for d in dims if isinstance(value.dims[d], Axis)]
    if fixed := [d for d in dims if d not in growing]:
        value = Val(body.emit(aten.flip.default, value.node, fixed), value.dims, value.zero)

    def backwards(place: fx.Node, count: fx.Node) -> fx.Node:
        return body.emit(aten.clamp.default, body.emit(aten.sub.Tensor, count, body.emit(aten.add.Tensor, place, 1)), 0)

    for dim in growing:
        value = _in_order(body, value, dim, backwards)
    return value


@rule(aten.roll.default)
def _roll(body: Body, a: Any) -> Val:
    if not a.dims:
        raise NotFollowed("rolls all elements as one row; name the dimension, as in torch.roll(x, 1, 0)")
    value = a.self
    for shift, dim in zip(a.shifts, (d % len(value.dims) for d in a.dims), strict=True):
        if isinstance(shift, int) and not isinstance(value.dims[dim], Axis):
            value = Val(body.emit(aten.roll.default, value.node, [shift], [dim]), value.dims, value.zero)
            continue
        first = body._tensor(-shift % np.maximum(body.count_of(value.dims[dim]), 1))

        def turned(place: fx.Node, count: fx.Node, first: fx.Node = first) -> fx.Node:
            there = body.emit(aten.clamp.default, count, 1)
            return body.emit(aten.remainder.Tensor, body.emit(aten.add.Tensor, place, first), there)

        value = _in_order(body, value, dim, turned)
    return value


@rule(aten.gather.default)
def _gather(body: Body, a: Any) -> Val:
    value, index = a.self, a.index
    dim = place_of(a.dim, len(value.dims))
    for d in range(len(value.dims)):
        if d != dim:
            value, index = aligned(body, [value, index], d)
    index = _shifted(body, index, value.dims[dim], value.example.shape[dim])
    return Val(body.emit(aten.gather.default, value.node, dim, index.node), index.dims)


@rule(aten.index.Tensor)
def _index(body: Body, a: Any) -> Val:
    value, given = a.self, a.indices
    places = [d for d, i in enumerate(given) if i is not None]
    indices = [given[d] for d in places]
    if any(i.example.dtype in (torch.bool, torch.uint8) for i in indices):
        raise NotFollowed("selects elements by their values")
    if places != list(range(places[0], places[0] + len(places))):
        raise NotFollowed("picks elements by indices that do not stand side by side")
    indices, dims = broadcast(body, indices)
    indices = [_from_behind(body, i, value.dims[d]) for i, d in zip(indices, places, strict=True)]
    shifted = [_shifted(body, i, value.dims[d], value.example.shape[d]) for i, d in zip(indices, places, strict=True)]
    at: list[Any] = [None] * len(given)
    for d, i in zip(places, shifted, strict=True):
        at[d] = i.node
    node = body.emit(aten.index.Tensor, value.node, at)
    return Val(node, (*value.dims[: places[0]], *dims, *value.dims[places[-1] + 1 :]))


@rule(aten.embedding.default)
def _embedding(body: Body, a: Any) -> Val:
    if a.scale_grad_by_freq:
        raise NotFollowed("scales gradients by how often an index occurs, of indices that grow in number")
    index = _shifted(body, a.indices, a.weight.dims[0], a.weight.example.shape[0])
    node = body.emit(aten.embedding.default, a.weight.node, index.node, a.padding_idx)
    return Val(node, (*index.dims, *a.weight.dims[1:]))


@rule(aten.select_scatter.default)
def _select_scatter(body: Body, a: Any) -> Val:
    dim = place_of(a.dim, len(a.self.dims))
    source = unsqueeze(body, SimpleNamespace(self=a.src, dim=dim))  # pyrefly: ignore[bad-keyword-argument]
    index = np.broadcast_to(np.asarray(a.index), (body.length,))
    size = body.count_of(a.self.dims[dim])
    return _written(body, a.self, source, dim, np.where(index < 0, index + size, index))


@rule(aten.slice_scatter.default)
def _slice_scatter(body: Body, a: Any) -> Val:
    dim = place_of(a.dim, len(a.self.dims))
    count = body.count_of(a.self.dims[dim])
    start = bound_of(a.start, 0, count)
    stop = np.maximum(bound_of(a.end, count, count), start)
    if a.step != 1:
        raise NotFollowed("writes to rows that do not lie side by side")
    source = a.src
    if not start[body.at].any() and (stop == count)[body.at].all():
        return source
    axis = Axis.of(int((stop - start)[body.at].max()), 0, stop - start)
    if isinstance(source.dims[dim], Axis) and body.constant_count(axis) is None:
        # Over the same rows of the buffer: each row is the new one or the old one.
        old = body._as_axis(a.self, dim)
        own = old.dims[dim]
        assert isinstance(own, Axis)
        like = Axis.of(own.only.size, own.only.start + start, own.only.start + stop)
        moved = body.moved(source, dim, like)
        mask = body.mask(Val(old.node, with_dim(old.dims, dim, like)), dim)
        assert mask is not None
        return Val(body.emit(aten.where.self, mask, moved.node, old.node), a.self.dims)
    return _written(body, a.self, body.fixed(source, dim), dim, start)


def _written(body: Body, value: Val, source: Val, dim: int, first: Table) -> Val:
    """Rows `first[t] …` of a value replaced."""
    axis = value.dims[dim]
    parts = [value, source]
    for d in range(len(value.dims)):
        if d != dim:
            parts = aligned(body, parts, d)
    value, source = parts
    count = source.dims[dim]
    assert isinstance(count, int)
    begin = first + axis.only.start if isinstance(axis, Axis) else first
    begin = np.clip(begin, 0, value.example.shape[dim] - count)
    if list(source.example.shape[:dim]) + list(source.example.shape[dim + 1 :]) != list(
        value.example.shape[:dim]
    ) + list(value.example.shape[dim + 1 :]):
        raise NotFollowed("writes rows of another shape")
    return Val(body.written(value.node, dim, begin, source.node), value.dims)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _scatter(body: Body, a: Any) -> Val:
    value, index, dim = a.self, a.index, place_of(a.dim, len(a.self.dims))
    new, func = a.src if hasattr(a, "src") else a.value, a.func
    if func is not aten.scatter.value and (index.grows or new.grows):
        raise NotFollowed("writes as many elements as there are rows")
    for d in range(len(value.dims)):
        if d != dim and (isinstance(value.dims[d], Axis) or isinstance(index.dims[d], Axis)):
            raise NotFollowed("writes to elements of a tensor that grows in another dimension")
    if isinstance(index.dims[dim], Axis):
        index = _first_where_none(body, index, dim)
    index = _shifted(body, index, value.dims[dim], value.example.shape[dim])
    if isinstance(new, np.ndarray):
        new = number_of(body, new, value.example.dtype, value.example.device)
        if isinstance(new, fx.Node):
            new, func = body.emit(aten.expand.default, new, list(index.example.shape)), aten.scatter.src
    return Val(body.emit(func, value.node, dim, index.node, nodes_of(new)), value.dims)


def _first_where_none(body: Body, index: Val, dim: int) -> Val:
    """Numbers of rows that grow in number, in the place of those that do not exist the first: one number is written
    there twice."""
    index = body.from_the_first(index, dim)
    axis = index.dims[dim]
    assert isinstance(axis, Axis)
    if (axis.count[body.at] < 1).any():
        raise NotFollowed("writes to no place at some steps")
    mask = body.mask(index, dim)
    if mask is None:
        return index
    first = body.emit(aten.slice.Tensor, index.node, dim, 0, 1)
    return Val(body.emit(aten.where.self, mask, index.node, first), index.dims)


def _where_true(body: Body, a: Any) -> Val:
    """One number in the place of the elements for which a mask is true."""
    if len(a.indices) > 1 or a.values.dims or a.accumulate:
        raise NotFollowed("writes a tensor where a mask is true; write torch.where(mask, y, x)")
    mask = a.indices[0]
    for _ in range(len(a.self.dims) - len(mask.dims)):
        mask = unsqueeze(body, SimpleNamespace(self=mask, dim=-1))  # pyrefly: ignore[bad-keyword-argument]
    return pointwise(body, call(aten.where.self, condition=mask, self=a.values, other=a.self))


@rule(aten.index_put.default)
def _index_put(body: Body, a: Any) -> Val:
    value, given = a.self, a.indices
    if any(i is not None and i.example.dtype in (torch.bool, torch.uint8) for i in given):
        return _where_true(body, a)
    if any(i is not None and i.grows for i in given) or a.values.grows:
        is_one_number = len(given) == len(given[0].dims) == 1 and not a.values.dims and not a.accumulate
        if not is_one_number or is_inexact(a.values.example.dtype):  # its gradient would be that of each place
            raise NotFollowed("writes to as many places as there are rows")
        given = [_first_where_none(body, given[0], 0)]
    found = [None if i is None else _from_behind(body, i, value.dims[d]) for d, i in enumerate(given)]
    at = [
        None if i is None else _shifted(body, i, value.dims[d], value.example.shape[d]).node
        for d, i in enumerate(found)
    ]
    if any(isinstance(d, Axis) and (k >= len(at) or at[k] is None) for k, d in enumerate(value.dims)):
        raise NotFollowed("writes to elements of a tensor that grows in another dimension")
    return Val(body.emit(aten.index_put.default, value.node, at, a.values.node, a.accumulate), value.dims)


@rule(aten.native_layer_norm.default)
def _layer_norm(body: Body, a: Any) -> list[Val]:
    value = a.input
    kept = len(value.dims) - len(a.normalized_shape)
    if any(isinstance(d, Axis) for d in value.dims[kept:]):
        raise NotFollowed("normalizes over a dimension that grows; write it with mean and var")
    kind = torch.promote_types(value.example.dtype, torch.float32)
    if value.grows and not torch.tensor(a.eps, dtype=kind):
        raise NotFollowed("divides by a standard deviation that may be 0; give it an eps above 0")
    node = body.emit(a.func, value.node, a.normalized_shape, nodes_of(a.weight), nodes_of(a.bias), a.eps)
    statistics = (*value.dims[:kept], *[1] * len(a.normalized_shape))
    return [Val(body.item(node, i), value.dims if i == 0 else statistics) for i in range(3)]

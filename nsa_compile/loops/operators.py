"""What each operator becomes where dimensions grow: one rule for each, and a decline by name for the rest."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from nsa_compile.ir.scans import first_line
from nsa_compile.loops.body import Axis, Body, Dim, Segment, Table, Val
from nsa_compile.loops.merged import Node
from nsa_compile.loops.numbers import Number
from nsa_compile.loops.state import NotFollowed
from nsa_compile.loops.trace import Ref

aten = torch.ops.aten
Rule = Callable[[Body, Any], Any]
RULES: dict[Any, Rule] = {}


def convert(body: Body, node: Node) -> list[Val | None]:
    """The results of one operator of the loop in the step that serves all ways.

    Raises:
        NotFollowed: the operator has no rule for dimensions that grow, or this is not a case of it.
    """
    op = node.any
    positional = [_argument(body, node, [o.args[i] for o in node.ops.values()]) for i in range(len(op.args))]
    named = {k: _argument(body, node, [o.kwargs[k] for o in node.ops.values()]) for k in op.kwargs}
    named.pop("pin_memory", None)
    if not body.at.all() and not _is_finite(node.func, positional):
        positional = [_harmless(body, x) for x in positional]
    if not _varies(positional) and not _varies(named):
        return _as_it_is(body, node.func, positional, named)
    shapes = [_shape(body, node, place) for place in range(len(op.outs))]
    if all(any(not size[body.at].any() for size in shape) for shape in shapes):
        return [_of_no_elements(body, node, place, shape) for place, shape in enumerate(shapes)]
    rule = RULES.get(node.func)
    if rule is None and torch.Tag.pointwise in node.func.tags:
        rule = _pointwise
    if rule is None:
        raise NotFollowed("has no rule for sizes that change from step to step")
    schema = [(a.name, a.default_value) for a in node.func._schema.arguments]
    arguments = {name: named.get(name, default) for name, default in schema}
    arguments.update(zip((name for name, _ in schema), positional, strict=False))
    try:
        result = rule(body, SimpleNamespace(func=node.func, shapes=shapes, **arguments))
    except Exception as error:  # of numpy, say, where an argument that no author of a rule thought of varies
        raise NotFollowed(f"has no rule for what it is given: {first_line(error)}") from error
    return list(result) if isinstance(result, list | tuple) else [result]


def _shape(body: Body, node: Node, place: int) -> list[Table]:
    """The sizes of a result of the operator, at all steps."""
    versions = {way: body.merged.trace(way).shapes[op.outs[place]] for way, op in node.ops.items()}
    rank = len(next(iter(versions.values())))
    return [body.number({way: shape[d] for way, shape in versions.items()}) for d in range(rank)]


def _of_no_elements(body: Body, node: Node, place: int, shape: list[Table]) -> Val:
    dims = tuple(_dim(body, size) for size in shape)
    kind = body.merged.trace(next(iter(node.ops))).types[node.any.outs[place]]
    return Val(body.emit(torch.zeros, _sizes(dims), dtype=kind.dtype, device=kind.device), dims)


def _dim(body: Body, size: Table) -> Dim:
    """A dimension of rows from the first on, so many at each step."""
    here = size[body.at]
    return int(here[0]) if (here == here[0]).all() else Axis.of(int(here.max()), 0, size)


def _argument(body: Body, node: Node, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Ref):
        return body.chosen({way: body.merged.source(way, ref) for way, ref in zip(node.ops, values, strict=True)})
    if isinstance(first, list | tuple):
        return [_argument(body, node, [v[i] for v in values]) for i in range(len(first))]
    is_number = any(isinstance(v, Number) for v in values)
    if is_number or (isinstance(first, int) and not isinstance(first, bool) and any(v != first for v in values)):
        table = body.number(dict(zip(node.ops, values, strict=True)))
        here = table[body.at]
        if (here == here[0]).all():
            return here[0].item()
        if table.dtype.kind == "f":
            return np.where(body.at, table, here[0])
        return table
    return first


def _varies(value: Any) -> bool:
    if isinstance(value, Val):
        return value.grows
    if isinstance(value, dict):
        return any(map(_varies, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_varies, value))
    return isinstance(value, np.ndarray)


def _nodes(value: Any) -> Any:
    if isinstance(value, Val):
        return value.node
    if isinstance(value, list | tuple):
        return [_nodes(x) for x in value]
    return value


def _as_it_is(body: Body, func: Any, positional: Any, named: Any) -> list[Val | None]:
    if func in _IN_OTHER_WORDS:
        func = _IN_OTHER_WORDS[func]
    node = body.emit(func, *_nodes(positional), **{k: _nodes(v) for k, v in named.items()})
    example = node.meta["example_value"]
    if isinstance(example, torch.Tensor):
        return [Val(node, tuple(example.shape))]
    return [Val(body.item(node, i), tuple(x.shape)) for i, x in enumerate(example) if isinstance(x, torch.Tensor)]


# Views hold for strides that a buffer need not have.
_IN_OTHER_WORDS = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


def rule(*funcs: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, function))
        return function

    return register


def _place(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _with(dims: Sequence[Dim], dim: int, new: Dim) -> tuple[Dim, ...]:
    return (*dims[:dim], new, *dims[dim + 1 :])


# -- movement


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
def _unsqueeze(body: Body, a: Any) -> Val:
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
        dims.append(own if own != 1 else _dim(body, size))
    zero = frozenset(z + missing for z in value.zero)
    return Val(body.emit(aten.expand.default, value.node, _sizes(dims)), tuple(dims), zero)


def _sizes(dims: Sequence[Dim]) -> list[int]:
    return [d.size if isinstance(d, Axis) else d for d in dims]


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(body: Body, a: Any) -> Val:
    def viewed(value: Val) -> Val:
        dims = _regrouped(body, list(value.dims), a.shapes[0])
        return Val(body.emit(aten.reshape.default, value.node, _sizes(dims)), tuple(dims), is_score=value.is_score)

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
    return Val(node, _with(value.dims, dim, Axis.of(last, axis.only.start, axis.only.stop)), value.zero, value.is_score)


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
    if math.prod(_sizes(result)) != math.prod(_sizes(old)) or (rest is not None):
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
def _select(body: Body, a: Any) -> Val:
    value, dim = a.self, _place(a.dim, len(a.self.dims))
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
def _slice(body: Body, a: Any) -> Val:
    value, dim = a.self, _place(a.dim, len(a.self.dims))
    own = value.dims[dim]
    count = body.count_of(own)
    start = _bound(a.start, 0, count)
    stop = np.maximum(_bound(a.end, count, count), start)
    if not start[body.at].any() and (stop == count)[body.at].all() and a.step == 1:
        return value
    if isinstance(a.step, int) and a.step != 1:
        if isinstance(own, int) and _is_constant(body, start) and _is_constant(body, stop):
            bounds = int(start[body.at][0]), int(stop[body.at][0])
            size = len(range(*bounds, a.step))
            return Val(body.emit(aten.slice.Tensor, value.node, dim, *bounds, a.step), _with(value.dims, dim, size))
        raise NotFollowed("steps over rows of a dimension that grows")
    if isinstance(own, int):
        if _is_constant(body, start) and _is_constant(body, stop):
            first, last = int(start[body.at][0]), int(stop[body.at][0])
            node = body.emit(aten.slice.Tensor, value.node, dim, first, last)
            return Val(node, _with(value.dims, dim, last - first))
        axis = Axis.of(own, start, stop)
        if body.constant_count(axis) == 1:
            if (number := _outside_number(body, value)) is not None:
                row = body.row_of(number, dim, np.clip(start, 0, own - 1))
                return Val(body.emit(aten.unsqueeze.default, row, dim), _with(value.dims, dim, 1))
            return body.taken(value, dim, start, 1)
        return Val(value.node, _with(value.dims, dim, axis))
    if len(own.segments) > 1:
        return _slice_of_several(body, value, dim, own, start, stop)
    segment = own.only
    axis = Axis.of(segment.size, segment.start + start, segment.start + stop, own.root)
    sliced = Val(value.node, _with(value.dims, dim, axis))
    return body.fixed(sliced, dim) if body.constant_count(axis) == 1 else sliced


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
    return Val(node, _with(value.dims, dim, Axis(axis.segments[first:last])), zero)


def _bound(value: Any, default: Any, count: Table) -> Table:
    bound = np.asarray(default if value is None else value)
    bound = np.where(bound < 0, bound + count, bound)
    return np.clip(bound, 0, count)


def _is_constant(body: Body, table: Table) -> bool:
    here = table[body.at]
    return bool((here == here[0]).all())


# -- joining


@rule(aten.cat.default)
def _cat(body: Body, a: Any) -> Val:
    parts: list[Val] = [x for x in a.tensors if not (len(x.dims) == 1 and x.dims[0] == 0)]
    rank = len(parts[0].dims)
    dim = _place(a.dim, rank)
    parts = [p for p in parts if p.dims[dim] != 0] or parts[:1]
    parts = _alike(body, parts, dim)
    if all(isinstance(p.dims[dim], int) for p in parts):
        size = sum(d for p in parts if isinstance(d := p.dims[dim], int))
        return Val(body.emit(aten.cat.default, [p.node for p in parts], dim), _with(parts[0].dims, dim, size))
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
    segments = tuple(s for p in parts for s in body._as_axis(p, dim).dims[dim].segments)  # type: ignore[union-attr]
    fixed = [dim not in p.zero and isinstance(p.dims[dim], Axis) for p in parts]
    zero = frozenset() if any(fixed) else frozenset({dim})
    node = body.emit(aten.cat.default, [p.node for p in parts], dim)
    return Val(node, _with(parts[0].dims, dim, Axis(segments)), zero)


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
    return Val(filled.node, _with(value.dims, dim, Axis.of(longer.size, axis.only.start, stop)), filled.zero)


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
    return Val(body.written(whole.node, dim, position, part.node), _with(whole.dims, dim, after))


def _alike(body: Body, parts: list[Val], dim: int) -> list[Val]:
    """Tensors that are joined along one dimension, in one layout along the others."""
    for d in range(len(parts[0].dims)):
        if d != dim:
            parts = _aligned(body, parts, d)
    return parts


def _aligned(body: Body, parts: list[Val], d: int) -> list[Val]:
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
        parts = _aligned(body, parts, d)
    dim = a.dim % (len(parts[0].dims) + 1)
    dims = (*parts[0].dims[:dim], len(parts), *parts[0].dims[dim:])
    return Val(body.emit(aten.stack.default, [p.node for p in parts], dim), dims)


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(body: Body, a: Any) -> list[Val]:
    """Slices, one behind the other."""
    dim = _place(a.dim, len(a.self.dims))
    parts = []
    start = np.zeros(body.length, np.int64)
    for shape in a.shapes:
        stop = start + shape[dim]
        parts.append(_slice(body, SimpleNamespace(self=a.self, dim=dim, start=start, end=stop, step=1)))
        start = stop
    return parts


@rule(aten.unbind.int)
def _unbind(body: Body, a: Any) -> list[Val]:
    dim = _place(a.dim, len(a.self.dims))
    return [_select(body, SimpleNamespace(self=a.self, dim=dim, index=i)) for i in range(len(a.shapes))]


# -- elementwise


def _broadcast(body: Body, values: list[Val]) -> tuple[list[Val], tuple[Dim, ...]]:
    """Operands in one layout, and the dimensions of the result."""
    rank = max(len(v.dims) for v in values)
    dims: list[Dim] = []
    for d in range(rank):
        here = [(i, d - rank + len(v.dims)) for i, v in enumerate(values) if d - rank + len(v.dims) >= 0]
        wide = [(i, k) for i, k in here if values[i].dims[k] != 1]
        axes = [(i, k) for i, k in wide if isinstance(values[i].dims[k], Axis)]
        if not axes:
            sizes = {values[i].dims[k] for i, k in wide} or {1}
            if len(sizes) != 1:
                raise NotFollowed(f"meets sizes {sorted(map(str, sizes))}")
            dims.append(sizes.pop())
            continue
        if len(axes) < len(wide):
            for i, k in axes:
                values[i] = body.fixed(values[i], k)
            dims.append(values[wide[0][0]].dims[wide[0][1]])
            continue
        layouts = [own for i, k in axes if isinstance(own := values[i].dims[k], Axis)]
        like = max(layouts, key=lambda layout: len(layout.segments))
        for i, k in axes:
            if values[i].dims[k] is not like:
                values[i] = body.moved(values[i], k, like)
        dims.append(like if like.root is None else Axis(like.segments))
    return values, tuple(dims)


def _operands(body: Body, a: Any, names: Sequence[str]) -> dict[str, Any]:
    """The operands of a pointwise operator in one layout, numbers known at each step as tensors."""
    values = {n: getattr(a, n) for n in names}
    tensors = [n for n, v in values.items() if isinstance(v, Val)]
    aligned, dims = _broadcast(body, [values[n] for n in tensors])
    values.update(zip(tensors, aligned, strict=True))
    values["dims"] = dims
    return values


def _number(body: Body, table: Table, dtype: torch.dtype, device: torch.device) -> Any:
    """A number that is known at each step, as a tensor of a dtype."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        here = torch.from_numpy(table[body.at].astype(np.float64))
        if not torch.equal(here.to(dtype).double(), here):  # torch computes with it in float32
            raise NotFollowed(f"computes with a number that changes from step to step, and {dtype} does not hold it")
    known = body.known(table if table.dtype.kind != "f" else table.astype(np.float64))
    if isinstance(known, int) and table.dtype.kind == "f":
        return float(table[0])
    if isinstance(known, int):
        return known
    return body.emit(aten._to_copy.default, known, dtype=dtype, device=device)


_FINITE = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.abs, aten.square, aten.tanh, aten.sigmoid, aten.relu,
    aten.silu, aten.gelu, aten.leaky_relu, aten.hardtanh, aten.softplus, aten.sin, aten.cos, aten.erf, aten.sign,
    aten.floor, aten.ceil, aten.round, aten.maximum, aten.minimum, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne, aten.where, aten.masked_fill, aten.copy, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not, aten.logical_and, aten.logical_or, aten.logical_xor,
    aten.logical_not,
}  # fmt: skip


# Beside those, of what is not elementwise: it makes no infinite numbers, or derivatives, of finite ones.
_INFINITE = {
    aten._softmax, aten._log_softmax, aten._safe_softmax, aten.logsumexp, aten.native_layer_norm, aten.std, aten.var,
    aten.linalg_inv_ex, aten.linalg_solve_ex, aten.linalg_cholesky_ex,
}  # fmt: skip


def _is_finite(func: Any, positional: Sequence[Any]) -> bool:
    """Whether an operator takes finite numbers to finite ones, in its derivatives too."""
    packet = func.overloadpacket
    other = positional[1] if len(positional) > 1 else None
    if torch.Tag.pointwise not in func.tags:
        return packet not in _INFINITE or positional[0].is_score
    if packet is aten.acosh:
        raise NotFollowed("has no value for a number that every other such function has one for")
    if packet is aten.div:
        return isinstance(other, int | float) and other != 0
    if packet is aten.pow:
        return isinstance(other, int) and other >= 1
    return packet in _FINITE


def _harmless(body: Body, value: Any) -> Any:
    """A number that no operator makes an infinite one of at the steps that take another way: the gradient that does not
    flow there is zero, and zero times infinity is none."""
    if isinstance(value, np.ndarray):
        return np.where(body.at, value, value[body.at][0])
    if not isinstance(value, Val) or value.example.dtype == torch.bool:
        return value
    absent = body.emit(aten.bitwise_not.default, body._truth(body.at))
    number = HARMLESS if value.example.dtype.is_floating_point else 1
    return Val(body.emit(aten.masked_fill.Scalar, value.node, absent, number), value.dims)


# 1 is a pole of atanh, and acos and asin have no derivative there.
HARMLESS = 0.5


def _pointwise(body: Body, a: Any) -> Val:
    names = [x.name for x in a.func._schema.arguments]
    values = _operands(body, a, names)
    dims = values.pop("dims")
    tensors = [n for n in names if isinstance(values[n], Val)]
    if not _is_finite(a.func, [getattr(a, n) for n in names]):
        for n in tensors:
            dtype = values[n].example.dtype
            for d in range(len(values[n].dims)):
                if isinstance(values[n].dims[d], Axis) and dtype != torch.bool:
                    values[n] = body.filled(values[n], d, HARMLESS if dtype.is_floating_point else 1)
    example = values[tensors[0]].example
    func = a.func
    for n in names:
        if isinstance(values[n], np.ndarray):
            others = [values[m].example.dtype for m in tensors]
            floating = [t for t in others if t.is_floating_point]
            dtype = floating[0] if floating else torch.int64 if values[n].dtype.kind != "f" else torch.float32
            values[n] = _number(body, values[n], dtype, example.device)
            func = _for_tensors(func)
    if func is aten.clamp.Tensor:
        for n in names:
            if isinstance(values[n], int | float):
                values[n] = body.emit(torch.full, (), values[n], dtype=example.dtype, device=example.device)
    zero = _zeros(a, values, len(dims))
    keywords = {x.name for x in func._schema.arguments if x.kwarg_only}
    positional = [_nodes(values[n]) for n in names if n not in keywords]
    node = body.emit(func, *positional, **{n: _nodes(values[n]) for n in names if n in keywords})
    scaled = a.func.overloadpacket in (aten.mul, aten.div) and len(tensors) == 1
    return Val(node, dims, zero, scaled and values[tensors[0]].is_score)


def _for_tensors(func: Any) -> Any:
    """The overload that takes a tensor where another takes a number."""
    packet = func.overloadpacket
    for name in ("Tensor", "Tensor_Tensor", "self"):
        if func._overloadname.endswith(("Scalar", "default")) and name in packet.overloads():
            return getattr(packet, name)
    return func


def _zeros(a: Any, values: dict[str, Any], rank: int) -> frozenset[int]:
    """The dimensions along which a result is zero in rows that do not exist."""

    def of(name: str) -> frozenset[int]:
        value = values.get(name)
        return frozenset(z + rank - len(value.dims) for z in value.zero) if isinstance(value, Val) else frozenset()

    packet = a.func.overloadpacket
    if packet is aten.mul:
        return of("self") | of("other")
    if packet in (aten.div, aten.neg, aten.relu):
        return of("self")
    return frozenset()


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def _masked(body: Body, a: Any) -> Val:
    return _pointwise(body, a)


@rule(aten.copy.default)
def _copy(body: Body, a: Any) -> Val:
    """The new value in the shape and dtype of the old one."""
    (old, new), dims = _broadcast(body, [a.self, a.src])
    kind = {"dtype": old.example.dtype, "device": old.example.device}
    node = new.node
    if (new.example.dtype, new.example.device) != (old.example.dtype, old.example.device):
        node = body.emit(aten._to_copy.default, node, **kind)
    if list(new.example.shape) != _sizes(dims):
        node = body.emit(aten.expand.default, node, _sizes(dims))
    return Val(node, dims)


@rule(aten.tril.default, aten.triu.default)
def _triangle(body: Body, a: Any) -> Val:
    value = a.self
    rank = len(value.dims)
    if any(isinstance(d, Axis) and d.only.start.any() for d in value.dims[-2:]):
        raise NotFollowed("takes a triangle of rows whose first is not the first")
    if isinstance(a.diagonal, np.ndarray):
        raise NotFollowed("takes a triangle whose diagonal changes from step to step")
    zero = frozenset(z for z in value.zero if z < rank - 2)
    return Val(body.emit(a.func, value.node, a.diagonal), value.dims, zero)


# -- products


def _contracted(body: Body, x: Val, i: int, y: Val, j: int) -> tuple[Val, Val]:
    """Two operands whose product is summed along a dimension of each."""
    a, b = x.dims[i], y.dims[j]
    if isinstance(a, int) and isinstance(b, int):
        return x, y
    if isinstance(a, int) or isinstance(b, int):
        return body.fixed(x, i), body.fixed(y, j)
    if not body.same_axis(a, b):
        if j in y.zero or len(a.segments) > 1:
            x = body.moved(x, i, b)
        else:
            y = body.moved(y, j, a)
    if i not in x.zero and j not in y.zero:
        x = body.filled(x, i, 0)
    return x, y


@rule(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def _matmul(body: Body, a: Any) -> Val:
    x = a.self
    y = next(getattr(a, n) for n in ("mat2", "vec", "tensor") if hasattr(a, n))
    if len(x.dims) == 3:
        x, y = _aligned(body, [x, y], 0)
    i, j = len(x.dims) - 1, max(0, len(y.dims) - 2)
    x, y = _contracted(body, x, i, y, j)
    dims = (*x.dims[:-1], *y.dims[j + 1 :])
    zero = {d for d in range(len(x.dims) - 1) if d in x.zero}
    zero |= {len(x.dims) - 1 + k for k in range(len(y.dims) - j - 1) if j + 1 + k in y.zero}
    dims = tuple(d if isinstance(d, int) else Axis(d.segments) for d in dims)
    return Val(body.emit(a.func, x.node, y.node), dims, frozenset(zero), is_score=True)


@rule(aten.addmm.default, aten.baddbmm.default)
def _matmul_add(body: Body, a: Any) -> Val:
    first, second = (a.mat1, a.mat2) if a.func is aten.addmm.default else (a.batch1, a.batch2)
    func = aten.mm.default if a.func is aten.addmm.default else aten.bmm.default
    product = _matmul(body, _call(func, self=first, mat2=second))
    if a.alpha != 1 or a.beta != 1:
        raise NotFollowed("weighs a product and a sum")
    return _pointwise(body, _call(aten.add.Tensor, self=product, other=a.self, alpha=1))


def _call(func: Any, **arguments: Any) -> Any:
    return SimpleNamespace(func=func, shapes=[], **arguments)


# -- along a dimension


@rule(aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)
def _softmax(body: Body, a: Any) -> Val:
    value, dim = a.self, _place(a.dim, len(a.self.dims))
    axis = value.dims[dim]
    extra = [getattr(a, "half_to_float", False)] if a.func is not aten._safe_softmax.default else []
    if not isinstance(axis, Axis):
        return Val(body.emit(a.func, value.node, dim, *extra), value.dims)
    is_log = a.func is aten._log_softmax.default
    is_empty = bool((axis.count <= 0).any())
    lowest = torch.finfo(value.example.dtype).min if is_empty and value.is_score else -math.inf
    scores = body.filled(value, dim, lowest)
    node = body.emit(a.func, scores.node, dim, *extra)
    weights = Val(node, value.dims)
    if is_log or is_empty or a.func is aten._safe_softmax.default:
        return body.filled(weights, dim, 0)
    return Val(node, value.dims, frozenset({dim}))


_NEUTRAL = {
    aten.sum: 0.0,
    aten.mean: 0.0,
    aten.amax: -math.inf,
    aten.amin: math.inf,
    aten.any: 0.0,
    aten.all: 1.0,
    aten.logsumexp: -math.inf,
    aten.linalg_vector_norm: 0.0,
    aten.prod: 1.0,
    aten.max: -math.inf,
    aten.min: math.inf,
}
# What these say of no rows at all is an error.
_EXTREMES = {aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin}


@rule(
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
    aten.logsumexp.default, aten.linalg_vector_norm.default, aten.prod.default, aten.prod.dim_int,
    aten.max.default, aten.min.default,
)  # fmt: skip
def _reduction(body: Body, a: Any) -> Val:
    value: Val = getattr(a, "self", None) or a.input
    packet, rank = a.func.overloadpacket, len(value.dims)
    asked = getattr(a, "dim", None)
    asked = [asked] if isinstance(asked, int) else asked
    dims = [d % rank for d in asked] if asked else list(range(rank))
    keepdim = getattr(a, "keepdim", False)
    growing = [d for d in dims if isinstance(value.dims[d], Axis)]
    if growing and packet in (aten.mean, aten.sum):
        for d in growing:  # a block of rows, at other places at other steps
            axis = value.dims[d]
            if isinstance(axis, Axis) and len(axis.segments) == 1 and body.constant_count(axis) is not None:
                value = body.fixed(value, d)
        growing = [d for d in dims if isinstance(value.dims[d], Axis)]
    if packet is aten.linalg_vector_norm and growing and a.ord < 0:
        raise NotFollowed("is a norm of a negative order, of rows that change from step to step")
    if packet in _EXTREMES or (packet is aten.linalg_vector_norm and a.ord == math.inf):
        _refuse_none(body, value, growing)
    for d in growing:
        value = body.filled(value, d, _in_dtype(_NEUTRAL[packet], value.example.dtype))
    kept: list[Dim] = [1 if d in dims else x for d, x in enumerate(value.dims) if keepdim or d not in dims]
    zero = frozenset(i for i, d in enumerate(d for d in range(rank) if keepdim or d not in dims) if d in value.zero)
    zero = frozenset(z for z in zero if isinstance(kept[z], Axis)) if packet in (aten.sum, aten.mean) else frozenset()
    extra = {"dtype": a.dtype} if getattr(a, "dtype", None) is not None else {}
    if packet is aten.mean and growing:
        kind = extra.get("dtype", value.example.dtype)
        if kind.itemsize < 4:  # what is divided is not rounded
            extra = {"dtype": torch.float32}
        total = body.emit(aten.sum.dim_IntList, value.node, dims, keepdim, **extra)
        count = np.prod([body.count_of(value.dims[d]) for d in dims], axis=0)
        count = np.where(body.at, count, np.maximum(count, 1))
        number = _number(body, count, total.meta["example_value"].dtype, value.example.device)
        mean = body.emit(aten.div.Tensor, total, number)
        if kind.itemsize < 4:
            mean = body.emit(aten._to_copy.default, mean, dtype=kind)
        return Val(mean, tuple(kept), zero)
    if not asked:
        order = {"ord": a.ord} if packet is aten.linalg_vector_norm else {}
        node = body.emit(a.func, value.node, **order, **extra)
        if packet in _EXTREMES:
            node = _finite_elsewhere(body, node, [own for d in growing if isinstance(own := value.dims[d], Axis)])
        return Val(node, ())
    arguments: list[Any] = [dims if not isinstance(a.dim, int) else dims[0], keepdim]
    if packet is aten.linalg_vector_norm:
        arguments = [a.ord, *arguments]
    node = body.emit(a.func, value.node, *arguments, **extra)
    if packet in (*_EXTREMES, aten.logsumexp):
        node = _finite_elsewhere(body, node, [own for d in growing if isinstance(own := value.dims[d], Axis)])
    return Val(node, tuple(kept), zero)


def _finite_elsewhere(body: Body, node: torch.fx.Node, axes: Sequence[Axis]) -> torch.fx.Node:
    """An extreme, and some number at the steps that take another way and find no rows."""
    none = np.any([axis.count <= 0 for axis in axes], axis=0) & ~body.at
    if not np.any(none):
        return node
    return body.emit(aten.masked_fill.Scalar, node, body._truth(none), 0)


def _refuse_none(body: Body, value: Val, dims: Sequence[int]) -> None:
    if any((body.count_of(value.dims[d])[body.at] <= 0).any() for d in dims):
        raise NotFollowed("finds an extreme where there are no rows")


def _in_dtype(number: float, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return number
    limits = torch.iinfo(dtype)
    return limits.min if number == -math.inf else limits.max if number == math.inf else int(number)


@rule(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
def _extreme(body: Body, a: Any) -> Any:
    value = a.self
    if a.dim is None and len(value.dims) > 1:
        raise NotFollowed("finds an extreme over all dimensions, of which one grows")
    dim = _place(a.dim or 0, len(value.dims))
    axis = value.dims[dim]
    lowest = a.func.overloadpacket in (aten.max, aten.argmax)
    if isinstance(axis, Axis):
        _refuse_none(body, value, [dim])
        axis.only  # noqa: B018  # rows of several caches have no number of their own
        value = body.filled(value, dim, _in_dtype(-math.inf if lowest else math.inf, value.example.dtype))
    dims = tuple(1 if d == dim else x for d, x in enumerate(a.self.dims) if a.keepdim or d != dim)
    node = body.emit(a.func, value.node, dim, a.keepdim)
    if a.func in (aten.max.dim, aten.min.dim):
        extreme = _finite_elsewhere(body, body.item(node, 0), [axis] if isinstance(axis, Axis) else [])
        return [Val(extreme, dims), _counted_from(body, Val(body.item(node, 1), dims), axis)]
    return _counted_from(body, Val(node, dims), axis)


def _counted_from(body: Body, indices: Val, axis: Dim) -> Val:
    """Indices of rows of a buffer as those of the rows that exist."""
    if isinstance(axis, int) or not axis.only.start.any():
        return indices
    node = body.emit(aten.sub.Tensor, indices.node, body._tensor(axis.only.start))
    return Val(node, indices.dims)


@rule(aten.topk.default, aten.sort.default, aten.sort.stable)
def _sorted(body: Body, a: Any) -> list[Val]:
    value, dim = a.self, _place(a.dim, len(a.self.dims))
    axis = value.dims[dim]
    is_topk = a.func is aten.topk.default
    largest = a.largest if is_topk else a.descending
    if not isinstance(axis, Axis):
        if is_topk and isinstance(a.k, np.ndarray):
            raise NotFollowed("takes another number of them at each step")
        arguments = [a.k, dim, largest, a.sorted] if is_topk else [dim, largest]
        node = body.emit(aten.topk.default if is_topk else aten.sort.default, value.node, *arguments)
        width = node.meta["example_value"][0].shape[dim]
        return [Val(body.item(node, i), _with(value.dims, dim, width)) for i in (0, 1)]
    if axis.only.start[body.at].any():
        value = body.moved(value, dim, Axis.of(int(axis.count.max()), 0, axis.count))
        axis = value.dims[dim]
        assert isinstance(axis, Axis)
    filled = body.filled(value, dim, _in_dtype(-math.inf if largest else math.inf, value.example.dtype))
    # Stable, so that of equal numbers those that exist come first.
    node = body.emit(aten.sort.stable, filled.node, stable=True, dim=dim, descending=largest)
    count = axis.count
    k = np.broadcast_to(np.asarray(a.k), (body.length,)) if is_topk else count
    width = int(k[body.at].max())
    new: Dim = width if _is_constant(body, k) and is_topk else Axis.of(width, 0, k)
    results = []
    for i in (0, 1):
        part = body.item(node, i)
        if width < axis.size:
            part = body.emit(aten.slice.Tensor, part, dim, 0, width)
        # What is left of the filling would be infinite.
        there = Val(part, _with(value.dims, dim, Axis.of(width, 0, np.minimum(k, count))))
        results.append(Val(body.filled(there, dim, 0).node, _with(value.dims, dim, new)))
    return results


@rule(aten.cumsum.default)
def _cumsum(body: Body, a: Any) -> Val:
    value, dim = a.self, _place(a.dim, len(a.self.dims))
    axis = value.dims[dim]
    if isinstance(axis, Axis):
        axis.only  # noqa: B018
        if axis.only.start.any():
            value = body.filled(value, dim, 0)
    extra = {"dtype": a.dtype} if a.dtype is not None else {}
    return Val(body.emit(aten.cumsum.default, value.node, dim, **extra), value.dims)


# -- made of sizes


@rule(
    aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.full.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip
def _made(body: Body, a: Any) -> Val:
    dims = [_dim(body, size) for size in a.shapes[0]]
    like = getattr(a, "self", None)
    packet = a.func.overloadpacket
    number: Any = 1 if packet in (aten.ones, aten.new_ones) else getattr(a, "fill_value", 0)
    dtype = a.dtype
    if dtype is None and like is not None:
        dtype = like.example.dtype
    device = a.device or (like.example.device if like is not None else None)
    extra = {k: x for k, x in (("dtype", dtype), ("device", device)) if x is not None}
    if isinstance(number, np.ndarray):
        if dtype is None:
            dtype = torch.int64 if number.dtype.kind != "f" else torch.get_default_dtype()
        filled = _number(body, number, dtype, device or torch.device("cpu"))
        if isinstance(filled, torch.fx.Node):
            node = body.emit(aten.expand.default, filled, _sizes(dims)) if dims else filled
            return Val(node, tuple(dims))
        number = filled
    if isinstance(number, Val):
        raise NotFollowed("fills with a number that is data")
    node = body.emit(torch.full, _sizes(dims), number, **{"dtype": torch.get_default_dtype(), **extra})
    return Val(node, tuple(dims))


@rule(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default, aten.fill.Scalar
)
def _made_like(body: Body, a: Any) -> Val:
    number = {aten.ones_like: 1}.get(a.func.overloadpacket, getattr(a, "fill_value", getattr(a, "value", 0)))
    example = a.self.example
    kind = {"dtype": getattr(a, "dtype", None) or example.dtype, "device": getattr(a, "device", None) or example.device}
    if isinstance(number, np.ndarray | Val):
        raise NotFollowed("fills with a number that changes from step to step")
    node = body.emit(torch.full, _sizes(a.self.dims), number, **kind)
    return Val(node, a.self.dims)


@rule(aten.fill.Tensor)
def _filled(body: Body, a: Any) -> Val:
    node = body.emit(aten._to_copy.default, a.value.node, dtype=a.self.example.dtype, device=a.self.example.device)
    return Val(body.emit(aten.expand.default, node, _sizes(a.self.dims)), a.self.dims)


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(body: Body, a: Any) -> Val:
    start, step = getattr(a, "start", 0), getattr(a, "step", 1)
    dim = _dim(body, a.shapes[0][0])
    device = a.device or torch.device("cpu")
    dtype = a.dtype or torch.int64
    if all(_is_whole(x) for x in (start, step)):
        node = body.positions(_sizes([dim])[0], device)
        if isinstance(step, np.ndarray) or step != 1:
            node = body.emit(aten.mul.Tensor, node, _whole(body, step))
        if isinstance(start, np.ndarray) or start != 0:
            node = body.emit(aten.add.Tensor, node, _whole(body, start))
        if dtype != torch.int64:
            node = body.emit(aten._to_copy.default, node, dtype=dtype)
        return Val(node, (dim,))
    if isinstance(start, np.ndarray) or isinstance(step, np.ndarray):
        raise NotFollowed("counts in floating point from a number that changes from step to step")
    size = _sizes([dim])[0]
    node = body.emit(torch.arange, start, start + size * step, step, dtype=dtype, device=device)
    return Val(node, (dim,))


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) or (isinstance(x, np.ndarray) and x.dtype.kind in "iu")


def _whole(body: Body, x: Any) -> Any:
    return body.known(x) if isinstance(x, np.ndarray) else x


# -- picked and placed by index


def _from_behind(body: Body, index: Val, axis: Dim) -> Val:
    """Numbers of rows, of which some may count from behind the last row that exists."""
    if not (index.grows or isinstance(axis, Axis)) or _counts_up(index.node):
        return index
    count = body._tensor(axis.count) if isinstance(axis, Axis) else axis
    behind = body.emit(aten.add.Tensor, index.node, count)
    is_behind = body.emit(aten.lt.Scalar, index.node, 0)
    return Val(body.emit(aten.where.self, is_behind, behind, index.node), index.dims)


def _counts_up(node: Any) -> bool:
    """Whether integers are none below zero, as far as their operator shows."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int) and node >= 0
    if node.target is operator.getitem:
        whole = cast(fx.Node, node.args[0])
        return bool(node.args[1] == 1) and whole.target in (aten.sort.default, aten.sort.stable, aten.topk.default)
    if node.target is torch.arange:
        return len(node.args) < 2 or (_counts_up(node.args[0]) and (len(node.args) < 3 or _counts_up(node.args[2])))
    if node.target in (aten.argmax.default, aten.argmin.default, aten.argsort.default):
        return True
    if node.target in (aten.clamp.default, aten.clamp_min.default, aten.remainder.Scalar):
        return len(node.args) > 1 and _counts_up(node.args[1])
    moved = node.target in (
        aten.view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.select.int,
        aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default, aten.transpose.int, aten.index_select.default,
        aten._to_copy.default, aten.masked_fill.Scalar,
    )  # fmt: skip
    filled = node.args[2] if node.target is aten.masked_fill.Scalar else 0
    return bool(moved) and _counts_up(filled) and _counts_up(node.args[0])


def _shifted(body: Body, index: Val, axis: Dim, size: int) -> Val:
    """Numbers of rows that exist as numbers of rows of the buffer; what is no number of a row becomes one."""
    node = index.node
    if isinstance(axis, Axis):
        segment = axis.only
        if segment.start.any():
            node = body.emit(aten.add.Tensor, node, body._tensor(segment.start))
    if index.grows or isinstance(axis, Axis):
        node = body.emit(aten.clamp.default, node, 0, size - 1)
    return Val(node, index.dims)


@rule(aten.index_select.default)
def _index_select(body: Body, a: Any) -> Val:
    dim = _place(a.dim, len(a.self.dims))
    index = _shifted(body, a.index, a.self.dims[dim], a.self.example.shape[dim])
    node = body.emit(aten.index_select.default, a.self.node, dim, index.node)
    zero = frozenset(z for z in a.self.zero if z != dim)
    return Val(node, _with(a.self.dims, dim, index.dims[0] if index.dims else 1), zero)


@rule(aten.gather.default)
def _gather(body: Body, a: Any) -> Val:
    value, index = a.self, a.index
    dim = _place(a.dim, len(value.dims))
    for d in range(len(value.dims)):
        if d != dim:
            value, index = _aligned(body, [value, index], d)
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
    indices, dims = _broadcast(body, indices)
    indices = [_from_behind(body, i, value.dims[d]) for i, d in zip(indices, places, strict=True)]
    shifted = [_shifted(body, i, value.dims[d], value.example.shape[d]) for i, d in zip(indices, places, strict=True)]
    at: list[Any] = [None] * len(given)
    for d, i in zip(places, shifted, strict=True):
        at[d] = i.node
    node = body.emit(aten.index.Tensor, value.node, at)
    return Val(node, (*value.dims[: places[0]], *dims, *value.dims[places[-1] + 1 :]))


@rule(aten.embedding.default)
def _embedding(body: Body, a: Any) -> Val:
    index = _shifted(body, a.indices, a.weight.dims[0], a.weight.example.shape[0])
    node = body.emit(aten.embedding.default, a.weight.node, index.node, a.padding_idx)
    return Val(node, (*index.dims, *a.weight.dims[1:]))


@rule(aten.select_scatter.default)
def _select_scatter(body: Body, a: Any) -> Val:
    dim = _place(a.dim, len(a.self.dims))
    source = _unsqueeze(body, SimpleNamespace(self=a.src, dim=dim))
    index = np.broadcast_to(np.asarray(a.index), (body.length,))
    size = body.count_of(a.self.dims[dim])
    return _written(body, a.self, source, dim, np.where(index < 0, index + size, index))


@rule(aten.slice_scatter.default)
def _slice_scatter(body: Body, a: Any) -> Val:
    dim = _place(a.dim, len(a.self.dims))
    count = body.count_of(a.self.dims[dim])
    start = _bound(a.start, 0, count)
    stop = np.maximum(_bound(a.end, count, count), start)
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
        mask = body.mask(Val(old.node, _with(old.dims, dim, like)), dim)
        assert mask is not None
        return Val(body.emit(aten.where.self, mask, moved.node, old.node), a.self.dims)
    return _written(body, a.self, body.fixed(source, dim), dim, start)


def _written(body: Body, value: Val, source: Val, dim: int, first: Table) -> Val:
    """Rows `first[t] …` of a value replaced."""
    axis = value.dims[dim]
    parts = [value, source]
    for d in range(len(value.dims)):
        if d != dim:
            parts = _aligned(body, parts, d)
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
    value, dim = a.self, _place(a.dim, len(a.self.dims))
    if a.index.grows:
        raise NotFollowed("writes to as many places as there are rows")
    for d in range(len(value.dims)):
        if d != dim and isinstance(value.dims[d], Axis):
            raise NotFollowed("writes to elements of a tensor that grows in another dimension")
    index = _shifted(body, a.index, value.dims[dim], value.example.shape[dim])
    new = a.src if hasattr(a, "src") else a.value
    return Val(body.emit(a.func, value.node, dim, index.node, _nodes(new)), value.dims)


@rule(aten.index_put.default)
def _index_put(body: Body, a: Any) -> Val:
    value = a.self
    if any(i is not None and i.grows for i in a.indices) or a.values.grows:
        raise NotFollowed("writes to as many places as there are rows")
    found = [None if i is None else _from_behind(body, i, value.dims[d]) for d, i in enumerate(a.indices)]
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
    for d in range(kept):
        if isinstance(value.dims[d], Axis) and not a.eps:
            value = body.filled(value, d, 1)
    node = body.emit(a.func, value.node, a.normalized_shape, _nodes(a.weight), _nodes(a.bias), a.eps)
    statistics = (*value.dims[:kept], *[1] * len(a.normalized_shape))
    return [Val(body.item(node, i), value.dims if i == 0 else statistics) for i in range(3)]


@rule(aten.unfold.default)
def _unfold(body: Body, a: Any) -> Val:
    dim = _place(a.dimension, len(a.self.dims))
    axis = a.self.dims[dim]
    if isinstance(axis, int):
        raise NotFollowed("takes blocks of a size that changes from step to step")
    value = a.self
    if axis.only.start[body.at].any():
        value = body.moved(value, dim, Axis.of(int(axis.count.max()), 0, axis.count))
    count = np.maximum((axis.count - a.size) // a.step + 1, 0)
    size = value.example.shape[dim]
    if size < a.size:
        raise NotFollowed("takes blocks that are longer than the loop")
    node = body.emit(aten.unfold.default, value.node, dim, a.size, a.step)
    new = Axis.of(node.meta["example_value"].shape[dim], 0, count)
    return Val(node, (*_with(value.dims, dim, new), a.size))

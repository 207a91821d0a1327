"""Rules for what runs along a dimension that grows: products, softmax, sums, maxima, sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from nsa_compile.ir.aten import REARRANGED
from nsa_compile.loops.body import Axis, Body, Dim, Val
from nsa_compile.loops.rules import aten, call, nodes_of, place_of, rule, with_dim
from nsa_compile.loops.rules.elementwise import number_of, pointwise
from nsa_compile.loops.rules.joining import aligned
from nsa_compile.loops.rules.movement import is_constant
from nsa_compile.loops.state import NotFollowed


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
        x, y = aligned(body, [x, y], 0)
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
    product = _matmul(body, call(func, self=first, mat2=second))
    if a.alpha != 1 or a.beta != 1:
        raise NotFollowed("weighs a product and a sum")
    return pointwise(body, call(aten.add.Tensor, self=product, other=a.self, alpha=1))


@rule(aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)
def _softmax(body: Body, a: Any) -> Val:
    value, dim = a.self, place_of(a.dim, len(a.self.dims))
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
    if is_log or is_empty or a.func is aten._safe_softmax.default or not value.is_score:
        return body.filled(weights, dim, 0)  # they may be no zeros, such as NaN where a mask keeps none
    return Val(node, value.dims, frozenset({dim}))


_MOVED = REARRANGED | {
    aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.cat.default, aten.constant_pad_nd.default,
    aten.index_copy.default,
}  # fmt: skip
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
def reduction(body: Body, a: Any) -> Val:
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
        if packet in (aten.sum, aten.mean) and value.example.dtype.is_floating_point:
            value = _with_factors_filled(body, value, d)
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
        number = number_of(body, count, total.meta["example_value"].dtype, value.example.device)
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


def _with_factors_filled(body: Body, value: Val, dim: int) -> Val:
    """A product, or a quotient, with zeros in the rows of its factors that do not exist.

    These may be NaN, such as weights after a softmax that is written out and keeps no key. In the sum they are hidden;
    its gradient, a zero for each, would still be multiplied with them.
    """
    node: Any = value.node
    if dim in value.zero or node.target not in (aten.mul.Tensor, aten.div.Tensor):
        return value
    rank, factors, zero = len(value.dims), [], value.zero
    for factor in node.args:
        shape = factor.meta["example_value"].shape if isinstance(factor, torch.fx.Node) else ()
        at = dim - (rank - len(shape))
        if at >= 0 and shape[at] == value.example.shape[dim] and not _is_read(factor):
            inner = _with_factors_filled(body, Val(factor, value.dims[rank - len(shape) :]), at)
            factor = body.filled(inner, at, 0).node
            zero = zero | {dim} if node.target is aten.mul.Tensor else zero
        factors.append(factor)
    return Val(body.emit(node.target, *factors, **node.kwargs), value.dims, zero)


def _is_read(node: torch.fx.Node) -> bool:
    """Whether a value is made of rows that the step is given or writes, moved at most: these are finite."""
    while node.op == "call_function" and node.target in _MOVED:
        first: Any = node.args[0]
        node = first[0] if isinstance(first, list | tuple) else first
    return node.op != "call_function"


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
    dim = place_of(a.dim or 0, len(value.dims))
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
    if isinstance(axis, int):
        return indices
    node = indices.node
    if axis.only.start.any():
        node = body.emit(aten.sub.Tensor, node, body._tensor(axis.only.start))
    body.numbers_of[node] = axis.count
    return Val(node, indices.dims)


@rule(aten.topk.default, aten.sort.default, aten.sort.stable)
def _sorted(body: Body, a: Any) -> list[Val]:
    value, dim = a.self, place_of(a.dim, len(a.self.dims))
    axis = value.dims[dim]
    is_topk = a.func is aten.topk.default
    largest = a.largest if is_topk else a.descending
    if not isinstance(axis, Axis):
        if is_topk and isinstance(a.k, np.ndarray):
            raise NotFollowed("takes another number of them at each step")
        arguments = [a.k, dim, largest, a.sorted] if is_topk else [dim, largest]
        node = body.emit(aten.topk.default if is_topk else aten.sort.default, value.node, *arguments)
        width = node.meta["example_value"][0].shape[dim]
        return [Val(body.item(node, i), with_dim(value.dims, dim, width)) for i in (0, 1)]
    value = body.from_the_first(value, dim)
    filled = body.filled(value, dim, _in_dtype(-math.inf if largest else math.inf, value.example.dtype))
    # Stable, so that of equal numbers those that exist come first.
    node = body.emit(aten.sort.stable, filled.node, stable=True, dim=dim, descending=largest)
    count = axis.count
    k = np.broadcast_to(np.asarray(a.k), (body.length,)) if is_topk else count
    width = int(k[body.at].max())
    new: Dim = width if is_constant(body, k) and is_topk else Axis.of(width, 0, k)
    results = []
    for i in (0, 1):
        part = body.item(node, i)
        if width < value.example.shape[dim]:
            part = body.emit(aten.slice.Tensor, part, dim, 0, width)
        # What is left of the filling would be infinite.
        there = Val(part, with_dim(value.dims, dim, Axis.of(width, 0, np.minimum(k, count))))
        results.append(Val(body.filled(there, dim, 0).node, with_dim(value.dims, dim, new)))
    body.numbers_of[results[1].node] = np.maximum(count, 1)
    return results


@rule(
    aten.glu.default, aten.median.dim, aten.nanmedian.dim, aten.logcumsumexp.default, aten.cummax.default,
    aten.cummin.default,
)  # fmt: skip
def _row_by_row(body: Body, a: Any) -> Val | list[Val]:
    """What works along one dimension, and on each row of another by itself."""
    value, dim = a.self, place_of(a.dim, len(a.self.dims))
    if isinstance(value.dims[dim], Axis):
        raise NotFollowed("has no rule for a dimension that grows")
    given = [getattr(a, argument.name) for argument in a.func._schema.arguments]
    node = body.emit(a.func, *map(nodes_of, given))
    dims = [x for d, x in enumerate(value.dims) if getattr(a, "keepdim", True) or d != dim]

    def with_sizes(result: fx.Node) -> Val:
        sizes = result.meta["example_value"].shape
        return Val(result, tuple(own if isinstance(own, Axis) else n for own, n in zip(dims, sizes, strict=True)))

    return with_sizes(node) if len(a.shapes) == 1 else [with_sizes(body.item(node, i)) for i in range(len(a.shapes))]


@rule(aten.norm.ScalarOpt_dim)
def _norm(body: Body, a: Any) -> Val:
    order = 2 if a.p is None else a.p
    return reduction(
        body, call(aten.linalg_vector_norm.default, self=a.self, ord=order, dim=a.dim, keepdim=a.keepdim, dtype=None)
    )


@rule(aten.aminmax.default)
def _least_and_greatest(body: Body, a: Any) -> list[Val]:
    dims = list(range(len(a.self.dims))) if a.dim is None else [a.dim]
    return [
        reduction(body, call(func, self=a.self, dim=dims, keepdim=a.keepdim))
        for func in (aten.amin.default, aten.amax.default)
    ]


@rule(aten.cumsum.default, aten.cumprod.default)
def _cumulated(body: Body, a: Any) -> Val:
    value, dim = a.self, place_of(a.dim, len(a.self.dims))
    axis = value.dims[dim]
    is_product = a.func is aten.cumprod.default
    if isinstance(axis, Axis) and (axis.only.start.any() or is_product):
        value = body.filled(value, dim, int(is_product))
    extra = {"dtype": a.dtype} if a.dtype is not None else {}
    return Val(body.emit(a.func, value.node, dim, **extra), value.dims)

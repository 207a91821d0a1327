"""Rules for what computes element by element, at whatever sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nsa_compile.ir.aten import is_inexact
from nsa_compile.loops.body import Axis, Body, Dim, Table, Val
from nsa_compile.loops.rules import aten, nodes_of, rule, sizes_of
from nsa_compile.loops.state import NotFollowed


def broadcast(body: Body, values: list[Val]) -> tuple[list[Val], tuple[Dim, ...]]:
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
                own = values[i].dims[k]
                if isinstance(own, Axis) and body.constant_count(own) is None:
                    raise NotFollowed(
                        "has an operand whose size differs at some steps; begin a state with torch.zeros of its final "
                        "size, not with a number"
                    )
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
    aligned, dims = broadcast(body, [values[n] for n in tensors])
    values.update(zip(tensors, aligned, strict=True))
    values["dims"] = dims
    return values


def number_of(body: Body, table: Table, dtype: torch.dtype, device: torch.device) -> Any:
    """A number that is known at each step, as a tensor of a dtype."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        here = torch.from_numpy(table[body.at].astype(np.float64))
        if not torch.equal(here.to(dtype).double(), here):  # torch computes with it in float32
            raise NotFollowed(f"computes with a number that changes from step to step, and {dtype} does not hold it")
    if table.dtype.kind == "i" and not is_inexact(dtype) and dtype != torch.bool:
        limits, numbers = torch.iinfo(dtype), table[body.at]
        if (numbers < limits.min).any() or (numbers > limits.max).any():  # torch wraps it around, or raises
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


def is_finite(func: Any, positional: Sequence[Any]) -> bool:
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


def harmless(body: Body, value: Any) -> Any:
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


_KINDS = {"b": torch.bool, "i": torch.int64, "f": torch.float32}


def pointwise(body: Body, a: Any) -> Val:
    names = [x.name for x in a.func._schema.arguments]
    values = _operands(body, a, names)
    dims = values.pop("dims")
    tensors = [n for n in names if isinstance(values[n], Val)]
    if not is_finite(a.func, [getattr(a, n) for n in names]):
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
            integers = [t for t in others if t != torch.bool and values[n].dtype.kind == "i"]
            dtype = (floating or integers or [_KINDS[values[n].dtype.kind]])[0]
            values[n] = number_of(body, values[n], dtype, example.device)
            func = _for_tensors(func)
    if func is aten.clamp.Tensor:
        for n in names:
            if isinstance(values[n], int | float):
                values[n] = body.emit(torch.full, (), values[n], dtype=example.dtype, device=example.device)
    zero = _zeros(a, values, len(dims))
    keywords = {x.name for x in func._schema.arguments if x.kwarg_only}
    positional = [nodes_of(values[n]) for n in names if n not in keywords]
    node = body.emit(func, *positional, **{n: nodes_of(values[n]) for n in names if n in keywords})
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
    return pointwise(body, a)


@rule(aten.copy.default)
def _copy(body: Body, a: Any) -> Val:
    """The new value in the shape and dtype of the old one."""
    (old, new), dims = broadcast(body, [a.self, a.src])
    kind = {"dtype": old.example.dtype, "device": old.example.device}
    node = new.node
    if (new.example.dtype, new.example.device) != (old.example.dtype, old.example.device):
        node = body.emit(aten._to_copy.default, node, **kind)
    if list(new.example.shape) != sizes_of(dims):
        node = body.emit(aten.expand.default, node, sizes_of(dims))
    return Val(node, dims)


@rule(aten.tril.default, aten.triu.default)
def _triangle(body: Body, a: Any) -> Val:
    rank = len(a.self.dims)
    value = body.from_the_first(body.from_the_first(a.self, rank - 2), rank - 1)
    if isinstance(a.diagonal, np.ndarray):
        raise NotFollowed("takes a triangle whose diagonal changes from step to step")
    zero = frozenset(z for z in value.zero if z < rank - 2)
    return Val(body.emit(a.func, value.node, a.diagonal), value.dims, zero)


@rule(aten.log_sigmoid_forward.default)
def _log_sigmoid(body: Body, a: Any) -> list[Val]:
    node = body.emit(a.func, a.self.node)
    kept = body.item(node, 1)  # for the backward pass; on some devices it is nothing
    shape = kept.meta["example_value"].shape
    return [
        Val(body.item(node, 0), a.self.dims),
        Val(kept, a.self.dims if shape == a.self.example.shape else tuple(shape)),
    ]

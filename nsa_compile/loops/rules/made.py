"""Rules for tensors that are made of sizes: zeros, ranges, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nsa_compile.loops.body import Body, Val
from nsa_compile.loops.rules import aten, dim_of, rule, sizes_of
from nsa_compile.loops.rules.elementwise import number_of
from nsa_compile.loops.state import NotFollowed


@rule(
    aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.full.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.scalar_tensor.default,
)  # fmt: skip
def _made(body: Body, a: Any) -> Val:
    dims = [dim_of(body, size) for size in a.shapes[0]]
    like = getattr(a, "self", None)
    packet = a.func.overloadpacket
    number: Any = 1 if packet in (aten.ones, aten.new_ones) else getattr(a, "fill_value", getattr(a, "s", 0))
    dtype = a.dtype or (torch.get_default_dtype() if packet is aten.scalar_tensor else None)
    if dtype is None and like is not None:
        dtype = like.example.dtype
    device = a.device or (like.example.device if like is not None else None)
    extra = {k: x for k, x in (("dtype", dtype), ("device", device)) if x is not None}
    if isinstance(number, np.ndarray):
        if dtype is None:
            dtype = torch.int64 if number.dtype.kind != "f" else torch.get_default_dtype()
        filled = number_of(body, number, dtype, device or torch.device("cpu"))
        if isinstance(filled, torch.fx.Node):
            node = body.emit(aten.expand.default, filled, sizes_of(dims)) if dims else filled
            return Val(node, tuple(dims))
        number = filled
    if isinstance(number, Val):
        raise NotFollowed("fills with a number that is data")
    node = body.emit(torch.full, sizes_of(dims), number, **{"dtype": torch.get_default_dtype(), **extra})
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
    node = body.emit(torch.full, sizes_of(a.self.dims), number, **kind)
    return Val(node, a.self.dims)


@rule(aten.fill.Tensor)
def _filled(body: Body, a: Any) -> Val:
    node = body.emit(aten._to_copy.default, a.value.node, dtype=a.self.example.dtype, device=a.self.example.device)
    return Val(body.emit(aten.expand.default, node, sizes_of(a.self.dims)), a.self.dims)


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(body: Body, a: Any) -> Val:
    start, step = getattr(a, "start", 0), getattr(a, "step", 1)
    dim = dim_of(body, a.shapes[0][0])
    device = a.device or torch.device("cpu")
    dtype = a.dtype or torch.int64
    if all(_is_whole(x) for x in (start, step)):
        node = body.positions(sizes_of([dim])[0], device)
        if isinstance(step, np.ndarray) or step != 1:
            node = body.emit(aten.mul.Tensor, node, _whole(body, step))
        if isinstance(start, np.ndarray) or start != 0:
            node = body.emit(aten.add.Tensor, node, _whole(body, start))
        if dtype != torch.int64:
            node = body.emit(aten._to_copy.default, node, dtype=dtype)
        return Val(node, (dim,))
    if isinstance(start, np.ndarray) or isinstance(step, np.ndarray):
        raise NotFollowed("counts in floating point from a number that changes from step to step")
    size = sizes_of([dim])[0]
    node = body.emit(torch.arange, start, start + size * step, step, dtype=dtype, device=device)
    return Val(node, (dim,))


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) or (isinstance(x, np.ndarray) and x.dtype.kind in "iu")


def _whole(body: Body, x: Any) -> Any:
    return body.known(x) if isinstance(x, np.ndarray) else x

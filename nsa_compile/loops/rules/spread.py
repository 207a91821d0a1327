"""Rules for variances and standard deviations along a dimension that grows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nsa_compile.loops.body import Axis, Body, Val
from nsa_compile.loops.rules import aten, call, rule
from nsa_compile.loops.rules.along import reduction
from nsa_compile.loops.rules.elementwise import number_of, pointwise
from nsa_compile.loops.state import NotFollowed


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _spread(body: Body, a: Any) -> Val | list[Val]:
    value, kind, rank = a.self, a.self.example.dtype, len(a.self.dims)
    dims = [d % rank for d in a.dim] if a.dim else list(range(rank))
    if kind.itemsize < 4:  # torch rounds the result alone
        value = _cast(body, value, torch.float32)
    mean = reduction(body, call(aten.mean.dim, self=value, dim=dims, keepdim=True, dtype=None))
    apart = pointwise(body, call(aten.sub.Tensor, self=value, other=mean, alpha=1))
    squares = pointwise(body, call(aten.mul.Tensor, self=apart, other=apart))
    total = reduction(body, call(aten.sum.dim_IntList, self=squares, dim=dims, keepdim=a.keepdim, dtype=None))
    count = np.prod([body.count_of(value.dims[d]) for d in dims], axis=0)
    freedom = np.maximum(count - (1 if a.correction is None else a.correction), 0)
    if ((freedom == 0) & (count > 1))[body.at].any():
        raise NotFollowed("has fewer elements than its correction at some steps")  # its derivatives are infinite
    freedom = np.where(body.at, freedom, np.maximum(freedom, 1))
    number = number_of(body, freedom, total.example.dtype, value.example.device)
    result = Val(body.emit(aten.div.Tensor, total.node, number), total.dims)
    if a.func.overloadpacket in (aten.std, aten.std_mean):
        result = _root(body, result)
    for d, dim in enumerate(result.dims):
        if isinstance(dim, Axis):
            result = body.filled(result, d, 0)  # of one element it is no number
    result = _cast(body, result, kind)
    if a.func.overloadpacket in (aten.var, aten.std):
        return result
    if not a.keepdim:
        kept = tuple(x for d, x in enumerate(mean.dims) if d not in dims)
        mean = Val(body.emit(aten.squeeze.dims, mean.node, dims), kept)
    return [result, _cast(body, mean, kind)]


def _cast(body: Body, value: Val, kind: torch.dtype) -> Val:
    if value.example.dtype == kind:
        return value
    return Val(body.emit(aten._to_copy.default, value.node, dtype=kind), value.dims, value.zero)


def _root(body: Body, value: Val) -> Val:
    """The square root; as torch has it for a standard deviation, its gradient at 0 is 0."""
    is_zero = body.emit(aten.eq.Scalar, value.node, 0)
    root = body.emit(aten.sqrt.default, body.emit(aten.masked_fill.Scalar, value.node, is_zero, 1))
    return Val(body.emit(aten.masked_fill.Scalar, root, is_zero, 0), value.dims)

"""`nsa_compile::first_places`: the first indices of a stable, descending sort, without the sort."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.dispatch import KERNELS

__all__ = ["first_places", "takes"]


def takes(x: Tensor, count: int) -> bool:
    """Whether the operator is for rows `x [..., N]` and so many places: on the CPU, in float32 and float64, with a
    compiler, and where few of many are wanted."""
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and 0 < count <= x.shape[-1] // 2
    return fits and cpp.works("ranked", "rankings are sorted as a whole")


def first_places(x: Tensor, count: int) -> Tensor:
    """`x.sort(dim=-1, descending=True, stable=True).indices[..., :count]` of `x [..., N]`: of equal elements the first
    come first, NaN before all."""
    return torch.ops.nsa_compile.first_places(x.detach(), count)


@torch.library.custom_op("nsa_compile::first_places", mutates_args=())
def _first_places(x: Tensor, count: int) -> Tensor:
    return KERNELS["ranked"]["cpu"].code.forward(x, count)


@_first_places.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], count, dtype=torch.int64)


cpp.register_step_kernel("ranked")

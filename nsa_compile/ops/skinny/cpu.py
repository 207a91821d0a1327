"""Products of few rows on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops import cpp

__all__ = ["forward", "prepare"]


def prepare() -> None:
    _function()


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, depth = x.shape
    columns = weight.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, columns)
    bias = None if bias is None else bias.contiguous()
    first = [None if y is None else y.data_ptr() for y in (x, weight, bias, out)]
    sizes = (rows, columns, depth, x.stride(0), weight.stride(0))
    failed = _function()(*first, *sizes, cpp.DTYPES[x.dtype], torch.get_num_threads())
    if failed:
        raise MemoryError(f"skinny_linear ran out of memory for x {[rows, depth]}; use a smaller batch")
    return out


@cache
def _function() -> Any:
    function = cpp.load("skinny").skinny_linear
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 7
    return function

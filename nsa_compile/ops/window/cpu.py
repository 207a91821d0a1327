"""Sliding-window attention on the CPU: allocates the outputs and calls `cpu.cpp`."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["backward", "forward", "prepare"]


def prepare() -> None:
    cpp.load("window")


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    out = cpp.empty(q, *q.shape[:3], v.shape[3])
    lse = cpp.empty(q, *q.shape[:3], dtype=compute_dtype(q))
    cpp.call("window", "forward", cpp.sizes_of(q, k, v), (q, k, v, out, lse), window, scale)
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = cpp.empty(q, *q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    tensors = (grad_out, q, k, v, out, lse, dq, dk, dv)
    cpp.call("window", "backward", cpp.sizes_of(q, k, v), tensors, window, scale)
    return dq, dk, dv

"""Attention over selected blocks on the CPU: allocates the outputs and calls `cpu.cpp`."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["backward", "forward", "prepare"]


def prepare() -> None:
    cpp.load("selected")


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    out = cpp.empty(q, *q.shape[:3], v.shape[3])
    lse = cpp.empty(q, *q.shape[:3], dtype=compute_dtype(q))
    tensors = (q, k, v, indices, out, lse)
    cpp.call("selected", "forward", cpp.sizes_of(q, k, v), tensors, indices.shape[3], _fitting(block_size, k), scale)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = cpp.empty(q, *q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    tensors = (grad_out, q, k, v, out, lse, indices, dq, dk, dv)
    cpp.call("selected", "backward", cpp.sizes_of(q, k, v), tensors, indices.shape[3], _fitting(block_size, k), scale)
    return dq, dk, dv


def _fitting(block_size: int, k: Tensor) -> int:
    """No block needs to be longer than the keys: there is only one then, and the kernel's tiles hold whole blocks."""
    return min(block_size, max(1, k.shape[1]))

"""Attention over compressed blocks on the CPU: allocates the outputs and calls `cpu.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.compressed.selection import SelectionParameters
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["backward", "forward", "prepare"]


def prepare() -> None:
    cpp.load("compressed")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    stride: int,
    scale: float,
    *selection: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    select_block, offsets, weights, *counts = SelectionParameters(*selection)
    out = cpp.empty(q, *q.shape[:3], v.shape[3])
    lse = cpp.empty(q, *q.shape[:3], dtype=compute_dtype(q))
    indices = cpp.empty(q, *q.shape[:2], k.shape[2], counts[0], dtype=torch.int32)
    cpp.call(
        "compressed", "forward", cpp.sizes_of(q, k, v), (q, k, v, out, lse, indices), block_size, stride, scale,
        select_block, list(offsets), list(weights), len(offsets), *counts,
    )  # fmt: skip
    return out, lse, indices


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_size: int,
    stride: int,
    scale: float,
    *selection: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = cpp.empty(q, *q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    tensors = (grad_out, q, k, v, out, lse, dq, dk, dv)
    cpp.call("compressed", "backward", cpp.sizes_of(q, k, v), tensors, block_size, stride, scale)
    return dq, dk, dv

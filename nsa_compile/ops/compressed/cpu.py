"""Attention over compressed blocks on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.compressed.selection import SelectionParameters

__all__ = ["backward", "forward", "prepare"]


def prepare() -> None:
    cpp.load("compressed")


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, stride: int, scale: float, *selection: Any
) -> tuple[Tensor, ...]:
    select_block, offsets, weights, *counts = SelectionParameters(*selection)
    return cpp.forward(
        "compressed", (q, k, v), block_size, stride, scale, select_block, list(offsets), list(weights), len(offsets),
        *counts, indices=cpp.empty(q, *q.shape[:2], k.shape[2], counts[0], dtype=torch.int32),
    )  # fmt: skip


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block_size: int, stride: int, scale: float, *selection: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return cpp.backward("compressed", (grad_out, grad_lse, q, k, v, out, lse), block_size, stride, scale)

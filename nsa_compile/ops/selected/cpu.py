"""Attention over selected blocks on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops import cpp

__all__ = ["backward", "forward", "prepare"]


def prepare() -> None:
    cpp.load("selected")


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, ...]:
    return cpp.forward("selected", (q, k, v, indices), indices.shape[3], _fitting(block_size, k), scale)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor, block_size: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (grad_out, grad_lse, q, k, v, out, lse, indices)
    return cpp.backward("selected", inputs, indices.shape[3], _fitting(block_size, k), scale)


def _fitting(block_size: int, k: Tensor) -> int:
    """No block needs to be longer than the keys: there is only one then, and the kernel's tiles hold whole blocks."""
    return min(block_size, max(1, k.shape[1]))

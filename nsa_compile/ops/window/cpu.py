"""Sliding-window attention on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops import cpp

__all__ = ["backward", "forward", "prepare"]


def prepare() -> None:
    cpp.load("window")


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, ...]:
    return cpp.forward("window", (q, k, v), window, scale)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return cpp.backward("window", (grad_out, grad_lse, q, k, v, out, lse), window, scale)

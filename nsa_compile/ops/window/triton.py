"""Sliding-window attention on the GPU: the kernels for a band, with a band as wide as the window."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops.triton_common import band_backward, band_forward, prepare

__all__ = ["backward", "forward", "prepare"]


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    return band_forward(q, k, v, scale, window)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return band_backward(grad_out, grad_lse, q, k, v, out, lse, scale, window)

"""Decayed scores on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops import cpp

__all__ = ["backward", "forward", "prepare", "products", "products_backward"]


def prepare() -> None:
    cpp.load("decayed")


def forward(a: Tensor, q: Tensor, k: Tensor, strict: bool) -> Tensor:
    scores = a.new_empty(*a.shape[:2], a.shape[1])
    cpp.call("decayed", "forward", _sizes(a), (*(x.unsqueeze(2) for x in (a, q, k)), scores), int(strict))
    return scores


def backward(gradient: Tensor, a: Tensor, q: Tensor, k: Tensor, strict: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_a, of_q, of_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, q, k))
    operands, results = ([x.unsqueeze(2) for x in some] for some in ((a, q, k), (of_a, of_q, of_k)))
    cpp.call("decayed", "backward", _sizes(a), (*operands, gradient.contiguous(), *results), int(strict))
    return of_a, of_q, of_k


def products(a: Tensor) -> tuple[Tensor, Tensor]:
    up_to, after = (torch.empty_like(a, memory_format=torch.contiguous_format) for _ in range(2))
    cpp.call("decayed", "products", _sizes(a), tuple(x.unsqueeze(2) for x in (a, up_to, after)))
    return up_to, after


def products_backward(of_up_to: Tensor, of_after: Tensor, a: Tensor, up_to: Tensor, after: Tensor) -> Tensor:
    of_a = torch.empty_like(a, memory_format=torch.contiguous_format)
    tensors = (of_up_to, of_after, a, up_to, after, of_a)
    cpp.call("decayed", "products_backward", _sizes(a), tuple(x.unsqueeze(2) for x in tensors))
    return of_a


def _sizes(a: Tensor) -> cpp.Sizes:
    chunks, steps, columns = a.shape
    return cpp.Sizes(chunks, steps, steps, 1, 1, columns, 0)

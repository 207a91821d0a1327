"""The first places of a ranking on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops import cpp

__all__ = ["forward", "prepare"]


def prepare() -> None:
    cpp.load("ranked")


def forward(x: Tensor, count: int) -> Tensor:
    places = torch.empty(*x.shape[:-1], count, dtype=torch.int64, device=x.device)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    sizes = cpp.Sizes(1, rows.shape[0], rows.shape[1], 1, 1, count, 0)
    if rows.shape[0] and count:
        cpp.call("ranked", "forward", sizes, (rows.unsqueeze(0), places.view(-1, count).unsqueeze(0)))
    return places

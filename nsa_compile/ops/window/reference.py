"""Sliding-window attention, dense: the whole `[S, T]` mask, differentiable by autograd. What the kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops.dense import masked_attention

__all__ = ["forward"]


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    position = torch.arange(q.shape[1], device=q.device)[:, None]  # [S, 1]
    key = torch.arange(k.shape[1], device=q.device)  # [T]
    visible = (key <= position) & (key > position - window)
    out, lse, _ = masked_attention(q, k, v, visible[:, None, None], scale)
    return out, lse

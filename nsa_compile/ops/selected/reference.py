"""Attention over selected blocks, dense: a mask `[B, S, G, T]`, differentiable. What the kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops.dense import masked_attention

__all__ = ["forward"]


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    key = torch.arange(k.shape[1], device=q.device)
    # The block of a key among the indices of a row: a set, so duplicates count once and negatives match nothing.
    chosen = (indices.unsqueeze(-1) == key // block_size).any(-2)  # [B, S, G, T]
    causal = key <= torch.arange(q.shape[1], device=q.device)[:, None, None]
    out, lse, _ = masked_attention(q, k, v, (chosen & causal).unsqueeze(3), scale)
    return out, lse

"""Attention over compressed blocks and the selection that follows from it, dense. What the kernels must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops.compressed.selection import SelectionParameters, best_blocks_at, block_scores, sum_heads
from nsa_compile.ops.dense import masked_attention

__all__ = ["forward"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, stride: int, scale: float, *selection: Any
) -> tuple[Tensor, Tensor, Tensor]:
    select_block, offsets, factors, *counts = SelectionParameters(*selection)
    position = torch.arange(q.shape[1], device=q.device)
    block_end = torch.arange(k.shape[1], device=q.device) * stride + block_size - 1
    visible = block_end <= position[:, None]
    out, lse, probabilities = masked_attention(q, k, v, visible[:, None, None], scale)
    if counts[0] == 0:
        return out, lse, q.new_empty(*q.shape[:2], k.shape[2], 0, dtype=torch.int32)
    num_blocks = -(-max(1, q.shape[1]) // select_block)
    score = block_scores(sum_heads(probabilities.detach()), num_blocks, select_block // stride, offsets, factors)
    return out, lse, best_blocks_at(score, position, select_block, *counts)

"""Attention over compressed blocks and the selection that follows from it, dense. What the kernels must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_compile.ops.compressed.selection import block_scores, select_blocks, sum_heads
from nsa_compile.ops.dense import masked_attention

__all__ = ["forward"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    stride: int,
    scale: float,
    select_block: int,
    offsets: Sequence[int],
    weights: Sequence[int],
    num_selected: int,
    num_initial: int,
    num_local: int,
) -> tuple[Tensor, Tensor, Tensor]:
    position = torch.arange(q.shape[1], device=q.device)
    block_end = torch.arange(k.shape[1], device=q.device) * stride + block_size - 1
    visible = block_end <= position[:, None]
    out, lse, probabilities = masked_attention(q, k, v, visible[:, None, None], scale)
    if num_selected == 0:
        return out, lse, q.new_empty(*q.shape[:2], k.shape[2], 0, dtype=torch.int32)
    num_blocks = -(-max(1, q.shape[1]) // select_block)
    score = block_scores(sum_heads(probabilities.detach()), num_blocks, select_block // stride, offsets, weights)
    return out, lse, select_blocks(score, position, select_block, num_selected, num_initial, num_local)

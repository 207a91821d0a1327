"""Attention of one query, dense: masks of all rows. What the kernel must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops.compressed.selection import best_blocks, block_scores, sum_heads
from nsa_compile.ops.dense import masked_attention

__all__ = ["forward"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, indices: Tensor | None, allowed: Tensor | None,
    forced: Tensor | None, block_size: int, scale: float, ratio: int, offsets: list[int], weights: list[int],
    num_selected: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, shape = k.shape[1], (q.shape[0], k.shape[2], q.shape[2] // k.shape[2])
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device) if mask is None else mask
    if indices is not None:
        row = (indices.long()[..., None] * block_size + torch.arange(block_size, device=q.device)).flatten(2)
        row = torch.where((row >= 0) & (row < rows), row, rows)[:, :, None].expand(*shape, -1)
        none = torch.zeros(*shape, rows + 1, dtype=torch.bool, device=q.device)
        visible = none.scatter(-1, row, visible.expand(row.shape))[..., :rows]
    out, _, p = masked_attention(q, k, v, visible[:, None], scale)
    if num_selected == 0:
        return out, q.new_empty(q.shape[0], k.shape[2], 0, dtype=torch.int32)
    assert allowed is not None
    assert forced is not None
    score = block_scores(sum_heads(p[:, 0]), allowed.shape[-1], ratio, offsets, weights)
    return out, best_blocks(score, allowed, forced, num_selected)

"""Attention over compressed blocks and the selection in plain torch: chunks of queries against the blocks they see.

A chunk is as long as keeps its scores small, so memory is linear in S.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops import tiles
from nsa_compile.ops.compressed.selection import SelectionParameters, best_blocks_at, block_scores, sum_heads

__all__ = ["backward", "forward"]

MAX_SCORES = 2**22  # elements of the scores of a chunk


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    stride: int,
    scale: float,
    *selection: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    select_block, offsets, factors, *counts = SelectionParameters(*selection)
    groups = k.shape[2]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=tiles.compute_dtype(q))
    indices = q.new_empty(*q.shape[:2], groups, counts[0], dtype=torch.int32)
    keys, values = tiles.to_keys(k), tiles.to_keys(v)
    for queries, seen, position, hidden in _chunks(q, k, block_size, stride):
        rows = tiles.to_rows(q[:, queries], groups)
        rows_out, rows_lse, probabilities = tiles.attend_tile(
            rows, keys[:, :, :seen], values[:, :, :seen], hidden, scale
        )
        out[:, queries] = tiles.from_rows(rows_out, len(position))
        lse[:, queries] = tiles.from_rows(rows_lse, len(position))
        if counts[0]:
            by_query = (
                probabilities.unflatten(2, (len(position), -1))
                if seen
                else probabilities.new_zeros(q.shape[0], groups, len(position), 1, 0)
            )
            num_blocks = (queries.stop - 1) // select_block + 1
            score = block_scores(sum_heads(by_query), num_blocks, select_block // stride, offsets, factors)
            indices[:, queries] = best_blocks_at(score.transpose(1, 2), position, select_block, *counts)
    return out, lse, indices


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_size: int,
    stride: int,
    scale: float,
    *selection: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[2]
    keys, values = tiles.to_keys(k), tiles.to_keys(v)
    dq, dk, dv = q.new_empty(q.shape), torch.zeros_like(keys), torch.zeros_like(values)
    for queries, seen, position, hidden in _chunks(q, k, block_size, stride):
        rows, rows_grad, rows_out = (tiles.to_rows(x[:, queries], groups) for x in (q, grad_out, out))
        rows_lse = tiles.to_rows(lse[:, queries, :, None], groups).squeeze(-1)
        dq_rows, dk_seen, dv_seen = tiles.attend_tile_backward(
            rows_grad, rows, keys[:, :, :seen], values[:, :, :seen], rows_out, rows_lse, hidden, scale
        )
        dq[:, queries] = tiles.from_rows(dq_rows, len(position))
        dk[:, :, :seen] += dk_seen
        dv[:, :, :seen] += dv_seen
    return dq, dk.transpose(1, 2).to(k.dtype).contiguous(), dv.transpose(1, 2).to(v.dtype).contiguous()


def _chunks(q: Tensor, k: Tensor, block_size: int, stride: int) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """Consecutive queries, the number of blocks the last one sees, their positions, hidden blocks `[C, seen]`."""
    batch, length, heads, _ = q.shape
    chunk = max(1, min(256, MAX_SCORES // max(1, batch * heads * k.shape[1])))
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        seen = min(k.shape[1], max(0, (stop - block_size) // stride + 1)) if stop >= block_size else 0
        position = torch.arange(start, stop, device=q.device)
        block_end = torch.arange(seen, device=q.device) * stride + block_size - 1
        yield slice(start, stop), seen, position, block_end > position[:, None]

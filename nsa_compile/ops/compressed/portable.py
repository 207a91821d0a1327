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
    q: Tensor, k: Tensor, v: Tensor, block_size: int, stride: int, scale: float, *selection: Any
) -> tuple[Tensor, Tensor, Tensor]:
    select_block, offsets, factors, *counts = SelectionParameters(*selection)
    indices = q.new_empty(*q.shape[:2], k.shape[2], counts[0], dtype=torch.int32)

    def select(queries: slice, weights: Tensor) -> None:
        count = queries.stop - queries.start
        by_query = (
            weights.unflatten(2, (count, -1))
            if weights.shape[3]
            else weights.new_zeros(*weights.shape[:2], count, 1, 0)
        )
        num_blocks = (queries.stop - 1) // select_block + 1
        score = block_scores(sum_heads(by_query), num_blocks, select_block // stride, offsets, factors)
        position = torch.arange(queries.start, queries.stop, device=q.device)
        indices[:, queries] = best_blocks_at(score.transpose(1, 2), position, select_block, *counts)

    chunks = _chunks(q, k, block_size, stride)
    out, lse = tiles.forward(chunks, q, k, v, scale, select if counts[0] else None)
    return out, lse, indices


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block_size: int, stride: int, scale: float, *selection: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return tiles.backward(_chunks(q, k, block_size, stride), grad_out, grad_lse, q, k, v, out, lse, scale)


def _chunks(q: Tensor, k: Tensor, block_size: int, stride: int) -> Iterator[tiles.Chunk]:
    batch, length, heads, _ = q.shape
    chunk = max(1, min(256, MAX_SCORES // max(1, batch * heads * k.shape[1])))
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        seen = min(k.shape[1], max(0, (stop - block_size) // stride + 1)) if stop >= block_size else 0
        position = torch.arange(start, stop, device=q.device)
        block_end = torch.arange(seen, device=q.device) * stride + block_size - 1
        yield slice(start, stop), slice(seen), block_end > position[:, None]

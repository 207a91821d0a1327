"""Sliding-window attention in plain torch: chunks of queries against the keys their windows span.

Time is linear in S for a fixed window, memory linear in S.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_compile.ops import tiles

__all__ = ["backward", "forward"]

CHUNK = 128  # queries a tile


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    groups = k.shape[2]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=tiles.compute_dtype(q))
    keys, values = tiles.to_keys(k), tiles.to_keys(v)
    for queries, span, hidden in _chunks(q, k, window):
        rows = tiles.to_rows(q[:, queries], groups)
        rows_out, rows_lse, _ = tiles.attend_tile(rows, keys[:, :, span], values[:, :, span], hidden, scale)
        out[:, queries] = tiles.from_rows(rows_out, hidden.shape[0])
        lse[:, queries] = tiles.from_rows(rows_lse, hidden.shape[0])
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[2]
    keys, values = tiles.to_keys(k), tiles.to_keys(v)
    dq, dk, dv = q.new_empty(q.shape), torch.zeros_like(keys), torch.zeros_like(values)
    for queries, span, hidden in _chunks(q, k, window):
        rows, rows_grad, rows_out = (tiles.to_rows(x[:, queries], groups) for x in (q, grad_out, out))
        rows_lse = tiles.to_rows(lse[:, queries, :, None], groups).squeeze(-1)
        dq_rows, dk_span, dv_span = tiles.attend_tile_backward(
            rows_grad, rows, keys[:, :, span], values[:, :, span], rows_out, rows_lse, hidden, scale
        )
        dq[:, queries] = tiles.from_rows(dq_rows, hidden.shape[0])
        dk[:, :, span] += dk_span
        dv[:, :, span] += dv_span
    return dq, dk.transpose(1, 2).to(k.dtype).contiguous(), dv.transpose(1, 2).to(v.dtype).contiguous()


def _chunks(q: Tensor, k: Tensor, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Consecutive queries, the keys that any of them sees, and which of these `[C, K]` are hidden from which query."""
    length, keys = q.shape[1], k.shape[1]
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        span = slice(min(keys, max(0, start - window + 1)), min(keys, stop))
        position = torch.arange(start, stop, device=q.device)[:, None]
        key = torch.arange(span.start, span.stop, device=q.device)
        yield slice(start, stop), span, (key > position) | (key <= position - window)

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
    return tiles.forward(_chunks(q, k, window), q, k, v, scale)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return tiles.backward(_chunks(q, k, window), grad_out, grad_lse, q, k, v, out, lse, scale)


def _chunks(q: Tensor, k: Tensor, window: int) -> Iterator[tiles.Chunk]:
    length, keys = q.shape[1], k.shape[1]
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        span = slice(min(keys, max(0, start - window + 1)), min(keys, stop))
        position = torch.arange(start, stop, device=q.device)[:, None]
        key = torch.arange(span.start, span.stop, device=q.device)
        yield slice(start, stop), span, (key > position) | (key <= position - window)

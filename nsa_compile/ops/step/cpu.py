"""Attention of one query on the CPU: calls `cpu.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops import cpp

__all__ = ["forward", "prepare"]


def prepare() -> None:
    cpp.load("step")


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, indices: Tensor | None, allowed: Tensor | None,
    forced: Tensor | None, block_size: int, scale: float, ratio: int, offsets: list[int], weights: list[int],
    num_selected: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, groups, rows = q.shape[0], k.shape[2], k.shape[1]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    chosen = q.new_empty(batch, groups, num_selected, dtype=torch.int32)
    blocks = 0
    if num_selected:
        assert allowed is not None
        assert forced is not None
        blocks = allowed.shape[-1]
        allowed, forced = (x.expand(batch, groups, blocks) for x in (allowed, forced))
    if mask is not None:
        places = rows if indices is None else indices.shape[2] * block_size
        mask = mask.expand(batch, groups, q.shape[2] // groups, places)
    tensors = (q, k, v, mask, indices, allowed, forced, out, chosen)
    count = -1 if indices is None else indices.shape[2]
    ranking = (ratio, offsets, weights, len(offsets), blocks, num_selected)
    cpp.call("step", "forward", cpp.sizes_of(q, k, v), tensors, count, block_size, scale, *ranking)
    return out, chosen

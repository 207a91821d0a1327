"""Selected attention by ranges of tokens, version 1: one query after the other, with its blocks spelled out.

The indices of a query become token ranges [start, end), clipped after the query, sorted and merged, and the query
attends to the tokens in them. Slow, differentiable by autograd, and sharing no code with the operator: it is what
`nsa-compile bench selection` compares the operator with.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["selected_attention_v1", "token_ranges"]


def token_ranges(indices: list[int], block_size: int, position: int, length: int) -> list[tuple[int, int]]:
    """Sorted, disjoint, non-touching ranges [start, end) of the tokens up to `position` in the chosen blocks."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        start, end = index * block_size, min((index + 1) * block_size, position + 1, length)
        if index < 0 or start >= end:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def attend_to_ranges(q: Tensor, k: Tensor, v: Tensor, ranges: list[tuple[int, int]], scale: float) -> Tensor:
    """q `[h, D]`, k `[T, D]`, v `[T, Dv]` -> `[h, Dv]`: softmax over the tokens in the ranges, zero without any."""
    tokens = torch.tensor([t for start, end in ranges for t in range(start, end)], dtype=torch.int64, device=q.device)
    weights = (scale * q @ k[tokens].T).softmax(-1)
    return weights @ v[tokens]


def selected_attention_v1(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> Tensor:
    """q `[B, S, Hq, D]`, k `[B, T, G, D]`, v `[B, T, G, Dv]`, indices `[B, S, G, n]` -> `[B, S, Hq, Dv]`."""
    batch, length = q.shape[:2]
    keys, groups = k.shape[1:3]
    grouped = q.unflatten(2, (groups, -1))  # [B, S, G, h, D]
    chosen = indices.tolist()
    rows = []
    for b in range(batch):
        for s in range(length):
            for g in range(groups):
                ranges = token_ranges(chosen[b][s][g], block_size, s, keys)
                rows.append(attend_to_ranges(grouped[b, s, g], k[b, :, g], v[b, :, g], ranges, scale))
    return torch.stack(rows).view(*q.shape[:3], v.shape[-1])

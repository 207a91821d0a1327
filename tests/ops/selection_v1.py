"""Selected attention by ranges of tokens, the readable version: what the blocks of a row mean, token by token.

The indices of a row become token ranges [start, end), clipped after the query, sorted and merged; the query attends to
the tokens in them, one after the other. Float64, plain loops, no code shared with `nsa_compile`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def attend(q: Tensor, k: Tensor, v: Tensor, ranges: list[tuple[int, int]], scale: float) -> Tensor:
    """q [D], k [T, D], v [T, Dv] -> [Dv]: softmax over the tokens in the ranges, zero if there are none."""
    tokens = [token for start, end in ranges for token in range(start, end)]
    scores = [scale * float(q @ k[token]) for token in tokens]
    largest = max(scores, default=0.0)
    weights = [math.exp(score - largest) for score in scores]
    out = torch.zeros(v.shape[-1], dtype=torch.float64)
    for token, weight in zip(tokens, weights, strict=True):
        out += weight / sum(weights) * v[token]
    return out


def selected_attention_v1(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> Tensor:
    """q [B, S, Hq, D], k [B, T, G, D], v [B, T, G, Dv], indices [B, S, G, n] -> [B, S, Hq, Dv]."""
    B, S, Hq, _ = q.shape
    T, G = k.shape[1:3]
    out = torch.zeros(B, S, Hq, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            for head in range(Hq):
                g = head // (Hq // G)
                ranges = token_ranges(indices[b, s, g].tolist(), block_size, s, T)
                out[b, s, head] = attend(q[b, s, head], k[b, :, g], v[b, :, g], ranges, scale)
    return out

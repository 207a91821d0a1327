"""Eq. 9-12 of arXiv 2502.11089 on whole tensors: from the weights of compressed blocks to the selected blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SelectionParameters", "best_blocks", "best_blocks_at", "block_scores", "sum_heads"]


class SelectionParameters(NamedTuple):
    """How compressed blocks rank selection blocks: the last arguments of the operator, in their order."""

    select_block: int
    offsets: Sequence[int]
    weights: Sequence[int]
    num_selected: int
    num_initial: int
    num_local: int


def sum_heads(weights: Tensor) -> Tensor:
    """eq. 10: `[..., h, N] -> [..., N]`, head after head, so that equal weights give equal sums."""
    total = weights[..., 0, :]
    for head in range(1, weights.shape[-2]):
        total = total + weights[..., head, :]
    return total


def block_scores(p: Tensor, num_blocks: int, ratio: int, offsets: Sequence[int], weights: Sequence[int]) -> Tensor:
    """eq. 9: `score[b] = sum_k weights[k] * p[ratio * b + offsets[k]]`, `[..., N] -> [..., num_blocks]`.

    Terms outside the sequence are zero. They are added one by one in the given order.
    """
    left = max(0, -min(offsets, default=0))
    reach = ratio * (num_blocks - 1) + max(offsets, default=0) + 1
    padded = F.pad(p, (left, max(0, reach - p.shape[-1])))
    score = p.new_zeros(*p.shape[:-1], num_blocks)
    for offset, weight in zip(offsets, weights, strict=True):
        first = left + offset
        score = score + weight * padded[..., first : first + ratio * (num_blocks - 1) + 1 : ratio]
    return score


def best_blocks_at(
    score: Tensor, position: Tensor, select_block: int, num_selected: int, num_initial: int, num_local: int
) -> Tensor:
    """eq. 11: int32 indices `[B, C, G, num_selected]` for scores `[B, C, G, Nb]` of queries at `position` `[C]`.

    A row holds the forced blocks, ascending, then the best others, best first, ties to the lower index, then -1.
    """
    block = torch.arange(score.shape[-1], device=score.device)
    current = (position // select_block)[:, None, None]  # [C, 1, 1]
    forced = (block < num_initial) | (block > current - num_local)
    return best_blocks(score, block <= current, forced, num_selected)


def best_blocks(score: Tensor, allowed: Tensor, forced: Tensor, num_selected: int) -> Tensor:
    """The forced blocks among those allowed, then the best others; boolean masks that broadcast to the scores."""
    score = score.masked_fill(forced, torch.inf).masked_fill(~allowed, -torch.inf)
    # A stable sort, because topk leaves the order of ties open.
    best, index = torch.sort(score, dim=-1, descending=True, stable=True)
    index = index.masked_fill(best == -torch.inf, -1)[..., :num_selected].int()
    return F.pad(index, (0, num_selected - index.shape[-1]), value=-1)

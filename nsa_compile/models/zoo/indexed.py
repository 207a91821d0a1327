"""What attentions with an indexer have in common: a ranking of keys that attention teaches."""

from __future__ import annotations

import torch
from torch import Tensor


def first_places(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` highest of the last dimension; of equal ones the first, which `topk` does not promise.

    A ReLU makes many scores zero, so ties are no exception here.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def first_best(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest of the last dimension: see `first_places`."""
    best = first_places(scores, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


def index_scores(weight: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`Σ_j w[j] · ReLU(q[j] · k[s])`: w `[B, J]`, q `[B, J, d]`, k `[B, S, d]` -> `[B, S]`."""
    return torch.einsum("bj,bjs->bs", weight, torch.einsum("bjd,bsd->bjs", q, k).relu())


def indexer_loss(mass: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """KL(p ‖ softmax(scores)) over what is `seen`, `[..., S] -> [...]`: p is the `mass` that attention gives each key,
    made to add up to 1. No gradient reaches attention. Where nothing is seen the loss is zero."""
    mass = mass.detach().masked_fill(~seen, 0)
    p = mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    log_q = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    return (torch.xlogy(p, p) - p * log_q.masked_fill(~seen, 0)).sum(-1)

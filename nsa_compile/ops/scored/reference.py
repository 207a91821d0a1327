"""Attention to scores of a program in plain torch, over all keys at once: what the kernels are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_compile.ops.scored.program import parse
from nsa_compile.ops.tiles import compute_dtype, of_distances

__all__ = ["scored_attention", "scored_places", "weighted_sum"]


def scored_attention(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[N, S, m, Dv]` and log-sum-exp `[N, S, m]`, differentiable by autograd, and the sum of exp of scores less
    the largest."""
    dtype, scores = compute_dtype(v), _evaluated(q, k, v, leaves, program)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    with torch.no_grad():
        largest = scores.amax(-1, keepdim=True)
        total = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp().sum(-1)
    return torch.einsum("nsmt,ntd->nsmd", weights, v.to(dtype)).to(v.dtype), lse, total


def weighted_sum(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str) -> Tensor:
    """Output `[N, S, m, Dv]`, differentiable by autograd."""
    weights = _evaluated(q, k, v, leaves, program)
    return torch.einsum("nsmt,ntd->nsmd", weights, v.to(weights.dtype)).to(v.dtype)


def scored_places(
    q: Sequence[Tensor], k: Sequence[Tensor], leaves: Sequence[Tensor], program: str, count: int
) -> Tensor:
    """The places of the largest scores, summed over heads, `[N, S, count]`."""
    scores = _evaluated(q, k, k[0], leaves, program).sum(2)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _evaluated(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str) -> Tensor:
    """What a program makes of its operands, `[N, S, m, T]`."""
    dtype = compute_dtype(v)
    pairs = zip(q, k, strict=True)
    given = {f"s{i}": torch.einsum("nsmd,ntd->nsmt", a.to(dtype), b.to(dtype)) for i, (a, b) in enumerate(pairs)}
    shape = given["s0"].shape
    given |= {f"x{i}": x if x.shape[3] in (1, shape[3]) else of_distances(x, shape[3]) for i, x in enumerate(leaves)}
    (result,) = parse(program).evaluate(given, dtype)
    return torch.as_tensor(result, dtype=dtype, device=v.device).expand(shape)

"""Attention to scores of a program in plain torch, over all keys at once: what the kernels are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_compile.ops.scored.program import parse
from nsa_compile.ops.tiles import compute_dtype, of_distances

__all__ = ["scored_attention"]


def scored_attention(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[N, S, m, Dv]` and log-sum-exp `[N, S, m]`, differentiable by autograd, and the sum of exp of scores less
    the largest."""
    dtype = compute_dtype(v)
    pairs = zip(q, k, strict=True)
    given = {f"s{i}": torch.einsum("nsmd,ntd->nsmt", a.to(dtype), b.to(dtype)) for i, (a, b) in enumerate(pairs)}
    shape = given["s0"].shape
    given |= {f"x{i}": x if x.shape[3] in (1, shape[3]) else of_distances(x, shape[3]) for i, x in enumerate(leaves)}
    (scores,) = parse(program).evaluate(given, dtype)
    scores = torch.as_tensor(scores, dtype=dtype, device=v.device).expand(shape)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    with torch.no_grad():
        largest = scores.amax(-1, keepdim=True)
        total = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp().sum(-1)
    return torch.einsum("nsmt,ntd->nsmd", weights, v.to(dtype)).to(v.dtype), lse, total

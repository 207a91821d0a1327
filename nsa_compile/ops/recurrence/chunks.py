"""Recurrences of matrices that are read by products alone, in chunks of steps: no step's state is ever held.

Within a chunk each output is a sum over the chunk's own steps, an attention with decay; states are handed on from chunk
to chunk. All of it is to be traced: autograd and the compiler behind it see products of matrices. On the CPU what
decays make of keys is an operator (`ops/decayed`); for other devices it is plain torch.

A decay is a product of factors over a run of steps. Runs are joined from halves, so that each product is one of factors
of its own steps: nothing is divided, no logarithm is taken, and a factor may be zero or of any sign. A product of long
runs vanishes where the loop's does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.ops import decayed
from nsa_compile.ops.recurrence import matrix_recurrence, recurrence, unit_lower_inverse

__all__ = ["linear"]

# Steps of a chunk; of each, its own scores are computed, and a state is held between two.
CHUNK = 64
# Steps up to which scores with a decay for each column are sums of products; above, products of matrices.
SUMMED = 4


def linear(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, u: Tensor | None, first: Tensor, p: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`S[t] = a[t] S[t-1] + k[t] v[t] - p[t] (u[t] S[t-1])` and `o[t] = q[t] S[t]`, for row vectors q, u, v and columns
    k, p.

    Args:
        q, k: `[S, ..., K]`; v: `[S, ..., V]`. Sizes between are those of `first`, or 1.
        a: `[S, ..., K]`, or 1 in the place of K for one factor a state; a single row stands for all steps; without,
            1.
        u: `[S, ..., K]`; without, 0.
        first: `[..., K, V]`, the state before the first step.
        p: `[S, ..., K]`, along which u's readings are taken off; without, along k.

    Returns:
        `o [S, ..., V]` and the state after the last step, in the common dtype, float32 at least.
    """
    steps = v.shape[0]
    q, k, v, a, u, first, p = _in_one_dtype(q, k, v, a, u, first, p)
    chunk = min(CHUNK, 1 << (steps - 1).bit_length())
    q, k, v = (_chunks(x, steps, chunk, 0) for x in (q, k, v))
    decay = None if a is None else _Decay(_chunks(a, steps, chunk, 1))
    late = k if decay is None else k * decay.after
    if u is None:
        total = None if decay is None else decay.total.mT.movedim(-3, 0)  # [chunks, ..., K | 1, 1]
        states = recurrence(total, _by_chunk(late.mT @ v, first), first)
    else:
        u = _chunks(u, steps, chunk, 0)
        along = k if p is None else _chunks(p, steps, chunk, 0)
        off = late if p is None else along if decay is None else along * decay.after
        # Each step of a chunk reads what the steps of the chunk before it have left. Along p it adds `own`, and takes
        # off the product of `read` and the state that the chunk begins with.
        solution = unit_lower_inverse(_scores(u, along, decay, strict=True))
        own = solution @ v if p is None else -(solution @ (_scores(u, k, decay, strict=True) @ v))
        read = solution @ (u if decay is None else u * decay.before)
        brought = off.mT @ own if p is None else late.mT @ v + off.mT @ own
        kept = torch.eye(k.shape[-1], dtype=v.dtype, device=v.device)
        kept = (kept if decay is None else kept * decay.total) - off.mT @ read
        states = matrix_recurrence(_by_chunk(kept, first), _by_chunk(brought, first), first)
    entering = torch.cat([first.unsqueeze(0), states[:-1]]).movedim(0, -3)
    out = (q if decay is None else q * decay.up_to) @ entering
    if u is None or p is not None:
        out = _scores(q, k, decay, strict=False) @ v + out
    if u is not None:
        out = _scores(q, along, decay, strict=False) @ (own - read @ entering) + out
    return out.flatten(-3, -2)[..., :steps, :].movedim(-2, 0), states[-1]


def _in_one_dtype(*tensors: Any) -> list[Any]:
    """Operands in a dtype to sum in: none is rounded to that of another."""
    dtypes = [x.dtype for x in tensors if x is not None]
    common = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return [None if x is None else x.to(common) for x in tensors]


def _chunks(x: Tensor, steps: int, chunk: int, filling: float) -> Tensor:
    """`[S, ..., D]` as `[..., chunks, steps of a chunk, D]`, filled up at the end."""
    x = x.expand(steps, *x.shape[1:]).movedim(0, -2)
    x = F.pad(x, (0, 0, 0, -steps % chunk), value=filling) if steps % chunk else x
    return x.unflatten(-2, (-1, chunk))


def _by_chunk(x: Tensor, state: Tensor) -> Tensor:
    """`[..., chunks, M, N]` as `[chunks, ..., M, N]`, with the sizes between of a state."""
    return x.movedim(-3, 0).expand(x.shape[-3], *state.shape[:-2], *x.shape[-2:])


class _Decay:
    """The products of factors `a [..., C, D]` over runs of steps of a chunk; D is 1 for one factor a state.

    Attributes:
        up_to, before: over the steps up to each, with it and without it, `[..., C, D]`.
        after: over the steps after each.
        total: over all of them, `[..., 1, D]`.
        runs: where D is 1, over the steps after each, up to each later one, `[..., C, C]`.
    """

    def __init__(self, a: Tensor) -> None:
        self.a = a
        self.runs = _runs(a.squeeze(-1)) if a.shape[-1] == 1 else None
        if self.runs is not None:
            self.up_to, self.after = a[..., :1, :] * self.runs[..., :1], self.runs[..., -1, :, None]
        elif decayed.takes(a):
            self.up_to, self.after = (x.reshape(a.shape) for x in decayed.decay_products(_flat(a)))
        else:
            self.up_to, self.after = _products(a)
        self.before = torch.cat([torch.ones_like(a[..., :1, :]), self.up_to[..., :-1, :]], -2)
        self.total = self.up_to[..., -1:, :]


def _products(a: Tensor) -> tuple[Tensor, Tensor]:
    """The products up to each step and after it."""
    up_to, after = a.unsqueeze(-2), torch.ones_like(a).unsqueeze(-2)  # [..., runs, steps of a run, D]
    while up_to.shape[-2] < a.shape[-2]:
        first, second = _halves(up_to)
        after_first, after_second = _halves(after)
        up_to = torch.cat([first, second * first[..., -1:, :]], -2)
        after = torch.cat([after_first * second[..., -1:, :], after_second], -2)
    return up_to.squeeze(-3), after.squeeze(-3)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every other run of `[..., runs, steps, D]`, and those in between."""
    first, second = x.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def _scores(q: Tensor, k: Tensor, decay: _Decay | None, *, strict: bool) -> Tensor:
    """`q[i] · (product of the factors after step j, up to step i) k[j]` for `j <= i`, else 0: `[..., C, C]`.

    Where `strict`, for `j < i`, and step i's own factor is left out.
    """
    if decay is None:
        return (q @ k.mT).tril(-1 if strict else 0)
    if decay.runs is not None:
        return (q @ k.mT) * (_a_step_later(decay.runs) if strict else decay.runs)
    return _scores_by_column(q, k, decay.a, strict=strict)


def _flat(x: Tensor) -> Tensor:
    """`[..., C, D]` as `[N, C, D]`."""
    return x.reshape(-1, *x.shape[-2:])


def _a_step_later(runs: Tensor) -> Tensor:
    """Products up to the step before each."""
    return torch.cat([torch.zeros_like(runs[..., :1, :]), runs[..., :-1, :]], -2)


def _runs(a: Tensor) -> Tensor:
    """The products of `a [..., C]` after step j up to step i, `[..., C, C]`."""
    runs = torch.ones_like(a)[..., None, None]  # [..., runs, steps, steps]
    up_to, after = a.unsqueeze(-1), torch.ones_like(a).unsqueeze(-1)
    while runs.shape[-1] < a.shape[-1]:
        (first, second), (after_first, after_second) = _pairs(up_to), _pairs(after)
        top, bottom = _halves(runs)
        across = second.unsqueeze(-1) * after_first.unsqueeze(-2)
        runs = _joined(top, across, bottom)
        up_to = torch.cat([first, second * first[..., -1:]], -1)
        after = torch.cat([after_first * second[..., -1:], after_second], -1)
    return runs.squeeze(-3)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.unflatten(-2, (-1, 2)).unbind(-2)
    return first, second


def _joined(top: Tensor, across: Tensor, bottom: Tensor) -> Tensor:
    """`[[top, 0], [across, bottom]]`."""
    return torch.cat([torch.cat([top, torch.zeros_like(top)], -1), torch.cat([across, bottom], -1)], -2)


def _scores_by_column(q: Tensor, k: Tensor, a: Tensor, *, strict: bool) -> Tensor:
    """`_scores` with a factor for each column: of two halves, the later one's queries carry the factors since it began,
    and the earlier one's keys those until it ends."""
    if decayed.takes(a):
        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], a.shape[:-2])
        operands = (_flat(x.expand(*batch, *x.shape[-2:])) for x in (a, q, k))
        return decayed.decayed_scores(*operands, strict=strict).reshape(*batch, a.shape[-2], a.shape[-2])
    own = (q * k).sum(-1)
    scores = (torch.zeros_like(own) if strict else own)[..., None, None]
    q, k, up_to = q.unsqueeze(-2), k.unsqueeze(-2), a.unsqueeze(-2)  # [..., runs, steps, K]
    before, after = torch.ones_like(up_to), torch.ones_like(up_to)
    while scores.shape[-1] < a.shape[-2]:
        (_, late), (early, _), (top, bottom) = _halves(q), _halves(k), _halves(scores)
        (first, second), (before_first, before_second) = _halves(up_to), _halves(before)
        after_first, after_second = _halves(after)
        late, early = late * (before_second if strict else second), early * after_first
        if scores.shape[-1] <= SUMMED:
            across = (late.unsqueeze(-2) * early.unsqueeze(-3)).sum(-1)
        else:
            across = late @ early.mT
        scores = _joined(top, across, bottom)
        up_to = torch.cat([first, second * first[..., -1:, :]], -2)
        before = torch.cat([before_first, before_second * first[..., -1:, :]], -2)
        after = torch.cat([after_first * second[..., -1:, :], after_second], -2)
        q, k = (torch.cat(_halves(x), -2) for x in (q, k))
    return scores.squeeze(-3)

"""The recurrences as plain loops, differentiable as any torch program."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear", "matrix", "recurrence"]


_JOINS = {
    "max": torch.maximum,
    "min": torch.minimum,
    "max_old": lambda h, b: torch.where(b > h, b, h),
    "max_new": lambda h, b: torch.where(b >= h, b, h),
    "min_old": lambda h, b: torch.where(b < h, b, h),
    "min_new": lambda h, b: torch.where(b <= h, b, h),
    "logsumexp": torch.logaddexp,
}


def recurrence(a: Tensor | None, b: Tensor, first: Tensor, kind: str) -> Tensor:
    """Values `[S, ...]` of the recurrence, as `nsa_compile.ops.recurrence.recurrence` defines them."""
    value, values = first, []
    for t in range(b.shape[0]):
        factor = None if a is None else a[t if a.shape[0] > 1 else 0]
        if kind == "sum":
            value = (value if factor is None else factor * value) + b[t]
        else:
            shifted = value if factor is None else value + factor
            value = _JOINS[kind](shifted, b[t])
        values.append(value)
    return torch.stack(values)


def matrix(m: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """`h[t] = m[t] @ h[t - 1] + b[t]`."""
    value, values = first, []
    for t in range(b.shape[0]):
        value = m[t] @ value + b[t]
        values.append(value)
    return torch.stack(values)


def linear(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, u: Tensor | None, first: Tensor, p: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs `[S, ..., V]` and the last state `[..., K, V]`, as `chunks.linear` defines them."""
    state, outputs = first, []
    for t in range(v.shape[0]):
        read = None if u is None else (u[t].unsqueeze(-1) * state).sum(-2)
        if a is not None:
            state = a[t if a.shape[0] > 1 else 0].unsqueeze(-1) * state
        state = state + k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
        if read is not None:
            state = state - (k if p is None else p)[t].unsqueeze(-1) * read.unsqueeze(-2)
        outputs.append((q[t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs), state

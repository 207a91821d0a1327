"""Pieces of the portable implementations: rows of query heads, attention tile by tile, forwards and backwards.

A tile works on `[B, G, rows, D]`, its rows being the heads of a group for some consecutive queries. Everything is
computed in `compute_dtype`, and no autograd graph is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["Chunk", "backward", "compute_dtype", "forward", "of_distances"]

# Consecutive queries, the keys that any of them sees, and which of these `[C, K]` are hidden from which query.
Chunk = tuple[slice, slice, Tensor]


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def of_distances(x: Tensor, keys: int) -> Tensor:
    """`[N, 1, m, C + T - 1]`, an element for each `key - query + C - 1`, as `[N, C, m, T]` for T keys, a copy."""
    return x.squeeze(1).unfold(-1, keys, 1).flip(2).transpose(1, 2)


def _to_rows(x: Tensor, groups: int) -> Tensor:
    """`[B, C, Hq, D]` -> `[B, G, C * h, D]`, in the dtype of the computation."""
    grouped = x.unflatten(2, (groups, x.shape[2] // groups)).to(compute_dtype(x))
    return grouped.transpose(1, 2).flatten(2, 3)


def _from_rows(rows: Tensor, queries: int) -> Tensor:
    """`[B, G, C * h, ...]` -> `[B, C, Hq, ...]`, for C queries."""
    heads = rows.shape[2] // queries
    return rows.unflatten(2, (queries, heads)).transpose(1, 2).flatten(2, 3)


def _to_keys(x: Tensor) -> Tensor:
    """`[B, T, G, D]` -> `[B, G, T, D]`, in the dtype of the computation."""
    return x.transpose(1, 2).to(compute_dtype(x))


def _scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """`[B, G, rows, K]`, -inf where `hidden` `[C, K]` says so; the rows are the heads of C queries."""
    scores = (q * scale) @ k.transpose(-1, -2)
    heads = scores.shape[2] // hidden.shape[0]
    return scores.masked_fill_(hidden.repeat_interleave(heads, 0), -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, G, rows, D]`, k `[B, G, K, D]`, v `[B, G, K, Dv]`: output, log-sum-exp and weights `[B, G, rows, K]`."""
    scores = _scores(q, k, hidden, scale)
    if k.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf), scores
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # rows that see nothing
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    weights /= total.masked_fill(total == 0, 1.0)
    return weights @ v, (largest + total.log()).squeeze(-1), weights


def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    hidden: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `_attend` with respect to q, k and v; `lse` and its gradient, if any, are `[B, G, rows]`."""
    delta = (grad_out * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse.unsqueeze(-1)
    # Rows that see nothing have only scores of -inf; any finite lse gives them weights of zero.
    lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = _scores(q, k, hidden, scale).sub_(lse).exp_()
    dv = weights.transpose(-1, -2) @ grad_out
    dscores = (grad_out @ v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scale)
    return dscores @ k, dscores.transpose(-1, -2) @ q, dv


def forward(
    chunks: Iterable[Chunk], q: Tensor, k: Tensor, v: Tensor, scale: float,
    read_weights: Callable[[slice, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp, chunk by chunk.

    `read_weights`, if there is one, gets the queries of each chunk and their weights `[B, G, rows, K]`.
    """
    groups, keys, values = k.shape[2], _to_keys(k), _to_keys(v)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    for queries, span, hidden in chunks:
        rows = _to_rows(q[:, queries], groups)
        rows_out, rows_lse, weights = _attend(rows, keys[:, :, span], values[:, :, span], hidden, scale)
        out[:, queries] = _from_rows(rows_out, hidden.shape[0])
        lse[:, queries] = _from_rows(rows_lse, hidden.shape[0])
        if read_weights is not None:
            read_weights(queries, weights)
    return out, lse


def backward(
    chunks: Iterable[Chunk], grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, chunk by chunk."""
    groups, keys, values = k.shape[2], _to_keys(k), _to_keys(v)
    dq, dk, dv = q.new_empty(q.shape), torch.zeros_like(keys), torch.zeros_like(values)
    for queries, span, hidden in chunks:
        rows, rows_grad, rows_out = (_to_rows(x[:, queries], groups) for x in (q, grad_out, out))
        rows_lse, rows_grad_lse = (
            x if x is None else _to_rows(x[:, queries, :, None], groups).squeeze(-1) for x in (lse, grad_lse)
        )
        assert rows_lse is not None
        dq_rows, dk_span, dv_span = _attend_backward(
            rows_grad, rows_grad_lse, rows, keys[:, :, span], values[:, :, span], rows_out, rows_lse, hidden, scale
        )
        dq[:, queries] = _from_rows(dq_rows, hidden.shape[0])
        dk[:, :, span] += dk_span
        dv[:, :, span] += dv_span
    return dq, dk.transpose(1, 2).to(k.dtype).contiguous(), dv.transpose(1, 2).to(v.dtype).contiguous()

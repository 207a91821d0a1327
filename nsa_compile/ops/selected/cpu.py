"""Attention over selected blocks on the CPU: calls `cpu.cpp`.

Where single tokens are selected, and not few of them, the selection is a mask instead, and the kernel that reads whole
tiles is called (`scored/cpu.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.scored import cpu as scored
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["backward", "forward", "prepare"]

# Scores of a tile, of which x0 keeps those of the selected keys, and their derivative by the product.
PROGRAM = "v0 = mul.Tensor(s0, x1)\nv1 = where.ScalarOther(x0, v0, -inf)\nreturn v1"
DERIVATIVE = "v0 = where.self(x0, g, 0)\nv1 = mul.Tensor(v0, x1)\nreturn v1"


def prepare() -> None:
    cpp.load("selected")


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, ...]:
    if not _suits_tiles(q, k, indices, block_size):
        return cpp.forward("selected", (q, k, v, indices), indices.shape[3], _fitting(block_size, k), scale)
    leaves = [_selected(k, indices), _number(scale, q)]
    out, lse, _ = scored.forward([_by_group(q, k)], [_sequences(k)], _sequences(v), leaves, PROGRAM, None)
    return _by_head(out, k), _by_head(lse, k)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor, block_size: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _suits_tiles(q, k, indices, block_size):
        inputs = (grad_out, grad_lse, q, k, v, out, lse, indices)
        return cpp.backward("selected", inputs, indices.shape[3], _fitting(block_size, k), scale)
    leaves = [_selected(k, indices), _number(scale, q)]
    grad_out, out, lse = (_by_group(x, k) for x in (grad_out, out, lse))
    grad_lse = None if grad_lse is None else _by_group(grad_lse, k)
    dq, dk, dv = scored.backward(
        grad_out, grad_lse, [_by_group(q, k)], [_sequences(k)], _sequences(v), leaves, out, lse, PROGRAM, DERIVATIVE,
        None, (),
    )  # fmt: skip
    batch, groups = k.shape[0], k.shape[2]
    dk, dv = (x.unflatten(0, (batch, groups)).transpose(1, 2) for x in (dk, dv))
    return _by_head(dq, k), dk.contiguous(), dv.contiguous()


def _suits_tiles(q: Tensor, k: Tensor, indices: Tensor, block_size: int) -> bool:
    """Whether whole tiles of queries and keys are faster than the keys of each query, which few heads share.

    A key that a query reads by itself takes vectors of heads, one that a tile reads the heads that there are, and its
    share of the mask.
    """
    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if block_size > 1 or queries * keys * q.shape[2] < 2**21:  # a kernel takes seconds to compile
        return False
    lanes = 8 if q.dtype == torch.float64 else 16
    selected, seen = (n - n * n / (2 * queries) for n in (min(indices.shape[3], queries), min(keys, queries)))
    return (0.8 * heads + 1.5) * seen < -(-heads // lanes) * lanes * selected


def _selected(k: Tensor, indices: Tensor) -> Tensor:
    """The keys that a query reads, bool `[B G, S, 1, T]`: those selected that do not come after it.

    Sequences one after the other that select the same, such as heads that share their ranking, share a mask, too: to
    write one takes longer than to compare.
    """
    keys = k.shape[1]
    sequences = [x for batch in indices.unbind(0) for x in batch.unbind(1)]  # [S, n] each
    different, which = [], []
    for i, x in enumerate(sequences):
        if i == 0 or not torch.equal(x, sequences[i - 1]):
            different.append(x)
        which.append(len(different) - 1)
    masks = torch.zeros(len(different), indices.shape[1], keys + 2, dtype=torch.bool, device=k.device)
    for mask, x in zip(masks, different, strict=True):
        mask.scatter_(1, x.long().clamp(-1, keys).add_(1), True)  # the first and the last are of no key
    masks = masks.tril_(1)[..., 1 : keys + 1].unsqueeze(2)
    return masks.expand(len(which), -1, -1, -1) if len(different) == 1 else masks[which]


def _number(x: float, like: Tensor) -> Tensor:
    return torch.full((1, 1, 1, 1), x, dtype=compute_dtype(like), device=like.device)


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """`[B, S, H, ...]` as `[B G, S, m, ...]`."""
    return x.unflatten(2, (k.shape[2], x.shape[2] // k.shape[2])).transpose(1, 2).flatten(0, 1)


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """`[B G, S, m, ...]` as `[B, S, H, ...]`."""
    return x.unflatten(0, (k.shape[0], k.shape[2])).transpose(1, 2).flatten(2, 3).contiguous()


def _sequences(x: Tensor) -> Tensor:
    """`[B, T, G, D]` as `[B G, T, D]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _fitting(block_size: int, k: Tensor) -> int:
    """No block needs to be longer than the keys: there is only one then, and the kernel's tiles hold whole blocks."""
    return min(block_size, max(1, k.shape[1]))

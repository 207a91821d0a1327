"""The recurrences in plain torch, for any device: steps are taken in blocks side by side.

A block's values from a first value of zero, and what its steps make of another first value, are computed for all blocks
together, one step of theirs after another; then the blocks hand their last values on. That is about 2 √S short rounds,
in which each element is read a few times, and nothing is divided by: a factor of zero, or a product of factors that
vanishes, is as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["backward", "forward", "matrix_backward", "matrix_forward"]

# Elements of a step from which on a round takes longer than it takes to start one.
LARGE = 2**14


def forward(a: Tensor | None, b: Tensor, first: Tensor, kind: str) -> Tensor:
    """`recurrence` of this package."""
    wide = _wide(b.dtype)
    values = _values(None if a is None else a.to(wide), b.to(wide), first.to(wide), kind)
    return values.to(b.dtype)


def backward(
    gradient: Tensor, a: Tensor | None, values: Tensor, b: Tensor, first: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `a` (empty where there is none), `b` and `first`."""
    wide = _wide(gradient.dtype)
    before = torch.cat([first.unsqueeze(0), values[:-1]]).to(wide)
    steps = None if a is None else a.to(wide)
    if kind == "sum":
        taken = steps  # what of a value's gradient goes to the value before it
        brought = None
    else:
        shifted = before if steps is None else before + steps
        ahead = shifted > b if kind == "max" else shifted < b
        taken = torch.where(shifted == b, 0.5, ahead.to(wide))
        brought = 1 - taken
    running = _from_the_end(taken, gradient.to(wide))
    of_b = running if brought is None else running * brought
    if taken is None:
        of_first, of_a = running[0], gradient.new_empty(0)
    else:
        of_first = taken[0].conj() * running[0]
        of_a = gradient.new_empty(0)
        if a is not None:
            of_a = running * (before.conj() if kind == "sum" else taken)
            of_a = of_a.sum_to_size(a.shape).to(a.dtype)
    return of_a, of_b.to(b.dtype), of_first.expand(first.shape).to(first.dtype)


def _from_the_end(taken: Tensor | None, gradient: Tensor) -> Tensor:
    """`g[t] + taken[t + 1] * (what comes from t + 1)`, from the last step to the first."""
    if taken is not None and taken.shape[0] > 1:
        taken = torch.cat([torch.ones_like(taken[:1]), taken[1:].conj().flip(0)])
    elif taken is not None:
        taken = taken.conj()
    return _values(taken, gradient.flip(0), torch.zeros_like(gradient[0]), "sum").flip(0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _values(a: Tensor | None, b: Tensor, first: Tensor, kind: str) -> Tensor:
    steps = b.shape[0]
    if a is None:
        # Not a part of a longer tensor: Inductor asserts that what an operator yields begins at 16 bytes.
        if kind == "sum":
            return torch.cumsum(torch.cat([(first + b[0]).unsqueeze(0), b[1:]]), 0, dtype=b.dtype)
        extreme = torch.maximum if kind == "max" else torch.minimum
        joined = torch.cat([extreme(first, b[0]).unsqueeze(0), b[1:]])
        return (joined.cummax(0) if kind == "max" else joined.cummin(0)).values
    a = a.expand(steps, *a.shape[1:])
    advance = _advance(kind)
    values = torch.empty_like(b, memory_format=torch.contiguous_format)
    if first.numel() >= LARGE or steps < 8:
        value = first
        for t in range(steps):
            value = values[t].copy_(advance(value, a[t], b[t]))
        return values
    # Blocks of equal length, and what is left over.
    length = math.isqrt(steps)
    blocks = steps // length
    whole = blocks * length
    rows_a, rows_b = (x[:whole].unflatten(0, (blocks, length)) for x in (a, b))
    rows = values[:whole].unflatten(0, (blocks, length))
    join = torch.mul if kind == "sum" else torch.add
    factors = torch.empty_like(rows_a, memory_format=torch.contiguous_format)
    rows[:, 0], factors[:, 0] = rows_b[:, 0], rows_a[:, 0]
    for t in range(1, length):
        rows[:, t] = advance(rows[:, t - 1], rows_a[:, t], rows_b[:, t])
        factors[:, t] = join(factors[:, t - 1], rows_a[:, t])
    entering = [first]
    for i in range(blocks):
        entering.append(advance(entering[-1], factors[i, -1], rows[i, -1]))
    rows.copy_(advance(torch.stack(entering[:-1]).unsqueeze(1), factors, rows))
    value = entering[-1]
    for t in range(whole, steps):
        value = values[t].copy_(advance(value, a[t], b[t]))
    return values


def _advance(kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """From a value, with a step's factor and what it brings, to the next."""
    if kind == "sum":
        return lambda value, a, b: torch.addcmul(b, a, value)
    extreme = torch.maximum if kind == "max" else torch.minimum
    return lambda value, a, b: extreme(value + a, b)


def matrix_forward(m: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """`matrix_recurrence` of this package."""
    batch = b.shape[1:-2]
    values = torch.empty_like(b, memory_format=torch.contiguous_format)
    flat, rows = values.flatten(1, -3) if batch else values.unsqueeze(1), _flat(b)
    value, factors = _flat(first.unsqueeze(0))[0], _flat(m)
    for t in range(b.shape[0]):
        value = torch.baddbmm(rows[t], factors[t], value, out=flat[t])
    return values


def matrix_backward(gradient: Tensor, m: Tensor, values: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `m`, `b` and `first`."""
    factors = m.mT.conj()
    shifted = torch.cat([torch.zeros_like(factors[:1]), factors[1:].flip(0)])
    running = matrix_forward(shifted, gradient.flip(0), torch.zeros_like(first)).flip(0)
    before = torch.cat([first.unsqueeze(0), values[:-1]])
    return running @ before.mT.conj(), running, factors[0] @ running[0]


def _flat(x: Tensor) -> Tensor:
    """`[S, ..., K, V]` with one dimension of batches."""
    return x.reshape(x.shape[0], -1, *x.shape[-2:])

"""The recurrences in plain torch, for any device: steps are taken in blocks side by side.

A block's values from a first value of zero, and what its steps make of another first value, are computed for all blocks
together, one step of theirs after another; then the blocks hand their last values on. That is about 2 √S short rounds,
in which each element is read a few times, and nothing is divided by: a factor of zero, or a product of factors that
vanishes, is as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["OF_EQUALS", "backward", "forward", "matrix_backward", "matrix_forward", "unit_lower_inverse"]

# What the old one of two equal numbers has of the gradient of their maximum or minimum.
OF_EQUALS = {"max": 0.5, "min": 0.5, "max_old": 1.0, "min_old": 1.0, "max_new": 0.0, "min_new": 0.0}
_JOINED = {kind: torch.maximum if kind.startswith("max") else torch.minimum for kind in OF_EQUALS}
_JOINED["logsumexp"] = torch.logaddexp
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
    steps = None if a is None else a.to(wide)
    if kind == "sum" and steps is None:
        running = _from_the_end(None, gradient.to(wide))
        return gradient.new_empty(0), running.to(b.dtype), running[0].to(first.dtype)
    before = torch.cat([first.unsqueeze(0), values[:-1]]).to(wide)
    if kind == "sum":
        taken = steps  # what of a value's gradient goes to the value before it
        brought = None
    else:
        shifted = before if steps is None else before + steps
        if kind == "logsumexp":
            taken, brought = ((x - values).to(wide).exp() for x in (shifted, b))
        else:
            ahead = shifted > b if kind.startswith("max") else shifted < b
            taken = torch.where(shifted == b, OF_EQUALS[kind], ahead.to(wide))
            brought = 1 - taken
    assert taken is not None
    running = _from_the_end(taken, gradient.to(wide))
    of_b = running if brought is None else running * brought
    of_first = taken[0].conj() * running[0]
    of_a = gradient.new_empty(0)
    if a is not None:
        of_a = running * (before.conj() if kind == "sum" else taken)
        of_a = of_a.sum_to_size(a.shape).to(a.dtype)
    return of_a, of_b.to(b.dtype), of_first.expand(first.shape).to(first.dtype)


def _from_the_end(taken: Tensor | None, gradient: Tensor) -> Tensor:
    """`g[t] + taken[t + 1] * (what comes from t + 1)`, from the last step to the first."""
    if taken is not None and taken.shape[0] > 1:
        taken = torch.cat([taken[1:].conj(), torch.ones_like(taken[:1])])
    elif taken is not None:
        taken = taken.conj()
    return _values(taken, gradient, torch.zeros_like(gradient[0]), "sum", from_the_end=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _values(a: Tensor | None, b: Tensor, first: Tensor, kind: str, *, from_the_end: bool = False) -> Tensor:
    """The value of each step; `from_the_end`, `first` is what comes before the last one."""
    steps = b.shape[0]
    if a is None and kind != "sum":
        # Not a part of a longer tensor: Inductor asserts that what an operator yields begins at 16 bytes.
        joined = torch.cat([_JOINED[kind](first, b[0]).unsqueeze(0), b[1:]])
        if kind == "logsumexp":
            return joined.logcumsumexp(0)
        return (joined.cummax(0) if kind.startswith("max") else joined.cummin(0)).values
    a = None if a is None else a.expand(steps, *a.shape[1:])
    advance = _advance(kind)
    values = torch.empty_like(b, memory_format=torch.contiguous_format)

    def forth(count: int) -> range:
        return range(count - 1, -1, -1) if from_the_end else range(count)

    def one_by_one(value: Tensor, some: Iterable[int]) -> Tensor:
        for t in some:
            value = advance(value, None if a is None else a[t], b[t], values[t])
        return value

    if first.numel() >= LARGE or steps < 8:
        one_by_one(first, forth(steps))
        return values
    # Blocks of equal length, and what is left over at the end.
    length = math.isqrt(steps)
    blocks = steps // length
    whole = blocks * length
    rows = values[:whole].unflatten(0, (blocks, length))
    of_b = b[:whole].unflatten(0, (blocks, length))
    of_a = None if a is None else a[:whole].unflatten(0, (blocks, length))
    if from_the_end:
        first = one_by_one(first, range(steps - 1, whole - 1, -1))
    factors = None if of_a is None else _factors(of_a, kind, list(forth(length)))
    earlier, last = None, forth(length)[-1]
    for t in forth(length):
        if earlier is None:
            rows[:, t] = of_b[:, t]
        else:
            advance(rows[:, earlier], None if of_a is None else of_a[:, t], of_b[:, t], rows[:, t])
        earlier = t
    entering = [first] * blocks
    for i in forth(blocks):
        entering[i] = first
        first = advance(
            first, None if factors is None else factors[i, last], rows[i, last], torch.empty_like(rows[i, last])
        )
    advance(torch.stack(entering).unsqueeze(1), factors, rows, rows)
    if not from_the_end:
        one_by_one(first, range(whole, steps))
    return values


def _factors(a: Tensor, kind: str, order: list[int]) -> Tensor:
    """What the steps of each block `[blocks, length, ...]` make, up to each, of a value before the block."""
    found = torch.empty_like(a, memory_format=torch.contiguous_format)
    found[:, order[0]] = a[:, order[0]]
    for t, earlier in zip(order[1:], order, strict=False):
        join = torch.mul if kind == "sum" else torch.add
        join(found[:, earlier], a[:, t], out=found[:, t])
    return found


def _advance(kind: str) -> Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]:
    """`(value, a, b, out)`: from a value, with a step's factor and what it brings, to the next, in `out`."""
    if kind == "sum":
        return lambda value, a, b, out: (
            torch.add(value, b, out=out) if a is None else torch.addcmul(b, a, value, out=out)
        )
    join: Any = _JOINED[kind]
    return lambda value, a, b, out: join(value if a is None else value + a, b, out=out)


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
    running = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    flat, rows, turned = _flat(running), _flat(gradient), _flat(factors)
    value = flat[-1].copy_(rows[-1])
    for t in range(m.shape[0] - 2, -1, -1):
        value = torch.baddbmm(rows[t], turned[t + 1], value, out=flat[t])
    before = torch.cat([first.unsqueeze(0), values[:-1]])
    return running @ before.mT.conj(), running, factors[0] @ running[0]


def unit_lower_inverse(below: Tensor) -> Tensor:
    """`unit_lower_inverse` of this package: of `[[A, 0], [X, B]]` it is `[[A^-1, 0], [-B^-1 X A^-1, B^-1]]`."""
    inverse = torch.zeros_like(below, memory_format=torch.contiguous_format)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    size = 1
    while size < below.shape[-1]:
        found, given = (_on_diagonal(x, 2 * size) for x in (inverse, below))
        first, second = found[..., :size, :size], found[..., size:, size:]
        across = given[..., size:, :size]
        found[..., size:, :size] = -across if size == 1 else -(second @ across @ first)
        size *= 2
    return inverse


def _on_diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of `[..., C, C]`, as `[..., C / size, size, size]`."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _flat(x: Tensor) -> Tensor:
    """`[S, ..., K, V]` with one dimension of batches."""
    return x.reshape(x.shape[0], -1, *x.shape[-2:])

"""Rows of a buffer, written in every way torch has and in every shape it broadcasts: equal to the loop, or declined."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile.passes.report import ScanReport
from tests.step_programs import loop

S = 4


def values_and_grads(run: Callable, scan: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a program, and the gradients of a fixed random projection of them to its floating inputs."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = pytree.tree_leaves(run(scan, *inputs))
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=rng, dtype=torch.float64) for out in outputs]
    loss = sum((out * w).sum() for out, w in zip(outputs, weights, strict=True) if out.requires_grad)
    sources = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(loss, sources, allow_unused=True) if isinstance(loss, Tensor) else [None] * len(sources)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(sources, grads, strict=True)]
    return [out.detach() for out in outputs] + grads


def compared(run: Callable, *inputs: Tensor, nested: str = "eager") -> ScanReport:
    """Compile `run(scan, *inputs)`, compare it with the loop, and return what the compiler says of its scan."""
    torch._dynamo.reset()
    expected = values_and_grads(run, loop, list(inputs))
    fast = nsa_compile.compile(run, nested=nested, cache=False)
    actual = values_and_grads(lambda scan, *args: fast(nsa_compile.scan, *args), loop, list(inputs))
    (record,) = nsa_compile.last_report().scans
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)
    return record


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------------------------------------------------ layouts


def row_mask(rank: int, dim: int, size: int, slot: Tensor) -> Tensor:
    return (torch.arange(size) == slot).reshape([size] + [1] * (rank - dim - 1))


def put(buf: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return torch.ops.aten.index_put(buf, [None] * dim + [index], source)


def assigned(buf: Tensor, dim: int, index: Any, source: Tensor) -> Tensor:
    """`buf[:, :, index] = source`, on a copy."""
    buf = buf.clone()
    buf[(slice(None),) * dim + (index,)] = source
    return buf


# How rows are written: `write(buf, dim, size, slot, source)`, and the sizes that stand in the place of dimension `dim`
# in what the source broadcasts to; None where torch wants the source in that very shape.
WRITES: dict[str, tuple[Callable, tuple[int, ...], bool]] = {
    "where": (lambda b, d, n, t, x: torch.where(row_mask(b.dim(), d, n, t), x, b), (1,), True),
    "where, of full rank": (lambda b, d, n, t, x: torch.where(row_mask(b.dim(), d, n, t).expand([1] * d + [n] + [1] * (b.dim() - d - 1)), x, b), (1,), True),
    "where, to keep": (lambda b, d, n, t, x: torch.where(row_mask(b.dim(), d, n, t).logical_not(), b, x), (1,), True),
    "index_copy": (lambda b, d, n, t, x: torch.index_copy(b, d - b.dim(), t[None], x), (1,), False),
    "index_put, a number": (lambda b, d, n, t, x: put(b, d, t, x), (), True),
    "index_put, from the end": (lambda b, d, n, t, x: put(b, d, t - n, x), (), True),
    "index_put, one row": (lambda b, d, n, t, x: put(b, d, t[None], x), (1,), True),
    "index_put, [2, 1]": (lambda b, d, n, t, x: put(b, d, torch.stack([t, (t + 1) % n])[:, None], x), (2, 1), True),
    "assigned": (lambda b, d, n, t, x: assigned(b, d, t[None], x), (1,), True),
    "assigned, several": (lambda b, d, n, t, x: assigned(b, d, torch.stack([t, (t + 1) % n]), x), (2,), True),
    "assigned, a slice": (lambda b, d, n, t, x: assigned(b, d, slice(n - 2, n), x), (2,), True),
    "assigned, every other": (lambda b, d, n, t, x: assigned(b, d, slice(0, None, n - 1), x), (2,), True),
    "assigned, at one row": (lambda b, d, n, t, x: assigned(b, d, -1, x), (), True),
    "scatter": (lambda b, d, n, t, x: torch.scatter(b, d, t.expand(x.shape), x), (1,), False),
    "slice_scatter": (lambda b, d, n, t, x: torch.slice_scatter(b, x, d, n - 2, n), (2,), False),
    "select_scatter": (lambda b, d, n, t, x: torch.select_scatter(b, x, d, -2), (), False),
    "appended": (lambda b, d, n, t, x: torch.cat([b.narrow(d, 1, n - 1), x], d), (1,), False),
    "prepended": (lambda b, d, n, t, x: torch.cat([x, b.narrow(d, 0, n - 1)], d - b.dim()), (1,), False),
    "replaced": (lambda b, d, n, t, x: torch.where(t % 2 == 0, x, b), (-1,), True),
    "at some steps": (lambda b, d, n, t, x: torch.where(t % 2 == 0, put(b, d, t, x), b), (), True),
}  # fmt: skip
TWO_ROWS = {name for name, (_, sizes, _) in WRITES.items() if sizes[:1] == (2,)} | {"select_scatter"}


def broadcasts(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every shape that broadcasts to `shape`: leading dimensions missing, others of size 1."""
    found = {
        tuple(sizes)
        for start in range(len(shape) + 1)
        for sizes in itertools.product(*({1, size} for size in shape[start:]))
    }
    return sorted(found)


@st.composite
def layouts(draw) -> tuple[str, tuple[int, ...], int, tuple[int, ...]]:
    """A way to write, the shape of a buffer, its dimension of rows, the shape of what is written."""
    name = draw(st.sampled_from(sorted(WRITES)))
    least = 2 if name in TWO_ROWS or "pended" in name else 1
    # Equal sizes hide a transposition from torch, but not from the values.
    shape = draw(st.sampled_from([(n,) * rank for n in (3, 2, 1) for rank in (3, 4, 2, 1)] + [(2, 3, 2, 3), (3, 2, 1)]))
    dim = draw(st.integers(0, len(shape) - 1))
    shape = (*shape[:dim], max(least, shape[dim]), *shape[dim + 1 :])
    _, sizes, broadcast = WRITES[name]
    target = shape if sizes == (-1,) else (*shape[:dim], *sizes, *shape[dim + 1 :])
    return name, shape, dim, draw(st.sampled_from(broadcasts(target))) if broadcast else target


@given(st.lists(layouts(), min_size=5, max_size=5), st.booleans())
def test_what_is_written_meets_the_buffer_as_torch_broadcasts_it(written, moves):
    note(written)

    def run(scan, *tensors):
        def step(buffers, x):
            t, *sources = x
            new = []
            for (name, shape, dim, _), buf, source in zip(written, buffers, sources, strict=True):
                slot = t % shape[dim]
                new.append(WRITES[name][0](buf, dim, shape[dim], slot, torch.tanh(source) if moves else source))
            return new, (new, [buf * 2 for buf in buffers])

        half = len(tensors) // 2
        return scan(step, list(tensors[:half]), (torch.arange(S), *tensors[half:]))

    buffers = [numbers(*shape) for _, shape, _, _ in written]
    record = compared(run, *buffers, *(numbers(S, *source) for *_, source in written))
    assert record.batched, record.declines


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (1, 1, 1)])
@pytest.mark.parametrize("name", ["where", "index_put, a number", "replaced"])
def test_every_broadcast(name, shape):
    write, sizes, _ = WRITES[name]
    cases = [
        (dim, source)
        for dim in range(len(shape))
        for source in broadcasts(shape if sizes == (-1,) else (*shape[:dim], *sizes, *shape[dim + 1 :]))
    ]

    def run(scan, buf, *sources):
        def step(buffers, x):
            t, *rows = x
            todo = zip(cases, buffers, rows, strict=True)
            new = [write(b, dim, shape[dim], t % shape[dim], row) for (dim, _), b, row in todo]
            return new, torch.stack(new)

        return scan(step, [buf * i for i in range(len(cases))], (torch.arange(S), *sources))

    record = compared(run, numbers(*shape), *(numbers(S, *source) for _, source in cases))
    assert record.batched, record.declines

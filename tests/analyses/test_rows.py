"""Rows of a buffer, written in every way torch has and in every shape it broadcasts: equal to the loop, or declined."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, note
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
        tolerances = {"rtol": 1e-9, "atol": 1e-11} if a.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(a, b, equal_nan=True, **tolerances)
    return record


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------------------------------------------------ layouts


def row_mask(rank: int, dim: int, size: int, slot: Tensor, leading: int = 0) -> Tensor:
    return (torch.arange(size) == slot).reshape([1] * leading + [size] + [1] * (rank - dim - 1))


def put(buf: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return torch.ops.aten.index_put(buf, [None] * dim + [index], source)


def assigned(buf: Tensor, dim: int, index: Any, source: Tensor) -> Tensor:
    """`buf[:, :, index] = source`, on a copy."""
    buf = buf.clone()
    buf[(slice(None),) * dim + (index,)] = source
    return buf


# How rows are written: `write(buf, dim, size, slot, source)`, the sizes that stand in the place of dimension `dim` in
# what the source broadcasts to (-1: the buffer's own), and whether it broadcasts at all.
WRITES: dict[str, tuple[Callable, tuple[int, ...], bool]] = {
    "where": (lambda b, d, n, t, x: torch.where(row_mask(b.dim(), d, n, t), x, b), (1,), True),
    "where, of full rank": (lambda b, d, n, t, x: torch.where(row_mask(b.dim(), d, n, t, d), x, b), (1,), True),
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
NEED_TWO_ROWS = {name for name, (_, sizes, _) in WRITES.items() if sizes[:1] == (2,)}
NEED_TWO_ROWS |= {"select_scatter", "appended", "prepended"}


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
    least = 2 if name in NEED_TWO_ROWS else 1
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


@pytest.mark.deep(but=["replaced-shape5-dims5"])
@pytest.mark.parametrize(
    ("name", "shape", "dims"),
    [
        ("where", (2, 2, 2, 2), [2]),
        ("where", (2, 2, 2), [0, 1, 2]),
        ("index_put, a number", (2, 2, 2, 2), [2]),
        ("index_put, a number", (2, 2, 2), [0, 1, 2]),
        ("replaced", (2, 2, 2), [0]),
        ("replaced", (1, 1), [0]),
    ],
)
def test_every_broadcast(name, shape, dims):
    write, sizes, _ = WRITES[name]
    cases = [
        (dim, source)
        for dim in dims
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


# ----------------------------------------------------------------------------------------------------- whole programs


def cached(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    """A program around one buffer: `write(buffer, row, t)` at each step, which then reads it all."""

    def run(scan, init, rows):
        def step(buf, x):
            row, t = x
            buf = write(buf, row, t)
            return buf, torch.tanh(buf).sum(0)

        return scan(step, init, (rows, torch.arange(S)))

    return run


def whole(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    """As `cached`, for a carry without dimensions."""

    def run(scan, init, rows):
        def step(carry, x):
            carry = write(carry, *x)
            return carry, torch.tanh(carry)

        return scan(step, init, (rows, torch.arange(S)))

    return run


BUFFER, ROWS = (4, 3), (S, 3)
RIGHT: dict[str, tuple[Callable, tuple[int, ...], tuple[int, ...]]] = {
    "no dimensions": (lambda c, x, t: torch.where(t % 2 == 0, x, c), (), (S,)),
    "no dimensions, the other way round": (lambda c, x, t: torch.where(t > 1, c, x), (), (S,)),
    "one row": (lambda c, x, t: torch.where(t % 2 == 0, x, c), (1, 3), (S, 3)),
    "spread": (lambda c, x, t: torch.where(t % 2 == 0, x, c), (2, 2), (S, 2)),
    "never": (lambda c, x, t: torch.where(t > 9, x, c), BUFFER, ROWS),
    "over a shift": (lambda c, x, t: torch.where(t == 2, x, torch.roll(c, 1, 0)), BUFFER, ROWS),
    "two predicates": (
        lambda c, x, t: torch.where(t > 0, torch.where(t % 2 == 0, put(c, 0, t, x), c), c),
        BUFFER,
        ROWS,
    ),
    "a difference as a mask": (
        lambda c, x, t: torch.where((torch.arange(4) - t).bool()[:, None], c, x),
        BUFFER,
        ROWS,
    ),
    "rows from a literal": (
        lambda c, x, t: torch.index_copy(c, 0, torch.tensor([3, 1, 2, 0]).index_select(0, t[None]), x[None]),
        BUFFER,
        ROWS,
    ),
    "no rows": (lambda c, x, t: torch.where((torch.arange(0) == t)[:, None], x, c), (0, 3), ROWS),
    "rows of nothing": (lambda c, x, t: torch.where((torch.arange(4) == t)[:, None], x, c), (4, 0), (S, 0)),
    "with an empty tensor": (
        lambda c, x, t: torch.cat([torch.empty(0, dtype=c.dtype), c[:, 1:], x[:1].expand(4, 1)], 1),
        BUFFER,
        ROWS,
    ),
    "a window of one": (lambda c, x, t: torch.cat([c[1:], x[None]]), (1, 3), ROWS),
}


@pytest.mark.deep(but=["no dimensions"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_batched(name):
    write, shape, rows = RIGHT[name]
    record = compared(cached(write) if shape else whole(write), numbers(*shape), numbers(*rows))
    assert record.batched, record.declines


DECLINED: dict[str, tuple[Callable, tuple[int, ...], str]] = {
    "index_copy, one row twice": (lambda c, x, t: torch.index_copy(c, 0, torch.stack([t, t]), x), (S, 2, 3), "twice"),
    "index_put, equal modulo the size": (lambda c, x, t: put(c, 0, torch.stack([t, t - 4]), x), (S, 2, 3), "twice"),
    "scatter, one row twice": (
        lambda c, x, t: torch.scatter(c, 0, torch.stack([t, t])[:, None].expand(2, 3), x),
        (S, 2, 3),
        "twice",
    ),
    "two writes in one step": (lambda c, x, t: put(put(c, 0, t, x), 0, 3 - t, x * 2), ROWS, "something else"),
    "onto a part": (lambda c, x, t: torch.where((torch.arange(4) == t)[:, None], x, c[:1]), ROWS, "something else"),
    "a part, spread": (lambda c, x, t: torch.where(t > 1, put(c[:1], 0, t * 0, x), c), ROWS, "a part of the carry"),
    "turned over": (lambda c, x, t: c.flip(0) * x, ROWS, "recurrence"),
}


def test_a_mask_as_an_index_is_refused():
    """How many elements it selects is not known before it runs, so not even the loop can be compiled."""
    with pytest.raises(RuntimeError, match="it selects elements by their values"):
        compared(cached(lambda c, x, t: put(c, 0, torch.arange(4) == t, x)), numbers(*BUFFER), numbers(*ROWS))


@pytest.mark.deep(but=["index_copy, one row twice"])
@pytest.mark.parametrize("name", DECLINED)
def test_what_declines(name):
    write, rows, why = DECLINED[name]
    record = compared(cached(write), numbers(*BUFFER), numbers(*rows))
    assert not record.batched
    assert why in record.declines[0].reason


def test_elements_instead_of_rows_are_a_recurrence_in_parallel():
    record = compared(
        cached(lambda c, x, t: torch.where(torch.eye(4, 3).bool() & (t > 0), x, c)), numbers(*BUFFER), numbers(*ROWS)
    )
    assert record.verdict == "batched, its recurrence in parallel"


def test_carries_in_each_others_places():
    """Carries that start from one value, hold what others held, whole or turned, and are outputs; inputs with strides
    of all kinds."""

    def run(scan, init, row):
        def step(carry, x):
            buf, turned, last, older, same = carry
            row, t = x
            new = torch.where((torch.arange(4) == t)[:, None], row, buf)
            y = turned.sum(1) + older
            return (new, new.T, row, last, same), (new, new.T, new[1:3], y, row, same, last)

        return scan(step, (init, init.T, init[0], init[0], init), (row.expand(S, 3), torch.arange(S)))

    record = compared(run, numbers(3, 4).T, numbers(3, 2)[:, 1])
    assert record.batched, record.declines
    assert record.carries == ["Rows", "Latest", "Latest", "Latest", "Invariant"]


def test_a_swap_is_a_recurrence_of_two():
    def run(scan, a, b, rows):
        return scan(lambda carry, x: ((carry[1], carry[0]), carry[0] * x), (a, b), rows)

    record = compared(run, numbers(3), numbers(3) * 2, numbers(S, 3))
    assert [r.form for r in record.recurrences] == ["a running sum of 2 carries together"]


def test_a_swap_of_what_is_not_linear_declines():
    def run(scan, a, b, rows):
        return scan(lambda carry, x: ((carry[1].tanh(), carry[0]), carry[0] * x), (a, b), rows)

    record = compared(run, numbers(3), numbers(3) * 2, numbers(S, 3))
    assert "recurrence" in record.declines[0].reason


COUNTERS = {
    "bfloat16": (254, torch.bfloat16, 1),  # stays at 256
    "float16": (2046, torch.float16, 1),  # stays at 2048
    "float32": (0, torch.float32, 0.5),
    "uint8": (254, torch.uint8, 1),  # goes on at 0
    "int8": (126, torch.int8, 1),  # goes on at -128
    "a vector": ([1, 5], torch.int64, 1),
}


@pytest.mark.deep(but=["float32"])
@pytest.mark.parametrize("name", COUNTERS)
def test_counters_count_as_their_dtype_does(name):
    start, dtype, stride = COUNTERS[name]

    def run(scan, init, rows):
        first = torch.tensor(start, dtype=dtype)

        def step(carry, row):
            buf, i = carry
            at = (i - first).flatten()[0]
            buf = torch.where((torch.arange(4) == at)[:, None], row, buf)
            return (buf, i + stride), buf.sum(0) * i.sum()

        return scan(step, (init, first), rows)

    record = compared(run, numbers(*BUFFER), numbers(*ROWS))
    assert record.batched, record.declines
    assert record.carries == ["Rows", "Known"]


def test_a_number_meets_tensors_of_another_dtype():
    """At one step it has no dimensions and weighs less in the common dtype; batched it has one."""

    def run(scan, scale, wide, rows):
        def step(carry, x):
            row, number, t = x
            y = torch.where(torch.tensor([True, False, True]), number, row)
            small = torch.tensor([1, 50, 3], dtype=torch.int8)
            return row, (carry, y, row * number, row < number, small < 100 * t, torch.clamp(row, max=number))

        return scan(step, scale, (rows, wide, torch.arange(S)))

    rows = numbers(S, 3, dtype=torch.float32)
    record = compared(run, rows[0], rows[:, 0].double() + 1e-9, rows)
    assert record.batched, record.declines


def test_what_is_added_with_factor_0_is_not_read():
    def run(scan, scale, rows):
        def step(carry, row):
            nothing = torch.full((3,), float("nan"), dtype=row.dtype)
            square = torch.eye(3, dtype=row.dtype).expand(2, 3, 3)
            y = torch.baddbmm(nothing, row.expand(2, 1, 3), square, beta=0)
            return row, (carry, y, torch.baddbmm(row, row.expand(2, 1, 3), square, beta=0.5, alpha=2))

        return scan(step, scale, rows)

    record = compared(run, numbers(3), numbers(*ROWS))
    assert record.batched, record.declines


def products(carry, row, w, square):
    """Each operand, and what is added, the same at all steps or not; row is [m, n], carry [n]."""
    yield torch.mm(row, w)
    yield torch.mm(square, row)
    yield torch.mm(row, row.t())
    for added in (carry, row[:1], carry[:1], w[:1], row):
        yield torch.addmm(added, row, w, beta=0.5, alpha=2)
    yield torch.addmm(w, row.t(), row)
    yield torch.addmm(row, square, square[:, :1] @ w[:1])
    yield torch.addmm(torch.full_like(carry, torch.nan), row, w, beta=0)
    yield torch.addmm((row * torch.nan).detach(), row, w, beta=0)


@pytest.mark.deep(but=["True"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_products_of_matrices(batch_first):
    def run(scan, init, w, square, rows):
        def step(carry, row):
            return row[0], tuple(products(carry, row, w, square))

        return scan(step, init, rows.transpose(0, 1) if batch_first else rows)

    rows = numbers(2, S, 3) if batch_first else numbers(S, 2, 3)
    record = compared(run, numbers(3), numbers(3, 3), numbers(2, 2), rows)
    assert record.batched, record.declines


@pytest.mark.deep(but=["2-True"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_has_one_gradient_for_all_steps(batch, bias):
    """The gradient of its weight had a matrix for each step, before these were added up."""
    torch._dynamo.reset()
    layer = torch.nn.Linear(5, 7, bias=bias).double()
    init, shapes = numbers(1), []

    def run(x):
        return nsa_compile.scan(lambda carry, row: (carry, layer(row)), init, x.transpose(0, 1))[1].transpose(0, 1)

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            made = f(*args, **(kwargs or {}))
            shapes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor))
            return made

    x = numbers(batch, 50, 5).requires_grad_()
    y = nsa_compile.compile(run, nested="eager", cache=False)(x)
    with Shapes():
        torch.autograd.grad(y.square().sum(), [x, layer.weight])
    assert max(shapes) == y.numel()


@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
def test_outputs_share_no_memory(nested):
    """As in the loop, where each is stacked anew: changing one changes neither the inputs nor another. Only the carry
    that every step hands on is still the tensor that was given."""

    def run(scan, init, rows):
        return scan(lambda carry, x: (carry, (x, x, x.T, carry, x * 2, (x * 2).T)), init, rows)

    init, rows = numbers(2), numbers(S, 3, 3)
    torch._dynamo.reset()
    for function in (run, nsa_compile.compile(run, nested=nested, cache=False)):
        carry, outputs = function(nsa_compile.scan, init, rows)
        places = [x.untyped_storage().data_ptr() for x in (init, rows, *outputs)]
        assert len(set(places)) == len(places)
        assert carry.untyped_storage().data_ptr() == init.untyped_storage().data_ptr()


@pytest.mark.deep
def test_as_many_blocks_as_you_like():
    """A counter that feeds residual blocks, and a buffer whose old rows do: following every path through them would
    never end."""

    def blocks(h):
        for _ in range(32):
            h = h + h.abs()
        return h

    def run(scan, init, rows):
        def step(carry, row):
            i, buf = carry
            new = torch.where(torch.arange(4)[:, None] == i, row, buf + 0 * blocks(buf))
            return (i + 1, torch.index_copy(buf, 0, i[None], row[None])), (blocks(row * i), new)

        return scan(step, (torch.tensor(0), init), rows)

    record = compared(run, 1e-9 * numbers(*BUFFER), 1e-9 * numbers(*ROWS))
    assert record.batched, record.declines


@pytest.mark.deep
def test_a_step_deeper_than_the_stack_of_python():
    def run(scan, init, rows):
        def step(last, row):
            y = row
            for _ in range(340):
                y = y + last
            return row, y

        return scan(step, init, rows)

    record = compared(run, numbers(1), numbers(2, 1))
    assert record.batched, record.declines


# ------------------------------------------------------------------------------------------------- added to zeros


@given(
    slots=st.permutations(range(S)) | st.lists(st.integers(0, S - 1), min_size=S, max_size=S),
    start=st.sampled_from(["zeros", "ones", "given"]),
    one=st.sampled_from([1.0, 2.0]),
    rows=st.sampled_from(["row", "full"]),
    several=st.booleans(),
)
@example(slots=[2, 0, 3, 1], start="zeros", one=1.0, rows="row", several=False)
@example(slots=[2, 0, 3, 1], start="ones", one=1.0, rows="row", several=False)
@example(slots=[2, 0, 3, 1], start="given", one=1.0, rows="row", several=False)
@example(slots=[2, 0, 3, 1], start="zeros", one=2.0, rows="row", several=False)
@example(slots=[2, 0, 3, 1], start="zeros", one=1.0, rows="full", several=False)
@example(slots=[2, 0, 2, 1], start="zeros", one=1.0, rows="row", several=False)
def test_rows_that_are_added_to_zeros_are_written(slots, start, one, rows, several):
    """`cache + one_hot * row`: a write, if the cache is of zeros, each row is written once, and ones are ones."""
    at = [[one * (row == slot or (several and t == 0)) for row in range(S)] for t, slot in enumerate(slots)]

    def run(scan, given, x):
        init = {"zeros": torch.zeros(S, 2), "ones": torch.ones(S, 2), "given": given}[start].to(x.dtype)
        flags = torch.tensor(at, dtype=x.dtype)

        def step(cache, token):
            t, x = token
            flag = flags.index_select(0, t.view(1)).view(S, 1)
            cache = cache + flag * (x if rows == "row" else x.expand(S, 2).cumsum(0))
            return cache, cache.cumsum(0) * x

        return scan(step, init, (torch.arange(S), x))

    record = compared(run, numbers(S, 2), numbers(S, 2))
    (carry,) = record.carries
    writes = start == "zeros" and len(set(slots)) == S and one == 1.0 and rows == "row" and not several
    assert (carry == "Rows") == writes


def test_rows_are_added_at_a_counter_of_each_sequence():
    def run(scan, x):
        def step(carry, x):
            cache, count = carry
            flag = (torch.arange(S) == count[:, None]).to(x.dtype)
            cache = cache + flag[..., None] * x[:, None]
            return (cache, count + 1), cache.cumsum(1)

        return scan(step, (torch.zeros(3, S, 2, dtype=x.dtype), torch.zeros(3, dtype=torch.int64)), x)

    assert compared(run, numbers(S, 3, 2)).carries == ["Rows", "Known"]

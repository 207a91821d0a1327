"""The recurrences in parallel forms against plain loops: values and gradients, long decays, low precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.ops import cpp, decayed
from nsa_compile.ops.dispatch import KERNELS
from nsa_compile.ops.recurrence import (
    KINDS,
    chunks,
    matrix_recurrence,
    portable,
    recurrence,
    reference,
    turning_recurrence,
    unit_lower_inverse,
)  # fmt: skip


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def assert_same(actual: Callable, expected: Callable, inputs: Sequence[Tensor | None]) -> None:
    """Two functions yield the same, and the same gradients of a random projection of it."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    wanted = [x for x in leaves if x is not None]
    found = []
    for function in (actual, expected):
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((y * numbers(*y.shape, seed=1)).sum() for y in outputs)
        found.append((outputs, torch.autograd.grad(loss, wanted)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 2, 7, 9, 50])
@pytest.mark.parametrize("factor", [None, (1, 1, 1), (1, 3, 4), (0, 1, 1), (0, 3, 1), (0, 3, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_is_its_loop(kind, factor, steps):
    """With factors of zero, of both signs, and equal sides of a maximum."""
    a = None if factor is None else numbers(factor[0] or steps, *factor[1:])
    # Sums of whole numbers are exact, so what is equal in the loop is equal here.
    a = None if a is None else torch.where(a.abs() < 0.3, 0, a) if kind == "sum" else a.round()
    inputs = [a, numbers(steps, 3, 4).round(), numbers(3, 4).round()]
    assert_same(lambda *x: recurrence(*x, kind), lambda *x: reference.recurrence(*x, kind), inputs)


@pytest.mark.parametrize("steps", [1, 2, 9, 50])
@pytest.mark.parametrize("factor", [(1, 1, 1), (1, 3, 4), (0, 3, 1), (0, 3, 4)])
def test_a_recurrence_of_complex_numbers_in_two_parts_is_its_loop(factor, steps):
    def loop(a, b, first):
        parts = (torch.view_as_complex(x) for x in (a, b, first))
        return torch.view_as_real(reference.recurrence(*parts, "sum"))

    inputs = [numbers(factor[0] or steps, *factor[1:], 2), numbers(steps, 3, 4, 2), numbers(3, 4, 2)]
    assert_same(turning_recurrence, loop, inputs)


@pytest.mark.parametrize("large", [0, 2**30])
def test_blocks_of_steps_and_single_steps_are_the_same(large, monkeypatch):
    monkeypatch.setattr(portable, "LARGE", large)
    inputs = [numbers(37, 2, 1), numbers(37, 2, 3), numbers(2, 3)]
    for kind in KINDS:
        assert_same(lambda *x, k=kind: recurrence(*x, k), lambda *x, k=kind: reference.recurrence(*x, k), inputs)


@pytest.mark.parametrize("kind", ["max", "max_old", "logsumexp"])
def test_a_maximum_begins_at_minus_infinity(kind):
    for a in (None, numbers(20, 3)):
        inputs = [a, numbers(20, 3), torch.full((3,), -torch.inf, dtype=torch.float64)]
        assert_same(lambda *x: recurrence(*x, kind), lambda *x: reference.recurrence(*x, kind), inputs)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_matrix_recurrence_is_its_loop(steps, batch):
    inputs = [numbers(steps, *batch, 3, 3), numbers(steps, *batch, 3, 4), numbers(*batch, 3, 4)]
    assert_same(matrix_recurrence, reference.matrix, inputs)


@pytest.mark.deep(but=["dtype0-1"])
@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_inverse_of_steps_on_those_before_them(size, dtype):
    below = numbers(2, 3, size, size).to(dtype) * (1 + (1j if dtype.is_complex else 0)) * size**-0.5

    def inverse(x: Tensor) -> Tensor:
        return torch.linalg.inv(torch.eye(size, dtype=dtype) + x.tril(-1))

    assert_same(lambda x: unit_lower_inverse(x.tril(-1)).abs(), lambda x: inverse(x).abs(), [below])
    torch.library.opcheck(torch.ops.nsa_compile.unit_lower_inverse.default, (below.tril(-1).requires_grad_(),))


def test_integers_wrap_around_as_in_the_loop():
    b = torch.randint(-(2**62), 2**62, (50, 3))
    a = torch.randint(-3, 4, (50, 1))
    for factors in (None, a):
        expected = reference.recurrence(factors, b, b[0], "sum")
        assert torch.equal(recurrence(factors, b, b[0]), expected)


@pytest.mark.deep
def test_the_operators_are_sound():
    inputs = (numbers(9, 2, 1).requires_grad_(), numbers(9, 2, 3).requires_grad_(), numbers(2, 3).requires_grad_())
    for kind in KINDS:
        torch.library.opcheck(torch.ops.nsa_compile.recurrence.default, (*inputs, kind))
    matrices = (numbers(4, 2, 3, 3), numbers(4, 2, 3, 2), numbers(2, 3, 2))
    operands = tuple(numbers(3, 4, 2, seed=i).requires_grad_() for i in range(3))
    torch.library.opcheck(torch.ops.nsa_compile.decayed_scores.default, (*operands, True))
    torch.library.opcheck(torch.ops.nsa_compile.decay_products.default, operands[:1])
    torch.library.opcheck(torch.ops.nsa_compile.matrix_recurrence.default, tuple(x.requires_grad_() for x in matrices))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, torch.zeros(3, 2), torch.zeros(2), "mean"), "kind is 'mean'"),
        ((None, torch.zeros(3, 2), torch.zeros(3), "sum"), r"first is \[3\]"),
        ((torch.zeros(2, 2), torch.zeros(3, 2), torch.zeros(2), "sum"), r"a is \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        recurrence(*arguments)


def test_second_derivatives_are_refused():
    b = numbers(5, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(recurrence(b, b, b[0]).sum(), b, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()
    a = numbers(2, 4, 3).requires_grad_()
    for out in (decayed.decayed_scores(a, a, a, strict=False), decayed.decay_products(a)[0]):
        (gradient,) = torch.autograd.grad(out.sum(), a, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            gradient.sum().backward()


# ------------------------------------------------------------------------------------------------------------- chunks


SOLVED = (None, "along k", "along p")


def operands(
    steps: int, batch: tuple[int, ...], decay: str | None, *, solved: str | None, k: int = 4, v: int = 3,
    shared: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """q, k, v, a, u, the first state and p; `decay` is one, scalar or vector, and `solved` along k or p."""
    some = (*batch[:-1], 1) if shared else batch
    keys = F.normalize(numbers(steps, *batch, k, seed=2), dim=-1)
    a = None
    if decay is not None:
        a = numbers(1 if decay == "one" else steps, *batch, k if decay == "vector" else 1).sigmoid()
        a = torch.where(a < 0.3, 0, a) * numbers(*a.shape, seed=3).sign()
    u = keys * numbers(steps, *batch, 1, seed=4).sigmoid() if solved else None
    p = F.normalize(numbers(steps, *batch, k, seed=5), dim=-1) if solved == "along p" else None
    return [numbers(steps, *some, k), keys, numbers(steps, *batch, v), a, u, numbers(*batch, k, v), p]


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("solved", SOLVED)
@pytest.mark.parametrize("decay", [None, "one", "scalar", "vector"])
@pytest.mark.parametrize("steps", [1, 2, 7, 64, 65, 150])
def test_chunks_are_the_loop(steps, decay, solved):
    """With decays of zero and of both signs, and lengths that are no multiple of a chunk."""
    for batch, shared in (((), False), ((2,), False), ((2, 3), True)):
        inputs = operands(steps, batch, decay, solved=solved, shared=shared)
        assert_same(chunks.linear, reference.linear, inputs)


@pytest.mark.parametrize("solved", SOLVED)
@pytest.mark.parametrize("steps", [1, 7, 150])
def test_where_decays_have_no_kernel_they_are_plain_torch(steps, solved, monkeypatch):
    monkeypatch.setattr(chunks.decayed, "takes", lambda _: False)
    for batch, shared in (((), False), ((2, 3), True)):
        inputs = operands(steps, batch, "vector", solved=solved, shared=shared)
        assert_same(chunks.linear, reference.linear, inputs)


def test_without_a_compiler_the_reason_is_told(monkeypatch, caplog):
    def fail() -> None:
        raise RuntimeError("no compiler\nat all")

    kernel = KERNELS["decayed"]["cpu"]
    monkeypatch.setitem(kernel.__dict__, "code", SimpleNamespace(prepare=fail))
    cpp.works.cache_clear()
    assert not decayed.takes(torch.ones(2, 3))
    cpp.works.cache_clear()
    assert "cannot be used (no compiler)" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 2), (2, 64, 19)])
@pytest.mark.parametrize("strict", [False, True])
def test_decayed_scores_are_their_definition(strict, shape, dtype):
    """With operands of other strides, as they come from transposed ones."""
    n, steps, columns = shape

    def expected(a: Tensor, q: Tensor, k: Tensor) -> Tensor:
        rows = []
        for i in range(steps):
            found = []
            for j in range(steps):
                if j > i - strict:
                    found.append(0 * (q[:, i] * k[:, j] * a[:, i]).sum(-1))
                else:
                    found.append((q[:, i] * k[:, j] * a[:, j + 1 : i + (not strict)].prod(1)).sum(-1))
            rows.append(torch.stack(found, -1))
        return torch.stack(rows, -2)

    a, q, k = (numbers(n, columns, steps, seed=i).mT for i in range(3))
    a = torch.where(a.abs() < 0.3, 0, a).clamp(-1, 1)
    if dtype == torch.float64:
        assert_same(lambda *x: decayed.decayed_scores(*x, strict=strict), expected, (a, q, k))
    low = decayed.decayed_scores(*(x.to(dtype) for x in (a, q, k)), strict=strict)
    exact = expected(*(x.to(dtype).double() for x in (a, q, k)))
    assert float((low - exact).abs().max()) <= 64 * columns**0.5 * torch.finfo(dtype).eps * 8


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 2), (2, 64, 19)])
def test_products_of_decays_are_their_definition(shape):
    def expected(a: Tensor) -> tuple[Tensor, Tensor]:
        steps = range(a.shape[1])
        after = [a[:, i + 1 :].prod(1) for i in steps]
        return torch.stack([a[:, : i + 1].prod(1) for i in steps], 1), torch.stack(after, 1)

    a = numbers(*shape)
    assert_same(decayed.decay_products, expected, [torch.where(a.abs() < 0.3, 0, a)])


@pytest.mark.deep(but=["None-None"])
@pytest.mark.parametrize(("decay", "solved"), list(itertools.product([None, "scalar", "vector"], SOLVED)))
def test_gradients_of_chunks_are_derivatives(decay, solved):
    inputs = operands(5, (2,), decay, solved=solved, k=2, v=2)
    given = [x.requires_grad_() for x in inputs if x is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        rest = iter(tensors)
        return chunks.linear(*(None if x is None else next(rest) for x in inputs))

    assert torch.autograd.gradcheck(run, given)


def _step_early(x: Tensor, steps: int, chunk: int, filling: float) -> Tensor:
    return _chunks(x if filling == 0 or x.shape[0] == 1 else x.roll(-1, 0), steps, chunk, filling)


class _CountsItsOwnStep(chunks._Decay):
    def __init__(self, a: Tensor) -> None:
        super().__init__(a)
        self.after = self.after * a


class _CountsOneStepLess(chunks._Decay):
    def __init__(self, a: Tensor) -> None:
        super().__init__(a)
        self.up_to = self.before


_chunks, _linear, _scores = chunks._chunks, chunks.linear, chunks._scores
FAULTS = {
    "a decay one step early": ("_chunks", _step_early),
    "a state handed on that has decayed once too often": ("_Decay", _CountsItsOwnStep),
    "a state that is read before it has decayed": ("_Decay", _CountsOneStepLess),
    "the state before a step in the place of the one after it": (
        "_scores",
        lambda q, k, decay, strict: _scores(q, k, decay, strict=True),
    ),
    "no first state": ("linear", lambda q, k, v, a, u, first, p: _linear(q, k, v, a, u, first * 0, p)),
    "what is read is taken off along k": ("linear", lambda *x: _linear(*x[:-1], x[1] + 0 * x[6])),
    "a key that takes its own value back": (
        "unit_lower_inverse",
        lambda below: torch.eye(below.shape[-1], dtype=below.dtype).expand_as(below),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    name, faulty = FAULTS[fault]
    monkeypatch.setattr(chunks, name, faulty)
    for decay in ("scalar", "vector"):
        with pytest.raises(AssertionError):
            assert_same(chunks.linear, reference.linear, operands(70, (2,), decay, solved="along p"))


@pytest.mark.deep(but=["1.0-vector-None"])
@pytest.mark.parametrize("solved", [None, "along k"])  # along another direction a state may grow without end
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("factor", [1e-3, 0.9999, 1.0])
def test_long_decays_neither_overflow_nor_vanish(factor, decay, solved):
    """65,536 steps in float32, against float64, and the loop's last steps where it forgets what was before."""
    steps = 65_536
    inputs = operands(steps, (1,), decay, solved=solved, k=4, v=2)
    inputs[3] = torch.full_like(inputs[3], factor)
    found: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        leaves = [None if x is None else x.detach().float().to(dtype).requires_grad_() for x in inputs]
        out, last = chunks.linear(*leaves)
        gradients = torch.autograd.grad(out.square().mean() + last.sum(), [x for x in leaves if x is not None])
        found.append([out, last, *gradients])
    for single, double in zip(*found, strict=True):
        assert bool(single.isfinite().all())
        scale = float(double.detach().abs().max())
        assert float((single.double() - double).detach().abs().max()) <= 1e-4 * scale
    if factor == 1e-3:
        exact = [None if x is None else x.float().double() for x in inputs]
        late = [None if x is None else x[-32:] if x.shape[0] == steps else torch.zeros_like(x) for x in exact]
        expected, _ = reference.linear(*late)
        torch.testing.assert_close(found[1][0][-8:], expected[-8:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("decay", [None, "scalar", "vector"])
def test_low_precision_is_no_farther_from_float64_than_the_loop(decay, dtype):
    for solved in SOLVED:
        inputs = operands(200, (2,), decay, solved=solved)
        rounded = [None if x is None else x.to(dtype) for x in inputs]
        exact = [None if x is None else x.double() for x in rounded]
        for mine, loop, truth in zip(
            chunks.linear(*rounded), reference.linear(*rounded), reference.linear(*exact), strict=True
        ):
            # A result is rounded as scores, as states of chunks, where a system is solved, and as their sum.
            band = 4 * torch.finfo(dtype).eps * float(truth.abs().max())
            assert float((mine.to(dtype) - truth).abs().max()) <= float((loop - truth).abs().max()) + band


def test_no_state_is_held_for_each_step():
    """What the graph of 4,096 steps saves is a part of what their states of 64 x 64 would take."""
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [None if x is None else x.float() for x in operands(4096, (1,), "scalar", solved="along p", k=64, v=64)]
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        chunks.linear(*(None if x is None else x.requires_grad_() for x in inputs))
    assert sum(saved.values()) < 4096 * 64 * 64 * 4 / 2


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_yields_is_no_part_of_a_longer_tensor(kind, factor, shape):
    """Inductor asserts that it begins at a multiple of 16 bytes: a counter was an AssertionError."""
    a = numbers(5, *shape).requires_grad_() if factor else None
    b, first = (numbers(*n, *shape).requires_grad_() for n in ((5,), ()))
    values = recurrence(a, b, first, kind)
    gradients = torch.autograd.grad(values.sum(), [x for x in (a, b, first) if x is not None])
    assert [x.storage_offset() for x in (values, *gradients)] == [0] * (2 + 1 + factor)

"""Sums of values by weights of a program: every kernel against loops over the queries, written without programs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa_compile import ops
from nsa_compile.ops.scored import cpu, portable, weighted_sum
from tests.ops.problems import kernels
from tests.ops.test_scored import (
    BIASES,
    CASES,
    ORDINARY,
    P_,
    SCALES,
    T_,
    Case,
    Leaf,
    Part,
    Problem,
    band,
    composed,
    differentiated,
    distance,
    of_pairs,
    problems,
)
from tests.strategies import few

FORMS: dict[str, Part] = {
    "relu": ("relu.default({s})", lambda s: s.clamp(min=0), ()),
    "sigmoid": ("sub.Scalar({s}, 1.5); sigmoid.default({v0})", lambda s: 1 / (1 + (1.5 - s).exp()), ()),
    "silu": ("silu.default({s})", lambda s: s / (1 + (-s).exp()), ()),
    "squared": ("relu.default({s}); mul.Tensor({v0}, {v0})", lambda s: s.clamp(min=0) ** 2, ()),
    "as it is": ("mul.Tensor({s}, 0.125)", lambda s: s / 8, ()),
}
ZEROS: dict[str, Part] = {
    "causal": ("gt.Tensor({x0}, {x1}); masked_fill.Scalar({s}, {v0}, 0.0)", lambda s, p, t: s * (p <= t), (P_, T_)),
    "times a mask": ("le.Tensor({x0}, {x1}); mul.Tensor({s}, {v0})", lambda s, p, t: s * (p <= t), (P_, T_)),
    "padding": ("where.ScalarOther({x0}, {s}, 0.0)", lambda s, x: s * x, (Leaf("booleans", "T", "N"),)),
    "in tiles": ("where.ScalarOther({x0}, {s}, 0.0)", lambda s, x: s * x, (Leaf("shown in tiles", "ST", "Nm"),)),
    "divided by a number of each query": ("div.Tensor({s}, {x0})", lambda s, x: s / x, (Leaf("positive", "S", "Nm"),)),
}


@st.composite
def sums(draw: Any, dtypes: tuple[torch.dtype, ...]) -> Problem:
    def one(of: dict[str, Part]) -> Part:
        return of[draw(st.sampled_from(list(of)))]

    biases = {name: part for name, part in BIASES.items() if "inf" not in name}
    zeros = draw(st.lists(st.sampled_from(list(ZEROS)), max_size=2, unique=True))
    parts = [one(SCALES), one(biases), one(FORMS), *(ZEROS[x] for x in zeros)]
    problem = draw(problems(dtypes))
    return replace(problem, case=composed(problem.case.products, parts), through_lse=False)


def loops(problem: Problem, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Output and gradients of all floating inputs, one query and head after the other; and weights `[N, S, m, T]`."""
    given = q, k, v, leaves = problem.tensors(dtype)
    shape, keys = (problem.N, problem.S, problem.m), v.shape[1]
    full = [of_pairs(x, shape, keys) for x in leaves]
    outs, every = [], []
    for n, s, h in ((n, s, h) for n in range(shape[0]) for s in range(shape[1]) for h in range(shape[2])):
        products = [(b[n] * a[n, s, h]).sum(-1) for a, b in zip(q, k, strict=True)]
        weights = problem.case.scores(*products, *(x[n, s, h] for x in full))
        every.append(weights.detach())
        outs.append((weights.unsqueeze(-1) * v[n]).sum(0))
    out = torch.stack(outs).view(*shape, -1)
    loss = (out * problem.gradients()[0].to(dtype)).sum()
    return [out.detach(), *differentiated(loss, given)], torch.stack(every).view(*shape, keys)


def tiles_of(weights: Tensor) -> Tensor:
    """The tiles in which a weight is not 0."""
    used = (weights != 0).any(2).any(0)
    padded = torch.zeros(*(-(-n // 64) * 64 for n in used.shape), dtype=torch.bool)
    padded[: used.shape[0], : used.shape[1]] = used
    return padded.unflatten(1, (-1, 64)).unflatten(0, (-1, 64)).any(3).any(1).to(torch.uint8)


def check(problem: Problem, kernel: Any) -> None:
    """An error may be that of the loops in the problem's dtype, plus a band of roundings of the computation."""
    exact, weights = loops(problem, torch.float64)
    eager = exact if problem.dtype == torch.float64 else loops(problem, problem.dtype)[0]
    given = problem.tensors()
    # A weight is zero in a whole tile by its mask, not by its form.
    tiles = tiles_of(weights) if problem.tiled and "relu" not in problem.case.text else None
    with ops.force_implementation(kernel.name):
        out = weighted_sum(*given, problem.case.text, tiles)
        found = [out, *differentiated((out * problem.gradients()[0]).sum(), given)]
    assert out.dtype == problem.dtype
    largest = max(1.0, weights.abs().sum(-1).max().item())
    names = ["out", *(f"gradient {i}" for i in range(len(found) - 1))]
    for name, x, true, other in zip(names, found, exact, eager, strict=True):
        assert x.shape == true.shape, name
        reach = true.abs().max().item()
        allowed = distance(other, true) + 2 * torch.finfo(x.dtype).eps * reach + largest * band(problem, given, name)
        error = distance(x, true)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored"))
@few(5)
@given(problem=sums((torch.float64, torch.float32, torch.bfloat16)))
def test_equals_the_loops(kernel, problem):
    check(problem, kernel)


@pytest.mark.deep
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_integers_and_two_products(kernel):
    for name in ("terms 0", "two products"):
        check(replace(ORDINARY, case=CASES[name], through_lse=False), kernel)


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_gradcheck(kernel):
    problem = replace(ORDINARY, case=composed(1, [FORMS["silu"], BIASES["slopes"]]), S=5, T=6, D=2, Dv=2)
    q, k, v, leaves = problem.tensors()
    floating = [x for x in leaves if x.is_floating_point()]

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        of = iter(given)
        read = [next(of) if x.is_floating_point() else x for x in leaves]
        return weighted_sum([q], [k], v, read, problem.case.text, None)

    with ops.force_implementation(kernel.name):
        assert torch.autograd.gradcheck(run, (*q, *k, v, *floating))


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_registration(kernel):
    problem = replace(ORDINARY, case=composed(1, [FORMS["relu"], ZEROS["causal"]]), N=1, S=7, T=9)
    with ops.force_implementation(kernel.name):
        torch.library.opcheck(weighted_sum, (*problem.tensors(), problem.case.text, None))


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_tiles_without_a_weight_are_not_read(kernel):
    problem = replace(ORDINARY, case=composed(1, [FORMS["silu"]]), N=1, S=128, T=192, m=1)
    tiles = torch.tensor([[1, 0, 0], [1, 1, 0]], dtype=torch.uint8)
    results = []
    for spoiled in (0.0, torch.nan):
        given = q, k, v, leaves = problem.tensors()
        with torch.no_grad():
            for x in (*k, v):
                x[:, 128:] += spoiled
        with ops.force_implementation(kernel.name):
            out = weighted_sum(q, k, v, leaves, problem.case.text, tiles)
            results.append([out, *differentiated((out * problem.gradients()[0]).sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not any(x.isnan().any() for x in results[0])


@pytest.mark.deep
def test_keys_after_the_last_have_no_gradient():
    """A weight that a number of its key divides: behind the last key there is none, and nothing is divided by zero."""
    text = "v0 = div.Tensor(s0, x0)\nv1 = mul.Tensor(v0, x1)\nv2 = add.Scalar(v1, 1.0)\nreturn v2"
    case = Case(text, lambda s, x, y: s / x * y + 1, (Leaf("positive", "T"), Leaf("positive", "S")))
    for kernel in kernels("scored", torch.float64):
        check(replace(ORDINARY, case=case, T=67, through_lse=False), kernel.values[0])


@pytest.mark.deep
def test_bits_do_not_depend_on_the_number_of_threads():
    problem = replace(ORDINARY, case=composed(1, [FORMS["relu"], ZEROS["causal"]]), S=300, T=300, dtype=torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = problem.tensors()
            with ops.force_implementation("cpu"):
                out = weighted_sum(*given, problem.case.text, None)
                results.append([out, *differentiated((out * problem.gradients()[0]).sum(), given)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_work_is_counted():
    problem = replace(ORDINARY, case=composed(1, [FORMS["relu"]]), N=1, S=8, T=8, m=1, D=4, Dv=4)
    given = problem.tensors()
    with FlopCounterMode(display=False) as forwards:
        out = weighted_sum(*given, problem.case.text, None)
    with FlopCounterMode(display=False) as backwards:
        out.sum().backward()
    assert forwards.get_total_flops() == 2 * 8 * 8 * (4 + 4)
    assert backwards.get_total_flops() == 2 * 8 * 8 * (3 * 4 + 2 * 4)


def test_integers_that_are_too_large_for_vectors(caplog):
    far = 2**40
    text = f"v0 = add.Scalar(x0, {far})\nv1 = sub.Scalar(v0, {far})\nv2 = mul.Tensor(s0, v1)\nreturn v2"
    q, k, v = torch.randn(1, 3, 1, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 2)
    count = torch.arange(5).view(1, 1, 1, 5)
    found = cpu.forward([q], [k], v, [count], text, None, softmax=False)
    expected = portable.forward([q], [k], v, [count], text, None, softmax=False)
    assert len(found) == 1
    torch.testing.assert_close(found, expected)
    assert "may be too large" in caplog.text
    assert math.isfinite(found[0].sum())

"""Sliding-window attention: every registered kernel against the dense reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.ops.dispatch import KERNELS
from tests.ops.problems import Problem, check, kernels, problems

ORDINARY = Problem(1, 300, 300, 2, 4, 64, 64, "normal", "contiguous", torch.float32, 0)


@pytest.mark.parametrize("kernel", kernels("window"))
@given(problem=problems(), window=st.sampled_from([1, 2, 7, 64, 65, 1000]))
def test_equals_the_reference(kernel, problem, window):
    problem = problem.taken_by(kernel)
    check(problem, kernel, window, problem.scale)


@pytest.mark.deep
@pytest.mark.parametrize("kernel", kernels("window", torch.float64))
@pytest.mark.parametrize("window", [100, 5000])
def test_long_sequences_take_several_chunks_and_passes(kernel, window):
    long = replace(ORDINARY, S=2500, keys=2500, G=1, h=1, D=8, Dv=8, dtype=torch.float64)
    check(long, kernel, window, long.scale)


@pytest.mark.parametrize("kernel", kernels("window", torch.float32))
def test_a_query_that_sees_no_key(kernel):
    problem = replace(ORDINARY, S=40, keys=10)
    q, k, v, grad = problem.tensors()
    out, lse = kernel.forward(q, k, v, 4, 0.5)
    assert (out[:, 13:] == 0).all()
    assert (lse[:, 13:] == -torch.inf).all()
    assert lse[:, :13].isfinite().all()
    dq, _, _ = kernel.backward(grad, None, q, k, v, out, lse, 4, 0.5)
    assert (dq[:, 13:] == 0).all()
    assert dq.isfinite().all()


@pytest.mark.parametrize("kernel", kernels("window", torch.float32))
def test_nan_is_not_hidden(kernel):
    q, k, v, _ = replace(ORDINARY, S=70, keys=70).tensors()
    k[0, 30, 0, 5] = torch.nan
    out, _ = kernel.forward(q, k, v, 8, 0.5)
    assert out[0, 30:38, :4].isnan().all()
    assert out[0, 64:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponential_is_accurate(dtype):
    # Two keys with scores 0 and -x and values 0 and 1: the output is 1 / (1 + exp(x)).
    x = torch.linspace(0, 86, 4001, dtype=torch.float64).to(dtype)
    k = torch.stack([torch.zeros_like(x), -x], 1).view(-1, 2, 1, 1)
    v = torch.tensor([0.0, 1.0], dtype=dtype).view(1, 2, 1, 1).expand_as(k)
    # On vectors: the matrix unit cuts off what is below 2^-126, and with it the last bits of the smallest weights.
    out, _ = KERNELS["window"]["vectors"].forward(torch.ones_like(k), k, v, 2, 1.0)
    exact = 1 / (1 + x.double().exp())
    error = (out[:, 1, 0, 0].double() - exact).abs() / exact
    assert error.max() < 3 * torch.finfo(dtype).eps
    for name in ("cpu", "vectors"):
        out, _ = KERNELS["window"][name].forward(torch.ones_like(k), k * 10 - 900, v, 2, 1.0)
        assert out.isfinite().all()

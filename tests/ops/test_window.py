"""Sliding-window attention: every implementation against the dense reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.problems import IMPLEMENTATIONS, Problem, check, module, problems

ORDINARY = Problem(1, 300, 300, 2, 4, 64, 64, "normal", "contiguous", torch.float32, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(problem=problems(), window=st.sampled_from([1, 2, 7, 64, 65, 1000]))
def test_equals_the_reference(implementation, problem, window):
    check(problem, "window", implementation, window, problem.scale)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [100, 5000])
def test_long_sequences_take_several_chunks_and_passes(implementation, window):
    long = replace(ORDINARY, S=2500, keys=2500, G=1, h=1, D=8, Dv=8, dtype=torch.float64)
    check(long, "window", implementation, window, long.scale)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_no_key(implementation):
    problem = replace(ORDINARY, S=40, keys=10)
    q, k, v, grad = problem.tensors()
    out, lse = module("window", implementation).forward(q, k, v, 4, 0.5)
    assert (out[:, 13:] == 0).all()
    assert (lse[:, 13:] == -torch.inf).all()
    assert lse[:, :13].isfinite().all()
    dq, _, _ = module("window", implementation).backward(grad, q, k, v, out, lse, 4, 0.5)
    assert (dq[:, 13:] == 0).all()
    assert dq.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_is_not_hidden(implementation):
    q, k, v, _ = replace(ORDINARY, S=70, keys=70).tensors()
    k[0, 30, 0, 5] = torch.nan
    out, _ = module("window", implementation).forward(q, k, v, 8, 0.5)
    assert out[0, 30:38, :4].isnan().all()
    assert out[0, 64:].isfinite().all()

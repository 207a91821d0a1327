"""What a step asserts, and what torch checks of a matrix, holds of every step of a compiled scan.

The assertions are those of programs: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import scan

NESTED = ("eager", "aot_eager", "inductor")


def batched(x):
    def step(c, row):
        assert (row < 2).all(), "too big"
        return c, row * 2

    return scan(step, (), x)[1]


def looped(x):
    def step(c, row):
        c = (0.5 * c + row).tanh()
        assert (c < 0.9).all(), "too big"
        return c, c

    return scan(step, torch.zeros_like(x[0]), x)[1]


def nested_scans(x):
    def inner(c, number):
        assert number < 2, "too big"
        return c + number, number * c

    return scan(lambda c, row: scan(inner, c, row), torch.zeros_like(x[0, 0]), x)[1]


def two_assertions(x):
    def step(c, row):
        assert (row < 2).all(), "too big"
        y = torch.where(row > 0, row, -row)
        assert (y >= 0).all(), "never"
        return c, y

    return scan(step, (), x)[1]


def in_a_checkpointed_region(x):
    return checkpoint(looped, x, use_reentrant=False)


@pytest.mark.deep(but=["batched-eager"])
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("run", [batched, looped, nested_scans, two_assertions, in_a_checkpointed_region])
def test_an_assertion_of_a_step_fails_where_it_fails_in_the_loop(run, nested):
    torch._dynamo.reset()
    fast = nsa_compile.compile(run, nested=nested, cache=False)
    small, large = (torch.full((3, 2), 0.25, dtype=torch.float64) for _ in "ab")
    large[1, 1] = 5.0
    for x in (small, large, small):
        x = x.clone().requires_grad_()
        if x.max() > 2:
            with pytest.raises(AssertionError, match="too big"):
                run(x)
            with pytest.raises(RuntimeError, match="too big"):
                fast(x)
            continue
        (expected, y) = run(x), fast(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x) for out in (y, expected)))


MATRICES = {
    "inv": torch.linalg.inv,
    "method": lambda m: m.inverse(),
    "by name": lambda m: torch.linalg.solve(B=m.new_ones(2, 1), A=torch.inverse(input=m)),
    "cholesky": torch.linalg.cholesky,
    "solve": lambda m: torch.linalg.solve(m, m.new_ones(2, 1)),
    "solve for a vector": lambda m: torch.linalg.solve(m, m.new_ones(2)),
    "several": lambda m: torch.linalg.inv(torch.stack([m, 2 * m])),
    "lu_factor": lambda m: torch.linalg.lu_factor(m)[0],
}


@pytest.mark.deep(but=["lu_factor-False-eager"])
@pytest.mark.parametrize("nested", NESTED[:2])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("operator", MATRICES)
def test_a_matrix_that_has_no_inverse_is_said(operator, recurrent, nested):
    """Each step's matrix is checked; a recurrence that inverts its state compiles."""

    def run(x):
        def step(c, m):
            c = 0.1 * c @ m + m if recurrent else m
            return c, MATRICES[operator](c)

        return scan(step, torch.zeros_like(x[0]), x)[1]

    torch._dynamo.reset()
    fast = nsa_compile.compile(run, nested=nested, cache=False)
    regular = torch.eye(2, dtype=torch.float64).expand(3, 2, 2) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    x = regular.clone().requires_grad_()
    y, expected = fast(x), run(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x) for out in (y, expected)))
    singular = regular.clone()
    singular[1 if not recurrent else 0] = 0
    for function in (run, fast):
        with pytest.raises(RuntimeError, match=r"singular|positive-definite|zero"):
            function(singular)


@pytest.mark.deep(but=["classes1-0.0-eager"])
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("carried", [0.0, 0.5])
@pytest.mark.parametrize("classes", [[0, 1, 3], [0, -1, 2]])
def test_a_class_that_one_hot_does_not_have_is_refused_as_in_the_loop(classes, carried, nested):
    def run(x, classes):
        def step(c, row):
            c = carried * c + row[0] * F.one_hot(row[1], 3)
            return c, c

        return scan(step, x.new_zeros(3), (x, classes))[1]

    torch._dynamo.reset()
    fast = nsa_compile.compile(run, nested=nested, cache=False)
    x = torch.randn(3, 3, requires_grad=True)
    torch.testing.assert_close(fast(x, torch.tensor([2, 0, 1])), run(x, torch.tensor([2, 0, 1])))
    for function, words in ((run, "Class values must be"), (fast, "one_hot: class values must be at least 0")):
        with pytest.raises(RuntimeError, match=words):
            function(x, torch.tensor(classes))

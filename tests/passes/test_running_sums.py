"""Sums of the rows of a cache up to the step's own: which are found, and equal to their loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import running_sums, staleness
from nsa_compile.ir.step_values import StepMask
from nsa_compile.passes import batch_prefill
from tests.strategies import few

S, B, D = 9, 2, 3


def over_a_cache(read, length=S, first=0.0, write=lambda t: t):
    """What each step reads of a cache of all rows so far: `read(cache, positions, t)`."""

    def loop(x):
        positions = torch.arange(length)

        def step(cache, token):
            t, row = token
            cache = torch.where((positions == write(t))[:, None], row[:, None], cache)
            return cache, read(cache, positions, t)

        return scan(step, x.new_full((B, length, D), first), (torch.arange(length), x.transpose(0, 1)))[1]

    return loop


def column(mask):
    return mask[:, None]


TAKEN = {
    "times a mask": lambda c, p, t: (c * column(p <= t)).sum(1) / (t + 1),
    "a mask times": lambda c, p, t: (column(p <= t).double() * c).sum(1, keepdim=True),
    "where": lambda c, p, t: torch.where(column(p <= t), c, 0.0).sum(1),
    "where, the other way round": lambda c, p, t: torch.where(column(p > t), torch.zeros_like(c), c).sum(1),
    "masked_fill": lambda c, p, t: c.masked_fill(column(p > t), 0).sum(1),
    "the mean of what a mask leaves": lambda c, p, t: c.masked_fill(column(p > t), 0).mean(1),
    "rows across": lambda c, p, t: (c.transpose(1, 2) * (p <= t)).sum(-1),
    "a product": lambda c, p, t: (p <= t).double() @ c,
    "a product by einsum": lambda c, p, t: torch.einsum("s,bsd->bd", (p <= t).double(), c),
    "a product of one sequence": lambda c, p, t: torch.mm((p <= t).double()[None], c[0]),
    "a product with a vector": lambda c, p, t: torch.mv(c[1].t(), (p <= t).double()),
    "weights that are divided": lambda c, p, t: ((p <= t).double() / (t + 1)) @ c,
    "weights that add up to one": lambda c, p, t: ((p <= t).double() / (p <= t).double().sum()) @ c,
    "weights below zero": lambda c, p, t: ((p <= t) * -0.5) @ c,
    "rows before the step's own": lambda c, p, t: (c * column(p < t)).sum(1),
    "rows of whole blocks": lambda c, p, t: (c * column(p < t // 3 * 3)).sum(1),
    "rows some steps ago": lambda c, p, t: torch.where(column(p <= t - 2), c, 0.0).sum(1),
    "none at all": lambda c, p, t: torch.where(column(p < t - S), c, 0.0).sum(1),
    "squares": lambda c, p, t: (c * c * column(p <= t)).sum(1),
    "all rows, of which some are zeros yet": lambda c, p, t: c.sum(1) / (t + 1),
    "the mean of all rows": lambda c, p, t: c.mean(1),
    "all rows or none": lambda c, p, t: (c * column(p * 0 + t > S - 2)).sum(1),
    "all rows or none, by a product": lambda c, p, t: ((t > S - 2) * torch.ones(S)) @ c,
    "all rows or none, by weights": lambda c, p, t: ((t > S - 2) / (t + 1) * torch.ones(S)) @ c,
    "columns of all rows or none": lambda c, p, t: (c * column(p * 0 + t > S - 2)).sum(2),
}
LEFT = {
    "of one number": lambda c, p, t: (c * column(p <= t)).sum((0, 1, 2)).mean(-1) + c[:, 0] * 0,
    "a window": lambda c, p, t: torch.where(column((p <= t) & (p > t - 3)), c, 0.0).sum(1),
    "without the first row": lambda c, p, t: torch.where(column((p <= t) & (p > 0)), c, 0.0).sum(1),
    "weights by distance": lambda c, p, t: ((p <= t).double() * (t - p)) @ c,
    "another fill": lambda c, p, t: torch.where(column(p <= t), c, 1.0).sum(1),
    "a mask that is data": lambda c, p, t: torch.where((c[:, :, :1] > 0) & column(p <= t), c, 0.0).sum(1),
    "a mask of columns, too": lambda c, p, t: torch.where(column(p <= t) & (torch.arange(D) > 0), c, 0.0).sum(1),
    "weights that are data": lambda c, p, t: ((p <= t) * c[0, 0, 0]) @ c,
    "over more than the rows": lambda c, p, t: (c * column(p <= t)).sum((1, 2)),
    "in another dtype": lambda c, p, t: (c * column(p <= t)).sum(1, dtype=torch.float32),
}


def compared(monkeypatch, loop, x):
    """How many sums were found, the loop compared with its compiled form."""
    found = []
    own = running_sums.running_rows
    monkeypatch.setattr(batch_prefill, "running_rows", lambda *given: found.append(own(*given)) or found[-1])
    torch._dynamo.reset()
    compiled = nsa_compile.compile(loop, nested="eager", cache=False)
    cotangent = torch.randn_like(loop(x))
    ours, theirs = compiled(x), loop(x)
    torch.testing.assert_close(ours, theirs)
    for pair in zip(*(torch.autograd.grad(y, x, cotangent) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(*pair)
    return sum(map(len, found))


def rows(length=S):
    return torch.randn(B, length, D, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _numbers_are_doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.deep(but=["weights that add up to one", "the mean of all rows"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_found_equals_its_loop(name, monkeypatch):
    read = TAKEN[name]
    assert compared(monkeypatch, over_a_cache(lambda c, p, t: read(c, p, t) * 2), rows()) == 1


@pytest.mark.deep(but=["a mask of columns, too"])
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_equals_its_loop(name, monkeypatch):
    assert compared(monkeypatch, over_a_cache(LEFT[name]), rows()) == 0


@pytest.mark.parametrize("name", ["all rows, of which some are zeros yet", "the mean of all rows"])
def test_rows_that_are_no_zeros_before_they_are_written(name, monkeypatch):
    assert compared(monkeypatch, over_a_cache(TAKEN[name], first=1.0), rows()) == 0


@pytest.mark.deep(but=["2"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_one_row(dim, monkeypatch):
    """A mask of one row says the same of all columns."""
    compared(monkeypatch, over_a_cache(lambda c, p, t: c.sum(dim), length=1), rows(1))


def test_a_cache_of_which_one_row_is_written(monkeypatch):
    compared(monkeypatch, over_a_cache(lambda c, p, t: c.sum(2), write=lambda t: t + S - 1), rows())


def test_rows_that_are_written_in_another_order(monkeypatch):
    loop = over_a_cache(TAKEN["all rows, of which some are zeros yet"], write=lambda t: S - 1 - t)
    assert compared(monkeypatch, loop, rows()) == 0


@few(20)
@given(st.data())
def test_drawn_masks(data):
    """A mask of drawn first steps, one for each row: found if the rows come one after the other."""
    length = data.draw(st.integers(1, 7))
    first = data.draw(st.lists(st.integers(0, 8), min_size=length, max_size=length))
    if data.draw(st.booleans()):
        first = sorted(first)
    first = [max(t, j) for j, t in enumerate(first)]  # a row is written at its step
    when = torch.tensor(first)
    with pytest.MonkeyPatch.context() as monkeypatch:
        loop = over_a_cache(lambda c, p, t: (c * column(when <= t)).sum(1), length)
        found = compared(monkeypatch, loop, rows(length))
    seen = [t for t in first if t < length] + [length] * sum(t >= length for t in first)
    in_order = [t if t < length else length for t in first] == sorted(seen)
    assert found == (1 if in_order and length > 1 else found)


def _one_too_many(mask, dim, size):
    found = running_sums_counts(mask, dim, size)
    return None if found is None else (found + 1).clip(max=S)


running_sums_counts = running_sums._counts


def _all_before(value):
    first = torch.arange(S)
    return StepMask.inside(first, torch.full_like(first, S), S)


@pytest.mark.deep(but=["Analysis-zeros_until_written-<lambda>-all rows, of which some are zeros yet"])
@pytest.mark.parametrize(
    ("owner", "name", "broken", "program"),
    [
        (running_sums, "_counts", _one_too_many, "where"),
        (running_sums, "_is_zero", lambda *_: True, "another fill"),
        (running_sums, "_ones_and_zeros", lambda value: _all_before(value), "weights by distance"),
        (staleness.Analysis, "zeros_until_written", lambda *_: torch.zeros(1, dtype=torch.int64),
         "all rows, of which some are zeros yet"),
    ],
)  # fmt: skip
def test_planted_faults_are_found(owner, name, broken, program, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        compared(monkeypatch, over_a_cache({**TAKEN, **LEFT}[program]), rows())

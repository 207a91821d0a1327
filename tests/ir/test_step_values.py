"""Closed forms of what is known at every step, against tables of all steps."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.ir.step_values import Choice, Separable, StepMask, Table, compare, separable, step_mask, two_sided

S, N = 7, 12


@st.composite
def masks(draw):
    numbers = st.lists(st.integers(-2, S + 2), min_size=N, max_size=N).map(torch.tensor)
    outside = st.lists(st.booleans(), min_size=N, max_size=N).map(torch.tensor)
    return StepMask.of(draw(numbers), draw(numbers), draw(outside), S)


def same(value, table):
    assert torch.equal(value.table(), table)
    reference = Table(table)
    for wanted in (True, False):
        first, run = value.run_of(wanted)
        expected_first, expected_run = reference.run_of(wanted)
        assert torch.equal(first, expected_first)
        some = expected_first < S  # the run of what never happens is empty, wherever it lies
        assert torch.equal(run[0][some], expected_run[0][some])
        assert torch.equal(run[1][some], expected_run[1][some])
        assert bool((run[1] < run[0])[~some].all())
    assert all(map(torch.equal, value.true_entries(), reference.true_entries()))


@given(masks(), masks())
def test_masks_combine_as_booleans_do(a, b):
    same(a, a.table())
    same(~a, ~a.table())
    for op in (operator.and_, operator.or_):
        result = op(a, b)
        if result is not None:
            same(result, op(a.table(), b.table()))


@given(masks(), st.data())
def test_what_is_one_interval_is_found_to_be_one(a, data):
    """A conjunction is given up only where some element is true in two separate runs, inside and out."""
    b = data.draw(masks())
    result = a & b
    if result is None:
        table = (a.table() & b.table()).to(torch.int8)
        edges = (table[1:] != table[:-1]).sum(0)
        assert bool((edges > 2).any())


@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
@given(data=st.data())
def test_comparisons_by_search(op, data):
    steps = st.lists(st.integers(-4, 4), min_size=S, max_size=S)
    grows = data.draw(steps.map(sorted).map(torch.tensor))
    other = data.draw(st.sampled_from([torch.zeros(S, dtype=torch.int64), grows // 2]))
    rows = data.draw(st.lists(st.integers(-4, 4), min_size=N, max_size=N).map(torch.tensor))
    a, b = Separable(other, rows), Separable(grows, torch.zeros(N, dtype=torch.int64))
    for left, right in ((a, b), (b, a)):
        result = compare(op, left, right)
        if result is None:
            u = grows - other
            assert bool((u[1:] < u[:-1]).any() and (u[1:] > u[:-1]).any())
        else:
            same(result, getattr(torch, op)(left.table(), right.table()))


@given(masks(), st.data())
def test_choices_are_tested_side_by_side(mask, data):
    numbers = st.lists(st.sampled_from([0.0, 1.0, float("-inf")]), min_size=N, max_size=N).map(torch.tensor)
    choice = Choice(mask, data.draw(numbers), data.draw(numbers))
    same(choice.where(lambda x: x > 0.5), choice.table() > 0.5)


@given(st.lists(st.booleans(), min_size=S, max_size=S).map(torch.tensor))
def test_one_boolean_a_step(value):
    result = step_mask(Table(value[:, None]), S)
    runs = int((value[1:] != value[:-1]).sum())
    assert (result is None) == (runs > 2)
    if result is not None:
        same(result, value[:, None])


def test_only_integers_are_separable():
    assert separable(torch.tensor(1.5), S) is None
    assert separable(torch.tensor(True), S) is None
    assert separable(torch.tensor([3, 4]), S).table().tolist() == [[3, 4]] * S


@given(masks(), st.data())
def test_choices_between_constants_of_more_dimensions(mask, data):
    """As many as there are steps, too: what stands first in a table are the steps."""
    shape = data.draw(st.sampled_from([(S, N), (2, N), (2, 1, N), (S, S, N), (N,), ()]))
    sides = [torch.arange(math.prod(shape)).reshape(shape), -torch.ones(data.draw(st.sampled_from([(), (N,), shape])))]
    choice = Choice(mask, *(sides if data.draw(st.booleans()) else sides[::-1]))
    expected = torch.stack([torch.where(at, choice.if_true, choice.if_false) for at in mask.table()])
    assert torch.equal(choice.table(), expected)


@given(st.data())
def test_what_changes_during_one_interval_is_a_choice(data):
    """Of any table the values stay; one that is drawn from a choice is found to be one."""
    mask = data.draw(masks())
    numbers = [torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0, -math.inf]), min_size=N, max_size=N)))] * 2
    numbers[1] = numbers[0].roll(1)
    dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    if_true, if_false = (x.nan_to_num(neginf=-7).to(dtype) if dtype != torch.float32 else x for x in numbers)
    table = Choice(mask, if_true, if_false).table()
    found = two_sided(Table(table))
    assert isinstance(found, StepMask if dtype == torch.bool else Choice)
    assert torch.equal(found.table(), table)


def test_what_changes_otherwise_stays_a_table():
    steps = torch.arange(S)[:, None]
    for values in (
        steps + torch.arange(N),  # another number at each step
        (steps + torch.arange(N)) % 2 == 0,
        torch.where(steps < 2, 0, torch.where(steps < 4, 1, 2)).expand(S, N),
        torch.tensor([0.0, math.nan]).repeat(S // 2)[:, None].expand(-1, N),
    ):
        found = two_sided(Table(values))
        assert isinstance(found, Table)
        torch.testing.assert_close(found.table(), values, equal_nan=True)

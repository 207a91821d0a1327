"""Rows of a table that a number in a tensor picks, and a loop writes: `table[i] = x`, `table[i] += x`."""

from __future__ import annotations

import pytest
import torch

import nsa_compile
from nsa_compile.loops import LoopDeclined

D = 3
IDS = torch.tensor([0, 1, 0, 2, -2, 1, 3, 0])


def looped(write, dtype=torch.float64):
    """A loop over positions t, which writes to a table [5, D] as a number i of IDS and a row of x [S, D] tell."""

    def run(x, ids):
        table = torch.zeros(5, D, dtype=dtype)
        seen = []
        for t in range(len(ids)):
            found = write(table, ids[t], x[t], t)
            seen.append(table.sum(0).clone() if found is None else found)
        return table, torch.stack(seen)

    return run


def put(table, i, row, t):
    table[i] = row


def put_a_number(table, i, row, t):
    table[i] = t / 4
    table[i, 0] = t


def put_a_part(table, i, row, t):
    table[i, 1:] = row[:2]
    table[i, None] = row
    table[i, ..., 1] = row[0]
    table[i, [0, 2]] = row[:2]
    table[i, i % D] = 0


def put_what_is_broadcast(table, i, row, t):
    table[i] = row[:1]
    table[i - 1] = row[None, None]


def add(table, i, row, t):
    table[i] += row


def add_to_a_part(table, i, row, t):
    table[i, 1:] += row[1:]
    table[i, 0] *= 2


def add_and_put_back(table, i, row, t):
    mine = table[i]
    mine += row
    table[i] = mine
    once = mine * 2
    mine += 1
    table[i] = mine
    return once + table[i]


def add_to_elements_of_a_row(table, i, row, t):
    copied = table[i, [0, 2]]
    table[i, [0, 2]] += row[:2]
    copied += 1
    return copied


def add_to_a_row_of_small_integers(table, i, row, t):
    table[i.int()] += row


def add_to_what_data_picks(table, i, row, t):
    table[row.argmax()] += row


def scatter_the_position(table, i, row, t):
    table.copy_(table.scatter(0, (i % 5).expand(1, D), t))


FOLLOWED = [
    put, put_a_number, put_a_part, put_what_is_broadcast, add, add_to_a_part, add_and_put_back,
    add_to_elements_of_a_row,
    add_to_a_row_of_small_integers, add_to_what_data_picks, scatter_the_position,
]  # fmt: skip


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("write", FOLLOWED, ids=lambda write: write.__name__)
def test_rows_are_written(write, dtype):
    x = (torch.randn(len(IDS), D, dtype=torch.float64) * 4).to(dtype)
    if dtype.is_floating_point:
        x.requires_grad_()
    compiled = nsa_compile.loop(looped(write, dtype), over="t", nested="eager", cache=False)
    found, expected = compiled(x, IDS), looped(write, dtype)(x, IDS)
    assert nsa_compile.last_report().left_alone is None
    torch.testing.assert_close(found, expected)
    if expected[0].requires_grad:
        both = [torch.autograd.grad(table.square().sum(), x) for table, _ in (found, expected)]
        torch.testing.assert_close(*both)


def test_a_number_of_no_row_raises():
    compiled = nsa_compile.loop(looped(add), over="t", nested="eager", cache=False)
    with pytest.raises(IndexError, match="out of"):
        compiled(torch.ones(2, D), torch.tensor([0, 5]))


def add_and_read(table, i, row, t):
    mine = table[i]
    mine += row
    total = table.sum(0)
    table[i] = mine
    return total


def add_and_read_the_row_again(table, i, row, t):
    mine, again = table[i], table[i]
    mine += row
    twice = again * 2
    table[i] = mine
    return twice


def add_and_read_a_view(table, i, row, t):
    view, mine = table[1:], table[i]
    mine += row
    total = view.sum(0)
    table[i] = mine
    return total


def put_elsewhere(table, i, row, t):
    mine = table[i]
    mine += row
    table[i - 1] = mine


def put_where_the_number_has_gone(table, i, row, t):
    i = i.clone()
    mine = table[i]
    mine += row
    i -= 1
    table[i] = mine


def put_where_the_second_number_has_gone(table, i, row, t):
    j = i % D
    mine = table[i, j]
    mine += row[0]
    j -= 1
    table[i, j] = mine


def put_a_part_of_it(table, i, row, t):
    mine = table[i]
    mine += row
    table[i] = mine[0]
    return mine * 2


def put_in_another_table(table, i, row, t):
    mine, other = table[i], table * 1
    mine += row
    other[i] = mine
    return other.sum(0)


def add_to_a_row_of_a_row(table, i, row, t):
    table[i][i % D] += row[0]


@pytest.mark.deep(every=4, but=["put_elsewhere"])
@pytest.mark.parametrize(
    "write",
    [
        add_and_read, add_and_read_the_row_again, add_and_read_a_view, put_elsewhere, put_where_the_number_has_gone,
        put_where_the_second_number_has_gone, put_a_part_of_it, put_in_another_table, add_to_a_row_of_a_row,
    ],
    ids=lambda write: write.__name__,
)  # fmt: skip
def test_a_row_that_is_written_shows_in_its_table_at_once(write):
    """A trace has a copy of it. Where somebody could tell, the loop runs as it is written."""
    x = torch.randn(len(IDS), D, dtype=torch.float64)
    torch.testing.assert_close(
        nsa_compile.loop(looped(write), over="t", nested="eager", cache=False)(x, IDS), looped(write)(x, IDS)
    )
    with pytest.raises(LoopDeclined, match=r"writes in place to K\[i\]"):
        nsa_compile.loop(looped(write), over="t", nested="eager", cache=False, on_decline="error")(x, IDS)


def flip_the_last_bit(table, t):
    for number in table:
        table[number] ^= 1


def move_roots(table, t):
    table[table[t]] += 1


def move_what_a_row_names(table, t):
    table[table[t % 2], None] += 1


@pytest.mark.parametrize(
    "write", [flip_the_last_bit, move_roots, move_what_a_row_names], ids=lambda write: write.__name__
)
def test_the_number_of_a_row_is_part_of_the_table(write):
    """What is added to the row changes its number, before the row is put back."""

    def run(table):
        table = table.clone()
        for t in range(3):
            write(table, t)
        return table

    for numbers in ([0, 3, 2, 1], [0, 1, 2, 3], [2, 2, 0, 1]):
        table = torch.tensor(numbers)
        compiled = nsa_compile.loop(run, over="t", nested="eager", cache=False)
        assert torch.equal(compiled(table), run(table))


def caught_in_the_step(ids):
    table, ok = torch.zeros(4), []
    for t in range(len(ids)):
        try:
            table[ids[t]] = t + 1.0
            ok.append(True)
        except IndexError:
            ok.append(False)
    return table, ok


def caught_around_the_loop(ids):
    table, count = torch.zeros(4), 0
    try:
        for t in range(len(ids)):
            count += 1
            table[ids[t]] += t + 1.0
    except IndexError:
        pass
    return table, count


def rows_read_until_then(ids):
    table, found = torch.arange(4.0), []
    try:
        for t in range(len(ids)):
            found.append(table[ids[t]] * 2)
    except IndexError:
        pass
    return found


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("nested", ["eager", "inductor"])
@pytest.mark.parametrize(
    "run", [caught_in_the_step, caught_around_the_loop, rows_read_until_then],
    ids=lambda run: run.__name__,
)  # fmt: skip
def test_what_a_step_raises_is_caught_as_in_the_loop(run, nested, caplog):
    compiled = nsa_compile.loop(run, nested=nested, cache=False)
    for ids in ([0, 1, 2, 3], [0, 2, 9, 1], [3, 3, 1, 0]):
        torch.testing.assert_close(compiled(torch.tensor(ids)), run(torch.tensor(ids)))
    assert "runs as it is written: one of its steps ends in" in caplog.text


def test_what_the_steps_before_have_done_is_left_behind():
    def run(table, ids):
        for t in range(len(ids)):
            table[ids[t]] += 1

    compiled = nsa_compile.loop(run, nested="eager", cache=False)
    for ids in ([0, 1, 2, 0], [0, 1, 9, 0]):
        tables = [torch.zeros(4) for _ in range(2)]
        for function, table in zip((run, compiled), tables, strict=True):
            if 9 in ids:
                with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 4"):
                    function(table, torch.tensor(ids))
            else:
                function(table, torch.tensor(ids))
        assert torch.equal(*tables)


def test_a_number_behind_another_index_is_named():
    def run(x, ids):
        found = []
        for t in range(len(ids)):
            found.append(x[t, ids[t]] * 2)
        return torch.stack(found)

    x, ids = torch.randn(8, D), IDS % D
    assert torch.equal(nsa_compile.loop(run, nested="eager", cache=False)(x, ids), run(x, ids))
    with pytest.raises(LoopDeclined, match=r"as T\[:, i\]; T\[:, i\[None\]\] keeps a dimension of one"):
        nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x, ids)

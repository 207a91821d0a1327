"""Rows of two numbers, and rows that a step adds to: what is made of them, and equal to their loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import joined_rows, row_writes
from nsa_compile.capture.refusals import ScanNotCompiled
from tests.strategies import few

S, H, P, B, D = 12, 2, 4, 3, 2


def over_a_carry(write, read, shape=(H, P, B, D), first=0.0, steps=S):
    """A step changes a copy of its carry, `write(carry, t, x)`, and reads it: `read(carry, t, q)`; x, q `[S, H, D]`."""

    def loop(x, q):
        def step(carry, row):
            t, x, q = row
            carry = write(carry.clone(), t, x)
            return carry, read(carry, t, q)

        init = torch.full(shape, first, dtype=torch.float64) * x.sum().cos()
        return scan(step, init, (torch.arange(steps), x, q))

    return loop


def compared(loop, steps=S):
    """The report on a loop, its compiled form compared with it."""
    x, q = (torch.randn(steps, H, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch._dynamo.reset()
    results = [run(x, q) for run in (nsa_compile.compile(loop, nested="eager", cache=False), loop)]
    torch.testing.assert_close(*results)
    cotangents = [torch.randn_like(y) for y in results[1]]
    grads = [torch.autograd.grad(y, (x, q), cotangents, allow_unused=True) for y in results]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    return nsa_compile.last_report().scans[0]


def put(*key):
    """`carry[key(t)] = x`."""

    def write(c, t, x):
        c[tuple(k(t) if callable(k) else k for k in key)] = x
        return c

    return write


def put_twice(c, t, x):
    c[:, t // B, t % B] = x
    c[:, t // B, B - 1 - t % B] = c[:, t // B, B - 1 - t % B] * 0 + x
    return c


def put_in_page(c, t, x):
    """As `page = c[:, i]; page[:, j] = x` is, without a view."""
    page = c.index_select(1, (t // B).view(1))[:, 0].index_copy(1, (t % B).view(1), x[:, None])
    return c.index_copy(1, (t // B).view(1), page[:, None])


ALL = slice(None)
page, place = (lambda t: t // B), (lambda t: t % B)


def attend(c, t, q):
    """Attention of all heads to what is written so far."""
    keys = c.flatten(1, 2)
    s = torch.einsum("hd,hnd->hn", q, keys).masked_fill(torch.arange(keys.shape[1]) > t, -torch.inf)
    return torch.einsum("hn,hnd->hd", s.softmax(-1), keys)


def attend_backwards(c, t, q):
    """Where the last place of each page is written first."""
    keys, order = c.flatten(1, 2), torch.arange(P * B)
    written = order // B * B + B - 1 - order % B
    s = torch.einsum("hd,hnd->hn", q, keys).masked_fill(written > t, -torch.inf)
    return torch.einsum("hn,hnd->hd", s.softmax(-1), keys)


JOINED = {
    "by numbers": (put(ALL, page, place), attend),
    "by tensors of one number": (put(ALL, lambda t: page(t).view(1), lambda t: place(t).view(1)), attend),
    "from the last place": (put(ALL, page, lambda t: B - 1 - t % B), attend_backwards),
    "a number from the end": (put(ALL, page, lambda t: t % B - B), attend),
    "within the page": (put_in_page, attend),
}  # fmt: skip


@pytest.mark.deep(but=["within the page"])
@pytest.mark.parametrize("name", JOINED)
def test_rows_of_two_numbers_are_rows(name):
    write, read = JOINED[name]
    write_rows = (lambda c, t, x: write(c, t, x[:, None])) if "tensors" in name else write
    scan = compared(over_a_carry(write_rows, read))
    assert scan.batched
    assert scan.carries == ["Rows"]


LEFT = {
    "numbers that are data": (put(ALL, lambda t: (t // B), lambda t: t % B), lambda c, t, q: c.sum((1, 2)) * q),
    "a sum": (lambda c, t, x: c.index_put((torch.arange(1), (t // B).view(1), t.view(1) % B), x[:1], accumulate=True),
              lambda c, t, q: c.sum((1, 2)) * q),
    "of a carry that is added to": (lambda c, t, x: put(ALL, page, place)(c, t, x) + x[:, None, None],
                                    lambda c, t, q: c.sum((1, 2)) * q),
    "dimensions apart": (lambda c, t, x: c.index_put((t.view(1) % H, ), x[:1, None, None].expand(1, P, B, D)),
                         lambda c, t, q: c.sum((1, 2)) * q),
    "every place again and again": (put(ALL, lambda t: t % P, lambda t: t % B), lambda c, t, q: c.sum((1, 2)) * q),
}  # fmt: skip


@pytest.mark.deep(but=["every place again and again"])
@pytest.mark.parametrize("name", LEFT)
def test_other_writes_are_their_loops(name):
    compared(over_a_carry(*LEFT[name], first=0.5))


BEYOND = {"a place": (page, lambda t: t % B + 1), "a page": (lambda t: t // B + 1, place),
          "a place, once": (page, lambda t: t % B + B * (t == 0))}  # fmt: skip


@pytest.mark.deep(but=["a page"])
@pytest.mark.parametrize("name", BEYOND)
def test_a_number_beyond_the_rows_is_an_error(name):
    """As joined numbers some of them would be others' rows."""
    loop = over_a_carry(put(ALL, *BEYOND[name]), attend)
    x = torch.randn(S, H, D, dtype=torch.float64)
    torch._dynamo.reset()
    for run in (loop, nsa_compile.compile(loop, nested="eager", cache=False)):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            run(x, x)


def added(c, t, x):
    c[:, t // B] += x
    return c


def added_as_it_stands(c, t, x):
    c[:, t // B] = x + c[:, t // B]
    return c


def subtracted(c, t, x):
    c[:, t // B] -= x
    return c


SUMS = {
    "+=": added,
    "= x + row": added_as_it_stands,
    "index_add": lambda c, t, x: c.index_add(1, (t // B).view(1), x[:, None]),
    "where": lambda c, t, x: torch.where((torch.arange(P) == t // B)[:, None], c + x[:, None], c),
    "where, zeros beside": lambda c, t, x: c + torch.where((torch.arange(P) == t // B)[:, None], x[:, None], 0.0),
    "a mask filled with zeros": lambda c, t, x: c + x[:, None].expand(H, P, D).masked_fill(
        (torch.arange(P) != t // B)[:, None], 0.0),
    "one number for a row": lambda c, t, x: added(c, t, x[:, :1]),
    "from the end": lambda c, t, x: c.index_add(1, (P - 1 - t // B).view(1), x[:, None]),
    "the same row again": lambda c, t, x: c.index_add(1, (t * 0 + 2).view(1), x[:, None]),
    "a read of the row beside": lambda c, t, x: added(c, t, x * 2) * 1,
}  # fmt: skip
EXTREMES = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "the other way round": lambda row, x: torch.maximum(x, row),
}
SUMS_LEFT = {
    "-=": subtracted,
    "index_add of several": lambda c, t, x: c.index_add(1, torch.stack([t // B, t // B]), x[:, None].expand(H, 2, D)),
    "index_add of a multiple": lambda c, t, x: c.index_add(1, (t // B).view(1), x[:, None], alpha=2),
    "of the carry": lambda c, t, x: c.index_add(1, (t // B).view(1), c[:, :1] * 0.5),
    "of another row": lambda c, t, x: c.index_copy(1, (t // B).view(1), c[:, 3:] * 0.5 + x[:, None]),
}  # fmt: skip


def scores(c, t, q):
    """Products with all rows, as those of a block's mean with a query."""
    return torch.einsum("hd,hnd->hn", q, c)


def becomes(kind, write, count):
    """A carry of so many rows is batched, as that kind, and equal to its loop."""
    scan = compared(over_a_carry(write, scores, shape=(H, count, D), first=0.5))
    assert scan.batched
    assert scan.carries == [kind]


@pytest.mark.deep(but=["one number for a row"])
@pytest.mark.parametrize("name", SUMS)
def test_a_row_that_is_added_to_is_a_sum(name):
    becomes("Recurrent", SUMS[name], P)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_of_the_rows_of_blocks(name):
    def write(c, t, x):
        number = (t // B).view(1)  # of a view that is overwritten, eager mode gives no gradient
        return c.index_copy(1, number, EXTREMES[name](c.index_select(1, number), x[:, None]))

    becomes("Recurrent", write, P)


@pytest.mark.deep(but=["index_add of a multiple"])
@pytest.mark.parametrize("name", SUMS_LEFT)
def test_other_changes_of_a_row_are_their_loops(name):
    compared(over_a_carry(SUMS_LEFT[name], scores, shape=(H, P, D), first=0.5))


@given(st.data())
@few(20)
def test_drawn_writes_are_their_loops(data):
    draw = data.draw
    rows, places = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    steps = draw(st.integers(1, rows * places))
    stride, offset = draw(st.sampled_from([1, 2, 3, -1])), draw(st.integers(0, 5))
    total = rows * places

    def numbers(t):
        n = (t * stride + offset) % total
        return n // places, n % places

    def write(c, t, x):
        i, j = numbers(t)
        if kind == "joined":
            c[:, i, j] = x
        elif kind == "columns":
            c[:, j, i] = x
        else:
            c[:, i, j] += x
        return c

    def read(c, t, q):
        keys = c.flatten(1, 2) if flat else c.mean(2)
        s = torch.einsum("hd,hnd->hn", q, keys)
        return s.masked_fill(torch.arange(s.shape[1]) > t, 0.0) if masked else s

    kind, flat, masked = draw(st.sampled_from(["joined", "columns", "added"])), draw(st.booleans()), draw(st.booleans())
    shape = (H, places, rows, D) if kind == "columns" else (H, rows, places, D)
    compared(over_a_carry(write, read, shape, draw(st.sampled_from([0.0, 0.5])), steps), steps)


def at_some_steps(c, t, x):
    """A list that is appended to, as a loop keeps it: another row at every second step."""
    return torch.where(t % 2 == 0, c.index_copy(1, (t // 2).view(1), x[:, None]), c)


def by_turns(c, t, x):
    first = c.index_copy(1, (t // 2).view(1), x[:, None])
    return torch.where(t % 2 == 0, first, c.index_copy(1, (t // 2 + P * B // 2).view(1), x[:, None] * 2))


CHOSEN = {
    "at some steps": at_some_steps,
    "by turns": by_turns,
    "not at some steps": lambda c, t, x: torch.where(t % 3 == 0, c, c.index_copy(1, (t // 2).view(1), x[:, None])),
    "the first by itself": lambda c, t, x: torch.where(
        t == 0, c.index_copy(1, torch.arange(1), x[:, None] * 3), at_some_steps(c, t, x)),
    "two conditions": lambda c, t, x: torch.where(t > 2, at_some_steps(c, t, x), c),
    "twice the same": lambda c, t, x: torch.where(t > 2, at_some_steps(c, t, x), at_some_steps(c, t, x)),
}  # fmt: skip
CHOSEN_LEFT = {
    "by data": lambda c, t, x: torch.where(x.sum() > 0, c.index_copy(1, t.view(1), x[:, None]), c),
    "of another tensor": lambda c, t, x: torch.where(t > 2, c.index_copy(1, t.view(1), x[:, None]), c * 0.5),
    "of two dimensions": lambda c, t, x: torch.where(
        t < 2, c.index_copy(1, t.view(1), x[:, None]), c.index_copy(0, t.view(1) % H, x[:1, None].expand(-1, S, D))),
}  # fmt: skip


@pytest.mark.deep(but=["not at some steps"])
@pytest.mark.parametrize("name", CHOSEN)
def test_writes_that_are_chosen_between_are_one(name):
    becomes("Rows", CHOSEN[name], S)


@pytest.mark.deep(but=["by data"])
@pytest.mark.parametrize("name", CHOSEN_LEFT)
def test_other_choices_are_their_loops(name):
    compared(over_a_carry(CHOSEN_LEFT[name], scores, shape=(H, S, D), first=0.5))


NUMBERS = row_writes._numbers_of_both


def swapped(*given):
    numbers = NUMBERS(*given)
    return numbers and [*numbers[:-2], numbers[-1], numbers[-2]]


FAULTS = {
    "numbers change places": (row_writes, "_numbers_of_both", swapped,
                              lambda: test_rows_of_two_numbers_are_rows("within the page")),
    "any number is known": (joined_rows, "is_known_row", lambda *_: True,
                            lambda: test_a_number_beyond_the_rows_is_an_error("a place, once")),
    "any row is the one": (row_writes, "_is_row_of", lambda *_: True,
                           lambda: test_other_changes_of_a_row_are_their_loops("of another row")),
    "a row is written at all steps": (row_writes._Chosen, "_either", lambda *_: True,
                                      lambda: test_writes_that_are_chosen_between_are_one("not at some steps")),
    "any sum is of the carry's row": (row_writes, "_computed_alike", lambda *_: True,
                                      lambda: compared(over_a_carry(neighbour, scores, (H, P, D), 0.5))),
}  # fmt: skip


def neighbour(c, t, x):
    c[:, t // B] = x + c[:, (t // B + 1) % P]
    return c


@pytest.mark.deep(but=["numbers change places"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    owner, name, broken, shows = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, pytest.fail.Exception, ScanNotCompiled, IndexError)):
        shows()

"""Rows picked by numbers that depend on data: where one is the number of no row, the loop raises what it raises as it
is written; where its operators show that none is, nothing is asked while it runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile import loops
from nsa_compile.loops.body import Body

pytestmark = pytest.mark.deep(every=3, of_file=True)

S, D = 6, 4


def collected(make):
    """A loop over positions t, of what is made of the rows x [S, D], the rows k that are there, and numbers i [S]."""

    def run(x, i):
        found = []
        for t in range(len(x)):
            found.append(make(x, x[: t + 1], i[t : t + 1], t))
        return torch.stack(found)

    return run


def marked(k, at, write):
    mask = torch.zeros(len(k), dtype=torch.bool)
    mask = mask.scatter(0, at, True) if write == "scatter" else mask.index_put((at,), torch.tensor(True))
    return k[:, 0].masked_fill(~mask, -2.0).sum()


PICKED = {
    "index": lambda x, k, at, t: k[at].sum(0),
    "index of a window": lambda x, k, at, t: k[-3:][at].sum(0),
    "index_select": lambda x, k, at, t: k.index_select(0, at)[0],
    "gather": lambda x, k, at, t: k[:, 0].gather(0, at),
    "scatter": lambda x, k, at, t: marked(k, at, "scatter"),
    "index_put": lambda x, k, at, t: marked(k, at, "index_put"),
    "embedding": lambda x, k, at, t: F.embedding(at, k)[0],
    "at some steps": lambda x, k, at, t: k.index_select(0, at)[0] if t % 2 else x[t],
    "of the whole, at some steps": lambda x, k, at, t: x.index_select(0, at - 2)[0] if t > 1 else x[t],
    "gather of the whole, at some steps": lambda x, k, at, t: x[:, 0].gather(0, at - 2) if t > 1 else x[t, :1],
    "index of the whole, at some steps": lambda x, k, at, t: x[at - 9].sum(0) if t > 3 else x[t],
    "written at some steps": lambda x, k, at, t: x[0].index_put((at - 1,), x[t, 0]) if t % 2 else x[t],
}

NUMBERS = [
    [0, 1, 2, 3, 4, 5],
    [0, 0, 2, 2, 2, 3],
    [0, 0, 3, 0, 0, 0],  # a row that is there later
    [0, 0, 0, 0, 0, 9],
    [0, -1, 0, 0, 0, 0],
    [0, -3, 0, 0, 0, 0],
    [-7, 1, -7, 3, 4, 5],
    [-9, 1, 2, 3, 9, 8],
]


def outcome(run, x, numbers):
    """Its values and gradients, or the kind of error it raises."""
    x = x.clone().requires_grad_()
    try:
        value = run(x, numbers)
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
    weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
    return value, torch.autograd.grad((value * weights).sum(), x)


@pytest.mark.parametrize("name", PICKED)
def test_a_number_of_no_row_raises_what_the_loop_raises(name, monkeypatch):
    left = []
    monkeypatch.setattr(loops, "_as_written", lambda items, step, of=loops._as_written: left.append(of(items, step)))
    written = collected(PICKED[name])
    compiled = nsa_compile.loop(written, nested="eager", cache=False)
    x, raised = torch.randn(S, D, generator=torch.Generator().manual_seed(1)), set()
    for numbers in NUMBERS:
        expected, found = (outcome(f, x, torch.tensor(numbers)) for f in (written, compiled))
        is_error = isinstance(expected, str)
        if is_error:
            assert found == expected
        else:
            torch.testing.assert_close(found, expected)
            assert not left
        raised.add(is_error)
    assert raised == {True, False}


def test_a_loop_over_ids_that_grow_in_number():
    """Those that are not there yet may be numbers of no row."""

    def run(table, ids):
        found = []
        for t in range(4):
            found.append(F.embedding(ids[: t + 1], table).sum(0))
        return torch.stack(found)

    table, loop = torch.randn(3, D), nsa_compile.loop(run, nested="eager", cache=False)
    for ids in ([0, 1, 2, 1, -100, -100], [0, 1, 3, 1, 0, 0], [-1, 0, 0, 0, 0, 0]):
        expected, found = (outcome(f, table, torch.tensor(ids)) for f in (run, loop))
        assert isinstance(expected, str) == isinstance(found, str)
        torch.testing.assert_close(found, expected) if not isinstance(found, str) else None


# Numbers that are those of rows by the operators that make them.
SHOWN = {
    "the best": lambda k, q: k[(k @ q).topk(min(2, len(k))).indices].sum(0),
    "all in order": lambda k, q: k[(k @ q).argsort()].cumsum(0)[-1],
    "the best one": lambda k, q: k.index_select(0, (k @ q).argmax()[None])[0],
    "the one before the best": lambda k, q: k.index_select(0, ((k @ q).topk(1).indices - 1).clamp(min=0))[0],
    "a remainder": lambda k, q: k.index_select(0, (q[:1] * 9).long() % len(k))[0],
    "a clamp": lambda k, q: k.index_select(0, (q[:1] * 9).long().clamp(0, len(k) - 1))[0],
    "the lesser of two": lambda k, q: k.index_select(
        0, torch.minimum((q[:1] * 9).long().clamp(min=0), torch.tensor(len(k) - 1))
    )[0],
    "one of two": lambda k, q: k.index_select(0, torch.where(q[:1] > 0, 0, len(k) - 1))[0],
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_operators_show_is_not_asked_of_the_data(name, monkeypatch):
    asked = []
    monkeypatch.setattr(Body, "refuse", lambda body, truth: asked.append(truth))

    def run(x):
        found = []
        for t in range(len(x)):
            found.append(SHOWN[name](x[: t + 1], x[t]))
        return torch.stack(found)

    x = torch.randn(S, D, dtype=torch.float64)
    torch.testing.assert_close(nsa_compile.loop(run, nested="eager", cache=False, on_decline="error")(x), run(x))
    assert not asked

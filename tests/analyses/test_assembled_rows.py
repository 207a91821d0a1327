"""Buffers that are put together from their own rows and new ones, however that is written, are the loop's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st

import nsa_compile
from nsa_compile.analyses import assembled_rows
from nsa_compile.ir.aten import aten

S, D = 9, 3


def to_size(x, rows):
    """The last rows, or all of them behind copies of the first one, so that there are as many as there were."""
    x = torch.cat([*[x[:1]] * (rows - x.shape[0]), x])
    return x[x.shape[0] - rows :]


def padded(x, before, after):
    return F.pad(x, (0, 0, before, after))


def placed(x, at, rows):
    x = x.clone()
    x[at : at + rows.shape[0]] = rows
    return x


def one_placed(x, at, row):
    x = x.clone()
    x[at] = row
    return x


def here(x, t):
    return (torch.arange(x.shape[0]) == t % x.shape[0])[:, None]


# Each makes rows of rows; `new [1, D]` is the new row, `t` the step, `n` a number that is drawn.
MOVES: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "slice": lambda x, new, t, n: x[n % x.shape[0] :],
    "every second": lambda x, new, t, n: x[n % 2 :: 2] if x.shape[0] > 1 else x,
    "roll": lambda x, new, t, n: x.roll(n - 2, 0),
    "cat": lambda x, new, t, n: torch.cat([x, new] if n % 2 else [new, x]),
    "cat with itself": lambda x, new, t, n: torch.cat([x, x[: 1 + n % 2]]),
    "stack": lambda x, new, t, n: torch.stack([*x[1:], new[0]] if n % 2 else [new[0], *x.unbind()[:-1]]),
    "rows placed": lambda x, new, t, n: placed(x, 0, x[n % x.shape[0] :]),
    "new placed": lambda x, new, t, n: placed(x, min(n, x.shape[0] - 1), new),
    "one placed": lambda x, new, t, n: one_placed(x, n % x.shape[0], x[-1]),
    "new one placed": lambda x, new, t, n: one_placed(x, -1, new[0]),
    "pad": lambda x, new, t, n: placed(padded(x, 0, 1), x.shape[0], new),
    "pad in front": lambda x, new, t, n: placed(padded(x, 1, -(n % 2)), 0, new),
    "picked": lambda x, new, t, n: x.index_select(0, (torch.arange(x.shape[0]) * n + t) % x.shape[0]),
    "copied": lambda x, new, t, n: x.index_copy(0, ((t + n) % x.shape[0])[None], new),
    "copied rows": lambda x, new, t, n: x.index_copy(0, ((t + n) % x.shape[0])[None], x[:1]),
    "where": lambda x, new, t, n: torch.where(t % 3 == n % 3, x, x.roll(1, 0)),
    "where new": lambda x, new, t, n: torch.where(t < n, placed(x, 0, new), x),
    "listed": lambda x, new, t, n: x[[(i * n + 1) % x.shape[0] for i in range(x.shape[0])]],
    "listed from the end": lambda x, new, t, n: x[[-1 - i for i in range(x.shape[0])]],
    "new row by a mask": lambda x, new, t, n: torch.where(here(x, t + n), new[0], x),
    "new written or moved": lambda x, new, t, n: torch.where(
        t < n, torch.where(here(x, t), new, x), torch.cat([x[:-1].roll(1, 0), new])
    ),
}  # fmt: skip

moves = st.lists(st.tuples(st.sampled_from([*MOVES]), st.integers(0, 5)), min_size=1, max_size=4)


def program(chosen, rows, reads):
    """A step that puts its buffer together by moves, and reads it as it finds it, leaves it, or in between."""

    def run(x):
        def step(c, token):
            t, row = token
            found = [c]
            for name, n in chosen:
                found.append(MOVES[name](found[-1], row[None], t, n))
            after = to_size(found[-1], rows)
            read = [c, *found[1:], after][reads % (len(found) + 1)]
            return after, ((read[None] @ row).softmax(-1) @ read, read.sum(0))

        first = torch.arange(rows * D, dtype=x.dtype).reshape(rows, D) / 10
        return nsa_compile.scan(step, first, (torch.arange(S), x))

    return run


def rows_of_x():
    torch.manual_seed(0)
    return torch.randn(S, D, dtype=torch.float64, requires_grad=True)


def compared(function, x):
    torch._dynamo.reset()
    found = []
    for run in (function, nsa_compile.compile(function, nested="eager", cache=False)):
        results = torch.utils._pytree.tree_leaves(run(x))
        results = [y for y in results if y.requires_grad]
        torch.manual_seed(1)
        gradients = torch.autograd.grad(results, [x], [torch.randn_like(y) for y in results])
        found.append(([y.detach() for y in results], gradients))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


@given(chosen=moves, rows=st.integers(1, 5), reads=st.integers(0, 5))
def test_rows_put_together_are_those_of_the_loop(chosen, rows, reads):
    compared(program(chosen, rows, reads), rows_of_x())
    note(str(nsa_compile.last_report().scans))


@pytest.mark.deep(but=["picked"])
@pytest.mark.parametrize("name", MOVES)
def test_each_move_is_followed(name):
    """No step is computed after another, whatever rows are moved."""
    writes = "new" in name or "pad" in name or name in ("cat", "stack", "copied")
    compared(program([(name, 1)] if writes else [(name, 1), ("new placed", 3)], 4, 2), rows_of_x())
    (scan,) = nsa_compile.last_report().scans
    assert scan.batched, scan
    assert not scan.recurrences, scan


FAULTS = {
    "a roll the other way": (aten.roll.default, lambda rule: lambda to, node: backwards(rule(to, node)), "roll"),
    "a choice the other way": (aten.where.self, lambda rule: lambda to, node: of_other_steps(rule(to, node)), "where"),
    "a row too far": (aten.slice.Tensor, lambda rule: lambda to, node: next_rows(rule(to, node)), "slice"),
    "rows picked at another step": (
        aten.index_select.default,
        lambda rule: lambda to, node: of_other_steps(rule(to, node)),
        "picked",
    ),
}


def backwards(found):
    return found.taken(np.arange(found.row.shape[1])[None, ::-1])


def of_other_steps(found):
    return assembled_rows.Assembly(found.parts, np.roll(found.part, 1, 0), np.roll(found.row, 1, 0))


def next_rows(found):
    return found.taken(np.roll(np.arange(found.row.shape[1]), 1)[None])


@pytest.mark.deep(but=["a roll the other way"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(monkeypatch, fault):
    target, planted, move = FAULTS[fault]
    monkeypatch.setitem(assembled_rows._RULES, target, planted(assembled_rows._RULES[target]))
    with pytest.raises(AssertionError):
        compared(program([(move, 1), ("new placed", 3)], 4, 2), rows_of_x())


@pytest.mark.deep
def test_rows_of_another_step_are_seen(monkeypatch):
    """A read between two writes, of rows that are said to be those of the step before."""
    written_at = assembled_rows.Assembler.written_at

    def late(self, node, buffer, before):
        table = written_at(self, node, buffer, before)
        return table if table is None else np.concatenate([table[:1], table[:-1]])

    monkeypatch.setattr(assembled_rows.Assembler, "written_at", late)

    def run(x):
        def step(c, token):
            t, row = token
            window = torch.cat([c, row[None]])
            hidden = torch.arange(4) < 3 - t
            return window[1:], (window @ row).masked_fill(hidden, -torch.inf).softmax(-1) @ window

        return nsa_compile.scan(step, x.new_zeros(3, D), (torch.arange(S), x))[1]

    with pytest.raises(AssertionError):
        compared(run, rows_of_x())
    monkeypatch.undo()
    compared(run, rows_of_x())
    assert "in a cache" in str(nsa_compile.last_report().passes)

"""`k[t]` and `k[:, t] = x` in a step, with a number t that is a tensor: equal to the loop, or refused."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import scan
from nsa_compile.capture import picks, steps
from nsa_compile.capture.refusals import ScanRefused
from tests.strategies import few

S, D = 5, 3


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def over_a_copy(change, times=None):
    """A scan of `change(c, t, x, table)`, which writes to a copy of the cache `[S, D, 2]` and returns an output."""

    def run(x, table):
        times_of = torch.arange(S) if times is None else torch.tensor(times)

        def step(c, row):
            t, x = row
            c = c.clone()
            y = change(c, t, x, table)
            return c, c.sum(0) + y

        return scan(step, table * 2, (times_of, x))

    return run


def compared(run):
    """The outputs and gradients of a scan, compiled and as written."""
    found = []
    for function in (run, nsa_compile.compile(run, nested="eager", cache=False)):
        torch._dynamo.reset()
        x, table = numbers(S, D, 2).requires_grad_(), numbers(S, D, 2).requires_grad_()
        cache, y = function(x, table)
        found += [(cache, y, *torch.autograd.grad((cache.sin() * y.sum(0)).sum(), (x, table), materialize_grads=True))]
    torch.testing.assert_close(*found)


def put(c, t, value):
    c[t] = value
    return 0


def put_second(c, t, value):
    c[:, t] = value
    return 0


def update(c, t, x):
    c[t] += x
    return 0


def update_column(c, t, x):
    c[:, t // 2, 1:] -= x[:1, 1:]
    return 0


def read_and_put(c, t, x):
    row = c[t]
    y = row * 3 + x
    c[t] = y + row
    return y


def put_and_read(c, t, x):
    c[t] = x
    return c[t] * c[-t - 1]


def two_updates(c, t, x):
    c[t] *= x
    c[t - 1] += c[t] * 2
    return c[t]


def in_a_scan(c, t, x):
    return scan(lambda u, r: (u + c[t] * r, r), torch.zeros_like(x), x[None].expand(2, -1, -1) * 1)[0]


FOLLOWED = {
    "a row": lambda c, t, x, w: c[t] * x,
    "a row from outside": lambda c, t, x, w: w[t] * x,
    "a row of the second dimension": lambda c, t, x, w: c[:, t // 2].sum(0) * x,
    "a row of the last one": lambda c, t, x, w: c[..., t // 4].sum(0)[:, None] * x,
    "a number": lambda c, t, x, w: w[t, 1, 0] * x,
    "a row of a part": lambda c, t, x, w: w[t, 1:].sum(0) * x,
    "a row with one more dimension": lambda c, t, x, w: w[None, t, :, None, 1].sum() * x,
    "two numbers": lambda c, t, x, w: w[t, t // 2] * x,
    "two numbers apart": lambda c, t, x, w: w[t, ..., t // 4].sum() * x,
    "a row of a row": lambda c, t, x, w: w[t][t // 2] * x,
    "from the end": lambda c, t, x, w: w[-t] * x + w[t - S],
    "by a smaller integer": lambda c, t, x, w: w[t.int()] * w[t.to(torch.int16)] * x,
    "by a number that is data": lambda c, t, x, w: w[c[:, 0, 0].argmax()] * x,
    "by a derivative": lambda c, t, x, w: torch.func.grad(lambda w: (w[t] * x).sin().sum())(w).sum(0),
    "written": lambda c, t, x, w: put(c, t, x),
    "written from the end": lambda c, t, x, w: put(c, -1 - t, x),
    "written with a number": lambda c, t, x, w: put(c, t, 0.5),
    "written with integers": lambda c, t, x, w: put(c, t, t),
    "written in float32": lambda c, t, x, w: put(c, t, x.float()),
    "written with ones in front": lambda c, t, x, w: put(c, t, x[None, None]),
    "written, repeated": lambda c, t, x, w: put(c, t, x[:1]),
    "written to a column": lambda c, t, x, w: put_second(c, t // 2, x[0]),
    "written by a number that is data": lambda c, t, x, w: put(c, (x[0, 0] > 0).long(), x),
    "written by two numbers": lambda c, t, x, w: put(c, (t, t // 2), x[0]),
    "written by two numbers apart": lambda c, t, x, w: put(c, (t, slice(1), t // 4), x[0, 0]),
    "updated by two numbers": lambda c, t, x, w: update(c, (t, t // 2), x[0]),
    "rows in turn": lambda c, t, x, w: put(c, t, c[t - 1] * 2) + put(c, 0, c[t]),
    "updated": lambda c, t, x, w: update(c, t, x),
    "a part updated": lambda c, t, x, w: update_column(c, t, x),
    "updated twice": lambda c, t, x, w: two_updates(c, t, x),
    "read, then written": lambda c, t, x, w: read_and_put(c, t, x),
    "written, then read": lambda c, t, x, w: put_and_read(c, t, x),
    "in a scan of the step": lambda c, t, x, w: in_a_scan(c, t, x),
}


@pytest.mark.deep(but=["a number"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_it_is_the_loop(name):
    compared(over_a_copy(FOLLOWED[name]))


@pytest.mark.deep(but=["times1-a row"])
@pytest.mark.parametrize("name", ["a row", "written", "updated", "written, then read"])
@pytest.mark.parametrize("times", [[0, 0, 1, 1, 4], [4, -1, 0, -5, 2]])
def test_it_is_the_loop_whichever_the_numbers_are(name, times):
    compared(over_a_copy(FOLLOWED[name], times))


def later(c, t, x):
    row = c[t]
    c[t] = x
    return row


def a_view_later(c, t, x):
    row = c[t][:1].t()
    c[t] = x
    return row.t() * x


def after_another_write(c, t, x):
    row = c[t]
    c.mul_(2)
    return row


def through(c, t, x):
    c[t].add_(x)
    return 0


def through_a_part(c, t, x):
    c[t][0] = x[0]
    return 0


def through_twice(c, t, x):
    row = c[t]
    row += x
    return 0


def between(c, t, x):
    row = c[t]
    row.add_(x)
    y = c.sum(0)
    c[t] = row
    return y


def updated_elsewhere(c, t, x):
    row = c[t]
    row += x
    c[t - 1] = row
    return 0


def updated_and_used(c, t, x):
    row = c[t]
    c[t] += x
    return row


def a_list_of_views_later(c, t, x):
    first, *_ = c[t].unbind(0)
    c[t] = x
    return first * x


def after_a_write_of_a_list(c, t, x):
    row = c[t]
    torch._foreach_mul_([c.view(-1)], 2.0)
    return row


def through_a_list(c, t, x):
    torch._foreach_add_([c[t]], 1.0)
    return 0


def through_statistics(c, t, x):
    return F.batch_norm(x.t(), c[0, 0].repeat(2)[:D] * 0, c[t][:, 0], training=True).t()


def of_what_dropout_returns(c, t, x):
    row = F.dropout(c, 0.5, training=False)[t]
    c.mul_(2)
    return row


def in_a_transform(c, t, x):
    torch.vmap(lambda a: a[t].mul_(2))(c.permute(1, 2, 0).flatten(0, 1))
    return c[t]


def beside_a_branch(c, t, x):
    c[t] = torch.cond(t > 1, lambda x: x * 2, lambda x: x - 1, (x,))
    return c[t]


def in_a_region(c, t, x):
    row = c[t]
    checkpoint(lambda z: z.mul_(2), c, use_reentrant=False)
    return row


def kept_by_a_scan(c, t, x):
    row = c[0]
    last, _ = scan(lambda h, r: (h, r * h), row, x[None])
    last.mul_(2)
    return 0


def kept_by_a_scan_and_written(c, t, x):
    last, _ = scan(lambda h, r: (h, r * h), c[0], x[None])
    c.mul_(2)
    return last


def through_data(c, t, x):
    row = c[t]
    c.data.add_(1)
    return row


MATTERS = {
    "written by .data": (through_data, "takes .data of a tensor"),
    "used after the write": (later, "goes on to use a row that it read"),
    "a view used after the write": (a_view_later, "goes on to use a row that it read"),
    "used after another write": (after_another_write, "goes on to use a row that it read"),
    "used after an update": (updated_and_used, "goes on to use a row that it read"),
    "written through": (through, "writes in place to a row that it read"),
    "a part written through": (through_a_part, "writes in place to a row that it read"),
    "written through a name": (through_twice, "writes in place to a row that it read"),
    "read between": (between, "writes in place to a row that it read"),
    "updated elsewhere": (updated_elsewhere, "writes in place to a row that it read"),
    "a list of views used after the write": (a_list_of_views_later, "goes on to use a row"),
    "used after a write of a list": (after_a_write_of_a_list, "goes on to use a row"),
    "written through a list": (through_a_list, "writes in place to a row that it read"),
    "statistics of a layer": (through_statistics, "writes in place to a row that it read"),
    "of what dropout returns": (of_what_dropout_returns, "goes on to use a row"),
    "in a transform": (in_a_transform, "has a branch, a scan or a transform"),
    "beside a branch": (beside_a_branch, "has a branch, a scan or a transform"),
    "in a checkpointed region": (in_a_region, "has a branch, a scan or a transform"),
    "kept by a scan": (kept_by_a_scan, "what a scan in it was given or returned"),
    "kept by a scan and written": (kept_by_a_scan_and_written, "what a scan in it was given or returned"),
    "asked for its strides": (lambda c, t, x: c[:, t // 2].is_contiguous() * x, "asks for strides"),
}


@pytest.mark.deep(but=["in a checkpointed region", "asked for its strides"])
@pytest.mark.parametrize("name", MATTERS)
def test_it_is_refused_where_a_view_is_not_a_copy(name):
    change, why = MATTERS[name]
    torch._dynamo.reset()
    run = over_a_copy(lambda c, t, x, table: change(c, t, x))
    with pytest.raises(ScanRefused, match=rf"cannot be captured at \S+test_picks.py:\d+: .*{re.escape(why)}"):
        nsa_compile.compile(run, nested="eager", cache=False)(numbers(S, D, 2), numbers(S, D, 2))


@pytest.mark.parametrize("key", [lambda t: t > 2, lambda t: t.to(torch.uint8)], ids=["bool", "uint8"])
def test_a_mask_of_one_number_is_called_one(key):
    torch._dynamo.reset()
    run = over_a_copy(lambda c, t, x, table: put(c, key(t), x[0]))
    with pytest.raises(ScanRefused, match="by a mask of one number"):
        nsa_compile.compile(run, nested="eager", cache=False)(numbers(S, D, 2), numbers(S, D, 2))


def test_of_a_wrong_shape_no_traceback_is_logged():
    torch._dynamo.reset()
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("torch._subclasses.fake_tensor").addHandler(handler)
    run = over_a_copy(lambda c, t, x, table: put(c, t, x[:-1]))
    try:
        with pytest.raises(ScanRefused, match=r"it raises RuntimeError.'expand: "):
            nsa_compile.compile(run, nested="eager", cache=False)(numbers(S, D, 2), numbers(S, D, 2))
    finally:
        logging.getLogger("torch._subclasses.fake_tensor").removeHandler(handler)
    assert records == []


def test_a_write_that_comes_first_in_a_region():
    """There was no last node of the region's graph to compare it with."""

    def written(c, t, x):
        c[t] = x
        return c

    compared(over_a_copy(lambda c, t, x, table: checkpoint(written, c * 1, t, x, use_reentrant=False).sum(0)))


def test_a_carry_that_is_a_row_is_refused():
    """In Python it is a view of the tensor, which the function may write to."""

    def run(x):
        return scan(lambda c, r: (x[r[0]], c), x[0] * 1, (torch.arange(S), x))

    torch._dynamo.reset()
    with pytest.raises(ScanRefused, match="returns as its carry a row"):
        nsa_compile.compile(run, nested="eager", cache=False)(numbers(S, D))


@pytest.mark.deep(but=["times0-written"])
@pytest.mark.parametrize("name", ["a row", "written", "written by two numbers", "updated by two numbers"])
@pytest.mark.parametrize("times", [[0, 1, 2, 3, S], [0, 1, 2, 3, -S - 1]])
def test_a_number_beyond_the_rows_is_an_error(name, times):
    torch._dynamo.reset()
    run = over_a_copy(FOLLOWED[name], times)
    for function in (run, nsa_compile.compile(run, nested="eager", cache=False)):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|less than|within"):
            function(numbers(S, D, 2), numbers(S, D, 2))


@pytest.mark.deep(but=["True"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_where_a_scan_is_unrolled_it_is_one_line(fullgraph):
    """Or, where torch may break the graph, left to it."""

    def run(x):
        return torch.vmap(lambda x: scan(lambda c, r: (c, x[r[0]] * r[1]), x[0], (torch.arange(S), x))[1])(x)

    torch._dynamo.reset()
    found = nsa_compile.compile(run, nested="eager", cache=False, fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(ScanRefused, match="where the scan is unrolled"):
            found(numbers(2, S, D))
    else:
        torch.testing.assert_close(found(numbers(2, S, D)), run(numbers(2, S, D)))


def test_what_is_no_number_is_left_to_torch():
    """Masks, lists and more of them: refused, or as they were."""
    for read in (lambda w, t: w[t.bool()], lambda w, t: w[[t // 2, t // 2]], lambda w, t: w[t.view(1), [0]]):
        run = over_a_copy(lambda c, t, x, w, read=read: read(w, t).sum(0) * x)
        try:
            compared(run)
        except ScanRefused:
            continue


@st.composite
def keys(draw):
    """A key for a tensor [4, 3, 5] with one number in it, as source."""
    number = draw(st.sampled_from(["t % 3", "t % 3 - 3"]))
    parts = draw(st.permutations([number, *draw(st.lists(st.sampled_from([":", "1:", "::2", "-1"]), max_size=2))]))
    for part in draw(st.lists(st.sampled_from(["None", "..."]), max_size=2, unique=True)):
        parts.insert(draw(st.integers(0, len(parts))), part)
    return ", ".join(parts)


@few(25)
@given(keys(), st.integers(0, 3))
def test_drawn_keys(key, seed):
    read = eval(f"lambda w, t: w[{key}]")
    scope: dict = {}
    exec(f"def write(w, t, x):\n    w[{key}] = x", scope)

    w = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def run(w, x):
        def step(c, row):
            t, x = row
            c = c * 1
            scope["write"](c, t, x)
            return c, read(c, t) * read(w, t)

        return scan(step, w * 2, (torch.arange(4), x))

    torch._dynamo.reset()
    x = numbers(4)
    torch.testing.assert_close(nsa_compile.compile(run, nested="eager", cache=False)(w, x), run(w, x))


@pytest.mark.parametrize(
    ("name", "broken", "program"),
    [
        ("_at", lambda number, size: (number % size).reshape(1) * 0, "a row"),
        ("_is_all", lambda part: isinstance(part, slice), "a row of a part"),
    ],
)
def test_planted_faults_are_found(name, broken, program, monkeypatch):
    monkeypatch.setattr(picks, name, broken)
    with pytest.raises((AssertionError, RuntimeError)):
        compared(over_a_copy(FOLLOWED[program]))


@pytest.mark.parametrize("program", ["used after the write", "written through"])
def test_without_the_look_at_views_the_values_are_wrong(program, monkeypatch):
    monkeypatch.setattr(steps, "why_copies_are_no_views", lambda *_: None)
    change = MATTERS[program][0]
    with pytest.raises(AssertionError):
        compared(over_a_copy(lambda c, t, x, table: change(c, t, x)))

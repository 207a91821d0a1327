"""A row of a table that is made of smaller tensors is computed in the step: same values, same gradients, no table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile import scan
from tests.passes.test_found_programs import equal_gradients, rows

S, H = 20, 3
INF = torch.inf


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def steps(dtype=torch.int64):
    return torch.arange(S, dtype=dtype)


def apart():
    return steps()[:, None] - steps()


def squared(table, times):
    for _ in range(times):
        table = table * table * 0.01
    return table


# How a table is made, steps first, of numbers w [S], v [S], a table of numbers b [H, S] and integers i [S].
TABLES = {
    "a distance times slopes": lambda w, v, b, i: (v[:H, None, None] * apart()).transpose(0, 1),
    "a mask of a distance": lambda w, v, b, i: (apart() < 0) | (apart() >= 4),
    "numbers that ascend, counted from behind": lambda w, v, b, i: (apart().flip(1) * 0.5)[:, None],
    "a sum of rows and columns": lambda w, v, b, i: w[:, None] + v,
    "columns and rows, turned": lambda w, v, b, i: (v + w[:, None]).T,
    "a product, a root, a tanh": lambda w, v, b, i: torch.tanh((w[:, None] ** 2 + v.abs() + 1).sqrt()),
    "equal numbers": lambda w, v, b, i: i[:, None] == i,
    "equal numbers or the first ones": lambda w, v, b, i: torch.where((i[:, None] == i) | (steps() < 2), 0.0, -INF),
    "lower triangle of ones": lambda w, v, b, i: torch.ones(S, S, dtype=torch.bool).tril(),
    "lower triangle above the diagonal": lambda w, v, b, i: (w[:, None] * v).tril(2),
    "upper triangle, a fill": lambda w, v, b, i: torch.full((S, S), -INF).triu(1),
    "upper triangle below the diagonal": lambda w, v, b, i: (w[:, None] * v).triu(-3),
    "columns of a lower triangle": lambda w, v, b, i: (w[:, None] * v).tril(1).transpose(0, 1),
    "columns of an upper triangle": lambda w, v, b, i: (w[:, None] * v).triu(-1).transpose(0, 1),
    "triangles of a batch": lambda w, v, b, i: (b[:, :, None] * v).tril().permute(1, 0, 2),
    "steps are the batch of triangles": lambda w, v, b, i: (w[:, None, None] * b).tril(1),
    "a mask of two": lambda w, v, b, i: (apart() >= 0) & ~(apart() > 5),
    "a bias by distance": lambda w, v, b, i: b[:, apart().clamp(0, S - 1)].transpose(0, 1),
    "a bias by distance, the numbers first": lambda w, v, b, i: b.T[apart().abs()],
    "a bias by distance from behind": lambda w, v, b, i: v[-apart().abs() - 1],
    "a bias by embedding": lambda w, v, b, i: F.embedding(apart().abs(), b.T).permute(0, 2, 1),
    "repeated by expand": lambda w, v, b, i: (w[:, None] + v)[None].expand(2, S, S).transpose(0, 1),
    "a part of the columns": lambda w, v, b, i: (w[:, None] + v)[:, 1:-2],
    "one of several": lambda w, v, b, i: (w[None, :, None] * b[:, None])[1],
    "in another shape": lambda w, v, b, i: (w[:, None] * v).view(S, 4, -1).transpose(1, 2),
    "cast": lambda w, v, b, i: (w[:, None] * v).float().mul(0.5).double(),
    "integers that are narrow": lambda w, v, b, i: i.to(torch.int8)[:, None] * 60 + i.to(torch.int8),
    "a number of one dimension counts less": lambda w, v, b, i: steps(torch.int32)[:, None] * i[:1, None] * v,
    "detached": lambda w, v, b, i: (w[:, None] * v).detach() * v,
    "of itself, many times": lambda w, v, b, i: squared(w[:, None] + v, 25),
    "of two makings": lambda w, v, b, i: (w[:, None] * v).tril() + (v[:, None] * w).triu() * 2,
}

# Tables whose rows stay rows: nothing smaller makes them, or what does must run once.
NOT_SUNK = {
    "an input": lambda w, v, b, i: b.T,
    "a product of matrices": lambda w, v, b, i: b.T @ b,
    "a running sum": lambda w, v, b, i: (w[:, None] + v).cumsum(1),
    "joined of parts": lambda w, v, b, i: torch.cat([w[:, None] + v, v[:, None] + w], 1),
    "repeated alone": lambda w, v, b, i: w[:, None].expand(S, S),
    "picked by numbers of each step": lambda w, v, b, i: F.embedding(i, b.T),
    "drawn": lambda w, v, b, i: torch.zeros(S, S, dtype=w.dtype).uniform_() * 0 + w[:, None] + v,
    "a part of the steps": lambda w, v, b, i: (torch.cat([v, w])[:, None] + v)[S:],
    "the same at each step": lambda w, v, b, i: torch.zeros(S, S, dtype=w.dtype),
}


def given():
    """Numbers, of which those of floating point ask for gradients."""
    i = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 0, 3] * 2)
    w, v, b = rows(S), rows(2, S)[1], rows(H, S)
    return *(x.clone().requires_grad_() for x in (w, v, b)), i


def program(table, pick=None):
    """A recurrence over the sums of rows of a table, which a scan takes, or which its step picks."""

    def run(w, v, b, i):
        def step(c, row):
            row = row if pick is None else pick(made, row)
            new = c * 0.5 + row.sum()
            return new, torch.where(row, 2.0, v[0]) if row.dtype == torch.bool else row * v[1]

        made = table(w, v, b, i)
        made = made.movedim(0, 1) if pick is PICKS["picked along another dimension"] else made
        made = made.nan_to_num(neginf=-7.0) if made.is_floating_point() else made
        return scan(step, w.new_zeros(()), made if pick is None else steps())

    return run


PICKS = {
    "taken": None,
    "picked": lambda table, t: table[t],
    "picked by index_select": lambda table, t: table.index_select(0, t[None])[0],
    "picked along another dimension": lambda table, t: table[:, t],
}
# Other rows than that of the step itself.
OTHER_PICKS = {
    "the next row": lambda table, t: table[(t + 1).clamp(max=S - 1)],
    "counted from behind": lambda table, t: table[-1 - t],
    "by twos": lambda table, t: table[t // 2],
    "always the same row": lambda table, t: table[2],
}


def sunk():
    (found,) = [p for p in nsa_compile.last_report().passes if p.name == "sink_tables"]
    return bool(found.matches)


@pytest.mark.deep(every=3, but=["one of several"])
@pytest.mark.parametrize("name", TABLES)
def test_rows_are_computed_in_the_step(name):
    equal_gradients(program(TABLES[name]), *given())
    assert sunk()


@pytest.mark.deep(every=4)
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("name", ["a sum of rows and columns", "lower triangle of ones", "triangles of a batch"])
def test_rows_that_a_step_picks_are_computed(name, pick):
    equal_gradients(program(TABLES[name], PICKS[pick]), *given())
    assert sunk()


@pytest.mark.parametrize("pick", OTHER_PICKS)
def test_other_rows_are_picked(pick):
    equal_gradients(program(TABLES["a sum of rows and columns"], OTHER_PICKS[pick]), *given())
    assert not sunk()


def test_rows_are_picked_by_numbers_that_do_not_count_steps():
    def run(w, v, b, i):
        made = w[:, None] + v

        def step(c, t):
            new = c * 0.5 + made[t].sum()
            return new, made[t] * v[1]

        return scan(step, w.new_zeros(()), steps().flip(0))

    equal_gradients(run, *given())
    assert not sunk()


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("name", NOT_SUNK)
def test_rows_stay_rows(name):
    if name != "drawn":
        equal_gradients(program(NOT_SUNK[name]), *given())
    else:
        torch.compile(program(NOT_SUNK[name]), backend="nsa_compile", options={"nested": "eager"})(*given())
    assert not sunk()


def attention(made, S=S):
    """Causal attention with a bias or a mask of which a table of rows is made."""

    def run(q, k, v, *more):
        def step(cache, row):
            t, q, k, v, bias = row
            K, V = cache[0].index_copy(0, t[None], k[None]), cache[1].index_copy(0, t[None], v[None])
            scores = K @ q
            scores = scores.masked_fill(bias, -INF) if bias.dtype == torch.bool else scores + bias
            return (K, V), (scores.softmax(-1) @ V)

        table = made(*more)
        return scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (torch.arange(S), q, k, v, table))[1]

    return run


def test_attention_is_that_of_the_step_that_makes_its_own_rows():
    """A window by rows of a table is a window, and documents by rows are a program of their numbers."""
    q, k, v = (x.requires_grad_() for x in rows(3, S, 4).unbind(0))
    documents = torch.tensor([0] * 8 + [1] * 12)

    def window():
        return (apart() < 0) | (apart() >= 4)

    def apart_documents(documents):
        return torch.zeros(S, S).masked_fill((documents[:, None] != documents) | (apart() < 0), -INF).double()

    for made, more, operator in ((window, (), "window of 4"), (apart_documents, (documents,), "program of scores")):
        equal_gradients(lambda *x, made=made: (attention(made)(*x),), q, k, v, *more)
        (raised,) = [p for p in nsa_compile.last_report().passes if p.name == "raise_attention"]
        assert operator in raised.matches[0]


def test_a_table_that_others_read_is_made_for_them():
    def run(w, v):
        table = w[:, None] * v
        total, ys = scan(lambda c, row: (c + row.sum(), row.cumsum(0)), w.new_zeros(()), table)
        return total, ys, table @ v, table

    equal_gradients(run, *given()[:2])
    assert sunk()


def test_two_scans_and_two_tables_of_one_scan():
    def run(w, v):
        def step(c, rows):
            return c + rows[0].sum(), rows[0] * rows[1]

        tables = w[:, None] * v, (apart() * v).transpose(0, 1)
        first = scan(step, w.new_zeros(()), tables)
        return (*first, *scan(step, first[0], tables[::-1]))

    equal_gradients(run, *given()[:2])
    assert sum(len(p.matches) for p in nsa_compile.last_report().passes if p.name == "sink_tables") == 4


@pytest.mark.parametrize("where", ["without gradients", "autocast"])
def test_what_a_mode_changes_stays_outside(where):
    def run(w, v):
        mode = torch.no_grad() if where == "without gradients" else torch.autocast("cpu")
        with mode:
            table = w[:, None].exp() * v
        return scan(lambda c, row: (c + row.sum(), row.cumsum(0)), w.new_zeros(()), table)

    w, v = given()[:2]
    equal_gradients(lambda w, v: (*run(w, v), w * v), w, v)
    assert not sunk()


def test_no_table_is_held():
    """2,048 steps: the table of each of 8 heads would take 256 MiB, what the program holds is far less."""
    S, slopes = 2048, 2.0 ** -torch.arange(1.0, 9.0)

    def run(x):
        table = (slopes[:, None, None] * (torch.arange(S)[:, None] - torch.arange(S))).transpose(0, 1)
        return scan(lambda c, row: (c, row[0].amax(-1)), x.new_zeros(()), (table, x))[1]

    torch.compile(run, backend="nsa_compile", options={"nested": "eager", "cache": False})(torch.ones(S))
    assert sunk()

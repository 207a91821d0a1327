"""Carries of several parts: which are split, and equal to their loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import carry_parts
from nsa_compile.passes import resolve_carries
from tests.strategies import few

S, D = 6, 3


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def attend(q, K, V, t):
    return (K @ q).masked_fill(torch.arange(len(K)) > t, -torch.inf).softmax(0) @ V


def of_a_cache(step, *shape, first=0.0):
    """A scan of `step(c, t, x) -> (c, y)` that begins with a cache of a shape, and the cache that it leaves."""

    def run(x, start):
        def one(c, row):
            return step(c, *row)

        return scan(one, x.new_full(shape, first) + start, (torch.arange(S), x))

    return run


def compared(run, shape, monkeypatch):
    """How many carries the compiled scan has, which is compared with its loop."""
    found, counts, own = [], [], resolve_carries.split_carries

    def counted(site, body):
        own(site, body)
        counts.append(len(site.init))

    monkeypatch.setattr(resolve_carries, "split_carries", counted)
    for compiled in (True, False):
        torch._dynamo.reset()
        function = nsa_compile.compile(run, nested="eager", cache=False) if compiled else run
        x, start = numbers(S, D).requires_grad_(), (numbers(*shape) * 0.1).requires_grad_()
        c, y = function(x, start)
        found.append((c, y, *torch.autograd.grad(c.sin().sum() + y.cos().sum(), (x, start))))
    torch.testing.assert_close(*found)
    monkeypatch.setattr(resolve_carries, "split_carries", own)
    return counts[0]


def written_by_index(c, t, x):
    c = c.clone()
    c[0, t] = x
    c[1, t] = x * 2
    return c, attend(x, c[0], c[1], t)


def written_by_names(c, t, x):
    c = c.clone()
    K, V = c[0], c[1]
    K.index_copy_(0, t.view(1), x[None])
    V.index_copy_(0, t.view(1), x[None] * 2)
    return c, attend(x, K, V, t)


def put_together_again(c, t, x):
    K, V = c.unbind(0)
    K, V = (torch.where((torch.arange(S) == t)[:, None], row, old) for row, old in ((x, K), (x * 2, V)))
    return torch.stack([K, V]), attend(x, K, V, t)


def of_the_second_dimension(c, t, x):
    c = c.clone()
    c[:, 0, t] = x
    c[:, 1, t] = -x
    return c, attend(x, c[:, 0].sum(0), c[:, 1].sum(0), t)


def of_layers(c, t, x):
    y = x
    for layer in range(2):
        c = c.clone()
        c[layer, 0, t] = y + x
        c[layer, 1, t] = y * x
        y = y + attend(y, c[layer, 0], c[layer, 1], t)
    return c, y


def one_part_written(c, t, x):
    c = c.clone()
    c[1, t] = x
    return c, attend(x, c[1], c[0], t)


def of_states(c, t, x):
    h, m = c.unbind(0)
    h = h * 0.9 + x
    m = torch.maximum(m, h)
    return torch.stack([h, m]), h * m


def written_twice(c, t, x):
    c = c.clone()
    c[0] = c[0] * 0.5
    c[0] = c[0] + x
    c[1, t] = x
    return c, c[0, 0] + c[1, 0]


def from_the_end(c, t, x):
    c = c.clone()
    c[-1, t] = x
    c[-2, t] = x * 2
    return c, attend(x, c[-1], c[0], t)


SPLIT = {
    "written by index": (written_by_index, (2, S, D), 2),
    "written by names": (written_by_names, (2, S, D), 2),
    "put together again": (put_together_again, (2, S, D), 2),
    "of the second dimension": (of_the_second_dimension, (2, 2, S, D), 2),
    "of layers": (of_layers, (2, 2, S, D), 4),
    "one part written": (one_part_written, (2, S, D), 2),
    "of states": (of_states, (2, D), 2),
    "written twice": (written_twice, (2, S, D), 2),
    "from the end": (from_the_end, (2, S, D), 2),
}


def read_as_a_whole(c, t, x):
    c = c.clone()
    c[0, t] = x
    return c, c.sum((0, 1)) + c[1, 0]


def moved(c, t, x):
    return torch.stack([c[1], c[0] * 0.5 + x]), c[0]


def shifted(c, t, x):
    return torch.stack([c[1], c[2], x]), c[0] + c[2]


def shifted_in_place(c, t, x):
    c = c.clone()
    c[:2] = c[1:].clone()
    c[2] = x
    return c, c[0] * c[2]


def an_output(c, t, x):
    c = c.clone()
    c[0, t] = x
    return c, torch.stack([c[0, 0], c[1, 0]]) + c[:, 0]


def left_alone(c, t, x):
    return c, c[0] * x + c[1]


def by_position(c, t, x):
    c = c.clone()
    c[t % 2] = x
    return c, c[0] + c[1]


def stacked_with_others(c, t, x):
    return torch.stack([c[0] * 0.5 + x, c[1]]), torch.stack([c, c]).sum((0, 1)) + c.unsqueeze(0).sum((0, 1))


def in_pairs(c, t, x):
    c = c.clone()
    c[:2, t] = x
    return c, c[0, 0] + c[2, 0]


WHOLE = {
    "read as a whole": (read_as_a_whole, (2, S, D)),
    "moved": (moved, (2, D)),
    "shifted": (shifted, (3, D)),
    "shifted in place": (shifted_in_place, (3, D)),
    "an output": (an_output, (2, S, D)),
    "left alone": (left_alone, (2, D)),
    "by position": (by_position, (2, D)),
    "stacked with others": (stacked_with_others, (2, D)),
    "in pairs": (in_pairs, (3, S, D)),
    "of very many parts": (lambda c, t, x: (torch.cat([c[:1] * 0.5, c[1:]]) + c[1].sum(), x), (70, D)),
}


@pytest.mark.deep(but=["of states"])
@pytest.mark.parametrize("name", SPLIT)
def test_split(name, monkeypatch):
    step, shape, count = SPLIT[name]
    assert compared(of_a_cache(step, *shape), shape, monkeypatch) == count


@pytest.mark.deep(but=["left alone"])
@pytest.mark.parametrize("name", WHOLE)
def test_left_whole(name, monkeypatch):
    step, shape = WHOLE[name]
    assert compared(of_a_cache(step, *shape), shape, monkeypatch) == 1


@pytest.mark.deep
def test_a_cache_of_all_layers_is_that_of_each(caplog):
    """And messages name its parts."""
    torch._dynamo.reset()
    nsa_compile.compile(of_a_cache(of_layers, 2, 2, S, D), nested="eager", cache=False)(numbers(S, D), torch.zeros(()))
    report = nsa_compile.last_report()
    assert report.scans[0].batched
    assert len(report.attention) == 2

    def overwritten(c, t, x):
        c = c.clone()
        c[0, t] = x
        c[1] = c[1].tanh() + x
        return c, c[0, 0] + c[1, 0]

    torch._dynamo.reset()
    nsa_compile.compile(of_a_cache(overwritten, 2, S, D), nested="eager", cache=False)(numbers(S, D), torch.zeros(()))
    assert "carry 0[1]" in caplog.text


@st.composite
def steps(draw):
    """A step as source: statements on the parts of a cache `[n, m, S, D]`, in any order, and now and then on all."""
    n, m = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    part = st.builds("c[{}, {}]".format, st.integers(-n, n - 1), st.integers(-m, m - 1))
    statement = st.one_of(
        st.builds("{}[t] = y".format, part),
        st.builds("{}[t] = y * {}[0]".format, part, part),
        st.builds("{} = {} * 0.5 + y".format, part, part),
        st.builds("y = y + attend(x, {}, {}, t)".format, part, part),
        st.builds("y = y + {}[t]".format, part),
        st.builds("c[{}, :, t] = y".format, st.integers(0, n - 1)),
        st.sampled_from(["y = y + c.sum((0, 1, 2))", "c = torch.stack(c.unbind(0))", "c = c * 0.9", "c = c.flip(0)"]),
    )
    body = draw(st.lists(statement, min_size=1, max_size=6))
    return (n, m, S, D), "\n".join(
        ["def step(c, t, x):", "    c, y = c.clone(), x", *(f"    {s}" for s in body), "    return c, y"]
    )


@few(15)
@given(steps())
def test_drawn_steps(drawn):
    shape, source = drawn
    scope: dict = {"attend": attend, "torch": torch}
    exec(source, scope)
    run = of_a_cache(scope["step"], *shape)
    try:
        c, y = run(numbers(S, D).requires_grad_(), numbers(*shape).requires_grad_())
        (c.sum() + y.sum()).backward()
    except RuntimeError:  # a view that autograd needs is written to
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        compared(run, shape, monkeypatch)


@pytest.mark.deep(but=["nsa_compile.analyses.carry_parts-_moves-<lambda>-programs1-moved"])
@pytest.mark.parametrize(
    ("owner", "name", "broken", "programs", "program"),
    [
        (carry_parts._Parts, "part", lambda self, x: 1 - x if isinstance(x, int) else x, SPLIT, "one part written"),
        (carry_parts, "_moves", lambda parts: False, WHOLE, "moved"),
        (carry_parts, "_selects", lambda node, dim: False, SPLIT, "of layers"),
    ],
)
def test_planted_faults_are_found(owner, name, broken, programs, program, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    step, shape, *count = programs[program]
    with pytest.raises((AssertionError, RuntimeError)):
        assert compared(of_a_cache(step, *shape), shape, monkeypatch) == (count or [1])[0]

"""Rows of a buffer that a step reads where it has just written them: they are what was written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from tests.step_programs import loop

N, STEPS, D = 4, 3, 2


@st.composite
def places(draw):
    """A row, or rows side by side, of a buffer of N, counted from either end."""
    first = draw(st.integers(0, N - 1))
    last = draw(st.integers(first, N - 1))
    if first == last and draw(st.booleans()):
        return draw(st.sampled_from([first, first - N]))
    ends = [last + 1, None] + [last + 1 - N] * (last + 1 < N)
    return slice(first - N if draw(st.booleans()) else first, draw(st.sampled_from(ends)))


@st.composite
def steps(draw):
    """A step that writes and reads a buffer, and what it reads at each step."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(["write", "write other dtype", "read"]), places()), min_size=2))
    dim = draw(st.sampled_from([0, -1]))

    def step(buffer, x):
        out = []
        b = buffer.clone()
        for i, (kind, place) in enumerate(kinds):
            index = place if dim == 0 else (..., place)
            if kind == "read":
                out.append(b[index].sum() * (i + 1))
            else:
                new = (b[index] * 0.5 + x.sum()).sin() * (i + 1)
                b[index] = new.float() if "dtype" in kind else new
        return b, torch.stack([x.sum(), *out])

    return step


def values_and_gradients(run, step):
    rng = torch.Generator().manual_seed(0)
    init, xs = (torch.randn(n, n, generator=rng, dtype=torch.float64).requires_grad_() for n in (N, STEPS))
    results = run(step, init, xs)
    loss = sum(r.mul(torch.arange(r.numel()).view(r.shape) + 1).sum() for r in results)
    return [*results, *torch.autograd.grad(loss, (init, xs))]


@given(steps())
def test_reads_after_writes(step):
    torch._dynamo.reset()
    run = torch.compile(lambda *args: scan(*args), backend="nsa_compile", options={"nested": "eager", "cache": False})
    for ours, theirs in zip(values_and_gradients(run, step), values_and_gradients(loop, step), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.deep(but=["index1"])
@pytest.mark.parametrize("index", [0, slice(0, 1), slice(0, 2), -N])
def test_nothing_is_kept_of_what_is_read_where_it_was_written(index):
    def run(init, x):
        def step(buffer, x):
            t, new = x["t"], buffer.clone()
            new[:2] = x["x"]
            return torch.where(t == 1, new, buffer), new[index].exp()

        return scan(step, init, {"x": x, "t": torch.arange(STEPS)})

    torch._dynamo.reset()
    nsa_compile.compile(run, nested="eager", cache=False)(torch.zeros(N, D), torch.randn(STEPS, D))
    (report,) = nsa_compile.last_report().scans
    assert report.batched
    assert report.guards_kept == []

"""Sums that each begin at a step of their own, as differences of two sums: equal to their loops, and near misses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import segment_sums
from tests.strategies import few

B, S, H, D = 2, 20, 2, 4
rows = torch.arange(S)


def where_earlier(c, t, f):
    return torch.where(rows < t, c + f, 0)


def where_not_earlier(c, t, f):
    return torch.where(rows >= t, torch.zeros_like(c), f + c)


def masked(c, t, f):
    return (c + f).masked_fill(rows >= t, 0)


def reset_in_place(c, t, f):
    c = c + f
    c[..., t] = 0
    return c


def reset_by_a_row(c, t, f):
    return torch.where(rows == t, 0, c + f)


def added_from_a_step_on(c, t, f):
    return torch.where(rows < t, c + f, c)


def reset_with_a_delay(c, t, f):
    """The last five are never added to."""
    return torch.where(rows + 5 <= t, c + f, torch.zeros_like(c))


def in_another_order(c, t, f):
    """The first element is the last one that is added to."""
    return torch.where(S - 1 - rows < t, c + f, 0)


SUMS = {
    f.__name__: f
    for f in (
        where_earlier, where_not_earlier, masked, reset_in_place, reset_by_a_row, added_from_a_step_on,
        reset_with_a_delay, in_another_order,
    )
}  # fmt: skip


def both(c, t, f):
    """Two elements begin at one step."""
    return torch.where(rows // 2 < t, c + f, 0)


def twice(c, t, f):
    """Each element begins again."""
    return torch.where((rows == t) | (rows == t - 3), 0, c + f)


def to_one(c, t, f):
    return torch.where(rows < t, c + f, 1)


def scaled(c, t, f):
    return torch.where(rows < t, 0.5 * c + f, 0)


def another_for_each(c, t, f):
    return torch.where(rows < t, c + f * rows, 0)


def by_data(c, t, f):
    return torch.where((rows < t) & (f > -0.5), c + f, 0)


def until_a_step(c, t, f):
    return torch.where(rows >= t, c + f, c)


OTHERS = {f.__name__: f for f in (both, twice, to_one, scaled, another_for_each, by_data, until_a_step)}


def attention(change, first=0.0):
    """Attention with a bias that a step changes, and the exponentials of it. q, k `[B, S, H, D]`, f `[B, S, H]`."""

    def loop(q, k, f):
        def step(state, token):
            t, q, k, f = token
            bias, K = state
            bias = change(bias, t, f[:, :, None])
            K = torch.where((rows == t)[:, None], k[:, :, None], K)
            s = torch.einsum("bhd,bhsd->bhs", q, K) + bias
            y = torch.einsum("bhs,bhsd->bhd", s.masked_fill(rows > t, -math.inf).softmax(-1), K)
            return (bias, K), (y, bias.exp())

        init = q.new_full((B, H, S), first), q.new_zeros(B, H, S, D)
        _, (y, weights) = scan(step, init, (rows, *(x.transpose(0, 1) for x in (q, k, f))))
        return y, weights

    return loop


def drawn(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, S, H, D, generator=generator) for _ in range(2))
    f = -torch.rand(B, S, H, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (q, k, f)]


def outputs(run, inputs):
    values = run(*inputs)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in values]
    return [*values, *torch.autograd.grad(values, inputs, cotangents)]


def compiled(loop):
    torch._dynamo.reset()
    return nsa_compile.compile(loop, nested="eager", cache=False)


def is_rewritten():
    (found,) = nsa_compile.last_report().scans
    return "Known" in found.carries and found.batched


@pytest.mark.deep(every=5)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("first", [0.0, 0.5])
def test_sums_are_differences(name, first):
    loop, inputs = attention(SUMS[name], first), drawn(torch.float64)
    for ours, theirs in zip(outputs(compiled(loop), inputs), outputs(loop, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    # What it is before the first step is part of some sums, but not of all.
    assert is_rewritten() == (not first or name not in ("reset_in_place", "reset_by_a_row"))


@pytest.mark.deep(every=3)
@pytest.mark.parametrize("name", OTHERS)
def test_near_misses_are_left_alone(name):
    loop, inputs = attention(OTHERS[name]), drawn(torch.float64)
    for ours, theirs in zip(outputs(compiled(loop), inputs), outputs(loop, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not is_rewritten()


def test_a_sum_that_is_read_before_it_is_chosen_is_left_alone():
    def loop(q, k, f):
        def step(bias, token):
            t, f = token
            total = bias + f[:, :, None]
            return torch.where(rows < t, total, 0), total.sin()

        return scan(step, q.new_zeros(B, H, S), (rows, f.transpose(0, 1)))

    inputs = drawn(torch.float64)
    for ours, theirs in zip(compiled(loop)(*inputs), loop(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not is_rewritten()


def test_long_sums_lose_no_digits():
    """Not those of float32: the sum of all is a million times that of a few."""
    loop, inputs = attention(where_earlier), drawn(torch.float32)
    with torch.no_grad():
        inputs[2][:, : S // 2] *= 1e6
    exact = outputs(loop, [x.detach().double().requires_grad_() for x in inputs])
    eager, ours = outputs(loop, inputs), outputs(compiled(loop), inputs)
    assert is_rewritten()
    for x, y, z in zip(ours, eager, exact, strict=True):
        error, allowed = (x - z).abs().max(), (y - z).abs().max()
        assert error <= 4 * allowed + 1e-6 * z.abs().max()


@pytest.mark.deep(every=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", ["where_earlier", "reset_by_a_row", "added_from_a_step_on"])
def test_what_is_not_finite_is_in_the_sums_that_it_is_in(name, number, dtype):
    loop, inputs = attention(SUMS[name]), drawn(dtype)
    with torch.no_grad():
        inputs[2][0, 4, 0] = inputs[2][0, 5, 1] = inputs[2][1, 12] = number
    ours, theirs = outputs(compiled(loop), inputs), outputs(loop, inputs)
    assert is_rewritten()
    assert all(y.isfinite().all() for y in theirs[:2]) == (number < 0)
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
    if number < 0:  # others make each output NaN, and what has a gradient there is torch's choice
        for x, y in zip(ours[2:], theirs[2:], strict=True):
            torch.testing.assert_close(x, y, equal_nan=True)


@few(6)
@given(st.sampled_from(sorted(SUMS)), st.sampled_from([0.0, -1.5]), st.integers(0, 10**6), st.data())
def test_drawn_sums_are_their_loops(name, first, seed, data):
    """Of numbers that are drawn, some of them -inf."""
    inputs = drawn(torch.float64, seed)
    places = data.draw(st.lists(st.tuples(*(st.integers(0, n - 1) for n in (B, S, H))), max_size=6))
    with torch.no_grad():
        for place in places:
            inputs[2][place] = -math.inf
    loop = attention(SUMS[name], first)
    for ours, theirs in zip(outputs(compiled(loop), inputs), outputs(loop, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("a step early", lambda added: _last(added) - 1),
        ("a step late", lambda added: _last(added) + 1),
    ],
)
def test_a_planted_fault_is_seen(what, broken, monkeypatch):
    monkeypatch.setattr(segment_sums, "_last_reset", broken)
    loop, inputs = attention(where_earlier), drawn(torch.float64)
    ours, theirs = outputs(compiled(loop), inputs), outputs(loop, inputs)
    assert is_rewritten()
    assert not torch.allclose(ours[1], theirs[1])


_last = segment_sums._last_reset

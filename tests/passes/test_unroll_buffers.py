"""unroll_buffers: attention to rows that move is attention to a cache of all steps, in values and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import nsa_compile
from nsa_compile.analyses import unrolling
from tests.catalogue.catalogue import verdict

B, H, D = 2, 4, 8


def inputs(S, heads=H):
    torch.manual_seed(S)
    rows = (torch.randn(S, B, h, D, dtype=torch.float64) for h in (H, heads, heads))
    return [x.requires_grad_() for x in rows]


def attend(q, K, V, hidden, fill=-math.inf):
    """`q [B, H, D]`, `K, V [B, G, w, D]`, `hidden [w]`."""
    K, V = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (K, V))
    scores = torch.einsum("bhd,bhwd->bhw", q, K) * D**-0.5
    return torch.einsum("bhw,bhwd->bhd", scores.masked_fill(hidden, fill).softmax(-1), V)


def compared(function, tensors):
    """What a compiled function is, and its report; it must be the loop in values and gradients."""
    torch._dynamo.reset()
    found = []
    compiled = nsa_compile.compile(function, nested="eager", attention="sparse", cache=False)
    for run in (function, compiled):
        results = [x for x in torch.utils._pytree.tree_leaves(run(*tensors)) if x.is_floating_point()]
        torch.manual_seed(0)
        cotangents = [torch.randn_like(x) for x in results]
        gradients = torch.autograd.grad(results, tensors, cotangents, allow_unused=True)
        found.append((results, [x if x is None else x.detach() for x in gradients]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    return verdict(nsa_compile.last_report())


def by_where(slots, t, w, row, ring):
    return torch.where((slots == t % w)[:, None], row[:, :, None], ring)


def by_index_copy(slots, t, w, row, ring):
    return ring.index_copy(2, (t % w).view(1), row[:, :, None])


def by_scatter(slots, t, w, row, ring):
    return ring.scatter(2, (t % w).expand(*row.shape[:2], 1, D), row[:, :, None])


def by_cat(slots, t, w, row, ring):
    return torch.cat([ring[:, :, 1:], row[:, :, None]], 2)


def by_roll(slots, t, w, row, ring):
    return torch.where((slots == w - 1)[:, None], row[:, :, None], ring.roll(-1, 2))


def by_stack(slots, t, w, row, ring):
    return torch.stack([*ring.unbind(2)[1:], row], 2)


def by_slices(slots, t, w, row, ring):
    ring = torch.cat([ring, row[:, :, None]], 2)
    return ring[:, :, 1:]


def by_pad(slots, t, w, row, ring):
    ring = torch.nn.functional.pad(ring, (0, 0, -1, 1)).clone()
    ring[:, :, -1] = row
    return ring


def in_place(slots, t, w, row, ring):
    new = torch.empty_like(ring)
    new[:, :, :-1] = ring[:, :, 1:]
    new[:, :, -1] = row
    return new


def when_full(slots, t, w, row, ring):
    """Rows come one after another, and move when there is no more room."""
    moved = torch.where(t >= w, ring.roll(-1, 2), ring)
    return moved.index_copy(2, t.clamp(max=w - 1).view(1), row[:, :, None])


def newest_first(slots, t, w, row, ring):
    return torch.cat([row[:, :, None], ring[:, :, :-1]], 2)


#: How a row is written: the age of what each slot holds.
SPELLINGS = {
    by_where: lambda slots, t, w: (t - slots) % w,
    by_index_copy: lambda slots, t, w: (t - slots) % w,
    by_scatter: lambda slots, t, w: (t - slots) % w,
    by_cat: lambda slots, t, w: w - 1 - slots,
    by_roll: lambda slots, t, w: w - 1 - slots,
    by_stack: lambda slots, t, w: w - 1 - slots,
    by_slices: lambda slots, t, w: w - 1 - slots,
    by_pad: lambda slots, t, w: w - 1 - slots,
    in_place: lambda slots, t, w: w - 1 - slots,
    when_full: lambda slots, t, w: t.clamp(max=w - 1) - slots + (slots > t) * (t + 2 * w),
    newest_first: lambda slots, t, w: slots,
}


def windowed(put, w, *, hidden=None, before=0, fill=-math.inf, final=False, init=None, prepare=None):
    """A step that attends to the last w tokens; `hidden(age, t)` says what it does not see."""

    def run(q, k, v):
        slots = torch.arange(w)
        first = k.new_zeros(B, k.shape[2], w, D) if init is None else init(k, w)

        def step(rings, token):
            t, q, k, v = token
            new = tuple(put(slots, t, w, row, ring) for row, ring in zip((k, v), rings, strict=True))
            K, V = rings if before else new
            age = SPELLINGS[put](slots, t - before, w)
            mask = (age > t - before) if hidden is None else hidden(age, t)
            K = K if prepare is None else prepare(K, t - before - age)
            return new, attend(q, K, V, mask, fill)

        final_rings, y = nsa_compile.scan(step, (first, first * 2), (torch.arange(q.shape[0]), q, k, v))
        return (final_rings, y) if final else y

    return run


@pytest.mark.deep(but=["8-8-by_cat"])
@pytest.mark.parametrize("put", SPELLINGS)
@pytest.mark.parametrize(("S", "w"), [(24, 6), (23, 6), (5, 8), (8, 8), (9, 2)])
def test_a_window_is_reached_from_every_spelling(put, S, w):
    assert compared(windowed(put, w), inputs(S)) == "window_attention"


@pytest.mark.deep(but=["by_cat"])
@pytest.mark.parametrize("put", [by_where, by_cat])
def test_heads_that_share_keys(put):
    assert compared(windowed(put, 6), inputs(17, heads=2)) == "window_attention"


@pytest.mark.deep(but=["newest_first"])
@pytest.mark.parametrize("put", [by_index_copy, newest_first])
def test_the_lowest_number_as_floor(put):
    assert compared(windowed(put, 6, fill=torch.finfo(torch.float64).min), inputs(17)) == "window_attention"


@pytest.mark.deep(but=["by_cat"])
@pytest.mark.parametrize("put", [by_where, by_cat])
def test_a_mask_within_the_window(put):
    """Every other token, of those that are at most four back."""
    run = windowed(put, 6, hidden=lambda age, t: (age > t) | (age % 2 == 1) | (age > 4))
    assert compared(run, inputs(17)) == "scored_attention"


@pytest.mark.deep(but=["by_cat"])
@pytest.mark.parametrize("put", [by_where, by_cat])
def test_the_final_buffer_is_read(put):
    assert compared(windowed(put, 6, final=True), inputs(17)) == "window_attention"


@pytest.mark.deep(but=["by_cat"])
@pytest.mark.parametrize("put", [by_where, by_cat])
def test_rows_as_they_are_before_the_step(put):
    """The first query sees no key: a row of NaN in the loop; so it sees the first row of all, which is zeros."""
    run = windowed(put, 6, before=1, hidden=lambda age, t: (age > t - 1) & (age > 0))
    assert compared(run, inputs(17)) == "scored_attention"


def rotated(K, positions):
    """RoPE at the positions of tokens `[w]`."""
    angles = positions[:, None] / 100.0 ** (torch.arange(D // 2) / (D // 2))
    a, b = K.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def normalised(K, positions):
    return K * (K.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.deep(but=["by_cat-rotated"])
@pytest.mark.parametrize("prepare", [rotated, normalised])
@pytest.mark.parametrize("put", [by_where, by_cat])
def test_keys_prepared_in_the_buffer(put, prepare):
    assert compared(windowed(put, 6, prepare=prepare), inputs(17)) == "window_attention"


@pytest.mark.deep
@pytest.mark.parametrize("put", [by_where, by_cat])
def test_first_rows_that_a_step_sees(put):
    """Zeros that no mask hides have their share of the weights."""
    assert "copies" not in compared(windowed(put, 6, hidden=lambda age, t: age > 5), inputs(17))


@pytest.mark.deep
@pytest.mark.parametrize("put", [by_where, newest_first])
def test_first_rows_with_gradients(put):
    run = windowed(put, 4, hidden=lambda age, t: age > 3, init=lambda k, w: k[:w].permute(1, 2, 0, 3) * 3)
    assert "copies" not in compared(run, inputs(17))


def test_a_mean_over_the_window_keeps_its_copies():
    """No softmax takes out the rows that a step does not have; and rows of few tokens are few."""

    def run(q, k, v):
        def step(ring, token):
            ring = torch.cat([ring[:, :, 1:], token[:, :, None]], 2)
            return ring, ring.mean(2)

        return nsa_compile.scan(step, k.new_zeros(B, H, 3, D), k)[1]

    compared(run, inputs(9))
    assert "all rows" not in str(nsa_compile.last_report().passes)


@pytest.mark.deep
def test_attention_that_a_recurrence_needs_stays_in_its_loop():
    def run(q, k, v):
        slots = torch.arange(4)

        def step(state, token):
            ring, h = state
            t, q, k, _ = token
            ring = torch.cat([ring[:, :, 1:], (k + h)[:, :, None]], 2)
            h = torch.tanh(attend(q, ring, ring, slots < 3 - t))
            return (ring, h), h

        return nsa_compile.scan(step, (k.new_zeros(B, H, 4, D), k[0] * 0), (torch.arange(len(q)), q, k, v))[1]

    compared(run, inputs(9))
    assert "all rows" not in str(nsa_compile.last_report().passes)


@given(data=st.data())
def test_any_buffer_any_mask(data):
    """Slots in any order, read before or after they are written, under masks that may see rows of no token."""
    S, w = data.draw(st.integers(2, 12)), data.draw(st.integers(2, 6))
    put = data.draw(st.sampled_from([put for put in SPELLINGS if put is not when_full]))  # whose ages go beyond w
    before, final = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    table = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=w, max_size=w), min_size=S, max_size=S)))
    table[:, 0] = False
    note((S, w, put.__name__, before, table))

    def hidden(age, t):
        return table.index_select(0, t.view(1))[0].index_select(0, age)

    table_inside = windowed(put, w, hidden=hidden, before=before, final=final)

    def run(q, k, v):
        return table_inside(q, k, v)

    compared(run, inputs(S))


@pytest.mark.deep
def test_a_ring_off_by_one_is_seen(monkeypatch):
    """A place that is left one step late: the window has a row more."""
    of = unrolling.Axis.of

    def late(*args):
        axis = of(*args)
        return replace(axis, stop=(axis.stop + 1).clamp(max=17))

    monkeypatch.setattr(unrolling.Axis, "of", late)
    with pytest.raises(AssertionError):
        compared(windowed(by_where, 6), inputs(17))


@pytest.mark.deep
@pytest.mark.parametrize(("late", "is_taken"), [(-1, False), (1, True)])
def test_a_shift_read_at_another_step_is_seen(monkeypatch, late, is_taken):
    """Rows one step early are rows of the future, which the proof does not let pass; rows one step late are wrong."""
    find = unrolling.Unroller._find

    def moved(self, node, dim):
        columns = find(self, node, dim)
        if node not in self.buffers or node.op != "placeholder" or columns is None:
            return columns
        table = self.record.carries[self.buffers[node][0]].table
        first = -1 - numpy.arange(table.shape[1])[None].repeat(1 + late, 0)
        return (replace(columns[0], table=numpy.concatenate([first, table])[: len(table)]),)

    run = windowed(by_cat, 6, before=1, hidden=lambda age, t: (age > t - 1) & (age > 0))
    monkeypatch.setattr(unrolling.Unroller, "_find", moved)
    if is_taken:
        with pytest.raises(AssertionError):
            compared(run, inputs(17))
    else:
        compared(run, inputs(17))
    assert is_taken == ("all rows" in str(nsa_compile.last_report().passes))


@pytest.mark.deep
def test_first_rows_taken_for_hidden_are_seen(monkeypatch):
    """Rows of no token that a mask lets through must not be dropped."""

    def live(self, softmaxes):
        return torch.arange(17)[:, None] >= torch.arange(6)

    monkeypatch.setattr(unrolling.Unroller, "_live", live)
    with pytest.raises(AssertionError):
        compared(windowed(by_where, 6, hidden=lambda age, t: age > 5), inputs(17))


@pytest.mark.deep(but=["<lambda>1"])
@pytest.mark.parametrize("threshold", [lambda s: s.amax(), lambda s: s.topk(2)[0][-1], lambda s: s.softmax(-1).amax()])
def test_scores_are_not_compared_with_themselves_computed_anew(threshold):
    """Scores of all places were rounded in another way than those of the buffer, and less than their own maximum."""
    S = 9

    def run(q, k, v):
        def step(c, row):
            t, q, k, v = row
            p = torch.arange(S)
            K, V = torch.where((p == t)[:, None], k, c[0]), torch.where((p == t)[:, None], v, c[1])
            scores = torch.einsum("sd,d->s", K, q).masked_fill(p > t, -1e9)
            weights = scores.masked_fill(scores < threshold(scores), -1e9).softmax(-1)
            return (K, V), (torch.einsum("s,sd->d", weights, V), weights)

        return nsa_compile.scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (torch.arange(S), q, k, v))[1]

    torch.manual_seed(0)
    compared(run, list(torch.randn(3, S, 4, dtype=torch.double).requires_grad_().unbind()))


@pytest.mark.parametrize("cut", [lambda x: x.clamp(0, 8), lambda x: torch.maximum(x, torch.zeros_like(x))])
def test_a_known_index_of_two_sides_has_its_numbers(cut):
    """A choice between two known numbers was made under the trace, which gave no numbers to it: memory as it lay."""
    S = 9

    def run(x):
        def step(c, t):
            p = torch.arange(S)
            return c, x[cut(torch.where(p < t + 1, p, 1).remainder(3))]

        return nsa_compile.scan(step, (), torch.arange(S))[1]

    compared(run, [torch.randn(S, 4, dtype=torch.double).requires_grad_()])

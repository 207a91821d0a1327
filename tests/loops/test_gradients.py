"""Which tensors have a gradient. A write that autograd does not see leaves it to what it changes, or is declined."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.loops import LoopDeclined
from tests.loops.test_loops import D, compare

S = 6


def inputs():
    torch.manual_seed(0)
    return [torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (S, 3)]


def clamped(x, w, t, state):
    y = w * x[t]
    with torch.no_grad():
        y.clamp_min_(0.1)
    return y * x[t]


def a_row_of_it(x, w, t, state):
    y = w * x[t]
    with torch.no_grad():
        y[0] = 1
    return y.sum(0) * x[t]


def through_what_is_detached(x, w, t, state):
    y = w * x[t]
    y.detach()[1:].mul_(2)
    return y.sum(0) * x[t]


def through_its_data(x, w, t, state):
    y = w * x[t]
    y.data.clamp_min_(0.1)
    return y.sum(0) * x[t]


def seen_by_a_view(x, w, t, state):
    y = w * x[t]
    first = y[0]
    with torch.no_grad():
        y.mul_(3)
    return first * x[t]


def a_state_that_gets_its_gradient_later(x, w, t, state):
    if t == 3:
        with torch.no_grad():
            state["s"].mul_(0.5)
    state["s"] = state["s"] + x[t]
    return state["s"] * 2


def an_input(x, w, t, state):
    with torch.no_grad():
        state["w"].mul_(0.5)
    return state["w"].sum(0) + x[t]


def saved_and_written_by_data(x, w, t, state):
    state["mean"].data.copy_(state["mean"] * 0.5 + x[t].data)
    return state["mean"] * x[t]


UNSEEN = [
    clamped, a_row_of_it, through_what_is_detached, through_its_data, seen_by_a_view,
    a_state_that_gets_its_gradient_later, an_input, saved_and_written_by_data,
]  # fmt: skip


def running_mean(x, w, t, state):
    """A write to what has no gradient is none to what has one."""
    with torch.no_grad():
        state["mean"].mul_(0.9).add_(x[t] * 0.1)
    return (x[t] - state["mean"]) * w[0]


def of_data_that_nobody_saves(x, w, t, state):
    """A codebook's running statistics."""
    state["mean"].data.mul_(0.9).add_(x[t].data, alpha=0.1)
    return (x[t] - state["mean"]) * w[0]


def detached_in_place(x, w, t, state):
    """Backpropagation through one step, as many write it."""
    state["s"] = torch.tanh(state["s"].clone().detach_() + x[t])
    y = state["s"] * w[0]
    state["last"] = (x[t] * 2).detach_()
    if t == 2:
        y.detach_()
    return y


def of_a_copy(x, w, t, state):
    y = (w * x[t]).detach()
    y.clamp_min_(0.1)
    y[0].mul_(2)
    return y * x[t]


def of_a_copy_without_gradients(x, w, t, state):
    with torch.no_grad():
        y = w * x[t]
        y.clamp_min_(0.1)
        y[0] = x[t]
    return y * x[t]


def before_they_are_off(x, w, t, state):
    """What was written with gradients keeps them, though it is read first where they are off."""
    y, first = torch.zeros(3, D, dtype=x.dtype), None
    first = y[1]
    y[1] = x[t] * w[0]
    with torch.no_grad():
        n = first.sum()
    return y.sum(0) * x[t] + first * n


def similar(x, w, t, state):
    """Torch clamps the lengths where autograd is off."""
    return F.cosine_similarity(w, x[t] * 1e-9 * t, dim=-1) @ w + F.cosine_similarity(w, x[t]) @ w


def similar_once_they_are_spread(x, w, t, state):
    """One number beside a row counts as often as the row has numbers; float32 beside float64 is float64."""
    return F.cosine_similarity(w[:, :1].detach().float(), x[t][None], dim=1) @ w + x[t]


SEEN = [
    running_mean,
    of_data_that_nobody_saves,
    detached_in_place,
    of_a_copy,
    of_a_copy_without_gradients,
    before_they_are_off,
    similar,
    similar_once_they_are_spread,
]


def as_a_loop(step):
    def run(x, w):
        state = {"mean": torch.zeros(D, dtype=x.dtype), "s": torch.ones(D, dtype=x.dtype), "w": w * 1}
        out = []
        for t in range(S):
            out.append(step(x, w, t, state))
        return torch.stack(out)

    return run


@pytest.mark.deep(but=["clamped"])
@pytest.mark.parametrize("step", UNSEEN, ids=lambda f: f.__name__)
def test_what_autograd_does_not_see_is_declined(step):
    with pytest.raises(LoopDeclined, match=r"where autograd does not see it|that autograd may have saved") as declined:
        nsa_compile.loop(as_a_loop(step), nested="eager", cache=False, on_decline="error")(*inputs())
    assert "test_gradients.py:" in str(declined.value).rsplit("(", 1)[1]


@pytest.mark.deep(but=["a_state_that_gets_its_gradient_later"])
@pytest.mark.parametrize("step", UNSEEN, ids=lambda f: f.__name__)
def test_without_gradients_there_is_nothing_to_see(step):
    with torch.no_grad():
        compare(as_a_loop(step), *inputs(), batched=False, on_decline="warn")


@pytest.mark.deep(but=["before_they_are_off"])
@pytest.mark.parametrize("step", SEEN, ids=lambda f: f.__name__)
def test_other_writes_are_as_they_are_written(step, caplog):
    compare(as_a_loop(step), *inputs(), batched=False, on_decline="warn")
    assert "runs as it is written" not in caplog.text


def last_without(x, w, t, state):
    with torch.set_grad_enabled(t != S - 1):
        state["s"] = state["s"] * x[t]
    return state["s"] + x[t]


def every_other_without(x, w, t, state):
    state["mean"] = state["mean"].detach() + x[t] if t % 2 else state["mean"] * 2
    with torch.set_grad_enabled(t % 2 == 0):
        return x[t] * w[0]


def begun_without(x, w, t, state):
    """What was there before is read, and gets no gradient."""
    h = state["s"].detach() if t % 2 == 0 else state["s"]
    state["s"] = torch.tanh(h + x[t])
    return state["s"]


def truncated(x, w, t, state):
    """Backpropagation through the last steps alone."""
    with torch.set_grad_enabled(t > 2):
        state["s"] = state["s"] * 0.5 + x[t] * w[1]
    return state["s"] * w[0]


@pytest.mark.deep(but=["last_without"])
@pytest.mark.parametrize(
    "step", [last_without, every_other_without, begun_without, truncated], ids=lambda f: f.__name__
)
def test_what_is_made_without_gradients_has_none(step):
    def run(x, w):
        state = {"mean": torch.zeros(D, dtype=x.dtype), "s": w[0] * 1}
        out = []
        for t in range(S):
            out.append(step(x, w, t, state))
        return out, state

    compare(run, *inputs(), batched=False, on_decline="warn")


def detached_beside_a_view(x, w, t, state):
    y = w[0] * x[t]
    first = y[:1]
    return y.detach_() + x[t] + first


def a_state_detached_in_place(x, w, t, state):
    state["w"].detach_()
    return state["w"][0] * x[t]


def computed(x, w, t, state):
    y = w[0] * x[t]
    torch.autograd.backward(y.sum(), inputs=[w], retain_graph=True)
    return y


def hooked(x, w, t, state):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved):
        return w[0] * x[t]


@pytest.mark.deep(but=["hooked-"])
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (detached_beside_a_view, "detach_"),
        (a_state_detached_in_place, "detach_"),
        (computed, "it computes gradients; compute them after the loop"),
        (hooked, "it hooks what autograd saves"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_trace_below_autograd_does_not_see(step, reason):
    with pytest.raises(LoopDeclined, match=reason):
        nsa_compile.loop(as_a_loop(step), nested="eager", cache=False, on_decline="error")(*inputs())


def test_recomputed_steps_are_followed():
    def recomputed(x, w, t, state):
        return checkpoint(lambda row: torch.tanh(row * w[0]), x[t], use_reentrant=False)

    compare(as_a_loop(recomputed), *inputs(), batched=False)

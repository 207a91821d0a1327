"""raise_attention on attention without a softmax: what becomes `weighted_sum`, what does not, and equal to its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import weights
from nsa_compile.ir.step_values import StepMask
from tests.strategies import few

S, B, G, M, D = 9, 2, 2, 2, 4  # G heads of keys, each of which M heads of queries share

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("bgmd,bgsd->bgms", q, keys) * D**-0.5


def values(w: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bgms,bgsd->bgmd", w, v)


def over_caches(attend: Attend, length: int = S) -> Callable[..., Tensor]:
    """`attend(t, positions, q, keys, values)` of each token to the caches."""

    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(length)

        def step(caches: tuple[Tensor, ...], row: tuple[Tensor, ...]) -> Any:
            t, q, *new = row
            here = (positions == t)[:, None]
            keys, values = (torch.where(here, x[:, :, None], cache) for x, cache in zip(new, caches, strict=True))
            return (keys, values), attend(t, positions, q, keys, values)

        empty = q.new_zeros(B, G, length, D)
        return scan(step, (empty, empty), (torch.arange(length), q, k, v))[1]

    return loop


def divided(w: Tensor, v: Tensor) -> Tensor:
    return values(w / (w.sum(-1, keepdim=True) + 0.01), v)


def divided_at_last(w: Tensor, v: Tensor) -> Tensor:
    return values(w, v) / (w.sum(-1, keepdim=True) + 0.01)


# How many operators become of each.
TAKEN: dict[str, tuple[Attend, int]] = {
    "relu": (lambda t, p, q, k, v: values(scores(q, k).relu() * (p <= t), v), 1),
    "its square, by a number of the step": (
        lambda t, p, q, k, v: values(scores(q, k).masked_fill(p > t, 0.0).relu().square() / (t + 1), v), 1),
    "sigmoid of -inf": (lambda t, p, q, k, v: values(scores(q, k).masked_fill(p > t, -torch.inf).sigmoid(), v), 1),
    "silu in a window": (
        lambda t, p, q, k, v: values(F.silu(scores(q, k)).masked_fill((p > t) | (p < t - 3), 0.0), v), 1),
    "gelu": (lambda t, p, q, k, v: values(F.gelu(3 * scores(q, k)).masked_fill(p > t, 0.0), v), 1),
    "gelu by tanh": (lambda t, p, q, k, v: values(F.gelu(3 * scores(q, k), approximate="tanh") * (p <= t), v), 1),
    "leaky relu": (lambda t, p, q, k, v: values(F.leaky_relu(scores(q, k), 0.1) * (p <= t), v), 1),
    "between two numbers": (lambda t, p, q, k, v: values(F.hardtanh(scores(q, k), -0.5, 0.25) * (p <= t), v), 1),
    "tanh under where": (lambda t, p, q, k, v: values(torch.where(p <= t, scores(q, k).tanh(), 0.0), v), 1),
    "a difference of two": (
        lambda t, p, q, k, v: values((scores(q, k).relu() - scores(q.flip(-1), k).sigmoid()) * (p <= t), v), 1),
    "divided by their sum": (lambda t, p, q, k, v: divided(scores(q, k).relu() * (p <= t), v), 2),
    "divided by their sum at last": (lambda t, p, q, k, v: divided_at_last(scores(q, k).relu() * (p <= t), v), 2),
    "the keys before alone": (lambda t, p, q, k, v: values(scores(q, k).relu() * (p < t), v), 1),
    # Near to sums that run on.
    "products under a decay by a table": (
        lambda t, p, q, k, v: values(scores(q, k) * torch.where(p <= t, 0.9 ** (t - p).clamp(min=0), 0.0), v), 1),
    "products of the keys before": (lambda t, p, q, k, v: values(scores(q, k) * (p < t), v), 1),
    "products in a window": (lambda t, p, q, k, v: values(scores(q, k) * ((p <= t) & (p > t - 3)), v), 1),
    "products by a number of the step": (lambda t, p, q, k, v: values(scores(q, k) * (p <= t) / (t + 1), v), 1),
    "products by a number of the key": (lambda t, p, q, k, v: values(scores(q, k) * (p <= t) * p, v), 1),
    "products and a number": (lambda t, p, q, k, v: values((scores(q, k) + 1) * (p <= t), v), 1),
    "products filled with ones": (
        lambda t, p, q, k, v: values(scores(q, k).masked_fill(p == t, 1.0).masked_fill(p > t, 0.0), v), 1),
    "two decays": (
        lambda t, p, q, k, v: values(
            scores(q, k) * 0.9 ** (t - p).clamp(min=0) * 0.8 ** (t - p).clamp(min=0) * (p <= t), v), 1),
    "a decay from the next key on": (
        lambda t, p, q, k, v: values(scores(q, k) * 0.9 ** (t - p + 1).clamp(min=0) * (p <= t), v), 1),
    "a decay of few steps": (
        lambda t, p, q, k, v: values(scores(q, k) * 0.9 ** (t - p).clamp(0, 3) * (p <= t), v), 1),
    "a decay that stops": (
        lambda t, p, q, k, v: values(scores(q, k) * 0.9 ** (t - p).clamp(min=1) * (p <= t), v), 1),
}  # fmt: skip

GAMMA = 1 - 2.0 ** (-1 - torch.arange(G * M, dtype=torch.float64)).view(G, M, 1)
# Sums that run on from step to step, and how many of them.
RUNNING: dict[str, tuple[Attend, int]] = {
    "by a mask": (lambda t, p, q, k, v: values(scores(q, k) * (p <= t), v), 1),
    "filled": (lambda t, p, q, k, v: values(scores(q, k).masked_fill(p > t, 0.0), v), 1),
    "filled, by not seen": (lambda t, p, q, k, v: values(scores(q, k).masked_fill(~(p < t + 1), 0.0), v), 1),
    "where seen": (lambda t, p, q, k, v: values(torch.where(p <= t, scores(q, k), 0.0), v), 1),
    "where unseen": (lambda t, p, q, k, v: values(torch.where(t < p, 0.0, -scores(q, k) / 3), v), 1),
    "by a mask of numbers": (lambda t, p, q, k, v: values((p <= t).double() * scores(q, k) * 2, v), 1),
    "divided by their sum at last": (
        lambda t, p, q, k, v: divided_at_last(scores(F.elu(q) + 1, F.elu(k) + 1) * (p <= t), v), 2),
    "under a decay of each head": (
        lambda t, p, q, k, v: values(scores(q, k) * GAMMA ** (t - p).clamp(min=0) * (p <= t), v), 1),
    "under a masked decay of each head": (
        lambda t, p, q, k, v: values(scores(q, k) * torch.where(p <= t, GAMMA ** (t - p).clamp(min=0), 0.0), v), 1),
}  # fmt: skip

# What stays as it is: rows that are not written yet are read with a weight, the weights are read by others, what they
# are made of has no operator in programs, or there is no product with queries.
LEFT: dict[str, Attend] = {
    "no mask": lambda t, p, q, k, v: values(scores(q, k).relu(), v),
    "a key of the future": lambda t, p, q, k, v: values((scores(q, k) + 0.3).relu() * (p <= t + 1), v),
    "its largest weight is read as well": lambda t, p, q, k, v: (
        lambda w: values(w, v) * w.amax(-1, keepdim=True)
    )(scores(q, k).relu() * (p <= t)),
    "a sorted sum": lambda t, p, q, k, v: values((scores(q, k) * (p <= t)).cumsum(-1) * (p <= t), v),
    "a mean": lambda t, p, q, k, v: values(((p <= t) / (t + 1.0)).to(v.dtype).expand(B, G, M, S), v) * q,
}  # fmt: skip


def tensors(length: int = S, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (length, B, G, M, D), (length, B, G, D), (length, B, G, D)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def compared(attend: Attend, length: int = S, **options: Any) -> list[str]:
    """The operators that became of a step, whose values and gradients are those of the loop."""
    torch._dynamo.reset()
    loop, inputs = over_caches(attend, length), tensors(length)
    compiled = nsa_compile.compile(loop, nested="eager", attention="sparse", cache=False, **options)
    found, expected = compiled(*inputs), loop(*inputs)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, inputs, cotangent, allow_unused=True) for y in (found, expected)]
    torch.testing.assert_close((found, *gradients[0]), (expected, *gradients[1]), rtol=1e-9, atol=1e-11)
    return [choice.operator for choice in nsa_compile.last_report().attention]


@pytest.mark.deep(but=["leaky relu"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_equals_its_loop(name):
    attend, count = TAKEN[name]
    assert compared(attend) == ["weighted_sum"] * count


@pytest.mark.deep(but=["where unseen-65"])
@pytest.mark.parametrize("length", [S, 65])
@pytest.mark.parametrize("name", RUNNING)
def test_sums_that_run_on_equal_their_loop(name, length):
    attend, count = RUNNING[name]
    assert compared(attend, length) == ["running sums in chunks"] * count


def test_a_decay_that_is_learned_has_the_gradient_of_its_loop():
    logit = torch.randn(G, M, 1, dtype=torch.float64, requires_grad=True)

    def run(q, k, v):
        gamma = logit.sigmoid()
        return over_caches(lambda t, p, q, k, v: values(scores(q, k) * gamma ** (t - p).clamp(min=0) * (p <= t), v))(
            q, k, v
        )

    torch._dynamo.reset()
    inputs = tensors()
    compiled = nsa_compile.compile(run, nested="eager", attention="sparse", cache=False)
    gradients = (torch.autograd.grad(f(*inputs).square().sum(), (*inputs, logit)) for f in (compiled, run))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)
    assert [c.operator for c in nsa_compile.last_report().attention] == ["running sums in chunks"]


@pytest.mark.deep
@pytest.mark.parametrize(("length", "operator"), [(128, "weighted_sum"), (512, "running sums in chunks")])
def test_sums_run_on_where_that_costs_less(length, operator):
    torch._dynamo.reset()
    inputs = tensors(length, torch.float32)
    compiled = nsa_compile.compile(over_caches(RUNNING["filled"][0], length), nested="eager", cache=False)
    with torch.no_grad():
        compiled(*inputs)
    assert [choice.operator for choice in nsa_compile.last_report().attention] == [operator]


@pytest.mark.deep(but=["its largest weight is read as well"])
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_equals_its_loop(name):
    assert "weighted_sum" not in compared(LEFT[name])


DETACHED: dict[str, Attend] = {
    "weights": lambda t, p, q, k, v: values((scores(q, k).relu() * (p <= t)).detach(), v),
    "scores": lambda t, p, q, k, v: values(scores(q, k).detach().relu() * (p <= t), v),
    "half of the weights": lambda t, p, q, k, v: values((scores(q, k).relu() + scores(q, k).detach()) * (p <= t), v),
}


def without_gradient(t: Tensor, p: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        w = scores(q, k).relu() * (p <= t)
    return values(w, v)


@pytest.mark.deep(but=["under no_grad"])
@pytest.mark.parametrize("attend", [*DETACHED.values(), without_gradient], ids=[*DETACHED, "under no_grad"])
def test_what_has_no_gradient_in_the_loop_has_none(attend):
    """An optimizer leaves a weight alone that has none, and lets one decay that has zeros."""
    torch._dynamo.reset()
    loop, inputs = over_caches(attend), tensors()
    compiled = nsa_compile.compile(loop, nested="eager", attention="sparse", cache=False)
    found, expected = (torch.autograd.grad(f(*inputs).sum(), inputs, allow_unused=True) for f in (compiled, loop))
    assert [g is None for g in found] == [g is None for g in expected]
    assert [choice.operator for choice in nsa_compile.last_report().attention] == ["weighted_sum"]
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])


def test_dense_attention_is_one_of_torchs_operators():
    torch._dynamo.reset()
    loop, inputs = over_caches(TAKEN["divided by their sum"][0]), tensors()
    compiled = nsa_compile.compile(loop, nested="eager", attention="dense", cache=False)
    torch.testing.assert_close(compiled(*inputs), loop(*inputs))
    assert [choice.operator for choice in nsa_compile.last_report().attention] == ["dense", "dense"]


@pytest.mark.deep
def test_a_layer_with_relu_stays_two_products():
    weights = [torch.randn(D, 3 * D, dtype=torch.float64), torch.randn(3 * D, D, dtype=torch.float64)]

    def attend(t: Tensor, p: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = values(scores(q, k).masked_fill(p > t, -torch.inf).softmax(-1), v)
        return (x @ weights[0]).relu() @ weights[1]

    assert "weighted_sum" not in compared(attend)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "sigmoid": torch.sigmoid, "silu": F.silu, "tanh": torch.tanh, "square": torch.square,
    "half": lambda s: s / 2,
}  # fmt: skip
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "times": lambda w, p, t: w * (p <= t),
    "masked_fill": lambda w, p, t: w.masked_fill(p > t, 0.0),
    "where": lambda w, p, t: torch.where(p <= t, w, 0.0),
    "a window": lambda w, p, t: w.masked_fill((p > t) | (p <= t - 4), 0.0),
    "every second": lambda w, p, t: w * ((p <= t) & ((t - p) % 2 == 0)),
    "one too many": lambda w, p, t: w * (p <= t + 1),  # a near miss: the step reads a row that is not written
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as they are": values, "divided": divided, "divided at last": divided_at_last,
}  # fmt: skip


@few(10)
@given(
    form=st.sampled_from(list(FORMS)), mask=st.sampled_from(list(MASKS)), sums=st.sampled_from(list(SUMS)),
    bias=st.sampled_from([0.0, 0.5]), length=st.sampled_from([2, 5, 9]),
)  # fmt: skip
def test_drawn_attention_equals_its_loop(form, mask, sums, bias, length):
    if form in ("tanh", "half", "silu") and sums != "as they are":
        form = "sigmoid"  # a sum of weights of both signs may be zero

    def attend(t: Tensor, p: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SUMS[sums](MASKS[mask](FORMS[form](scores(q, k) + bias), p, t), v)

    compared(attend, length)


@pytest.mark.deep
def test_a_tile_that_is_left_out_too_long_is_seen(monkeypatch):
    """The planted fault: weights are taken for zero a tile of queries longer than they are."""
    original = weights._not_zero

    def late(*given: Any) -> Any:
        mask = original(*given)
        start = mask.known.start
        return replace(mask, known=StepMask.inside(start + 64, mask.known.stop, mask.known.length))

    attend = TAKEN["relu"][0]
    compared(attend, 70)
    monkeypatch.setattr(weights, "_not_zero", late)
    with pytest.raises(AssertionError):
        compared(attend, 70)

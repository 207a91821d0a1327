"""Programs that write in place, draw random numbers, keep state and return views: compiled, they leave behind what they
leave behind in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import scan

LOWEST = torch.finfo(torch.float64).min
PROGRAMS: dict[str, tuple[Callable, str]] = {}


def program(verdict: str) -> Callable:
    """Register a function of `x [6, 3]` and a buffer `state [3]` with what becomes of it: `batched`, `looped`, or
    `left alone`."""

    def add(function: Callable) -> Callable:
        PROGRAMS[function.__name__] = function, verdict
        return function

    return add


def attend(x: Tensor, slots: Tensor | None = None) -> Any:
    """Causal attention of `x [S, D]` over a cache; `slots [S]` say where each row is written."""
    positions = torch.arange(x.shape[0])

    def step(cache, row):
        t, slot, x = row
        cache = torch.where((positions == slot)[:, None], x, cache)
        scores = (cache @ x).masked_fill(positions > t, LOWEST)
        return cache, scores.softmax(-1) @ cache

    steps = torch.arange(x.shape[0])
    return scan(step, torch.zeros_like(x), (steps, steps if slots is None else slots, x))


def average(x: Tensor) -> Any:
    """A recurrence that is not linear."""

    def step(c, row):
        c = (0.9 * c + 0.1 * row).sin()
        return c, c * 2

    return scan(step, x.new_zeros(x.shape[1:]), x)


# ---------------------------------------------------------------------------------- writes before, after and to inputs


@program("batched")
def multiplied_in_place(x, state):
    h = x * 2
    h.mul_(3)
    return attend(h)


@program("batched")
def masked_in_place(x, state):
    h = x * 2
    h.masked_fill_(h > 0, 0.5)
    return attend(h)


@program("batched")
def zeroed_slice(x, state):
    h = x.clone()
    h[:2].zero_()
    return attend(h)


@program("batched")
def copied_into(x, state):
    h = torch.zeros_like(x)
    h.copy_(x)
    return attend(h)


@program("batched")
def row_copied_into_every_row(x, state):
    h = torch.zeros_like(x)
    h.copy_(x[0])
    return attend(h + x)


@program("batched")
def indices_added(x, state):
    h = x.clone()
    h.index_add_(0, torch.tensor([0, 1]), x[:2])
    return attend(h)


@program("batched")
def written_through_two_views(x, state):
    h = x.clone()
    v = h.t()[1:]
    v[0].mul_(2)
    before = v.clone()
    h.view(-1)[::2].add_(1)
    return attend(h), v, before


@program("batched")
def clamped_after(x, state):
    cache, y = attend(x)
    y.clamp_(min=0)
    return cache, y


@program("batched")
def relu_in_place_after(x, state):
    cache, y = attend(x)
    z = y * 1
    z.relu_()
    return cache, F.relu(y, inplace=True), z


@program("batched")
def out_argument(x, state):
    cache, y = attend(x.detach())
    torch.mul(y, 2, out=y)
    return cache, y


@program("batched")
def written_after_it_was_read(x, state):
    h = x * 1
    results = attend(h + 1)
    h.add_(1)
    return results, h


@program("looped")
def loop_results_written(x, state):
    c, y = average(x)
    y.mul_(2)
    c.add_(1)
    return c, y


@program("batched")
def rows_without_gradient_given_one(x, state):
    """Rows of a carry that no gradient reaches; what is put into them has one."""
    _, y = nsa_compile.scan(lambda c, row: (c, c + 0 * row.detach()), torch.zeros_like(x[0]), x)
    y.copy_(x * 2)
    return y


@program("batched")
def state_written(x, state):
    state.add_(1)
    _, y = attend(x * state.clone())
    state.mul_(2)
    return y


@program("batched")
def state_written_under_no_grad(x, state):
    with torch.no_grad():
        state.mul_(0.9).add_(x.mean(0))
    return attend(x - state)


@program("batched")
def view_of_written_state(x, state):
    state.add_(1)
    _, y = attend(x)
    state[1:].mul_(2)
    return y, state[1:], state.view(3, 1)


@program("batched")
def lerp_of_state(x, state):
    with torch.no_grad():
        state.lerp_(x.mean(0), 0.5)
    return attend(x), state


@program("left alone")
def gradient_written_behind_its_back(x, state):
    h = x * 2
    with torch.no_grad():
        h.mul_(3)
    return attend(h)


@program("left alone")
def detached_alias_written(x, state):
    h = x * 2
    h.detach().mul_(3)
    return attend(h)


@program("looped")
def checkpointed_loop(x, state):
    return checkpoint(average, x, use_reentrant=False)


@program("left alone")
def checkpointed_and_written(x, state):
    state.add_(1)
    return checkpoint(attend, x, use_reentrant=False)


# ---------------------------------------------------------------------------------------- known values and their writes


@program("batched")
def slots_set(x, state):
    slots = torch.arange(len(x))
    slots[3:] = slots[3:].flip(0)
    return attend(x, slots)


@program("batched")
def slots_wrapped(x, state):
    slots = torch.arange(len(x))
    slots.remainder_(4)
    return attend(x, slots)


@program("batched")
def slots_filled(x, state):
    slots = torch.arange(len(x))
    slots.fill_(0)
    return attend(x, slots)


@program("batched")
def slots_zeroed_through_a_view(x, state):
    slots = torch.arange(len(x))
    slots.view(-1)[::2].zero_()
    return attend(x, slots)


@program("batched")
def counter_started_in_place(x, state):
    positions = torch.arange(len(x) + 2)
    start = torch.zeros((), dtype=torch.int64)
    start.add_(2)

    def step(carry, row):
        t, cache = carry
        cache = torch.where((positions == t)[:, None], row, cache)
        scores = (cache @ row).masked_fill(positions > t, LOWEST)
        return (t + 1, cache), scores.softmax(-1) @ cache

    return scan(step, (start, x.new_zeros(len(x) + 2, 3)), x)


@program("batched")
def triangle_in_place(x, state):
    future = torch.ones(len(x), len(x))
    future.triu_(1)
    positions = torch.arange(len(x))

    def step(cache, row):
        hidden, t, x = row
        cache = torch.where((positions == t)[:, None], x, cache)
        return cache, (cache @ x).masked_fill(hidden > 0, LOWEST).softmax(-1) @ cache

    return scan(step, torch.zeros_like(x), (future, positions, x))


# ------------------------------------------------------------------------------------------------------- random numbers


def drawn(draw: Callable[[int], Tensor]) -> Callable:
    """Rows are written where chance has it."""
    return lambda x, state: attend(x, draw(len(x)))


PROGRAMS |= {
    "bernoulli": (drawn(lambda n: torch.bernoulli(torch.full((n,), 0.5)).long()), "batched"),
    "multinomial": (drawn(lambda n: torch.multinomial(torch.ones(n), n)), "batched"),
    "poisson": (drawn(lambda n: torch.poisson(torch.ones(n)).long().clamp(max=n - 1)), "batched"),
    "normal": (drawn(lambda n: torch.normal(torch.zeros(n), 1.0).long().clamp(0, n - 1)), "batched"),
    "randint": (drawn(lambda n: torch.randint(n, (n,))), "batched"),
    "randperm": (drawn(torch.randperm), "batched"),
    "drawn_in_place": (drawn(lambda n: torch.zeros(n).bernoulli_(0.5).long()), "batched"),
}


@program("batched")
def random_number_nobody_reads(x, state):
    torch.rand(5)
    return attend(x + torch.rand(()))


@program("looped")
def dropout_in_the_step(x, state):
    def step(c, row):
        c = 0.9 * c + F.dropout(row, 0.5)
        return c, c * 2

    return scan(step, x.new_zeros(3), x)


# ---------------------------------------------------------------------------------------------------------------- loops


@program("batched")
def running_arg_max(x, state):
    def step(carry, row):
        best, at = carry
        t, x = row
        value = x.sum()
        return (torch.maximum(best, value), torch.where(value > best, t, at)), at

    return scan(step, (x.new_full((), -1e9), torch.tensor(-1)), (torch.arange(len(x)), x))


@program("batched")
def integers_and_booleans(x, state):
    def step(carry, row):
        last, count, seen = carry
        positive = row.sum() > 0
        last = torch.where(positive, count, last)
        return (last, count + 1, seen | positive), (last, seen)

    start = (torch.tensor(-1, dtype=torch.int32), torch.tensor(-3, dtype=torch.int32), torch.tensor(False))
    return scan(step, start, x)


@program("batched")
def countdown(x, state):
    return scan(lambda c, row: (c - 1, (row * c, c)), torch.tensor(3, dtype=torch.int8), x)


@program("batched")
def token_before(x, state):
    return scan(lambda c, row: (row[0], (c, row[1] * c)), torch.tensor(-1), (torch.arange(len(x)) * 3, x))


@program("looped")
def loop_in_a_loop(x, state):
    def outer(c, row):
        d, ys = scan(lambda d, value: (d * 0.5 + value, d * value), c.sum(), row)
        return c + ys.sum(), (d, ys)

    return scan(outer, x.new_zeros(3), x)


@program("looped")
def checkpoint_in_the_step(x, state):
    def step(c, row):
        c = checkpoint(lambda c, row: torch.tanh(c * row) + row, c, row, use_reentrant=False)
        return c, c

    return scan(step, x.new_zeros(3), x)


@program("looped")
def vmap_in_the_step(x, state):
    def step(c, row):
        return 0.5 * c + torch.vmap(lambda a: a * 2)(row).sum(), row

    return scan(step, x.new_zeros(()), x)


@program("batched")
def autocast_in_the_step(x, state):
    def step(c, row):
        with torch.autocast("cpu", torch.bfloat16):
            z = (row[None] @ row[:, None]).float()
        return 0.5 * c + z.sum(), z

    return scan(step, torch.zeros(()), x.float())


@program("looped")
def no_grad_in_the_step(x, state):
    def step(c, row):
        with torch.no_grad():
            largest = torch.maximum(c, row.max())
        return largest, row / (1 + largest)

    return scan(step, x.new_zeros(()), x)


@program("looped")
def parameter_of_the_step_alone(x, state):
    w = x.t() @ x

    def step(c, row):
        c = torch.tanh(c @ torch.tanh(w) + row)
        return c, c @ w

    return scan(step, x.new_zeros(3), x)


@program("batched")
def no_carry(x, state):
    return scan(lambda c, row: (c, row * 2), None, x)


@program("batched")
def inputs_handed_on(x, state):
    return scan(lambda c, row: (c, row), x.new_zeros(()), x)


@program("batched")
def a_literal(x, state):
    return scan(lambda c, row: (c, row * torch.tensor([1.0, 2.0, 3.0])), x.new_zeros(()), x)


@program("batched")
def tied(x, state):
    table = x * 2
    return attend(table)[1] @ table.T


@program("batched")
def views_of_inputs(x, state):
    return attend(x)[1], x[1:], x.view(-1)


# ------------------------------------------------------------------------------------------------------------ the judge


def tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def left_behind(function: Callable) -> list[tuple[str, Any]]:
    """All that two calls leave behind: results, which of them share memory, gradients, state, random numbers."""
    torch.manual_seed(1)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(3, dtype=torch.float64)
    found: list[tuple[str, Any]] = []
    for _ in range(2):
        results = tensors(function(x, state))
        differentiable = [r for r in results if r.requires_grad]
        weights = [torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view(r.shape) for r in differentiable]
        loss = sum((r * w).sum().double() for r, w in zip(differentiable, weights, strict=True))
        (gradient,) = torch.autograd.grad(loss, x, allow_unused=True) if differentiable else (None,)
        everything = [x, state, *results]
        found += [(f"result {i}", r.detach().clone()) for i, r in enumerate(results)]
        found += [("with gradient", [r.requires_grad for r in results])]
        found += [("memory", [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in everything]
                              for a in everything])]  # fmt: skip
        found += [("gradient", gradient), ("x", x.detach().clone()), ("state", state.clone())]
    return [*found, ("generator", torch.get_rng_state())]


def check(name: str, nested: str) -> None:
    function, verdict = PROGRAMS[name]
    torch._dynamo.reset()
    expected = left_behind(function)
    actual = left_behind(nsa_compile.compile(function, nested=nested, cache=False))
    for (what, e), (_, a) in zip(expected, actual, strict=True):
        if isinstance(e, Tensor):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11, msg=lambda m, what=what: f"{what}: {m}")
        else:
            assert a == e, what
    report = nsa_compile.last_report()
    if report.left_alone:
        assert verdict == "left alone", report.left_alone
    else:
        assert verdict == ("batched" if all(s.batched for s in report.scans) else "looped")


@pytest.mark.deep(
    every=8, but=["rows_without_gradient_given_one", "checkpoint_in_the_step", "no_carry", "inputs_handed_on"]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_leaves_behind_what_eager_mode_does(name):
    check(name, "eager")


@pytest.mark.deep(but=["a_literal"])
@pytest.mark.parametrize(
    "name",
    ["state_written", "view_of_written_state", "loop_results_written", "gradient_written_behind_its_back",
     "running_arg_max", "loop_in_a_loop", "checkpointed_loop", "a_literal", "parameter_of_the_step_alone"],
)  # fmt: skip
def test_so_it_does_through_aot_autograd(name):
    check(name, "aot_eager")


def test_buffers_of_modules_are_updated():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls.add_(1)
            return attend(self.norm(x))[1] * self.calls

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        function = nsa_compile.compile(model, nested="aot_eager", cache=False) if compiled else model
        x = torch.randn(6, 3, dtype=torch.float64)
        results = [function(x), function(x)]
        results[1].square().sum().backward()
        return [*results, *model.state_dict().values(), *(p.grad for p in model.parameters())]

    torch._dynamo.reset()
    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-11)
    assert nsa_compile.last_report().scans[0].batched


@pytest.mark.deep
def test_a_graph_left_alone_is_said_to_be(caplog):
    torch._dynamo.reset()
    function, _ = PROGRAMS["gradient_written_behind_its_back"]
    x, state = torch.ones(6, 3, dtype=torch.float64, requires_grad=True), torch.zeros(3)
    nsa_compile.compile(function, nested="eager", cache=False)(x, state)
    (line,) = [r.getMessage() for r in caplog.records if "left as it is" in r.getMessage()]
    assert "\n" not in line
    assert "test_functional.py" in line
    torch._dynamo.reset()
    with pytest.raises(Exception, match="stays a loop"):
        nsa_compile.compile(function, nested="eager", cache=False, on_decline="error")(x, state)

"""Carries that are computed from their own earlier values: in parallel where they are linear in them, in whatever
spelling, and otherwise a loop over the part of the step that they need. Each is compared with its loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, note
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import affine, at_each_step, in_chunks, terms
from nsa_compile.ops.recurrence import chunks
from nsa_compile.passes import batch_prefill
from nsa_compile.passes.report import ScanReport
from tests.strategies import few

B, H, K, V, S = 2, 2, 12, 8, 20
SUM, MAXIMUM, MINIMUM, LOG_SUM_EXP = (f"a running {what}" for what in ("sum", "maximum", "minimum", "log-sum-exp"))
CHUNKS, SOLVED = "products in chunks", "products in chunks, each solved as a triangular system"
LOOP = "loop"
TWO = "a running sum of 2 carries together"


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a few tokens shall have several chunks."""
    monkeypatch.setattr(chunks, "CHUNK", 8)
    torch._dynamo.reset()


def rows(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng, dtype=torch.float64)


# Weights of steps, made once: nothing is drawn while a program is compiled.
OF_HEADS, OF_ROWS, OF_COLUMNS = rows(H), rows(H, K), rows(V)
ELEMENTS, KEYS_TO_KEYS, VALUES_TO_VALUES = rows(V, K), rows(K, K), rows(V, V)


def tokens(steps: int = S) -> dict[str, Tensor]:
    """q, k, v and gates of each token, `[S, B, H, ...]`, and a first state."""
    return {
        "q": rows(steps, B, H, K),
        "k": F.normalize(rows(steps, B, H, K).flip(0), dim=-1),
        "v": rows(steps, B, H, V),
        "g": rows(steps, B, H),
        "gk": rows(steps, B, H, K).roll(1, -1),
        "beta": rows(steps, B, H).roll(1, 0).sigmoid(),
        "first": rows(B, H, K, V),
    }


def compared(run: Callable, inputs: dict[str, Tensor], nested: str = "eager", tolerance: float = 1e-9) -> ScanReport:
    """Compile `run(**inputs)`, compare values and gradients with the loop, and return what is said of the scan."""
    found = []
    for function in (run, nsa_compile.compile(run, nested=nested, cache=False)):
        leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
        outputs = pytree.tree_leaves(function(**leaves))
        loss = sum((y * rows(*y.shape).to(y.dtype)).sum() for y in outputs if y.requires_grad)
        wanted = [x for x in leaves.values() if x.requires_grad]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True)]
        found.append([y.detach() for y in outputs] + gradients)
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
    (report,) = nsa_compile.last_report().scans
    return report


def forms(report: ScanReport) -> list[str]:
    return [r.form for r in report.recurrences]


# ---------------------------------------------------------------------------------------------------- linear spellings

SPELLINGS: dict[str, tuple[Callable, list[str]]] = {}


def spelled(*expected: str) -> Callable:
    """A program of `tokens()`, and the forms of its recurrences."""

    def register(run: Callable) -> Callable:
        SPELLINGS[run.__name__] = run, list(expected)
        return run

    return register


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def read(q: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", q, state)


def whole(x: Tensor) -> Tensor:
    """Whole numbers, many of them equal, with the gradient of x."""
    return x.round().detach() + (x - x.detach())


def over(step: Callable, *names: str) -> Callable:
    """A program that scans a step over some of the inputs, from the first state."""
    return lambda first, **inputs: scan(step, first, tuple(inputs[name] for name in names))


@spelled(CHUNKS)
def by_broadcasting(first, **x):
    def step(state, row):
        q, k, v = row
        state = state + k[..., :, None] * v[..., None, :]
        return state, (q[..., None] * state).sum(-2)

    return over(step, "q", "k", "v")(first, **x)


@spelled(CHUNKS)
def by_einsum(first, **x):
    def step(state, row):
        q, k, v = row
        state = state + torch.einsum("bhk,bhv->bhkv", k, v)
        return state, torch.einsum("bhk,bhkv->bhv", q, state)

    return over(step, "q", "k", "v")(first, **x)


@spelled(CHUNKS)
def by_matmul(first, **x):
    def step(state, row):
        q, k, v = row
        state = state + k.unsqueeze(-1) @ v.unsqueeze(-2)
        return state, (q.unsqueeze(-2) @ state).squeeze(-2)

    return over(step, "q", "k", "v")(first, **x)


@spelled(CHUNKS)
def heads_in_the_batch(first, q, k, v, **_):
    def step(state, row):
        q, k, v = row
        state = torch.baddbmm(state, k.unsqueeze(2), v.unsqueeze(1))
        return state, torch.bmm(q.unsqueeze(1), state).squeeze(1)

    return scan(step, first.flatten(0, 1), tuple(x.flatten(1, 2) for x in (q, k, v)))


@spelled(CHUNKS)
def without_a_batch(first, q, k, v, **_):
    def step(state, row):
        q, k, v = row
        state = 0.9 * state + k[:, :, None] * v[:, None, :]
        return state, (q[:, :, None] * state).sum(1)

    return scan(step, first[0], (q[:, 0], k[:, 0], v[:, 0]))


@spelled(CHUNKS, SUM)
def with_a_normaliser(first, q, k, v, **_):
    def step(carry, row):
        state, total = carry
        q, k, v = row
        state, total = state + outer(k, v), total + k
        return (state, total), read(q, state) / (q * total).sum(-1, keepdim=True)

    return scan(step, (first, torch.zeros_like(k[0])), (q.exp(), k.exp(), v))


@spelled(CHUNKS)
def a_decay_for_each_head(first, **x):
    decay = 1 - 2.0 ** (-1 - torch.arange(H, dtype=torch.float64))

    def step(state, row):
        q, k, v = row
        state = decay[None, :, None, None] * state + outer(k, v)
        return state, read(q * K**-0.5, state)

    return over(step, "q", "k", "v")(first, **x)


@spelled(CHUNKS)
def a_decay_of_data(first, **x):
    def step(state, row):
        q, k, v, g = row
        state = state * torch.exp(-F.softplus(g))[..., None, None] + outer(k, v)
        return state, read(q, state)

    return over(step, "q", "k", "v", "g")(first, **x)


@spelled(CHUNKS)
def keys_and_queries_for_all_heads(first, q, k, v, g, **_):
    rates, skipped = -OF_HEADS.exp(), OF_HEADS

    def step(state, row):
        key, query, x, g = row
        t = F.softplus(g)
        brought = torch.einsum("bh,bn,bhp->bhpn", t, key, x)
        state = state * torch.exp(t * rates)[:, :, None, None] + brought
        return state, torch.einsum("bhpn,bn->bhp", state, query) + skipped[None, :, None] * x

    return scan(step, first.mT, (k[:, :, 0], q[:, :, 0], v, g))


@spelled(CHUNKS)
def a_decay_for_each_row(first, **x):
    def step(state, row):
        q, k, v, g = row
        state = state * torch.exp(F.logsigmoid(g))[..., None] + outer(k, v)
        return state, (q.unsqueeze(-1) * state).sum(-2)

    return over(step, "q", "k", "v", "gk")(first, **x)


@spelled(CHUNKS)
def a_bonus_for_the_token_itself(first, **x):
    bonus = OF_ROWS

    def step(state, row):
        q, k, v, g = row
        brought = outer(k, v)
        out = (q[..., None] * (state + bonus[..., None] * brought)).sum(-2)
        return state * g.sigmoid()[..., None] + brought, out

    return over(step, "q", "k", "v", "gk")(first, **x)


@spelled(CHUNKS)
def updates_every_third_step(first, **x):
    def step(state, row):
        t, q, k, v = row
        state = torch.where(t % 3 == 0, 0.9 * state + outer(k, v), state)
        return state, read(q, state)

    return over(step, "t", "q", "k", "v")(first, t=torch.arange(S), **x)


@spelled(CHUNKS)
def begins_anew(first, **x):
    def step(state, row):
        t, q, k, v = row
        state = torch.where(t % 7 == 0, torch.zeros_like(state), state) + outer(k, v)
        return state, read(q, state)

    return over(step, "t", "q", "k", "v")(first, t=torch.arange(S), **x)


@spelled(CHUNKS)
def begins_anew_by_data(first, **x):
    def step(state, row):
        q, k, v, g = row
        state = state.masked_fill((g > 1)[..., None, None], 0.0) + outer(k, v)
        return state, read(q, state)

    return over(step, "q", "k", "v", "g")(first, **x)


@spelled(CHUNKS)
def several_queries_of_a_state(first, q, k, v, **_):
    def step(state, row):
        q, k, v = row
        state = state + outer(k, v)
        return state, q @ state

    return scan(step, first, (torch.stack([q, q.flip(0), q * 2], -2), k, v))


@spelled(CHUNKS)
def read_before_it_is_written(first, **x):
    def step(state, row):
        q, k, v = row
        out = read(q, state)
        return state * 0.9 + outer(k, v), out

    return over(step, "q", "k", "v")(first, **x)


@spelled(CHUNKS)
def read_twice(first, **x):
    def step(state, row):
        q, k, v = row
        before = read(q, state)
        state = state + outer(k, v)
        return state, (before, read(k, state).tanh())

    return over(step, "q", "k", "v")(first, **x)


@spelled(SOLVED)
def delta_rule(first, **x):
    def step(state, row):
        q, k, v, beta = row
        new = beta[..., None] * (v - (k[..., None] * state).sum(-2))
        state = state + k[..., None] * new[..., None, :]
        return state, (q[..., None] * state).sum(-2)

    return over(step, "q", "k", "v", "beta")(first, **x)


@spelled(SOLVED)
def delta_rule_with_a_decay(first, **x):
    def step(state, row):
        q, k, v, beta, g = row
        state = state * g.sigmoid()[..., None, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k * beta[..., None], v - read(k, state))
        return state, read(q, state)

    return over(step, "q", "k", "v", "beta", "g")(first, **x)


@spelled(SOLVED)
def delta_rule_with_a_decay_for_each_row(first, **x):
    def step(state, row):
        q, k, v, beta, g = row
        state = state * g.sigmoid()[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", beta[..., None] * k, v - (k[..., None] * state).sum(-2))
        return state, read(q, state)

    return over(step, "q", "k", "v", "beta", "gk")(first, **x)


@spelled(SOLVED)
def delta_rule_by_a_matrix(first, **x):
    eye = torch.eye(K, dtype=torch.float64)

    def step(state, row):
        q, k, v, beta = row
        beta = beta[..., None, None]
        state = (eye - beta * k[..., :, None] * k[..., None, :]) @ state + beta * k[..., :, None] * v[..., None, :]
        return state, read(q, state)

    return over(step, "q", "k", "v", "beta")(first, **x)


@spelled(SOLVED)
def delta_rule_of_a_transposed_state(first, **x):
    def step(state, row):
        q, k, v, beta = row
        held = (state @ k[..., None]).squeeze(-1)
        state = state - torch.einsum("bhv,bhk->bhvk", beta[..., None] * held, k)
        state = state + torch.einsum("bhv,bhk->bhvk", beta[..., None] * v, k)
        return state, (state @ q[..., None]).squeeze(-1)

    return over(step, "q", "k", "v", "beta")(first.mT, **x)


@spelled(SOLVED)
def what_is_read_is_added_elsewhere(first, **x):
    """`S (diag(w) + a bᵀ) + v kᵀ`, as RWKV-7 has it."""

    def step(state, row):
        q, k, v, g = row
        a, b = F.normalize(q, dim=-1), F.normalize(k + 1, dim=-1) * g.sigmoid()[..., None]
        held = (state * a[..., None, :]).sum(-1)
        state = state * g.sigmoid()[..., None, None] + outer(held, b) + outer(v, k)
        return state, (state @ q[..., None]).squeeze(-1)

    return over(step, "q", "k", "v", "g")(first.mT, **x)


@spelled(SOLVED)
def a_matrix_of_a_diagonal_and_a_product(first, **x):
    def step(state, row):
        q, k, v, g = row
        a, b = F.normalize(q, dim=-1), F.normalize(k + 1, dim=-1)
        state = (torch.diag_embed(g.sigmoid()) - outer(b, a)) @ state + outer(k, v)
        return state, read(q, state)

    return over(step, "q", "k", "v", "gk")(first, **x)


@spelled(CHUNKS)
def a_decay_by_a_diagonal_matrix(first, **x):
    def step(state, row):
        q, k, v, g = row
        state = torch.diag_embed(g.sigmoid()) @ state + outer(k, v)
        return state, read(q, state)

    return over(step, "q", "k", "v", "gk")(first, **x)


@spelled(CHUNKS)
def a_decay_beside_an_identity(first, **x):
    eye = torch.eye(K, dtype=torch.float64)

    def step(state, row):
        q, k, v, g = row
        state = torch.einsum("bhij,bhjv->bhiv", eye * g.sigmoid()[..., None], state) + outer(k, v)
        return state, read(q, state)

    return over(step, "q", "k", "v", "gk")(first, **x)


@spelled(SUM)
def read_by_more_than_products(first, **x):
    def step(state, row):
        q, k, v = row
        state = state + outer(k, v)
        return state, read(q, state.tanh())

    return over(step, "q", "k", "v")(first, **x)


@spelled(SUM)
def exponential_average(v, **_):
    return scan(lambda c, row: (c := torch.lerp(c, row, 0.1), c), v[0], v)


@spelled(SUM)
def average_of_what_is_missing(v, g, **_):
    """The number 1 is the same along all dimensions, and so is what is a product with it along some."""

    def step(c, row):
        x, g = row
        c = 1 - torch.sigmoid(g)[..., None] * (1 - c) * x
        return c, c * x

    return scan(step, v[0], (v, g))[1]


@spelled(SUM)
def divided_and_added(v, **_):
    return scan(lambda c, row: (c := torch.addcdiv(row, c, 1 + row * row, value=0.5), c), v[0], v)


@spelled(SUM)
def mean_so_far(v, **_):
    def step(mean, row):
        t, x = row
        mean = mean + (x - mean) / (t + 1)
        return mean, mean

    return scan(step, torch.zeros_like(v[0]), (torch.arange(S), v))


@spelled(TWO)
def two_states_that_read_each_other(v, **_):
    def step(carry, row):
        a, b = carry
        return (0.5 * a - 0.1 * b + row.tanh(), 0.5 * b + 0.1 * a), a.exp()

    return scan(step, (v[0], v[1]), v)


@spelled(TWO)
def a_rotation(v, **_):
    """Read before and after, and the last one, too."""
    radius, angle = OF_COLUMNS.sigmoid(), OF_COLUMNS.cos()
    a, b = radius * angle.cos(), radius * angle.sin()

    def step(state, row):
        re, im = state
        new = a * re - b * im + row, a * im + b * re
        return new, (new[0] * im, new[1].tanh())

    return scan(step, (v[0], v[-1]), v)


@spelled(TWO)
def a_rotation_by_data(v, q, g, **_):
    def step(state, row):
        (re, im), (x, g) = state, row
        a, b = (f(g)[..., None] * 0.9 for f in (torch.cos, torch.sin))
        return (re * a - im * b + x, im * a + re * b - 2 * x), torch.hypot(re, im + 3)

    return scan(step, (v[0], v[1]), (v, g))


@spelled(TWO)
def a_rotation_the_other_way(v, **_):
    def step(state, row):
        re, im = state
        return (0.8 * re + 0.3 * im + row, 0.8 * im - 0.3 * re), (re, im)

    return scan(step, (v[0], v[1]), v)


@spelled(TWO)
def no_rotation(v, **_):
    """Both turn the same way."""

    def step(state, row):
        re, im = state
        return (0.5 * re + 0.3 * im + row, 0.5 * im + 0.3 * re), (re, im)

    return scan(step, (v[0], v[1]), v)


@spelled(TWO)
def level_and_trend(v, g, **_):
    """Holt's smoothing; a gate of the token says how much of it counts, and some tokens not at all."""

    def step(state, row):
        (level, trend), (x, g) = state, row
        share = torch.where(g > -0.5, g.sigmoid(), 0.0)[..., None]
        new = share * x + (1 - share) * (level + trend)
        trend = 0.2 * (new - level) + 0.8 * trend
        return (new, trend), new + trend.tanh()

    return scan(step, (v[0], torch.zeros_like(v[0])), (v, g))


@spelled(TWO)
def the_two_values_before(v, **_):
    """An autoregression of second order: one carry is the other, a step ago."""

    def step(state, row):
        last, before = state
        new = 0.6 * last - 0.3 * before + row
        return (new, last), new * before

    return scan(step, (v[0], torch.zeros_like(v[0])), v)


@spelled("a running sum of 3 carries together")
def three_states(v, **_):
    def step(state, row):
        a, b, c = state
        return (0.5 * a + 0.1 * c + row, b - 0.2 * a, 0.3 * c - OF_COLUMNS * b), a + b.tanh() - c

    return scan(step, (v[0], v[-1], v[0]), v)


@spelled(MAXIMUM)
def maximum_so_far(v, **_):
    def step(best, row):
        best = torch.maximum(best, row)
        return best, best * 2

    return scan(step, torch.full_like(v[0], -torch.inf), whole(v))


@spelled(MAXIMUM, MINIMUM)
def extremes_by_comparison(v, g, **_):
    """Of equal numbers the maximum keeps the old one, and the minimum takes the new one: so do gradients."""

    def step(carry, row):
        high, low = carry
        high, low = torch.where(row > high, row, high), torch.where(low < row, low, row)
        return (high, low), high * 2 - low * row

    x = whole(v + g[..., None])
    return scan(step, (x[0], x[0] * 0.5), x)


@spelled(MAXIMUM, MINIMUM, MAXIMUM)
def extremes_of_pages(v, k, g, **_):
    """A step changes its own page, or those that a condition names."""
    pages = torch.arange(4)

    def step(carry, row):
        high, low, seen = carry
        t, x, g = row
        here = (pages == t // 5)[:, None]
        high = torch.where(here, torch.maximum(high, x[:, :, None]), high)
        low = torch.where(here & (g > 0)[..., None, None], torch.minimum(x[:, :, None], low), low)
        seen = torch.where(g[..., None] > 0, seen, torch.where(x >= seen, x, seen))
        return (high, low, seen), (high - low).tanh().sum(2) * seen

    bounds = torch.full((B, H, 4, V), 1e4, dtype=torch.float64)
    return scan(step, (-bounds, bounds, torch.zeros_like(v[0])), (torch.arange(S), whole(v), g))


@spelled(LOG_SUM_EXP)
def log_sum_exp_so_far(v, g, **_):
    def step(total, row):
        x, g = row
        total = torch.logaddexp(total - g[..., None].sigmoid(), x)
        return total, total * x

    return scan(step, torch.full((B, H, V), -torch.inf, dtype=torch.float64), (v, g))


@spelled(MAXIMUM)
def integers_so_far(v, **_):
    ids = (v * 10).long()

    def step(best, row):
        best = torch.where(row % 2 == 0, torch.maximum(best, row), best)
        return best, best * row

    return scan(step, ids[0], ids)[1].double() * v


@spelled(SUM)
def count_by_data(v, **_):
    def step(count, row):
        count = count + (row > 0).long()
        return count, count.double() * row

    return scan(step, torch.zeros(B, H, V, dtype=torch.int64), v)


@spelled(SUM)
def a_table_of_integers(v, **_):
    ids = (v * 10).long()

    def step(table, row):
        table = table + row[..., :, None] * row[..., None, :]
        return table, (row[..., None] * table).sum(-2)

    return scan(step, torch.full((B, H, V, V), 2**53 + 1), ids)[1].double() * v


@spelled(MAXIMUM)
def seen_so_far(v, **_):
    def step(seen, row):
        seen = seen | (row > 1)
        return seen, torch.where(seen, row, 0)

    return scan(step, torch.zeros(B, H, V, dtype=torch.bool), v)


@spelled(SUM, SUM, MAXIMUM)
def sums_in_the_scale_of_a_maximum(k, v, **_):
    decay, bonus = OF_COLUMNS.exp(), OF_COLUMNS

    def step(carry, row):
        a, b, p = carry
        k, v = row
        top = torch.maximum(p, bonus + k)
        old, new = torch.exp(p - top), torch.exp(bonus + k - top)
        out = (old * a + new * v) / (old * b + new)
        top = torch.maximum(p - decay, k)
        old, new = torch.exp(p - decay - top), torch.exp(k - top)
        return (old * a + new * v, old * b + new, top), out

    nothing = torch.zeros_like(v[0, :, 0])
    return scan(step, (nothing, nothing, nothing - 1e30), (v[:, :, 0], v[:, :, 1]))


@spelled(SUM)
def gates_of_the_token_alone(v, **_):
    def step(h, row):
        z, new = row
        h = (1 - z.sigmoid()) * h + z.sigmoid() * new
        return h, h

    return scan(step, torch.zeros_like(v[0, :, 0]), (v[:, :, 0], v[:, :, 1]))


@spelled(SUM)
def a_decay_for_each_element(first, q, k, v, **_):
    rates = -ELEMENTS.exp()

    def step(h, row):
        key, query, x, t = row
        t = F.softplus(t)
        h = h * torch.exp(t[..., None] * rates) + (t * x)[..., None] * key[:, None, :]
        return h, torch.einsum("bdn,bn->bd", h, query)

    return scan(step, first[:, 0].mT.contiguous(), (k[:, :, 0], q[:, :, 0], v[:, :, 0], v[:, :, 1]))


@spelled(SUM)
def what_is_largest_in_a_sum(first, v, **_):
    def step(c, v):
        c = c * 0.5 + v
        return c, c.max(-1).values * torch.linalg.svdvals(outer(c, v))[..., 0]

    return scan(step, first[..., 0, :], v)


@spelled(CHUNKS)
def beside_attention_to_a_cache(first, q, k, v, **_):
    positions = torch.arange(S)

    def step(carry, row):
        state, keys, values = carry
        t, q, k, v = row
        state = state * 0.9 + outer(k, v)
        at = (positions == t)[:, None, None, None]
        keys, values = torch.where(at, k, keys), torch.where(at, v, values)
        scores = torch.einsum("bhk,sbhk->bhs", q, keys).masked_fill(positions > t, torch.finfo(q.dtype).min)
        return (state, keys, values), read(q, state) + torch.einsum("bhs,sbhv->bhv", scores.softmax(-1), values)

    return scan(step, (first, torch.zeros_like(k), torch.zeros_like(v)), (positions, q, k, v))


@pytest.mark.deep(but=["delta_rule_by_a_matrix"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_what_is_linear_runs_in_parallel(name):
    run, expected = SPELLINGS[name]
    report = compared(run, tokens())
    assert forms(report) == expected
    assert report.verdict == "batched, its recurrence in parallel"
    assert not report.declines


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    ["a_decay_of_data", "delta_rule_with_a_decay_for_each_row", "maximum_so_far", "a_rotation", "level_and_trend"],
)
def test_it_does_so_through_inductor(name):
    run, expected = SPELLINGS[name]
    assert forms(compared(run, tokens(), nested="inductor")) == expected


@pytest.mark.deep(but=["exponential_average-1"])
@pytest.mark.parametrize("steps", [1, 7, 8, 9])
@pytest.mark.parametrize(
    "name",
    [
        "by_einsum",
        "delta_rule_with_a_decay",
        "read_before_it_is_written",
        "exponential_average",
        "a_rotation",
        "three_states",
    ],
)
def test_any_length(name, steps):
    run, expected = SPELLINGS[name]
    report = compared(run, tokens(steps))
    assert forms(report) in (expected, [SUM])  # of few steps, the state of each takes no more than a chunk


@pytest.mark.deep(but=["0.2-0.0-dtype1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("brought", [0.0, 1.0])
@pytest.mark.parametrize("back", [-0.3, 0.2])
def test_carries_together_in_low_precision_are_no_worse_than_their_loop(dtype, brought, back):
    """Where nothing is brought, too: of the matrices alone, the dtype is known by their numbers."""

    def run(x):
        def step(state, row):
            a, b = state
            a, b = 0.8 * a + 0.3 * b + (row * brought if brought else 0), 0.8 * b + back * a
            return (a, b), a * 1

        return scan(step, (x[0], x[1]), x)[1]

    x = rows(40, V).to(dtype)
    exact, by_loop = run(x.double()), run(x)
    found = nsa_compile.compile(run, nested="eager", cache=False)(x)
    (report,) = nsa_compile.last_report().scans
    assert forms(report) == [TWO]
    assert found.dtype == dtype
    band = torch.finfo(dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= (by_loop - exact).abs().max() + band


def test_caches_beside_a_recurrence_need_no_guard():
    report = compared(SPELLINGS["beside_attention_to_a_cache"][0], tokens())
    assert len(report.guards_dropped) == 2
    assert not report.guards_kept


def test_no_product_of_a_row_and_a_column_is_held_for_each_step():
    """Not even that of the token itself, which is read with a factor of its own."""
    run, _ = SPELLINGS["a_bonus_for_the_token_itself"]
    compiled = nsa_compile.compile(run, nested="eager", cache=False)
    inputs = {name: x.requires_grad_() for name, x in tokens(40).items()}
    compiled(**inputs)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        compiled(**inputs)
    assert 0 < max(saved) < 40 * B * H * K * V / 2


# --------------------------------------------------------------------------------------------------------- near misses

LOOPS: dict[str, tuple[Callable, str]] = {}


def looped(why: str) -> Callable:
    """A program with a recurrence that is a loop, and a part of the reason."""

    def register(run: Callable) -> Callable:
        LOOPS[run.__name__] = run, why
        return run

    return register


def projected(update: Callable) -> Callable:
    """A step with work around its recurrence: `state = update(state, q, k, v)`."""

    def run(first, q, k, v, **_):
        def step(state, row):
            q, k, v = row
            state = update(state, q @ KEYS_TO_KEYS, k, v)
            return state, read(q @ KEYS_TO_KEYS, state).tanh() @ VALUES_TO_VALUES

        return scan(step, first, (q, k, v))

    return run


LOOPS |= {
    "a decay that reads the state": (
        projected(lambda s, q, k, v: s * s.mean((-1, -2), keepdim=True).sigmoid() + outer(k, v)),
        "aten.sigmoid.default",
    ),
    "a maximum by another comparison": (
        projected(lambda s, q, k, v: torch.where(outer(k, v) > 2 * s, outer(k, v), s)),
        "condition of this write",
    ),
    "a maximum of another's place": (
        projected(lambda s, q, k, v: torch.where(s.mean() > 0, s, torch.maximum(s, outer(k, v)))),
        "condition of this write",
    ),
    "a state that is clamped": (projected(lambda s, q, k, v: (s + outer(k, v)).clamp(-1, 1)), "aten.clamp.default"),
    "a saturating state": (projected(lambda s, q, k, v: torch.tanh(s + outer(k, v))), "aten.tanh.default"),
    "a state times itself": (projected(lambda s, q, k, v: s * s * 0.1 + outer(k, v)), "depend on the old state"),
    "a key that reads the state": (
        projected(lambda s, q, k, v: s + outer(k * s.sum(-1), v)),
        "what is added to the state",
    ),
    "a state that is turned": (projected(lambda s, q, k, v: 0.5 * s.flip(-1) + outer(k, v)), "aten.flip.default"),
    "two keys": (
        projected(lambda s, q, k, v: s - outer(q, read(k, s)) * 0.1 - outer(k, read(q, s)) * 0.1 + outer(k, v)),
        "several directions",
    ),
    "a matrix": (projected(lambda s, q, k, v: KEYS_TO_KEYS @ s * 0.1 + outer(k, v)), "of rank one"),
    "an identity times a matrix": (
        projected(lambda s, q, k, v: (torch.eye(K, dtype=s.dtype) * outer(q, k)) @ s + outer(k, v)),
        "of rank one",
    ),
    "a diagonal beside the first": (
        projected(lambda s, q, k, v: torch.diag_embed(q.sigmoid()[..., 1:], 1) @ s + outer(k, v)),
        "of rank one",
    ),
}


@looped("and not element by element")
def two_states_that_are_mixed(v, **_):
    def step(carry, row):
        a, b = carry
        return (0.5 * a - 0.1 * b.mean(-1, keepdim=True) + row.tanh(), 0.5 * b + 0.1 * a), a.exp()

    return scan(step, (v[0], v[1]), v)


@looped("more than 4")
def five_states_in_a_ring(v, **_):
    def step(carry, row):
        return tuple(0.5 * c + 0.1 * carry[i - 1] + row.tanh() for i, c in enumerate(carry)), carry[0].exp()

    return scan(step, (v[0],) * 5, v)


@looped("of several shapes or dtypes")
def states_of_two_shapes(v, **_):
    def step(carry, row):
        a, b = carry
        return (0.5 * a + 0.1 * b + row.tanh(), 0.5 * b + 0.1 * a.mean(-1, keepdim=True)), a.exp()

    return scan(step, (v[0], v[1, ..., :1]), v)


@looped("integers or conditions")
def integers_that_add_up_to_each_other(v, **_):
    def step(carry, row):
        a, b = carry
        return (b, a + b), row.tanh() * (a % 7)

    first = v[0].round().long()
    return scan(step, (first, first), v)


@looped("first state is not finite")
def a_first_state_of_infinities(v, **_):
    def step(carry, row):
        a, b = carry
        a, b = (torch.where(row.detach() > 9, c, d) for c, d in ((a, row), (b + a, row)))
        return (a + 0.1 * b, b + 0.1 * a), a.tanh()

    return scan(step, (torch.full_like(v[0], -torch.inf), torch.zeros_like(v[0])), v)


CELL = nn.LSTMCell(V, V, dtype=torch.float64).requires_grad_(False)


@looped("the old state")
def gated_cell(v, **_):
    def step(state, row):
        state = CELL(row, state)
        return state, state[0] * 2

    return scan(step, (v[0, :, 0], v[1, :, 0]), v[:, :, 0])


@looped("a complex logarithm has many values")
def a_complex_log_sum_exp(q, k, **_):
    def step(state, row):
        state = torch.logaddexp(state, row)
        return state, torch.view_as_real(state * 2)

    rows = torch.complex(q, k)
    return scan(step, rows[0], rows)[1]


@looped("depends on data")
def a_row_chosen_by_data(q, k, **_):
    def step(cache, row):
        q, k = row
        at = (k[0, 0] > 0).sum().clamp(max=5)
        cache = torch.index_copy(cache, 0, at.view(1), k[0, 0][None])
        return cache, (cache @ q[0, 0].tanh()).softmax(-1) @ cache

    return scan(step, torch.zeros(6, K, dtype=torch.float64), (q, k))


@pytest.mark.deep(but=["two keys", "two_states_that_are_mixed"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_is_not_linear_is_a_loop_in_a_batched_step(name):
    run, why = LOOPS[name]
    report = compared(run, tokens())
    assert forms(report) == [LOOP]
    assert report.verdict == "batched, its recurrence a loop"
    assert why in report.declines[-1].reason


def test_a_step_that_is_all_recurrence_stays_a_loop():
    def run(v, **_):
        return scan(lambda c, row: (c := (c + row).tanh(), c), v[0], v)

    report = compared(run, tokens())
    assert report.verdict == "stays a loop"
    assert "aten.tanh.default" in report.declines[-1].reason


def test_a_loop_may_be_refused():
    with pytest.raises(Exception, match="stays a loop of 20 steps"):
        nsa_compile.compile(LOOPS["a saturating state"][0], nested="eager", on_decline="error")(**tokens())


def inner_loop(run: Callable) -> list[str]:
    """The operators of the loop that is left of a step."""
    found = []
    plan = batch_prefill.plan_recurrences
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_prefill, "plan_recurrences", lambda *a: found.append(plan(*a)) or found[-1])
        compared(run, tokens())
    ((loop,),) = found
    return [str(node.target) for node in loop.loop.nodes]


def test_a_loop_computes_what_the_recurrence_needs_and_what_is_small():
    """The outer product and the readout lie within it, so that neither is held for each step; projections do not."""
    inside = inner_loop(LOOPS["a saturating state"][0])
    assert "aten.tanh.default" in inside
    assert inside.count("aten.bmm.default") == 1, "the readout"
    assert "aten.mm.default" not in inside
    assert inside.count("aten.mul.Tensor") == 1, "the outer product"


@pytest.mark.deep
def test_without_the_pass_a_recurrence_is_a_loop():
    run, _ = SPELLINGS["a_decay_of_data"]
    nsa_compile.compile(run, nested="eager", cache=False, disable=["parallelize_recurrences"])(**tokens())
    assert forms(nsa_compile.last_report().scans[0]) == [LOOP]


# ------------------------------------------------------------------------------------------------------ drawn programs


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A step with a state of `[*batch, K, V]`, or transposed, in one of many spellings."""

    steps: int
    batch: tuple[int, ...]
    decay: str
    writes: str
    reads: str
    order: str
    solved: bool
    transposed: bool
    strided: bool
    dtype: torch.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor) -> Any:
        steps = torch.arange(self.steps)

        def step(state: Tensor, row: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            t, q, k, v, g, beta = row
            found = state.mT if self.transposed else state
            new = self.decayed(found, g, t)
            if self.solved:
                v = beta * (v - self.read(k, new))
            new = new + self.written(k, v)
            out = self.read(q, {"before": found, "after": new}[self.order])
            return (new.mT if self.transposed else new), out

        return scan(step, first.mT if self.transposed else first, (steps, q, k, v, g, beta))

    def decayed(self, state: Tensor, g: Tensor, t: Tensor) -> Tensor:
        gate = g.sigmoid()[..., None]
        return {
            "none": lambda: state,
            "number": lambda: 0.9 * state,
            "negative": lambda: -0.7 * state,
            "vector": lambda: gate * state,
            "scalar": lambda: state * gate.mean(-2, keepdim=True),
            "step": lambda: torch.where(t % 4 == 1, gate * state, state),
            "data": lambda: state.masked_fill(gate[..., :1, :] > 0.8, 0.0),
            "divided": lambda: state / (1 + gate),
        }[self.decay]()

    def written(self, k: Tensor, v: Tensor) -> Tensor:
        return {
            "broadcast": lambda: k[..., :, None] * v[..., None, :],
            "matmul": lambda: k.unsqueeze(-1) @ v.unsqueeze(-2),
            "einsum": lambda: torch.einsum("...k,...v->...kv", k, v),
            "expanded": lambda: k[..., None].expand(*k.shape, V) * v[..., None, :],
        }[self.writes]()

    def read(self, q: Tensor, state: Tensor) -> Tensor:
        return {
            "broadcast": lambda: (q[..., None] * state).sum(-2),
            "matmul": lambda: (q.unsqueeze(-2) @ state).squeeze(-2),
            "einsum": lambda: torch.einsum("...k,...kv->...v", q, state),
            "transposed": lambda: (state.mT @ q[..., None])[..., 0],
        }[self.reads]()

    def inputs(self) -> dict[str, Tensor]:
        def drawn(*shape: int) -> Tensor:
            x = rows(*shape).to(self.dtype)
            return x.flip(0).transpose(0, -1).contiguous().transpose(0, -1) if self.strided else x

        s, b = self.steps, self.batch
        keys = F.normalize(drawn(s, *b, K), dim=-1)
        gates = {"g": drawn(s, *b, K), "beta": drawn(s, *b, 1).sigmoid()}
        return {"q": drawn(s, *b, K), "k": keys, "v": drawn(s, *b, V), **gates, "first": rows(*b, K, V).to(self.dtype)}


@few(25)
@given(
    st.builds(
        Drawn,
        steps=st.sampled_from([1, 5, 8, 9, 23]),
        batch=st.sampled_from([(), (2,), (1,), (2, 3), (1, 2)]),
        decay=st.sampled_from(["none", "number", "negative", "vector", "scalar", "step", "data", "divided"]),
        writes=st.sampled_from(["broadcast", "matmul", "einsum", "expanded"]),
        reads=st.sampled_from(["broadcast", "matmul", "einsum", "transposed"]),
        order=st.sampled_from(["before", "after"]),
        solved=st.booleans(),
        transposed=st.booleans(),
        strided=st.booleans(),
        dtype=st.sampled_from([torch.float64, torch.float32]),
    )
)
def test_drawn_steps_equal_their_loops(program):
    torch._dynamo.reset()
    report = compared(program, program.inputs(), tolerance=1e-9 if program.dtype == torch.float64 else 2e-4)
    note(f"{report}")
    assert report.verdict == "batched, its recurrence in parallel"
    if program.steps > 8:
        assert forms(report) == [SOLVED if program.solved else CHUNKS]


@st.composite
def choices(draw: st.DrawFn, depth: int = 4) -> Any:
    """A tree of choices between values of a state, made by a few conditions again and again."""
    kind = draw(st.integers(0, 5)) if depth else draw(st.integers(0, 1))
    if kind == 0:
        return "c"
    if kind == 1:
        return draw(st.sampled_from(["0.5 * c", "c + row", "row", "c * gate", "gate - c"]))
    inner = draw(choices(depth - 1))
    if kind == 2:
        return f"(0.5 * {inner} + row)"
    other = inner if draw(st.booleans()) else draw(choices(depth - 1))
    return f"torch.where(m[{draw(st.integers(0, 2))}], {inner}, {other})"


def chosen_twice(condition: int, if_true: str, if_false: str) -> str:
    once = f"torch.where(m[{condition}], {if_true}, {if_false})"
    return f"torch.where(m[{condition}], {once}, {once})"


def halved(written: str) -> str:
    return chosen_twice(1, f"0.5 * {written}", written)


@pytest.mark.deep
@few(30)
@given(choices(), st.integers(1, 6))
@example(halved(chosen_twice(0, "(c + row)", "c")), 3)  # as statements in place on slices become
def test_conditions_within_conditions(update, steps):
    torch._dynamo.reset()
    note(update)
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def updated(c, row, gate, m):\n    return {update}", scope)

    def run(x: Tensor) -> Tensor:
        def step(carry: Tensor, token: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            row, t = token
            places = torch.arange(3)[:, None]
            m = (places >= t) & (places < t + 2), (places >= t - 1) & (places < t), (places + t) % 2 == 0
            new = scope["updated"](carry, row, row.sigmoid(), m) + 0 * carry + 0 * row
            return new, new.sum(0)

        final, ys = scan(step, x.new_ones(3, 2), (x, torch.arange(len(x))))
        return torch.cat([final, ys])

    x = rows(steps, 2).requires_grad_()
    ours, theirs = nsa_compile.compile(run, nested="eager", cache=False)(x), run(x)
    torch.testing.assert_close(ours, theirs)
    cotangent = rows(*ours.shape)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, cotangent) for y in (ours, theirs)))


# -------------------------------------------------------------------------------------------------------------- faults

_query = in_chunks._query


@pytest.mark.deep
def test_the_wrong_state_is_seen(monkeypatch):
    monkeypatch.setattr(in_chunks, "_query", lambda *args: dataclasses.replace(x := _query(*args), before=not x.before))
    for name in ("by_einsum", "read_before_it_is_written"):
        with pytest.raises(AssertionError):
            compared(SPELLINGS[name][0], tokens())


def test_a_decay_that_is_left_out_is_seen(monkeypatch):
    for module in (at_each_step, in_chunks):
        monkeypatch.setattr(module, "is_one", lambda terms: True)
    for name in ("a_decay_of_data", "exponential_average"):
        with pytest.raises(AssertionError):
            compared(SPELLINGS[name][0], tokens())


def test_factors_of_another_step_are_seen(monkeypatch):
    original = terms.arranged
    monkeypatch.setattr(terms, "arranged", lambda *args: original(*args).roll(1, 0))
    with pytest.raises(AssertionError):
        compared(SPELLINGS["gates_of_the_token_alone"][0], tokens())


def test_gradients_of_equals_that_go_to_the_other_one_are_seen(monkeypatch):
    compared_to = {target: (kind, not second) for target, (kind, second) in at_each_step._COMPARED.items()}
    monkeypatch.setattr(at_each_step, "_COMPARED", compared_to)
    with pytest.raises(AssertionError):
        compared(SPELLINGS["extremes_by_comparison"][0], tokens())


def test_a_condition_the_other_way_round_is_seen(monkeypatch):
    original = at_each_step._chosen

    def turned(*args: Any) -> Any:
        value, only = original(*args)
        return value, only and (only[0], "false" if only[1] == "true" else "true")

    monkeypatch.setattr(at_each_step, "_chosen", turned)
    with pytest.raises(AssertionError):
        compared(SPELLINGS["extremes_of_pages"][0], tokens())


@pytest.mark.deep
def test_a_direction_that_is_taken_for_that_of_the_keys_is_seen(monkeypatch):
    monkeypatch.setattr(in_chunks, "_same_direction", lambda a, b: True)
    for name in ("what_is_read_is_added_elsewhere", "a_matrix_of_a_diagonal_and_a_product"):
        with pytest.raises(AssertionError):
            compared(SPELLINGS[name][0], tokens())


def test_a_diagonal_without_its_numbers_is_seen(monkeypatch):
    def without(term: Any, record: Any) -> Any:
        return dataclasses.replace(affine.without_diagonals(term, record), factors=())

    monkeypatch.setattr(terms, "without_diagonals", without)
    with pytest.raises(AssertionError):
        compared(SPELLINGS["a_decay_by_a_diagonal_matrix"][0], tokens())


# ------------------------------------------------------------------------------------------------------- low precision


@pytest.mark.deep(but=["exponential_average-dtype0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["a_decay_of_data", "delta_rule_with_a_decay", "exponential_average"])
def test_low_precision_is_no_farther_from_float64_than_the_loop(name, dtype):
    run, _ = SPELLINGS[name]
    given = {n: x.to(dtype) for n, x in tokens(100).items()}
    exact = pytree.tree_leaves(run(**{n: x.double() for n, x in given.items()}))
    loop = pytree.tree_leaves(run(**given))
    mine = pytree.tree_leaves(nsa_compile.compile(run, nested="eager", cache=False)(**given))
    for a, b, truth in zip(mine, loop, exact, strict=True):
        band = torch.finfo(dtype).eps * float(truth.abs().max())
        assert a.dtype == b.dtype
        assert float((a - truth).abs().max()) <= float((b - truth).abs().max()) + band


def test_a_state_kept_in_low_precision_has_the_decay_that_the_step_computes():
    """A decay of 0.9999 is 1 in bfloat16: rounded to the dtype of the state it would be none."""

    def run(v):
        def step(state, row):
            state = (state.float() * 0.99 + row.float()).bfloat16()
            return state, state.float()

        return scan(step, v[0], v)[1]

    v = rows(400, 3).bfloat16()
    state, values = v[0].double(), []
    for row in v.double():
        state = state * 0.99 + row
        values.append(state)
    exact = torch.stack(values)
    error = (nsa_compile.compile(run, nested="eager", cache=False)(v).double() - exact).abs().max()
    assert float(error) <= float((run(v).double() - exact).abs().max())


@pytest.mark.deep(but=["delta_rule_with_a_decay"])
@pytest.mark.parametrize("name", ["a_decay_of_data", "delta_rule_with_a_decay"])
def test_autocast_does_not_reach_the_states(name):
    run, _ = SPELLINGS[name]
    given = {n: x.float() for n, x in tokens().items()}
    with torch.autocast("cpu", torch.bfloat16):
        loop = pytree.tree_leaves(run(**given))
        mine = pytree.tree_leaves(nsa_compile.compile(run, nested="eager", cache=False)(**given))
    assert CHUNKS not in forms(nsa_compile.last_report().scans[0])
    for a, b in zip(mine, loop, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_loop_that_reads_no_rows():
    """Without rows its step gets the number of the step, which it took for what is the same at every step."""

    def run(first, number, x):
        def step(c, row):
            c = torch.where(c > 1, number, c + 1)
            return c, row * 2

        return scan(step, first, x)

    for first in (3.0, 0.0, 1.0):
        start = torch.tensor(first, dtype=torch.float64)
        report = compared(run, {"first": start, "number": torch.zeros((), dtype=torch.float64), "x": rows(4, 2)})
        assert forms(report) == [LOOP]


@pytest.mark.parametrize("number", [-1e9, -1e30, torch.finfo(torch.float32).min, -torch.inf])
def test_sums_begin_anew_behind_a_large_number(number):
    """As log decays that a document's first token resets: a difference of sums over all steps would have no digits."""
    place = torch.arange(12)

    def sums(f):
        return scan(lambda s, x: 2 * [torch.where(place < x[0], s + x[1], 0)], f.new_zeros(12), (place, f))[1]

    f = -torch.rand(12)
    f[4] = f[7] = number
    torch._dynamo.reset()
    torch.testing.assert_close(nsa_compile.compile(sums, nested="eager", cache=False)(f), sums(f))

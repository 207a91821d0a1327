"""fuse_selection_scatter on rankings of keys: what becomes `scored_places`, what does not, and equal to its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import places
from tests.strategies import few

S, B, H, D, COUNT = 13, 2, 3, 4, 4  # H heads index

INF = torch.inf


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(places, "FEWEST", 1)


def first(scores: Tensor, count: int = COUNT) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def indexed(w: Tensor, q: Tensor, keys: Tensor) -> Tensor:
    """`Σ_h w[h] · ReLU(q[h] · k[s])`, `[B, S]`."""
    return torch.einsum("bh,bhs->bs", w, torch.einsum("bhd,bsd->bhs", q, keys).relu())


def by_head(q: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("bhd,bsd->bhs", q, keys)


def without_gradients(rank: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return rank()


Rank = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of t, positions, weights, queries, keys

# What is ranked by a program; numbers of places `[B, n]` or `[B, H, n]`.
TAKEN: dict[str, Rank] = {
    "an indexer": lambda t, p, w, q, k: first(indexed(w, q, k).masked_fill(p > t, -INF)),
    "without gradients": lambda t, p, w, q, k: without_gradients(
        lambda: first(indexed(w, q, k).masked_fill(p > t, -INF))),
    "detached": lambda t, p, w, q, k: first(indexed(w, q, k).detach().masked_fill(p > t, -INF)),
    "weights from the other side": lambda t, p, w, q, k: first(
        torch.where(p <= t, (by_head(q, k).relu().transpose(1, 2) @ w[..., None]).squeeze(-1), -INF)),
    "a sum over heads": lambda t, p, w, q, k: first(
        (by_head(q, k).relu() * w[..., None]).sum(1).masked_fill(p > t, -INF)),
    "masked before it is summed": lambda t, p, w, q, k: first(by_head(q, k).masked_fill(p > t, -INF).sum(1)),
    "under two masks": lambda t, p, w, q, k: first(
        indexed(w, q, k).masked_fill(p > t, -INF).masked_fill(p % 5 == 3, -INF)),
    "each head by itself": lambda t, p, w, q, k: first(by_head(q, k).masked_fill(p > t, -INF)),
    "scaled, with a bias by position": lambda t, p, w, q, k: first(
        (by_head(q, k) * 0.5 - 0.25 * (t - p)).masked_fill(p > t, -INF)),
    "in a window": lambda t, p, w, q, k: first(indexed(w, q, k).masked_fill((p > t) | (p < t - 5), -INF)),
    "the lowest number": lambda t, p, w, q, k: first(by_head(q, k).masked_fill(p > t, torch.finfo(q.dtype).min)),
    "parts of several lengths": lambda t, p, w, q, k: (lambda best: torch.cat([best[:, :4], best[:, :2]], -1))(
        indexed(w, q, k).masked_fill(p > t, -INF).sort(dim=-1, descending=True, stable=True).indices),
}  # fmt: skip

# What stays as it is: the scores or the order are read by others, more than the first places are, something
# comes between the sum and the masks, or the scores come from no product with keys that are the same at all steps.
LEFT: dict[str, Rank] = {
    "the scores are read": lambda t, p, w, q, k: (lambda x: torch.where(x.amax(-1, True) > 0, first(x), 0))(
        indexed(w, q, k).masked_fill(p > t, -INF)),
    "the values are read": lambda t, p, w, q, k: (lambda x: x.indices[..., :COUNT] * (x.values[..., :COUNT] > 0))(
        indexed(w, q, k).masked_fill(p > t, -INF).sort(dim=-1, descending=True, stable=True)),
    "the last places": lambda t, p, w, q, k: indexed(w, q, k).masked_fill(p > t, -INF).sort(
        dim=-1, descending=True, stable=True).indices[..., -COUNT:],
    "ascending": lambda t, p, w, q, k: indexed(w, q, k).masked_fill(p > t, INF).sort(
        dim=-1, stable=True).indices[..., :COUNT],
    "a number in the place of a sum": lambda t, p, w, q, k: first(indexed(w, q, k).masked_fill(p > t, -1e9)),
    "the largest over heads": lambda t, p, w, q, k: first(by_head(q, k).amax(1).masked_fill(p > t, -INF)),
    "a bias beside a sum": lambda t, p, w, q, k: first(
        (by_head(q, k).sum(1) - 0.25 * (t - p)).masked_fill(p > t, -INF)),
    "keys of each step": lambda t, p, w, q, k: first((by_head(q, k * w[:, :1, None]).sum(1)).masked_fill(p > t, -INF)),
    "of no product": lambda t, p, w, q, k: first((k.sum(-1) * w[:, :1]).masked_fill(p > t, -INF)),
}  # fmt: skip


def over_caches(rank: Rank) -> Callable[..., tuple[Tensor, Tensor]]:
    """A loop that ranks the keys of a cache, and attends to those that come first."""

    def loop(w: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(q))

        def step(caches: tuple[Tensor, Tensor], row: tuple[Tensor, ...]) -> Any:
            t, w, q, k, v = row
            here = (positions == t)[:, None]
            keys, values = (torch.where(here, x[:, None], cache) for x, cache in zip((k, v), caches, strict=True))
            best = rank(t, positions, w, q, keys)
            by_row = best.reshape(B, -1)
            rows = values.gather(1, by_row[..., None].expand(-1, -1, D))
            return (keys, values), (best, rows.masked_fill((by_row > t)[..., None], 0.0).sum(1))

        empty = q.new_zeros(B, len(q), D)
        return scan(step, (empty, empty), (torch.arange(len(q)), w, q, k, v))[1]

    return loop


def tensors(length: int, dtype: torch.dtype, *, whole: bool) -> list[Tensor]:
    shapes = (length, B, H), (length, B, H, D), (length, B, D), (length, B, D)
    drawn = [torch.randint(-1, 2, x).to(dtype) if whole else torch.randn(x, dtype=dtype) for x in shapes]
    return [x.requires_grad_() for x in drawn]


def compared(rank: Rank, length: int = S, dtype: torch.dtype = torch.float64, *, whole: bool = True, **options: Any):
    """The report of a compiled loop, whose places, values and gradients are those of the loop.

    Whole numbers make many scores equal, and no sum depends on its order.
    """
    torch._dynamo.reset()
    loop, inputs = over_caches(rank), tensors(length, dtype, whole=whole)
    compiled = nsa_compile.compile(loop, nested="eager", cache=False, **options)
    found, expected = compiled(*inputs), loop(*inputs)
    assert torch.equal(found[0], expected[0])
    cotangent = torch.randn_like(expected[1])
    gradients = [torch.autograd.grad(y[1], inputs, cotangent, allow_unused=True) for y in (found, expected)]
    torch.testing.assert_close((found[1], *gradients[0]), (expected[1], *gradients[1]))
    return nsa_compile.last_report()


def count_of(report: Any) -> int:
    return sum("scored_places" in str(m) for p in report.passes for m in p.matches)


@pytest.mark.deep(but=["masked before it is summed"])
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_equals_its_loop(name):
    assert count_of(compared(TAKEN[name])) == 1


@pytest.mark.deep
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_equals_its_loop(name):
    report = compared(LEFT[name])
    assert count_of(report) == 0
    (fused,) = [p for p in report.passes if p.name == "fuse_selection_scatter"]
    assert any(d.reason.startswith("a ranking computes the scores of all keys") for d in fused.declines)


@few(6)
@given(
    name=st.sampled_from([*TAKEN, *LEFT]),
    length=st.integers(COUNT, 40),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_drawn_rankings_equal_their_loops(name, length, dtype, seed):
    torch.manual_seed(seed)
    compared({**TAKEN, **LEFT}[name], length, dtype)


@pytest.mark.deep
def test_numbers_that_are_not_whole():
    torch.manual_seed(0)
    assert count_of(compared(TAKEN["an indexer"], whole=False)) == 1


TOP: dict[str, tuple[Rank, bool]] = {
    "indices": (lambda t, p, w, q, k: by_head(q, k).sum(1).masked_fill(p > t, -INF).topk(COUNT).indices, True),
    "most of them": (lambda t, p, w, q, k: by_head(q, k).sum(1).masked_fill(p > t, -INF).topk(S - 2).indices, True),
    "the lowest": (lambda t, p, w, q, k: by_head(q, k).sum(1).masked_fill(p > t, INF).topk(
        COUNT, largest=False).indices, False),
    "values as well": (lambda t, p, w, q, k: (lambda x: x.indices * (x.values > 0))(
        by_head(q, k).sum(1).masked_fill(p > t, -INF).topk(COUNT)), False),
}  # fmt: skip


@pytest.mark.deep(but=["values as well"])
@pytest.mark.parametrize("name", TOP)
def test_topk(name):
    """Of hidden keys, which torch takes in an order of its own, the first are taken."""
    torch.manual_seed(0)
    rank, taken = TOP[name]
    loop, inputs = over_caches(rank), tensors(S, torch.float64, whole=False)
    compiled = nsa_compile.compile(loop, nested="eager", cache=False)
    (best, out), (best_of_loop, out_of_loop) = compiled(*inputs), loop(*inputs)
    later = torch.arange(S)[:, None, None]
    assert torch.equal(*(x.masked_fill(x > later, -1) for x in (best, best_of_loop)))
    torch.testing.assert_close(out, out_of_loop)
    assert count_of(nsa_compile.last_report()) == int(taken)


@pytest.mark.deep
def test_dense_attention_ranks_all_scores():
    report = compared(TAKEN["an indexer"], attention="dense")
    assert [c.operator for c in report.attention if "ranking of 13 queries to 13 keys" in c.what] == ["dense"]


@pytest.mark.deep
def test_a_step_that_stays_a_loop_ranks_by_itself():
    loop, inputs = over_caches(TAKEN["an indexer"]), tensors(S, torch.float64, whole=True)
    compiled = nsa_compile.compile(loop, nested="eager", cache=False, disable=("batch_prefill",))
    torch.testing.assert_close(compiled(*inputs), loop(*inputs))
    (fused,) = [p for p in nsa_compile.last_report().passes if p.name == "fuse_selection_scatter"]
    assert any("keys ranked by a program" in str(m) for m in fused.matches)


@pytest.mark.deep
def test_small_rankings_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(places, "FEWEST", 2**22)
    assert count_of(compared(TAKEN["an indexer"])) == 0


@pytest.mark.deep
def test_a_planted_fault_is_found(monkeypatch):
    """A weight that is taken from the next head."""
    original = places._weighed

    def shifted(*given: Any) -> Any:
        terms = original(*given)
        if terms is None or terms.factor is None:
            return terms
        node, elements = terms.factor
        return places._Terms(terms.node, terms.elements, (node, elements.roll(1, 0)))

    monkeypatch.setattr(places, "_weighed", shifted)
    with pytest.raises(AssertionError):
        compared(TAKEN["an indexer"], whole=False)

"""What is large over all steps is computed in tiles of steps: equal to the loop, and never held as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import nsa_compile
from nsa_compile import scan
from nsa_compile.analyses import step_tiles
from nsa_compile.models import SparsePattern, nsa_attention
from tests.analyses.test_staleness_programs import PROGRAMS as STALENESS
from tests.analyses.test_staleness_programs import check

S, D, HEADS, CHOSEN = 29, 4, 2, 3
LARGE = S * S // 2 * 4  # bytes of half of what there is for each step and each key


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Three tiles of 8 steps and a rest of 5."""
    monkeypatch.setattr(step_tiles, "_TILE_BYTES", {"cpu": 1})


def over_tokens(step: Callable[..., Any], *xs: Tensor) -> Any:
    """Steps that write a key and a value into caches and read them: `step(keys, values, t, *row)`."""

    def cached(state: Any, row: Any) -> Any:
        keys, values, t = state
        q, k, v, *others = row
        keys, values = keys.index_copy(1, t[None], k[:, None]), values.index_copy(1, t[None], v[:, None])
        return (keys, values, t + 1), step(keys, values, t, q, *others)

    zeros = xs[1].new_zeros(xs[1].shape[1], len(xs[0]), xs[1].shape[2])
    return scan(cached, (zeros, torch.zeros_like(zeros), torch.tensor(0)), xs)[1]


def scores_of(keys: Tensor, t: Tensor, q: Tensor) -> Tensor:
    past = torch.arange(keys.shape[1]) <= t
    return torch.einsum("bhd,btd->bht", q, keys).masked_fill(~past, -torch.inf)


def purity(keys: Tensor, values: Tensor, t: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Attention whose weights are read by something else, too."""
    weights = scores_of(keys, t, q).softmax(-1)
    mean = weights.mean(1)
    return torch.einsum("bht,btd->bhd", weights, values).flatten(1), (mean / mean.sum(-1, True)).square().sum(-1)


def ranked(keys: Tensor, values: Tensor, t: Tensor, q: Tensor, q_index: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to tokens that an indexer chooses, and the divergence that teaches the indexer."""
    past = torch.arange(keys.shape[1]) <= t
    index = torch.einsum("bd,btd->bt", q_index, keys.detach()).relu().masked_fill(~past, -torch.inf)
    best = index.sort(dim=-1, descending=True, stable=True).indices[..., :CHOSEN]
    seen = torch.zeros_like(past).expand_as(index).scatter(-1, best, True) & past
    weights = torch.einsum("bhd,btd->bht", q, keys).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    mass = weights.mean(1).detach()
    log_q = index.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
    return torch.einsum("bht,btd->bhd", weights, values), (torch.xlogy(mass, mass) - mass * log_q).sum(-1)


def picked(keys: Tensor, values: Tensor, t: Tensor, q: Tensor, q_index: Tensor) -> tuple[Tensor, Tensor]:
    """The same with rows that are gathered; of the weights the loss hears no gradient."""
    past = torch.arange(keys.shape[1]) <= t
    index = torch.einsum("bd,btd->bt", q_index, keys).detach().relu().masked_fill(~past, -torch.inf)
    best = index.sort(dim=-1, descending=True, stable=True).indices[..., :CHOSEN]
    rows, others = (x.gather(1, best[..., None].expand(-1, -1, D)) for x in (keys, values))
    hidden = best > t
    weights = torch.einsum("bhd,bnd->bhn", q, rows).masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    log_q = torch.einsum("bd,bnd->bn", q_index, rows.detach()).masked_fill(hidden, -torch.inf).log_softmax(-1)
    loss = (weights.mean(1).detach() * log_q.masked_fill(hidden, 0)).sum(-1)
    return torch.einsum("bhn,bnd->bhd", weights, others), loss


def extremes(keys: Tensor, values: Tensor, t: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Several results of one operator, of which one is an index."""
    value, place = scores_of(keys, t, q).max(-1)
    near = torch.arange(keys.shape[1]) == place[..., None]
    return value, (near * scores_of(keys, t, q).clamp_min(-9)).tanh().sum(-1)


def unwritten(keys: Tensor, values: Tensor, t: Tensor, q: Tensor) -> Tensor:
    """Rows that are not written yet take part: the caches need copies, which tiles read."""
    return torch.einsum("bhd,btd->bht", q, keys).exp().sum(-1)


def condensed(keys: Tensor, values: Tensor, t: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of blocks are small; of what is made of them, only parts are read."""
    weights = scores_of(keys, t, q).softmax(-1)
    blocks = weights.mean(1)[:, :24].unflatten(-1, (4, 6)).mean(-1)
    shares = blocks.masked_fill(torch.arange(4) * 6 > t, -1).softmax(-1)[:, :3]
    best = shares.masked_fill(torch.arange(3) * 6 > t, -1).sort(dim=-1, descending=True, stable=True)
    return torch.einsum("bht,btd->bhd", weights, values), best.values[:, 0] * best.indices[:, 0]


def highest(keys: Tensor, values: Tensor, t: Tensor, q: Tensor) -> Tensor:
    """One result of an operator that has several."""
    return scores_of(keys, t, q).max(-1).values


PROGRAMS = {
    "condensed": (condensed, 0),
    "highest": (highest, 0),
    "purity": (purity, 0),
    "ranked": (ranked, 1),
    "picked": (picked, 1),
    "extremes": (extremes, 0),
    "unwritten": (unwritten, 0),
}


def inputs_of(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    others = PROGRAMS[name][1]
    shapes = [(S, 2, HEADS, D), (S, 2, D), (S, 2, D), *[(S, 2, D)] * others]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def with_gradients(f: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor | None]:
    values = tree_leaves(f(*inputs))
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in values]
    gradients = torch.autograd.grad(values, inputs, given, allow_unused=True)
    return [*values, *gradients]


@pytest.mark.deep
@pytest.mark.parametrize("name", PROGRAMS)
def test_tiles_equal_the_loop(name):
    step, inputs = PROGRAMS[name][0], inputs_of(name)

    def program(*xs: Tensor) -> Any:
        return over_tokens(step, *xs)

    compiled = nsa_compile.compile(program, nested="eager", cache=False, tile_bytes=LARGE)
    found, expected = with_gradients(compiled, inputs), with_gradients(program, inputs)
    (batched,) = [p for p in nsa_compile.last_report().passes if p.name == "batch_prefill"]
    assert "in tiles of 8 steps" in batched.matches[0]
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.deep(but=["the row before"])
@pytest.mark.parametrize("name", STALENESS)
def test_programs_against_the_proof_in_tiles(name, monkeypatch):
    monkeypatch.setattr(step_tiles, "_FEWEST", 4)  # of 6 steps
    # Large is what has 4 numbers for each of 6 steps: scores, and not rows of keys.
    check(STALENESS[name], disable=("unroll_buffers", "raise_attention"), tile_bytes=4 * 4 * 6)


@pytest.mark.deep(but=["purity"])
@pytest.mark.parametrize("name", ["purity", "ranked"])
def test_nothing_is_held_for_each_step_and_each_key(name):
    step, inputs = PROGRAMS[name][0], inputs_of(name)
    compiled = nsa_compile.compile(lambda *xs: over_tokens(step, *xs), nested="eager", cache=False, tile_bytes=LARGE)
    with_gradients(compiled, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        with_gradients(compiled, inputs)
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert 0 < largest < S * S * HEADS * 8  # bytes of the scores of one sequence


@pytest.mark.deep
def test_indices_are_kept_and_ranked_once(monkeypatch):
    planned = []
    original = step_tiles.plan_tiles
    monkeypatch.setattr(
        "nsa_compile.passes.batch_prefill.plan_tiles", lambda *args: planned.append(original(*args)) or planned[-1]
    )
    inputs = inputs_of("ranked")
    compiled = nsa_compile.compile(lambda *xs: over_tokens(ranked, *xs), nested="eager", cache=False, tile_bytes=LARGE)
    compiled(*inputs)
    first, second = planned[-1]
    assert [n.meta["val"].dtype for n in first.yields] == [torch.int64]
    assert not any("sort" in str(n.target) for n in second.nodes)


def test_small_programs_have_no_tiles():
    inputs = inputs_of("purity")
    nsa_compile.compile(lambda *xs: over_tokens(purity, *xs), nested="eager", cache=False)(*inputs)
    assert not any("in tiles of" in str(m) for p in nsa_compile.last_report().passes for m in p.matches)


@pytest.mark.deep
def test_what_few_steps_write_is_computed_at_these_and_not_in_tiles():
    pattern = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(1, 32, n, 4, generator=generator, dtype=torch.float64) for n in (2, 1, 1, 2))
    inputs = [x.requires_grad_() for x in (q, k, v, gate[..., :3])]

    def program(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return nsa_attention(q, k, v, k, v, None, None, gate.sigmoid(), pattern=pattern)

    blocks = 32 * 8 * 4 * 4  # bytes of the rows of a block, were they held at each step
    compiled = nsa_compile.compile(program, nested="eager", cache=False, attention="sparse", tile_bytes=blocks)
    found = with_gradients(compiled, inputs)
    assert not any("in tiles of" in str(m) for p in nsa_compile.last_report().passes for m in p.matches)
    for a, b in zip(found, with_gradients(program, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)

"""Programs that came out wrong once, found by `benchmarks/model_programs.py`: shrunk, named, and held."""

from __future__ import annotations

import pytest
import torch

import nsa_compile
from nsa_compile import scan

D = 2


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def compiled(run, nested="eager", **options):
    return torch.compile(run, backend="nsa_compile", options={"nested": nested, "cache": False}, **options)


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def cached(x):
    """A scan that is batched: the sums over a cache of what came in until then."""

    def step(c, row):
        k = c.index_copy(0, row["t"].view(1), row["x"].unsqueeze(0))
        return k, k.sum(0)

    return scan(step, x.new_zeros(x.shape), {"x": x, "t": torch.arange(x.shape[0])})[1]


def test_a_write_in_place_in_a_step_behind_a_batched_scan():
    """Dead code was removed from the steps of all scans once the first was batched; writes looked unused there."""

    def run(x):
        def step(c, a):
            k = c.clone()
            k.select(0, 0).copy_(a.amax(0) * 2)
            return k, k.sum(0)

        y = cached(x)
        return scan(step, x.new_full(x.shape, 0.5), y)[1]

    x = rows(3, D)
    torch.testing.assert_close(compiled(run, fullgraph=True)(x), run(x))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.multinomial(torch.ones(3), 2),
        lambda: torch.normal(0.0, 1.0, (2, 3)),
        lambda: torch.empty(3).normal_(),
        lambda: torch.rand(2),
    ],
    ids=["multinomial", "normal", "normal_", "rand"],
)
def test_numbers_that_nobody_reads_are_drawn_beside_a_write(draw):
    """They were dropped as soon as the graph wrote to anything, so whatever was drawn next was another number."""

    def run(x):
        final, y = scan(lambda c, row: (c * 0.5 + row, c), x.new_zeros(D), x)
        final[:1].mul_(2)
        draw()
        return final, y

    x, states = rows(3, D), []
    for function in (run, compiled(run, fullgraph=True)):
        torch.manual_seed(3)
        final, y = function(x)
        states.append((final, y, torch.get_rng_state()))
    torch.testing.assert_close(states[0], states[1])


def test_a_cache_overwritten_as_a_whole_still_asks_for_its_gradient():
    """No value of the first cache is left in the last one, and eager's has a gradient all the same: zeros."""

    def run(x, k):
        def step(c, row):
            return torch.where((torch.arange(len(x)) == row["t"]).view(-1, 1), row["x"].unsqueeze(0), c), row["x"]

        return scan(step, k, {"x": x, "t": torch.arange(len(x))})[0]

    x, k = rows(4, D), rows(4, D).requires_grad_()
    final = compiled(run, fullgraph=True)(x, k)
    torch.testing.assert_close(final, run(x, k))
    (gradient,) = torch.autograd.grad(final.sum(), [k])
    assert not gradient.any()


def test_a_counter_that_is_known_before_the_program_runs_goes_through_autograd():
    """Its table was a real tensor among the fakes of aot_eager."""

    def run(x):
        def step(c, row):
            return torch.where(c > 1, 0, c + 1).to(torch.uint8), row * 2

        return scan(step, torch.full((), 1, dtype=torch.uint8), x)

    x = rows(5, D)
    torch.testing.assert_close(compiled(run, "aot_eager", fullgraph=True)(x), run(x))


def test_compiling_within_a_checkpointed_region():
    """What was traced while compiling counted as saved by the region, which then could not be computed again."""
    fast = compiled(lambda x: scan(lambda c, row: (c * 0.5 + row, c.sin()), x.new_zeros(D), x)[1], fullgraph=True)
    x = rows(4, D).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(fast, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), [x])
    (wanted,) = torch.autograd.grad(fast(x).sum(), [x])
    torch.testing.assert_close(gradient, wanted)
    assert nsa_compile.last_report() is not None

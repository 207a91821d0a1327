"""Attention of one query: the registered kernels against a loop over rows in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from nsa_compile import ops
from nsa_compile.ops.dispatch import KERNELS
from nsa_compile.ops.step import step_attention

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KERNELS_HERE = [pytest.param(kernel, id=name) for name, kernel in KERNELS["step"].items() if kernel.device != "cuda"]


@dataclass(frozen=True)
class Case:
    """Arguments of the operator, drawn by a seed."""

    B: int
    G: int
    h: int
    T: int
    D: int
    Dv: int
    contents: str
    layout: str
    mask: str
    block: int
    n: int | None
    narrow: bool
    chosen: int
    dtype: torch.dtype
    seed: int

    def arguments(self) -> tuple:
        rng = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=rng, dtype=torch.float64)
            return x.round().clamp(-1, 1) if self.contents == "small integers" else x

        q, k, v = normal(self.B, 1, self.G * self.h, self.D), normal(self.B, self.T, self.G, self.D), None
        v = normal(self.B, self.T, self.G, self.Dv)
        if self.contents == "large":
            q = q * 20
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        if self.layout == "by group":
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        elif self.layout == "columns":
            k, v = (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (k, v))
        indices = None
        if self.n is not None:
            some = [
                torch.randperm(-(-self.T // self.block) + 4, generator=rng)[: self.n] for _ in range(self.B * self.G)
            ]
            indices = torch.stack(some).reshape(self.B, self.G, -1) - 2
            indices = indices.int() if self.narrow else indices
        mask = self._mask(rng, self.T if indices is None else indices.shape[2] * self.block)
        if not self.chosen:
            return q, k, v, mask, indices, None, None, self.block, 0.4, 1, [], [], 0
        blocks = max(1, self.T // 2 + 1)
        allowed = torch.rand(self.B, 1, blocks, generator=rng) < 0.8
        forced = torch.rand(1, self.G, blocks, generator=rng) < 0.2
        return q, k, v, mask, indices, allowed, forced, self.block, 0.4, 2, [-1, 0, 1], [1, 2, 1], self.chosen

    def _mask(self, rng: torch.Generator, places: int) -> Tensor | None:
        shapes = {"causal": (1, 1, 1), "each": (self.B, 1, 1), "heads": (self.B, self.G, self.h), "none": (1, 1, 1)}
        if self.mask == "absent":
            return None
        if self.mask == "causal":
            return (torch.arange(places) < self.T // 2 + 1)[None, None, None]
        return torch.rand(*shapes[self.mask], places, generator=rng) < (0.0 if self.mask == "none" else 0.6)


cases = st.builds(
    Case,
    B=st.sampled_from([1, 2, 3]),
    G=st.sampled_from([1, 2]),
    h=st.sampled_from([1, 2, 3, 4, 7]),
    T=st.one_of(st.integers(1, 40), st.sampled_from([511, 513, 1100])),
    D=st.sampled_from([1, 5, 16, 64]),
    Dv=st.sampled_from([1, 7, 32, 48]),
    contents=st.sampled_from(["normal", "small integers", "large"]),
    layout=st.sampled_from(["plain", "by group", "columns"]),
    mask=st.sampled_from(["absent", "causal", "each", "heads", "none"]),
    block=st.sampled_from([1, 3, 16, 600, 5000]),
    n=st.sampled_from([None, 0, 1, 4, 20]),
    narrow=st.booleans(),
    chosen=st.sampled_from([0, 0, 1, 4, 30]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)


def by_loop(q, k, v, mask, indices, allowed, forced, block, scale, ratio, offsets, factors, n) -> tuple[Tensor, list]:
    """The output `[B, 1, Hq, Dv]` in float64, and for each sequence and group the scores of the blocks, with -inf for
    those that are not allowed and inf for those that are forced."""
    q, k, v = (x.double() for x in (q, k, v))
    groups, heads = k.shape[2], q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    ranked = []
    for b in range(q.shape[0]):
        for g in range(groups):
            p = [0.0] * k.shape[1]
            for i in range(heads):
                named = list(range(k.shape[1]))
                if indices is not None:
                    named = [int(j) * block + r for j in indices[b, g] for r in range(block)]
                kept = [True] * len(named)
                if mask is not None:
                    kept = mask.expand(q.shape[0], groups, heads, len(named))[b, g, i].tolist()
                rows = [row for row, there in zip(named, kept, strict=True) if there and 0 <= row < k.shape[1]]
                if not rows:
                    continue
                weights = torch.softmax(k[b, rows, g] @ q[b, 0, g * heads + i] * scale, 0)
                out[b, 0, g * heads + i] = weights @ v[b, rows, g]
                for row, weight in zip(rows, weights.tolist(), strict=True):
                    p[row] += weight
            if n:
                ranked.append(_scores_of(p, allowed[b, 0], forced[0, g], ratio, offsets, factors))
    return out, ranked


def _scores_of(p: list[float], allowed: Tensor, forced: Tensor, ratio: int, offsets, factors) -> list[float]:
    scores = []
    for block in range(len(allowed)):
        rows = [(block * ratio + o, f) for o, f in zip(offsets, factors, strict=True)]
        score = sum(f * p[row] for row, f in rows if 0 <= row < len(p))
        scores.append(-math.inf if not allowed[block] else math.inf if forced[block] else score)
    return scores


@pytest.mark.parametrize("kernel", KERNELS_HERE)
@given(case=cases)
def test_equals_a_loop(kernel, case):
    arguments = case.arguments()
    expected, ranked = by_loop(*arguments)
    before = [x.clone() for x in arguments if isinstance(x, Tensor)]
    with ops.force_implementation(kernel.name):
        out, chosen = step_attention(*arguments)
    assert all(torch.equal(x, y) for x, y in zip([x for x in arguments if isinstance(x, Tensor)], before, strict=True))
    assert out.dtype == case.dtype
    # One rounding of the output, of the weights where they meet values of low precision, and of scores and sums.
    v = arguments[2].double().abs().max()
    scores = 0.4 * arguments[0].double().abs().max() * arguments[1].double().abs().max() * case.D
    computed = torch.float64 if case.dtype == torch.float64 else torch.float32
    products = torch.finfo(case.dtype if kernel.name == "portable" else computed).eps
    band = 4 * v * (torch.finfo(case.dtype).eps + products * (case.D + scores))
    assert float((out.double() - expected).abs().max()) <= float(band)
    for row, scores in zip(chosen.reshape(-1, case.chosen) if case.chosen else [], ranked, strict=True):
        _check_choice(row.tolist(), scores, exact=case.dtype == torch.float64)


def _check_choice(chosen: list[int], scores: list[float], *, exact: bool) -> None:
    """Forced blocks, ascending, then the best of the others, ties to the lower index, then -1."""
    forced = [b for b, score in enumerate(scores) if score == math.inf]
    others = sorted((b for b, s in enumerate(scores) if -math.inf < s < math.inf), key=lambda b: (-scores[b], b))
    expected = (forced + others)[: len(chosen)]
    if exact:
        near = [abs(scores[a] - scores[b]) for a in others for b in others if a != b and scores[a] != scores[b]]
        assume(min(near, default=1.0) > 1e-12)  # what rounding may decide
        assert chosen == expected + [-1] * (len(chosen) - len(expected))
    else:
        assert chosen[: len(forced)] == forced[: len(chosen)]
        assert sum(b >= 0 for b in chosen) == len(expected)


@pytest.mark.parametrize("kernel", KERNELS_HERE)
def test_ties_go_to_the_lower_block(kernel):
    """Equal keys have equal weights, whichever way they are summed."""
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1200, 1, 4)
    allowed, forced = torch.ones(1, 1, 300, dtype=torch.bool), torch.zeros(1, 1, 300, dtype=torch.bool)
    forced[..., 7] = True
    with ops.force_implementation(kernel.name):
        _, chosen = step_attention(q, k, k, None, None, allowed, forced, 1, 1.0, 4, [0, 1], [1, 1], 5)
    assert chosen.tolist() == [[[7, 0, 1, 2, 3]]]


def test_rows_that_are_not_kept_are_not_read():
    """A cache may hold anything where nothing was written."""
    q, k = torch.ones(2, 1, 2, 8), torch.full((2, 700, 1, 8), torch.nan)
    k[:, 40:48] = 1.0
    mask = torch.zeros(1, 1, 1, 700, dtype=torch.bool)
    mask[..., 40:48] = True
    for indices in (None, torch.tensor([[[5]], [[5]]])):
        keep = mask if indices is None else mask[..., 40:48]
        out, _ = step_attention(q, k, k, keep, indices, None, None, 8, 1.0, 1, [], [], 0)
        torch.testing.assert_close(out, torch.ones(2, 1, 2, 8))


def test_a_nan_that_is_kept_stays_visible():
    q, k = torch.ones(1, 1, 1, 8), torch.ones(1, 700, 1, 8)
    k[0, 3] = torch.nan
    out, _ = step_attention(q, k, torch.ones_like(k), None, None, None, None, 8, 1.0, 1, [], [], 0)
    assert out.isnan().all()


@pytest.mark.parametrize("B", [1, 4])
def test_bits_do_not_depend_on_the_number_of_threads(B):
    case = Case(B, 2, 3, 1100, 16, 32, "normal", "plain", "each", 16, 40, False, 4, torch.float32, 0)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 3):
            torch.set_num_threads(threads)
            results.append(step_attention(*case.arguments()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_registration():
    case = Case(2, 2, 2, 30, 4, 4, "normal", "plain", "each", 4, 3, False, 2, torch.float64, 0)
    torch.library.opcheck(torch.ops.nsa_compile.step_attention.default, case.arguments())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({0: torch.ones(1, 2, 2, 4)}, "q has 2 queries a sequence; it must have 1"),
        ({3: torch.ones(1, 1, 1, 9)}, "mask is torch.float32"),
        ({3: torch.ones(1, 1, 1, 8, dtype=torch.bool)}, r"must be torch.bool and broadcast to \[1, 1, 2, 9\]"),
        ({4: torch.zeros(1, 2, 3, dtype=torch.int64)}, "indices has shape"),
        ({12: 2}, "allowed and forced must be given"),
        ({7: 0}, "block_size = 0 must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(change, line):
    k = torch.ones(1, 9, 1, 4)
    arguments = [torch.ones(1, 1, 2, 4), k, k, None, None, None, None, 1, 1.0, 1, [], [], 0]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=line):
        step_attention(*arguments)


@pytest.mark.parametrize("T", [60, 1100])
def test_the_best_blocks_are_those_of_the_loop(T):
    """Heads count by their weights, however large their scores are."""
    for seed in range(6):
        case = Case(1, 2, 3, T, 8, 4, "normal", "plain", "absent", 1, None, False, T // 6, torch.float64, seed)
        _, ranked = by_loop(*case.arguments())
        _, chosen = step_attention(*case.arguments())
        assert chosen.min() >= 0
        for row, scores in zip(chosen.reshape(-1, T // 6), ranked, strict=True):
            best = sorted((score for score in scores if -math.inf < score < math.inf), reverse=True)
            free = [scores[block] for block in row.tolist() if scores[block] < math.inf]
            assert free == pytest.approx(best[: len(free)], rel=1e-9)

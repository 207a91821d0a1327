"""Attention over compressed blocks and the selection: every registered kernel against the dense reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.ops.compressed.selection import block_scores, sum_heads
from nsa_compile.ops.dense import masked_attention
from nsa_compile.verification.oracle import importance, select
from tests.ops.problems import Problem, check, kernels, problems, reference


@dataclass(frozen=True)
class Selection:
    """The operator's parameters beside the scale."""

    block: int
    stride: int
    ratio: int
    offsets: tuple[int, ...]
    weights: tuple[int, ...]
    count: int
    initial: int
    local: int

    def parameters(self, scale: float) -> tuple[object, ...]:
        select_block = self.stride * self.ratio
        return (
            self.block, self.stride, scale, select_block, list(self.offsets), list(self.weights), self.count,
            self.initial, self.local,
        )  # fmt: skip


@st.composite
def selections(draw) -> Selection:
    offsets = tuple(sorted(draw(st.sets(st.integers(-3, 5), max_size=5))))
    return Selection(
        block=draw(st.sampled_from([1, 2, 4, 9, 32])),
        stride=draw(st.sampled_from([1, 2, 4, 16])),
        ratio=draw(st.sampled_from([1, 2, 4])),
        offsets=offsets,
        weights=tuple(draw(st.integers(1, 3)) for _ in offsets),
        count=draw(st.sampled_from([0, 1, 3, 6, 40])),
        initial=draw(st.integers(0, 3)),
        local=draw(st.integers(0, 3)),
    )


PAPER = Selection(32, 16, 4, (-1, 0, 1, 2, 3), (1, 2, 2, 2, 1), 6, 1, 2)
ORDINARY = Problem(1, 700, 42, 2, 4, 64, 64, "normal", "contiguous", torch.float32, 0)


def check_choice(problem: Problem, selection: Selection, indices: torch.Tensor) -> None:
    """Every row of indices is a right choice, given the scores in float64: near ties may go either way."""
    q, k, v, _ = problem.tensors()
    position = torch.arange(problem.S)
    visible = torch.arange(problem.keys) * selection.stride + selection.block - 1 <= position[:, None]
    weights = masked_attention(q.double(), k.double(), v.double(), visible[:, None, None], problem.scale)[2]
    select_block = selection.stride * selection.ratio
    num_blocks = -(-max(1, problem.S) // select_block)
    scores = block_scores(sum_heads(weights), num_blocks, selection.ratio, selection.offsets, selection.weights)
    largest_score = (q.double().abs().amax() * k.double().abs().amax() if q.numel() and k.numel() else 0) * problem.D
    eps = torch.finfo(torch.promote_types(problem.dtype, torch.float32)).eps
    slack = 32 * eps * (1 + problem.scale * float(largest_score)) * max(1, sum(selection.weights)) * problem.h
    for row, score, s in zip(
        indices.flatten(0, 2).tolist(),
        scores.flatten(0, 2).tolist(),
        position.repeat_interleave(problem.G).repeat(problem.B).tolist(),
        strict=True,
    ):
        current = s // select_block
        chosen = [block for block in row if block >= 0]
        forced = [b for b in range(current + 1) if b < selection.initial or b > current - selection.local]
        assert row == chosen + [-1] * (selection.count - len(chosen))
        assert len(set(chosen)) == len(chosen) == min(selection.count, current + 1)
        assert chosen[: len(forced)] == forced[: selection.count]
        free = chosen[len(forced) :]
        rejected = [score[b] for b in range(current + 1) if b not in forced and b not in free]
        assert all(0 <= b <= current for b in chosen)
        assert all(score[a] >= score[b] - slack for a, b in pairwise(free))
        if free and rejected:
            assert min(score[b] for b in free) >= max(rejected) - slack


@pytest.mark.parametrize("kernel", kernels("compressed"))
@given(problem=problems(), selection=selections())
def test_equals_the_reference(kernel, problem, selection):
    problem = problem.taken_by(kernel)
    *_, indices = check(problem, kernel, *selection.parameters(problem.scale))
    assert indices.shape == (problem.B, problem.S, problem.G, selection.count)
    assert indices.dtype == torch.int32
    if selection.count:
        check_choice(problem, selection, indices)


@pytest.mark.parametrize("kernel", kernels("compressed", torch.float64))
@given(problem=problems(dtypes=(torch.float64,)), selection=selections())
def test_exact_ties_go_to_the_lower_index(kernel, problem, selection):
    # Keys repeat from one selection block to the next and only a block's own keys count for it, so the scores of all
    # blocks that are seen whole are equal to the last bit. Quarters and a scale of 1/4 make products exact: a BLAS may
    # round the last columns of a product otherwise than the first.
    own = tuple(offset for offset in selection.offsets if 0 <= offset < selection.ratio)
    selection = replace(selection, offsets=own, weights=selection.weights[: len(own)])
    q, k, v, _ = replace(problem, contents="normal").tensors()
    q, k = ((4 * x).round() / 4 for x in (q, k))
    k = k[:, torch.arange(problem.keys) % selection.ratio % max(1, problem.keys)]
    parameters = selection.parameters(0.25)
    *_, indices = kernel.forward(q, k, v, *parameters)
    *_, expected = reference("compressed")(q, k, v, *parameters)
    torch.testing.assert_close(indices, expected, rtol=0, atol=0)


@given(seed=st.integers(0, 2**16), length=st.integers(1, 60), convention=st.sampled_from(["minus", "paper_v2"]))
def test_reference_selection_equals_the_oracle(seed, length, convention):
    l, d, l_sel, n, initial, local = 4, 2, 8, 5, 1, 2  # noqa: E741
    sign = 1 if convention == "minus" else -1
    terms = [sign * m - i for m in range(l_sel // d) for i in range(l // d)]
    offsets = sorted(set(terms))
    weights = [terms.count(offset) for offset in offsets]
    blocks = max(0, (length - l) // d + 1)
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(1, length, 2, 4, generator=rng, dtype=torch.float64)
    k = torch.randn(1, blocks, 1, 4, generator=rng, dtype=torch.float64)
    visible = torch.arange(blocks) * d + l - 1 <= torch.arange(length)[:, None]
    p = masked_attention(q, k, k, visible[:, None, None], 0.5)[2]
    *_, indices = reference("compressed")(q, k, k, l, d, 0.5, l_sel, offsets, weights, n, initial, local)
    for t in range(length):
        scores = importance(p[0, t, 0], -(-length // l_sel), l, d, l_sel, convention)
        chosen = select(scores.tolist(), t, l_sel, n, initial, local)
        assert sorted(b for b in indices[0, t, 0].tolist() if b >= 0) == chosen


@pytest.mark.parametrize("kernel", kernels("compressed"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_papers_pattern(kernel, dtype):
    problem = replace(ORDINARY, dtype=dtype).taken_by(kernel)
    *_, indices = check(problem, kernel, *PAPER.parameters(problem.scale))
    check_choice(problem, PAPER, indices)


@pytest.mark.parametrize("kernel", kernels("compressed", torch.float32))
def test_more_forced_blocks_than_places(kernel):
    q, k, v, _ = ORDINARY.tensors()
    crowded = replace(PAPER, count=2, initial=2, local=2)
    *_, indices = kernel.forward(q, k, v, *crowded.parameters(0.5))
    assert indices[0, 65:, 0].tolist() == [[0, 1]] * 635
    assert indices[0, 0, 0].tolist() == [0, -1]


@pytest.mark.parametrize("kernel", kernels("compressed", torch.float32))
def test_a_query_before_the_first_block_ends(kernel):
    q, k, v, grad = ORDINARY.tensors()
    out, lse, _ = kernel.forward(q, k, v, *PAPER.parameters(0.5))
    assert (out[:, :31] == 0).all()
    assert (lse[:, :31] == -torch.inf).all()
    dq, dk, dv = kernel.backward(grad, None, q, k, v, out, lse, *PAPER.parameters(0.5))
    assert (dq[:, :31] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))

"""Attention over selected blocks: every registered kernel against the dense reference and against loops over ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_compile import ops
from nsa_compile.ops.dispatch import KERNELS
from nsa_compile.ops.scored.program import derivative, parse
from nsa_compile.ops.selected import cpu
from nsa_compile.ops.selected.ranges import selected_attention_v1, token_ranges
from tests.ops.problems import Problem, check, kernels, problems, reference

ORDINARY = Problem(1, 300, 300, 2, 4, 64, 64, "normal", "contiguous", torch.float32, 0)
PATTERNS = ("random", "sequential", "duplicates", "gaps", "single block", "all invalid", "out of range")


def make_indices(pattern: str, problem: Problem, num_selected: int, block_size: int) -> Tensor:
    """`[B, S, G, num_selected]`, int64."""
    rng = torch.Generator().manual_seed(problem.seed)
    shape = (problem.B, problem.S, problem.G, num_selected)
    blocks = max(1, -(-problem.keys // block_size))
    place = torch.arange(num_selected)
    if pattern == "sequential":
        return place.expand(shape)
    if pattern == "duplicates":
        return torch.randint(0, blocks, (*shape[:3], 1), generator=rng).expand(shape)
    if pattern == "gaps":
        return (2 * place).expand(shape)
    if pattern == "single block":
        current = torch.arange(problem.S) // block_size
        return torch.where(place == num_selected // 2, current[:, None, None], -1).expand(shape)
    if pattern == "all invalid":
        return torch.full(shape, -1)
    if pattern == "out of range":
        return torch.randint(-(2**40), 2**40, shape, generator=rng)
    return torch.randint(-1, blocks + 1, shape, generator=rng)


@pytest.mark.parametrize("kernel", kernels("selected"))
@given(
    problem=problems(),
    pattern=st.sampled_from(PATTERNS),
    num_selected=st.sampled_from([0, 1, 3, 8]),
    block_size=st.sampled_from([1, 3, 8, 64, 100, 1000]),
    narrow=st.booleans(),
    strided=st.booleans(),
)
def test_equals_the_reference(kernel, problem, pattern, num_selected, block_size, narrow, strided):
    problem = problem.taken_by(kernel)
    indices = make_indices(pattern, problem, num_selected, block_size)
    if narrow and pattern != "out of range":
        indices = indices.int()
    if strided:
        indices = indices.transpose(1, 3).contiguous().transpose(1, 3)
    check(problem, kernel, indices, block_size, problem.scale)


@pytest.mark.deep
@given(
    problem=problems(),
    pattern=st.sampled_from(PATTERNS),
    num_selected=st.sampled_from([0, 1, 30]),
    narrow=st.booleans(),
)
def test_tokens_read_in_whole_tiles_equal_the_reference(problem, pattern, num_selected, narrow):
    kernel = KERNELS["selected"]["cpu"]
    problem = problem.taken_by(kernel)
    indices = make_indices(pattern, problem, num_selected, 1)
    with mock.patch.object(cpu, "_suits_tiles", return_value=True) as chosen:
        check(problem, kernel, indices.int() if narrow and pattern != "out of range" else indices, 1, problem.scale)
    assert chosen.called


def test_the_scores_of_a_tile_have_the_derivative_that_is_written_down():
    assert parse(cpu.DERIVATIVE) == parse(derivative(cpu.PROGRAM, ("s0",), (), ("x0",)))


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "tiles"), [(512, 8, 2048, True), (512, 8, 16384, False), (64, 8, 2048, False),
                                           (512, 1, 2048, False), (512, 1, 64, False)],
)  # fmt: skip
def test_tokens_are_read_in_tiles_where_they_are_many_and_few_heads_share_one(tokens, heads, keys, tiles):
    """Of eight heads of queries."""
    q, k = torch.empty(1, keys, 8, 4), torch.empty(1, keys, heads, 4)
    indices = torch.empty(1, 1, 1, 1, dtype=torch.int32).expand(1, keys, heads, tokens)
    assert cpu._suits_tiles(q, k, indices, 1) == tiles
    assert not cpu._suits_tiles(q, k, indices, 2)


@pytest.mark.deep
@pytest.mark.parametrize("kernel", kernels("selected", torch.float64))
def test_long_sequences_take_several_units(kernel):
    long = replace(ORDINARY, S=2500, keys=2500, G=1, h=2, D=8, Dv=8, dtype=torch.float64)
    check(long, kernel, make_indices("random", long, 6, 64), 64, long.scale)


@pytest.mark.parametrize("kernel", kernels("selected", torch.float32))
def test_a_query_that_sees_no_key(kernel):
    q, k, v, grad = ORDINARY.tensors()
    indices = torch.full((1, 300, 2, 3), -1)
    indices[:, ::2, :, 1] = 1  # block 1 begins at 64
    out, lse = kernel.forward(q, k, v, indices, 64, 0.5)
    sees = (torch.arange(300) % 2 == 0) & (torch.arange(300) >= 64)
    assert (out[:, ~sees] == 0).all()
    assert (lse[:, ~sees] == -torch.inf).all()
    assert lse[:, sees].isfinite().all()
    gradients = kernel.backward(grad, None, q, k, v, out, lse, indices, 64, 0.5)
    assert (gradients[0][:, ~sees] == 0).all()
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("kernel", kernels("selected", torch.float64))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_loops_over_token_ranges(kernel, pattern):
    check_against_ranges(kernel.forward, pattern)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_reference_equals_loops_over_token_ranges(pattern):
    check_against_ranges(reference("selected"), pattern)


def check_against_ranges(forward: Callable[..., tuple[Tensor, ...]], pattern: str) -> None:
    problem = replace(ORDINARY, B=2, S=45, keys=41, h=2, D=5, Dv=3, dtype=torch.float64)
    q, k, v, _ = problem.tensors()
    indices = make_indices(pattern, problem, 4, 7)
    expected = selected_attention_v1(q, k, v, indices, 7, problem.scale)
    out, _ = forward(q, k, v, indices, 7, problem.scale)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_public_function_equals_loops_over_token_ranges():
    problem = replace(ORDINARY, S=40, keys=40, h=2, D=5, Dv=3, dtype=torch.float64)
    q, k, v, _ = problem.tensors()
    indices = make_indices("random", problem, 4, 8)
    out, _ = ops.selected_attention(q, k, v, indices, block_size=8)
    torch.testing.assert_close(out, selected_attention_v1(q, k, v, indices, 8, problem.scale), rtol=1e-12, atol=1e-13)


def test_token_ranges():
    assert token_ranges([3, 0, 1, 1, -1, 9], 4, 13, 20) == [(0, 8), (12, 14)]
    assert token_ranges([1], 4, 3, 20) == []
    assert token_ranges([2, 1], 4, 19, 10) == [(4, 10)]

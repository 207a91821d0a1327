"""MoBA against its paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.zoo import judge
from tests.models.zoo.written import attention, best, causal, linear, projected
from tests.strategies import few


def reference(c, p, x):
    q, k, v = projected(c, p, x)
    batch, length, heads, _ = q.shape
    block = c.pattern.block
    count = -(-length // block)
    own = torch.arange(length) // block
    gate = torch.full((batch, heads, length, count), float("-inf"), dtype=x.dtype)
    for i in range(count):
        score = torch.einsum("bshd,bhd->bhs", q, k[:, i * block : (i + 1) * block].mean(1))
        gate[..., i] = torch.where(own > i, score.detach(), gate[..., i])
        gate[..., i] = torch.where(own == i, torch.inf, gate[..., i])
    of_block = best(gate, c.pattern.num_selected)
    seen = of_block[..., own] & causal(length)
    return linear(p, "out", attention(q, k, v, seen))


@few(25)
@given(
    block=st.integers(1, 6), selected=st.integers(1, 4), length=st.integers(1, 22), groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_what_the_paper_says(block, selected, length, groups, seed):
    config = judge.make_config("moba", {"block": block, "num_selected": selected}, n_kv_heads=groups)
    judge.check_reference(judge.make_layer(config, seed), reference, judge.make_input(config, 2, length, seed))


def test_defaults_are_those_of_the_paper():
    pattern = judge.make_config("moba").pattern
    assert (pattern.block, pattern.num_selected) == (512, 3)


@pytest.mark.parametrize("block", [4, 5])
def test_useful_work_is_counted_pair_by_pair(block):
    config = judge.make_config("moba", {"block": block, "num_selected": 2})
    length = 18
    pairs = sum(min(t // block, 1) * block + t % block + 1 for t in range(length))
    assert config.variant.pairs(config, length) == pairs
    gate = sum(t // block for t in range(length)) / length * config.n_heads * config.head_dim
    assert config.variant.multiplies(config, length)[1] == pytest.approx(gate)

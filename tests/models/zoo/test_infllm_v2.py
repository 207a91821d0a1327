"""InfLLM-V2 against its paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.zoo import judge
from tests.models.zoo.written import attention, best, causal, linear, projected
from tests.strategies import few


def block_mask(c, q, k):
    """The blocks of each query `[B, G, S, Nb]` by the paper's words; q and k `[B, S, Hq, D]`."""
    p, (batch, length, _, width) = c.pattern, q.shape
    groups, count = c.n_kv_heads, -(-length // p.block)
    starts = range(0, length - p.pool_block + 1, p.pool_stride)
    own = torch.arange(length) // p.block
    score = torch.zeros(batch, groups, length, count, dtype=q.dtype)
    if starts:
        pooled = torch.stack([k[:, s : s + p.pool_block].mean(1) for s in starts], 1)
        products = torch.einsum("bshd,bnhd->bhsn", q, pooled) / width**0.5
        complete = torch.tensor([[t >= s + p.pool_block - 1 for s in starts] for t in range(length)])
        powers = torch.where(complete, products.exp(), 0)
        weights = powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
        of_group = weights.unflatten(1, (groups, -1)).sum(2)
        for i in range(count):
            sharing = [j for j, s in enumerate(starts) if s < (i + 1) * p.block and s + p.pool_block > i * p.block]
            if sharing:
                score[..., i] = of_group[..., sharing].amax(-1)
    number = torch.arange(count)
    local = (number <= own[:, None]) & (number > own[:, None] - p.window // p.block)
    ranked = torch.where(number < p.num_initial, torch.inf, score)
    ranked = torch.where(local | (number > own[:, None]), -torch.inf, ranked)
    return best(ranked, p.num_selected) | local, own


def reference(c, p, x):
    q, k, v = projected(c, p, x)
    length = x.shape[1]
    blocks, own = block_mask(c, q.detach(), k.detach())
    seen = blocks[..., own] | (torch.arange(length) < c.pattern.dense_len)[:, None]
    seen = (seen & causal(length)).repeat_interleave(c.n_heads // c.n_kv_heads, 1)
    return linear(p, "out", attention(q, k, v, seen))


@st.composite
def patterns(draw):
    stride = draw(st.integers(1, 2))
    block = stride * draw(st.integers(1, 3))
    selected = draw(st.integers(1, 3))
    return {
        "pool_stride": stride, "pool_block": stride * draw(st.integers(1, 3)), "block": block,
        "num_selected": selected, "num_initial": draw(st.integers(0, min(1, selected))),
        "window": block * draw(st.integers(1, 2)), "dense_len": draw(st.sampled_from([0, 0, 9, 13, 30])),
    }  # fmt: skip


@few(60)
@given(pattern=patterns(), length=st.integers(1, 24), groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_it_is_what_the_paper_says(pattern, length, groups, seed):
    config = judge.make_config("infllm_v2", pattern, n_kv_heads=groups)
    judge.check_reference(judge.make_layer(config, seed), reference, judge.make_input(config, 2, length, seed))


@few(40)
@given(pattern=patterns(), length=st.integers(1, 40))
def test_useful_work_is_counted_pair_by_pair(pattern, length):
    config = judge.make_config("infllm_v2", pattern)
    p = config.pattern
    blocks = p.num_selected + p.window // p.block
    sparse = [min(t // p.block, blocks - 1) * p.block + t % p.block + 1 for t in range(length)]
    assert config.variant.pairs(config, length) == sum(t + 1 if t < p.dense_len else sparse[t] for t in range(length))
    ranked = sum(
        t >= s + p.pool_block - 1
        for t in range(p.dense_len, length)
        for s in range(0, length - p.pool_block + 1, p.pool_stride)
    )
    expected = ranked / length * config.n_heads * config.head_dim
    assert config.variant.multiplies(config, length)[1] == pytest.approx(expected)


def test_defaults_are_those_of_the_paper():
    expected = {
        "pool_block": 32, "pool_stride": 16, "block": 64, "num_selected": 64, "num_initial": 1, "window": 2048,
        "dense_len": 8192,
    }  # fmt: skip
    assert vars(judge.make_config("infllm_v2").pattern) == expected


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"pool_block": 24}, r"pattern\.pool_block = 24 must be a multiple of pool_stride = 16"),
        ({"window": 100}, r"pattern\.window = 100 must be a multiple of block = 64"),
        ({"num_initial": 65}, r"pattern\.num_initial = 65 must be at most num_selected = 64"),
    ],
)
def test_a_mistake_is_one_line(sizes, line):
    with pytest.raises(ValueError, match=line):
        judge.make_config("infllm_v2", sizes)

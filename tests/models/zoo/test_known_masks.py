"""Attentions whose masks are known beforehand against their papers: plain, windows, sinks, Longformer, BigBird."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.models.zoo.masked_variants import drawn_block
from tests.models.zoo import judge
from tests.models.zoo.written import attention, causal, linear, projected
from tests.strategies import few

SIZES = {
    "gqa": st.just({}),
    "streaming": st.fixed_dictionaries({"window": st.integers(1, 9), "num_sinks": st.integers(0, 4)}),
    "gpt_oss": st.fixed_dictionaries({"window": st.integers(1, 9)}),
    "longformer": st.fixed_dictionaries(
        {"window": st.integers(1, 6), "dilation": st.integers(1, 4), "num_dilated": st.integers(0, 4)}
    ),
    "bigbird": st.fixed_dictionaries(
        {
            "block": st.integers(1, 4), "num_window": st.integers(1, 3), "num_global": st.integers(0, 2),
            "num_random": st.integers(0, 2),
        }
    ),
}  # fmt: skip


def sees(c, head, query, key):
    """Whether a head of that number sees `key` from `query`, by the words of the paper."""
    p, back = c.pattern, query - key
    match c.attention:
        case "gqa":
            return True
        case "streaming":
            return back < p.window or key < p.num_sinks
        case "gpt_oss":
            return back < p.window
        case "longformer":
            apart = p.dilation if head >= c.n_heads - p.num_dilated else 1
            return back in range(0, p.window * apart, apart)
        case "bigbird":
            own, number = query // p.block, key // p.block
            drawn = {drawn_block(own, head, draw) for draw in range(p.num_random)}
            return own - number < p.num_window or number < p.num_global or number in drawn


def mask(c, length):
    """`[Hq, S, S]`."""
    seen = [[[sees(c, h, t, s) for s in range(length)] for t in range(length)] for h in range(c.n_heads)]
    return torch.tensor(seen) & causal(length)


def reference(c, p, x):
    q, k, v = projected(c, p, x)
    seen = mask(c, x.shape[1])
    if c.attention != "gpt_oss":
        return linear(p, "out", attention(q, k, v, seen))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / c.head_dim**0.5
    powers = torch.where(seen, scores.exp(), 0)
    weights = powers / (powers.sum(-1, keepdim=True) + p["sinks"].exp()[:, None, None])
    return linear(p, "out", torch.einsum("bhst,bthe->bshe", weights, v).flatten(2))


@pytest.mark.parametrize("name", SIZES)
@few(15)
@given(data=st.data(), length=st.integers(1, 16), groups=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_each_is_what_its_paper_says(name, data, length, groups, seed):
    config = judge.make_config(name, data.draw(SIZES[name]), n_kv_heads=groups)
    judge.check_reference(judge.make_layer(config, seed), reference, judge.make_input(config, 2, length, seed))


@pytest.mark.parametrize("name", SIZES)
@few(15)
@given(data=st.data(), length=st.integers(1, 40))
def test_useful_work_is_counted_pair_by_pair(name, data, length):
    config = judge.make_config(name, data.draw(SIZES[name]))
    assert config.variant.pairs(config, length) == int(mask(config, length).sum()) // config.n_heads
    matrices = sum(p.numel() for p in judge.make_layer(config).parameters() if p.dim() == 2)
    assert config.variant.multiplies(config, length) == [matrices]


@pytest.mark.parametrize(
    ("attention", "sizes"),
    [
        ("gqa", {}),
        ("streaming", {"window": 1020, "num_sinks": 4}),
        ("gpt_oss", {"window": 128}),
        ("longformer", {"window": 512, "dilation": 2, "num_dilated": 2}),
        ("bigbird", {"block": 64, "num_window": 3, "num_global": 2, "num_random": 3}),
    ],
)
def test_defaults_are_those_of_the_papers(attention, sizes):
    assert vars(judge.make_config(attention).pattern) == sizes


def test_what_bigbird_draws_lies_before_the_query_and_varies():
    drawn = [[drawn_block(block, head, draw) for draw in range(3)] for block in range(1, 200) for head in range(4)]
    assert all(0 <= number < block for block, row in zip(range(1, 200), drawn[::4], strict=True) for number in row)
    assert len({tuple(row) for row in drawn[400:]}) > 390


@pytest.mark.parametrize(
    ("attention", "sizes", "line"),
    [
        ("streaming", {"window": 0}, r"pattern\.window = 0 must be at least 1"),
        ("gpt_oss", {"window": 2.5}, r"pattern\.window = 2\.5 must be an integer"),
        ("longformer", {"num_dilated": 5}, r"pattern\.num_dilated = 5 must be at most n_heads = 4"),
        ("bigbird", {"num_random": -1}, r"pattern\.num_random = -1 must be at least 0"),
        ("gqa", {"window": 3}, r"pattern\.window is not one of"),
    ],
)
def test_a_mistake_is_one_line(attention, sizes, line):
    with pytest.raises(ValueError, match=line):
        judge.make_config(attention, sizes)

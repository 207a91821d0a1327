"""Quest against its paper."""

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
    length, page = x.shape[1], c.pattern.block
    own = torch.arange(length) // page
    bounds = []
    for i in range(int(own[-1]) + 1):
        keys = k[:, i * page : (i + 1) * page].detach()
        # The best key that could be made of the page's values, channel by channel.
        products = torch.stack([q * keys.amin(1)[:, None], q * keys.amax(1)[:, None]]).amax(0).sum(-1).transpose(1, 2)
        bounds.append(torch.where(own == i, torch.inf, torch.where(own > i, products, -torch.inf)))
    seen = best(torch.stack(bounds, -1), c.pattern.num_selected)[..., own] & causal(length)
    return linear(p, "out", attention(q, k, v, seen))


@few(25)
@given(
    block=st.integers(1, 6), selected=st.integers(1, 4), length=st.integers(1, 22), groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_what_the_paper_says(block, selected, length, groups, seed):
    config = judge.make_config("quest", {"block": block, "num_selected": selected}, n_kv_heads=groups)
    judge.check_reference(judge.make_layer(config, seed), reference, judge.make_input(config, 2, length, seed))


def test_defaults_and_useful_work():
    config = judge.make_config("quest")
    assert vars(config.pattern) == {"block": 16, "num_selected": 64}
    config = judge.make_config("quest", {"block": 4, "num_selected": 2})
    assert config.variant.pairs(config, 18) == sum(min(t // 4, 1) * 4 + t % 4 + 1 for t in range(18))
    bounds = sum(t // 4 for t in range(18)) / 18 * 2 * config.n_heads * config.head_dim
    assert config.variant.multiplies(config, 18)[1] == pytest.approx(bounds)

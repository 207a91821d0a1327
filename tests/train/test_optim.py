"""Schedule and parameter groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nsa_compile.config import OptimSection
from nsa_compile.train.optim import learning_rate, make_optimizer


@given(st.integers(1, 200), st.data())
def test_schedule_rises_to_lr_and_falls_to_its_floor(steps, data):
    warmup = data.draw(st.integers(0, steps))
    config = OptimSection(lr=0.5, warmup=warmup, min_lr_ratio=0.2)
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert all(0 < rate <= 0.5 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == pytest.approx(0.5)
    if warmup < steps:
        assert rates[-1] == pytest.approx(0.1)


def test_norms_and_biases_are_not_decayed():
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    decayed, spared = make_optimizer(model, OptimSection(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0.0
    assert [p.shape for p in decayed["params"]] == [(4, 4)]
    assert len(spared["params"]) == 2

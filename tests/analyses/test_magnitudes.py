"""Additive masks that are made outside of the loop: those of finite numbers and -inf are masks, others are nothing."""

from __future__ import annotations

import math

import pytest
import torch

import nsa_compile
from tests.analyses.test_rows import compared, numbers

S, D = 6, 3

MASKS = {
    "where": lambda seen: torch.where(seen, 0.0, -math.inf),
    "masked_fill": lambda seen: torch.zeros(S, S).masked_fill(~seen, -math.inf),
    "of new tensors": lambda seen: torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, -math.inf),
    "full": lambda seen: torch.where(seen, torch.full((S, S), 0.5), torch.full((), -math.inf)),
    "added up": lambda seen: torch.where(seen, 0.0, -math.inf) + torch.where(seen.mT, 0.0, -math.inf).mT,
    "in place": lambda seen: torch.zeros(S, S).masked_fill_(~seen, -math.inf),
}
OTHERS = {
    "+inf": lambda seen: torch.where(seen, 0.0, math.inf),
    "NaN": lambda seen: torch.where(seen, 0.0, math.nan),
    "times 0": lambda seen: torch.where(seen, 0.0, -math.inf) * 0,
    "logarithm": lambda seen: torch.where(seen, 0.0, -math.inf) * seen.double().log(),
    "the lowest number of fewer bits": lambda seen: torch.where(seen, 0.0, torch.finfo(torch.float32).min),
    "divided": lambda seen: torch.where(seen, 1.0, -math.inf) / seen,
}


def program(make):
    def run(scan, q, v, seen):
        bias = make(seen).to(q.dtype)

        def step(cache, token):
            t, q, v, bias = token
            K, V = (torch.where((torch.arange(S) == t)[:, None], x, c) for c, x in zip(cache, (q, v), strict=True))
            return (K, V), (K @ q + bias).softmax(-1) @ V

        return scan(step, (torch.zeros(S, D, dtype=q.dtype),) * 2, (torch.arange(S), q, v, bias))

    return run


@pytest.mark.deep(but=["the lowest number of fewer bits"])
@pytest.mark.parametrize("name", [*MASKS, *OTHERS])
def test_a_mask_that_is_made_outside(name):
    seen = torch.rand(S, S, generator=torch.Generator().manual_seed(1)).double().round().bool().tril()
    seen |= torch.eye(S, dtype=torch.bool)
    compared(program({**MASKS, **OTHERS}[name]), numbers(S, D), numbers(S, D) / 2, seen)
    attention = any(p.name == "raise_attention" and p.matches for p in nsa_compile.last_report().passes)
    assert attention == (name in MASKS)

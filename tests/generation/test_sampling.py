"""Probabilities of the next token, against loops over the tokens in Python's own numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.generation.sampling import Sampling

NUMBERS = st.integers(-6, 6).map(lambda n: n / 2)  # so that ties are met


def expected(logits: list[float], before: list[int], s: Sampling) -> list[float]:
    penalised = [
        x if token not in before else x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        for token, x in enumerate(logits)
    ]
    if s.temperature == 0:
        best = penalised.index(max(penalised))
        return [float(token == best) for token in range(len(logits))]
    scaled = [x / s.temperature for x in penalised]
    if s.top_k is not None:
        least = sorted(scaled, reverse=True)[min(s.top_k, len(scaled)) - 1]
        scaled = [x if x >= least else -math.inf for x in scaled]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    shares = [w / sum(weights) for w in weights]
    kept, total = set(), 0.0
    for token in sorted(range(len(shares)), key=lambda token: -shares[token]):
        if total < s.top_p:
            kept.add(token)
        total += shares[token]
    reached = sum(shares[token] for token in kept)
    return [share / reached if token in kept else 0.0 for token, share in enumerate(shares)]


@given(
    logits=st.lists(NUMBERS, min_size=1, max_size=9),
    before=st.lists(st.integers(0, 8), max_size=4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 12)),
    top_p=st.sampled_from([0.1, 0.51, 0.83, 1.0]),
    penalty=st.sampled_from([1.0, 2.0, 0.5]),
)
def test_probabilities_are_those_of_the_definition(logits, before, temperature, top_k, top_p, penalty):
    sampling = Sampling(temperature, top_k, top_p, penalty)
    before = [token % len(logits) for token in before]
    actual = sampling.probabilities(torch.tensor(logits), torch.tensor(before, dtype=torch.int64))
    torch.testing.assert_close(actual, torch.tensor(expected(logits, before, sampling)), rtol=1e-5, atol=1e-6)


def test_a_token_is_drawn_as_often_as_it_is_probable():
    logits, generator = torch.tensor([0.0, 1.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    sampling = Sampling(top_k=3)
    none = torch.tensor([], dtype=torch.int64)
    drawn = torch.cat([sampling.draw(logits, none, generator) for _ in range(4000)])
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    probable = sampling.probabilities(logits, none)
    assert share[3] == probable[3] == 0
    assert ((share - probable).abs() <= 5 * (probable * (1 - probable) / len(drawn)).sqrt()).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": 0}, {"top_p": 0.0},
        {"top_p": 1.5}, {"top_p": math.nan}, {"repetition_penalty": 0.0}, {"repetition_penalty": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_way_to_draw_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} = .* must be"):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "extreme", [{"top_p": 1e-300}, {"temperature": 1e-38}, {"temperature": 1e-300}, {"repetition_penalty": 1e-300},
                {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-20, "temperature": 1e-20}],
)  # fmt: skip
def test_extreme_settings_have_a_most_probable_token(extreme):
    logits, before = torch.tensor([3.0, 50.0, -20.0, 49.0]), torch.tensor([0, 2])
    probabilities = Sampling(**extreme).probabilities(logits, before)
    assert probabilities.isfinite().all()
    assert float(probabilities.sum()) == pytest.approx(1)
    if "repetition_penalty" not in extreme:
        assert probabilities.tolist() == [0, 1, 0, 0], "greedy"


def test_probabilities_add_up_to_one():
    probabilities = Sampling(top_p=0.5).probabilities(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0]))
    assert probabilities.tolist() == [1, 0, 0]

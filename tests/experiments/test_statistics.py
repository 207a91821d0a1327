"""The test behind every verdict, on numbers of which the truth is known."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from nsa_compile.experiments.statistics import MIN_PAIRS, compare, rank, student_t, two_sided


def rates(factor: float, n: int, seed: int, noise: float = 0.01, drift: float = 0.3) -> tuple[list[float], list[float]]:
    """Paired tokens/s of a variant and its baseline, on a machine that is up to `drift` slower at times."""
    rng = random.Random(seed)
    rounds = [1000 * (1 - drift * rng.random()) for _ in range(n)]
    return (
        [speed * factor * rng.gauss(1, noise) for speed in rounds],
        [speed * rng.gauss(1, noise) for speed in rounds],
    )


@pytest.mark.parametrize(("factor", "word"), [(1.05, "faster"), (0.95, "slower")])
def test_a_difference_of_five_percent_is_found_under_drift(factor, word):
    found = [compare("B", b, "A", a) for b, a in (rates(factor, 6, seed) for seed in range(50))]
    assert sum(comparison.different for comparison in found) >= 48
    assert all(comparison.low < comparison.ratio < comparison.high for comparison in found)
    assert f"% {word} than A (95 % CI" in found[0].verdict


@pytest.mark.deep
def test_the_interval_covers_the_truth_as_often_as_it_says():
    found = [compare("B", b, "A", a) for b, a in (rates(1.02, 5, seed) for seed in range(1000))]
    assert 0.93 <= sum(each.low <= 1.02 <= each.high for each in found) / 1000 <= 0.97


@pytest.mark.deep
def test_equal_arms_differ_as_rarely_as_the_level_says():
    found = [compare("B", b, "A", a).different for b, a in (rates(1.0, 5, seed) for seed in range(1000))]
    assert 0.03 <= sum(found) / 1000 <= 0.07


@pytest.mark.parametrize(
    ("freedom", "t", "p"),
    [  # as tables have them, and far beyond
        (3, 3.1824463052837078, 0.05),
        (4, 0.9409645772351816, 0.4),
        (4, 8.610301581379522, 0.001),
        (9, 40.0, 1.8982998449339822e-11),
        (19, 40.0, 8.307757199338434e-20),
        (99, 0.5, 0.6181846440244062),
        (99, 40.0, 6.385085160287251e-63),
    ],
)
def test_students_t_is_that_of_the_tables(freedom, t, p):
    assert two_sided(t, freedom) == pytest.approx(p, rel=1e-11)
    assert student_t(p, freedom) == pytest.approx(t, rel=1e-11)


def test_is_the_paired_test():
    b, a = rates(1.03, 5, 0)
    logs = [math.log(x / y) for x, y in zip(b, a, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(5)
    comparison = compare("B", b, "A", a)
    assert comparison.p == pytest.approx(two_sided(statistics.fmean(logs) / error, 4))
    low, high = (math.exp(statistics.fmean(logs) + sign * 2.7764451051977934 * error) for sign in (-1, 1))
    assert (comparison.low, comparison.high) == pytest.approx((low, high))


def test_one_outlier_makes_no_difference():
    b, a = rates(1.0, 6, 3)
    b[2] *= 0.3
    comparison = compare("B", b, "A", a)
    assert not comparison.different
    assert comparison.verdict.startswith("no significant difference between B and A (measured -")
    assert comparison.detectable > 0.3, "and it is said that nothing smaller could have been seen"


@pytest.mark.deep
def test_what_is_called_detectable_is_detected():
    """A difference of that size is found in about POWER of the experiments."""
    detectable = sorted(compare("B", *_as_pair(rates(1.0, 6, seed))).detectable for seed in range(200))[100]
    found = [compare("B", *_as_pair(rates(1 + detectable, 6, seed))).different for seed in range(300)]
    assert 0.65 <= sum(found) / 300 <= 0.95


def _as_pair(pair):
    b, a = pair
    return b, "A", a


@pytest.mark.parametrize("n", range(MIN_PAIRS))
def test_few_pairs_conclude_nothing(n):
    comparison = compare("B", [1100.0] * n, "A", [1000.0] * n)
    assert not comparison.different
    assert comparison.p is None
    assert ("no round" if n == 0 else f"n = {n} is too few to tell") in comparison.verdict


def test_identical_values_are_no_difference():
    comparison = compare("B", [1000.0] * 5, "A", [1000.0] * 5)
    assert (comparison.p, comparison.different, comparison.ratio) == (1.0, False, 1.0)


@pytest.mark.deep
def test_many_comparisons_find_no_more_than_one():
    """Of five equal values the best is rarely called significantly above another."""
    found = 0
    for seed in range(200):
        base = rates(1.0, 5, seed)[1]
        rng = random.Random(seed)
        values = {f"v{i}": [x * rng.gauss(1, 0.01) for x in base] for i in range(5)}
        found += len(rank(values, dict.fromkeys(values, 1.0)).tied) < 5
    # The leader was picked as the highest, so a little above the level.
    assert found / 200 < 0.15


def test_the_highest_mean_wins_and_a_tie_goes_to_the_lower_variance():
    b, a = rates(1.2, 6, 0)
    ranking = rank({"25": a, "50": b}, {"25": 1.0, "50": 50.0})
    assert (ranking.leader, ranking.winner, ranking.tied) == ("50", "50", ["50"])
    b, a = rates(1.0, 6, 0)
    for steadier, other in (("25", "50"), ("50", "25")):
        ranking = rank({"25": a, "50": b}, {steadier: 1.0, other: 50.0})
        assert ranking.winner == steadier
        assert set(ranking.tied) == {"25", "50"}
        assert "without a significant difference" in ranking.verdict
    ranking = rank({"25": a[:3], "50": b[:3]}, {"25": 1.0, "50": 50.0})
    assert ranking.winner is None
    assert "no winner" in ranking.verdict

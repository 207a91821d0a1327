"""Is one variant of a run faster than another? Paired measurements, a test, and a verdict that claims no more.

Runs of one round are neighbours in time, so a slow hour of the machine falls on both of a pair. What is tested is the
logarithm of their ratio: Student's t-test on its mean, which takes the logarithms for normally distributed. An outlier
widens the interval; it does not make a difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.polynomial.legendre import leggauss

SIGNIFICANCE = 0.05
# Fewer are an anecdote, whatever a test makes of them.
MIN_PAIRS = 4
# A difference counts as one that could have been seen if it would have been in this share of such experiments.
POWER = 0.8
_POINTS, _WEIGHTS = leggauss(64)


@dataclass(frozen=True)
class Comparison:
    """One variant against another, over pairs of runs.

    Attributes:
        name, against: the variants; the first is compared with the second.
        pairs: n, rounds in which both have a result.
        ratio: geometric mean of the pairs' ratios; ``None`` without a pair.
        low, high: its confidence interval; ``None`` below ``MIN_PAIRS`` pairs.
        p: two-sided p-value of the ratio being 1; ``None`` below ``MIN_PAIRS`` pairs.
        detectable: the smallest difference, as a fraction, that ``POWER`` of such experiments would have found.
        significance: p below which there is a difference, corrected for the number of comparisons made.
    """

    name: str
    against: str
    pairs: int
    ratio: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None
    significance: float = SIGNIFICANCE

    @property
    def tested(self) -> bool:
        """Whether there were enough pairs."""
        return self.p is not None

    @property
    def different(self) -> bool:
        """Whether there is a significant difference."""
        return self.p is not None and self.p < self.significance

    @property
    def verdict(self) -> str:
        """What may be said, in one sentence without its full stop."""
        if self.ratio is None:
            return f"{self.name} against {self.against}: no round in which both have a result"
        change = f"{abs(self.ratio - 1):.1%}"
        if self.low is None or self.high is None or self.p is None or self.detectable is None:
            return (
                f"{self.name} against {self.against}: n = {self.pairs} is too few to tell (the test needs "
                f"{MIN_PAIRS} pairs); measured was {self.ratio - 1:+.1%}"
            )
        level = f"{100 * (1 - self.significance):.4g} %"
        test = f"n = {self.pairs} pairs, p = {self.p:.2g}"
        if not self.different:
            return (
                f"no significant difference between {self.name} and {self.against} (measured {self.ratio - 1:+.1%}, "
                f"{test}; differences under {self.detectable:.1%} could not be seen with n = {self.pairs})"
            )
        bounds = sorted((abs(self.low - 1), abs(self.high - 1)))
        return (
            f"{self.name} is {change} {'faster' if self.ratio > 1 else 'slower'} than {self.against} "
            f"({level} CI {bounds[0]:.1%} to {bounds[1]:.1%}, {test})"
        )

    def plain(self) -> dict[str, Any]:
        """As JSON types, verdict included."""
        return {**asdict(self), "different": self.different, "verdict": self.verdict}


def compare(
    name: str, values: Sequence[float], against: str, others: Sequence[float], comparisons: int = 1
) -> Comparison:
    """Compare two variants by the values of their runs, tokens/s for instance, paired by their place.

    Args:
        name: the variant that ``values`` are of, and ``against`` that of ``others``; all are positive.
        comparisons: how many are made in the same experiment; the significance level is divided by it (Bonferroni).
    """
    logs = [math.log(value / other) for value, other in zip(values, others, strict=True)]
    n, significance = len(logs), SIGNIFICANCE / comparisons
    if n < MIN_PAIRS:
        ratio = math.exp(statistics.fmean(logs)) if logs else None
        return Comparison(name, against, n, ratio, significance=significance)

    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(n)
    half = student_t(significance, n - 1) * error
    p = two_sided(abs(mean) / error, n - 1) if error else float(mean == 0)
    return Comparison(
        name, against, n, math.exp(mean),
        low=math.exp(mean - half), high=math.exp(mean + half), p=p,
        detectable=math.expm1(half + student_t(2 * (1 - POWER), n - 1) * error), significance=significance,
    )  # fmt: skip


def two_sided(t: float, freedom: int) -> float:
    """The probability that Student's t with so many degrees of freedom is further from 0 than ``t``.

    With t = √freedom · tan φ its density is proportional to cos φ to the power of freedom − 1.
    """
    return _tail(math.atan(t / math.sqrt(freedom)), freedom) / _tail(0.0, freedom)


def student_t(p: float, freedom: int) -> float:
    """The t whose `two_sided` probability is ``p``."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, freedom) > p * _tail(0.0, freedom) else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _tail(angle: float, freedom: int) -> float:
    """The integral of cos φ to the power of freedom − 1 from ``angle`` to π/2, by Gauss and Legendre."""
    half = (math.pi / 2 - angle) / 2
    # cos φ from the right end, where it is small and must keep its digits.
    return float(half * _WEIGHTS @ np.sin(half * (_POINTS + 1)) ** (freedom - 1))


@dataclass(frozen=True)
class Standing:
    """Which of several variants wins.

    Attributes:
        comparisons: the others against the leader.
        leader: the one with the highest mean.
        winner: the leader, or of those tied with it the one with the lowest variance; ``None`` if nothing was tested.
        tied: those without a significant difference to the leader, itself included.
    """

    comparisons: list[Comparison]
    leader: str
    winner: str | None
    tied: list[str]
    verdict: str


def rank(rates: dict[str, list[float]], deviations: dict[str, float]) -> Standing:
    """Find the winner: the highest mean, and among those that do not differ from it significantly the lowest variance.

    Args:
        rates: tokens/s of each variant's runs, paired by their place.
        deviations: standard deviation of tokens/s from step to step within the runs of each variant.
    """
    means = {name: statistics.fmean(values) for name, values in rates.items()}
    leader = max(means, key=lambda name: means[name])
    others = [name for name in rates if name != leader]
    comparisons = [compare(name, rates[name], leader, rates[leader], len(others)) for name in others]
    highest = f"{leader} has the highest mean, {means[leader]:,.0f} tokens/s"
    if not all(comparison.tested for comparison in comparisons):
        pairs = min(comparison.pairs for comparison in comparisons)
        verdict = f"no winner: {highest}, but n = {pairs} is too few to tell (the test needs {MIN_PAIRS} rounds)"
        return Standing(comparisons, leader, None, [], verdict)
    tied = [leader, *(comparison.name for comparison in comparisons if not comparison.different)]
    if len(tied) == 1:
        return Standing(comparisons, leader, leader, tied, f"{leader} wins: {highest}, significantly above the others")
    winner = min(tied, key=lambda name: deviations[name])
    verdict = (
        f"{winner} wins: {highest}, without a significant difference to {', '.join(tied[1:])}; of these the deviation "
        f"from step to step is lowest for {winner}, {deviations[winner]:,.0f} tokens/s"
    )
    return Standing(comparisons, leader, winner, tied, verdict)

"""What each run tests, and what a run of every case tests beyond it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_takes_every_case = False


def take_every_case(config: pytest.Config) -> None:
    """Read from pytest's options what this run takes, before any test is imported."""
    global _takes_every_case
    _takes_every_case = config.getoption("--every-case") or config.getoption("--hypothesis-profile") == "deep"


def takes_every_case() -> bool:
    """Whether this run takes what is marked `deep`, too."""
    return _takes_every_case


def some(cases: Iterable[Any], of_each_run: Iterable[Any]) -> list[Any]:
    """Cases as parameters of a test: those of each run, and the others marked `deep`."""
    kept = list(of_each_run)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.deep) for case in cases]

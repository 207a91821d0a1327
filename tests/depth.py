"""What each run tests, and what a deep search tests beyond it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def is_deep() -> bool:
    """Whether this run is a deep search."""
    return settings().max_examples >= settings.get_profile("deep").max_examples


def some(cases: Iterable[Any], of_each_run: Iterable[Any]) -> list[Any]:
    """Cases as parameters of a test: all of them in a deep search, those of each run in any."""
    kept = list(of_each_run)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.deep) for case in cases]

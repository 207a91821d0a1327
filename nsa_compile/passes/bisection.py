"""Search the pipeline for the pass or rewrite that makes a program wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_compile.passes.pipeline import pipeline

__all__ = ["first_failing", "passes_asked_for", "without_passes"]


def passes_asked_for(options: Mapping[str, Any]) -> list[str]:
    """Names of the passes that run with these options unless they are disabled."""
    return [p.name for p in pipeline() if p.option is None or options.get(p.option)]


def without_passes(later: Sequence[str], disabled: Sequence[str] = ()) -> tuple[str, ...]:
    """The `disable` option of a pipeline that ends before the passes `later`."""
    return tuple(dict.fromkeys([*disabled, *later]))


def first_failing(fails: Callable[[int], bool], good: int, bad: int) -> int:
    """A count that fails where one less does not, between `good`, which does not fail, and `bad`, which does."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return bad

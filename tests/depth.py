"""What each run tests, and what a run of every case tests beyond it."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

_takes_every_case = False


def take_every_case(config: pytest.Config) -> None:
    """Read from pytest's options what this run takes, before any test is imported."""
    global _takes_every_case
    _takes_every_case = config.getoption("--every-case") or config.getoption("--hypothesis-profile") == "deep"


def takes_every_case() -> bool:
    """Whether this run takes what is marked `deep`, too."""
    return _takes_every_case


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """What a usual run leaves out.

    `@pytest.mark.deep` marks a test, or one case of it. `@pytest.mark.deep(every=8, but=["a"])` leaves every eighth
    case of a table in each run, and those of the names given; `pytestmark = pytest.mark.deep(every=8, of_file=True)`
    every eighth case of a file.

    Raises:
        pytest.UsageError: no case has a name given.
    """
    number: Counter[str] = Counter()
    names: defaultdict[str, set[str]] = defaultdict(set)
    wanted: dict[str, set[str]] = {}
    out = []
    for item in items:
        mark = item.get_closest_marker("deep")
        if mark is None:
            continue
        case = item.callspec.id if hasattr(item, "callspec") else ""
        test = item.nodeid.partition("::")[0] if "of_file" in mark.kwargs else item.nodeid.removesuffix(f"[{case}]")
        names[test].add(case)
        wanted[test] = set(mark.kwargs.get("but", ()))
        every = mark.kwargs.get("every")
        if case not in wanted[test] and not (every and number[test] % every == every // 2):
            out.append(item)
        number[test] += 1
    for test, cases in wanted.items():
        if unknown := cases - names[test]:
            raise pytest.UsageError(f"{test}: marked deep but for {sorted(unknown)}, which no case of it is called")
    return out

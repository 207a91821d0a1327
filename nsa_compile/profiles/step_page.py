"""The profile of a training step as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_compile import page
from nsa_compile.branches import RANGES
from nsa_compile.page import Chart, Heading, Table, Text
from nsa_compile.profiles.attribution import OTHER
from nsa_compile.profiles.step_views import (
    OPERATOR_HEADERS,
    RANGE_HEADERS,
    TOP_OPERATORS,
    check_rows,
    operator_rows,
    range_rows,
    summary_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_page(profile: Mapping[str, Any], directory: Path) -> None:
    """Write ``profile.html`` to a directory; without matplotlib it has no pictures, and says so."""
    problems, charts = [], []
    pictures = {
        "Time of a step by phase and range, ms; mean of the profiled steps.": _ranges,
        f"The {TOP_OPERATORS} operators that took longest, ms a step.": _operators,
    }
    try:
        charts = [Chart(caption, page.draw(partial(make, profile))[0]) for caption, make in pictures.items()]
    except ImportError:
        problems.append("no pictures: matplotlib is not installed; pip install 'nsa-compile[plots]' brings it")
    checks = [(page.Cell("ok" if ok else "FAIL", "good" if ok else "bad"), text) for ok, text in check_rows(profile)]
    blocks = [
        Heading("Found"),
        Table(checks),
        Heading("Profiled"),
        Table(summary_rows(profile)),
        Text(
            f"The whole trace, for Perfetto or chrome://tracing: {profile['trace']}. Every figure below comes from it.",
            "quiet",
        ),
        Heading("Pictures"),
        *charts,
        Heading("Figures"),
        Table(range_rows(profile), RANGE_HEADERS, left=2),
        Table(operator_rows(profile), OPERATOR_HEADERS, left=2),
        Text(
            "A range's time is that outside of ranges within it. "
            "What is computed again for the backward pass counts as backward.",
            "quiet",
        ),
    ]
    page.write_page(directory / "profile.html", "Where a training step's time goes", directory, blocks, problems)


def _ranges(profile: Mapping[str, Any]) -> Figure:
    figure, axes = page.axes(3.4)
    phases = list(profile["phases"])
    colors = {name: f"C{index}" for index, name in enumerate(RANGES)} | {OTHER: page.QUIET}
    labelled: set[str] = set()
    left = dict.fromkeys(phases, 0.0)
    for row in profile["ranges"]:
        phase, branch, width = row["phase"], row["branch"], row["mean_s"] * 1e3
        name = "rest" if branch == OTHER else branch
        label = None if branch in labelled else name
        bars = axes.barh(phase, width, left=left[phase], color=colors[branch], label=label)
        page.tell_bars(bars, [f"{phase}, {name}: {width:.4g} ms"])
        labelled.add(branch)
        left[phase] += width
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.set_xlabel("ms")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _operators(profile: Mapping[str, Any]) -> Figure:
    rows = profile["operators"][:TOP_OPERATORS]
    figure, axes = page.axes(0.8 + 0.25 * len(rows))
    bars = axes.barh(range(len(rows)), [row["mean_s"] * 1e3 for row in rows])
    page.tell_bars(bars, [f"{row['name']}: {row['mean_s'] * 1e3:.4g} ms" for row in rows])
    names = [name if len(name) <= 28 else f"{name[:14]}…{name[-13:]}" for name, *_ in operator_rows(profile)]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms")
    return figure

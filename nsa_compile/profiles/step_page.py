"""The profile of a training step as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_compile.files import replace
from nsa_compile.page import embed, png, render
from nsa_compile.profiles.attribution import BRANCHES, OTHER
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


def write_page(profile: Mapping[str, Any], directory: Path) -> Path:
    """Write ``profile.html`` to a directory; without matplotlib it has no pictures, and says so."""
    problems, pictures = [], []
    try:
        for caption, figure in (
            ("Time of a step by phase and range, ms; mean of the profiled steps.", _ranges(profile)),
            (f"The {TOP_OPERATORS} operators that took longest, ms a step.", _operators(profile)),
        ):
            pictures.append((caption, embed(png(figure))))
    except ImportError:
        problems.append("no pictures: matplotlib is not installed; pip install 'nsa-compile[plots]' brings it")
    page = render(
        "nsa_compile.profiles",
        "step_page.html",
        name="Where a training step's time goes",
        directory=directory,
        problems=problems,
        pictures=pictures,
        checks=check_rows(profile),
        summary=summary_rows(profile),
        tables=[(RANGE_HEADERS, range_rows(profile)), (OPERATOR_HEADERS, operator_rows(profile))],
        trace=profile["trace"],
    )
    path = directory / "profile.html"
    replace(path, page.encode())
    return path


def _ranges(profile: Mapping[str, Any]) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    phases = list(profile["phases"])
    colors = {name: colormaps["tab10"](index) for index, name in enumerate(BRANCHES)} | {OTHER: "lightgray"}
    labelled: set[str] = set()
    left = dict.fromkeys(phases, 0.0)
    for row in profile["ranges"]:
        phase, branch, width = row["phase"], row["branch"], row["mean_s"] * 1e3
        label = None if branch in labelled else "rest" if branch == OTHER else branch
        axes.barh(phase, width, left=left[phase], color=colors[branch], label=label, edgecolor="white", linewidth=0.5)
        labelled.add(branch)
        left[phase] += width
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.set_xlabel("ms")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _operators(profile: Mapping[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    rows = profile["operators"][:TOP_OPERATORS]
    figure = Figure(figsize=(6.4, 0.8 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [row[0] for row in operator_rows(profile)]
    axes.barh(range(len(rows)), [row["mean_s"] * 1e3 for row in rows])
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms")
    return figure

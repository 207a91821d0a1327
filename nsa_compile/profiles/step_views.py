"""The profile of a training step for people: tables in the terminal, and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_compile import page
from nsa_compile.branches import RANGES
from nsa_compile.models.variant import find
from nsa_compile.page import Chart, Heading, Table, Text
from nsa_compile.profiles.attribution import OTHER
from nsa_compile.profiles.rendering import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP_OPERATORS = 12


def render_step(profile: Mapping[str, Any]) -> str:
    """The profile for a terminal: tables first, what was found last."""
    parts = [
        "\n".join(f"{label:<9}  {text}" for label, text in summary_rows(profile)),
        table(range_rows(profile), RANGE_HEADERS, left=2),
        table(operator_rows(profile), OPERATOR_HEADERS, left=2),
        "\n".join(f"{'ok  ' if ok else 'FAIL'}  {text}" for ok, text in check_rows(profile)),
    ]
    return "\n\n".join(parts)


RANGE_HEADERS = ("phase", "range", "ms", "least–most", "share")


def range_rows(profile: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Each phase, then its ranges where it has some, then the whole step."""
    rows = []
    for phase, figures in profile["phases"].items():
        rows.append((phase, "", *_figures(figures)))
        ranges = [row for row in profile["ranges"] if row["phase"] == phase]
        if len(ranges) > 1:
            rows += [("", "rest" if row["branch"] == OTHER else row["branch"], *_figures(row)) for row in ranges]
    return [*rows, ("step", "", *_figures(profile["step"] | {"share": 1.0}))]


OPERATOR_HEADERS = ("operator", "mostly in", "calls", "ms", "share")


def operator_rows(profile: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """The operators that took longest."""
    return [
        (
            _short(row["name"]),
            row["phase"] if row["branch"] == OTHER else f"{row['phase']}, {row['branch']}",
            f"{row['calls']:,.4g}",
            _ms(row["mean_s"]),
            f"{row['share']:.1%}",
        )
        for row in profile["operators"][:TOP_OPERATORS]
    ]


def summary_rows(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was profiled, and how long it took with and without the profiler."""
    settings, wall = profile["settings"], profile["wall"]
    compiled = f"compiled with {settings['compiled']}" if settings["compiled"] else "not compiled"
    sizes = find(settings["attention"]).sizes(settings)
    cost = wall["profiled"]["median_s"] / wall["plain"]["median_s"] - 1
    rows = [
        (
            "model",
            f"{settings['attention']} attention{sizes}, {settings['layers']} layers, {settings['parameters']:,} "
            f"parameters, {settings['dtype']}, {compiled}",
        ),
        (
            "step",
            f"{settings['batch_size']} × {settings['seq_len']} tokens, {settings['accumulate']} accumulated, "
            f"{settings['device']}, {settings['processes']} processes, {settings['threads']} threads each",
        ),
        (
            "time",
            f"median {_ms(wall['plain']['median_s'])} ms ({_ms(wall['plain']['min_s'])}–"
            f"{_ms(wall['plain']['max_s'])}, n = {settings['steps']}); under the profiler {cost:+.1%}, and so below",
        ),
        ("left out", f"{settings['warmup']} steps before, with the compilation: {profile['warmup_s']:.1f} s"),
    ]
    kinds = {kind: figures["share"] for kind, figures in profile["kinds"].items()}
    busy = ", ".join(f"{name} {kinds[kind]:.1%}" for kind, name in KINDS.items() if kind in kinds)
    rows.append(("at work", busy))
    sent = profile["communication"]
    if sent["total_s"]:
        hidden = sent["overlapped_s"] / sent["total_s"]
        rows.append(("messages", f"{_ms(sent['total_s'])} ms under way, {hidden:.0%} of it behind operators"))
    return rows


KINDS = {"operator": "operators", "communication": "communication", "host": "Python and dispatch"}


def check_rows(profile: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Each check as a sentence with its number, and its culprits."""
    checks = profile["checks"]
    total, python, syncs, compiled = (checks[n] for n in ("sum", "python_hot_spot", "host_syncs", "compiled_before"))
    rows = [(total["ok"], f"the parts add up to {1 + total['value']:.2%} of the clock's time (±{total['limit']:.0%})")]
    recompiled = (
        "nothing" if compiled["ok"] else f"{compiled['value']} graphs, so the figures are not those of a warm step"
    )
    rows.append((compiled["ok"], f"compiled while steps were measured: {recompiled}"))
    if python["ok"]:
        rows.append((True, f"no Python hot spot: no function takes more than {python['value']:.1%} of the step "
                     f"(limit {python['limit']:.0%})"))  # fmt: skip
    for place in python["places"] if not python["ok"] else ():
        if place["share"] > python["limit"]:
            rows.append((False, f"Python hot spot: {place['where']} takes {place['share']:.0%} of the step "
                         f"(limit {python['limit']:.0%})"))  # fmt: skip
    if syncs["ok"]:
        expected = sum(row["calls"] for row in profile["syncs"])
        rows.append((True, f"no host sync in data, forward or backward ({expected:g} a step elsewhere)"))
    for place in syncs["places"]:
        rows.append((False, f"host sync: {place['name']} in {place['phase']}, {place['calls']} a step, at "
                     f"{place['where']}"))  # fmt: skip
    return rows


def _figures(figures: Mapping[str, float]) -> tuple[str, str, str]:
    return _ms(figures["mean_s"]), f"{_ms(figures['min_s'])}–{_ms(figures['max_s'])}", f"{figures['share']:.1%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 0.1 else 2}f}"


def _short(name: str) -> str:
    """Inductor puts all that it fused into a name; the ends tell kernels apart."""
    return name if len(name) <= 48 else f"{name[:30]}…{name[-17:]}"


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

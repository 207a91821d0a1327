"""An experiment for people: a table, a picture, a page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from nsa_compile import page
from nsa_compile.files import replace
from nsa_compile.page import Chart, Heading, Items, Table, Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CHART_CAPTION = "Tokens per second of each run (dots; runs of one round are joined) and their mean (bar)."


def render_text(record: dict[str, Any]) -> str:
    """The record of an experiment as text for a terminal of 100 columns: what differs between variants as a table."""
    head, *rows = _rows(record)
    names = [_arm_name(record, arm) for arm in record["arms"]]
    columns = list(zip(head, *rows, strict=True))[1:]
    measured, sizes = columns[:MEASURED], columns[MEASURED:]
    shown = [*measured, *(column for column in sizes if len(set(column[1:])) > 1)]
    table = [(name, *row) for name, *row in zip(names, *(column[1:] for column in shown), strict=True)]
    lines = [tabulate(table, ("variant", *(column[0] for column in shown)), disable_numparse=True, maxcolwidths=[36])]
    if same := [f"{name} {values[0]}" for name, *values in sizes if len(set(values)) == 1 and values[0] != "–"]:
        lines += ["", textwrap.fill(f"The same in all: {', '.join(same)}.", 100)]
    lines.append("")
    if len(record["comparisons"]) > 1:
        lines += [comparison["verdict"] for comparison in record["comparisons"]]
    lines += [record["verdict"], *(f"note: {note}" for note in record["notes"])]
    return "\n".join(lines)


def _arm_name(record: dict[str, Any], arm: dict[str, Any]) -> str:
    """The name of a variant, and what it is where the name does not say so."""
    if record["kind"] != "ab":
        return str(arm["name"])
    return f"{arm['name']}: {', '.join(arm['overrides']) or 'as configured'}"


def write_views(record: dict[str, Any], directory: Path) -> list[Path]:
    """Write ``experiment.html`` and, where matplotlib is installed and there is a run, ``experiment.png``."""
    files, charts = [], []
    if find_spec("matplotlib") and any(arm["runs"] for arm in record["arms"]):
        vectors, pixels = page.draw(lambda: figure(record))
        charts.append(Chart(CHART_CAPTION, vectors))
        files.append(directory / "experiment.png")
        replace(files[-1], pixels)
    files.append(directory / "experiment.html")
    problems = [
        f"{failure['arm']}, repeat {failure['repeat']}: exit code {failure['exit_code']}, {failure['last_line']}"
        for failure in record["failures"]
    ]
    page.write_page(files[-1], record["title"], directory, page_blocks(record, charts), problems)
    return files


def page_blocks(record: dict[str, Any], charts: Sequence[Chart]) -> list[page.Block]:
    """What the page shows."""
    head, *arms = _rows(record)
    runs = {(arm["name"], run["repeat"]): run for arm in record["arms"] for run in arm["runs"]}
    done = [(name, runs[name, repeat]) for name, repeat in record["order"] if (name, repeat) in runs]
    return [
        Heading("Verdict"),
        Text(record["verdict"]),
        *(Text(note, "quiet") for note in record["notes"]),
        Heading("Variants"),
        Table(arms, head, left=1),
        *charts,
        Heading("Comparisons"),
        Items([comparison["verdict"] for comparison in record["comparisons"]] or ["None."]),
        Heading("Runs"),
        Text(
            f"In this order, drawn with seed {record['seed']}. Mean and deviation are over the steps named, at the end "
            "of a run."
        ),
        Table(
            [
                (
                    name,
                    str(run["repeat"]),
                    _number(run["tokens_per_s"]),
                    _number(run["deviation"]),
                    f"{run['first_step']}–{run['last_step']}",
                    run["directory"],
                )
                for name, run in done
            ],
            ("variant", "repeat", "tokens/s", "deviation", "steps", "directory"),
            left=1,
        ),
    ]


def figure(record: dict[str, Any]) -> Figure:
    """Tokens/s of every run by arm, the runs of a round joined."""
    drawing, axes = page.axes(3)
    arms = record["arms"]
    for repeat in range(1, record["repeats"] + 1):
        points = [
            (place, run["tokens_per_s"])
            for place, arm in enumerate(arms)
            for run in arm["runs"]
            if run["repeat"] == repeat
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", linewidth=0.6, markersize=5)
    for place, arm in enumerate(arms):
        if arm["tokens_per_s"] is not None:
            color = axes.xaxis.label.get_color()
            axes.hlines(arm["tokens_per_s"], place - 0.15, place + 0.15, color=color, linewidth=2)
    axes.set_xticks(range(len(arms)), [arm["name"] for arm in arms])
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_ylabel("tokens/s")
    axes.grid(True, axis="y", linewidth=0.5)
    return drawing


# Columns after the first that hold what was measured; sizes follow.
MEASURED = 4


def _rows(record: dict[str, Any]) -> list[list[str]]:
    head = [
        "variant", "n", "tokens/s", "between runs", "step to step", "S", "batch", "layers", "parameters", "n selected",
        "window", "dtype", "steps", "processes", "threads", "bucket, MB",
    ]  # fmt: skip
    rows = [head]
    for arm in record["arms"]:
        sizes = arm["sizes"]
        rows.append(
            [
                arm["name"],
                str(len(arm["runs"])),
                *(_number(arm[key]) for key in ("tokens_per_s", "between_runs", "within_runs")),
                str(sizes["seq_len"]),
                f"{sizes['batch_size']} × {sizes['accumulate']}",
                str(sizes["layers"]),
                _number(sizes["parameters"]),
                *(_size(sizes[key]) for key in ("num_selected", "window", "dtype", "steps", "processes")),
                _number(sizes["threads"]),
                "–" if sizes["bucket_mb"] is None else f"{sizes['bucket_mb']:.3g}",
            ]
        )
    return rows


def _size(value: Any) -> str:
    return "–" if value is None else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"

"""An experiment for people: a table, a picture, a page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from nsa_compile.files import replace
from nsa_compile.page import embed, png, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render_text(record: dict[str, Any]) -> str:
    """The record of an experiment as text for a terminal."""
    head, *rows = _rows(record)
    lines = [tabulate(rows, head, disable_numparse=True), ""]
    if len(record["comparisons"]) > 1:
        lines += [comparison["verdict"] for comparison in record["comparisons"]]
    lines += [record["verdict"], *(f"note: {note}" for note in record["notes"])]
    return "\n".join(lines)


def write_views(record: dict[str, Any], directory: Path) -> list[Path]:
    """Write ``experiment.html`` and, where matplotlib is installed and there is a run, ``experiment.png``."""
    files = []
    picture = png(figure(record)) if find_spec("matplotlib") and any(arm["runs"] for arm in record["arms"]) else None
    if picture is not None:
        files.append(directory / "experiment.png")
        replace(files[-1], picture)
    page = render_page(record, directory, picture)
    files.append(directory / "experiment.html")
    replace(files[-1], page.encode("utf-8", errors="replace"))
    return files


def render_page(record: dict[str, Any], directory: Path, picture: bytes | None) -> str:
    """The page; whatever comes from the record is escaped."""
    runs = {(arm["name"], run["repeat"]): run for arm in record["arms"] for run in arm["runs"]}
    return render(
        __package__,
        "experiment.html",
        name=record["title"],
        directory=directory,
        problems=[
            f"{failure['arm']}, repeat {failure['repeat']}: exit code {failure['exit_code']}, {failure['last_line']}"
            for failure in record["failures"]
        ],
        record=record,
        arms=_rows(record),
        runs=[(name, runs[name, repeat]) for name, repeat in record["order"] if (name, repeat) in runs],
        picture=embed(picture) if picture is not None else None,
    )


def figure(record: dict[str, Any]) -> Figure:
    """Tokens/s of every run by arm, the runs of a round joined."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7.5, 4), layout="constrained")
    axes = drawing.subplots()
    arms = record["arms"]
    for repeat in range(1, record["repeats"] + 1):
        points = [
            (place, run["tokens_per_s"])
            for place, arm in enumerate(arms)
            for run in arm["runs"]
            if run["repeat"] == repeat
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", linewidth=0.6, alpha=0.6, markersize=5)
    for place, arm in enumerate(arms):
        if arm["tokens_per_s"] is not None:
            axes.hlines(arm["tokens_per_s"], place - 0.15, place + 0.15, color="black", linewidth=2)
    axes.set_xticks(range(len(arms)), [arm["name"] for arm in arms])
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_ylabel("tokens/s")
    axes.grid(True, axis="y", linewidth=0.3)
    return drawing


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
                *(str(sizes[key]) for key in ("num_selected", "window", "dtype", "steps", "processes")),
                _number(sizes["threads"]),
                "–" if sizes["bucket_mb"] is None else f"{sizes['bucket_mb']:.3g}",
            ]
        )
    return rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"

"""Measurements as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_times(
    path: Path, title: str, sizes: str, series: Mapping[str, Sequence[tuple[int, Mapping[str, Any]]]]
) -> None:
    """Draw milliseconds against sequence length, both logarithmic, as a PNG: medians joined by lines, ranges as bars.

    Args:
        sizes: what was measured and where, in small print below.
        series: a label to pairs of sequence length and timing, as `measure.summarize` makes one. What was not measured
            leaves a gap.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    # A Figure of its own, without pyplot: no global state and no display needed.
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    lengths = sorted({length for points in series.values() for length, _ in points})
    for label, points in series.items():
        measured = [(length, timing) for length, timing in points if "median_s" in timing]
        medians = [timing["median_s"] * 1e3 for _, timing in measured]
        below = [(timing["median_s"] - timing["min_s"]) * 1e3 for _, timing in measured]
        above = [(timing["max_s"] - timing["median_s"]) * 1e3 for _, timing in measured]
        style = "s--" if label.startswith("dense") else "o-"
        x = [length for length, _ in measured]
        axes.errorbar(x, medians, (below, above), fmt=style, label=label, capsize=3, linewidth=1.4, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("sequence length S, tokens")
    axes.set_ylabel("time, ms (median; bars: minimum to maximum)")
    figure.suptitle(title, fontsize="large")
    axes.set_title(textwrap.fill(sizes, 110), fontsize="small")
    axes.grid(True, which="both", linewidth=0.3, alpha=0.6)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")

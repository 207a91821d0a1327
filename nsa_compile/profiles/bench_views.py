"""What `nsa-compile bench` shows of its rows: sizes, a table, and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_compile.machine.matmul_rate import impossible
from nsa_compile.profiles.measure import show
from nsa_compile.profiles.rendering import table, with_unit

Row = Mapping[str, Any]
Series = dict[str, list[tuple[int, Mapping[str, Any]]]]


@dataclass(frozen=True)
class View:
    """How one benchmark is shown: its title, a function for its table, and labels of what its picture shows of rows."""

    title: str
    table: Callable[[Sequence[Row]], str]
    labels: Mapping[str, str]

    def series(self, rows: Sequence[Row]) -> Series:
        """The lines of the picture: for each direction, where there are several; of all patterns the random one."""
        found: Series = {}
        for row in rows:
            if row.get("pattern", "random") == "random":
                direction = f", {row['direction']}" if "direction" in row else ""
                for name, label in self.labels.items():
                    found.setdefault(label + direction, []).append((row["seq_len"], row[name]))
        return found


def describe(settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Sizes, and where it was measured, on one line."""
    machine = environment["machine"]
    name = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    sizes = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"{sizes}; {name}, threads {machine['torch_threads']}, torch {environment['packages']['torch']}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"


def _operators(row: Row) -> str:
    """`compressed: compressed_attention (cpu)`, a line a branch: its operator and what runs it."""
    implementations = row["implementations"]
    loop = "" if row["batched"] else "STAYED A LOOP over the tokens; see nsa-compile passes explain\n"
    return loop + "\n".join(
        f"{branch}: {operator}{f' ({implementations[branch]})' if branch in implementations else ''}"
        for branch, operator in sorted(row["operators"].items())
    )


def _attention_table(rows: Sequence[Row]) -> str:
    memory = any("peak_bytes" in row for row in rows)
    headers = ["S", "direction", "NSA, ms (range)", "dense, ms (range)", "dense / NSA"]
    measured = table(
        (
            [row["seq_len"], row["direction"], show(row["sparse"]), show(row["dense"]), _times(row["ratio"])]
            + ([f"{_bytes(row, 'sparse')} / {_bytes(row, 'dense')}"] if memory else [])
            for row in rows
        ),
        headers + (["peak memory, NSA / dense"] if memory else []),
        left=2,
    )
    chosen = ((row["seq_len"], row["direction"], _operators(row)) for row in rows)
    return f"{measured}\n\n{table(chosen, ('S', 'direction', 'operators'), left=3)}"


def _bytes(row: Row, name: str) -> str:
    value = row["peak_bytes"].get(name)
    return "not measured" if value is None else with_unit(value, "B")


def _prefill_table(rows: Sequence[Row]) -> str:
    return table(
        (
            (
                row["seq_len"], show(row["eager"]), show(row["compiled"]), show(row["dense"]), _times(row["ratio"]),
                _times(row["dense_ratio"]), "yes" if row["batched"] else "no",
            )
            for row in rows
        ),
        (
            "S", "loop, ms (range)", "compiled, ms (range)", "dense, ms (range)", "loop / compiled",
            "dense / compiled", "batched",
        ),
        left=1,
    )  # fmt: skip


def _selection_table(rows: Sequence[Row]) -> str:
    def difference(row: Row, dtype: str) -> str:
        found = row["parity"][dtype]["max_abs_difference"]
        gradients = [found[name] for name in ("dq", "dk", "dv")]
        worst = None if None in gradients else max(gradients)
        return f"{_number(found['out'])} / {_number(worst)}"

    measured = table(
        (
            (
                row["seq_len"], row["pattern"], difference(row, "float32"), difference(row, "float64"),
                "yes" if row["equal"] else "NO", show(row["v1"]), show(row["v2"]), show(row["dense"]),
                _times(row["ratio"]),
            )
            for row in rows
        ),
        (
            "S", "pattern", "float32: out / gradients", "float64: out / gradients", "equal", "v1, ms (range)",
            "v2, ms (range)", "dense, ms (range)", "v1 / v2",
        ),
        left=2,
    )  # fmt: skip
    tolerances = ", ".join(f"{p['tolerance']:g} ({dtype})" for dtype, p in rows[0]["parity"].items())
    return (
        f"{measured}\n\nDifferences are the largest absolute ones between v1 and v2; equal means within {tolerances}\n"
        "of the largest value, or of 1 if that is more. Times are of forward + backward in float32; v1 is the loop,\n"
        "v2 the operator, dense is causal SDPA over all keys."
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _step_table(rows: Sequence[Row]) -> str:
    measured = table(
        (
            (
                row["seq_len"], label, f"{row[name]['parameters']:,}", show(row[name]), _spread(row[name]),
                _rate(row[name]), _share(row, name), _times(row["ratio"]) if name == "sparse" else "",
            )
            for row in rows
            for name, label in (("sparse", "NSA"), ("dense", "dense"))
        ),
        ("S", "attention", "parameters", "step, ms (range)", "std, ms", "tokens/s", "MFU of GFLOP/s", "dense / NSA"),
        left=2,
    )  # fmt: skip
    chosen = table(((row["seq_len"], _operators(row)) for row in rows), ("S", "operators"), left=2)
    doubts = [f"S = {row['seq_len']}: {doubt}" for row in rows for doubt in _doubts(row)]
    return "\n\n".join([measured, *doubts, chosen])


def _doubts(row: Row) -> list[str]:
    """Why the figures of a row are in doubt."""
    mfus = [row[name].get("mfu") for name in ("sparse", "dense")]
    return [doubt for doubt in (row["busy"], *map(impossible, mfus)) if doubt]


def _spread(timing: Row) -> str:
    return "–" if timing.get("std_s") is None else f"{timing['std_s'] * 1e3:,.1f}"


def _rate(timing: Row) -> str:
    return f"{timing['tokens_per_s']:,.0f}" if "tokens_per_s" in timing else "not measured"


def _share(row: Row, name: str) -> str:
    """MFU, and the peak that it is a fraction of."""
    if "mfu" not in row[name]:
        return "–"
    mark = " impossible!" if impossible(row[name]["mfu"]) else ""
    return f"{row[name]['mfu']:.1%}{mark} of {row['peak_flops'] / 1e9:,.0f}"


VIEWS = {
    "attention": View(
        "NSA attention against dense attention", _attention_table, {"sparse": "NSA", "dense": "dense causal SDPA"}
    ),
    "prefill": View(
        "Forward + backward of the model: loop, compiled, dense",
        _prefill_table,
        {"eager": "NSA, loop over the tokens", "compiled": "NSA, compiled", "dense": "dense, compiled"},
    ),
    "selection": View(
        "Selected attention: loop (v1) against operator (v2)",
        _selection_table,
        {"v1": "v1 (loop), random pattern", "v2": "v2 (operator), random pattern", "dense": "dense causal SDPA"},
    ),
    "step": View("Training step, NSA against dense attention", _step_table, {"sparse": "NSA", "dense": "dense"}),
}


def plot_times(path: Path, title: str, sizes: str, series: Series) -> None:
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

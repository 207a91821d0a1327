"""The profile of the passes as tables, pictures and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_compile import page
from nsa_compile.page import Cell, Chart, Code, Heading, Items, Table, Text
from nsa_compile.profiles.measure import show
from nsa_compile.profiles.rendering import estimate_cells, table, with_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


def label(row: Row) -> str:
    """The name of a prefix's last pass, as it stands in tables and pictures."""
    return f"{row['passes']} {row['name'] or 'captured'}"


def render_profile(record: Mapping[str, Any]) -> str:
    """The record for a terminal: what each pass did, then what the block costs after it."""
    rows, eager = record["prefixes"], record["eager_error"]
    did = table([[label(row), *work_cells(row)] for row in rows], ("passes", *WORK))
    costs = table([[label(row), *cost_cells(row)] for row in rows], ("after", *COST))
    findings = [f"  {kind:8} {text}" for row in rows for kind, text in row_findings(row, with_name=True)]
    parts = [headline(record), did, costs, notes(record), "\n".join(findings)]
    parts.append(
        f"The eager loop itself is off by {eager['value']:.2g} (output) and {eager['gradient']:.2g} (gradients)."
    )
    return "\n\n".join(part for part in parts if part)


def headline(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    return (
        f"One block ({settings['attention']} attention) of {settings['batch_size']} × {settings['seq_len']} tokens, "
        f"{settings['dtype']}, nested backend {settings['nested']}, n = {settings['repeats']} timed runs in turns"
    )


WORK = ("pass", "graph", "nodes", "operators", "arithmetic", "bytes moved", "peak, est.", "matches", "declines")


def work_cells(row: Row) -> list[str]:
    """What the last pass of a prefix did, in the columns of `WORK`."""
    cost = row["estimate"]
    verdict = "skipped" if row["skipped"] else {True: "changed", False: "as it was", None: "–"}[row["changed"]]
    return [
        "–" if row["seconds"] is None else f"{row['seconds'] * 1e3:.1f} ms",
        "captured" if row["passes"] == 0 else verdict,
        "–" if "nodes_after" not in row else f"{row['nodes_before']} → {row['nodes_after']}",
        *(["–"] * 4 if cost is None else estimate_cells(cost)),
        str(len(row["matches"])),
        str(len(row["declines"])),
    ]


COST = ("forward, ms", "backward, ms", "peak memory", "kernels", "extern", "compile", "output error", "gradient error")


def cost_cells(row: Row) -> list[str]:
    """What the block costs after a prefix, in the columns of `COST`."""
    if row["not_measured"]:
        return ["not measured", *["–"] * (len(COST) - 1)]
    kernels, peak, error = row["kernels"], row["peak_bytes"], row["error"]
    sign = "" if error["explained"] else " !"
    return [
        show(row["forward"]),
        show(row["backward"]),
        "–" if peak is None else with_unit(peak, "B"),
        "–" if kernels is None else str(kernels["generated"]),
        "–" if kernels is None else str(kernels["extern"]),
        f"{row['compile_s']:.1f} s{' (cached)' if row['inductor_cache_hit'] else ''}",
        f"{error['value']:.2g}{sign}",
        f"{error['gradient']:.2g}{sign}",
    ]


def notes(record: Mapping[str, Any]) -> str:
    """What the figures mean, and which are missing."""
    rows = record["prefixes"]
    told = [
        "Times: median (range); compilation and a warm-up are not in them. Errors: against the uncompiled block in "
        "float64, root mean square, relative; ! marks what rounding does not explain."
    ]
    if any(row.get("inductor_cache_hit") for row in rows):
        told.append("(cached): Inductor had compiled this before; its compile time says nothing about a first start.")
    told += [f"{label(row)} was not measured: {row['not_measured']}." for row in rows if row["not_measured"]]
    return "\n".join(told)


def row_findings(row: Row, with_name: bool = False) -> list[tuple[str, str]]:
    """Matches, declines and reasons of a pass, each with its kind."""
    name = f"{row['name']}: " if with_name else ""
    found = [("match", f"{name}{match}") for match in row["matches"]]
    found += [("decline", f"{name}{d['op']} at {d['location']}: {d['reason']}") for d in row["declines"]]
    return found + ([("skipped", f"{name}{row['skipped']}")] if row["skipped"] else [])


def write_profile_page(path: Path, record: Mapping[str, Any], graphs: Sequence[str]) -> None:
    """Write the record with its pictures and graphs as one HTML page that needs nothing else."""
    rows, machine, eager = record["prefixes"], record["machine"], record["eager_error"]
    charts = [Chart(CAPTIONS[name], page.draw(make)[0], name) for name, make in figures(record)]
    last_row = [*[""] * (len(COST) - 2), f"{eager['value']:.2g}", f"{eager['gradient']:.2g}"]
    measured = [
        ("matrix products", f"{machine['flops_per_s'] / 1e9:.1f} GFLOP/s, measured"),
        ("copies", f"{machine['bytes_per_s'] / 1e9:.1f} GB/s read and written, measured"),
    ]
    environment = [*record["environment"]["machine"].items(), *record["environment"]["packages"].items()]
    blocks = [
        Text(f"{headline(record)}."),
        Heading("What each pass did"),
        Table(
            [[label(row), *work_cells(row), *_links(row)] for row in rows],
            ("passes", *WORK, "before", "after"),
            left=1,
        ),
        Heading("What the block costs after it"),
        Table(
            [*([label(row), *cost_cells(row)] for row in rows), ["the eager loop", *last_row]],
            ("after", *COST),
            left=1,
        ),
        *(Text(note, "quiet") for note in notes(record).splitlines()),
        Heading("Pictures" if charts else "No pictures: nothing could be measured"),
        *charts,
        Heading("Matches and declines"),
        *(block for row in rows for block in _findings(row)),
        Heading("Graphs"),
        Text("Readable Python, with the source lines that the nodes come from.", "quiet"),
        *(Code(graph, title(rows, n), f"graph-{n}") for n, graph in enumerate(graphs)),
        Heading("Machine"),
        Table([*measured, *((name, str(value)) for name, value in environment)]),
    ]
    page.write_page(path, "Passes", path, blocks)


def _links(row: Row) -> list[str | Cell]:
    """To the graphs before and after a pass."""
    numbers = (row["graph_before"], row["graph_after"])
    return ["" if n is None else Cell(f"graph {n}", href=f"#graph-{n}") for n in numbers]


def _findings(row: Row) -> list[page.Block]:
    found = row_findings(row)
    items = [Cell(f"{kind}: {text}", "bad" if kind == "decline" else "") for kind, text in found]
    return [Heading(label(row), level=3), Items(items)] if found else []


def title(rows: Sequence[Row], number: int) -> str:
    """Which passes a graph comes before and after."""
    after = [row["name"] for row in rows if row["graph_after"] == number]
    before = [row["name"] for row in rows if row["graph_before"] == number]
    return f"after {', '.join(after)}" if after else f"before {before[0]}"


CAPTIONS = {
    "time": "Median time of forward and backward after each pass; each bar begins where the one before ended, on a "
    "logarithmic scale.",
    "roofline": "Arithmetic rate of the forward pass over its arithmetic intensity, both from estimated FLOPs and "
    "bytes as if no operator were fused: a point above the slope shows what fusion saved. The roof is measured: matrix "
    "products and copies.",
    "graphs": "Nodes of the graph, and operators that run in a forward pass: a loop's body runs for each token.",
}


def figures(record: Mapping[str, Any]) -> list[tuple[str, Callable[[], Figure]]]:
    """Name and maker of the pictures of what there are figures for."""
    rows = record["prefixes"]
    estimated = [row for row in rows if row["estimate"]]
    timed = [row for row in rows if "median_s" in row["forward"]]
    placed = [row for row in timed if row["estimate"] and row["estimate"]["flops"]]
    made: dict[str, Callable[[], Figure]] = {}
    if timed:
        made["time"] = lambda: _waterfall(timed)
    if placed:
        made["roofline"] = lambda: _roofline(placed, record["machine"])
    if estimated:
        made["graphs"] = lambda: _sizes(estimated)
    return list(made.items())


def _waterfall(rows: Sequence[Row]) -> Figure:
    figure, axes = page.axes(0.6 + 0.3 * (len(rows) + 1))
    totals = [(row["forward"]["median_s"] + row["backward"]["median_s"]) * 1e3 for row in rows]
    floor = min(totals) / 2
    names = [label(row) for row in rows]
    axes.barh(names[0], totals[0] - floor, left=floor)
    for name, before, after in zip(names[1:], totals, totals[1:], strict=False):
        axes.barh(name, abs(after - before), left=min(before, after), color="C2" if after < before else "C3")
        axes.plot([after, after], [name, name], marker="|", markersize=14, color=axes.xaxis.label.get_color())
    axes.barh("in the end", totals[-1] - floor, left=floor, color="C0")
    ends = [totals[0], *map(max, totals, totals[1:]), totals[-1]]  # where each bar ends on the right
    for name, total, end in zip([*names, "in the end"], [*totals, totals[-1]], ends, strict=True):
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{total:,.{1 if total >= 10 else 3}f} ms", (end, name), **place)
    axes.set_xscale("log")
    axes.set_xlim(floor, max(totals) * 6)  # room for the numbers
    axes.invert_yaxis()
    axes.set_xlabel("forward + backward, ms")
    axes.grid(True, axis="x", linewidth=0.3, alpha=0.6)
    return figure


def _roofline(rows: Sequence[Row], machine: Mapping[str, float]) -> Figure:
    import numpy as np

    figure, axes = page.axes(4.4)
    points = [
        (r["estimate"]["flops"] / r["estimate"]["bytes_moved"], r["estimate"]["flops"] / r["forward"]["median_s"])
        for r in rows
    ]
    ridge = machine["flops_per_s"] / machine["bytes_per_s"]
    intensities = np.geomspace(min(ridge, *(x for x, _ in points)) / 4, max(ridge, *(x for x, _ in points)) * 4, 200)
    roof = np.minimum(machine["flops_per_s"], intensities * machine["bytes_per_s"])
    axes.plot(intensities, roof / 1e9, color=axes.xaxis.label.get_color(), linewidth=1.2)
    for index, (row, (intensity, rate)) in enumerate(zip(rows, points, strict=True)):
        axes.plot(intensity, rate / 1e9, "o", color=f"C{index % 10}", label=label(row))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity, FLOP/byte")
    axes.set_ylabel("GFLOP/s")
    axes.grid(True, which="both", linewidth=0.3, alpha=0.6)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _sizes(rows: Sequence[Row]) -> Figure:
    figure, axes = page.axes(0.8 + 0.4 * len(rows))
    places = list(range(len(rows)))
    for offset, name, values in (
        (-0.2, "nodes", [row["nodes_after"] for row in rows]),
        (0.2, "operators run", [row["estimate"]["operators"] for row in rows]),
    ):
        bars = axes.barh([p + offset for p in places], values, height=0.38, label=name)
        axes.bar_label(bars, [f"{value:,}" for value in values], padding=4)
    axes.set_yticks(places, [label(row) for row in rows])
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.grid(True, axis="x", linewidth=0.3, alpha=0.6)
    figure.legend(loc="outside lower center", ncols=2)
    return figure

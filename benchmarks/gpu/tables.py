"""A record as Markdown: the bars, every cell, the training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from nsa_compile.profiles.measure import show

GIB = 2**30


def render(record: Mapping[str, Any]) -> str:
    """The whole record for people."""
    parts_of = {part: record.get(part, {}) for part in ("orders", "attention", "training", "step")}
    missing = [(part, name, cell["not_measured"]) for part, cells in parts_of.items() for name, cell in cells.items()
               if "not_measured" in cell]  # fmt: skip
    orders, attention, training, step = (
        {name: cell for name, cell in cells.items() if "not_measured" not in cell} for cells in parts_of.values()
    )
    machine = record["environment"]["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["environment"]["packages"].items())
    parts = [
        "# NSA on the GPU: measured",
        f"{machine['device']}; {versions}; commit {record['environment']['git']['sha']}. "
        "Medians with range; forward and backward of the same steps, taken in turns, L2 cache flushed.",
        "## Bars",
        table(("bar", "target", "measured", "verdict", "note"), [
            (b["bar"], b["target"], "" if b["value"] is None else f"{b['value']:,.3g}", b["verdict"], b["note"])
            for b in record["bars"]
        ]),
    ]  # fmt: skip
    if orders:
        parts += ["## Loop orders of selected attention, ms", _orders(orders)]
    if attention:
        parts += ["## Attention, one layer", *(part for item in attention.items() for part in _cell(*item))]
    if training:
        parts += ["## Training steps", _training(training)]
    if step:
        parts += ["## The compiled step", _step(step)]
    if missing:
        parts += ["## Not measured", table(("part", "cell", "why"), missing)]
    return "\n\n".join(parts) + "\n"


def table(headers: tuple[str, ...], rows: list[tuple]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _cell(name: str, cell: Mapping[str, Any]) -> list[str]:
    rows = []
    for who, result in cell["contenders"].items():
        if "both" not in result:
            rows.append((who, "not measured: " + result["not_measured"], "", "", "", "", ""))
            continue
        rate = sum(cell["useful_flops"][result["kind"]].values()) / result["both"]["median_s"] / 1e12
        peak = result.get("peak_bytes")
        memory = "" if peak is None else f"{peak / GIB:.2f}"
        accuracy = result.get("note") or f"{result['check']['worst_of_eager']:.2f} × eager's error"
        times = (show(result[d]) for d in ("forward", "backward", "both"))
        rows.append((who, *times, f"{rate:,.0f}", memory, accuracy))
    headers = ("", "forward, ms", "backward, ms", "both, ms", "useful TFLOP/s", "peak GiB", "against float64")
    return [f"### {name}", table(headers, rows)]


def _orders(rows: Mapping[str, Any]) -> str:
    names = next(iter(rows.values()))["milliseconds"]
    headers = ("", *names, "fastest")
    return table(headers, [
        (name, *(f"{row['milliseconds'][order]:,.2f}" for order in names),
         f"{row['major']} {row['queries']}")
        for name, row in rows.items()
    ])  # fmt: skip


def _training(rows: Mapping[str, Any]) -> str:
    lines = []
    for row in rows.values():
        for name in ("nsa", "dense"):
            result = row[name]
            if "median_s" not in result:
                lines.append((row["preset"], row["seq_len"], name, result["not_measured"], "", "", "", "", ""))
                continue
            memory, nominal = result["step_memory_bytes"], result.get("mfu_nominal")
            lines.append((
                row["preset"], row["seq_len"], name, f"{result['parameters'] / 1e6:.1f} M", row["batch_size"],
                show(result), f"{result['tokens_per_s']:,.0f}",
                f"{result['mfu']:.1%}" + ("" if nominal is None else f" / {nominal:.1%}"),
                "" if memory is None else f"{memory / GIB:.1f}",
            ))  # fmt: skip
    headers = ("preset", "S", "attention", "parameters", "sequences", "ms / step", "tokens/s",
               "MFU of measured / nominal peak", "GiB")  # fmt: skip
    return table(headers, lines)


def _step(rows: Mapping[str, Any]) -> str:
    headers = ("", "graph breaks", "host syncs", "ms", "ms, checkpointed", "ms, CUDA graphs", "gain of CUDA graphs")
    return table(headers, [
        (
            name, row["graph_breaks"], sum(map(len, row["host_syncs"].values())), show(row["plain"]),
            show(row["checkpointed"]),
            show(row["CUDA graphs"]) if "median_s" in row["CUDA graphs"] else row["CUDA graphs"]["not_measured"],
            "" if row["graphs_speedup"] is None else f"{row['graphs_speedup']:.2f} ×",
        )
        for name, row in rows.items()
    ])  # fmt: skip

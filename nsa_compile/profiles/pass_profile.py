"""What each pass is worth: a block of a model, compiled and measured after 0, 1, 2, … passes of the pipeline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa_compile.config import RunConfig
from nsa_compile.machine.environment import describe_environment
from nsa_compile.passes.bisection import passes_asked_for
from nsa_compile.profiles.measure import not_measured
from nsa_compile.profiles.prefixes import Measurement, PrefixResults, measure_prefixes, measure_within
from nsa_compile.train.distributed.group import choose_device
from nsa_compile.train.distributed.world import World

SCHEMA = 1


def profile_passes(
    config: RunConfig, *, seq_len: int, repeats: int, limit_s: float | None, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Compile and measure the block of a model after each prefix of the pipeline.

    Args:
        config: model, precision, device, nested backend and passes to leave out.
        seq_len: tokens of the one sequence.
        repeats: timed runs of each prefix, forward and backward, in turns.
        limit_s: seconds that compiling and first running a prefix may take. They are measured in a process of their
            own then, which knows the passes of this package only. None: no limit, and this process.
        tell: gets one line a prefix.

    Returns:
        The record, plain data of schema `SCHEMA` (`docs/profiling.md` describes it), and the graphs its rows point to.

    Raises:
        UserError: the process that measures ended, and it was not the doing of one prefix.
    """
    names = tuple(passes_asked_for({}))
    with tempfile.TemporaryDirectory() as folder:
        work = Measurement(config, seq_len, repeats, names, Path(folder))
        results = PrefixResults(len(names), tell)
        if limit_s is None:
            measure_prefixes(work, set(), results.take)
        else:
            measure_within(limit_s, work, results)
        graphs: list[str] = []
        rows = [_row(work, count, results, graphs) for count in range(len(names) + 1)]
    record = {
        "schema": SCHEMA,
        "environment": describe_environment(choose_device(config, World())),
        "settings": {
            "attention": config.model.attention,
            "seq_len": seq_len,
            "batch_size": 1,
            "dtype": config.train.dtype,
            "nested": config.compile.nested,
            "disable": list(config.compile.disable),
            "repeats": repeats,
            "limit_s": limit_s,
        },
        "machine": results.machine,
        "eager_error": results.eager_error,
        "prefixes": rows,
    }
    return record, graphs


def _row(work: Measurement, count: int, results: PrefixResults, graphs: list[str]) -> dict[str, Any]:
    """All that is known of a prefix; its graphs are added to `graphs`."""
    name = work.names[count - 1] if count else None
    folder = work.folder_of(count)
    row: dict[str, Any] = {"passes": count, "name": name}
    row |= {f"graph_{when}": _graph(folder, name, when, graphs) for when in ("before", "after")}
    row |= _of_report(folder / "report.json", name) | results.measured[count]
    if row["not_measured"]:
        return row | dict.fromkeys(("forward", "backward"), not_measured(row["not_measured"]))
    return row | results.timings[count]


def _of_report(path: Path, name: str | None) -> dict[str, Any]:
    """What the last pass of a prefix did, for its row, from the report that the pipeline left."""
    nothing: dict[str, Any] = {
        "changed": None, "skipped": None, "seconds": None, "matches": [], "declines": [], "estimate": None
    }  # fmt: skip
    if not path.exists():
        return nothing
    report = json.loads(path.read_text(encoding="utf-8"))
    if name is None:
        nodes, cost = report["nodes_captured"], report["estimate_captured"]
        return nothing | {"changed": True, "nodes_before": nodes, "nodes_after": nodes, "estimate": cost}
    entry = next(entry for entry in report["passes"] if entry["name"] == name)
    return {key: entry[key] for key in _OF_PASS}


_OF_PASS = (
    "changed", "skipped", "seconds", "verify_seconds", "nodes_before", "nodes_after", "matches", "declines", "estimate",
)  # fmt: skip


def _graph(folder: Path, name: str | None, when: str, graphs: list[str]) -> int | None:
    """The number of the graph before or after a pass among `graphs`, to which it is added; None where there is none."""
    found = list(folder.glob(f"*_{name}_{when}.py"))
    if not found:
        return None
    text = found[0].read_text()
    if text not in graphs:
        graphs.append(text)
    return graphs.index(text)

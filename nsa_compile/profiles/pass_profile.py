"""What each pass is worth: a block of a model, compiled and measured after 0, 1, 2, … passes of the pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

from nsa_compile.backend import last_report
from nsa_compile.config import RunConfig
from nsa_compile.machine.environment import describe_environment, measure_matmul_flops
from nsa_compile.passes.report import Report
from nsa_compile.profiles.blame import first_line
from nsa_compile.profiles.measure import not_measured, peak_memory, seconds_of, summarize
from nsa_compile.profiles.probe import Errors, Probe, errors, passes_asked_for, without_passes

SCHEMA = 1

# Calls in the code that Inductor writes. It counts kernels too, but before it puts several into one function.
_GENERATED = re.compile(r"^\s+(?:cpp_|triton_)\w+(?:\.run)?\(", re.MULTILINE)
_EXTERN = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops|aten)\.[\w.]+\(", re.MULTILINE)


class TimeLimit(BaseException):
    """Time is over. No `Exception`: the compiler catches those."""


def profile_passes(
    config: RunConfig, *, seq_len: int, repeats: int, limit_s: float, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Compile and measure the block of a model after each prefix of the pipeline.

    Args:
        config: model, precision, device, nested backend and passes to leave out.
        seq_len: tokens of the one sequence.
        repeats: timed runs of each prefix, forward and backward, in turns.
        limit_s: seconds that compiling and first running a prefix may take.
        tell: gets one line a prefix.

    Returns:
        The record, plain data of schema `SCHEMA` (`docs/profiling.md` describes it), and the graphs its rows point to.
    """
    probe = Probe(config, seq_len)
    names = passes_asked_for({})
    graphs: list[str] = []
    rows: list[dict[str, Any]] = []
    blocks: dict[int, nn.Module] = {}
    exact, loop = probe.exact(), probe.loop()
    torch._dynamo.reset()
    # Programs of all prefixes stay alive, to be timed in turns.
    with torch._dynamo.config.patch(recompile_limit=len(names) + 8):
        for count in range(len(names) + 1):
            row, block = _compile(probe, count, names, loop, exact, graphs, limit_s)
            rows.append(row)
            if block is not None:
                blocks[count] = block
            tell(f"{count} of {len(names)} passes: {_told(row)}")
        tell("timing in turns")
        for count, timing in _time(probe, blocks, repeats).items():
            rows[count] |= timing
    torch._dynamo.reset()  # so many programs would count towards the limit of whatever is compiled next
    for row in rows:
        if row["not_measured"]:
            row |= dict.fromkeys(("forward", "backward"), not_measured(row["not_measured"]))
    record = {
        "schema": SCHEMA,
        "environment": describe_environment(probe.device),
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
        "machine": {
            "flops_per_s": measure_matmul_flops(probe.device, probe.dtype),
            "bytes_per_s": measure_copy_bytes(probe.device),
        },
        "eager_error": _numbers(errors(loop, loop, exact, probe.dtype)),
        "prefixes": rows,
    }
    return record, graphs


def _compile(
    probe: Probe,
    count: int,
    names: list[str],
    loop: list[Tensor],
    exact: list[Tensor],
    graphs: list[str],
    limit_s: float,
) -> tuple[dict[str, Any], nn.Module | None]:
    """The row of a prefix without its timings, and the compiled block; None where it is not to be timed."""
    compiling = probe.config.compile
    name = names[count - 1] if count else None
    earlier = last_report()
    counters.clear()
    codes: list[str] = []
    problem, found, peak, started = None, None, None, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        block = probe.compiled(
            nested=compiling.nested,
            disable=without_passes(names[count:], compiling.disable),
            estimate=True,
            dump_dir=folder,
        )
        try:
            with time_limit(limit_s), mock.patch.object(GraphLowering, "save_output_code", codes.append):
                outcome = probe.outcome(block)
                compile_s = time.perf_counter() - started
                found = errors(outcome, loop, exact, probe.dtype)
                peak = peak_memory(lambda: probe.backward(probe.forward(block)[1]), probe.device)
        except TimeLimit:
            problem = f"it took more than {limit_s:g} s to compile and run"
        except Exception as error:
            problem = first_line(error)
        graph_before, graph_after = (_graph(Path(folder), name, when, graphs) for when in ("before", "after"))
    report = last_report()
    report = None if report is earlier else report
    row = {"passes": count, "name": name, "graph_before": graph_before, "graph_after": graph_after}
    row |= _of_report(report, name)
    if problem is not None:
        return row | {"not_measured": problem}, None
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    measured = {
        "not_measured": None,
        "compile_s": compile_s,
        "inductor_cache_hit": bool(hits),
        "kernels": _kernels(codes) if compiling.nested == "inductor" else None,
        "peak_bytes": peak,
        "error": found and _numbers(found),
    }
    return row | measured, block


def _of_report(report: Report | None, name: str | None) -> dict[str, Any]:
    """What the last pass of a prefix did, for its row."""
    if report is None:
        return {"changed": None, "skipped": None, "seconds": None, "matches": [], "declines": [], "estimate": None}
    if name is None:
        cost = report.estimate_captured
        nodes = report.nodes_captured
        did: dict[str, Any] = {"changed": True, "skipped": None, "seconds": None, "matches": [], "declines": []}
        return did | {"nodes_before": nodes, "nodes_after": nodes, "estimate": cost and dataclasses.asdict(cost)}
    entry = dataclasses.asdict(next(entry for entry in report.passes if entry.name == name))
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


def _kernels(codes: list[str]) -> dict[str, int]:
    """Calls of generated kernels, and of others (matrix products, operators), in forward and backward code."""
    return {
        "generated": sum(len(_GENERATED.findall(code)) for code in codes),
        "extern": sum(len(_EXTERN.findall(code)) for code in codes),
    }


def _numbers(found: Errors) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "explained": found.explained}


def _told(row: dict[str, Any]) -> str:
    if row["not_measured"]:
        return f"not measured, {row['not_measured']}"
    return f"compiled in {row['compile_s']:.1f} s{' with a hit in the cache of Inductor' * row['inductor_cache_hit']}"


def _time(probe: Probe, blocks: dict[int, nn.Module], repeats: int) -> dict[int, dict[str, Any]]:
    """Forward and backward times of each block, in turns; the first turn warms up and is not counted."""
    samples: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in blocks}
    for turn in range(-1, repeats):
        for count, block in blocks.items():
            block.zero_grad(set_to_none=True)
            output: list[Tensor] = []
            forward = seconds_of(lambda: output.append(probe.forward(block)[1]), probe.device)  # noqa: B023
            backward = seconds_of(lambda: probe.backward(output[0]), probe.device)  # noqa: B023
            if turn >= 0:
                samples[count][0].append(forward)
                samples[count][1].append(backward)
    return {
        count: {"forward": summarize(forward), "backward": summarize(backward)}
        for count, (forward, backward) in samples.items()
    }


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimit in this block after so many seconds. In the main thread only, as signals are."""

    def expire(*_: object) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, expire)
    # Again and again: Python drops what is raised while it is in a destructor or a callback from C.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # once more, for an alarm that went off on the way to that line
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_copy_bytes(device: torch.device, size: int = 2**26, seconds: float = 0.3) -> float:
    """Best measured rate of copying in bytes/s, reads and writes counted: the slope of a roofline."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, seconds_of(lambda: target.copy_(source), device))
    return 2 * size / best

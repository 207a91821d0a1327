"""A few warm training steps of a configured run under torch's profiler: what they spend their time on.

The steps are those of the trainer itself. Compilation and warm-up come before; then as many steps are timed without
the profiler as with it. What the trace shows is taken apart in `attribution.py`. Only where that finds the host busy,
or made to wait, are more steps run to find the lines of Python to blame.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import record_function

from nsa_compile import ranges
from nsa_compile.config import RunConfig
from nsa_compile.data import Corpus
from nsa_compile.machine.environment import describe_environment
from nsa_compile.profiles.attribution import SYNC_PHASES, Timeline, attribute, host_intervals, timelines
from nsa_compile.profiles.measure import named_kernels, summarize, traced
from nsa_compile.profiles.python_lines import LineTracer, Mark, Sampler
from nsa_compile.train.distributed.group import broadcast
from nsa_compile.train.distributed.world import World
from nsa_compile.train.loop import Trainer
from nsa_compile.train.watch.heartbeat import Heartbeat

SCHEMA = 1
TRACE = "trace.json.gz"
TICK = "tick"
# One function in which Python spends more of a step than this, while no operator runs, is a hot spot.
HOT_SPOT = 0.10
# How far apart the wall clock and what the trace adds up to may be.
TOLERANCE = 0.05


def profile_step(
    config: RunConfig, corpus: Corpus, directory: Path, steps: int, warmup: int, world: World | None = None
) -> dict[str, Any]:
    """Profile `steps` training steps after `warmup` others, and leave the trace in `directory`.

    Of several processes, which have joined already, each profiles itself and leaves a trace.

    Returns:
        Plain data of the version ``schema``: sizes, wall times, the attribution of `attribution.attribute`, and
        ``checks``, each with ``ok``, a number and its limit, and the culprits where it failed.
    """
    world = world or World()
    config = config.changed(profile={"nvtx": True})
    trace = directory / (TRACE if world.main else f"trace_rank{world.rank}.json.gz")
    try:
        with named_kernels(), Heartbeat(directory, world.rank, config.watchdog.interval_s) as heartbeat:
            run = _Steps(Trainer(config, corpus, directory, world, heartbeat))
            warm = _seconds(run.run(warmup))
            compiled = counters["stats"]["unique_graphs"]
            plain = _seconds(run.run(steps))
            with traced(run.trainer.device, trace) as events:
                profiled = _seconds(run.run(steps))
            recompiled = counters["stats"]["unique_graphs"] - compiled
            attribution = attribute(timelines(events))
            checks = {
                "sum": _check_sum(attribution, profiled),
                "compiled_before": {"ok": not recompiled, "value": recompiled, "limit": 0},
                "python_hot_spot": _check_python(run, attribution, steps),
                "host_syncs": _check_syncs(run, attribution),
            }
    finally:
        ranges.enable(False)
    return {
        "schema": SCHEMA,
        "environment": describe_environment(run.trainer.device),
        "settings": _settings(config, run.trainer, steps, warmup),
        "trace": TRACE,
        "warmup_s": sum(warm),
        "wall": {"plain": summarize(plain), "profiled": summarize(profiled)},
        **attribution,
        "checks": checks,
    }


class _Steps:
    """The trainer's steps, one after the other."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._number = 0

    def run(self, count: int) -> list[tuple[int, int]]:
        """The next steps: when each began and ended, in nanoseconds of ``time.perf_counter_ns``."""
        moments = []
        for _ in range(count):
            self._number += 1
            start = time.perf_counter_ns()
            self.trainer.take_step(self._number)
            moments.append((start, time.perf_counter_ns()))
            self.trainer.timer.step_done()
        return moments

    def observed(self, count: int, observer: Sampler | LineTracer) -> tuple[list[Timeline], list[Mark]]:
        """The same under an observer: the steps taken apart, and what it saw, in microseconds of the trace."""
        with traced(self.trainer.device) as events:
            ticks = _ticks()
            with observer:
                self.run(count)
        # The two clocks run alike and start apart. A tick is read after its end, so none says too much.
        ends = sorted(event.end for event in events if event.name == TICK)
        apart = max(end - time_ns / 1e3 for end, time_ns in zip(ends, ticks, strict=True))
        return timelines(events), [(time_ns / 1e3 + apart, place) for time_ns, place in observer.marks]


def _ticks() -> list[int]:
    """Moments right after regions of the trace that are named so, in nanoseconds of ``time.perf_counter_ns``."""
    moments = []
    for _ in range(20):
        with record_function(TICK):
            pass
        moments.append(time.perf_counter_ns())
    return moments


def _seconds(moments: Sequence[tuple[int, int]]) -> list[float]:
    return [(end - start) / 1e9 for start, end in moments]


def _check_sum(attribution: dict[str, Any], wall: Sequence[float]) -> dict[str, Any]:
    """Whether the sum of the trace agrees with the clock."""
    measured = statistics.fmean(wall)
    residual = (attribution["step"]["sum_s"] - measured) / measured
    return {"ok": abs(residual) <= TOLERANCE, "value": residual, "limit": TOLERANCE}


def _check_python(run: _Steps, attribution: dict[str, Any], steps: int) -> dict[str, Any]:
    """Whether one function keeps the host busy; steps are sampled only where the host is busy that long at all."""
    # All processes take a step or none does: the first decides.
    share = broadcast(attribution["kinds"].get("host", {"share": 0.0})["share"])
    if share <= HOT_SPOT:
        return {"ok": True, "value": share, "limit": HOT_SPOT, "places": []}
    found, marks = run.observed(steps, Sampler())
    idle = list(host_intervals(found))
    starts = [start for start, _ in idle]
    places = [
        place for time_us, place in marks if (at := bisect_right(starts, time_us) - 1) >= 0 and time_us < idle[at][1]
    ]
    functions: Counter[str] = Counter()
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for place in places:
        if place is not None:
            functions[place.function] += 1
            lines[place.function][str(place)] += 1
    ranked = [
        {"where": lines[name].most_common(1)[0][0], "share": share * count / len(places)}
        for name, count in functions.most_common(5)
    ]
    greatest = ranked[0]["share"] if ranked else 0.0
    return {"ok": greatest <= HOT_SPOT, "value": greatest, "limit": HOT_SPOT, "places": ranked, "samples": len(places)}


def _check_syncs(run: _Steps, attribution: dict[str, Any]) -> dict[str, Any]:
    """Whether the host waits for the device outside of the one place where it must; if so, a step is traced by line."""
    unexpected = broadcast(sum(row["calls"] for row in attribution["syncs"] if not row["expected"]))
    check = {"ok": not unexpected, "value": unexpected, "limit": 0, "places": []}
    if unexpected:
        (step,), marks = run.observed(1, LineTracer())
        times = [time_us for time_us, _ in marks]
        places: Counter[tuple[str, str, str]] = Counter()
        for event, phase in step.syncs_by_event():
            at = bisect_right(times, event.start) - 1
            if phase not in SYNC_PHASES:
                places[event.name, phase, str(marks[at][1]) if at >= 0 else "unknown"] += 1
        check["places"] = [
            {"name": name, "phase": phase, "where": where, "calls": count}
            for (name, phase, where), count in places.most_common()
        ]
    return check


def _settings(config: RunConfig, trainer: Trainer, steps: int, warmup: int) -> dict[str, Any]:
    """The sizes that every figure belongs to."""
    return {
        "device": trainer.device.type,
        **config.sizes(),
        "parameters": trainer.parameters,
        "compiled": config.compile.nested if config.compile.enabled else None,
        "processes": trainer.world.size,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "warmup": warmup,
    }

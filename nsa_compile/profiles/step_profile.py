"""A few warm training steps of a configured run under torch's profiler: what they spend their time on.

The steps are those of the trainer itself. Compilation and warm-up come before; then as many steps are timed without
the profiler as with it. What the trace shows is taken apart in `attribution.py`. Only where that finds the host busy, or
made to wait, are more steps run to find the lines of Python to blame.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from nsa_compile.config import ProfileSection, RunConfig
from nsa_compile.data import Corpus
from nsa_compile.profiles import ranges
from nsa_compile.profiles.attribution import Timeline, attribute, host_intervals, read_trace, timelines
from nsa_compile.profiles.measure import summarize
from nsa_compile.profiles.python_lines import LineTracer, Mark, Sampler
from nsa_compile.train.environment import describe_environment
from nsa_compile.train.heartbeat import Heartbeat
from nsa_compile.train.loop import Trainer
from nsa_compile.train.world import World

SCHEMA = 1
TRACE = "trace.json.gz"
# One function in which Python spends more of a step than this, while no operator runs, is a hot spot.
HOT_SPOT = 0.10
# How far apart the wall clock and what the trace adds up to may be.
TOLERANCE = 0.05


def profile_step(config: RunConfig, corpus: Corpus, directory: Path, steps: int, warmup: int) -> dict[str, Any]:
    """Profile `steps` training steps after `warmup` others, and leave the trace in `directory`.

    Returns:
        Plain data of the version ``schema``: sizes, wall times, the attribution of `attribution.attribute`, and
        ``checks``, each with ``ok``, a number and its limit, and the culprits where it failed.
    """
    config = config.model_copy(update={"profile": ProfileSection(nvtx=True)})
    ranges.enable()
    try:
        with (
            _named_kernels(),
            Heartbeat(directory, 0, config.watchdog.interval_s) as heartbeat,
        ):
            run = _Steps(Trainer(config, corpus, directory, World(), heartbeat))
            warm = run.timed(warmup)
            compiled = counters["stats"]["unique_graphs"]
            plain = run.timed(steps)
            profiled = run.profiled(steps, directory / TRACE)
            recompiled = counters["stats"]["unique_graphs"] - compiled
            found = timelines(read_trace(directory / TRACE))
            attribution = attribute(found)
            checks = {
                "sum": _check_sum(attribution, profiled),
                "compiled_before": {"ok": not recompiled, "value": recompiled, "limit": 0},
                "python_hot_spot": _check_python(run, attribution, directory, steps),
                "host_syncs": _check_syncs(run, attribution, directory),
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


@contextmanager
def _named_kernels() -> Iterator[None]:
    """Inductor's C++ kernels tell the profiler when they run, or their time would pass for Python's."""
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.enable_kernel_profile": True}):
        yield


class _Steps:
    """The trainer's steps, one after the other, with the moments at which they began."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.number = 0

    def timed(self, count: int) -> list[float]:
        """Seconds of each of the next steps."""
        return [(end - start) / 1e9 for start, end in self._run(count)]

    def profiled(self, count: int, trace: Path) -> list[float]:
        """The same under torch's profiler, which leaves a trace."""
        return [(end - start) / 1e9 for start, end in self._profiled(count, trace)]

    def looked_at(self, count: int, trace: Path, observer: Sampler | LineTracer) -> tuple[list[Timeline], list[Mark]]:
        """The next steps, and what the observer saw, in the microseconds of the trace."""
        began = [start for start, _ in self._profiled(count, trace, observer)]
        steps = timelines(read_trace(trace))
        trace.unlink()
        # The two clocks run alike and start apart.
        apart = statistics.median(step.start - start / 1e3 for step, start in zip(steps, began, strict=True))
        return steps, [(time_ns / 1e3 + apart, place) for time_ns, place in observer.marks]

    def _profiled(self, count: int, trace: Path, observer: Any = None) -> list[tuple[int, int]]:
        activities = [ProfilerActivity.CPU]
        if self.trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            moments = self._run(count, observer)
        recorded.export_chrome_trace(str(trace))
        return moments

    def _run(self, count: int, observer: Any = None) -> list[tuple[int, int]]:
        moments = []
        for _ in range(count):
            self.number += 1
            with ranges.step(self.number):
                start = time.perf_counter_ns()
                if observer is None:
                    self.trainer.take_step(self.number)
                else:
                    with observer:
                        self.trainer.take_step(self.number)
                moments.append((start, time.perf_counter_ns()))
            self.trainer.timer.step_done()
        return moments

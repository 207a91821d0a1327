"""Where the time of a training step went, from the events of a trace alone. Imports no torch.

The time of a step is taken apart without remainder: every instant goes to the phase and to the branch whose range is
the innermost one open then, and to an operator, to communication, or to the host, which is Python and what dispatches
operators. The main thread counts; where it runs no operator, one that another thread runs counts, as autograd's
does on a GPU machine. On a GPU an instant at which a kernel runs goes to where that kernel was launched.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nsa_compile.branches import RANGES

STEP = "step"
PHASES = ("data", "forward", "backward", "communication", "optimizer")
OTHER = "other"
Kind = Literal["operator", "communication", "host"]

# What makes the host wait for the device; on a CPU these are where it would.
SYNCS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
}
# A step reads its loss once, in "communication"; the optimizer reads counters of its own that live on the CPU.
SYNC_PHASES = ("communication", "optimizer")

_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "mpi:", "ncclDevKernel", "ncclKernel")
# Frames around operators.
_AROUND = ("autograd::", "torch::autograd::")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """An interval of a trace, in microseconds.

    Attributes:
        category: Kineto's word for its kind: ``cpu_op``, ``user_annotation``, ``cuda_runtime``, ``kernel``, …
        correlation: the number that a kernel shares with the call that launched it.
    """

    name: str
    category: str
    thread: Any
    start: float
    end: float
    correlation: int | None = None


@dataclass(frozen=True)
class Segment:
    """An interval in which the same events are open in a thread, outermost first."""

    start: float
    end: float
    path: tuple[Event, ...]

    @property
    def operator(self) -> str | None:
        """The innermost operator or kernel, or ``None`` where the host is at work."""
        return next((event.name for event in reversed(self.path) if kind_of(event) != "host"), None)

    @property
    def kind(self) -> Kind:
        kinds = {kind_of(event) for event in self.path}
        return "communication" if "communication" in kinds else "operator" if "operator" in kinds else "host"

    @property
    def phase(self) -> str:
        return self._innermost(PHASES)

    @property
    def branch(self) -> str:
        return self._innermost(RANGES)

    def _innermost(self, names: Sequence[str]) -> str:
        return next((event.name for event in reversed(self.path) if event.name in names), OTHER)


def read_trace(path: Path) -> list[Event]:
    """The intervals of a Chrome trace, as torch's profiler writes one."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        rows = json.load(file)["traceEvents"]
    return [
        Event(
            row["name"],
            row["cat"],
            (row["pid"], row["tid"]),
            row["ts"],
            row["ts"] + row["dur"],
            row.get("args", {}).get("correlation"),
        )
        for row in rows
        if row.get("ph") == "X" and "cat" in row
    ]


def kind_of(event: Event) -> Kind:
    """Whether an event computes, communicates, or surrounds what does."""
    name = event.name
    if name.startswith(_COMMUNICATION):
        return "communication"
    if event.category in _ON_DEVICE:
        return "operator"
    if event.category != "cpu_op" or name.startswith(_AROUND):
        return "host"
    # Inductor's kernels are graph_0_cpp_fused_…, everybody else's operators have a namespace.
    return "operator" if "::" in name or "cpp_fused" in name else "host"


def segments(events: Iterable[Event]) -> list[Segment]:
    """The timeline of one thread: what is open in each interval between two changes. Events may overlap."""
    changes = [(event.start, 1, number, event) for number, event in enumerate(events)]
    # At the same instant, ends come before beginnings, and the longer of two that begin together is the outer one.
    changes = sorted(
        [*changes, *((event.end, 0, number, event) for _, _, number, event in changes)],
        key=lambda change: (change[0], change[1], -change[3].end, change[2]),
    )
    open_events: dict[int, Event] = {}
    result: list[Segment] = []
    before = 0.0
    for time, begins, number, event in changes:
        if open_events and time > before:
            result.append(Segment(before, time, tuple(open_events.values())))
        if begins and event.end > event.start:
            open_events[number] = event
        elif not begins:
            open_events.pop(number, None)
        before = time
    return result


@dataclass(frozen=True)
class Timeline:
    """One training step, taken apart.

    Attributes:
        start, end: of its range, in microseconds.
        segments: they cover the step without gaps or overlaps.
        syncs: what made the host wait, with what was open around it.
        communication: intervals in which a message was under way, in whatever thread.
    """

    start: float
    end: float
    segments: list[Segment]
    syncs: list[Segment]
    communication: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e6

    def syncs_by_event(self) -> list[tuple[Event, str]]:
        """What made the host wait, in order, with the phase it did so in."""
        found = {segment.path[-1]: segment.phase for segment in self.syncs}
        return sorted(found.items(), key=lambda item: item[0].start)


def timelines(events: Sequence[Event]) -> list[Timeline]:
    """The steps of a trace, in their order; a ValueError where it has no range ``step``."""
    steps = sorted(
        (event for event in events if event.name == STEP and event.category == "user_annotation"), key=lambda e: e.start
    )
    if not steps:
        raise ValueError("the trace has no range 'step', so there is no step to take apart")
    on_host = [event for event in events if event.category not in _ON_DEVICE and event.category != "Trace"]
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in on_host:
        by_thread[event.thread].append(event)
    threads = {thread: segments(found) for thread, found in by_thread.items()}
    main = threads.pop(steps[0].thread)
    others = [segment for found in threads.values() for segment in found if segment.operator is not None]
    kernels = _launched([event for event in events if event.category in _ON_DEVICE], on_host, {**threads, None: main})
    sending = [(e.start, e.end) for e in events if kind_of(e) == "communication"]

    result = []
    for step in steps:
        inside = [segment for segment in main if step in segment.path]
        covered = _overlay(inside, [s for s in others if s.kind == "operator"])
        covered = _overlay(covered, kernels, also_operators=True)
        syncs = [s for s in inside if s.path[-1].name in SYNCS]
        merged = _union((max(a, step.start), min(b, step.end)) for a, b in sending)
        result.append(Timeline(step.start, step.end, covered, syncs, merged))
    return result


def _launched(kernels: list[Event], on_host: list[Event], threads: Mapping[Any, list[Segment]]) -> list[Segment]:
    """Each kernel as a segment inside of what was open in the thread that launched it, when it did."""
    calls = {event.correlation: event for event in on_host if event.correlation is not None}
    by_start = {id(found): [segment.start for segment in found] for found in threads.values()}
    result = []
    for kernel in kernels:
        call = None if kernel.correlation is None else calls.get(kernel.correlation)
        path: tuple[Event, ...] = ()
        for found in threads.values() if call is not None else ():
            assert call is not None
            at = bisect.bisect_right(by_start[id(found)], call.start) - 1
            if at >= 0 and call in found[at].path:
                path = tuple(event for event in found[at].path if kind_of(event) == "host")
        result.append(Segment(kernel.start, kernel.end, (*path, kernel)))
    return result


def _overlay(base: list[Segment], over: Sequence[Segment], also_operators: bool = False) -> list[Segment]:
    """`base`, with `over` in its place where `base` has the host at work, or everywhere; later ones of `over` win."""
    over = sorted(over, key=lambda segment: segment.start)
    ends = list(itertools.accumulate((segment.end for segment in over), max))
    result = []
    for segment in base:
        if segment.operator is not None and not also_operators:
            result.append(segment)
            continue
        here = segment.start
        for number in range(bisect.bisect_right(ends, segment.start), len(over)):
            other = over[number]
            if other.start >= segment.end:
                break
            start, end = max(other.start, here), min(other.end, segment.end)
            if end <= start:
                continue
            if start > here:
                result.append(Segment(here, start, segment.path))
            # Ranges of the thread that waits surround those of the thread that works.
            result.append(Segment(start, end, (*segment.path, *other.path)))
            here = end
        if here < segment.end:
            result.append(Segment(here, segment.end, segment.path))
    return result


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same, ascending; empty ones are dropped."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def attribute(steps: Sequence[Timeline]) -> dict[str, Any]:
    """What the steps' time went to, as plain data. Seconds are of one step: mean, least and greatest of all steps.

    Returns:
        ``step``: the whole; ``sum_s`` is what the rows of ``ranges`` add up to. ``ranges``: a row for each phase and
        branch. ``phases``. ``kinds``: operators, communication and host. ``operators``: those that took longest, by
        the time in which none was running inside of them. ``syncs``: in each phase. ``communication``: in all, and
        the part behind which an operator ran.
    """
    ranges = _spread(steps, lambda segment: (segment.phase, segment.branch))
    order = {name: number for number, name in enumerate((*PHASES, *RANGES, OTHER))}
    sending = [_communication(step) for step in steps]
    return {
        "steps": len(steps),
        "step": _figures([step.seconds for step in steps]) | {"sum_s": sum(row["mean_s"] for row in ranges.values())},
        "phases": {name: row for (name,), row in _sorted(_spread(steps, lambda s: (s.phase,)), order)},
        "ranges": [{"phase": p, "branch": b, **row} for (p, b), row in _sorted(ranges, order)],
        "kinds": {kind: row for (kind,), row in _spread(steps, lambda s: (s.kind,)).items()},
        "operators": _operators(steps),
        "syncs": _syncs(steps),
        "communication": {
            "total_s": statistics.fmean(total for total, _ in sending),
            "overlapped_s": statistics.fmean(overlapped for _, overlapped in sending),
        },
    }


def _sorted(rows: Mapping[tuple[str, ...], Any], order: Mapping[str, int]) -> list[tuple[tuple[str, ...], Any]]:
    return sorted(rows.items(), key=lambda item: [order[name] for name in item[0]])


def _spread(steps: Sequence[Timeline], key: Any) -> dict[tuple[str, ...], dict[str, float]]:
    """Figures of the seconds that each key got in a step, and its share of the steps."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * len(steps))
    for number, step in enumerate(steps):
        for segment in step.segments:
            found[key(segment)][number] += (segment.end - segment.start) / 1e6
    total = sum(step.seconds for step in steps)
    return {name: _figures(seconds) | {"share": sum(seconds) / total} for name, seconds in found.items()}


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    return {"mean_s": statistics.fmean(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def _operators(steps: Sequence[Timeline]) -> list[dict[str, Any]]:
    seconds: dict[str, float] = defaultdict(float)
    places: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    calls: dict[str, set[Event]] = defaultdict(set)
    for step in steps:
        for segment in step.segments:
            name = segment.operator
            if name is not None:
                spent = (segment.end - segment.start) / 1e6
                seconds[name] += spent
                places[name][segment.phase, segment.branch] += spent
                calls[name].add(next(e for e in reversed(segment.path) if e.name == name))
    total = sum(step.seconds for step in steps)
    rows = []
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        phase, branch = max(places[name], key=places[name].__getitem__)
        row = {"name": name, "mean_s": spent / len(steps), "share": spent / total}
        rows.append(row | {"calls": len(calls[name]) / len(steps), "phase": phase, "branch": branch})
    return rows


def _syncs(steps: Sequence[Timeline]) -> list[dict[str, Any]]:
    found: Counter[tuple[str, str]] = Counter()
    for step in steps:
        for event, phase in step.syncs_by_event():
            found[event.name, phase] += 1
    return [
        {"name": name, "phase": phase, "calls": count / len(steps), "expected": phase in SYNC_PHASES}
        for (name, phase), count in sorted(found.items())
    ]


def _communication(step: Timeline) -> tuple[float, float]:
    """Seconds in which a message was under way, and those of them in which an operator ran."""
    working = _union((s.start, s.end) for s in step.segments if s.kind == "operator")
    total = sum(end - start for start, end in step.communication)
    overlapped = sum(max(0.0, min(b, d) - max(a, c)) for a, b in step.communication for c, d in working)
    return total / 1e6, overlapped / 1e6


def host_intervals(steps: Sequence[Timeline]) -> Iterator[tuple[float, float]]:
    """The intervals of the steps in which the host was at work, ascending, in microseconds."""
    for step in steps:
        yield from ((segment.start, segment.end) for segment in step.segments if segment.kind == "host")

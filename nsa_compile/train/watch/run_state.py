"""The state of a run as its heartbeat files tell it."""

from __future__ import annotations

import itertools
import socket
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nsa_compile.train.records.jsonl import JsonlReader
from nsa_compile.train.watch.heartbeat import (
    Beat,
    End,
    Start,
    StepBeat,
    heartbeat_path,
    heartbeat_ranks,
    parse_row,
)
from nsa_compile.train.watch.processes import is_stopped, start_ticks

# What the rules look back on: steps of the present attempt, and reports of the gates.
MAX_STEPS = 1024
MAX_GATES = 64

# Names of exceptions: `.HALT` raises the first, and by the last ranks leave when another has said why.
_ASKED_TO_LEAVE = ("Halted", "KeyboardInterrupt", "SystemExit")

# "remote" is a process of another machine, of which only its rows are known.
Process = Literal["running", "stopped", "dead", "remote"]


@dataclass
class RankState:
    """What is known of a rank in its newest attempt.

    Attributes:
        process: whether it lives; looked at before its rows are, so that an ``end`` row is never missed.
        start: its first row; ``None`` until one was read.
        steps: its newest step rows.
        gates: its newest reports of gates, by layer.
    """

    rank: int
    process: Process = "running"
    start: Start | None = None
    last: Start | Beat | StepBeat | End | None = None
    steps: deque[StepBeat] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    step_count: int = 0
    gates: deque[dict[str, list[float]]] = field(default_factory=lambda: deque(maxlen=MAX_GATES))

    def add(self, values: dict[str, Any]) -> None:
        """Take in a row of the file; what is no row, or of a process whose beginning is unknown, is passed over."""
        row = parse_row(values)
        if isinstance(row, Start):
            self.start, self.step_count = row, 0
            self.steps.clear()
            self.gates.clear()
        elif row is None or self.start is None or row.pid != self.start.pid:
            return
        self.last = row
        if isinstance(row, StepBeat):
            self.steps.append(row)
            self.step_count += 1
            if row.gates:
                self.gates.append(row.gates)

    @property
    def end(self) -> End | None:
        """The row by which the process left; ``None`` while it has not."""
        return self.last if isinstance(self.last, End) else None

    @property
    def failed(self) -> bool:
        """Whether the process left by an exception, unless somebody asked it to leave."""
        return self.end is not None and self.end.error not in (None, *_ASKED_TO_LEAVE)

    def silence(self, now: float) -> float:
        """Seconds since the newest row."""
        return 0.0 if self.last is None else max(0.0, now - self.last.time)

    def phase_seconds(self, now: float) -> float:
        """Seconds for which the rank has been in its phase, unless it changed since the newest row."""
        return 0.0 if self.last is None else self.last.phase_s + self.silence(now)

    def step_seconds(self, count: int = 20) -> float:
        """Median time of the newest steps, the first of them from the start of the process; 0 before there was one."""
        times = [row.time for row in list(self.steps)[-count - 1 :]]
        if self.start and self.step_count <= count:
            times.insert(0, self.start.time)
        return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


@dataclass(frozen=True)
class RunState:
    """The ranks of the newest attempt.

    Attributes:
        ranks: those that have started, by rank.
        missing: those that have not.
        began: unix time of the newest start of a rank.
    """

    ranks: Sequence[RankState] = ()
    missing: Sequence[int] = ()
    began: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether every rank has left by itself."""
        return bool(self.ranks) and not self.missing and all(state.end for state in self.ranks)


def present_attempt(ranks: Sequence[RankState], since: float = 0.0) -> RunState:
    """The state of the newest attempt: ranks that stopped before its newest start are of an earlier one.

    `ranks` are all that have a file; attempts that began before the unix time `since` are none.
    """
    known = [(state, state.start, state.last) for state in ranks if state.start and state.start.time >= since]
    if not known:
        return RunState()
    _, newest, _ = max(known, key=lambda entry: entry[1].time)
    present = [
        state
        for state, _, last in known
        if last is not None and last.time >= newest.time and state.rank < newest.world_size
    ]
    here = {state.rank for state in present}
    # Not a set of all ranks: the size comes from a file.
    missing = [rank for rank in range(newest.world_size) if rank not in here]
    return RunState(sorted(present, key=lambda state: state.rank), missing, newest.time)


class HeartbeatFiles:
    """Follows the heartbeat files of a run."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._ranks: dict[int, tuple[JsonlReader, RankState]] = {}

    def read(self) -> list[RankState]:
        """Every rank that has a file, with what was added since the last time."""
        for rank in heartbeat_ranks(self._directory):
            if rank not in self._ranks:
                self._ranks[rank] = (JsonlReader(heartbeat_path(self._directory, rank)), RankState(rank))
        for reader, state in self._ranks.values():
            # First the process and then its rows: one that leaves in between has written its end.
            before = state.start
            state.process = _process(before)
            for row in reader.rows():
                state.add(row)
            if state.start is not before:
                state.process = _process(state.start)
        return [state for _, state in self._ranks.values()]


def _process(start: Start | None) -> Process:
    if start is None:
        return "running"
    if start.host != socket.gethostname():
        return "remote"
    if start_ticks(start.pid) != start.started:
        return "dead"
    return "stopped" if is_stopped(start.pid) else "running"

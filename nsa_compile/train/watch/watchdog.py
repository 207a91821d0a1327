"""The watchdog: rules that find what is wrong with a run in the heartbeats of its ranks, and what is done then.

A rule fires once when its condition comes to hold, and again only after it has ceased to. Who is named is who has to be
looked at: of ranks that wait for each other in a collective, the one that has not arrived. What holds for several ranks
is one finding.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from nsa_compile.branches import BRANCHES
from nsa_compile.config import Action, WatchdogSection
from nsa_compile.errors import TrainingDiverged
from nsa_compile.train.records.jsonl import JsonlWriter
from nsa_compile.train.watch.halt import request_halt
from nsa_compile.train.watch.heartbeat import Row, StepBeat, heartbeat_path, stacks_path, write_stack_header
from nsa_compile.train.watch.processes import send_signal
from nsa_compile.train.watch.run_state import HeartbeatFiles, RankState, RunState, present_attempt

WATCHDOG_FILE = "watchdog.jsonl"

Severity = Literal["stalled", "diverged", "degraded"]

# Where ranks wait for each other; under DDP gradients are exchanged during the backward pass.
_COLLECTIVE = ("communication", "backward")
# Phases that take long on a healthy run.
_PAUSES = ("checkpoint", "evaluate", "compile", "idle")
# What goes up and down around a limit is said again only after it has been quiet for so long.
_QUIET_SECONDS = 600.0
# Between the order to write stacks and the kill.
_DUMP_SECONDS = 1.0
# Ranks in a row of the file, which has a limited length.
_MAX_NAMED = 1000


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        severity: what kind of action it calls for.
        ranks: whom it concerns; of a stall, who is to blame.
    """

    rule: str
    severity: Severity
    ranks: tuple[int, ...]
    message: str


class Watchdog:
    """Applies the rules of ``watchdog`` in the configuration; `clock` gives the unix time."""

    def __init__(self, config: WatchdogSection, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._began = 0.0
        self._looked_at: dict[int, int] = {}
        self._last_active: dict[tuple[str, tuple[int, ...]], float] = {}
        self.active: list[Finding] = []

    def observe(self, run: RunState) -> list[Finding]:
        """What is wrong now and was not at the last call; ``active`` holds all that is wrong now."""
        if run.began != self._began:  # another attempt: what was said of the one before is settled
            self._began, self._looked_at, self._last_active, self.active = run.began, {}, {}, []
        now = self._clock()
        before = {_key(finding) for finding in self.active}
        self.active = [*self._stalls(run, now), *self._by_rank(run.ranks)]
        fresh = []
        for finding in self.active:
            key = _key(finding)
            quiet = now - self._last_active.get(key, -math.inf)
            if key not in before and (finding.severity != "degraded" or quiet > _QUIET_SECONDS):
                fresh.append(finding)
            self._last_active[key] = now
        return fresh

    def _stalls(self, run: RunState, now: float) -> list[Finding]:
        found = []
        for state in run.ranks:
            if state.failed and state.end:
                text = f"rank {state.rank} left by {state.end.error} in {state.end.phase} after step {state.end.step}"
                severity: Severity = "diverged" if state.end.error == TrainingDiverged.__name__ else "stalled"
                found.append(Finding("failed", severity, (state.rank,), text))
        there = [(state, state.last) for state in run.ranks if state.last and not state.end]
        gone = []
        for state, last in there:
            where = f"in {last.phase} after step {last.step}"
            silence = state.silence(now)
            if state.process == "dead":
                text = f"rank {state.rank} is dead: process {last.pid} is gone, {where}"
                gone.append(Finding("dead", "stalled", (state.rank,), text))
            elif silence > self._config.silent_s:
                stopped = f", process {last.pid} is stopped by a signal" if state.process == "stopped" else ""
                text = f"rank {state.rank} has been silent for {silence:.0f} s, {where}{stopped}"
                gone.append(Finding("silent", "stalled", (state.rank,), text))
        if run.missing and now - run.began > self._config.startup_s:
            text = f"{_names(run.missing)} gave no sign of life in {now - run.began:.0f} s"
            gone.append(Finding("missing", "stalled", tuple(run.missing), text))
        if gone or found:
            # Whoever waits, waits for these.
            named = {rank for finding in gone for rank in finding.ranks}
            waiting = [state for state, last in there if last.phase in _COLLECTIVE and state.rank not in named]
            return [*_merged(found), *(_with_waiting(finding, waiting) for finding in _merged(gone))]
        return self._hanging(run, there, now)

    def _hanging(self, run: RunState, there: Sequence[tuple[RankState, Row]], now: float) -> list[Finding]:
        """Ranks that beat and do not get on."""
        overdue = {state.rank for state, _ in there if state.phase_seconds(now) > self._limit(state)}
        in_phase = {phase: [(s, last) for s, last in there if last.phase == phase] for phase in _COLLECTIVE}
        arrived, in_backward = in_phase["communication"], in_phase["backward"]
        elsewhere = [(state, last) for state, last in there if last.phase not in _COLLECTIVE]
        if arrived and in_backward and not elsewhere:
            # Those in their backward pass are what the others wait for.
            elsewhere, in_backward = in_backward, []
        waiting = [state for state, _ in (*arrived, *in_backward)]
        if elsewhere:
            hanging = []
            for state, last in elsewhere:
                if state.rank in overdue:
                    rule = "stalled-data" if last.phase == "data" else "stalled-compute"
                    seconds = state.phase_seconds(now)
                    text = f"rank {state.rank} has been in {last.phase} for {seconds:.0f} s after step {last.step}"
                    hanging.append(Finding(rule, "stalled", (state.rank,), text))
            return [_with_waiting(finding, waiting) for finding in _merged(hanging)]
        if not waiting or len(overdue) < len(there):
            return []
        return [self._collective(run, there, "communication" if arrived else "backward", now)]

    def _collective(self, run: RunState, there: Sequence[tuple[RankState, Row]], phase: str, now: float) -> Finding:
        """All ranks that are there have been in a collective for too long."""
        steps = {state.rank: last.step for state, last in there}
        seconds = min(state.phase_seconds(now) for state, _ in there)
        left = [state.rank for state in run.ranks if state.end]
        alone = len(run.ranks) + len(run.missing) == 1
        if left:
            text = f"{_names(left)} left while {_wait(steps)} in {phase} for {seconds:.0f} s"
            return Finding("stalled-collective", "stalled", tuple(left), text)
        if alone and phase == "backward":
            text = f"rank {min(steps)} has been in backward for {seconds:.0f} s after step {min(steps.values())}"
            return Finding("stalled-compute", "stalled", tuple(steps), text)
        behind = [rank for rank, step in steps.items() if step < max(steps.values())]
        if behind:
            text = (
                f"all ranks have been in {phase} for {seconds:.0f} s, each in another collective: {_names(behind)} "
                f"after step {min(steps.values())}, others after step {max(steps.values())}"
            )
            return Finding("stalled-collective", "stalled", tuple(behind), text)
        text = (
            f"all ranks have been in {phase} for {seconds:.0f} s after step {max(steps.values())}: "
            "every one has arrived, so look at the network or the backend"
        )
        return Finding("stalled-collective", "stalled", tuple(steps), text)

    def _limit(self, state: RankState) -> float:
        """How many seconds the rank may stay in its phase."""
        assert state.last is not None
        if not state.steps:  # compiling
            return self._config.startup_s
        if state.last.phase in _PAUSES:
            return self._config.pause_s
        return max(self._config.stall_s, self._config.stall_factor * state.step_seconds())

    def _by_rank(self, ranks: Sequence[RankState]) -> list[Finding]:
        return _merged(
            Finding(rule, severity, (state.rank,), f"rank {state.rank}: {text}")
            for rule, severity, describe in RULES
            for state in ranks
            if (text := describe(self, state))
        )

    def _not_finite(self, state: RankState) -> str | None:
        # All that came since the last look, at the first look the newest: what lies further back is history.
        fresh = state.step_count - self._looked_at.get(state.rank, state.step_count)
        self._looked_at[state.rank] = state.step_count
        rows = list(state.steps)[-max(1, fresh) :]
        broken = next((row for row in rows if not math.isfinite(row.loss) or not math.isfinite(row.grad_norm)), None)
        if broken is None:
            return None
        return f"loss = {broken.loss} and gradient norm = {broken.grad_norm} at step {broken.step} must be finite"

    def _rising_loss(self, state: RankState) -> str | None:
        count = self._config.loss_steps
        losses = [row.loss for row in state.steps if math.isfinite(row.loss)]
        if len(losses) < 2 * count:
            return None
        # Medians over stretches of that length: the best single step is luck.
        best = min(statistics.median(losses[i : i + count]) for i in range(0, len(losses) - 2 * count + 1, count))
        low = min(losses[-count:])
        if low - best <= self._config.loss_rise:
            return None
        return f"the loss has been at least {low:.3f} for {count} steps, and its best was {best:.3f}"

    def _low_throughput(self, state: RankState) -> str | None:
        count = self._config.throughput_steps
        rates = [row.tokens_per_s for row in self._after_warmup(state) if math.isfinite(row.tokens_per_s)]
        if len(rates) < 2 * count:
            return None
        usual = statistics.median(rates[:-count])
        high = max(rates[-count:])
        if high >= self._config.throughput_fraction * usual:
            return None
        return f"at most {high:,.0f} tokens/s for {count} steps, and {usual:,.0f} before"

    def _collapsed_gates(self, state: RankState) -> str | None:
        reports = list(state.gates)[-self._config.gate_reports :]
        if len(reports) < self._config.gate_reports:
            return None
        for layer in reports[-1]:
            for index, branch in enumerate(BRANCHES):
                shares = [_share(report.get(layer), index) for report in reports]
                if all(share is not None and share < self._config.gate_share for share in shares):
                    return (
                        f"the share of the {branch} branch in the gates of layer {layer} has been below "
                        f"{self._config.gate_share:g} in {len(reports)} reports"
                    )
        return None

    def _growing_memory(self, state: RankState) -> str | None:
        quarter = self._config.memory_steps // 4
        rows = self._after_warmup(state)[-4 * quarter :]
        if len(rows) < 4 * quarter:
            return None
        columns: dict[str, list[int]] = {
            "resident memory": [row.rss for row in rows],
            "device memory": [row.device_bytes for row in rows if row.device_bytes is not None],
        }
        for name, values in columns.items():
            if len(values) < len(rows):
                continue
            medians = [statistics.median(values[i * quarter : (i + 1) * quarter]) for i in range(4)]
            # From each quarter to the next: a jump, or growth that flattens, is not a leak.
            if all(b > a * (1 + self._config.memory_growth) for a, b in itertools.pairwise(medians)):
                rate = (medians[-1] - medians[0]) / (3 * quarter)
                first, last = medians[0] / 1e6, medians[-1] / 1e6
                return f"{name} grows by {rate / 1e6:.3g} MB a step, from {first:,.0f} MB to {last:,.0f} MB"
        return None

    def _after_warmup(self, state: RankState) -> list[StepBeat]:
        dropped = state.step_count - len(state.steps)  # the oldest rows are not kept
        return list(state.steps)[max(0, self._config.warmup_steps - dropped) :]


# What is found in the rows of one rank: name, severity, and what describes it, None where there is nothing to say.
RULES: tuple[tuple[str, Severity, Callable[[Watchdog, RankState], str | None]], ...] = (
    ("diverging", "diverged", Watchdog._rising_loss),
    ("nonfinite", "diverged", Watchdog._not_finite),
    ("throughput", "degraded", Watchdog._low_throughput),
    ("gates", "degraded", Watchdog._collapsed_gates),
    ("memory", "degraded", Watchdog._growing_memory),
)


class Actions:
    """Carries out what the configuration says is to be done about a finding.

    Every action says so in a line on stderr and a row in ``watchdog.jsonl``. To be started again, the ranks of this
    machine are killed when they have written their stacks.
    """

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory

    def take(self, action: Action, finding: Finding, run: RunState) -> None:
        """Do it. What cannot be written to the disk is said on stderr."""
        print(f"watchdog: {finding.message} [{finding.severity}, {action}]", file=sys.stderr)
        try:
            if action == "halt":
                request_halt(self._directory, f"watchdog: {finding.message}")
            dumped = [] if action == "warn" else self._dump(finding, run)
            self._record(action, finding, dumped)
        except OSError as error:
            print(f"watchdog: '{self._directory}' cannot be written: {error.strerror}", file=sys.stderr)
        if action == "restart":
            time.sleep(_DUMP_SECONDS)
            for state in run.ranks:
                self._signal(state, signal.SIGKILL)

    def _record(self, action: Action, finding: Finding, dumped: Sequence[int]) -> None:
        with contextlib.closing(JsonlWriter(self._directory / WATCHDOG_FILE)) as writer:
            ranks = {"ranks": finding.ranks[:_MAX_NAMED], "dumped": dumped[:_MAX_NAMED]}
            writer.append({"time": time.time(), **asdict(finding), "action": action, **ranks})

    def _dump(self, finding: Finding, run: RunState) -> list[int]:
        """Have the ranks of this machine write their stacks; returns those that were reached."""
        running = [state for state in run.ranks if state.process == "running" and not state.end]
        for state in running:
            write_stack_header(stacks_path(self._directory, state.rank), finding.message)
        return [state.rank for state in running if self._signal(state, signal.SIGUSR1)]

    def _signal(self, state: RankState, signum: int) -> bool:
        if state.start is None or state.end or state.process in ("dead", "remote"):
            return False
        path = heartbeat_path(self._directory, state.rank)
        return send_signal(state.start.pid, state.start.started, signum, holds=path)


def action_for(finding: Finding, config: WatchdogSection) -> Action:
    """What the configuration says is to be done about a finding."""
    actions: dict[Severity, Action] = {
        "stalled": config.on_stalled,
        "diverged": config.on_diverged,
        "degraded": config.on_degraded,
    }
    return actions[finding.severity]


def run_watchdog(
    run_directory: Path,
    config: WatchdogSection,
    actions: Actions,
    stop_event: threading.Event,
    *,
    since: float = 0.0,
) -> None:
    """Watch a run until `stop_event` is set, for a thread of the launcher.

    `since` is the unix time of the launch; what earlier attempts left behind is not looked at.
    """
    files, watchdog = HeartbeatFiles(run_directory), Watchdog(config)
    while not stop_event.wait(config.interval_s):
        run = present_attempt(files.read(), since)
        for finding in watchdog.observe(run):
            action = action_for(finding, config)
            actions.take(action, finding, run)
            if action == "restart":
                since = time.time()  # of the killed ranks no more is said
                break


def _with_waiting(finding: Finding, waiting: Sequence[RankState]) -> Finding:
    if not waiting:
        return finding
    return replace(finding, message=f"{finding.message}; {_wait(state.rank for state in waiting)} in a collective")


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a rule, in the words of its first."""
    rules: dict[str, list[Finding]] = {}
    for finding in findings:
        rules.setdefault(finding.rule, []).append(finding)
    merged = []
    for first, *others in rules.values():
        ranks = tuple(rank for finding in others for rank in finding.ranks)
        likewise = f"; {_names(ranks)} likewise" if ranks else ""
        merged.append(replace(first, ranks=(*first.ranks, *ranks), message=first.message + likewise))
    return merged


def _key(finding: Finding) -> tuple[str, tuple[int, ...]]:
    """What makes a finding the same as an earlier one: of a stall, the ranks to blame belong to it."""
    return finding.rule, finding.ranks if finding.severity == "stalled" else ()


def _wait(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"{_names(numbers)} {'wait' if len(numbers) > 1 else 'waits'}"


def _names(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _share(gates: Sequence[float] | None, index: int) -> float | None:
    if gates is None:
        return None
    total = sum(gates)
    if not math.isfinite(total):
        return None
    return gates[index] / total if total > 0 else 0.0

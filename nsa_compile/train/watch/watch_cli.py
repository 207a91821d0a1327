"""``nsa-compile watch``: one look at a run, or one every few seconds. Imports no torch."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal

import click

from nsa_compile.branches import BRANCHES
from nsa_compile.config import RunConfig, load_config
from nsa_compile.errors import UserError
from nsa_compile.train.records.jsonl import to_json
from nsa_compile.train.watch.halt import HALT_EXIT_CODE
from nsa_compile.train.watch.heartbeat import heartbeat_ranks
from nsa_compile.train.watch.run_state import HeartbeatFiles, RankState, RunState, present_attempt
from nsa_compile.train.watch.watchdog import Actions, Finding, Watchdog

_INITIALS = tuple(branch[0] for branch in BRANCHES)


@click.command()
@click.argument("run")
@click.option("--once", is_flag=True, help="Look once instead of until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout when done.")
@click.option(
    "--set", "overrides", metavar="watchdog.KEY=VALUE", multiple=True, help="Override one limit of the run's watchdog."
)
@click.option(
    "--action",
    type=click.Choice(["warn", "dump", "halt"]),
    help="What to do about a stall or a divergence, with a row in watchdog.jsonl; without it, only look.",
)
@click.pass_context
def watch(
    ctx: click.Context,
    run: str,
    once: bool,
    as_json: bool,
    overrides: tuple[str, ...],
    action: Literal["warn", "dump", "halt"] | None,
) -> None:
    """Show what every rank of a run is doing, until the run ends, stalls or diverges.

    Leaves with exit code 0 when the run ended well (with --once: when nothing stalls), and with 4 when it is stalled, a
    rank died, or the loss diverged.

    \b
    nsa-compile watch runs/shakespeare-cpu-20260101-120000
    nsa-compile watch runs/shakespeare-cpu-20260101-120000 --once --json
    nsa-compile watch runs/shakespeare-cpu-20260101-120000 --set watchdog.stall_s=60 --action dump
    """
    directory = Path(run)
    run_config = _config(directory, overrides)
    config, steps = run_config.watchdog, run_config.train.steps
    files, watchdog = HeartbeatFiles(directory), Watchdog(config)
    screen = _Screen()
    said: list[Finding] = []
    while True:
        state = present_attempt(files.read())
        if not state.ranks:
            raise UserError(f"the heartbeats of '{run}' hold no whole row yet; wait for the training to start")
        fresh = watchdog.observe(state)
        said += fresh
        if not as_json:
            screen.show(f"{_progress(state, steps)}\n\n{_table(state)}")
        for finding in fresh:
            if action and finding.severity != "degraded":
                Actions(directory).take(action, finding, state)
            else:
                click.echo(f"{finding.severity}: {finding.message}", err=True)
                screen.keep()
        broken = any(finding.severity != "degraded" for finding in watchdog.active)
        if once or broken or state.ended:
            break
        time.sleep(config.interval_s)
    if as_json:
        status = "ended" if state.ended and not broken else "broken" if broken else "running"
        ranks = [_row(rank, time.time()) for rank in state.ranks]
        findings = [vars(finding) for finding in said]
        report = {
            "run": run,
            "status": status,
            "steps": steps,
            "left_s": _left(state, steps),
            "ranks": ranks,
            "findings": findings,
        }
        click.echo(json.dumps(to_json(report), indent=2))
    if broken:
        ctx.exit(HALT_EXIT_CODE)


def _config(directory: Path, overrides: tuple[str, ...]) -> RunConfig:
    """The run's own configuration, with the limits changed as the user says."""
    path = directory / "config.resolved.yaml"
    if not path.is_file():
        raise UserError(f"'{directory}' must be the directory of a run, with '{path.name}' in it; see ls runs")
    for override in overrides:
        if not override.startswith("watchdog."):
            raise UserError(
                f"--set '{override}' must begin with 'watchdog.': a run that is being watched keeps its configuration; "
                "leave it out"
            )
    config = load_config(str(path), overrides)
    if not heartbeat_ranks(directory):
        raise UserError(
            f"run '{directory}' has no heartbeat_rank0.jsonl yet; wait for its training to start, "
            "or see whether its watchdog.enabled is false"
        )
    return config


class _Screen:
    """Draws a table over the one before in a terminal, and below it elsewhere."""

    def __init__(self) -> None:
        self._lines = 0

    def show(self, text: str) -> None:
        if sys.stdout.isatty():
            # A line that wraps would count as two.
            width = shutil.get_terminal_size().columns
            text = "\n".join(line[:width] for line in text.splitlines())
            if self._lines:
                click.echo(f"\x1b[{self._lines}A\x1b[J", nl=False)
        click.echo(text)
        self._lines = text.count("\n") + 1

    def keep(self) -> None:
        """Leave what is on the screen."""
        self._lines = 0


def _progress(run: RunState, steps: int) -> str:
    """`473 of 40,000 steps, 3 h 20 min left`, by the slowest rank."""
    left = _left(run, steps)
    time_left = "" if left is None or run.ended else f", {duration(left)} left"
    return f"{_done(run):,} of {steps:,} steps{time_left}"


def _left(run: RunState, steps: int) -> float | None:
    """Seconds that the remaining steps take at the pace of the last ones; None before there is a pace, and where a rank
    is gone, which takes none of them."""
    if any(state.failed or (state.process == "dead" and not state.end) for state in run.ranks):
        return None
    pace = max((state.step_seconds() for state in run.ranks), default=0.0)
    return max(0, steps - _done(run)) * pace if pace else None


def _done(run: RunState) -> int:
    return 0 if run.missing else min(state.last.step if state.last else 0 for state in run.ranks)


def duration(seconds: float) -> str:
    """A time in its two largest units: `3 h 20 min`, `5 min 7 s`, `42 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((i for i, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or unit == parts[first][1])


def _table(run: RunState) -> str:
    from tabulate import tabulate

    now = time.time()
    rows = []
    for state in run.ranks:
        row = _row(state, now)
        gates = row["gates"]
        process = "" if row["process"] == "running" else f" ({row['process']})"
        rows.append(
            (
                row["rank"],
                row["step"],
                f"{row['phase']}{process}, {row['phase_s']:.0f} s",
                _number(row["loss"], ".4f"),
                _number(row["tokens_per_s"], ",.0f"),
                f"{row['rss'] / 1e6:,.0f} MB",
                "–" if gates is None else " ".join(f"{gates[b]:.2f}" for b in _INITIALS),
            )
        )
    rows += [(rank, "–", "not started", "–", "–", "–", "–") for rank in run.missing]
    headers = ("rank", "step", "phase, since", "loss", "tokens/s", "memory", f"gates {' '.join(_INITIALS)}")
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("right", "right", "left", *["right"] * 4))


def _row(state: RankState, now: float) -> dict[str, Any]:
    """What is shown of a rank; gates are means over the layers of the newest report."""
    assert state.last is not None
    step = state.steps[-1] if state.steps else None
    gates = None
    if state.gates:
        layers = list(state.gates[-1].values())
        gates = {branch: sum(layer[i] for layer in layers) / len(layers) for i, branch in enumerate(_INITIALS)}
    process = ("failed" if state.failed else "ended") if state.end else state.process
    return {
        "rank": state.rank,
        "process": process,
        "step": state.last.step,
        "phase": state.last.phase,
        "phase_s": round(state.last.phase_s if state.end else state.phase_seconds(now), 1),
        "silent_s": round(state.silence(now), 1),
        "loss": step.loss if step else None,
        "grad_norm": step.grad_norm if step else None,
        "tokens_per_s": step.tokens_per_s if step else None,
        "rss": state.last.rss,
        "gates": gates,
    }


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)

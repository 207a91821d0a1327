"""Running the phases of a validation, one after the other, and keeping what each came to.

A phase is one or more commands of `nsa-compile`, each in a process of its own: its JSON goes to
`<phase>/<command>.json`, its log to `<phase>/<command>.log`. What is read out of them is kept in
`<phase>/outcome.json`, so a validation that was stopped goes on with the first phase that has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nsa_compile.config import RunConfig, load_config
from nsa_compile.errors import UserError
from nsa_compile.experiments.runs import last_line, run_process
from nsa_compile.files import replace, write_json, write_text
from nsa_compile.machine.environment import git_revision
from nsa_compile.page import draw
from nsa_compile.train.records.run_directory import lock_run_directory

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SCHEMA = 1
# Exit codes by which a command says what it found: nothing, or something.
FOUND = (0, 1)


@dataclass(frozen=True)
class Effort:
    """How much work a validation puts in.

    Attributes:
        steps: optimizer steps of the baseline.
        arm_steps: optimizer steps of each run of a comparison.
        repeats: runs of each arm of a comparison.
        window: the last steps of a run that its throughput is the mean of.
        buckets: sizes in MB that are compared.
        parity_lens: sequence lengths of the loop and the operator of selected attention.
        verify_minutes: how long the equivalences are searched for a counterexample.
        profile_steps: optimizer steps that are profiled.
        stability_steps: optimizer steps of the long run.
    """

    steps: int
    arm_steps: int
    repeats: int
    window: int
    buckets: tuple[int, ...]
    parity_lens: tuple[int, ...]
    verify_minutes: float
    profile_steps: int
    stability_steps: int


PRESETS = {
    "quick": Effort(24, 10, 2, 6, (25, 100), (256,), 0.5, 3, 60),
    "full": Effort(300, 150, 5, 50, (25, 50, 100), (512, 2048), 10.0, 10, 1200),
}


@dataclass(frozen=True)
class Runbook:
    """What is validated, and how."""

    directory: Path
    config: RunConfig
    preset: str
    processes: int

    @property
    def effort(self) -> Effort:
        return PRESETS[self.preset]

    @property
    def config_file(self) -> Path:
        return self.directory / "config.resolved.yaml"


@dataclass(frozen=True)
class Figure:
    """A number of the report, with where it comes from.

    Attributes:
        file: relative to the directory of the validation.
        window: what it was taken over, for example `the last 50 steps`.
        n: how many values it comes from.
    """

    name: str
    value: str
    file: str
    window: str = ""
    n: int | None = None


@dataclass(frozen=True)
class Criterion:
    """A rule for acceptance, and whether it holds."""

    rule: str
    measured: str
    met: bool


@dataclass
class PhaseOutcome:
    """What a phase came to. It `failed` where it could not be carried out or found something wrong.

    `captions` are of the charts, by the file that holds what `page.draw` made.
    """

    phase: str
    title: str
    status: Literal["passed", "failed", "not applicable"]
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    criteria: list[Criterion] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PhaseOutcome:
        figures = [Figure(**figure) for figure in data.pop("figures")]
        criteria = [Criterion(**criterion) for criterion in data.pop("criteria")]
        return cls(**data, figures=figures, criteria=criteria)


class CommandFailed(Exception):
    """A command of a phase found nothing out; the message is a problem of the phase."""


class PhaseRun:
    """What a phase has at hand while it runs: commands to carry out, and its outcome to fill."""

    def __init__(self, plan: Runbook, outcome: PhaseOutcome) -> None:
        self.plan, self.outcome = plan, outcome
        self.folder = plan.directory / outcome.phase
        self.folder.mkdir(exist_ok=True)

    def command(self, name: str, *arguments: str) -> dict[str, Any]:
        """The JSON that `nsa-compile <arguments> --json` printed.

        Raises:
            CommandFailed: there is none, which ends the phase.
        """
        words = [*arguments, "--json"]
        self.outcome.commands.append(shlex.join(["nsa-compile", *words]))
        code, output = self.process(name, [sys.executable, "-m", "nsa_compile", *words], ".json")
        if code in FOUND:
            with contextlib.suppress(ValueError):
                document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
                return document
        raise CommandFailed(f"{name} left with exit code {code}: {last_line(self.folder / f'{name}.log')}")

    def process(self, name: str, words: Sequence[str], suffix: str) -> tuple[int, Path]:
        """Run a program; its exit code, and the file with what it printed."""
        output, log = self.folder / f"{name}{suffix}", self.folder / f"{name}.log"
        with output.open("wb") as out, log.open("wb") as err:
            code = run_process(words, stdout=out, stderr=err)
        self.artifact(output)
        self.artifact(log)
        return code, output

    def artifact(self, path: Path) -> None:
        name = self.relative(path)
        if path.is_file() and path.stat().st_size and name not in self.outcome.artifacts:
            self.outcome.artifacts.append(name)

    def chart(self, name: str, caption: str, make: Callable[[], Drawing]) -> bytes:
        """Draw a chart of the report's page; returns the content of a PNG file of it."""
        vectors, pixels = draw(make)
        path = self.folder / f"{name}.svg"
        replace(path, vectors.encode())
        self.outcome.captions[self.relative(path)] = caption
        return pixels

    def relative(self, path: Path) -> str:
        return path.relative_to(self.plan.directory).as_posix()

    def figure(self, name: str, value: str, file: str, window: str = "", n: int | None = None) -> None:
        self.outcome.figures.append(Figure(name, value, f"{self.outcome.phase}/{file}", window, n))

    def require(self, rule: str, measured: str, met: bool) -> None:
        self.outcome.criteria.append(Criterion(rule, measured, met))

    def problem(self, text: str) -> None:
        self.outcome.problems.append(text)

    def note(self, text: str) -> None:
        self.outcome.notes.append(text)


@dataclass(frozen=True)
class Phase:
    """One part of the runbook.

    Attributes:
        skip: why it does not apply to a plan; None where it does.
    """

    name: str
    title: str
    run: Callable[[PhaseRun], None]
    skip: Callable[[Runbook], str | None] = lambda plan: None


def begin(plan: Runbook) -> None:
    """Make the directory of a validation; a UserError where there is one already, or it cannot be made."""
    try:
        plan.directory.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"directory '{plan.directory}' cannot be made: {error.strerror}; choose another one with --out DIR"
        ) from None
    write_text(plan.config_file, plan.config.to_yaml())
    document = {"schema": SCHEMA, "preset": plan.preset, "processes": plan.processes}
    write_json(plan.directory / "plan.json", document | {"git": git_revision()}, durable=True)


def load_plan(directory: Path) -> Runbook:
    """The validation that a directory holds; a UserError where it is none that this version can go on with."""
    record = directory / "plan.json"
    if not record.is_file():
        raise UserError(f"'{directory}' holds no validation: it has no plan.json; --resume takes the directory of one")
    document = _read(record)
    if document.get("schema") != SCHEMA or document.get("preset") not in PRESETS:
        raise UserError(f"'{record}' is of another version of nsa-compile; begin a new validation")
    if document.get("git") != git_revision():
        raise UserError(
            f"'{directory}' is a validation of another revision of nsa-compile; "
            "its phases must be of one program; begin a new validation"
        )
    processes = document.get("processes")
    if not isinstance(processes, int) or processes < 1:
        raise UserError(f"'{record}' names no number of processes; begin a new validation")
    config = load_config(str(directory / "config.resolved.yaml"))
    return Runbook(directory.absolute(), config, document["preset"], processes)


def carry_out(
    plan: Runbook, phases: Sequence[Phase], tell: Callable[[Phase, PhaseOutcome | None], None]
) -> list[PhaseOutcome]:
    """Run every phase that has no outcome yet. `tell` hears of each twice: before with None, then with its outcome.

    Raises:
        UserError: another process is at it, or what an earlier one has left cannot be read.
    """
    outcomes = []
    with lock_run_directory(plan.directory):
        for phase in phases:
            tell(phase, None)
            outcome = kept_outcome(plan.directory, phase.name) or _run(plan, phase)
            outcomes.append(outcome)
            tell(phase, outcome)
    return outcomes


def kept_outcome(directory: Path, phase: str) -> PhaseOutcome | None:
    """What an earlier part of the validation found; None where it did not come that far."""
    path = directory / phase / "outcome.json"
    if not path.exists():
        return None
    try:
        return PhaseOutcome.from_dict(_read(path))
    except (KeyError, TypeError):
        raise UserError(f"'{path}' is not the outcome of a phase; delete its folder and resume again") from None


def _run(plan: Runbook, phase: Phase) -> PhaseOutcome:
    outcome = PhaseOutcome(phase.name, phase.title, "passed")
    work = PhaseRun(plan, outcome)
    if (reason := phase.skip(plan)) is not None:
        outcome.status = "not applicable"
        outcome.notes.append(reason)
    else:
        start = time.monotonic()
        try:
            phase.run(work)
        except CommandFailed as error:
            work.problem(str(error))
        outcome.seconds = time.monotonic() - start
        if outcome.problems or not all(criterion.met for criterion in outcome.criteria):
            outcome.status = "failed"
    # What is read back decides which phases are run again.
    write_json(work.folder / "outcome.json", dataclasses.asdict(outcome), durable=True)
    return outcome


def verdict(outcomes: Sequence[PhaseOutcome]) -> tuple[Literal["GO", "NO-GO"], list[str]]:
    """GO where every phase passed or does not apply; otherwise NO-GO with all reasons."""
    reasons = [f"{outcome.phase}: {problem}" for outcome in outcomes for problem in outcome.problems]
    reasons += [
        f"{outcome.phase}: {criterion.measured}, and the criterion is {criterion.rule}"
        for outcome in outcomes
        for criterion in outcome.criteria
        if not criterion.met
    ]
    return ("NO-GO" if reasons else "GO"), reasons


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("it must hold an object")
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read: {error}; delete its folder and resume again") from None
    return document

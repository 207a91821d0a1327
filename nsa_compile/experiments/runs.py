"""Training the variants of an experiment: each run a process of its own in a directory of its own, in turns.

Imports torch only to count the weights of a model that DDP trains. An experiment that was interrupted goes on in its
directory: what is finished there, of the same configuration, is not run again.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nsa_compile.config import RunConfig, load_config
from nsa_compile.errors import UserError
from nsa_compile.files import write_text
from nsa_compile.machine.preflight import check_run
from nsa_compile.train.distributed.buckets import effective_bucket_mb
from nsa_compile.train.distributed.world import check_port, check_world
from nsa_compile.train.records.rows import StepRow, row_parser
from nsa_compile.train.signals import EXIT_CODES

# What costs time between steps and says nothing of throughput; a --set of the user's wins.
TIMING = ("train.save_every=0", "train.sample_tokens=0")
MIN_STEPS = 4
# After SIGTERM a run may finish its step and write its last checkpoint.
GRACE_S = 120


@dataclass(frozen=True)
class Arm:
    """One variant: its name, its configuration, how many processes train it, and what differs, as it was given.

    ``bucket_mb`` is what ``ddp.bucket_mb`` comes to for its model; ``None`` where DDP sends nothing.
    """

    name: str
    config: RunConfig
    nproc: int = 1
    overrides: tuple[str, ...] = ()

    @cached_property
    def bucket_mb(self) -> float | None:
        return effective_bucket_mb(self.config, self.nproc)


@dataclass(frozen=True)
class RunResult:
    """What one run measured, over the last steps of its ``training.csv``.

    Attributes:
        arm, repeat: which run; repeats count from 1.
        tokens_per_s, deviation: mean and standard deviation over the steps of the window; of all processes together.
        first_step, last_step: the window, both included.
        summary: of the run; see ``summary.json``.
        threads: that torch used in each process.
    """

    arm: str
    repeat: int
    directory: str
    tokens_per_s: float
    deviation: float
    first_step: int
    last_step: int
    summary: Mapping[str, Any]
    threads: int | None = None


@dataclass(frozen=True)
class Failure:
    """A run that did not finish: the last line of its log, and where that is."""

    arm: str
    repeat: int
    exit_code: int
    log: str
    last_line: str


@dataclass
class Results:
    """The runs of an experiment, those that failed, and the order in which they were to be made."""

    runs: list[RunResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    order: list[tuple[str, int]] = field(default_factory=list)

    def of(self, arm: str) -> list[RunResult]:
        """The runs of one arm by repeat."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.repeat)

    def rounds(self, *arms: str) -> list[int]:
        """The repeats that all of these arms have."""
        return sorted(set.intersection(*({run.repeat for run in self.of(arm)} for arm in arms)))

    def rates(self, *arms: str) -> dict[str, list[float]]:
        """Tokens/s of the runs of these arms, over the repeats that all of them have."""
        rounds = self.rounds(*arms)
        return {arm: [run.tokens_per_s for run in self.of(arm) if run.repeat in rounds] for arm in arms}


def base_overrides(config_path: str | None, overrides: Sequence[str], steps: int | None) -> list[str]:
    """The ``--set`` options of every arm: the user's, and those that make a short run fit to be timed."""
    config = load_config(config_path, overrides)
    length = config.train.steps if steps is None else steps
    if length < MIN_STEPS:
        raise UserError(f"train.steps = {length} must be at least {MIN_STEPS}, so that some are left to measure")
    timing = [*TIMING, f"train.eval_every={length}"]  # before the first and after the last step only
    made = [*timing, *overrides]
    if steps is not None:
        # The learning rate costs no time; a long warm-up must not forbid a short run.
        made.append(f"train.steps={steps}")
        if config.optim.warmup is not None:
            made.append(f"optim.warmup={min(config.optim.warmup, steps)}")
    return made


def check_arms(arms: Sequence[Arm]) -> None:
    """Raise a UserError unless every arm can run here, before one is started. Imports no torch, unless for a GPU."""
    from nsa_compile.data import load_corpus

    for arm in arms:
        check_run(arm.config)
        check_world(arm.config, arm.nproc, arm.nproc)
        check_port(arm.config.ddp.port if arm.nproc > 1 else None)
        load_corpus(arm.config)


def run_order(arms: Sequence[str], repeats: int, seed: int) -> list[tuple[str, int]]:
    """Arm and repeat of each run: in every round each arm once, in a random order, the next round in its reverse.

    A machine that gets slower and slower does so to all arms alike.
    """
    rng = random.Random(seed)
    order: list[tuple[str, int]] = []
    turn: list[str] = []
    for repeat in range(1, repeats + 1):
        turn = turn[::-1] if repeat % 2 == 0 else rng.sample(list(arms), len(arms))
        order += [(arm, repeat) for arm in turn]
    return order


def run_arms(
    arms: Sequence[Arm],
    directory: Path,
    *,
    repeats: int,
    window: int,
    seed: int,
    threads: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Results]:
    """Train every arm `repeats` times and yield the results so far after each run; the last ones are complete.

    An arm that has failed once is not tried again. KeyboardInterrupt stops the present run and goes on up. The arms
    have different names; `threads` are those of each process, ``None`` leaves them to the runs, and the other
    arguments are those of `experiment.run_experiment`.
    """
    by_name = {arm.name: arm for arm in arms}
    results = Results(order=run_order(list(by_name), repeats, seed))
    for count, (name, repeat) in enumerate(results.order, start=1):
        label = f"run {count} of {len(results.order)}: {name}, repeat {repeat}"
        if any(failure.arm == name for failure in results.failures):
            tell(f"{label}: left out, because an earlier one of {name} failed")
            continue
        place = directory / slug(name) / f"repeat-{repeat}"
        found = _finished(by_name[name], place)
        if found is None:
            tell(label)
            failure = _train(by_name[name], repeat, place, threads)
            found = None if failure else _finished(by_name[name], place)
            if found is None:
                failure = failure or Failure(name, repeat, 0, str(place / "log.txt"), "it left no summary.json")
                results.failures.append(failure)
                tell(f"{label}: failed with exit code {failure.exit_code}: {failure.last_line} (see {failure.log})")
                yield results
                continue
        result = read_run(name, repeat, found, window)
        results.runs.append(result)
        tell(f"{label}: {result.tokens_per_s:,.0f} ± {result.deviation:,.0f} tokens/s")
        yield results


def read_run(arm: str, repeat: int, directory: Path, window: int) -> RunResult:
    """What a finished run measured over its last `window` steps, or over what its first quarter leaves.

    The first quarter is never counted: there the blocks are compiled and the caches filled.

    Raises:
        UserError: its files cannot be read.
    """
    path = directory / "training.csv"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            parse = row_parser(StepRow, reader.fieldnames or ())
            rows = [parse(cells) for cells in reader]
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        if not all(isinstance(summary.get(name), (int, float)) for name in ("parameters", "mfu")):
            raise ValueError("summary.json must hold the numbers parameters and mfu")
        environment = json.loads((directory / "env.json").read_text(encoding="utf-8"))
        threads = environment.get("machine", {}).get("torch_threads")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise UserError(f"run '{directory}' cannot be read: {error}; delete it, and it is made again") from None
    rows = rows[-(-len(rows) // 4) :][-window:]
    if len(rows) < 2:
        raise UserError(f"'{path}' has too few steps to measure; delete the run, and it is made again")
    rates = [row.tokens_per_s for row in rows]
    return RunResult(
        arm, repeat, str(directory), statistics.fmean(rates), statistics.stdev(rates), rows[0].step, rows[-1].step,
        summary, threads,
    )  # fmt: skip


def slug(name: str) -> str:
    """A name as a directory: letters, digits, '.', '_', '=' and '-'."""
    return "".join(char if char.isalnum() or char in "._=-" else "-" for char in name)


def _finished(arm: Arm, place: Path) -> Path | None:
    """The directory of a finished run of this arm below `place`."""
    for path in sorted(place.glob("*/summary.json"), reverse=True):
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            saved = load_config(str(path.with_name("config.resolved.yaml")))
        except (OSError, ValueError, UserError):
            continue
        if not isinstance(summary, dict):
            continue
        same = saved.model_copy(update={"run": arm.config.run}) == arm.config and saved.run.seed == arm.config.run.seed
        whole = summary.get("interrupted") is False and summary.get("resumed_from") is None
        if same and whole and summary.get("processes") == arm.nproc:
            return path.parent
    return None


def _train(arm: Arm, repeat: int, place: Path, threads: int | None) -> Failure | None:
    """Train one run; what went wrong, if something did."""
    place.mkdir(parents=True, exist_ok=True)
    config = arm.config.changed(run={"dir": str(place)})
    write_text(place / "config.yaml", config.to_yaml())
    command = [sys.executable, "-m", "nsa_compile", "train", "--json", "--config", str(place / "config.yaml")]
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    log = place / "log.txt"
    with log.open("w", encoding="utf-8") as file:
        words = [*command, "--nproc", str(arm.nproc)]
        code = run_process(words, stdout=subprocess.DEVNULL, stderr=file, env=environment)
    if code == 0:
        return None
    if code == EXIT_CODES["SIGINT"]:  # a Ctrl-C goes to all processes of a terminal
        raise KeyboardInterrupt
    return Failure(arm.name, repeat, code, str(log), last_line(log))


def last_line(log: Path) -> str:
    """The last words of a process that failed."""
    # A progress bar returns to the start of its line.
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def run_process(words: Sequence[str], **options: Any) -> int:
    """Run a program and return its exit code. It does not outlive this call, which SIGTERM leaves as Ctrl-C does."""

    def leave(signum: int, frame: object) -> None:
        sys.exit(EXIT_CODES["SIGTERM"])

    previous = signal.signal(signal.SIGTERM, leave)
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **options)
        return process.wait()
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        signal.signal(signal.SIGTERM, previous)

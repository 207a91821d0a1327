"""Whole models of a stranger's making, drawn, run as written and compiled: counts by verdict, failures by cause.

    python -m benchmarks.model_programs --count 2000 --seed 0
    python -m benchmarks.model_programs --count 100000 --jobs 2 --out programs.json
    python -m benchmarks.model_programs --only 17,230 --shrink 2        # these programs of the seed again
    python -m benchmarks.model_programs --count 80 --nested inductor    # the same, with Inductor behind the passes

The programs are those of `tests/model_programs.py`, judged by `tests/model_judge.py` in processes that may die or hang.
A failing program is shrunk to the statements that it needs. Failures of the same verdict that hold all pieces of a
shrunk one are counted to it, so a group is one cause, mostly. Exit code 1 if any program failed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Before torch is imported, here and in the workers: programs are tiny and run one to a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import click

from nsa_compile.profiles.measure import make_record, write_record
from tests.model_judge import VERDICTS, Verdict, judge_in_time, shrink, with_nested
from tests.model_programs import draw

SECONDS = 30  # of processor time that a program may take
PATIENCE = 10  # a busy machine takes so many times longer
SHRINK_SECONDS = 600
NESTED = ("eager", "aot_eager", "inductor")
TASKS_A_WORKER = 300  # Dynamo keeps some of each program it has seen
# Pieces that nearly every program has: they say nothing about a cause.
COMMON = {"scan", "output", "argument", "first carry", "scanned input", "rows", "final carry", "run plain", "cache"}


# -------------------------------------------------------------------------------------------------------------- workers


def worker(pipe: Connection) -> None:
    """Judge and shrink what comes down the pipe."""
    import gc

    spare_dynamo()
    spare_inductor()
    gc.disable()  # one collection every few programs costs a fifth less than torch's many objects do
    logging.disable(logging.CRITICAL)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # programs print, and so do Dynamo's complaints
    os.dup2(devnull, 2)
    for n in range(TASKS_A_WORKER):
        task = pipe.recv()
        if task is None:
            return
        pipe.send(judge_in_time(task[1], SECONDS) if task[0] == "judge" else shrunk(*task[1:]))
        if n % 20 == 0:
            gc.collect()
        if n == 0:
            gc.freeze()  # all that torch imports at its first program


def spare_dynamo() -> None:
    """Take from Dynamo what changes no program: a collection of garbage and a timing of the guards at each."""
    import torch._dynamo.guards

    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def spare_inductor() -> None:
    """Let Inductor draw the random numbers of eager mode, so that they can be compared, and compile in this process."""
    import torch._inductor.config

    torch._inductor.config.fallback_random = True
    torch._inductor.config.compile_threads = 1


def shrunk(source: str, verdict: Verdict) -> str:
    """The smallest program found that gets the same verdict for the same cause."""
    end = time.monotonic() + SHRINK_SECONDS / 2

    def fails(candidate: str) -> bool:
        if time.monotonic() > end:
            return False
        return judge_in_time(candidate, SECONDS) == verdict

    return shrink(source, fails)


class Worker:
    """A process that judges one program at a time, replaced when it dies, hangs or has had its share."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.left = TASKS_A_WORKER

    def give(self, key: Any, task: tuple, seconds: float) -> None:
        if self.left == 0:
            self.stop()
            self.start()
        self.left -= 1
        # The first program of a process waits for the imports.
        self.key, self.deadline = key, time.monotonic() + seconds + 60
        self.pipe.send(task)

    def result(self) -> Any:
        """What came back, or a verdict on the process."""
        try:
            if self.pipe.poll(0):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.stop()
            code = self.process.exitcode
            self.start()
            return Verdict("crash", f"the process ended with {code}")
        self.stop()
        self.start()
        return Verdict("timeout", "hangs where no signal reaches it")

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def in_workers(tasks: Iterable[tuple[Any, tuple]], jobs: int, seconds: float) -> Iterator[tuple[Any, Any]]:
    """(key, result) of each (key, task), in the order in which they end."""
    waiting = iter(tasks)
    idle, busy = [Worker() for _ in range(jobs)], []
    try:
        while True:
            while idle and (task := next(waiting, None)) is not None:
                idle[-1].give(*task, seconds)
                busy.append(idle.pop())
            if not busy:
                return
            ready = wait([w.pipe for w in busy], timeout=1.0)
            now = time.monotonic()
            for w in [w for w in busy if w.pipe in ready or now > w.deadline]:
                busy.remove(w)
                result = w.result()
                idle.append(w)
                yield w.key, result
    finally:
        for w in idle + busy:
            w.stop()


# --------------------------------------------------------------------------------------------------------------- groups


@dataclass
class Group:
    """Failures with one cause, as far as the pieces of the shrunk example tell."""

    verdict: Verdict
    pieces: frozenset[str]
    source: str
    programs: list[int] = field(default_factory=list)

    def explains(self, verdict: Verdict, pieces: frozenset[str]) -> bool:
        return verdict == self.verdict and (verdict.kind == "crash" or self.pieces <= pieces)


def pieces_of(source: str) -> frozenset[str]:
    return frozenset(line.split("#: ")[1] for line in source.splitlines() if "#: " in line) - COMMON


def group(failures: dict[int, Verdict], sources: dict[int, str], examples: int, jobs: int) -> list[Group]:
    """Shrink the smallest failure that no group explains yet, until all are explained or `examples` have been shrunk.

    What is left over after that makes groups by verdict and cause.
    """
    pieces = {number: pieces_of(source) for number, source in sources.items()}
    groups: list[Group] = []
    unexplained = sorted(failures, key=lambda number: len(sources[number]))
    while unexplained and examples > 0:
        # One of each verdict and cause in a round, so that the rounds can be shrunk side by side.
        chosen = list({failures[number]: number for number in reversed(unexplained)}.values())[
            : min(examples, 8 * jobs)
        ]
        examples -= len(chosen)
        tasks = [(n, ("shrink", sources[n], failures[n])) for n in chosen]
        for number, source in in_workers(tasks, jobs, SHRINK_SECONDS):
            if not isinstance(source, str):  # the process died of it
                source = sources[number]
            groups.append(Group(failures[number], pieces_of(source), source))
            print(f"\n[{number}] {failures[number].kind}: {failures[number].cause}\n{essence(source)}", flush=True)
        unexplained = [n for n in unexplained if not any(g.explains(failures[n], pieces[n]) for g in groups)]
    for number, verdict in failures.items():
        owner = next((g for g in groups if g.explains(verdict, pieces[number])), None)
        if owner is None:
            owner = next((g for g in groups if g.verdict == verdict and g.source == ""), None)
        if owner is None:
            owner = Group(verdict, frozenset({"not shrunk"}), "")
            groups.append(owner)
        owner.programs.append(number)
    return sorted((g for g in groups if g.programs), key=lambda g: -len(g.programs))


def essence(source: str) -> str:
    """The part of a program that differs from the others."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("CALLS"))
    plain = ("TABLE =", "GAIN =", "NUMBER =", "GENERATOR =")
    return "\n".join(line for line in lines[start:] if line.strip() and not line.startswith(plain))


# -------------------------------------------------------------------------------------------------------------- command


@click.command()
@click.option("--count", default=1000, show_default=True, help="Programs.")
@click.option("--seed", default=0, show_default=True, help="Seed; program n of a seed is always the same.")
@click.option("--first", default=0, show_default=True, help="Number of the first program.")
@click.option("--only", default="", help="Numbers of single programs, separated by commas.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--shrink", "examples", default=20, show_default=True, help="Failures to shrink at most.")
@click.option("--nested", type=click.Choice(NESTED), default=None, help="Nested backend, instead of the drawn one.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Record as JSON.")
def main(
    count: int, seed: int, first: int, only: str, jobs: int, examples: int, nested: str | None, out: Path | None
) -> None:
    """Judge drawn programs and group what fails."""
    numbers = [int(n) for n in only.split(",")] if only else list(range(first, first + count))
    began = time.monotonic()
    verdicts: dict[int, Verdict] = {}

    def source_of(number: int) -> str:
        source = draw(seed, number).source
        return with_nested(source, nested) if nested else source

    tasks = ((n, ("judge", source_of(n))) for n in numbers)
    for number, verdict in in_workers(tasks, jobs, SECONDS * PATIENCE):
        verdicts[number] = verdict
        if verdict.failed:
            print(f"[{number}] {verdict.kind}: {verdict.cause}", flush=True)
        if len(verdicts) % 200 == 0:
            print(f"{len(verdicts)} programs, {time.monotonic() - began:.0f} s: {counts(verdicts)}", flush=True)
    seconds = time.monotonic() - began
    print(f"{len(verdicts)} programs in {seconds:.0f} s\n" + json.dumps(counts(verdicts), indent=2))
    for kind in ("one_line_error", "eager_fails"):
        causes = Counter(v.cause for v in verdicts.values() if v.kind == kind)
        print(f"\n{kind}:" + "".join(f"\n{n:6}  {cause}" for cause, n in causes.most_common(25)))
    failures = {n: v for n, v in verdicts.items() if v.failed}
    groups = group(failures, {n: source_of(n) for n in failures}, examples, jobs)
    for g in groups:
        named = ", ".join(map(str, g.programs[:6]))
        print(
            f"\n{len(g.programs)} programs ({named}): {g.verdict.kind}, {g.verdict.cause}\n  pieces: {sorted(g.pieces)}"
        )
    if out:
        rows = [
            {
                "verdict": g.verdict.kind,
                "cause": g.verdict.cause,
                "pieces": sorted(g.pieces),
                "programs": g.programs,
                "source": g.source,
            }
            for g in groups
        ]
        settings = {"seed": seed, "nested": nested or "as drawn", "programs": len(verdicts), "seconds": seconds}
        errors = Counter(v.cause for v in verdicts.values() if v.kind == "one_line_error")
        more = {"counts": counts(verdicts), "one_line_errors": dict(errors.most_common())}
        write_record(out, make_record("model programs", settings, rows, **more))
    raise SystemExit(bool(failures))


def counts(verdicts: dict[int, Verdict]) -> dict[str, int]:
    found = Counter(v.kind for v in verdicts.values())
    return {kind: found[kind] for kind in VERDICTS if found[kind]}


if __name__ == "__main__":
    main()

"""The whole comparison on a GPU machine: one JSON record and its tables in Markdown.

    PYTHONPATH=. python -m benchmarks.gpu --minutes 25 --out gpu_results

runs from a checkout, with torch for CUDA (its Triton comes along), numpy, pydantic, pyyaml, click and tabulate. Other
NSA kernels take part where they can be imported: `fla.ops.nsa`, `native_sparse_attention`, `fsa` with `nsa_ref`,
`flash_nsa`. When the minutes are over, what is left says so; the same command goes on from there.

    PYTHONPATH=. python -m benchmarks.gpu --device cpu --smoke --out /tmp/dry

runs the same code with tiny sizes on a CPU.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.bars import judge
from benchmarks.gpu.compiled_step import inspect_step
from benchmarks.gpu.contenders import CONTENDERS, WINDOW_CONTENDERS, Contender, NotAvailable
from benchmarks.gpu.orders import keep_orders, measure_order, shapes
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.tables import render
from benchmarks.gpu.training import PRESETS, SEQ_LENS, measure_training
from nsa_compile.models import SparsePattern
from nsa_compile.ops.dispatch import choose_kernel, observe
from nsa_compile.profiles.measure import make_record, not_measured, write_record

log = logging.getLogger("benchmarks.gpu")

TIME_UP = "time was up; the same command goes on"
TOGETHER = "all together"
TINY = SparsePattern(compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=32)


class Run:
    """A record on disk that grows cell by cell."""

    def __init__(self, out: Path, device: torch.device, minutes: float, settings: dict[str, Any]) -> None:
        self.path, self.device = out / "gpu.json", device
        self.deadline = time.monotonic() + 60 * minutes
        fresh = make_record("gpu", settings, [], device)
        del fresh["results"]
        self.record: dict[str, Any] = fresh | {"small_checks": {}, "orders": {}, "attention": {}, "training": {}}
        self.record |= {"step": {}, "crashed": [], "running": None}
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if identity(before) != identity(self.record):
                raise click.UsageError(f"--out {out}: {self.path} is of another machine, commit or size: another")
            self.record |= before
        if self.record["running"]:  # the process before this one did not survive it
            self.record["crashed"].append(self.record["running"])

    def cell(self, part: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a cell, unless that has been done or time is up. A cell that fails says why, and others go on."""
        done = self.record[part].get(name)
        if done is not None and done.get("not_measured") != TIME_UP:
            return
        if time.monotonic() > self.deadline:
            result = not_measured(TIME_UP)
        elif [name, TOGETHER] in self.record["crashed"]:
            result = not_measured("broke the device")
        else:
            log.info("%s: %s", part, name)
            start = time.monotonic()
            self.enter(name, TOGETHER)
            try:
                result = measure()
            except attention.DeviceBroken:
                raise
            except NotAvailable as why:
                result = not_measured(str(why))
            except Exception as error:
                result = not_measured(attention.reason(error))
                log.exception("%s: %s failed", part, name)
            result["took_s"] = time.monotonic() - start
        self.record["running"] = None
        self.record[part][name] = result
        self.save()

    def enter(self, name: str, who: str) -> None:
        """Note on disk what is about to run, so that a process that dies of it leaves its name."""
        self.record["running"] = [name, who]
        write_record(self.path, self.record)

    def save(self) -> None:
        """Write the record with its verdicts, and the tables beside it."""
        self.record["bars"] = judge(self.record)
        write_record(self.path, self.record)
        self.path.with_suffix(".md").write_text(render(self.record), encoding="utf-8")

    def attention_cell(
        self, name: str, problem: Problem, seconds: float, contenders: Sequence[Contender] = CONTENDERS
    ) -> dict[str, Any]:
        return attention.measure_cell(
            problem,
            self.device,
            contenders,
            seconds=seconds,
            small_checks=self.record["small_checks"],
            crashed=[who for cell, who in self.record["crashed"] if cell == name],
            entering=lambda who: self.enter(name, who or TOGETHER),
        )


def identity(record: dict[str, Any]) -> list[Any]:
    """What must be the same before a record may be continued."""
    environment = record["environment"]
    return [record["settings"], environment["machine"], environment["packages"], environment["git"]["sha"]]


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch finds no GPU here; --device cpu --smoke is a dry run")
    device = torch.device(name)
    if device.type == "cuda":
        with observe() as uses:
            for operator in ("window", "compressed", "selected"):
                choose_kernel(operator, torch.empty(0, dtype=torch.bfloat16, device=device))
        for use in uses:
            if use.reason is not None:
                raise click.UsageError(f"{use.operator} attention would not run in Triton: {use.reason}")
    return device


class Cell(NamedTuple):
    part: str
    name: str
    measure: Callable[[], dict[str, Any]]
    turn: int  # the more bars rest on it, the earlier


def cells(run: Run, smoke: bool) -> Iterator[Cell]:
    """All there is to measure but the loop orders."""
    base = Problem(0, 1)
    lengths, heads, seconds = attention.SEQ_LENS, attention.HEADS_PER_GROUP, attention.SECONDS_PER_CELL
    if smoke:
        base = Problem(0, 1, 4, 16, pattern=TINY, dtype=torch.float32)
        lengths, heads, seconds = (160,), (4,), 0.0
    for problem in attention.problems(lengths, heads, base):
        name = f"S={problem.seq_len} tiny" if smoke else attention.key(problem)
        measure = partial(run.attention_cell, name, problem, seconds)
        if problem.pattern == base.pattern:
            least = 0 if problem.seq_len in lengths[:3] else 2
            turn = max(least, {16: 0, 4: 2}.get(problem.heads // problem.groups, 3))
        else:  # for a package that knows no other
            turn = 2 if find_spec("fla") else 3
        yield Cell("attention", name, measure, turn)
    for problem in attention.problems(lengths[:2], heads[:1], base):
        if problem.pattern == base.pattern:
            name = f"S={problem.seq_len} window"
            measure = partial(run.attention_cell, name, problem, seconds, WINDOW_CONTENDERS)
            yield Cell("attention", name, measure, 2)
    presets, lengths = (PRESETS[:1], (32,)) if smoke else (PRESETS, SEQ_LENS)
    for preset in presets:
        for length in lengths:
            turn = 1 if (preset, length) == (PRESETS[0], SEQ_LENS[0]) else 3
            measure = partial(measure_training, preset, length, run.device, smoke)
            yield Cell("training", f"{preset.name} S={length}", measure, turn)
        measure = partial(inspect_step, preset, lengths[0], run.device, smoke)
        yield Cell("step", preset.name, measure, 1 if preset == PRESETS[0] else 3)


@click.command()
@click.option("--orders", "orders_part", is_flag=True, help="Only these parts: loop orders of selected attention, …")
@click.option("--attention", "attention_part", is_flag=True, help="… one layer of attention, …")
@click.option("--training", "training_part", is_flag=True, help="… training steps of the presets, …")
@click.option("--profile", "step_part", is_flag=True, help="… syncs, graph breaks and CUDA graphs of the step.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--smoke", is_flag=True, help="Tiny sizes: does it run?")
@click.option("--minutes", default=25.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("gpu_results"), show_default=True)
def main(
    orders_part: bool,
    attention_part: bool,
    training_part: bool,
    step_part: bool,
    device: str,
    smoke: bool,
    minutes: float,
    out: Path,
) -> None:
    """Measure NSA against dense attention and public NSA kernels; write OUT/gpu.json and OUT/gpu.md."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if device == "cpu" and not smoke:
        raise click.UsageError("--device cpu is for a dry run: add --smoke")
    chosen = {"orders": orders_part, "attention": attention_part, "training": training_part, "step": step_part}
    if not any(chosen.values()):
        chosen = dict.fromkeys(chosen, True)
    end = time.monotonic() + 60 * minutes
    run = Run(out, choose_device(device), minutes, {"smoke": smoke})
    try:
        for name, shape in shapes(smoke) if chosen["orders"] else ():
            run.cell("orders", name, partial(measure_order, shape, run.device))
        if not smoke:
            keep_orders(run.record["orders"], run.device)  # also what an earlier call measured, in another checkout
        for cell in sorted(cells(run, smoke), key=lambda cell: cell.turn):
            if chosen[cell.part]:
                run.cell(cell.part, cell.name, cell.measure)
    except attention.DeviceBroken as error:
        # Nothing runs on the device any more in this process. Another one goes on, without the culprit.
        log.warning("the device is lost (%s); going on in a new process", error)
        flags = {"--orders": orders_part, "--attention": attention_part, "--training": training_part}
        words = [flag for flag, on in (flags | {"--profile": step_part, "--smoke": smoke}).items() if on]
        left = max(0.0, (end - time.monotonic()) / 60)
        words += ["--device", device, "--minutes", str(left), "--out", str(out)]
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words])
    run.save()
    click.echo(run.path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()

"""Quality beside dense attention: the packaged run with NSA and with dense attention, at equal parameters and tokens.

    python -m benchmarks.quality
    python -m benchmarks.quality --seq-len 512 --seq-len 1024 --jobs 2

Both are trained by `nsa-compile train` as `configs/shakespeare_cpu.yaml` says, with each seed, on the same batches. A
step has as many tokens at every length: longer sequences make smaller batches, and the pattern of NSA stays as it is.

**Equal parameters.** NSA has three sets of keys and values, gates, and φ where dense attention has one set of keys and
values. The dense model has the same weights in a wider feed-forward layer instead, `DENSE` in all.

**Equal time.** What costs less a step is trained once more, with a learning rate schedule of its own, for as many steps
as come to the same processor time. The processor times of a step are taken before, in turns, on one thread.

Finished runs in `--runs` are not made again, and one that was stopped goes on from its last checkpoint. The record has
the loss on the run's own validation batches over the steps, and bits per byte of the whole held-out text at the end.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from nsa_compile.config import RunConfig, load_config, options_of
from nsa_compile.experiments.statistics import student_t

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "shakespeare_cpu.yaml"
RECORD = ROOT / "benchmarks" / "results" / "quality.json"
DENSE = {"model.attention": "dense", "model.mlp_hidden": 624}  # 1,221,760 weights beside 1,223,856
ATTENTIONS: dict[str, dict[str, Any]] = {"nsa": {}, "dense": DENSE}
# The whole held-out text, scored, beside the files of a run.
HELD_OUT = "held_out.json"
ALLOWED = 0.01  # the difference in the number of weights


@dataclass(frozen=True)
class Cell:
    """One run."""

    attention: str
    seq_len: int
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.seq_len}-{self.steps}-{self.seed}"

    def overrides(self, tokens: int, runs: Path) -> list[str]:
        """Of the packaged configuration, for steps of so many tokens."""
        keys = {
            "run.name": self.name,
            "run.dir": runs,
            "run.seed": self.seed,
            "train.seq_len": self.seq_len,
            "train.batch_size": tokens // self.seq_len,
            "train.steps": self.steps,
            "train.eval_every": 50,
            "train.save_every": 100,
            "train.keep_last": 1,
            "train.sample_tokens": 0,
            "log.stats_every": 0,
            "compile.check": "false",  # of the lengths here, the loop takes minutes
            **ATTENTIONS[self.attention],
        }
        return [f"{key}={value}" for key, value in keys.items()]

    def config(self, tokens: int, runs: Path) -> RunConfig:
        return load_config(str(CONFIG), self.overrides(tokens, runs))


@click.command()
@click.option("--seq-len", "lengths", type=int, multiple=True, default=(512, 1024, 2048), show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(1337, 1338, 1339), show_default=True)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=2048, show_default=True, help="Of a step, at every length.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs side by side.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/quality"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RECORD)
@click.option("--times-only", is_flag=True, help="Only take the processor times of a step.")
def main(
    lengths: Sequence[int],
    seeds: Sequence[int],
    steps: int,
    tokens: int,
    jobs: int,
    runs: Path,
    out: Path,
    times_only: bool,
) -> None:
    """Train with both attentions, and record how good each becomes."""
    for length in lengths:
        if tokens % length:
            raise click.UsageError(f"--tokens {tokens} must be a multiple of --seq-len {length}; give another number")
    runs.mkdir(parents=True, exist_ok=True)
    for length in lengths:
        costs = step_costs(length, tokens, runs)
        if times_only:
            continue
        cells = [Cell(attention, length, steps, seed) for seed in seeds for attention in ATTENTIONS]
        cheap, dear = sorted(costs, key=lambda attention: costs[attention]["median_s"])
        longer = round(steps * costs[dear]["median_s"] / costs[cheap]["median_s"])
        cells += [Cell(cheap, length, longer, seed) for seed in seeds if longer > steps]
        with ThreadPoolExecutor(jobs) as pool:
            for _ in pool.map(lambda cell: train(cell, tokens, runs), cells):
                record(out, runs, tokens)
    record(out, runs, tokens)
    print(table(json.loads(out.read_text())))


def step_costs(seq_len: int, tokens: int, runs: Path) -> dict[str, dict[str, Any]]:
    """Processor seconds of an optimizer step of each attention; taken once, and kept beside the runs."""
    path = runs / f"step-costs-{seq_len}-{tokens}.json"
    if path.exists():
        kept: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return kept
    import torch

    from nsa_compile.estimation.estimate import count_parameters, make_step
    from nsa_compile.profiles.measure import CPU, interleave

    torch.set_num_threads(1)
    works, weights = {}, {}
    for attention in ATTENTIONS:
        config = Cell(attention, seq_len, 1, 1337).config(tokens, runs)
        works[attention] = make_step(config, CPU, config.train.batch_size)
        weights[attention] = count_parameters(config.model)
        works[attention]()
    if abs(weights["dense"] / weights["nsa"] - 1) > ALLOWED:
        raise SystemExit(f"the models have {weights} weights, which differ by more than {ALLOWED:.0%}")
    costs = interleave(works, 10, clock=time.process_time)
    path.write_text(json.dumps(costs))
    print(f"S = {seq_len}: {costs}", flush=True)
    return costs


def train(cell: Cell, tokens: int, runs: Path) -> None:
    """Make a run that is not finished yet, in a process of its own, and score the whole held-out text by its model."""
    if finished(cell, runs) is None:
        words = ["--resume", "auto", "--json", *options_of(str(CONFIG), cell.overrides(tokens, runs))]
        command(["train", *words], runs / f"{cell.name}.log")
    run = finished(cell, runs)
    assert run is not None
    if not (run / HELD_OUT).exists():
        command(["eval", str(run), "--json"], run / f".{HELD_OUT}")
        (run / f".{HELD_OUT}").rename(run / HELD_OUT)


def command(words: Sequence[str], out: Path) -> None:
    """Run nsa-compile on one thread."""
    with out.open("w", encoding="utf-8") as file:
        subprocess.run(
            [sys.executable, "-m", "nsa_compile", *words],
            stdin=subprocess.DEVNULL, stdout=file, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
        )  # fmt: skip


def finished(cell: Cell, runs: Path) -> Path | None:
    """The directory of a run that came to its end."""
    for path in sorted(runs.glob(f"{cell.name}-*/summary.json")):
        if not json.loads(path.read_text())["interrupted"]:
            return path.parent
    return None


def record(out: Path, runs: Path, tokens: int) -> None:
    """Write what all finished runs came to whose steps have so many tokens."""
    from nsa_compile.profiles.measure import make_record, write_record

    groups: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    costs: dict[int, dict[str, dict[str, Any]]] = {}
    for place in sorted(runs.glob(f"*/{HELD_OUT}")):
        summary = json.loads((place.parent / "summary.json").read_text())
        config = load_config(str(place.parent / "config.resolved.yaml"))
        length, batch = config.train.seq_len, config.train.batch_size
        if batch * length != tokens or summary["interrupted"]:
            continue
        costs.setdefault(length, step_costs(length, tokens, runs))
        with (place.parent / "val.csv").open(newline="") as file:
            curve = [[int(row["step"]), float(row["val_loss"])] for row in csv.DictReader(file)]
        (score,) = json.loads(place.read_text())["results"]
        row = {"seed": config.run.seed, "parameters": summary["parameters"], "curve": curve}
        row |= {"best": min(loss for _, loss in curve), "last": curve[-1][1], "held_out": score}
        groups.setdefault((length, config.model.attention, config.train.steps), []).append(row)
    rows = []
    for (length, attention, made), seeds in sorted(groups.items()):
        rows.append({
            "seq_len": length, "attention": attention, "steps": made, "tokens": made * tokens,
            "parameters": seeds[0]["parameters"],
            "processor_s": made * costs[length][attention]["median_s"],
            **{name: spread([row[name] for row in seeds]) for name in ("best", "last")},
            "bits_per_byte": spread([row["held_out"]["bits_per_byte"] for row in seeds]),
            "curve": [
                {"step": points[0][0], **spread([loss for _, loss in points])}
                for points in zip(*(row["curve"] for row in seeds), strict=True)
            ],
            "seeds": sorted(seeds, key=lambda row: row["seed"]),
        })  # fmt: skip
    settings = {"tokens_per_step": tokens, "dense": DENSE, "step_costs": costs}
    write_record(out, make_record("quality", settings, rows, comparisons=comparisons(rows)))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, which is 0 of one value."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if values[1:] else 0.0}


def comparisons(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bits per byte of NSA less those of dense attention, paired by seed, wherever tokens or time are equal."""
    found = []
    for nsa, dense in itertools.product(rows, rows):
        if (nsa["attention"], dense["attention"]) != ("nsa", "dense") or nsa["seq_len"] != dense["seq_len"]:
            continue
        same_time = abs(nsa["processor_s"] / dense["processor_s"] - 1) < ALLOWED
        if nsa["steps"] != dense["steps"] and not same_time:
            continue
        ours, theirs = (
            {seed["seed"]: seed["held_out"]["bits_per_byte"] for seed in row["seeds"]} for row in (nsa, dense)
        )
        pairs = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        if not pairs:
            continue
        row = {"seq_len": nsa["seq_len"], "equal": "tokens" if nsa["steps"] == dense["steps"] else "time"}
        row |= {"steps": [nsa["steps"], dense["steps"]], "pairs": pairs, "difference": statistics.fmean(pairs)}
        if pairs[1:]:
            half = student_t(0.05, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
            row["interval"] = [row["difference"] - half, row["difference"] + half]
        found.append(row)
    return found


def table(record: dict[str, Any]) -> str:
    """What was found, for a terminal."""
    headers = ("S", "attention", "parameters", "steps", "processor s", "bits per byte", "last loss", "best", "seeds")
    rows = [
        (
            f"{row['seq_len']:,}", row["attention"], f"{row['parameters']:,}", f"{row['steps']:,}",
            f"{row['processor_s']:.0f}", *(show(row[name]) for name in ("bits_per_byte", "last", "best")),
            len(row["seeds"]),
        )
        for row in record["results"]
    ]  # fmt: skip
    lines = [tabulate(rows, headers, disable_numparse=True), ""]
    for row in record["comparisons"]:
        said = f"{len(row['pairs'])} seed, too few to tell"
        if "interval" in row:
            low, high = row["interval"]
            verdict = "no difference seen" if low <= 0 <= high else "NSA is better" if high < 0 else "NSA is worse"
            said = f"95 % interval {low:+.4f} to {high:+.4f} of {len(row['pairs'])} seeds: {verdict}"
        lines.append(
            f"S = {row['seq_len']:,}, equal {row['equal']}, {row['steps'][0]:,} and {row['steps'][1]:,} steps: "
            f"NSA less dense {row['difference']:+.4f} bits per byte, {said}"
        )
    return "\n".join(lines)


def show(values: dict[str, float]) -> str:
    return f"{values['mean']:.4f} ± {values['deviation']:.4f}"


if __name__ == "__main__":
    main()

"""Dense to sparse: a small dense model converted and trained on for a tenth of its steps, against its alternatives.

    python benchmarks/convert.py
    python benchmarks/convert.py --seeds 1 --work /tmp/convert

All models are those of `configs/shakespeare_cpu.yaml` but for their attention, trained on its text by `nsa-compile
train` and judged on the same held-out sequences; the converted one goes through `nsa-compile convert` and `train
--init-from`. A seed draws the first weights and the batches; a model that goes on sees other batches than those it has
seen. Runs that are in `--work` already are read, not made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click
import torch
from tabulate import tabulate

import nsa_compile
from nsa_compile.config import load_config, options_of
from nsa_compile.data import load_corpus
from nsa_compile.generation.converted import Gates, to_sparse
from nsa_compile.generation.exported import Exported
from nsa_compile.profiles.measure import CPU, make_record, write_record
from nsa_compile.train.checkpoints.source import read_source
from nsa_compile.train.evaluation import evaluate_answers

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "shakespeare_cpu.yaml"
RECORD = ROOT / "benchmarks" / "results" / "convert.json"
STEPS, TENTH = 300, 30
LR_ON = 1e-3  # of models that go on; a third of that of the first training
# Seeds of the batches of models that go on.
OTHER_BATCHES = 1000
# Of the converted model, before it has learned anything.
GATES = [Gates(c, s * (1 - c), (1 - s) * (1 - c)) for c in (1e-9, 0.01, 0.1) for s in (1e-9, 0.25, 0.5, 0.75, 1 - 1e-9)]


@click.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--jobs", default=2, show_default=True, help="Seeds at a time, each on one thread.")
@click.option("--work", type=click.Path(path_type=Path), default="/tmp/nsa-convert", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(seeds: int, jobs: int, work: Path, out: Path) -> None:
    """Train, convert, train on, and record the held-out losses."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda seed: losses(work / f"seed-{seed}", seed), range(1, seeds + 1)))
    settings = {
        "steps": STEPS, "steps_on": TENTH, "lr_on": LR_ON, "seeds": seeds, "threads": 1,
        "gates": start_by_gates(work / "seed-1" / "dense"),
    }  # fmt: skip
    write_record(out, make_record("convert", settings, rows, config=load_config(str(CONFIG)).plain()))
    table = []
    for name in rows[0]["val_loss"]:
        found = [row["val_loss"][name] for row in rows]
        dense = [row["val_loss"][name] - row["val_loss"]["dense"] for row in rows]
        spread = f" ± {stdev(dense):.3f}" if len(found) > 1 else ""
        table.append((name, f"{mean(found):.3f}", f"{mean(dense):+.3f}{spread}"))
    print(tabulate(table, headers=("model", "held-out loss", "beyond dense"), disable_numparse=True))
    print(out)


def losses(work: Path, seed: int) -> dict[str, Any]:
    """The held-out loss of each model, in nats per byte, by name."""
    scratch = [f"run.seed={seed}"]
    on = [f"run.seed={seed + OTHER_BATCHES}", f"train.steps={TENTH}", f"train.eval_every={TENTH}", f"optim.lr={LR_ON}"]
    dense, dense_run = trained(work / "dense", [*scratch, "model.attention=dense"])
    sparse = work / "converted"
    if not sparse.exists():
        pattern = load_config(str(CONFIG)).model.pattern
        names = ("compress_block", "compress_stride", "select_block", "num_selected", "window")
        sizes = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(pattern, name)))]
        command("convert", str(dense_run), "--out", str(sparse), *sizes)
    shape = ["model.shared_kv=true", "model.phi=mean", "model.compress_rotated=true"]
    went_on, _ = trained(work / "converted-on", [*on, *shape, f"train.init_from={sparse}"])
    dense_on, _ = trained(work / "dense-on", [*on, "model.attention=dense", f"train.init_from={dense_run}"])
    dense_whole, _ = trained(work / "dense-all", [*scratch, "model.attention=dense", f"train.steps={STEPS + TENTH}"])
    whole, _ = trained(work / "scratch-all", [*scratch, f"train.steps={STEPS + TENTH}"])
    tenth, _ = trained(work / "scratch-tenth", [*scratch, f"train.steps={TENTH}", f"train.eval_every={TENTH}"])
    same, _ = trained(work / "same-scratch-all", [*scratch, *shape, f"train.steps={STEPS + TENTH}"])
    return {
        "seed": seed,
        "val_loss": {
            "dense": dense["val_loss_end"],
            "dense, a tenth longer": dense_on["val_loss_end"],
            "dense, as many steps as both": dense_whole["val_loss_end"],
            "converted, not trained": went_on["val_loss_start"],
            "converted, a tenth longer": went_on["val_loss_end"],
            "NSA, as many steps as both": whole["val_loss_end"],
            "NSA of the converted shape, as many steps as both": same["val_loss_end"],
            "NSA, the tenth alone": tenth["val_loss_end"],
        },
    }


def trained(directory: Path, overrides: list[str]) -> tuple[dict[str, Any], Path]:
    """The summary and the directory of a run, which is made if it is not there."""
    if not (done := list(directory.glob("*/summary.json"))):
        quiet = ["train.sample_tokens=0", "train.save_every=0", "log.stats_every=0", "compile.check=false"]
        keys = [f"run.dir={directory}", "train.eval_batches=16", "watchdog.enabled=false", *quiet, *overrides]
        command("train", *options_of(str(CONFIG), keys))
        done = list(directory.glob("*/summary.json"))
    return json.loads(done[0].read_text()), done[0].parent


def command(*words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nsa_compile", *words], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise click.ClickException(f"nsa-compile {' '.join(words)}: {done.stderr[-2000:]}")


def start_by_gates(dense: Path) -> list[dict[str, float]]:
    """The held-out loss of a dense model that has just been converted, by what its gates are."""
    source = read_source(str(next(dense.glob("*/summary.json")).parent))
    assert source.config is not None
    pattern, validation = load_config(str(CONFIG)).model.pattern, load_corpus(source.config).validation
    found = []
    for gates in GATES:
        model = to_sparse(Exported(source.model, None, None), pattern, gates).model
        torch._dynamo.reset()
        nsa_compile.compile_blocks(model, nested="aot_eager")
        loss, _ = evaluate_answers(model, validation, None, CPU, "float32")
        found.append({**vars(gates), "val_loss": loss})
    return found


if __name__ == "__main__":
    main()

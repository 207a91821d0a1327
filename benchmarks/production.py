"""The production preset on this machine: real steps of NSA and of its dense twin in turn, and a run on two processes.

One process: forward, backward, clipping and AdamW of `configs/m7c_125m_2xa100_production.yaml`, at S = 2048 and 8192,
in the preset's own bf16 and with its activation checkpointing, one sequence a step. Two processes: `nsa-compile train
--nproc 2` of the preset as it is, but for the number of steps.

python benchmarks/production.py --out benchmarks/results/production.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate

from nsa_compile.config import load_config, options_of
from nsa_compile.estimation.estimate import count_parameters, make_step
from nsa_compile.machine.matmul_rate import measure_matmul
from nsa_compile.models.flops import training_flops_per_token
from nsa_compile.profiles.measure import (
    CPU,
    interleave,
    make_record,
    not_measured,
    peak_memory,
    ran_out_of_memory,
    ratio,
    write_record,
)

PRESET = Path(__file__).parents[1] / "configs" / "m7c_125m_2xa100_production.yaml"
RECORD = Path(__file__).parent / "results" / "production.json"


def one_process(
    preset: Path,
    seq_len: int,
    repeats: int,
    device: torch.device = CPU,
    batch_size: int = 1,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Times of steps of a preset with NSA and of the dense twin, taken in turn, of `batch_size` sequences each."""
    steps, flops, parameters = {}, {}, {}
    for attention in ("nsa", "dense"):
        changes = [*overrides, f"train.seq_len={seq_len}", "train.accumulate=1", f"model.attention={attention}"]
        config = load_config(str(preset), changes)
        steps[attention] = make_step(config, device, batch_size)
        flops[attention] = training_flops_per_token(config.model, seq_len)
        parameters[attention] = count_parameters(config.model)
    failed = {name: reason for name, step in steps.items() if (reason := settle(step)) is not None}
    peak = measure_matmul(device, (torch.bfloat16,), seconds=2.0).peak
    times = interleave({name: step for name, step in steps.items() if name not in failed}, repeats, device, False)
    times |= {name: not_measured(reason) for name, reason in failed.items()}
    row: dict[str, Any] = {
        "preset": preset.name,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "layers": config.model.n_layers,
        "pattern": asdict(config.model.pattern),
        "matmul_peak_flops": peak,
        "speedup": ratio(times["dense"], times["nsa"]),
    }
    for name, timing in times.items():
        row[name] = {"parameters": parameters[name], **timing}
        if "median_s" in timing:
            rate = seq_len * batch_size / timing["median_s"]
            row[name] |= {"tokens_per_s": rate, "model_flops_per_s": rate * flops[name]}
            row[name]["mfu"] = rate * flops[name] / peak
            row[name]["step_memory_bytes"] = peak_memory(steps[name], device)
    return row


def settle(step: Callable[[], None]) -> str | None:
    """Compile a step and let it settle; why it cannot run, if it cannot for want of memory or of the SDPA asked for."""
    try:
        step()
        step()
    except (RuntimeError, MemoryError) as error:
        if ran_out_of_memory(error):
            return "does not fit into memory"
        if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):  # on CUDA, elsewhere
            raise
        return "SDPA has no kernel of the kind asked for"
    return None


def two_processes(steps: int) -> dict[str, Any]:
    """The preset on two ranks, with what all its processes together held at the highest."""
    import psutil  # not needed where only one process is measured

    with tempfile.TemporaryDirectory() as directory:
        changes = {"run.dir": directory, "train.steps": steps, "train.eval_batches": 1, "optim.warmup": 1}
        changes |= {"train.eval_every": steps, "train.sample_tokens": 0, "log.stats_every": 0}
        options = options_of(str(PRESET), [f"{key}={value}" for key, value in changes.items()])
        command = [sys.executable, "-m", "nsa_compile", "train", *options, "--nproc", "2", "--json"]
        # How many threads each process has is the launcher's choice.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        peak = 0

        def look() -> None:
            nonlocal peak
            launcher = psutil.Process(process.pid)
            while process.poll() is None:
                held = 0
                for member in [launcher, *launcher.children(recursive=True)]:
                    try:
                        held += member.memory_full_info().pss  # shared pages once
                    except psutil.Error:
                        continue
                peak = max(peak, held)
                time.sleep(0.5)

        watcher = threading.Thread(target=look)
        watcher.start()
        stdout, _ = process.communicate()
        watcher.join()
        if process.returncode:
            raise click.ClickException(f"the run on two processes ended with exit code {process.returncode}")
        summary = json.loads(stdout)
        del summary["run_dir"]
        return {**summary, "all_processes_peak_bytes": peak}


@click.command()
@click.option("--seq-lens", default="2048,8192", show_default=True)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--ddp-steps", default=4, show_default=True, type=click.IntRange(min=0), help="0: one process only.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(seq_lens: str, repeats: int, ddp_steps: int, out: Path) -> None:
    """Measure, print a table and write the record."""
    rows = []
    for seq_len in map(int, seq_lens.split(",")):
        torch._dynamo.reset()
        rows.append(one_process(PRESET, seq_len, repeats))
        click.echo(json.dumps(rows[-1]), err=True)
    table = [
        (
            row["seq_len"],
            name,
            f"{row[name]['median_s']:.2f}",
            f"{row[name]['tokens_per_s']:,.0f}",
            f"{row[name]['mfu']:.1%}",
        )
        for row in rows
        for name in ("nsa", "dense")
    ]
    click.echo(tabulate(table, headers=("S", "attention", "s / step", "tokens/s", "MFU"), tablefmt="simple"))
    settings = {"preset": PRESET.name, "repeats": repeats, "ddp_steps": ddp_steps}
    write_record(out, make_record("production", settings, rows))
    if ddp_steps:
        two = two_processes(ddp_steps)
        shown = {key: two[key] for key in ("tokens_per_s_mean", "mfu", "all_processes_peak_bytes")}
        click.echo(f"two processes: {json.dumps(shown)}")
        write_record(out, make_record("production", settings, rows, two_processes=two))


if __name__ == "__main__":
    main()

"""What `nsa-compile estimate` predicts against training steps that really run, on the CPU: memory and time.

Memory is what a step needs on top of weights and optimizer: activations, gradients, temporaries.

python benchmarks/estimate.py --out benchmarks/results/estimate.json
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click
import torch

from nsa_compile.config import load_config
from nsa_compile.estimation.estimate import estimate_memory, make_step, measure_step
from nsa_compile.profiles.measure import CPU, make_record, peak_memory, seconds_of, write_record

RECORD = Path(__file__).parent / "results" / "estimate.json"
CASES = (
    {"train.seq_len": 512},
    {"train.seq_len": 2048},
    {"train.seq_len": 2048, "model.dim": 256, "model.head_dim": 64},
    {"train.seq_len": 2048, "model.dim": 256, "model.head_dim": 64, "train.dtype": "bf16"},
    {"train.seq_len": 1024, "model.n_layers": 8, "train.batch_size": 8},
    {"train.seq_len": 1024, "model.vocab_size": 32768},
    {"train.seq_len": 2048, "model.attention": "dense"},
)
STEPS = 5


def compare(changes: dict[str, Any]) -> dict[str, Any]:
    """Predicted and measured bytes and seconds of one configuration."""
    torch._dynamo.reset()
    config = load_config(None, [f"{key}={value}" for key, value in changes.items()])
    memory = estimate_memory(config, CPU)
    time = measure_step(config, CPU)

    torch._dynamo.reset()
    step = make_step(config, CPU, config.train.batch_size)
    for _ in range(2):
        step()
    measured = peak_memory(step)
    seconds = statistics.median(seconds_of(step) for _ in range(STEPS))
    predicted = memory.peak - memory.weights - memory.optimizer
    return {
        **changes,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "memory_ratio": predicted / measured if measured else None,
        "predicted_seconds": time["seconds"],
        "measured_seconds": seconds,
        "time_ratio": time["seconds"] / seconds,
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(out: Path) -> None:
    """Compare estimates with training steps that really run."""
    rows: list[dict[str, Any]] = []
    for changes in CASES:
        rows.append(compare(changes))
        click.echo(rows[-1])
        write_record(out, make_record("estimate", {"steps": STEPS}, rows))


if __name__ == "__main__":
    main()

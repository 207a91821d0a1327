"""Needle retrieval with and without the selected branch: accuracy against seconds of training, on the CPU.

    python benchmarks/needle.py
    python benchmarks/needle.py --seconds 60 --out /tmp/needle.json

Two models are trained one after the other as `configs/needle_cpu.yaml` says, from the same seed and on the same data,
one with all branches and one without the selected branch. Each has `--seconds`, compiling included, or the steps of
the configuration if those take less; the time of the evaluations does not count. The first steps are on shorter
sequences (`STAGES`), the evaluations always on what the configuration says. The record holds every
evaluation and, on sequences that neither training nor those evaluations saw, how many of the answers were right at the
end. One thread is the default: matrices this small gain nothing from a second one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tabulate import tabulate

import nsa_compile
from nsa_compile.config import RunConfig, load_config
from nsa_compile.data import BatchSampler, load_corpus
from nsa_compile.data.synthetic import make_synthetic
from nsa_compile.models import NSATransformer
from nsa_compile.profiles.measure import CPU, make_record, write_record
from nsa_compile.train.evaluation import evaluate_answers, logits_and_loss
from nsa_compile.train.optim import learning_rate, make_optimizer
from nsa_compile.train.steps import train_step

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "needle.json"
VARIANTS = {"all branches": "[compressed, selected, window]", "without selected": "[compressed, window]"}
# Training begins on shorter sequences: their length, sequences in a batch, and steps at the most. A stage is over as
# soon as the loss on the answers, averaged over about twenty steps, is below so many nats.
STAGES = ((256, 16, 400), (512, 8, 300))
LEARNED, SMOOTHING = 0.12, 0.95
# The first of the held-out sequences are those of the evaluations on the way.
FINAL_POSITION = 1_000_000
GOAL = 0.9


@click.command()
@click.option("--config", "config_path", default=str(ROOT / "configs" / "needle_cpu.yaml"), show_default=True)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key of the configuration.")
@click.option("--seconds", default=900.0, show_default=True, help="Training time of each model.")
@click.option("--eval-seconds", default=20.0, show_default=True, help="Training time between evaluations.")
@click.option("--sequences", default=256, show_default=True, help="Held-out sequences that the final accuracy is of.")
@click.option("--threads", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(config_path, overrides, seconds, eval_seconds, sequences, threads, out) -> None:
    """Train with and without the selected branch and record how many answers are right."""
    torch.set_num_threads(threads)
    settings = {"seconds": seconds, "eval_seconds": eval_seconds, "sequences": sequences, "threads": threads}
    rows: list[dict[str, Any]] = []
    configs = {name: load_config(config_path, [*overrides, f"model.branches={b}"]) for name, b in VARIANTS.items()}
    for name, config in configs.items():
        rows.append({"variant": name, "branches": list(config.model.branches)})
        for row in train(config, seconds, eval_seconds, sequences):
            rows[-1] |= row
            write_record(out, make_record("needle", settings, rows, config=configs["all branches"].plain()))
            last = row["curve"][-1]
            print(
                f"{name}: {last['seconds']:.0f} s, step {last['step']} of S = {last['seq_len']}, "
                f"held-out loss {last['val_loss']:.3f}, "
                f"{last['accuracy']:.1%} of the answers right, {row['tokens_per_s'] or 0:,.0f} tokens/s",
                flush=True,
            )
    plot(out.with_suffix(".png"), rows, configs["all branches"])
    headers = ("", "answers right", "95 % interval", "answers", "above 90 % after", "seconds", "steps")
    table = [
        (
            row["variant"],
            f"{row['accuracy']:.1%}",
            "{:.1%}–{:.1%}".format(*row["interval"]),
            row["answers"],
            "never" if row["seconds_to_goal"] is None else f"{row['seconds_to_goal']:.0f} s",
            f"{row['curve'][-1]['seconds']:.0f}",
            row["curve"][-1]["step"],
        )
        for row in rows
    ]
    print(tabulate(table, headers=headers, disable_numparse=True))
    print(out)


def train(config: RunConfig, seconds: float, eval_seconds: float, sequences: int) -> Iterator[dict[str, Any]]:
    """Train for `seconds` at most; after each evaluation what is known so far, at the end the final accuracy."""
    torch._dynamo.reset()
    torch.manual_seed(config.run.seed)
    corpus = load_corpus(config)
    shape = config.train
    model = NSATransformer(config.model)
    optimizer = make_optimizer(model, config.optim)
    if config.compile.enabled:
        nsa_compile.compile_blocks(model, nested=config.compile.nested, disable=config.compile.disable)
    stages = Stages(config)
    curve: list[dict[str, Any]] = []
    spent, step, trained = 0.0, 0, 0

    def result() -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rate = trained / spent if spent else None
        reached = next((point["seconds"] for point in curve if point["accuracy"] > GOAL), None)
        return {"parameters": parameters, "tokens_per_s": rate, "seconds_to_goal": reached, "curve": curve}

    while True:
        done = step == shape.steps or spent >= seconds
        if done or spent >= len(curve) * eval_seconds:
            loss, accuracy = evaluate_answers(
                model, corpus.validation, corpus.answers, CPU, shape.dtype, corpus.answers
            )
            stage = stages.sampler.seq_len
            curve.append({"seconds": spent, "step": step, "seq_len": stage, "val_loss": loss, "accuracy": accuracy})
            if done:
                break
            yield result()
        start = time.perf_counter()
        step += 1
        sampler = stages.sampler
        batches = [sampler.next_batch() for _ in range(shape.accumulate)]
        answers = sampler.source.answers(sampler.seq_len + 1)
        lr = learning_rate(config.optim, step, shape.steps)
        outcome = train_step(model, optimizer, batches, lr, config.optim.clip, CPU, shape.dtype, counted=answers)
        if not outcome.finite:
            raise SystemExit(f"training diverged at step {step}")
        stages.done(outcome.loss)
        spent += time.perf_counter() - start
        trained += sum(batch.size - len(batch) for batch in batches)
    yield result() | final_accuracy(model, config, sequences)


class Stages:
    """Where the batch of each step comes from: the stages one after the other, then the configured task."""

    def __init__(self, config: RunConfig) -> None:
        shape, source = config.train, make_synthetic(config, held_out=False)
        self.left = [
            (BatchSampler(source, batch_size, seq_len), steps)
            for seq_len, batch_size, steps in STAGES
            if source.shortest <= seq_len < shape.seq_len
        ]
        self.task = BatchSampler(source, shape.batch_size, shape.seq_len)
        self.steps, self.loss = 0, math.inf

    @property
    def sampler(self) -> BatchSampler:
        """Of the present stage."""
        return self.left[0][0] if self.left else self.task

    def done(self, loss: float) -> None:
        """A step came to this loss."""
        self.steps += 1
        self.loss = loss if math.isinf(self.loss) else SMOOTHING * self.loss + (1 - SMOOTHING) * loss
        if self.left and (self.loss < LEARNED or self.steps == self.left[0][1]):
            self.left.pop(0)
            self.steps, self.loss = 0, math.inf


def final_accuracy(model: torch.nn.Module, config: RunConfig, sequences: int) -> dict[str, Any]:
    """Share of the answers that are right on sequences of their own, with a 95 % interval.

    The answers of one sequence succeed or fail together, so the interval is that of the mean over sequences.
    """
    source = make_synthetic(config, held_out=True)
    size, length = config.train.batch_size, config.train.seq_len
    sampler = BatchSampler(source, size, length, position=FINAL_POSITION)
    asked = source.answers(length + 1)[1:]
    right = []
    for _ in range(math.ceil(sequences / size)):
        tokens = torch.from_numpy(sampler.next_batch())
        logits, _ = logits_and_loss(model, tokens, config.train.dtype)
        right.append((logits.detach().argmax(dim=-1) == tokens[:, 1:])[:, asked].numpy())
    answers = np.concatenate(right)
    by_sequence = answers.mean(axis=1)
    mean, margin = by_sequence.mean(), 1.96 * by_sequence.std(ddof=1) / math.sqrt(len(by_sequence))
    return {
        "accuracy": float(mean),
        "interval": [float(max(0.0, mean - margin)), float(min(1.0, mean + margin))],
        "answers": answers.size,
    }


def plot(path: Path, rows: list[dict[str, Any]], config: RunConfig) -> None:
    """Accuracy against training time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        points: list[Mapping[str, Any]] = row["curve"]
        axes.plot([p["seconds"] for p in points], [100 * p["accuracy"] for p in points], ".-", label=row["variant"])
    axes.axhline(100 * GOAL, linestyle="--", linewidth=0.8, color="gray")
    axes.set_xlabel("seconds of training, compiling included")
    axes.set_ylabel("held-out answers right, %")
    axes.set_ylim(-2, 102)
    pattern = config.model.pattern
    axes.set_title(f"Needle retrieval, S = {config.train.seq_len}, window {pattern.window}", fontsize="medium")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

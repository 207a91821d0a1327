"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import csv
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import nsa_compile
from nsa_compile.config import RunConfig
from nsa_compile.data import BatchSampler, Corpus
from nsa_compile.errors import TrainingDiverged
from nsa_compile.models import NSATransformer
from nsa_compile.models.flops import training_flops_per_token
from nsa_compile.train.checkpoint import save_checkpoint
from nsa_compile.train.environment import describe_environment, git_revision, measure_matmul_flops, synchronize
from nsa_compile.train.generate import generate
from nsa_compile.train.optim import learning_rate, make_optimizer
from nsa_compile.train.plots import plot_losses

# Throughput is reported over this many steps at the end of a run, well after compilation.
THROUGHPUT_STEPS = 50
PROMPT_TOKENS = 32
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class StepRow:
    """One line of ``training.csv``: ``loss`` in nats per token, ``seconds`` of the step, ``mfu`` as a fraction."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float
    seconds: float


@dataclass(frozen=True)
class EvalRow:
    """One line of ``val.csv``: the held-out loss in nats per token after ``step`` optimizer steps."""

    step: int
    val_loss: float


def run(config: RunConfig, corpus: Corpus, directory: Path) -> dict[str, Any]:
    """Train as ``config`` says, leave everything in ``directory`` and return the summary.

    Raises:
        TrainingDiverged: the loss or the gradient stopped being finite.
    """
    torch.manual_seed(config.run.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, optim = config.train, config.optim

    model = NSATransformer(config.model).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = make_optimizer(model, optim)
    if config.compile.enabled:
        nsa_compile.compile_blocks(model, nested=config.compile.nested, disable=config.compile.disable, estimate=True)
    sampler = BatchSampler(corpus.train, shape.batch_size, shape.seq_len)

    matmul_dtype = torch.bfloat16 if shape.dtype == "bf16" else torch.float32
    peak_flops = measure_matmul_flops(device, matmul_dtype)
    tokens_per_step = shape.seq_len * shape.batch_size * shape.accumulate
    flops_per_token = training_flops_per_token(config.model, shape.seq_len)
    _write_provenance(config, directory, device, peak_flops)

    steps: list[StepRow] = []
    evals: list[EvalRow] = []

    def save(step: int) -> None:
        state = training_state(model, optimizer, sampler, step, config)
        save_checkpoint(directory / "checkpoints", step, state)

    with (
        (directory / "training.csv").open("w", newline="", encoding="utf-8") as training_file,
        (directory / "val.csv").open("w", newline="", encoding="utf-8") as val_file,
        # tqdm is silent where stderr is no terminal; the logged lines remain.
        tqdm(total=shape.steps, unit="step", disable=None, file=sys.stderr) as bar,
        _stop_on_interrupt() as interrupt,
    ):
        training_csv = _csv_writer(training_file, StepRow)
        val_csv = _csv_writer(val_file, EvalRow)

        def evaluate_now(step: int) -> None:
            evals.append(EvalRow(step, evaluate(model, corpus.validation, device, shape.dtype)))
            val_csv.writerow(vars(evals[-1]))
            val_file.flush()
            _log(bar, f"step {step}: validation loss {evals[-1].val_loss:.4f}")

        _log(bar, f"{parameters:,} parameters on {device}; files in {directory}")
        if config.compile.enabled:
            _log(bar, "compiling; the first batches take longer")
        elif config.model.attention == "nsa":
            _log(bar, "compile.enabled = false: attention loops over the tokens one by one, which is slow")
        evaluate_now(0)

        step, saved = 0, False
        while step < shape.steps and not interrupt.requested:
            step += 1
            start = time.perf_counter()
            lr = learning_rate(optim, step, shape.steps)
            batches = [sampler.next_batch() for _ in range(shape.accumulate)]
            try:
                loss, grad_norm = train_step(model, optimizer, batches, lr, optim.clip, device, shape.dtype)
            except TrainingDiverged as error:
                raise TrainingDiverged(
                    f"training stopped at step {step}: {error}; try a lower optim.lr (here {optim.lr}), "
                    f"a longer optim.warmup or a smaller optim.clip; files in {directory}"
                ) from None
            synchronize(device)
            seconds = time.perf_counter() - start
            rate = tokens_per_step / seconds
            row = StepRow(step, loss, lr, grad_norm, rate, rate * flops_per_token / peak_flops, seconds)
            steps.append(row)
            training_csv.writerow(vars(row))
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, MFU {row.mfu:.1%}")
            bar.update()

            if step % shape.log_every == 0:
                training_file.flush()
                _log(bar, f"step {step}: loss {loss:.4f}, lr {lr:.2e}, {rate:,.0f} tokens/s, MFU {row.mfu:.1%}")
            if step % shape.eval_every == 0 and step < shape.steps:
                evaluate_now(step)
            saved = bool(shape.save_every) and step % shape.save_every == 0
            if saved:
                save(step)
        interrupted = step < shape.steps
        if not saved:
            save(step)
        if not interrupted:
            evaluate_now(step)

    if config.compile.enabled:
        report = nsa_compile.last_report()
        assert report is not None, "the first evaluation compiles"
        _write_json(directory / "passes.json", report.to_dict())
    notes = []
    if not plot_losses(directory / "loss.png", steps, evals, corpus.best_unigram_loss):
        notes.append("no loss.png: matplotlib is not installed (the plots extra brings it)")
    if shape.sample_tokens and not interrupted:
        _write_sample(model, corpus, directory / "sample.txt", shape.sample_tokens, config.run.seed, device)

    return {
        "run_dir": str(directory),
        "interrupted": interrupted,
        "steps": step,
        "seq_len": shape.seq_len,
        "batch_size": shape.batch_size,
        "accumulate": shape.accumulate,
        "dtype": shape.dtype,
        "layers": config.model.n_layers,
        "parameters": parameters,
        "num_selected": config.model.pattern.num_selected,
        "window": config.model.pattern.window,
        **_throughput(steps),
        "peak_flops": peak_flops,
        "val_loss_start": evals[0].val_loss,
        "val_loss_end": evals[-1].val_loss,
        "best_unigram_loss": corpus.best_unigram_loss,
        "notes": notes,
    }


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[np.ndarray],
    lr: float,
    clip: float | None,
    device: torch.device,
    dtype: str,
) -> tuple[float, float]:
    """One optimizer step over micro batches ``[B, S + 1]``, equal to one step over all of them at once.

    Returns:
        Mean loss of the micro batches in nats per token, and the norm of the gradient before clipping.

    Raises:
        TrainingDiverged: loss or gradient are not finite; the weights are left as they were.
    """
    total = torch.zeros((), device=device)
    for batch in batches:
        loss = next_token_loss(model, torch.from_numpy(batch).to(device), dtype) / len(batches)
        loss.backward()
        total += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
    # The one place a step waits for the device: no update may be made of a gradient that is not finite.
    loss_value, norm_value = torch.stack((total, grad_norm)).tolist()
    if not np.isfinite((loss_value, norm_value)).all():
        optimizer.zero_grad()
        raise TrainingDiverged(f"loss = {loss_value} and gradient norm = {norm_value} must be finite")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return loss_value, norm_value


def next_token_loss(model: nn.Module, tokens: torch.Tensor, dtype: str) -> torch.Tensor:
    """Mean cross-entropy of ``tokens`` ``[B, S + 1]`` int64, in nats per token; bf16 means autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        logits = model(tokens[:, :-1])
    # In float32: the sum over the vocabulary is where bf16 would hurt.
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def evaluate(model: nn.Module, batches: np.ndarray, device: torch.device, dtype: str) -> float:
    """Mean loss over held-out batches ``[N, B, S + 1]``, in nats per token."""
    # With gradients enabled, though none are taken: without them the blocks would be compiled a second time.
    losses = [next_token_loss(model, torch.from_numpy(batch).to(device), dtype).detach() for batch in batches]
    return torch.stack(losses).mean().item()


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, sampler: BatchSampler, step: int, config: RunConfig
) -> dict[str, Any]:
    """Everything the rest of a run depends on, as tensors and plain values."""
    return {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sampler_position": sampler.position,
        "rng": torch.get_rng_state(),
        "config": config.model_dump(),
    }


@dataclass
class _Interrupt:
    requested: bool = False


@contextmanager
def _stop_on_interrupt() -> Iterator[_Interrupt]:
    """Turn the first Ctrl-C into a request to stop after the current step; a second one stops at once."""
    interrupt = _Interrupt()

    def request(signum: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True
        print("stopping after this step; Ctrl-C again to stop at once", file=sys.stderr)

    previous = signal.signal(signal.SIGINT, request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def _log(bar: tqdm, line: str) -> None:
    bar.write(line, file=sys.stderr)


def _csv_writer(file: TextIO, row: type) -> csv.DictWriter[str]:
    writer = csv.DictWriter(file, list(row.__annotations__))
    writer.writeheader()
    file.flush()
    return writer


def _throughput(steps: list[StepRow]) -> dict[str, Any]:
    """Tokens per second and MFU over the last steps; ``None`` for a run without any."""
    # A short run has no 50 steps after compilation; its later half is what there is.
    last = steps[-min(THROUGHPUT_STEPS, max(1, len(steps) // 2)) :]
    rates = [row.tokens_per_s for row in last]
    return {
        "tokens_per_s_mean": statistics.fmean(rates) if rates else None,
        "tokens_per_s_std": statistics.stdev(rates) if len(rates) > 1 else None,
        "tokens_per_s_steps": len(rates),
        "mfu": statistics.fmean(row.mfu for row in last) if last else None,
    }


def _write_provenance(config: RunConfig, directory: Path, device: torch.device, peak_flops: float) -> None:
    (directory / "config.resolved.yaml").write_text(config.to_yaml(), encoding="utf-8")
    environment = {**describe_environment(device), "matmul_peak_flops": peak_flops}
    _write_json(directory / "env.json", environment)
    sha = git_revision()["sha"] or "unknown: not a git checkout"
    (directory / "git_sha.txt").write_text(sha + "\n", encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_sample(
    model: NSATransformer, corpus: Corpus, path: Path, count: int, seed: int, device: torch.device
) -> None:
    prompt = torch.from_numpy(corpus.validation[0, 0, :PROMPT_TOKENS]).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    tokens = generate(model, prompt, count, SAMPLE_TEMPERATURE, generator)
    path.write_text(corpus.tokenizer.decode(torch.cat((prompt, tokens)).tolist()) + "\n", encoding="utf-8")

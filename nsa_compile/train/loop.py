"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import nsa_compile
from nsa_compile.config import RunConfig
from nsa_compile.data import BatchSampler, Corpus
from nsa_compile.errors import CheckpointError, TrainingDiverged
from nsa_compile.models import NSATransformer
from nsa_compile.models.flops import training_flops_per_token
from nsa_compile.train.checkpoint import CheckpointWriter, load_checkpoint
from nsa_compile.train.checkpoint_files import Checkpoint
from nsa_compile.train.environment import describe_environment, git_revision, measure_matmul_flops, synchronize
from nsa_compile.train.generate import generate
from nsa_compile.train.optim import learning_rate, make_optimizer
from nsa_compile.train.plots import plot_losses
from nsa_compile.train.records import CsvLog, EvalRow, StepRow
from nsa_compile.train.signals import stop_on_signals
from nsa_compile.train.state import restore_training, training_states

# Throughput is reported over this many steps at the end of a run, well after compilation.
THROUGHPUT_STEPS = 50
PROMPT_TOKENS = 32
SAMPLE_TEMPERATURE = 0.8


def run(config: RunConfig, corpus: Corpus, directory: Path, resumed: Checkpoint | None = None) -> dict[str, Any]:
    """Train as ``config`` says, leave everything in ``directory`` and return the summary.

    Args:
        config: what to do.
        corpus: what to train and to be judged on.
        directory: the run's own; a resumed run goes on in it.
        resumed: the checkpoint to go on from; the losses and weights are those of a run that was never stopped.

    Raises:
        TrainingDiverged: the loss or the gradient stopped being finite.
        CheckpointError: ``resumed`` cannot be used, or a checkpoint could not be written.
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
    first_step = 0 if resumed is None else resumed.step
    if resumed is not None:
        states = load_checkpoint(resumed.path)
        # After the measurement above, which draws random numbers of its own.
        try:
            restore_training(states, model, optimizer, sampler, first_step, config)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint '{resumed.path}' cannot be used: {error}") from None
    resumed_at = None if resumed is None else first_step

    with (
        CsvLog(directory / "training.csv", StepRow, resumed_at) as training,
        CsvLog(directory / "val.csv", EvalRow, resumed_at) as validation,
        # tqdm is silent where stderr is no terminal; the logged lines remain.
        tqdm(total=shape.steps, initial=first_step, unit="step", disable=None, file=sys.stderr) as bar,
        stop_on_signals() as stop,
        CheckpointWriter(directory / "checkpoints", shape.keep_last, shape.keep_best) as writer,
    ):
        _write_provenance(config, directory, device, peak_flops, first_step)

        def evaluate_now(step: int) -> None:
            validation.append(EvalRow(step, evaluate(model, corpus.validation, device, shape.dtype)))
            validation.flush()
            _log(bar, f"step {step}: validation loss {validation.rows[-1].val_loss:.4f}")

        def save(step: int) -> None:
            for log in (training, validation):
                log.sync()  # a resumed run needs every row up to its checkpoint
            last = validation.rows[-1]
            val_loss = last.val_loss if last.step == step else None
            writer.save(step, training_states(model, optimizer, sampler, step, config), val_loss)

        _log(bar, f"{parameters:,} parameters on {device}; files in {directory}")
        if config.compile.enabled:
            _log(bar, "compiling; the first batches take longer")
        elif config.model.attention == "nsa":
            _log(bar, "compile.enabled = false: attention loops over the tokens one by one, which is slow")
        if resumed is None:
            evaluate_now(0)
        else:
            _log(bar, f"resumed from step {first_step}")

        step, saved = first_step, resumed is not None
        while step < shape.steps and stop.signal is None:
            writer.check()
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
            training.append(row)
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, MFU {row.mfu:.1%}")
            bar.update()

            if step % shape.log_every == 0:
                training.flush()
                _log(bar, f"step {step}: loss {loss:.4f}, lr {lr:.2e}, {rate:,.0f} tokens/s, MFU {row.mfu:.1%}")
            if step % shape.eval_every == 0 or step == shape.steps:
                evaluate_now(step)
            saved = step == shape.steps or bool(shape.save_every and step % shape.save_every == 0)
            if saved:
                save(step)
        if not saved:
            save(step)
        interrupted = step < shape.steps

    steps, evals = training.rows, validation.rows
    if config.compile.enabled:
        report = nsa_compile.last_report()
        if report is not None:  # a resumed run that had no step left compiled nothing
            _write_json(directory / "passes.json", report.to_dict())
    notes = []
    if not plot_losses(directory / "loss.png", steps, evals, corpus.best_unigram_loss):
        notes.append("no loss.png: matplotlib is not installed (the plots extra brings it)")
    if shape.sample_tokens and not interrupted:
        _write_sample(model, corpus, directory / "sample.txt", shape.sample_tokens, config.run.seed, device)

    return {
        "run_dir": str(directory),
        "interrupted": interrupted,
        "stopped_by": stop.signal if interrupted else None,
        "resumed_from": resumed_at,
        "steps": step,
        "seq_len": shape.seq_len,
        "batch_size": shape.batch_size,
        "accumulate": shape.accumulate,
        "dtype": shape.dtype,
        "layers": config.model.n_layers,
        "parameters": parameters,
        "num_selected": config.model.pattern.num_selected,
        "window": config.model.pattern.window,
        **_throughput(steps[first_step:]),
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


def _log(bar: tqdm, line: str) -> None:
    bar.write(line, file=sys.stderr)


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


def _write_provenance(
    config: RunConfig, directory: Path, device: torch.device, peak_flops: float, first_step: int
) -> None:
    (directory / "config.resolved.yaml").write_text(config.to_yaml(), encoding="utf-8")
    environment = {**describe_environment(device), "matmul_peak_flops": peak_flops}
    if first_step:
        # What the steps before ran on stays on record.
        _write_json(directory / f"env.from-step-{first_step}.json", environment)
        return
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

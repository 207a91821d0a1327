"""A run in one of its processes, in the order in which it happens: set up, start or go on, step by step, the end.

The optimizer step itself is in ``steps.py``, what rank 0 writes down in ``journal.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

import torch

import nsa_compile
from nsa_compile import ranges
from nsa_compile.branches import BRANCHES
from nsa_compile.config import RunConfig, flatten
from nsa_compile.data import BatchSampler, Corpus
from nsa_compile.data.sampling import local_rows, readable, without_filling
from nsa_compile.errors import CheckpointError, Halted, TrainingDiverged
from nsa_compile.files import write_json, write_text
from nsa_compile.generation.generate import generate
from nsa_compile.generation.sampling import Sampling
from nsa_compile.machine.environment import peak_memory, synchronize
from nsa_compile.machine.matmul_rate import (
    MatmulRate,
    best_of,
    busy,
    impossible,
    measure_matmul,
    multiplied_dtypes,
    total,
)
from nsa_compile.models import NSATransformer
from nsa_compile.models.flops import training_flops_per_token
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
from nsa_compile.train.checkpoints.files import STATE, Checkpoint
from nsa_compile.train.checkpoints.source import begin_with
from nsa_compile.train.distributed.all_reduce import AllReduceHook
from nsa_compile.train.distributed.buckets import bucket_mb
from nsa_compile.train.distributed.group import (
    all_gather,
    all_reduce_max,
    barrier,
    choose_device,
    mean_of_all,
    share_model,
)
from nsa_compile.train.distributed.world import World
from nsa_compile.train.evaluation import counted_tokens, evaluate_answers
from nsa_compile.train.journal import Journal
from nsa_compile.train.lora import add_adapters
from nsa_compile.train.low_precision import convert_linear_layers
from nsa_compile.train.nonfinite import NonFinitePolicy
from nsa_compile.train.optim import learning_rate, make_optimizer
from nsa_compile.train.phases import OTHER, CompileClock, PhaseTimer
from nsa_compile.train.records.plots import plot_losses
from nsa_compile.train.records.rows import EvalRow, StepRow, finite_or_none, phase_columns, throughput, unsteady
from nsa_compile.train.records.run_directory import held_for_a_run
from nsa_compile.train.signals import StopRequest, stop_on_signals
from nsa_compile.train.state import TrainingState
from nsa_compile.train.steps import StepResult, train_step
from nsa_compile.train.watch.halt import halt_reason
from nsa_compile.train.watch.heartbeat import Heartbeat, Phase, install_stack_dump

PROMPT_TOKENS = 32
SAMPLE_TEMPERATURE = 0.8


class Trainer:
    """What trains in one of the processes: the model, its optimizer, its data, and the steps to be done with them.

    Args:
        resumes: whether a checkpoint is going to be put back, so that the weights of `train.init_from` are not read.

    Attributes:
        notes: what a reader of the log is to know of the set-up.
        trained: the model to call in training, which shares its weights and gradients with the other processes.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        directory: Path,
        world: World,
        heartbeat: Heartbeat,
        resumes: bool = False,
    ) -> None:
        torch.manual_seed(config.run.seed)
        self.config, self.corpus, self.world, self.heartbeat = config, corpus, world, heartbeat
        self.device = choose_device(config, world)
        self.timer = PhaseTimer(self.device, self._enter_phase)
        ranges.enable(config.profile.nvtx)

        # The model, compiled block by block before it is shared.
        self.model = NSATransformer(config.model)
        begun = config.train.init_from
        found = [] if begun is None or resumes else begin_with(self.model, begun, config.data.tokenizer)
        if config.lora.rank:
            layers = add_adapters(self.model, config.lora)
            learning = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
            found.append(
                f"adapters of rank {config.lora.rank} in {layers} linear layers: {learning:,} parameters learn"
            )
        self.model.to(self.device)
        self.model.checkpoint_blocks(config.checkpointed_blocks())
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        processes = f" x {world.size} processes" if world.size > 1 else ""
        self.notes = [
            f"{self.parameters:,} parameters on {self.device.type}{processes}; files in {directory}",
            *found,
            *corpus.notes,
        ]
        if config.train.matmul != "native":
            done, layers = convert_linear_layers(self.model, config.train.matmul)
            self.notes.append(
                f"{config.train.matmul} matrix products in {done} of the {layers} linear layers of the blocks"
            )
        if config.compile.enabled:
            nsa_compile.compile_blocks(
                self.model,
                nested=config.compile.nested,
                disable=config.compile.disable,
                estimate=True,
                nvtx=config.profile.nvtx,
                check="first" if config.compile.check else False,
            )
            self.notes.append("compiling; the first batches take longer")
        elif config.model.variant.scanned:
            self.notes.append("compile.enabled = false: attention loops over the tokens one by one, which is slow")

        # The other processes: gradients are sent while the backward pass goes on.
        self.hook, self.bucket_mb = None, None
        if world.size > 1 and config.ddp.compress != "none":
            self.notes.append(f"[{config.ddp.strategy}] gradient compression enabled: {config.ddp.compress}")
        if world.size > 1 and config.ddp.strategy == "ddp":
            self.hook = AllReduceHook(config.ddp.compress, on_last=lambda: self.timer.rest_is("communication"))
            size, wanted = bucket_mb(config.ddp, self.model), config.ddp.bucket_mb
            instead = "" if size == wanted else f" instead of ddp.bucket_mb = {wanted:g}: the model is small"
            self.notes.append(f"[ddp] gradients are sent in buckets of {size:.3g} MB{instead}")
            self.bucket_mb = size
        self.trained = share_model(self.model, config.ddp, world, self.device, self.hook)

        # The optimizer, the data, and what to do about a loss that is not finite: all that a checkpoint holds.
        self.optimizer = make_optimizer(self.model, config.optim)
        if config.optim.name != "adamw":
            self.notes.append(
                f"{config.optim.name} compiles its update in the first step, once for each shape of a weight"
            )
        shape = config.train
        self.sampler = BatchSampler(
            corpus.train, shape.batch_size, shape.seq_len, rank=world.rank, world_size=world.size
        )
        self.counted = corpus.answers if shape.loss == "answers" else None
        self.validation = corpus.validation[:, local_rows(shape.batch_size, world.rank, world.size)]
        self.nonfinite = NonFinitePolicy(shape.on_nonfinite, shape.max_skipped, directory)
        self.state = TrainingState(config, self.model, self.optimizer, self.sampler, self.nonfinite, world)

        # What throughput is counted in, and what MFU is a fraction of.
        self.tokens_per_step = shape.seq_len * shape.batch_size * shape.accumulate
        self.flops_per_token = training_flops_per_token(config.model, shape.seq_len)
        self.matmul_rates: list[MatmulRate] = []
        self.measure_matmul()

    def _enter_phase(self, name: str) -> None:
        self.heartbeat.phase("idle" if name == OTHER else cast(Phase, name))

    def measure_matmul(self) -> None:
        """Add the matrix-product rate of all devices together: all processes measure at once, on their own threads."""
        dtypes = multiplied_dtypes(self.config.train.dtype, self.config.train.matmul)
        barrier()
        rates = all_gather(measure_matmul(self.device, dtypes, processes=self.world.local_size))
        self.matmul_rates.append(total(rates))

    def restore(self, checkpoint: Checkpoint) -> str | None:
        """Put a checkpoint back; if its run was to have another number of steps, the line that says so."""
        states, steps = load_checkpoint(checkpoint.path), self.config.train.steps
        try:
            self.state.restore(states, checkpoint.step)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint '{checkpoint.path}' cannot be used: {error}") from None
        planned = dict(flatten(states[STATE]["config"])).get("train.steps")
        if planned == steps:
            return None
        before = planned if type(planned) is int and 0 < planned < 2**60 else "another number"
        return f"train.steps was {before} and is {steps}: the learning rate now follows the schedule of {steps} steps"

    def take_step(self, step: int) -> tuple[list[Any], list[Any], float, StepResult]:
        """Learn from the `step`-th batch, and return its indices and sequences, the learning rate, and the result."""
        shape = self.config.train
        with ranges.step(step):
            with self.timer.phase("data"):
                indices = [self.sampler.next_indices() for _ in range(shape.accumulate)]
                batches = [self.sampler.sequences(part) for part in indices]
            lr = learning_rate(self.config.optim, step, shape.steps)
            result = train_step(
                self.trained,
                self.optimizer,
                batches,
                lr,
                self.config.optim.clip,
                self.device,
                shape.dtype,
                self.timer,
                self.hook,
                self.counted,
                varies=self.config.data.chat,
                auxiliary=self.config.model.auxiliary,
            )
            synchronize(self.device)
        return indices, batches, lr, result

    def observe_attention(self, journal: Journal, step: int, batch: Any) -> dict[str, Any]:
        """Record statistics of every layer on a sequence of the batch; return the gates for the heartbeat, if any."""
        variant, layers = self.config.model.variant, []
        if self.world.main and self.config.ddp.strategy != "fsdp":
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.dtype == "bf16"):
                layers = variant.statistics(self.model, torch.from_numpy(readable(batch[:1, :-1])).to(self.device))
        journal.attention(step, layers)
        gates = {str(x.layer): [getattr(x, f"gate_{name}") for name in BRANCHES] for x in layers if variant.gated}
        return {"gates": gates} if gates else {}

    def validate(self, journal: Journal, step: int) -> None:
        """Record the loss on the held-out sequences of all processes; TrainingDiverged where the run must not go on."""
        self.heartbeat.phase("evaluate")
        with ranges.span("evaluation", "evaluation"):
            own, accuracy = evaluate_answers(
                self.model, self.validation, self.corpus.answers, self.device, self.config.train.dtype, self.counted
            )
        # Each process by how many tokens its loss is the mean over.
        weight = counted_tokens(self.validation) if self.config.data.chat else 1.0
        figures = torch.tensor([own * weight, weight, accuracy or 0.0], dtype=torch.float64, device=self.device)
        loss_sum, weights, mean_accuracy = mean_of_all(figures).tolist()
        loss = loss_sum / weights
        journal.evaluation(EvalRow(step, loss, None if accuracy is None else mean_accuracy))
        if math.isfinite(loss):
            self.nonfinite.finite_validation()
        else:
            self.nonfinite.nonfinite_validation(step, self.world.rank, all_gather(own))
            journal.log(
                f"step {step}: the validation loss is not finite, which train.on_nonfinite = 'skip' puts up with"
            )

    def save(self, journal: Journal, step: int) -> None:
        """Start writing a checkpoint."""
        self.heartbeat.phase("checkpoint")
        with ranges.span("checkpoint", "checkpoint"):
            journal.save(step, self.state.files(step))

    def write_sample(self, path: Path, count: int) -> None:
        """Write what the model makes of the beginning of the held-out text."""
        begins = without_filling(self.corpus.validation[0, 0])[:PROMPT_TOKENS]
        prompt = torch.from_numpy(readable(begins)).to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.config.run.seed)
        tokens = generate(self.model, prompt, count, Sampling(SAMPLE_TEMPERATURE), generator)
        write_text(path, self.corpus.tokenizer.decode(torch.cat((prompt, tokens)).tolist()) + "\n")


class Stop(IntEnum):
    """Why the processes stop before the last step; the greatest of all processes counts."""

    NOT = 0
    SIGINT = 1
    SIGTERM = 2
    SIGHUP = 3
    HALT = 4
    RECORD_LOST = 5
    SAVE_FAILED = 6
    DIRECTORY_LOST = 7


@contextmanager
def leaving_together(world: World, signals: StopRequest) -> Iterator[None]:
    """End every process by an error that all of them raise; rank 0 says it."""
    try:
        yield
    except (CheckpointError, Halted, TrainingDiverged) as error:
        signals.leaving = world.size > 1
        if world.main:
            raise
        raise SystemExit(error.exit_code) from None


def run(
    config: RunConfig,
    corpus: Corpus,
    directory: Path,
    resumed: Checkpoint | None = None,
    world: World = World(),  # noqa: B008  immutable
) -> dict[str, Any]:
    """Train as ``config`` says, leave everything in ``directory`` and return the summary.

    Args:
        config: what to do.
        corpus: what to train and to be judged on.
        directory: the run's own; a resumed run goes on in it.
        resumed: the checkpoint to go on from; the losses and weights are those of a run that was never stopped.
        world: the place of this process among those that train; they have joined already.

    Raises:
        TrainingDiverged: the loss or the gradient stopped being finite.
        CheckpointError: ``resumed`` cannot be used, the disk has no room for a checkpoint or the records, or the
            directory was deleted or moved.
        Halted: a watchdog, or somebody else, asked the run to stop.
    """
    with held_for_a_run(directory):
        install_stack_dump(directory, world.rank)
        with Heartbeat(directory, world.rank, config.watchdog.interval_s, world_size=world.size) as heartbeat:
            trainer = Trainer(config, corpus, directory, world, heartbeat, resumes=resumed is not None)
            return _run(trainer, directory, resumed)


def _run(trainer: Trainer, directory: Path, resumed: Checkpoint | None) -> dict[str, Any]:
    config, shape, world = trainer.config, trainer.config.train, trainer.world
    device, heartbeat, nonfinite = trainer.device, trainer.heartbeat, trainer.nonfinite
    peak_flops = best_of(trainer.matmul_rates)

    # Go on from a checkpoint.
    step, resumed_at = 0, None
    if resumed is not None:
        step = resumed_at = resumed.step
        other_length = trainer.restore(resumed)
        trainer.notes += [f"resumed from step {resumed_at}", *([other_length] if other_length else [])]
        heartbeat.resumed(resumed_at)

    with (
        CompileClock() as compiling,
        stop_on_signals(world.rank, world.size, heartbeat.left_by_signal) as signals,
        Journal(config, directory, world, resumed_at) as journal,
        leaving_together(world, signals),
    ):
        journal.write_provenance(device, peak_flops, trainer.bucket_mb)
        for note in trainer.notes:
            journal.log(note)
        if resumed is None:
            trainer.validate(journal, 0)

        first_call = config.compile.enabled and config.compile.check
        saved, stop = resumed is not None, Stop.NOT
        while step < shape.steps and stop is Stop.NOT:
            step += 1

            # Learn, and count the tokens by the seconds in which nothing was compiled.
            start, compiled = time.perf_counter(), compiling.seconds
            indices, batches, lr, result = trainer.take_step(step)
            seconds = time.perf_counter() - start
            if not signals.stepped:
                barrier()  # or one process would leave at once and the others wait for it to save
                signals.stepped = True
            rate = trainer.tokens_per_step / (seconds - (compiling.seconds - compiled))
            mfu = rate * trainer.flops_per_token / peak_flops

            # Write it down.
            phases = phase_columns(trainer.timer.step_done())
            row = StepRow(step, result.loss, lr, result.grad_norm, rate, mfu, seconds, peak_memory(device), **phases)
            journal.step(row, result)
            if first_call and (report := nsa_compile.last_report()) is not None and report.first_call is not None:
                journal.log(f"a compiled block is {report.first_call}")
            first_call = False
            beat: dict[str, Any] = {}
            if config.log.stats_every and step % config.log.stats_every == 0:
                beat = trainer.observe_attention(journal, step, batches[0])
            if device.type == "cuda":
                beat["device_bytes"] = torch.cuda.memory_allocated(device)
            heartbeat.step(step, result.loss, result.grad_norm, rate, **beat)

            # A step that is not finite has changed no weights: it is skipped, or ends the run.
            if result.finite:
                nonfinite.finite()
            else:
                sequences = [index for part in indices for index in part]
                losses = all_gather(result.own_loss.item())
                nonfinite.nonfinite(step, world.rank, sequences, losses, result.grad_norm)

            # Validate and save.
            if step % shape.eval_every == 0 or step == shape.steps:
                trainer.validate(journal, step)
            saved = step == shape.steps or bool(shape.save_every and step % shape.save_every == 0)
            if saved:
                trainer.save(journal, step)
            heartbeat.phase("idle")

            # Stop where one of the processes was asked to, or cannot go on.
            stop = Stop.NOT if signals.signal is None else Stop[signals.signal]
            if journal.lost() is not None:
                stop = Stop.DIRECTORY_LOST if journal.directory_lost else Stop.RECORD_LOST
            elif journal.save_error() is not None:
                stop = Stop.SAVE_FAILED
            elif world.main and halt_reason(directory) is not None:
                stop = Stop.HALT
            heartbeat.phase("communication")
            stop = Stop(all_reduce_max(stop, device))
            heartbeat.phase("idle")

        # The end. Nobody leaves before rank 0 has written everything, since the first to leave ends the others.
        if not saved and stop < Stop.SAVE_FAILED:
            journal.save_error(wait=True)  # of the one before: this one is tried all the same
            trainer.save(journal, step)
        journal.require_written(device)
        interrupted, memory = step < shape.steps, peak_memory(device)
        if not interrupted:
            # Once more: a machine that was busy at the start, or is now, shows in the difference.
            trainer.measure_matmul()
        summary: dict[str, Any] = {
            "run_dir": str(directory),
            "interrupted": interrupted,
            "stopped_by": stop.name if interrupted else None,
            "resumed_from": resumed_at,
            "steps": step,
        }
        if world.main:
            summary |= _figures(trainer, journal, resumed_at or 0, memory)
            _leave_files(trainer, journal, directory, summary)
        journal.require_written(device)
        barrier()
        if stop is Stop.HALT and interrupted:
            raise Halted(f"run '{directory}' was halted after step {step}: {halt_reason(directory)}")
        signals.leaving = world.size > 1
    return summary


def _figures(trainer: Trainer, journal: Journal, resumed_at: int, memory: int) -> dict[str, Any]:
    """What the summary says of the sizes and the results of a run."""
    config = trainer.config
    rates, evaluations = trainer.matmul_rates, journal.evaluations.rows
    found = throughput(journal.steps.rows[resumed_at:])
    if found["mfu"] is not None:  # the rows' is of the peak at the start
        found["mfu"] *= rates[0].peak / best_of(rates)
    return {
        **config.sizes(),
        "parameters": trainer.parameters,
        "processes": trainer.world.size,
        "strategy": config.ddp.strategy if trainer.world.size > 1 else None,
        **found,
        "flops_per_token": trainer.flops_per_token,
        "peak_flops": best_of(rates),
        "matmul_rates": [asdict(rate) for rate in rates],
        "memory_bytes": memory,
        "bucket_mb": trainer.bucket_mb,
        **journal.communication(),
        # JSON has no numbers that are not finite.
        "val_loss_start": finite_or_none(evaluations[0].val_loss),
        "val_loss_end": finite_or_none(evaluations[-1].val_loss),
        "val_step_end": evaluations[-1].step,
        "accuracy": evaluations[-1].accuracy,
        "best_unigram_loss": trainer.corpus.best_unigram_loss,
        "skipped_steps": trainer.nonfinite.skipped,
        "doubts": [doubt for doubt in (busy(rates), unsteady(found), impossible(found["mfu"])) if doubt],
        "notes": [],
    }


def _leave_files(trainer: Trainer, journal: Journal, directory: Path, summary: dict[str, Any]) -> None:
    """Write what belongs to the end of a run: passes, picture, sample and summary."""
    config, count = trainer.config, trainer.config.train.sample_tokens
    report = nsa_compile.last_report() if config.compile.enabled else None
    if report is not None:  # a resumed run that had no step left compiled nothing
        write_json(directory / "passes.json", report.to_dict())
    rows = journal.steps.rows, journal.evaluations.rows
    if not plot_losses(directory / "loss.png", *rows, trainer.corpus.best_unigram_loss):
        summary["notes"].append("no loss.png: matplotlib is not installed (the plots extra brings it)")
    if count and config.ddp.strategy == "fsdp" and trainer.world.size > 1:
        summary["notes"].append("no sample.txt: a model that FSDP shards does not generate")
    elif count and not summary["interrupted"]:
        trainer.write_sample(directory / "sample.txt", count)
    write_json(directory / "summary.json", summary)

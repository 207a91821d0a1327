"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import errno
import math
import time
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

import nsa_compile
from nsa_compile import ranges
from nsa_compile.branches import BRANCHES
from nsa_compile.config import RunConfig, flatten
from nsa_compile.data import BatchSampler, Corpus
from nsa_compile.data.sampling import local_rows
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
from nsa_compile.models.variant import LayerRow
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
from nsa_compile.train.checkpoints.files import STATE, Checkpoint
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
from nsa_compile.train.evaluation import evaluate_answers
from nsa_compile.train.journal import Journal
from nsa_compile.train.low_precision import convert_linear_layers
from nsa_compile.train.nonfinite import NonFinitePolicy
from nsa_compile.train.optim import learning_rate, make_optimizer
from nsa_compile.train.phases import OTHER, CompileClock, PhaseTimer
from nsa_compile.train.records.plots import plot_losses
from nsa_compile.train.records.rows import EvalRow, StepRow, finite_or_none, phase_columns, throughput
from nsa_compile.train.records.run_directory import HeldDirectory, loss_of_directory
from nsa_compile.train.signals import StopRequest, stop_on_signals
from nsa_compile.train.state import TrainingState
from nsa_compile.train.steps import StepResult, train_step
from nsa_compile.train.watch.halt import halt_reason
from nsa_compile.train.watch.heartbeat import Heartbeat, Phase, install_stack_dump

PROMPT_TOKENS = 32
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SAMPLE_TEMPERATURE = 0.8


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
    try:
        with HeldDirectory(directory) as held:
            try:
                install_stack_dump(directory, world.rank)
                with Heartbeat(directory, world.rank, config.watchdog.interval_s, world_size=world.size) as heartbeat:
                    return Trainer(config, corpus, directory, world, heartbeat).run(resumed)
            except (OSError, CheckpointError):
                if lost := loss_of_directory(held):
                    raise CheckpointError(lost) from None
                raise
    except OSError as error:  # rows, statistics, pictures: whatever could not be written
        own = error.filename is not None and Path(str(error.filename)).is_relative_to(directory)
        if error.errno not in _NO_ROOM and not own:
            raise
        name = error.filename or directory
        way_out = "make room for it" if error.errno in _NO_ROOM else "put that right"
        raise CheckpointError(
            f"'{name}' cannot be written: {error.strerror}; {way_out} and go on with --resume"
        ) from None


class Trainer:
    """A run in one of its processes; rank 0 also keeps the records."""

    def __init__(self, config: RunConfig, corpus: Corpus, directory: Path, world: World, heartbeat: Heartbeat) -> None:
        torch.manual_seed(config.run.seed)
        self.config, self.corpus, self.directory, self.world = config, corpus, directory, world
        self.heartbeat = heartbeat
        self.device = choose_device(config, world)
        self.timer = PhaseTimer(self.device, self._enter_phase)
        self.signals = StopRequest()
        ranges.enable(config.profile.nvtx)

        self.model = NSATransformer(config.model).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.model.checkpoint_blocks(config.checkpointed_blocks())
        self.untold = config.compile.enabled and config.compile.check
        self.converted = (0, 0)
        if config.train.matmul != "native":
            self.converted = convert_linear_layers(self.model, config.train.matmul)
        if config.compile.enabled:
            nsa_compile.compile_blocks(
                self.model,
                nested=config.compile.nested,
                disable=config.compile.disable,
                estimate=True,
                nvtx=config.profile.nvtx,
                check="first" if config.compile.check else False,
            )
        self.hook = None
        if world.size > 1 and config.ddp.strategy == "ddp":
            self.hook = AllReduceHook(config.ddp.compress, on_last=lambda: self.timer.rest_is("communication"))
        self.trained = share_model(self.model, config.ddp, world, self.device, self.hook)
        self.bucket_mb = None if self.hook is None else bucket_mb(config.ddp, self.model)
        self.optimizer = make_optimizer(self.model, config.optim)

        shape = config.train
        self.sampler = BatchSampler(
            corpus.train, shape.batch_size, shape.seq_len, rank=world.rank, world_size=world.size
        )
        self.counted = corpus.answers if shape.loss == "answers" else None
        self.validation = corpus.validation[:, local_rows(shape.batch_size, world.rank, world.size)]
        self.nonfinite = NonFinitePolicy(shape.on_nonfinite, shape.max_skipped, directory)
        self.state = TrainingState(config, self.model, self.optimizer, self.sampler, self.nonfinite, world)
        self.matmul_rates = [self._measure_matmul()]
        self.peak_flops = best_of(self.matmul_rates)
        self.tokens_per_step = shape.seq_len * shape.batch_size * shape.accumulate
        self.flops_per_token = training_flops_per_token(config.model, shape.seq_len)

    def run(self, resumed: Checkpoint | None) -> dict[str, Any]:
        """Train to the last step, or until something stops it, and return the summary; see :func:`run`."""
        first_step = 0
        planned = self.config.train.steps
        if resumed is not None:
            first_step = resumed.step
            planned = self._restore(resumed)
            self.heartbeat.resumed(first_step)
        resumed_at = None if resumed is None else first_step
        step = first_step
        with (
            CompileClock() as self.compiling,
            stop_on_signals(self.world.size > 1) as self.signals,
            Journal(self.config, self.directory, self.world, resumed_at) as journal,
        ):
            journal.write_provenance(self.device, self.peak_flops, self.bucket_mb)
            self._announce(journal, resumed_at, planned)
            if resumed is None:
                self._evaluate(journal, 0)
            saved, stop = resumed is not None, Stop.NOT
            while step < self.config.train.steps and stop is Stop.NOT:
                step += 1
                saved = self._step(journal, step)
                stop = self._agree_to_stop(journal)
            if not saved and stop < Stop.SAVE_FAILED:
                journal.save_error(wait=True)  # of the one before: this one is tried all the same
                self._save(journal, step)
            # Nobody leaves before rank 0 has written everything, since the first to leave ends the others.
            self._leave_if_not_written(journal)
            summary = self._summary(journal, step, resumed_at, stop)
            if self.world.main:
                self._leave_files(journal, summary)
            self._leave_if_not_written(journal)
            barrier()
            if stop is Stop.HALT and summary["interrupted"]:
                why = halt_reason(self.directory)
                self._leave(Halted(f"run '{self.directory}' was halted after step {step}: {why}"))
            self._all_leave()
        return summary

    def _leave_if_not_written(self, journal: Journal) -> None:
        """Wait for the checkpoints, and end the run if one, or something else it has written, is not there."""
        failed = journal.save_error(wait=True)
        lost = journal.lost()
        error = failed if lost is None else CheckpointError(lost)
        if all_reduce_max(error is not None, self.device):
            self._leave(error or CheckpointError())

    def _leave(self, error: CheckpointError | Halted | TrainingDiverged) -> NoReturn:
        """End every process by an error that all have agreed on; rank 0 says it."""
        self._all_leave()
        if self.world.main:
            raise error
        raise SystemExit(error.exit_code)

    def _all_leave(self) -> None:
        self.signals.leaving = self.world.size > 1

    def _measure_matmul(self) -> MatmulRate:
        """Matrix-product rate of all devices together: all processes measure at the same time, on their own threads."""
        dtypes = multiplied_dtypes(self.config.train.dtype, self.config.train.matmul)
        barrier()
        return total(all_gather(measure_matmul(self.device, dtypes, processes=self.world.local_size)))

    def _restore(self, checkpoint: Checkpoint) -> Any:
        """Put a checkpoint back, and return the number of steps that its run was to have."""
        states = load_checkpoint(checkpoint.path)
        try:
            self.state.restore(states, checkpoint.step)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint '{checkpoint.path}' cannot be used: {error}") from None
        return dict(flatten(states[STATE]["config"])).get("train.steps")

    def _enter_phase(self, name: str) -> None:
        self.heartbeat.phase("idle" if name == OTHER else cast(Phase, name))

    def _announce(self, journal: Journal, resumed_at: int | None, planned: Any) -> None:
        config, world = self.config, self.world
        processes = f" x {world.size} processes" if world.size > 1 else ""
        journal.log(f"{self.parameters:,} parameters on {self.device.type}{processes}; files in {self.directory}")
        if world.size > 1 and config.ddp.compress != "none":
            journal.log(f"[{config.ddp.strategy}] gradient compression enabled: {config.ddp.compress}")
        if self.bucket_mb is not None:
            wanted = config.ddp.bucket_mb
            instead = "" if self.bucket_mb == wanted else f" instead of ddp.bucket_mb = {wanted:g}: the model is small"
            journal.log(f"[ddp] gradients are sent in buckets of {self.bucket_mb:.3g} MB{instead}")
        if config.compile.enabled:
            journal.log("compiling; the first batches take longer")
        elif config.model.variant.scanned:
            journal.log("compile.enabled = false: attention loops over the tokens one by one, which is slow")
        if config.train.matmul != "native":
            done, layers = self.converted
            journal.log(f"{config.train.matmul} matrix products in {done} of the {layers} linear layers of the blocks")
        if config.optim.name != "adamw":
            journal.log(f"{config.optim.name} compiles its update in the first step, once for each shape of a weight")
        if resumed_at is not None:
            journal.log(f"resumed from step {resumed_at}")
        steps = config.train.steps
        if planned != steps:
            before = planned if type(planned) is int and 0 < planned < 2**60 else "another number"
            journal.log(
                f"train.steps was {before} and is {steps}: the learning rate now follows the schedule of {steps} steps"
            )

    def _tell_of_first_call(self, journal: Journal) -> None:
        """Say once what the check of a compiled block found. Each process does it, on its own part of the batch."""
        report = nsa_compile.last_report() if self.untold else None
        self.untold = False
        if report is not None and report.first_call is not None:
            journal.log(f"a compiled block is {report.first_call}")

    def _step(self, journal: Journal, step: int) -> bool:
        """Do the `step`-th step and what comes after it, and return whether it was saved."""
        config, shape = self.config, self.config.train
        start, compiled = time.perf_counter(), self.compiling.seconds
        indices, batches, lr, result = self.take_step(step)
        seconds = time.perf_counter() - start
        compiled = self.compiling.seconds - compiled
        phases = self.timer.step_done()
        rate = self.tokens_per_step / (seconds - compiled)
        mfu = rate * self.flops_per_token / self.peak_flops
        memory = peak_memory(self.device)
        row = StepRow(step, result.loss, lr, result.grad_norm, rate, mfu, seconds, memory, **phase_columns(phases))
        journal.step(row, result)
        self._tell_of_first_call(journal)
        gates = None
        if config.log.stats_every and step % config.log.stats_every == 0:
            layers = self._attention_statistics(batches[0])
            journal.attention(step, layers)
            if config.model.variant.gated:
                gates = {str(x.layer): [getattr(x, f"gate_{branch}") for branch in BRANCHES] for x in layers}
        extra: dict[str, Any] = {"gates": gates} if gates else {}
        if self.device.type == "cuda":
            extra["device_bytes"] = torch.cuda.memory_allocated(self.device)
        self.heartbeat.step(step, result.loss, result.grad_norm, rate, **extra)
        if result.finite:
            self.nonfinite.finite()
        else:
            self._skip(step, [index for part in indices for index in part], result)
        if step % shape.eval_every == 0 or step == shape.steps:
            self._evaluate(journal, step)
        save = step == shape.steps or bool(shape.save_every and step % shape.save_every == 0)
        if save:
            self._save(journal, step)
        self.heartbeat.phase("idle")
        return save

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
            )
            synchronize(self.device)
        return indices, batches, lr, result

    def _skip(self, step: int, sequences: list[int], result: StepResult) -> None:
        losses = all_gather(result.own_loss.item())
        try:
            self.nonfinite.nonfinite(step, self.world.rank, sequences, losses, result.grad_norm)
        except TrainingDiverged as error:
            self._leave(error)

    def _attention_statistics(self, batch: Any) -> list[LayerRow]:
        if self.config.ddp.strategy == "fsdp" or not self.world.main:
            return []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.dtype == "bf16"):
            tokens = torch.from_numpy(batch[:1, :-1]).to(self.device)
            return self.config.model.variant.statistics(self.model, tokens)

    def _evaluate(self, journal: Journal, step: int) -> None:
        self.heartbeat.phase("evaluate")
        with ranges.span("evaluation", "evaluation"):
            own, accuracy = evaluate_answers(
                self.model, self.validation, self.corpus.answers, self.device, self.config.train.dtype, self.counted
            )
        figures = torch.tensor([own, accuracy or 0.0], dtype=torch.float64, device=self.device)
        loss, mean_accuracy = mean_of_all(figures).tolist()
        journal.evaluation(EvalRow(step, loss, None if accuracy is None else mean_accuracy))
        if math.isfinite(loss):
            self.nonfinite.finite_validation()
            return
        try:
            self.nonfinite.nonfinite_validation(step, self.world.rank, all_gather(own))
        except TrainingDiverged as error:
            self._leave(error)
        journal.log(f"step {step}: the validation loss is not finite, which train.on_nonfinite = 'skip' puts up with")

    def _save(self, journal: Journal, step: int) -> None:
        self.heartbeat.phase("checkpoint")
        with ranges.span("checkpoint", "checkpoint"):
            journal.save(step, self.state.files(step))

    def _agree_to_stop(self, journal: Journal) -> Stop:
        reason = Stop.NOT if self.signals.signal is None else Stop[self.signals.signal]
        if journal.lost() is not None:
            reason = Stop.DIRECTORY_LOST if journal.directory_lost else Stop.RECORD_LOST
        elif journal.save_error() is not None:
            reason = Stop.SAVE_FAILED
        elif self.world.main and halt_reason(self.directory) is not None:
            reason = Stop.HALT
        self.heartbeat.phase("communication")
        reason = Stop(all_reduce_max(reason, self.device))
        self.heartbeat.phase("idle")
        return reason

    def _summary(self, journal: Journal, step: int, resumed_at: int | None, stop: Stop) -> dict[str, Any]:
        config, shape = self.config, self.config.train
        interrupted = step < shape.steps
        memory = peak_memory(self.device)
        if not interrupted:
            # Once more: a machine that was busy at the start, or is now, shows in the difference.
            self.matmul_rates.append(self._measure_matmul())
        summary: dict[str, Any] = {
            "run_dir": str(self.directory),
            "interrupted": interrupted,
            "stopped_by": stop.name if interrupted else None,
            "resumed_from": resumed_at,
            "steps": step,
        }
        if not self.world.main:
            return summary
        pattern = config.model.pattern
        found = throughput(journal.steps.rows[resumed_at or 0 :])
        if found["mfu"] is not None:  # the rows' is of the peak at the start
            found["mfu"] *= self.peak_flops / best_of(self.matmul_rates)
        return summary | {
            "seq_len": shape.seq_len,
            "batch_size": shape.batch_size,
            "accumulate": shape.accumulate,
            "processes": self.world.size,
            "strategy": config.ddp.strategy if self.world.size > 1 else None,
            "dtype": shape.dtype,
            "attention": config.model.attention,
            "layers": config.model.n_layers,
            "parameters": self.parameters,
            "num_selected": pattern.num_selected,
            "window": pattern.window,
            **found,
            "flops_per_token": self.flops_per_token,
            "peak_flops": best_of(self.matmul_rates),
            "matmul_rates": [asdict(rate) for rate in self.matmul_rates],
            "memory_bytes": memory,
            "bucket_mb": self.bucket_mb,
            **journal.communication(),
            # JSON has no numbers that are not finite.
            "val_loss_start": finite_or_none(journal.evaluations.rows[0].val_loss),
            "val_loss_end": finite_or_none(journal.evaluations.rows[-1].val_loss),
            "accuracy": journal.evaluations.rows[-1].accuracy,
            "best_unigram_loss": self.corpus.best_unigram_loss,
            "skipped_steps": self.nonfinite.skipped,
            "doubts": [doubt for doubt in (busy(self.matmul_rates), impossible(found["mfu"])) if doubt],
            "notes": [],
        }

    def _leave_files(self, journal: Journal, summary: dict[str, Any]) -> None:
        """Write what belongs to the end of a run: picture, passes, sample and summary."""
        if self.config.compile.enabled:
            report = nsa_compile.last_report()
            if report is not None:  # a resumed run that had no step left compiled nothing
                write_json(self.directory / "passes.json", report.to_dict())
        steps, evaluations = journal.steps.rows, journal.evaluations.rows
        if not plot_losses(self.directory / "loss.png", steps, evaluations, self.corpus.best_unigram_loss):
            summary["notes"].append("no loss.png: matplotlib is not installed (the plots extra brings it)")
        count = self.config.train.sample_tokens
        if count and self.config.ddp.strategy == "fsdp" and self.world.size > 1:
            summary["notes"].append("no sample.txt: a model that FSDP shards does not generate")
        elif count and not summary["interrupted"]:
            self._write_sample(count)
        write_json(self.directory / "summary.json", summary)

    def _write_sample(self, count: int) -> None:
        prompt = torch.from_numpy(self.corpus.validation[0, 0, :PROMPT_TOKENS]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.config.run.seed)
        tokens = generate(self.model, prompt, count, Sampling(SAMPLE_TEMPERATURE), generator)
        text = self.corpus.tokenizer.decode(torch.cat((prompt, tokens)).tolist())
        write_text(self.directory / "sample.txt", text + "\n")

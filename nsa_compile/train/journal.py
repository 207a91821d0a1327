"""The records of a run, which rank 0 logs and writes for all ranks."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from nsa_compile.config import RunConfig
from nsa_compile.errors import CheckpointError
from nsa_compile.files import make_directory, write_json, write_text
from nsa_compile.machine.environment import describe_environment, git_revision
from nsa_compile.models.variant import LayerRow
from nsa_compile.train.checkpoints.checkpoint import CheckpointWriter
from nsa_compile.train.distributed.all_reduce import Overlap
from nsa_compile.train.distributed.group import all_reduce_max
from nsa_compile.train.distributed.world import World
from nsa_compile.train.records.rows import THROUGHPUT_STEPS, CsvLog, EvalRow, JsonLog, StepRow, rate_of
from nsa_compile.train.records.run_directory import HeldDirectory, loss_of_directory
from nsa_compile.train.records.tensorboard import TensorBoard
from nsa_compile.train.steps import StepResult
from nsa_compile.train.watch.halt import clear_halt

# The bar itself takes what 80 columns leave.
BAR = "{percentage:3.0f}% {bar} {n_fmt} of {total_fmt}, {remaining} left{postfix}"


class Journal:
    """CSV files, checkpoints, progress and log lines of rank 0; silent in every other rank.

    Args:
        resumed_at: the step a run goes on from; rows after it are cut off.

    Attributes:
        directory_lost: whether :meth:`lost` found the directory as a whole gone, so that nothing can be saved.

    Raises:
        CheckpointError: the rows of a resumed run cannot be read.
    """

    def __init__(self, config: RunConfig, directory: Path, world: World, resumed_at: int | None) -> None:
        self.config, self.directory, self.main = config, directory, world.main
        self.resumed_at = resumed_at
        self._overlaps: deque[Overlap] = deque(maxlen=THROUGHPUT_STEPS)
        self._unsaid: list[StepRow] = []  # steps since the last line of the log
        self._save_error: CheckpointError | None = None
        self._lost: str | None = None
        self.directory_lost = False
        self._tensorboard: TensorBoard | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Journal:
        if not self.main:
            return self
        config, directory, resumed_at = self.config, self.directory, self.resumed_at
        clear_halt(directory)
        with contextlib.ExitStack() as opened:
            self.steps = opened.enter_context(CsvLog(directory / "training.csv", StepRow, resumed_at))
            self.evaluations = opened.enter_context(CsvLog(directory / "val.csv", EvalRow, resumed_at))
            self._attention = opened.enter_context(JsonLog(directory / "attention.jsonl", resumed_at))
            if config.log.tensorboard:
                self._tensorboard = opened.enter_context(TensorBoard(directory, resumed_at))
            # tqdm is silent where stderr is no terminal; the logged lines remain.
            total, done = config.train.steps, resumed_at or 0
            self._bar = opened.enter_context(
                tqdm(total=total, initial=done, bar_format=BAR, dynamic_ncols=True, disable=None, file=sys.stderr)
            )
            shape = config.train
            self._run_directory = opened.enter_context(HeldDirectory(directory))
            make_directory(directory / "checkpoints")
            self._checkpoints = opened.enter_context(HeldDirectory(directory / "checkpoints"))
            self._writer = opened.enter_context(
                CheckpointWriter(directory / "checkpoints", shape.keep_last, shape.keep_best)
            )
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    def write_provenance(self, device: torch.device, peak_flops: float, bucket_mb: float | None) -> None:
        """Write down what the run is and what it runs on, and the size of the buckets that gradients are sent in."""
        if not self.main:
            return
        write_text(self.directory / "config.resolved.yaml", self.config.to_yaml())
        environment = {**describe_environment(device), "matmul_peak_flops": peak_flops, "ddp_bucket_mb": bucket_mb}
        if self.resumed_at:
            # What the steps before ran on stays on record.
            write_json(self.directory / f"env.from-step-{self.resumed_at}.json", environment)
            return
        write_json(self.directory / "env.json", environment)
        sha = git_revision()["sha"] or "unknown: not a git checkout"
        write_text(self.directory / "git_sha.txt", sha + "\n")

    def log(self, line: str) -> None:
        """Print a line to stderr, above the progress bar."""
        if self.main:
            self._bar.write(line, file=sys.stderr)

    def step(self, row: StepRow, result: StepResult) -> None:
        """Record a step."""
        if not self.main:
            return
        self.steps.append(row)
        self._unsaid.append(row)
        if self._tensorboard is not None:
            self._tensorboard.write("training", row.step, row)
        if result.overlap is not None:
            if not self._overlaps:
                self.log(f"[ddp] {result.overlap.sent_bytes / 1e6:,.1f} MB of gradients sent by each process a step")
            self._overlaps.append(result.overlap)
        self._bar.set_postfix_str(f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tokens/s")
        self._bar.update()
        if row.step % self.config.train.log_every == 0:
            self.steps.flush()
            rate, mfu = rate_of(self._unsaid)
            self._unsaid.clear()
            self.log(f"step {row.step}: loss {row.loss:.4f}, lr {row.lr:.2e}, {rate:,.0f} tokens/s, MFU {mfu:.1%}")

    def attention(self, step: int, layers: Sequence[LayerRow]) -> None:
        """Record gates and selection."""
        if not self.main:
            return
        for layer in layers:
            self._attention.append({"step": step, **asdict(layer)})
        self._attention.flush()
        if self._tensorboard is not None:
            for layer in layers:
                self._tensorboard.write(f"layer {layer.layer}", step, layer)

    def evaluation(self, row: EvalRow) -> None:
        """Record a held-out loss."""
        if not self.main:
            return
        self.evaluations.append(row)
        self.evaluations.flush()
        if self._tensorboard is not None:
            self._tensorboard.write("validation", row.step, row)
        accuracy = "" if row.accuracy is None else f", {row.accuracy:.1%} of the answers right"
        self.log(f"step {row.step}: validation loss {row.val_loss:.4f}{accuracy}")

    def save(self, step: int, states: dict[str, Any]) -> None:
        """Start writing a checkpoint."""
        if not self.main:
            return
        for log in (self.steps, self.evaluations, self._attention):
            log.sync()  # a resumed run needs every row up to its checkpoint
        last = self.evaluations.rows[-1]
        measured = last.step == step and math.isfinite(last.val_loss)
        try:
            self._writer.save(step, states, last.val_loss if measured else None)
        except CheckpointError as error:  # of the one before
            self._save_error = error

    def save_error(self, *, wait: bool = False) -> CheckpointError | None:
        """What kept a checkpoint from being written, if anything did; with ``wait``, once all are written."""
        if self.main and self._save_error is None:
            try:
                self._writer.wait() if wait else self._writer.check()
            except CheckpointError as error:
                self._save_error = error
        return self._save_error

    def lost(self) -> str | None:
        """What the run has lost of its directory since it began, in one line; ``None`` while everything is there.

        A few looks at the file system, cheap enough for every step.
        """
        if self.main and self._lost is None:
            self._lost = loss_of_directory(self._run_directory)
            self.directory_lost = self._lost is not None
            self._lost = self._lost or self._lost_part()
        return self._lost

    def _lost_part(self) -> str | None:
        """A line if a record file, or the directory of the checkpoints, is missing while the rest is there."""
        parts = {log.path: log.lost() for log in (self.steps, self.evaluations, self._attention)}
        parts[self._checkpoints.path] = self._checkpoints.became()
        for path, became in parts.items():
            if became is not None:
                return (
                    f"'{path}' {became} while the run was at work: what it held is lost to the run, which ends here; "
                    "put it back and use --resume, or start a new run"
                )
        return None

    def require_written(self, device: torch.device) -> None:
        """Wait for the checkpoints; a CheckpointError in every process if one, or another record, is not there."""
        failed, lost = self.save_error(wait=True), self.lost()
        error = failed if lost is None else CheckpointError(lost)
        if all_reduce_max(error is not None, device):
            raise error or CheckpointError()

    def communication(self) -> dict[str, Any]:
        """How gradients were sent in the last steps, for the summary; empty where DDP sent none."""
        if not self._overlaps:
            return {}
        return {
            "compress": self.config.ddp.compress,
            "gradient_bytes": self._overlaps[-1].sent_bytes,
            "first_all_reduce": statistics.median(overlap.first for overlap in self._overlaps),
        }

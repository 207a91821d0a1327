"""The directory of a run and the checkpoint it resumes from, settled before it starts. Imports no torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError, printable
from nsa_compile.train.checkpoints.files import Checkpoint, checkpoint_paths, set_aside
from nsa_compile.train.checkpoints.resume import FoundRun, newest_good_checkpoint
from nsa_compile.train.records.run_directory import create_run_directory, lock_run_directory


@dataclass(frozen=True)
class Start:
    """The directory of a run, and the checkpoint it resumes from."""

    directory: Path
    checkpoint: Checkpoint | None


@contextlib.contextmanager
def open_run(config: RunConfig, found: FoundRun) -> Iterator[Start]:
    """Open the run that was found, or a new one, for this process alone.

    Raises:
        UserError: somebody else works on it, or it is longer than configured.
        CheckpointError: no checkpoint of it is good.
    """
    directory = found.directory or create_run_directory(config)
    with lock_run_directory(directory):
        yield Start(directory, None if found.directory is None else _checkpoint_to_go_on_from(config, found))


def restart_run(config: RunConfig, directory: Path) -> Start:
    """Resume a run that another process has opened: from its newest good checkpoint, or from the start.

    Raises:
        CheckpointError: it has checkpoints, and none is good.
    """
    if not checkpoint_paths(directory / "checkpoints"):
        return Start(directory, None)
    return Start(directory, _checkpoint_to_go_on_from(config, FoundRun(directory)))


def _checkpoint_to_go_on_from(config: RunConfig, found: FoundRun) -> Checkpoint:
    assert found.directory is not None
    checkpoint, warnings = newest_good_checkpoint(found)
    if config.train.steps < checkpoint.step:
        raise UserError(
            f"train.steps = {config.train.steps} must be at least {checkpoint.step}, the step of checkpoint "
            f"'{checkpoint.path}'; raise it with --set train.steps=N, or use --resume never"
        )
    if checkpoint.note is not None:
        warnings.append(f"warning: checkpoint '{checkpoint.path}': {checkpoint.note}")
    for warning in warnings:
        print(printable(warning), file=sys.stderr)
    if moved := set_aside(found.directory / "checkpoints", checkpoint.step):
        print(f"checkpoints after step {checkpoint.step} were moved to {moved}", file=sys.stderr)
    return checkpoint

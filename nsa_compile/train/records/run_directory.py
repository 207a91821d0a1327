"""The directory of a run: made, and locked while somebody works on it. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from nsa_compile.config import RunConfig
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.files import NO_ROOM, NotPlainFile, refuse_links, what_became_of, why_unwritable


def check_output(directory: str) -> None:
    """Raise a UserError unless a directory, or the nearest parent that exists, can be written to."""
    if reason := why_unwritable(Path(directory)):
        raise UserError(_unwritable(directory, reason))


def create_run_directory(config: RunConfig) -> Path:
    """Create and return ``<run.dir>/<run.name>-<time>``, never one that exists, or raise a UserError."""
    check_output(config.run.dir)
    stem = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Two runs may start within the same second.
    for name in (stem, *(f"{stem}-{count}" for count in range(2, 1000))):
        directory = Path(config.run.dir) / name
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(_unwritable(config.run.dir, error.strerror or str(error))) from None
        return directory
    raise UserError(f"run.dir = '{config.run.dir}' is full of runs named '{stem}'; choose another run.name")


def check_run_directory(directory: Path) -> None:
    """Raise a CheckpointError if anything in the directory of a run leads out of it: it may come from elsewhere."""
    try:
        refuse_links(directory)
        for name in ("checkpoints", "tensorboard"):
            if (directory / name).is_dir():
                refuse_links(directory / name)
    except NotPlainFile as error:
        raise CheckpointError(
            f"run '{directory}' cannot be used: '{error.filename}': {error.strerror}; put the file itself there, or "
            "remove it"
        ) from None
    except OSError as error:
        raise CheckpointError(f"run '{directory}' cannot be read: {error.strerror}; restore it") from None


class HeldDirectory:
    """A directory of a run at work, held open while entered, so that it is noticed when it is deleted or moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def became(self) -> str | None:
        """What has become of it, such as "was deleted", if it no longer lies under its name; ``None`` while it does."""
        return what_became_of(self.path, self._descriptor)


def loss_of_directory(held: HeldDirectory) -> str | None:
    """That a run has lost its directory, and what is lost with it, in one line; ``None`` while it is there."""
    became = held.became()
    if became is None:
        return None
    line = f"run directory '{held.path}' {became} while the run was at work"
    if became == "was deleted":
        return f"{line}: its records and checkpoints are lost; start it again"
    return f"{line}: what came after its last checkpoint is lost; go on with --resume and the directory's new name"


@contextlib.contextmanager
def held_for_a_run(directory: Path) -> Iterator[None]:
    """Say as a CheckpointError what is lost where the directory disappears, or something cannot be written to it."""
    try:
        with HeldDirectory(directory) as held:
            try:
                yield
            except (OSError, CheckpointError):
                if lost := loss_of_directory(held):
                    raise CheckpointError(lost) from None
                raise
    except OSError as error:  # rows, statistics, pictures: whatever could not be written
        own = error.filename is not None and Path(str(error.filename)).is_relative_to(directory)
        if error.errno not in NO_ROOM and not own:
            raise
        name = error.filename or directory
        way_out = "make room for it" if error.errno in NO_ROOM else "put that right"
        raise CheckpointError(
            f"'{name}' cannot be written: {error.strerror}; {way_out} and go on with --resume"
        ) from None


@contextlib.contextmanager
def lock_run_directory(directory: Path) -> Iterator[None]:
    """Be the only process that changes a run, or raise a UserError; the lock dies with the process."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is working on run '{directory}'; wait until it ends, or stop it") from None
    else:
        yield
    finally:
        os.close(descriptor)


def _unwritable(directory: str, reason: str) -> str:
    return f"run.dir = '{directory}' must be a writable directory: {reason}; choose another with --set run.dir=PATH"

"""Checkpoints that are either whole or absent, written while the training goes on.

A checkpoint is written under another name, flushed to the disk, read back and renamed, so a crash leaves no half of
one; ``files.py`` says what it consists of. The manifest holds the SHA-256 of each file as it was handed to the
operating system: formats of torch load a flipped bit without a word.

One process writes it all, plain ``torch.save`` files, and not ``torch.distributed.checkpoint``: replicas hold the same
weights and optimizer state, so sharding would gain nothing, a rank's own state is a few kilobytes, and DCP
unpickles its ``.metadata`` without restrictions, which runs whatever code a foreign checkpoint brings.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from nsa_compile.errors import CheckpointError
from nsa_compile.files import create, flush, make_directory, open_regular, replace
from nsa_compile.train.checkpoints.files import (
    MANIFEST,
    WRITING,
    Checkpoint,
    FileEntry,
    delete_checkpoint,
    delete_leftovers,
    read_checkpoint,
    readable_checkpoints,
    step_name,
    superfluous,
    verify_checkpoint,
)

States = Mapping[str, Any]
"""State of each file of a checkpoint: tensors and plain Python values, nested in dicts and lists."""


def save_checkpoint(directory: Path, step: int, states: States, val_loss: float | None = None) -> Checkpoint:
    """Write ``states`` as the checkpoint of ``step``, and return it once it has been read back and found equal.

    Args:
        directory: where checkpoints are kept; created when absent, in one that exists.
        step: optimizer steps done.
        states: what each file holds, by the names of ``files.py``.
        val_loss: held-out loss at this step, where it was measured.

    Raises:
        FileExistsError: the step has a checkpoint already; none is ever overwritten.
        CheckpointError: the disk gave back something else than was written.
    """
    target = directory / step_name(step)
    if target.exists():
        raise FileExistsError(f"checkpoint '{target}' exists already")
    # Not those above it: a run that was deleted does not come back as half of one.
    make_directory(directory)
    with tempfile.TemporaryDirectory(prefix=WRITING, dir=directory) as temporary:
        unfinished = Path(temporary) / target.name
        unfinished.mkdir()
        files = {name: _save_file(unfinished / name, state) for name, state in states.items()}
        manifest = unfinished / MANIFEST
        text = Checkpoint(unfinished, step, time.time(), val_loss, files).to_manifest()
        replace(manifest, text.encode(), durable=True)
        flush(unfinished)
        verify_checkpoint(unfinished)
        os.rename(unfinished, target)
    flush(directory)  # the rename itself
    return read_checkpoint(target)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read the states of a checkpoint, by file, onto the CPU.

    Only tensors and plain values are unpickled, so a checkpoint from elsewhere runs no code.

    Raises:
        CheckpointError: the checkpoint is incomplete, its content has changed since it was written, or it holds
            something other than tensors and plain values.
    """
    states = {}
    for name in verify_checkpoint(path).files:
        try:
            with open_regular(path / name) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's, of a pickle that is refused below
                states[name] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a foreign file makes the unpickler stumble over
            # torch's own advice, to load it without the restriction, is exactly what not to do.
            reason = type(error).__name__
            raise CheckpointError(
                f"checkpoint '{path}' cannot be used: {name} must hold tensors and plain values only, "
                f"and reading it ended in {reason}; take another checkpoint"
            ) from None
    return states


class CheckpointWriter:
    """Saves checkpoints in a background thread, and prunes old ones once the new one is safe.

    As a context manager it waits for the last checkpoint at the end; a ``KeyboardInterrupt`` does not wait.

    Args:
        directory: where checkpoints are kept; leftovers of killed writers are deleted from it.
        keep_last: newest checkpoints to keep.
        keep_best: keep the one with the lowest validation loss, too.
    """

    def __init__(self, directory: Path, keep_last: int, keep_best: bool) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        delete_leftovers(directory)

    def save(self, step: int, states: States, val_loss: float | None) -> None:
        """Copy ``states`` and start writing them; first waits for the checkpoint before, so only one copy is held.

        Raises:
            CheckpointError: the checkpoint before could not be written.
        """
        self.wait()
        copies = {name: _copy(state) for name, state in states.items()}
        # A daemon: a second Ctrl-C leaves at once, and what that cuts off is a leftover.
        self._thread = threading.Thread(target=self._write, args=(step, copies, val_loss), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything is written; a CheckpointError where it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise a CheckpointError if the last checkpoint could not be written, without waiting for it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif not isinstance(error, KeyboardInterrupt):
            try:
                self.wait()
            except CheckpointError as second:  # the first error is the one to report
                print(f"warning: {second}", file=sys.stderr)

    def _write(self, step: int, states: States, val_loss: float | None) -> None:
        try:
            save_checkpoint(self.directory, step, states, val_loss)
            for old in superfluous(readable_checkpoints(self.directory), self.keep_last, self.keep_best):
                delete_checkpoint(old)
        except OSError as error:
            self._error = CheckpointError(
                f"the checkpoint of step {step} could not be written to '{self.directory}': "
                f"{error.strerror or error}; earlier ones are whole: make room there and go on with --resume"
            )
        except Exception as error:
            self._error = error


class _HashingFile:
    """A file that knows the size and the digest of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _save_file(path: Path, state: Any) -> FileEntry:
    with create(path) as file:
        hashing = _HashingFile(file)
        try:
            torch.save(state, hashing)  # pyrefly: ignore[bad-argument-type]  # it writes and flushes, nothing else
        except RuntimeError:
            # On a full disk torch goes on to write the end of its archive and complains of the position there.
            if hashing.error is not None:
                raise hashing.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(hashing.bytes, hashing.digest.hexdigest())


def _copy(value: Any) -> Any:
    """A copy of nested dicts and lists whose tensors lie on the CPU and belong to nobody else."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(entry) for entry in value)
    return value

"""Checkpoints as files: which there are, whether they are whole, which may go. Imports no torch.

A checkpoint is a directory ``step-00000100`` in ``<run>/checkpoints`` that holds ``state.pt`` (what all ranks share),
``rank-00000.pt`` and so on (what each rank has of its own) and ``manifest.json`` with the size and the SHA-256 of each.

Nothing here trusts what it reads: only files with these very names are opened, none through a symbolic link, and a
manifest that says anything else is refused. Directories change by renaming alone, so a process killed at any moment
leaves whole checkpoints and, beside them, leftovers whose names begin with a dot.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from nsa_compile.errors import CheckpointError, shortened
from nsa_compile.files import flush, open_regular

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"
# Key of the manifest with the SHA-256 of all its other values.
SEAL = "manifest_sha256"
WRITING, DELETING = ".writing-", ".deleting-"

# A manifest has a line for each rank; more than this is not one.
_MAX_MANIFEST_BYTES = 1 << 20
# Beyond these nothing was counted, timed or measured: float32 ends at 3.4e38.
_MAX_COUNT, _MAX_TIME, _MAX_LOSS = 1 << 60, 1e11, 1e39
_STEP_NAME = re.compile(r"step-(\d{8,18})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it.

    Attributes:
        created: when it was written, in seconds since the epoch.
        val_loss: held-out loss after ``step`` steps, in nats per token; ``None`` where that was not measured.
        files: size and digest of each file, by name.
        sealed: whether the manifest has a digest of itself. Those of earlier versions have none: the files are checked
            all the same, ``val_loss`` cannot be.
    """

    path: Path
    step: int
    created: float
    val_loss: float | None
    files: Mapping[str, FileEntry]
    sealed: bool = True

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    def to_manifest(self) -> str:
        """The text of ``manifest.json``."""
        files = {name: asdict(entry) for name, entry in self.files.items()}
        values = {
            "format": FORMAT,
            "step": self.step,
            "created": self.created,
            "val_loss": self.val_loss,
            "files": files,
        }
        return json.dumps({**values, SEAL: _digest(values)}, indent=2) + "\n"

    @property
    def note(self) -> str | None:
        """A remark on a checkpoint that is used as it is, or ``None``."""
        if self.sealed:
            return None
        return (
            f"{MANIFEST} has no digest of itself, as in earlier versions: the files are checked by it, and its "
            "val_loss, which nothing checks, makes no other checkpoint superfluous"
        )


def step_name(step: int) -> str:
    """Name of the directory of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Name of the file of a rank's own state."""
    return f"rank-{rank:05d}.pt"


def checkpoint_paths(directory: Path) -> list[Path]:
    """The checkpoints in ``directory`` by step, whole or not; leftovers of killed writers are none."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = {name: int(match[1]) for name in names if (match := _STEP_NAME.fullmatch(name))}
    return [directory / name for name in sorted(steps, key=steps.__getitem__) if name == step_name(steps[name])]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of a checkpoint, without looking at the files it names.

    Raises:
        CheckpointError: there is no manifest, or it is not what one must be.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link")
        with open_regular(path / MANIFEST) as file:
            text = file.read(_MAX_MANIFEST_BYTES + 1)
        if len(text) > _MAX_MANIFEST_BYTES:
            raise ValueError(f"{MANIFEST} is larger than {_MAX_MANIFEST_BYTES} bytes")
        return _parse_manifest(path, json.loads(text))
    except (OSError, ValueError, RecursionError) as error:  # broken JSON and UTF-8 are ValueErrors
        raise CheckpointError(f"'{path}' is not a complete checkpoint: {_reason(error)}") from None


def file_problems(checkpoint: Checkpoint) -> list[str]:
    """Read every file of a checkpoint: one line for each that is missing or not what the manifest says."""
    problems = []
    for name, entry in checkpoint.files.items():
        try:
            with open_regular(checkpoint.path / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.bytes:
                    problems.append(f"{name} has {size} bytes where {MANIFEST} says {entry.bytes}")
                elif hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    problems.append(f"the SHA-256 of {name} is not the one in {MANIFEST}")
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {_reason(error)}")
    return problems


def verify_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint whole and compare it with its manifest.

    Raises:
        CheckpointError: it is incomplete or its content has changed since it was written.
    """
    checkpoint = read_checkpoint(path)
    if problems := file_problems(checkpoint):
        raise CheckpointError(f"checkpoint '{path}' is damaged: {problems[0]}")
    return checkpoint


def best_checkpoint(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest validation loss, the earliest of equals; ``None`` where none was measured."""
    measured = [(c.val_loss, c.step, c) for c in checkpoints if c.val_loss is not None]
    return min(measured, key=lambda entry: entry[:2])[2] if measured else None


def superfluous(checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: bool) -> list[Checkpoint]:
    """Those that are neither among the ``keep_last`` newest nor, with ``keep_best``, the best."""
    by_step = sorted(checkpoints, key=lambda c: c.step)
    kept = by_step[-keep_last:]
    if keep_best:
        # A loss that cannot be checked makes none superfluous whose loss was.
        for sealed in (True, False):
            kept += [c for c in [best_checkpoint([c for c in by_step if c.sealed is sealed])] if c is not None]
    return [c for c in by_step if c not in kept]


def readable_checkpoints(directory: Path) -> list[Checkpoint]:
    """The checkpoints by step whose manifest can be read."""
    readable = []
    for path in checkpoint_paths(directory):
        try:
            readable.append(read_checkpoint(path))
        except CheckpointError:
            continue
    return readable


def delete_checkpoint(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint; a process killed on the way leaves a leftover, not half a checkpoint."""
    directory = checkpoint.path.parent
    leftover = Path(tempfile.mkdtemp(prefix=DELETING, dir=directory))
    os.rename(checkpoint.path, leftover / checkpoint.path.name)
    flush(directory)
    shutil.rmtree(leftover)


def delete_leftovers(directory: Path) -> None:
    """Delete what killed writers left; only for the one process that may write to ``directory``."""
    for prefix in (WRITING, DELETING):
        for leftover in directory.glob(f"{prefix}*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)


def set_aside(directory: Path, step: int) -> Path | None:
    """Move the checkpoints after ``step`` into a directory of their own, for their steps will be written again.

    Returns:
        That directory; ``None`` if there was nothing to move.

    Raises:
        CheckpointError: they cannot be moved.
    """
    later = [path for path in checkpoint_paths(directory) if int(path.name.removeprefix("step-")) > step]
    if not later:
        return None
    count = 1
    while os.path.lexists(target := directory / f"set-aside-{count}"):
        count += 1
    try:
        target.mkdir()
        for path in later:
            os.rename(path, target / path.name)
        flush(directory)
    except OSError as error:
        raise CheckpointError(
            f"checkpoints after step {step} cannot be moved to '{target}': {error.strerror}; put that right"
        ) from None
    return target


def _parse_manifest(path: Path, values: Any) -> Checkpoint:
    """A checkpoint from the decoded manifest; ``ValueError`` names what is wrong with it.

    Raises:
        CheckpointError: nothing is missing, but it was changed.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{MANIFEST} must hold an object")
    if values.get("format") != FORMAT:
        raise ValueError(f"format = {_short(values.get('format'))} in {MANIFEST} must be {FORMAT}")
    step, created, val_loss = values.get("step"), values.get("created"), values.get("val_loss")
    if type(step) is not int or path.name != step_name(step):
        raise ValueError(f"step = {_short(step)} in {MANIFEST} must be the one in the name of its directory")
    if not _is_number(created, _MAX_TIME) or created < 0:
        raise ValueError(f"created = {_short(created)} in {MANIFEST} must be a number")
    if val_loss is not None and not _is_number(val_loss, _MAX_LOSS):
        raise ValueError(f"val_loss = {_short(val_loss)} in {MANIFEST} must be a number or null")
    files = values.get("files")
    if not isinstance(files, dict):
        raise ValueError(f"files in {MANIFEST} must be an object")
    # Names are compared, never joined to a path before: that rules out `..`, absolute paths and everything like them.
    expected = {STATE, *(rank_file(rank) for rank in range(len(files) - 1))}
    if len(files) < 2 or set(files) != expected:
        raise ValueError(f"files in {MANIFEST} must be {STATE}, {rank_file(0)} and so on, not {_short(sorted(files))}")
    entries = {name: _parse_entry(name, entry) for name, entry in files.items()}
    if SEAL in values and values[SEAL] != _digest({name: value for name, value in values.items() if name != SEAL}):
        raise CheckpointError(
            f"checkpoint '{path}' is damaged: {MANIFEST} has changed since it was written: its SHA-256 is not the one "
            "in it"
        )
    return Checkpoint(path, step, float(created), val_loss, entries, sealed=SEAL in values)


def _parse_entry(name: str, entry: Any) -> FileEntry:
    if isinstance(entry, dict):
        size, digest = entry.get("bytes"), entry.get("sha256")
        if type(size) is int and 0 <= size <= _MAX_COUNT and isinstance(digest, str) and _SHA256.fullmatch(digest):
            return FileEntry(size, digest)
    raise ValueError(f"the entry of {name} in {MANIFEST} must have bytes and sha256, not {_short(entry)}")


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a manifest, however they are laid out in the file."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_number(value: Any, limit: float) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) <= limit  # nor is NaN


def _short(value: Any) -> str:
    return shortened(ascii(value), 80)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error) or type(error).__name__

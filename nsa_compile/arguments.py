"""The inputs and outputs that a command was given, checked before torch is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError
from nsa_compile.files import why_unwritable


def check_file(path: Path) -> None:
    """Raise a UserError unless a file can be put at `path`, given with --out."""
    if path.is_dir():
        raise _cannot_write(path, "it is a directory", "FILE")
    _check_parent(path, "FILE")
    # Also where there is a file already: it is replaced, not written over.
    _check_writable(path, path.parent, "FILE")


def check_directory(path: Path, *, parents: bool = False) -> None:
    """Raise a UserError unless `path`, given with --out, is a directory to write to or can become one.

    Args:
        parents: those above it that are missing are made, too.
    """
    if path.exists() and not path.is_dir():
        raise _cannot_write(path, "it is no directory", "DIR")
    if not parents:
        _check_parent(path, "DIR")
    _check_writable(path, path, "DIR")


def check_new_directory(path: Path) -> None:
    """Raise a UserError unless a directory can be put at `path`, given with --out: there is none, or an empty one."""
    check_directory(path)
    if path.exists() and next(path.iterdir(), None) is not None:
        raise _cannot_write(path, "it is not empty", "DIR")
    _check_writable(path, path.absolute().parent, "DIR")


@contextlib.contextmanager
def writing(path: Path, kind: str) -> Iterator[None]:
    """Say as a UserError what cannot be written in this context: to the `kind`, FILE or DIR, that --out named."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error), kind) from None


def _check_parent(path: Path, kind: str) -> None:
    if not path.parent.is_dir():
        raise _cannot_write(path, f"'{path.parent}' is not a directory", kind)


def _check_writable(path: Path, directory: Path, kind: str) -> None:
    if reason := why_unwritable(directory):
        raise _cannot_write(path, reason, kind)


def _cannot_write(path: Path, reason: str, kind: str) -> UserError:
    return UserError(f"nothing can be written to '{path}': {reason}; choose another place with --out {kind}")


def check_seq_len(config: RunConfig, seq_len: int) -> None:
    """Raise a UserError unless the model's attention has something to do in a sequence of this length."""
    least, rule = config.model.variant.min_seq_len(config.model)
    if seq_len < least:
        raise UserError(f"--seq-len {seq_len} must be at least {rule}; give a larger one")

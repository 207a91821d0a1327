"""The inputs and outputs that a command was given, checked before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError


def check_file(path: Path) -> None:
    """Raise a UserError unless a file can be put at `path`, given with --out."""
    if path.is_dir():
        raise _cannot_write(path, "it is a directory", "FILE")
    _check_parent(path, "FILE")


def check_directory(path: Path) -> None:
    """Raise a UserError unless `path`, given with --out, is a directory to write to or can become one."""
    if not path.exists():
        _check_parent(path, "DIR")
    elif not path.is_dir():
        raise _cannot_write(path, "it is no directory", "DIR")
    elif not os.access(path, os.W_OK | os.X_OK):
        raise _cannot_write(path, "writing there is not allowed", "DIR")


def check_new_directory(path: Path) -> None:
    """Raise a UserError unless a directory can be put at `path`, given with --out: there is none, or an empty one."""
    if path.exists():
        check_directory(path)
        if next(path.iterdir(), None) is not None:
            raise _cannot_write(path, "it is not empty", "DIR")
    _check_parent(path.absolute(), "DIR")


def _check_parent(path: Path, kind: str) -> None:
    if not path.parent.is_dir():
        raise _cannot_write(path, f"'{path.parent}' is not a directory", kind)
    # Also where there is a file already: it is replaced, not written over.
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _cannot_write(path, f"'{path.parent}' cannot be written to", kind)


def _cannot_write(path: Path, reason: str, kind: str) -> UserError:
    return UserError(f"nothing can be written to '{path}': {reason}; choose another place with --out {kind}")


def check_seq_len(config: RunConfig, seq_len: int) -> None:
    """Raise a UserError unless the model's attention has something to do in a sequence of this length."""
    least, rule = config.model.variant.min_seq_len(config.model)
    if seq_len < least:
        raise UserError(f"--seq-len {seq_len} must be at least {rule}; give a larger one")

"""Checkpoints that are either whole or absent.

A checkpoint is a directory ``step-00000100`` with ``state.pt`` and ``manifest.json``. It is written under another name,
flushed to the disk and renamed, so a crash leaves no half of one. The manifest holds the SHA-256 of the state: formats
of torch load a flipped bit without a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

STATE, MANIFEST = "state.pt", "manifest.json"


def save_checkpoint(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``state`` as the checkpoint of ``step`` and return its path.

    Args:
        directory: where checkpoints are kept; created when absent.
        step: optimizer steps done.
        state: tensors and plain Python values, nested in dicts and lists.

    Raises:
        FileExistsError: the step has a checkpoint already; none is ever overwritten.
    """
    target = directory / f"step-{step:08d}"
    if target.exists():
        raise FileExistsError(f"checkpoint '{target}' exists already")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as temporary:
        unfinished = Path(temporary) / target.name
        unfinished.mkdir()
        torch.save(state, unfinished / STATE)
        manifest = {"step": step, "sha256": _sha256(unfinished / STATE)}
        (unfinished / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        for path in (unfinished / STATE, unfinished / MANIFEST, unfinished):
            _flush(path)
        os.rename(unfinished, target)
    _flush(directory)  # the rename itself
    return target


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read the state of a checkpoint, onto the CPU.

    Only tensors and plain values are unpickled, so a checkpoint from elsewhere runs no code.

    Raises:
        ValueError: the checkpoint is incomplete or its content has changed since it was written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        digest = _sha256(path / STATE)
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"'{path}' is not a complete checkpoint: {error}") from None
    if digest != manifest.get("sha256"):
        raise ValueError(f"checkpoint '{path}' is damaged: the SHA-256 of {STATE} is not the one in {MANIFEST}")
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

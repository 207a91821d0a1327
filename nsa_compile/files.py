"""Files that are whole whenever somebody looks, that survive a power cut, or that anybody may have written."""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any


def flush(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file whose readers see the old content or the new one, never half of either.

    Args:
        path: the file; its directory exists.
        content: of the file.
        durable: also after a power cut.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        if durable:
            flush(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write plain data, readable, as `replace` writes."""
    replace(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading, unless it is anything but a plain file: a link may lead out, a pipe may block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return os.fdopen(descriptor, "rb")

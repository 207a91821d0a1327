"""Files that are whole whenever somebody looks, that survive a power cut, or that anybody may have written."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

_SEAL = hashlib.sha256().digest_size  # bytes at the end of a sealed file


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


def trusted_owners() -> set[int]:
    """Users whose files this process may believe: its own and root."""
    return {0, os.geteuid(), *_owners_outside()}


@cache
def _owners_outside() -> tuple[int, ...]:
    """In a user namespace, such as a sandbox, files of root outside it belong to a user that it does not have."""
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
        outside = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:  # not Linux
        return ()
    mapped = any(int(first) <= outside < int(first) + int(count) for first, _, count in ranges)
    return () if mapped else (outside,)


def make_private(directory: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone."""
    for path in (*reversed(directory.parents), directory):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file for `read_sealed`, as `replace` writes; its directory is made for this user alone."""
    make_private(path.parent)
    # Nobody else, on whatever machine, writes to the same name.
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def read_sealed(path: Path) -> bytes:
    """The content of a file of `write_sealed`, as it was written.

    Raises:
        FileNotFoundError: there is none.
        OSError, ValueError: it cannot be read; it is another kind of file, somebody else's, or not as it was written.
    """
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in trusted_owners():
            raise ValueError(f"it belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("others can write to it")
        sealed = file.read()
    content, digest = sealed[:-_SEAL], sealed[-_SEAL:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("it is not as it was written: its SHA-256 is another")
    return content

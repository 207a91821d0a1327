"""Files that are never half-written, that survive a power cut, or that another user may have written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SEAL = hashlib.sha256().digest_size  # bytes at the end of a sealed file


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest parent that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def why_unwritable(directory: Path) -> str | None:
    """Why no file can be made in a directory, or the directory itself not; in words, and None where it can.

    A file is made, without a name where the system has such: permissions say nothing of /proc or of a full disk.
    """
    ways = (directory.absolute(), *directory.absolute().parents)
    for path in ways:
        if path.is_symlink() and not path.exists():
            return f"'{path}' is a link to '{os.readlink(path)}', which does not exist"
    existing = nearest_existing(directory)
    if not existing.is_dir():
        return f"'{existing}' is not a directory"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"'{existing}' cannot be written to: {error.strerror}"
    return None


class NotPlainFile(OSError, ValueError):
    """A path is not what it must be: a plain file, or a directory, without a second name.

    A link may lead out of a directory, a pipe or a device may block for ever: neither is read or written through.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


def flush(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file, in a directory that exists, whose readers see the old content or the new, never half of either.

    A link itself is replaced. What is `durable` outlives a power cut, too. An OSError names the file.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    file = create(unfinished)
    try:
        with naming(path), file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of this context name a file: that of an open file which cannot be written names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, as `replace` writes."""
    replace(path, text.encode())


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write plain data, readable, as `replace` writes."""
    replace(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def create(path: Path) -> BufferedWriter:
    """Open a new file for writing; a plain file of this name, which a killed process has left, makes way.

    Raises:
        NotPlainFile: something else has this name.
        OSError: the file cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags, 0o666), "wb")
    except FileExistsError:
        raise NotPlainFile(path, _kind(path)) from None


def open_to_append(path: Path) -> int:
    """Open a plain file for reading and appending, made if it is not there, and return its descriptor.

    Raises:
        NotPlainFile: something else has this name, or the file has others, too: what is one file in two directories
            would be changed in both.
        OSError: the file cannot be opened or made.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise _explained(error, path) from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise NotPlainFile(path, _kind(path))


def make_directory(path: Path) -> None:
    """Make a directory in one that exists, unless it is there already.

    Raises:
        NotPlainFile: something else has this name, a link to a directory among others.
        OSError: it cannot be made.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotPlainFile(path, _kind(path)) from None


def open_regular(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a file for reading, unless it is anything but a plain file: a pipe may block for ever.

    Args:
        path: the file.
        follow: go through a link, for what the user names. In a directory that anybody may have written it leads out.

    Raises:
        NotPlainFile: it is something else.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise _explained(error, path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainFile(path, "it is not a regular file")
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


def what_became_of(path: Path, descriptor: int) -> str | None:
    """What has become of an open file or directory, such as "was deleted", if its path leads to it no longer.

    ``None`` while it does.
    """
    held = os.fstat(descriptor)
    try:
        if os.path.samestat(held, os.stat(path)):
            return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None  # nobody knows; a network has such moments
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # no Linux
        return "was deleted or moved"
    if held.st_nlink == 0 or place.endswith(" (deleted)"):
        return "was deleted"
    return f"was moved to '{place}'"


def refuse_links(directory: Path, *, and_pipes: bool = False) -> None:
    """Check every name in a directory that another user may have written, before it is read or written to.

    Args:
        directory: not those below it.
        and_pipes: refuse whatever is neither a plain file nor a directory; for where somebody else opens the files.

    Raises:
        NotPlainFile: one is a link.
        OSError: the directory cannot be read.
    """
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            if entry.is_symlink() or (and_pipes and not plain):
                raise NotPlainFile(Path(entry.path), _kind(Path(entry.path)))


def _explained(error: OSError, path: Path) -> OSError:
    """The error of an attempt to open `path`, with a reason that says what is there."""
    if error.errno in (errno.ELOOP, errno.ENXIO) and os.path.lexists(path):
        return NotPlainFile(path, _kind(path))
    return error


def _kind(path: Path) -> str:
    """What is wrong with what has this name."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link, which is not followed"
    if stat.S_ISREG(found.st_mode):
        return "it is the same file as another, by a hard link"
    if stat.S_ISDIR(found.st_mode):
        return os.strerror(errno.EISDIR)
    return "it is not a regular file"

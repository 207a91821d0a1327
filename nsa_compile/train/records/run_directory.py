"""The directory of a run: made, and locked while somebody works on it. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError


def check_output(directory: str) -> None:
    """Make sure that a directory, or the nearest parent that exists, can be written to.

    Raises:
        UserError: it cannot.
    """
    path = Path(directory).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise UserError(_unwritable(directory, f"'{existing}' is not a directory"))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(_unwritable(directory, f"'{existing}' cannot be written to"))


def create_run_directory(config: RunConfig) -> Path:
    """Create and return ``<run.dir>/<run.name>-<time>``, never one that exists.

    Raises:
        UserError: it cannot be created.
    """
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


@contextlib.contextmanager
def lock_run_directory(directory: Path) -> Iterator[None]:
    """Be the only process that changes a run; the lock dies with the process, however that ends.

    Raises:
        UserError: another process works on the run.
    """
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

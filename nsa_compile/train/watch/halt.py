"""The file ``.HALT`` in a run's directory: it asks the training to save after the present step and to leave."""

from __future__ import annotations

import os
from pathlib import Path

from nsa_compile.errors import UserError
from nsa_compile.files import open_regular, replace

HALT = ".HALT"
HALT_EXIT_CODE = 4
_MAX_REASON_BYTES = 500


def request_halt(run_directory: Path, reason: str) -> None:
    """Ask the training to stop; ``reason`` is one line. The file appears whole or not at all."""
    replace(run_directory / HALT, f"{reason}\n".encode())


def halt_reason(run_directory: Path) -> str | None:
    """The first line of the file, fit for printing; ``None`` if there is no file. Cheap enough for every step.

    An empty file, as ``touch`` makes it, halts as well.
    """
    path = run_directory / HALT
    if not os.path.lexists(path):
        return None
    try:
        with open_regular(path) as file:
            lines = file.read(_MAX_REASON_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        lines = []
    reason = "".join(c for c in lines[0] if c.isprintable()).strip() if lines else ""
    return reason or f"there is a file {HALT}"


def clear_halt(run_directory: Path) -> None:
    """Remove the file of an earlier attempt, or raise a UserError; one process does so before any starts anew."""
    path = run_directory / HALT
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"'{path}' asks the run to halt and cannot be removed: {error.strerror}; remove it") from None

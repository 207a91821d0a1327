"""Processes of this machine, told apart from others that got the same number later."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; ``None`` if it is gone or a zombie."""
    found = _stat(pid)
    return None if found is None or found[0] in ("Z", "X") else found[1]


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP, Ctrl-Z or a debugger."""
    found = _stat(pid)
    return found is not None and found[0] in ("T", "t")


def send_signal(pid: int, started: int, signum: int, *, holds: Path) -> bool:
    """Send a signal to a process, if it is the one that is meant; SIGUSR1 only to one that handles it.

    Args:
        started: its ``start_ticks``.
        holds: a file it must have open, because the two numbers come from a file that anybody may have written.

    Returns:
        Whether the signal was sent.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # What the descriptor refers to cannot be exchanged between these looks and the signal.
        if start_ticks(pid) != started or not _has_open(pid, holds):
            return False
        if signum == signal.SIGUSR1 and not handles(pid, signum):
            return False  # its default is to end the process
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, even parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _has_open(pid: int, path: Path) -> bool:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if entry.samefile(path):
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal; one that ignores it, or is about to be ended by it, has none.

    Raises:
        OSError: the process is gone.
    """
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False

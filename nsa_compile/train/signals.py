"""Signals that ask a run to stop after the current step."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 75}


@dataclass
class StopRequest:
    """What signals have asked for.

    Attributes:
        signal: name of the first that came, a key of ``EXIT_CODES``; ``None`` before.
        leaving: every process is leaving. The first to be gone makes whoever started them end the others by SIGTERM,
            who may have something to say yet: from now on it is ignored.
    """

    signal: str | None = None
    leaving: bool = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the current step.

    A Ctrl-C after that stops at once. Another SIGTERM does not: its sender has SIGKILL for impatience.
    """
    stop = StopRequest()

    def request(signum: int, frame: Any) -> None:
        if stop.leaving and signum == signal.SIGTERM:
            return
        if stop.signal is None:
            stop.signal = signal.Signals(signum).name
            print("stopping after this step; Ctrl-C (again) to stop at once", file=sys.stderr)
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    previous = {name: signal.signal(getattr(signal, name), request) for name in EXIT_CODES}
    try:
        yield stop
    finally:
        if stop.leaving:
            previous["SIGTERM"] = signal.SIG_IGN
        for name, handler in previous.items():
            signal.signal(getattr(signal, name), handler)

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
    """Name of the first signal that came, a key of ``EXIT_CODES``; ``None`` before."""

    signal: str | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the current step.

    A Ctrl-C after that stops at once. Another SIGTERM does not: its sender has SIGKILL for impatience.
    """
    stop = StopRequest()

    def request(signum: int, frame: Any) -> None:
        if stop.signal is None:
            stop.signal = signal.Signals(signum).name
            print("stopping after this step; Ctrl-C (again) to stop at once", file=sys.stderr)
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    previous = {name: signal.signal(getattr(signal, name), request) for name in EXIT_CODES}
    try:
        yield stop
    finally:
        for name, handler in previous.items():
            signal.signal(getattr(signal, name), handler)

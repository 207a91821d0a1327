"""Signals that ask a run to stop: at once while it has nothing to lose, and then after the current step."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# A terminal that is closed asks as a scheduler does: save, and go on another time.
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 75, "SIGHUP": 75}
_STDERR = 2


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


class _LeaveAtOnce:
    """A handler of signals that come before the first step."""

    def __init__(self) -> None:
        self.came: str | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(signum).name
        _say("stopped before the first step: there is nothing to save")
        raise SystemExit(EXIT_CODES[self.came])


@contextmanager
def leave_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process with their exit code, and SIGUSR1 write its stacks to stderr.

    For the time before a run has something to save and a file for its stacks; Ctrl-C raises KeyboardInterrupt anyway.
    """
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    with handled(_LeaveAtOnce(), ("SIGTERM", "SIGHUP")):
        yield


@contextmanager
def stop_on_signals(one_of_several: bool = False) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop after the current step.

    A Ctrl-C after that stops at once. Another SIGTERM does not: its sender has SIGKILL for impatience.

    Args:
        one_of_several: an error of this process is felt by the others, and the first to be gone makes whoever started
            them end this one by SIGTERM: it leaves by its error all the same.
    """
    stop = StopRequest()

    def request(signum: int, frame: FrameType | None) -> None:
        if stop.leaving and signum != signal.SIGINT:
            return
        if stop.signal is None:
            stop.signal = signal.Signals(signum).name
            line_end = "\n" if os.isatty(_STDERR) else ""  # of the progress bar
            _say(f"{line_end}stopping after this step; Ctrl-C (again) to stop at once")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    with handled(request, EXIT_CODES) as previous:
        before = previous.get("SIGTERM")
        if isinstance(before, _LeaveAtOnce):
            stop.signal = before.came  # its exception was lost where exceptions are: in a finalizer, for example
        try:
            yield stop
        except Exception:
            stop.leaving |= one_of_several
            raise
        finally:
            if stop.leaving:
                previous.update(dict.fromkeys(previous.keys() - {"SIGINT"}, signal.SIG_IGN))


def _say(line: str) -> None:
    """Write a line to stderr from a handler, which may have interrupted a write of Python's own: that allows no second.

    What nobody can read any longer is not said.
    """
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{line}\n".encode())


_Handler = Callable[[int, FrameType | None], object] | int | None


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object], names: Iterable[str]) -> Iterator[dict[str, _Handler]]:
    """Handle signals within the block; it is given the handlers before, which are put back at its end.

    A SIGHUP that is ignored stays so: whoever started the process with ``nohup`` wants it to outlive the terminal. What
    the block leaves ignored stays ignored, too: the process is leaving (`StopRequest`).
    """
    previous: dict[str, _Handler] = {}
    for name in names:
        if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            previous[name] = signal.signal(getattr(signal, name), handler)
    try:
        yield previous
    finally:
        for name, before in previous.items():
            if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
                signal.signal(getattr(signal, name), before)

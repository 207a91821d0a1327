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

import psutil

# A terminal that is closed asks as a scheduler does: save, and go on another time.
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 75, "SIGHUP": 75}
_STDERR = 2


@dataclass
class StopRequest:
    """What signals have asked for.

    Attributes:
        signal: name of the first that came, a key of ``EXIT_CODES``; ``None`` before.
        stepped: a step is done, in every process, so that there is something to save.
        leaving: every process is leaving. The first to be gone makes whoever started them end the others by SIGTERM,
            who may have something to say yet: from now on it is ignored.
    """

    signal: str | None = None
    stepped: bool = False
    leaving: bool = False


class _LeaveAtOnce:
    """A handler of signals that come before the first step; `quiet` is one of a process for which another speaks."""

    def __init__(self, quiet: bool) -> None:
        self.came: str | None = None
        self._quiet = quiet

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._note(signum)
        raise SystemExit(EXIT_CODES[signal.Signals(signum).name])

    def within_torch(self, signum: int, last_words: Callable[[], None]) -> None:
        """Leave where torch compiles or computes: its C++ does not expect an exception just anywhere."""
        try:
            self._note(signum)
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.terminate()  # a C++ compiler deletes what it has half written
            last_words()
        finally:
            os._exit(EXIT_CODES[signal.Signals(signum).name])

    def _note(self, signum: int) -> None:
        self.came = signal.Signals(signum).name
        if not self._quiet:
            say_nothing_to_save()


@contextmanager
def leave_on_signals(quiet: bool = False) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process with their exit code, and SIGUSR1 write its stacks to stderr.

    For the time before a run has something to save and a file for its stacks; Ctrl-C raises KeyboardInterrupt anyway.
    `quiet` is for a process for which another says that there is nothing to save.
    """
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
    with handled(_LeaveAtOnce(quiet), ("SIGTERM", "SIGHUP")):
        yield


@contextmanager
def stop_on_signals(
    rank: int = 0, world_size: int = 1, last_words: Callable[[], None] = lambda: None
) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C, SIGTERM or SIGHUP into a request to stop after the current step, which rank 0 says.

    A Ctrl-C after that stops at once. Another SIGTERM does not: its sender has SIGKILL for impatience. Until
    `StopRequest.stepped`, each ends the process within :func:`leave_on_signals`; another process is not ours to end.

    Args:
        world_size: of several processes, an error of one is felt by the others, and the first to be gone makes whoever
            started them end this one by SIGTERM: it leaves by its error all the same.
        last_words: called before the process is ended, perhaps in the middle of anything: it must wait for no lock that
            this thread may hold.
    """
    stop = StopRequest()

    def request(signum: int, frame: FrameType | None) -> None:
        if stop.leaving and signum != signal.SIGINT:
            return
        if isinstance(before, _LeaveAtOnce) and not stop.stepped:
            before.within_torch(signum, last_words)
        if stop.signal is None:
            stop.signal = signal.Signals(signum).name
            if rank == 0:
                _say("stopping after this step; Ctrl-C (again) to stop at once")
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt

    before: _Handler = signal.getsignal(signal.SIGTERM)
    with handled(request, EXIT_CODES) as previous:
        if isinstance(before, _LeaveAtOnce) and before.came is not None:
            # Its exception was lost where exceptions are: in a finalizer, for example.
            raise SystemExit(EXIT_CODES[before.came])
        try:
            yield stop
        except Exception:
            stop.leaving |= world_size > 1
            raise
        finally:
            if stop.leaving:
                previous.update(dict.fromkeys(previous.keys() - {"SIGINT"}, signal.SIG_IGN))


def say_nothing_to_save() -> None:
    """Say why a run that is asked to stop leaves at once."""
    _say("stopped before the first step: there is nothing to save")


def _say(line: str) -> None:
    """Write a line to stderr from a handler, which may have interrupted a write of Python's own: that allows no second.

    What nobody can read any longer is not said.
    """
    line_end = "\n" if os.isatty(_STDERR) else ""  # of the progress bar
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{line_end}{line}\n".encode())


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

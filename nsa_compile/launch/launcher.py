"""``nsa-compile train --nproc N``: processes on this machine, started by torchrun's own agent and started again.

Each attempt has an agent and a rendezvous of its own, and goes on from the newest checkpoint: an agent that restarts
its workers itself lets them meet in the store of the attempt before, where they may find its remains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from nsa_compile.config import RunConfig
from nsa_compile.launch.worker import LOST_CONTACT
from nsa_compile.machine import cores
from nsa_compile.train.records.jsonl import JsonlReader
from nsa_compile.train.signals import EXIT_CODES, StopRequest, handled, say_nothing_to_save
from nsa_compile.train.watch.halt import HALT_EXIT_CODE as STALLED
from nsa_compile.train.watch.processes import handles
from nsa_compile.train.watch.run_state import HeartbeatFiles, present_attempt
from nsa_compile.train.watch.watchdog import WATCHDOG_FILE, Actions, run_watchdog

# An exception that nobody expected.
FAILED = 1
# A process that ends with one of these has said why, and would end so again.
FINAL_CODES = frozenset({2, 3, 4, 5})
# The agent ends the processes that are left by SIGTERM when the first is gone: that is not why the run ended.
STOPPED = frozenset(EXIT_CODES.values())


def launch(config: RunConfig, directory: Path, nproc: int, arguments: Sequence[str]) -> int:
    """Train on `nproc` processes of this machine and return the exit code.

    The run in `directory` is open already. `arguments` are options that lead each process to the same configuration.
    """
    command = ("-m", "nsa_compile.launch.worker", *arguments)
    command += ("--run-dir", str(directory), "--launcher", str(os.getpid()))

    restarts = config.ddp.max_restarts
    with _forwarded_signals(config.ddp.grace_s) as stop, watched(config, directory):
        # A signal that comes while this is imported, which takes seconds, finds no process to be handed on to.
        import torch.distributed.launcher.api  # noqa: F401

        for attempt in range(restarts + 1):
            begin = time.time()
            if stop.signal is not None:
                return _stopped(directory, begin, EXIT_CODES[stop.signal])
            codes = run_processes(config, nproc, command)
            if not codes:
                return 0
            said = [code for code in codes.values() if code in FINAL_CODES]
            if said:
                return said[0]
            if stop.signal is not None:
                return _stopped(directory, begin, EXIT_CODES[stop.signal])
            if asked := [code for code in codes.values() if code in STOPPED]:
                # Somebody's signal to one process stops all of them, or makes the others lose contact with it.
                if STOPPED.union({LOST_CONTACT}).issuperset(codes.values()):
                    return _stopped(directory, begin, asked[0])
                codes = {rank: code for rank, code in codes.items() if code not in STOPPED}
            died = ", ".join(f"rank {rank} {_ending(code)}" for rank, code in sorted(codes.items()))
            if FAILED in codes.values() and not _has_stepped(directory, begin):
                print(
                    f"error: {died} before the first step; it is not started again, for it would fail again",
                    file=sys.stderr,
                )
                return FAILED
            if attempt < restarts:
                print(f"{died}; starting again (restart {attempt + 1} of {restarts})", file=sys.stderr)
    print(f"error: {died}; no restart is left of ddp.max_restarts = {restarts}", file=sys.stderr)
    return STALLED if _last_stall(directory) >= begin else FAILED


def _stopped(directory: Path, since: float, code: int) -> int:
    """The exit code of a run that was asked to stop, of which the processes have said nothing if they left at once."""
    if not _has_stepped(directory, since):
        say_nothing_to_save()
    return code


def _has_stepped(directory: Path, since: float) -> bool:
    """Whether a step was done after the time `since`."""
    run = present_attempt(HeartbeatFiles(directory).read(), since)
    return any(state.step_count for state in run.ranks)


def _last_stall(directory: Path) -> float:
    """When the watchdog last found a live rank that had stalled; 0 for never."""
    findings = JsonlReader(directory / WATCHDOG_FILE).rows()
    stalls = [row for row in findings if str(row.get("rule")).startswith(("silent", "stalled-"))]
    return max((row["time"] for row in stalls if isinstance(row.get("time"), float)), default=0.0)


def run_processes(config: RunConfig, nproc: int, command: Sequence[str]) -> dict[int, int]:
    """Run Python with the arguments `command` in `nproc` processes that know of each other, until all of them end.

    Returns:
        Exit codes of those that failed, by rank; negative for signals.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    # Its tables of failed ranks say less than what the ranks have printed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{config.ddp.port or 0}",
        run_id="nsa-compile",
        max_restarts=0,
        # The launcher has handlers of its own for the others.
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(launch_config, sys.executable)(*command)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


@contextmanager
def watched(config: RunConfig, directory: Path) -> Iterator[None]:
    """Have the watchdog look at the run from a thread, if the configuration wants it."""
    if not config.watchdog.enabled:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=run_watchdog,
        args=(directory, config.watchdog, Actions(directory), over),
        kwargs={"since": time.time()},
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _forwarded_signals(grace_s: int) -> Iterator[StopRequest]:
    """Forward signals to the processes: those that ask them to stop, and SIGUSR1, on which they write their stacks.

    Those that have not left `grace_s` seconds after they were first asked to are killed.
    """
    stop = StopRequest()
    over = threading.Event()
    told: set[int] = set()

    def insist() -> None:
        deadline = time.monotonic() + grace_s
        # A process that was being started when the signal came has not heard of it.
        while not over.wait(0.2):
            _send(signal.Signals[stop.signal or "SIGTERM"], told)
            if time.monotonic() > deadline:
                print(f"error: processes still ran {grace_s} s after {stop.signal} and were killed", file=sys.stderr)
                _send(signal.SIGKILL, set())
                return

    def forward(signum: int, frame: object) -> None:
        told.clear()  # a second Ctrl-C is for those who have had the first
        _send(signum, told)
        if stop.signal is None:
            stop.signal = signal.Signals(signum).name
            threading.Thread(target=insist, daemon=True).start()

    def dump(signum: int, frame: object) -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if handles(child.pid, signum):  # to one that does not yet, it would be the end
                    child.send_signal(signum)

    signal.signal(signal.SIGUSR1, dump)
    try:
        with handled(forward, EXIT_CODES):
            yield stop
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nobody is left whose stacks could be asked for


def _send(signum: int, told: set[int]) -> None:
    """Send a signal to every process of ours that is not in `told`, which they are put in."""
    for child in psutil.Process().children():
        if child.pid not in told:
            told.add(child.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signum)


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

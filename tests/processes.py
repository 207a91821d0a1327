"""`nsa-compile` in processes of their own, forked from one that has imported torch and the trainer: that takes seconds.
So are the processes that such a one starts, the ranks of a run and the runs of an experiment.

What is about starting itself (what is imported, a signal before the first step, who outlives whom) starts Python anew.
So does what must not depend on addresses or on the seed of hashes, which forked processes share, and what is about the
end of the interpreter, which they skip.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from nsa_compile.cli import main
from nsa_compile.launch import worker
from tests.children import sitecustomize
from tests.room import with_room

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "nsa_compile.launch.launcher",
        "nsa_compile.launch.worker",
        "nsa_compile.train.loop",
        "torch.distributed.launcher.api",
        "torch.optim.adamw",
    ]
)


class Command:
    """A process that runs a function of the command line, with what `subprocess.Popen` has that the tests need."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        program: Callable[[list[str]], None] = main,
        first: Callable[[], Any] | None = None,
    ) -> None:
        """Run `program(arguments)` in the environment `env`, or in that of this process, after a call of `first`."""
        ends = [_SERVER.Pipe(duplex=False) for _ in range(2)]
        words = [os.fspath(word) for word in arguments]
        environment = dict(os.environ if env is None else env)
        self._process = _SERVER.Process(
            target=_run, args=(program, words, environment, os.getcwd(), [end for _, end in ends], first)
        )
        self._process.start()
        self.args = words
        self.pid: int = self._process.pid
        self.stdout, self.stderr = (_reader(begin) for begin, _ in ends)
        for end in (end for pair in ends for end in pair):
            end.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of its output and of its errors, when it has ended; it is killed where it takes too long."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self.stdout.close()
        self.stderr.close()
        return texts[0].result(), texts[1].result()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*arguments: str, timeout: float = 240.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """The outcome of a `Command`."""
    command = Command(*arguments, **options)
    stdout, stderr = command.communicate(timeout)
    return subprocess.CompletedProcess(command.args, command.wait(), stdout, stderr)


def script(path: str | Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The outcome of ``python path arguments``."""
    return run(str(path), *arguments, program=_script, **options)


def code(text: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The outcome of ``python -c text arguments``."""
    return run(text, *arguments, program=run_code, **options)


def sets(overrides: Iterable[str]) -> list[str]:
    """``--set`` before each override."""
    return [word for override in overrides for word in ("--set", override)]


def train(overrides: Iterable[str], *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The outcome of ``nsa-compile train --json``."""
    return run("train", "--json", *sets(overrides), *arguments, **options)


def _script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def run_code(words: list[str]) -> None:
    """What ``python -c`` does with its words."""
    sys.argv = ["-c", *words[1:]]
    exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})


def _reader(connection: Connection) -> TextIO:
    return open(os.dup(connection.fileno()), encoding="utf-8")


def _run(
    program: Callable[[list[str]], None],
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    ends: list[Connection],
    first: Callable[[], Any] | None,
) -> None:
    """In the forked process: become what a shell would have started."""
    for descriptor, end in enumerate(ends, 1):
        os.dup2(end.fileno(), descriptor)
        end.close()
    os.chdir(directory)
    os.environ.clear()
    _become(arguments, environment)
    if first is not None:
        first()
    importlib.reload(sitecustomize)  # with the faults of this environment
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess.Popen = subprocess_handler.Popen = _popen
    try:
        with_room(program, arguments)
    finally:
        atexit._run_exitfuncs()  # a forked process would leave without


def _become(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = ["nsa-compile", *arguments]
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _popen(args: Sequence[str], **options: Any) -> Any:
    """`subprocess.Popen`, which forks for the processes that the package starts of itself."""
    if tuple(args[:2]) == (sys.executable, "-m") and args[2] in _PROGRAMS:
        return _Forked(args, **options)
    return _POPEN(args, **options)


_POPEN = subprocess.Popen
_PROGRAMS: dict[str, Callable[[list[str]], None]] = {"nsa_compile": main, "nsa_compile.launch.worker": worker.main}


class _Forked:
    """What launchers need of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], start_new_session: bool = False, **files: Any
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            os._exit(_outcome(words, env, files))

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _outcome(words: Sequence[str], environment: Mapping[str, str], files: Mapping[str, Any]) -> int:
    """In the process that was forked: do what Python would after a start, and return the exit code."""
    faulthandler.unregister(signal.SIGUSR1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # not the launcher's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if (file := files.get(name)) is not None:
            source = os.open(os.devnull, os.O_RDWR) if file == subprocess.DEVNULL else file.fileno()
            os.dup2(source, descriptor)
    _become(words[3:], environment)
    code: Any = 1
    try:
        with_room(_PROGRAMS[words[2]], list(words[3:]))
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)

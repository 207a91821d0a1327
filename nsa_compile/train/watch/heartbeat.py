"""The heartbeat of a rank: what it is doing and how it is getting on, for a watchdog in another process.

Each rank appends rows to ``heartbeat_rank<r>.jsonl`` in the run's directory: ``start`` when it begins, ``step`` after
each optimizer step, ``beat`` from a thread every few seconds and ``end`` when it leaves by itself. A process that is
killed writes no ``end``, one that is stopped no ``beat``, and one that hangs goes on beating with the phase in which it
hangs.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import psutil
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from nsa_compile.branches import BRANCHES
from nsa_compile.files import open_to_append
from nsa_compile.train.records.jsonl import JsonlReader, JsonlWriter, to_json
from nsa_compile.train.watch.processes import start_ticks

Phase = Literal[
    "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluate", "compile", "idle"
]
PHASES = frozenset(get_args(Phase))
DEFAULT_INTERVAL = 5.0

_NAME = re.compile(r"heartbeat_rank(\d{1,6})\.jsonl")


class Heartbeat:
    """Writes the heartbeat of this process while it is entered, a ``beat`` row every `interval` seconds.

    A file that cannot be written to is said so once, on stderr; the training goes on.
    """

    def __init__(
        self, run_directory: Path, rank: int, interval: float = DEFAULT_INTERVAL, *, world_size: int = 1
    ) -> None:
        self.path = heartbeat_path(run_directory, rank)
        self._interval = interval
        self._world_size = world_size
        self._step = 0
        # One tuple, exchanged whole: the thread needs no lock to read it.
        self._phase: tuple[Phase, float] = ("idle", time.monotonic())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._writer: JsonlWriter | None = None
        self._failed = False

    def phase(self, name: Phase) -> None:
        """Say what this process does from now on, one of ``PHASES``; costs less than a microsecond."""
        if name not in PHASES:
            raise ValueError(f"phase = {name!r} must be one of {', '.join(sorted(PHASES))}")
        self._phase = (name, time.monotonic())

    def resumed(self, step: int) -> None:
        """Say that the steps up to this one were done before."""
        self._step = step

    def step(self, step: int, loss: float, grad_norm: float, tokens_per_s: float, **extra: Any) -> None:
        """Report an optimizer step that is done.

        Args:
            step: its number, from 1.
            loss: in nats per token; may be NaN.
            grad_norm: before clipping; may be NaN.
            tokens_per_s: throughput of the step.
            extra: further columns. ``gates`` maps a layer to the mean gates of ``BRANCHES``, in their order;
                ``device_bytes`` is memory allocated on the accelerator, an integer.

        Raises:
            ValueError: a value is of another type than the reader of the file expects.
        """
        self._step = step
        self._write("step", loss=loss, grad_norm=grad_norm, tokens_per_s=tokens_per_s, **extra)

    def __enter__(self) -> Heartbeat:
        attempt = 1 + sum(row.get("kind") == "start" for row in JsonlReader(self.path).rows())
        try:
            self._writer = JsonlWriter(self.path)
        except OSError as error:
            self._complain(error)
        self._write(
            "start",
            started=start_ticks(os.getpid()),
            host=socket.gethostname(),
            attempt=attempt,
            world_size=self._world_size,
        )
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._write("end", error=None if error_type is None else error_type.__name__)
        if self._writer is not None:
            self._writer.close()

    def left_by_signal(self) -> None:
        """Say that the process leaves by itself, from the handler of a signal."""
        self._write("end", error=SystemExit.__name__)

    def _beat(self) -> None:
        while not self._stop.wait(self._interval):
            self._write("beat")

    def _write(self, kind: str, **columns: Any) -> None:
        if self._writer is None:
            return
        phase, since = self._phase
        row = {
            "kind": kind,
            "time": round(time.time(), 3),
            "pid": os.getpid(),
            "step": self._step,
            "phase": phase,
            "phase_s": round(time.monotonic() - since, 3),
            "rss": psutil.Process().memory_info().rss,
        }
        row = to_json(row | columns)
        # What the watchdog could not read would be a heartbeat that nobody hears.
        if parse_row(row) is None:
            raise ValueError(f"a heartbeat of kind {kind} cannot hold {columns}")
        try:
            self._writer.append(row)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            print(f"warning: '{self.path}' cannot be written: {error.strerror}; training goes on", file=sys.stderr)


def install_stack_dump(run_directory: Path, rank: int) -> None:
    """From now on SIGUSR1 makes this process append the stacks of all its threads to ``stacks_rank<r>.txt``.

    The stacks are written by the signal handler itself, so it works while the interpreter is stuck in C code, and that
    is why a handler cannot write the time: who sends the signal does, and this function when it is called.
    """
    path = stacks_path(run_directory, rank)
    write_stack_header(path, f"rank {rank}, pid {os.getpid()} from here on")
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(open_to_append(path), "ab"), all_threads=True)


def write_stack_header(path: Path, text: str) -> None:
    """Append a line with the time and ``text`` to a file of stacks."""
    with os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
        file.write(f"\n=== {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")


def heartbeat_path(run_directory: Path, rank: int) -> Path:
    """The heartbeat file of a rank."""
    return run_directory / f"heartbeat_rank{rank}.jsonl"


def stacks_path(run_directory: Path, rank: int) -> Path:
    """The file of stack dumps of a rank."""
    return run_directory / f"stacks_rank{rank}.txt"


def heartbeat_ranks(run_directory: Path) -> list[int]:
    """The ranks that have a heartbeat file; none where there is no directory."""
    try:
        names = os.listdir(run_directory)
    except OSError:
        return []
    ranks = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    return sorted(rank for rank in ranks if heartbeat_path(run_directory, rank).is_file())


def _from_json(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


Number = Annotated[float, BeforeValidator(_from_json)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Layer = Annotated[str, Field(pattern=r"^\d{1,5}$")]


class Row(BaseModel):
    """What every row has: unix ``time``, the ``phase`` and for how many seconds, and resident bytes."""

    model_config = ConfigDict(frozen=True, strict=True)

    time: Annotated[float, Field(ge=0, lt=1e11)]
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    step: Annotated[int, Field(ge=0, lt=2**53)]
    phase: Phase
    phase_s: Annotated[float, Field(ge=0, lt=1e11)]
    rss: Bytes


class Start(Row):
    """A process begins: ``started`` tells it from others with its number, ``attempt`` counts the rank's processes."""

    kind: Literal["start"]
    started: Bytes
    host: Annotated[str, Field(max_length=255)]
    attempt: Annotated[int, Field(ge=1, lt=2**31)]
    world_size: Annotated[int, Field(ge=1, le=1 << 16)]


class Beat(Row):
    """The process lives."""

    kind: Literal["beat"]


class StepBeat(Row):
    """An optimizer step is done; ``gates`` are the mean gates of ``BRANCHES`` by layer."""

    kind: Literal["step"]
    loss: Number
    grad_norm: Number
    tokens_per_s: Number
    device_bytes: Bytes | None = None
    gates: dict[Layer, Annotated[list[Number], Field(min_length=len(BRANCHES), max_length=len(BRANCHES))]] | None = None


class End(Row):
    """The process left by itself; ``error`` names the exception it left by."""

    kind: Literal["end"]
    error: Annotated[str, Field(pattern=r"^\w{1,100}$")] | None


_ROW: TypeAdapter[Start | Beat | StepBeat | End] = TypeAdapter(
    Annotated[Start | Beat | StepBeat | End, Field(discriminator="kind")]
)


def parse_row(values: dict[str, Any]) -> Start | Beat | StepBeat | End | None:
    """A row of a heartbeat file, which is not trusted; ``None`` for what is none."""
    try:
        return _ROW.validate_python(values)
    except ValidationError:
        return None

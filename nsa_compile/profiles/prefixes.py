"""Compile and measure prefixes of the pipeline, in a process that is ended when one of them takes too long.

An exception raised by a signal would not do: torch's C++ does not expect one just anywhere, and then ends the process
or goes on with half a change made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.graph import GraphLowering

from nsa_compile import compiler_cache, inductor_files
from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError
from nsa_compile.files import make_private
from nsa_compile.machine.matmul_rate import measure_matmul
from nsa_compile.ops.cpp import kernel_directory
from nsa_compile.passes.bisection import without_passes
from nsa_compile.profiles.blame import first_line
from nsa_compile.profiles.measure import peak_memory, seconds_of, summarize
from nsa_compile.profiles.probe import Errors, Probe, errors

# Calls in the code that Inductor writes. It counts kernels too, but before it puts several into one function.
_GENERATED = re.compile(r"^\s+(?:cpp_|triton_)\w+(?:\.run)?\(", re.MULTILINE)
_EXTERN = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops|aten)\.[\w.]+\(", re.MULTILINE)

# For what a process has started to put its files in order.
GRACE_S = 2.0

# Takes the kind of a message and its content: `PrefixResults.take`, or a pipe that leads there.
Send = Callable[[str, Any], None]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is to be measured: a block of `config`'s model on `seq_len` tokens, after 0, 1, 2, … of the passes `names`,
    each prefix timed `repeats` times. The pipeline leaves its graphs and its report in `folder_of(count)`.
    """

    config: RunConfig
    seq_len: int
    repeats: int
    names: tuple[str, ...]
    folder: Path

    def folder_of(self, count: int) -> Path:
        return self.folder / str(count)


class PrefixResults:
    """What was measured, from the messages of `measure_prefixes`.

    Attributes:
        machine: rates of the machine.
        eager_error: of the uncompiled block.
        measured: of each prefix, all but its timings; `not_measured` says why there is no more.
        timings: of each prefix that was measured, forward and backward.
        current: the prefix that is being compiled and first run.
    """

    def __init__(self, passes: int, tell: Callable[[str], None]) -> None:
        self.machine: dict[str, float] = {}
        self.eager_error: dict[str, Any] = {}
        self.measured: dict[int, dict[str, Any]] = {}
        self.timings: dict[int, dict[str, Any]] = {}
        self.current: int | None = None
        self._passes = passes
        self._tell = tell

    def take(self, kind: str, content: Any) -> None:
        if kind == "began":
            self.current = content
        elif kind == "measured":
            assert self.current is not None
            # A process that was started anew finds what it compiles in Inductor's cache: the first time counts. But a
            # prefix that does not get through a second time has no timing, and must not be tried for ever.
            if self.current not in self.measured or content["not_measured"]:
                self.measured[self.current] = content
                self._tell(f"{self.current} of {self._passes} passes: {_told(content)}")
            self.current = None
        elif kind == "timing":
            self._tell("timing in turns")
        else:
            setattr(self, kind, content)

    def give_up(self, reason: str) -> bool:
        """Note why the current prefix is not measured; False where there is none."""
        if self.current is None:
            return False
        self.take("measured", {"not_measured": reason})
        return True

    @property
    def given_up(self) -> set[int]:
        return {count for count, row in self.measured.items() if row["not_measured"]}


def _told(measured: Mapping[str, Any]) -> str:
    if measured["not_measured"]:
        return f"not measured, {measured['not_measured']}"
    cached = " with a hit in the cache of Inductor" * measured["inductor_cache_hit"]
    return f"compiled in {measured['compile_s']:.1f} s{cached}"


def measure_prefixes(work: Measurement, without: set[int], send: Send) -> None:
    """Compile and measure all prefixes but those of `without`, and send what `PrefixResults` holds."""
    probe = Probe(work.config, work.seq_len)
    exact, loop = probe.exact(), probe.loop()
    send("eager_error", _numbers(errors(loop, loop, exact, probe.dtype)))
    if work.config.compile.nested == "inductor":  # once a machine, so it is no prefix's time
        inductor_files.prepare()
        pick_vec_isa()
    blocks: dict[int, nn.Module] = {}
    torch._dynamo.reset()
    # Programs of all prefixes stay alive, to be timed in turns.
    with torch._dynamo.config.patch(recompile_limit=len(work.names) + 8):
        for count in range(len(work.names) + 1):
            if count in without:
                continue
            send("began", count)
            try:
                blocks[count], measured = _measure(probe, work, count, loop, exact)
            except Exception as error:
                measured = {"not_measured": first_line(error)}
            send("measured", measured)
        send("timing", None)
        send("timings", _time(probe, blocks, work.repeats))
    torch._dynamo.reset()  # so many programs would count towards the limit of whatever is compiled next
    flops = measure_matmul(probe.device, (probe.dtype,)).peak
    send("machine", {"flops_per_s": flops, "bytes_per_s": measure_copy_bytes(probe.device)})


def _measure(
    probe: Probe, work: Measurement, count: int, loop: list[Tensor], exact: list[Tensor]
) -> tuple[nn.Module, dict[str, Any]]:
    """A block compiled with the first `count` passes, and what its first runs show."""
    compiling = work.config.compile
    counters.clear()
    codes: list[str] = []
    started = time.perf_counter()
    block = probe.compiled(
        nested=compiling.nested,
        disable=without_passes(work.names[count:], compiling.disable),
        estimate=True,
        dump_dir=str(work.folder_of(count)),
    )
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        outcome = probe.outcome(block)
        compile_s = time.perf_counter() - started
        found = errors(outcome, loop, exact, probe.dtype)
        peak = peak_memory(lambda: probe.backward(probe.forward(block)[1]), probe.device)
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return block, {
        "not_measured": None,
        "compile_s": compile_s,
        "inductor_cache_hit": bool(hits),
        "kernels": _kernels(codes) if compiling.nested == "inductor" else None,
        "peak_bytes": peak,
        "error": _numbers(found),
    }


def _kernels(codes: list[str]) -> dict[str, int]:
    """Calls of generated kernels, and of others (matrix products, operators), in forward and backward code."""
    return {
        "generated": sum(len(_GENERATED.findall(code)) for code in codes),
        "extern": sum(len(_EXTERN.findall(code)) for code in codes),
    }


def _numbers(found: Errors) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "explained": found.explained}


def _time(probe: Probe, blocks: dict[int, nn.Module], repeats: int) -> dict[int, dict[str, Any]]:
    """Forward and backward times of each block, in turns; the first turn warms up and is not counted."""
    samples: dict[int, tuple[list[float], list[float]]] = {count: ([], []) for count in blocks}
    for turn in range(-1, repeats):
        for count, block in blocks.items():
            block.zero_grad(set_to_none=True)
            output: list[Tensor] = []
            forward = seconds_of(lambda: output.append(probe.forward(block)[1]), probe.device)  # noqa: B023
            backward = seconds_of(lambda: probe.backward(output[0]), probe.device)  # noqa: B023
            if turn >= 0:
                samples[count][0].append(forward)
                samples[count][1].append(backward)
    return {
        count: {"forward": summarize(forward), "backward": summarize(backward)}
        for count, (forward, backward) in samples.items()
    }


def measure_copy_bytes(device: torch.device, size: int = 2**26, seconds: float = 0.3) -> float:
    """Best measured rate of copying in bytes/s, reads and writes counted: the slope of a roofline."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, seconds_of(lambda: target.copy_(source), device))
    return 2 * size / best


# ----------------------------------------------------------------------------------------- a process that may be ended


def measure_within(
    limit_s: float,
    work: Measurement,
    results: PrefixResults,
    measure: Callable[[Measurement, set[int], Send], None] = measure_prefixes,
) -> None:
    """`measure_prefixes` in a process of its own. A prefix that takes more than `limit_s` seconds, or ends the process,
    is given up, and another process measures the rest. They keep what they compile in a directory of their own, which
    goes at the end: what a process that is ended leaves there harms nobody.

    Raises:
        UserError: what `measure` raised; or the process ended while it was at no prefix.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-compile-", ignore_cleanup_errors=True) as compiled:
        _take_along(compiler_cache.directory(), Path(compiled))
        while (problem := _watch(limit_s, compiled, work, results, measure)) is not None:
            if not results.give_up(problem):
                raise UserError(
                    f"the process that measures the passes could not go on: {problem}; "
                    "fewer tokens (--seq-len) need less memory"
                )


def _take_along(kept: Path, compiled: Path) -> None:
    """Copy into a new directory what every one for compiled programs needs and is slow to make; all are whole files."""
    headers = inductor_files.header_directory(kept)
    with contextlib.suppress(OSError):  # then they are made anew
        make_private(headers)
        inductor_files.header_directory(compiled).symlink_to(headers)
        shutil.copytree(kernel_directory(kept), kernel_directory(compiled))


def _watch(
    limit_s: float,
    compiled: str,
    work: Measurement,
    results: PrefixResults,
    measure: Callable[[Measurement, set[int], Send], None],
) -> str | None:
    """Why the process did not finish; None if it did."""
    with _process(compiled) as (process, connection):
        with contextlib.suppress(BrokenPipeError):  # what is wrong shows when its messages are read
            connection.send((measure, work, results.given_up))
        while True:
            # No message comes between the beginning of a prefix and its end.
            if not connection.poll(None if results.current is None else limit_s):
                return f"it took more than {limit_s:g} s to compile and run"
            try:
                kind, content = connection.recv()
            except (EOFError, ConnectionResetError):  # the latter where it had not yet read its work
                return _how_it_ended(process.wait())
            if kind == "done":
                return None
            if kind == "failed":
                raise content
            results.take(kind, content)


@contextlib.contextmanager
def _process(compiled: str) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """A new interpreter that runs `serve` and keeps what it compiles in the directory `compiled`, and the connection to
    it; it is ended at the end, with what it has started.

    `multiprocessing.Process` would import the main module again, and tell of semaphores that a killed process leaves.
    """
    connection, other = multiprocessing.Pipe()
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    code = f"from nsa_compile.profiles.served import serve; serve({other.fileno()}, {os.getpid()})"
    process = subprocess.Popen(
        # -P: what lies in the working directory must not take the place of a module.
        [sys.executable, "-P", "-W", quiet, "-c", code],
        pass_fds=[other.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), compiler_cache.VARIABLE: compiled},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # and with it a process group; Ctrl-C is this process's business
    )
    other.close()
    try:
        yield process, connection
    finally:
        _end(process)
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started.

    At SIGTERM a C++ compiler deletes what it has half written.
    """
    with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
        os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            process.poll()  # or it would stay, as a zombie
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"

"""What every measurement shares: the model, timing in turns, peak memory, and a record of where it was made."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nsa_compile.files import write_json
from nsa_compile.machine import environment
from nsa_compile.machine.environment import describe_environment, synchronize
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.profiles.attribution import Event, read_trace

SEED = 1337
CPU = torch.device("cpu")


def model_config(layers: int, dim: int, head_dim: int, pattern: SparsePattern | None = None) -> NSAConfig:
    """The model of the measurements: bytes, 4 heads in 2 groups, and the paper's pattern, 32/16/64/16/512."""
    return NSAConfig(
        vocab_size=256,
        dim=dim,
        n_layers=layers,
        n_heads=4,
        n_kv_heads=2,
        head_dim=head_dim,
        pattern=pattern or SparsePattern(),
    )


def build(config: NSAConfig) -> NSATransformer:
    """The same weights at every call."""
    torch.manual_seed(SEED)
    return NSATransformer(config)


def random_tokens(config: NSAConfig, seq_len: int, batch_size: int = 1) -> Tensor:
    """Random tokens `[B, S]`, the same at every call."""
    return torch.randint(config.vocab_size, (batch_size, seq_len), generator=torch.Generator().manual_seed(SEED))


def forward_backward(model: nn.Module, tokens: Tensor) -> None:
    """The work of a training step without the optimizer, with fresh gradients."""
    model.zero_grad(set_to_none=True)
    model(tokens).square().mean().backward()


def processor_seconds() -> float:
    """Processor time of this process and of the compilers that it has run."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def in_a_new_process(script: str, *arguments: Any, cache: str) -> Any:
    """What a Python program prints as JSON on its last line; what it compiles is kept in the folder `cache`."""
    # The package's own cache lies below Inductor's, so one folder empties both.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise SystemExit(f"the measured process failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def load_module(path: Path, name: str) -> ModuleType:
    """The module that a file of somebody else's holds."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Dynamo looks for the globals of its functions
    spec.loader.exec_module(module)
    return module


def seconds_of(
    work: Callable[[], Any], device: torch.device = CPU, clock: Callable[[], float] = time.perf_counter
) -> float:
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return clock() - start


@contextmanager
def traced(device: torch.device, trace: Path | None = None) -> Iterator[list[Event]]:
    """Record what runs inside by torch's profiler. Afterwards the list holds the events, and the file `trace` all."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    events: list[Event] = []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as recorded:
        yield events
    with TemporaryDirectory() as directory:
        path = trace or Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events += read_trace(path)


@contextmanager
def named_kernels() -> Iterator[None]:
    """Inductor's C++ kernels compiled in here tell a profiler when they run; others pass for Python."""
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.enable_kernel_profile": True}):
        yield


def interleave(
    works: Mapping[str, Callable[[], Any]],
    repeats: int | Mapping[str, int],
    device: torch.device = CPU,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, Any]]:
    """Time each of `works` `repeats` times, in turns, so that a slow minute of the machine falls on all of them.

    Each runs once before, unless the caller saw to that. `clock` gives seconds: those that pass, or, on a machine that
    has other work, `time.process_time`. One that runs out of memory is recorded as not measured, and
    the others go on.
    """
    counts = {name: repeats if isinstance(repeats, int) else repeats[name] for name in works}
    samples: dict[str, list[float]] = {name: [] for name in works}
    failed: set[str] = set()
    for turn in range(-1 if warm_up else 0, max(counts.values(), default=0)):
        for name, work in works.items():
            if turn >= counts[name] or name in failed:
                continue
            try:
                seconds = seconds_of(work, device, clock)
                if turn >= 0:
                    samples[name].append(seconds)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                failed.add(name)
    return {
        name: not_measured("does not fit into memory") if name in failed else summarize(samples[name]) for name in works
    }


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was not enough, on whatever device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in text for sign in ("can't allocate memory", "not enough memory", "out of memory")
    )


def summarize(samples: Sequence[float]) -> dict[str, Any]:
    """Median and spread of repeated measurements, with the measurements themselves."""
    if not samples:
        return not_measured("skipped")
    return {
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "max_s": max(samples),
        "samples_s": list(samples),
    }


def not_measured(reason: str) -> dict[str, Any]:
    """What stands where a timing would, with the reason it does not."""
    return {"not_measured": reason}


def ratio(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> float | None:
    """How many times longer `slow` took, from the medians; None where one of them was not measured."""
    return slow["median_s"] / fast["median_s"] if "median_s" in slow and "median_s" in fast else None


def show(timing: Mapping[str, Any] | None, unit: float = 1e3) -> str:
    """A timing for a table: median and range, in milliseconds unless told otherwise."""
    if timing is None or "median_s" not in timing:
        return "not measured"
    median, low, high = (timing[key] * unit for key in ("median_s", "min_s", "max_s"))
    digits = 1 if median >= 10 or unit == 1 else 3
    return f"{median:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def peak_memory(work: Callable[[], Any], device: torch.device = CPU) -> int | None:
    """Bytes that `work` needs at its peak above what is in use before; None where the system does not tell.

    On the CPU this is resident memory, counted by Linux in pages; run `work` once before, or what it loads counts, too.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # Freed memory that the C library keeps would be used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
        # Sets the peak back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = environment.peak_memory(device)
        work()
        return environment.peak_memory(device) - before
    except (OSError, AttributeError):
        return None


def make_record(
    name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: torch.device = CPU, **more: Any
) -> dict[str, Any]:
    """A measurement as plain data: machine, versions and source revision, settings, results."""
    return {
        "benchmark": name,
        "environment": describe_environment(device),
        "settings": dict(settings),
        **more,
        "results": list(rows),
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON. Meant to be called after each row: an interruption loses one at most."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)

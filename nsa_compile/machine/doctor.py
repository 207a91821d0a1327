"""What this machine can run, and what is missing: a finding for everything a training run depends on.

Each check looks at the thing itself where that is quick: it compiles a file, opens a process group, writes to the
directories. One check that fails does not keep the others from running.
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from nsa_compile import compiler_cache, inductor_files
from nsa_compile.errors import UserError
from nsa_compile.extras import installed_version
from nsa_compile.files import nearest_existing, read_sealed
from nsa_compile.machine import cores

Status = Literal["ok", "warning", "problem"]

# Optional packages: what each is for and the extra that brings it.
PACKAGES = {
    "matplotlib": ("loss.png and --plot", "plots"),
    "tokenizers": ("the gpt2 tokenizer", "gpt2"),
    "datasets": ("data.name=fineweb-edu, data.stream", "data"),
    "pyarrow": ("Parquet files", "data"),
    "torchao": ("low-bit optimizers, float8 and int8 products", "torchao"),
    "tensorboard": ("TensorBoard's event files", "tensorboard"),
    "nvtx": ("ranges in NVIDIA's profilers", "lab"),
    "hypothesis": ("nsa-compile verify", "lab"),
}
LEAST_DISK = 2 * 10**9
LEAST_MEMORY = 2 * 10**9
LEAST_SHARED_MEMORY = 10**9
LEAST_OPEN_FILES = 1024
# What Inductor asks of a compiler: a shared library with OpenMP.
PROBE = "#include <omp.h>\n#include <vector>\nint threads() { return omp_get_max_threads(); }\n"


@dataclass(frozen=True)
class CheckResult:
    """What one check saw.

    Attributes:
        status: ``"problem"`` means that ``nsa-compile train`` cannot run.
        advice: what to do about it; empty if nothing.
    """

    check: str
    status: Status
    found: str
    advice: str = ""


def examine(run_dir: str = "runs") -> list[CheckResult]:
    """Run every check; ``run_dir`` is where runs would leave their files."""
    findings: list[CheckResult] = []
    checks: list[Callable[[], Iterator[CheckResult]]] = [
        _python, _torch, _processor, _compiler, _compiler_cache, _gpu, _distributed, _packages,
        lambda: _directories(run_dir), _limits, _openmp,
    ]  # fmt: skip
    for check in checks:
        try:
            findings += check()
        # Whatever a broken driver or library raises is what the user came to learn.
        except Exception as error:
            name = getattr(check, "__name__", "check").strip("_")
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            findings.append(CheckResult(name, "warning", f"cannot be looked at: {reason}", "see the message"))
    return findings


def _advised(check: str, found: str, advice: str) -> CheckResult:
    """A warning where there is something to advise."""
    return CheckResult(check, "warning" if advice else "ok", found, advice)


def _python() -> Iterator[CheckResult]:
    supported = metadata.metadata("nsa-compile")["Requires-Python"]
    found = f"Python {platform.python_version()}, supported {supported}"
    yield _within("python", platform.python_version(), supported, found, "problem", f"install Python {supported}")


def _torch() -> Iterator[CheckResult]:
    from packaging.requirements import Requirement

    requirements = map(Requirement, metadata.requires("nsa-compile") or ())
    supported = str(next(r.specifier for r in requirements if r.name == "torch"))
    try:
        import torch
    except ImportError as error:
        reason = str(error).splitlines()[0]
        yield CheckResult("torch", "problem", f"cannot be imported: {reason}", f"pip install 'torch{supported}'")
        return
    found = f"torch {torch.__version__}, supported {supported}"
    advice = f"untested; pip install 'torch{supported}'"
    yield _within("torch", torch.__version__.partition("+")[0], supported, found, "warning", advice)


def _within(check: str, version: str, supported: str, found: str, otherwise: Status, advice: str) -> CheckResult:
    from packaging.specifiers import SpecifierSet

    ok = SpecifierSet(supported).contains(version, prereleases=True)
    return CheckResult(check, "ok" if ok else otherwise, found, "" if ok else advice)


def _processor() -> Iterator[CheckResult]:
    import torch

    from nsa_compile.ops.cpp import has_matrix_unit

    units = "AMX" if has_matrix_unit() else "no AMX"
    capability = torch.backends.cpu.get_cpu_capability()
    slow = capability in ("DEFAULT", "NO AVX")
    yield _advised(
        "processor",
        f"{cores()} cores for this process, vectors {capability}, {units}",
        "no vector unit that torch knows: training on the processor is slow" if slow else "",
    )
    memory = psutil.virtual_memory()
    little = memory.available < LEAST_MEMORY
    yield _advised(
        "memory",
        f"{_gigabytes(memory.available)} of {_gigabytes(memory.total)} available",
        "little is left; nsa-compile estimate tells what a run needs" if little else "",
    )


def _compiler() -> Iterator[CheckResult]:
    from nsa_compile.machine.preflight import require_cxx

    way_out = "--set compile.nested=aot_eager"
    try:
        require_cxx("Inductor", way_out)
    except UserError as error:
        yield CheckResult("C++ compiler", "problem", "none", str(error))
        return
    command = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(PROBE, encoding="utf-8")
        arguments = ["-std=c++17", "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            result = subprocess.run(
                [*command, *arguments], capture_output=True, text=True, errors="replace", timeout=30, check=False
            )
            failed = result.returncode != 0
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            failed, lines = True, [str(error)]
    name = shlex.join(command)
    if failed:
        reason = (lines or ["no message"])[0].replace(directory + "/", "")
        advice = f"mend it, point CXX at another, or use {way_out}"
        yield CheckResult("C++ compiler", "problem", f"{name} cannot compile with OpenMP: {reason}", advice)
    else:
        yield CheckResult("C++ compiler", "ok", f"{name} ({shutil.which(command[0])}) compiles with OpenMP")


def _compiler_cache() -> Iterator[CheckResult]:
    """The first choice of a place for compiled programs. Nothing is made there, and nothing deleted."""
    check, first, default = "compiler cache", compiler_cache.candidates()[0], compiler_cache.default_directory()
    if problem := compiler_cache.unsafe(first):
        instead = "a temporary directory" if first == default else f"'{default}'"
        other = f"delete what is not yours there, or {compiler_cache.ADVICE}; until then {instead} takes its place"
        yield CheckResult(check, "warning", problem, other)
        return
    found = _directory(check, first, "problem", compiler_cache.ADVICE)
    if found.status == "ok" and first.is_dir() and (problem := compiler_cache.unusable(first)):
        found = CheckResult(check, "warning", problem, compiler_cache.ADVICE)
    yield found
    if broken := [*inductor_files.broken_files(first), *_broken_kernels(first)]:
        yield CheckResult(
            "compiled programs",
            "warning",
            f"{len(broken)} broken, as a killed compiler or a damaged disk leaves them, such as '{broken[0]}'",
            f"delete '{first}'; what it holds is compiled again",
        )


def _broken_kernels(compiled: Path) -> Iterator[Path]:
    from nsa_compile.ops.cpp import kernel_directory

    for path in kernel_directory(compiled).glob("*.so"):
        try:
            read_sealed(path)
        except (OSError, ValueError):
            yield path


def _gpu() -> Iterator[CheckResult]:
    import torch

    build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for the CPU"
    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists()
        advice = ""
        if driver and not torch.version.cuda:
            advice = "there is an NVIDIA driver: install torch for CUDA to use the GPU"
        elif torch.version.cuda:
            advice = "no usable GPU or driver: see nvidia-smi and CUDA_VISIBLE_DEVICES; training runs on the processor"
        yield _advised("GPU", f"none; {build}", advice)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        missing = [name for name, there in (("bf16", capability >= (8, 0)), ("fp8", capability >= (8, 9))) if not there]
        yield _advised(
            f"GPU {index}",
            f"{properties.name}, {_gigabytes(properties.total_memory)}, capability {capability[0]}.{capability[1]}, "
            f"{'no ' + ', no '.join(missing) if missing else 'bf16, fp8'}; {build}",
            "train.dtype=bf16 is slow here; use float32" if "bf16" in missing else "",
        )
    triton = installed_version("triton")
    yield _advised(
        "Triton",
        triton or "not installed",
        "" if triton else "without it attention takes its slow portable form: pip install 'nsa-compile[triton]'",
    )


def _distributed() -> Iterator[CheckResult]:
    import torch
    import torch.distributed as dist

    advice = "several processes on processors cannot talk to each other; one process trains as ever"
    if not dist.is_available() or not dist.is_gloo_available():
        yield CheckResult("gloo", "warning", "not in this build of torch", advice)
    else:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                dist.all_reduce(torch.ones(1))
            finally:
                dist.destroy_process_group()
            yield CheckResult("gloo", "ok", "a process group of one works")
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            yield CheckResult(
                "gloo", "warning", f"a process group fails: {reason}", f"see GLOO_SOCKET_IFNAME; {advice}"
            )
    if torch.cuda.is_available():
        nccl = dist.is_available() and dist.is_nccl_available()
        yield _advised(
            "NCCL",
            ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this build of torch",
            "" if nccl else "several GPUs need it: install torch from its own index",
        )


def _packages() -> Iterator[CheckResult]:
    for name, (purpose, extra) in PACKAGES.items():
        version = installed_version(name)
        if version is None:
            yield CheckResult(name, "warning", f"not installed; for {purpose}", f"pip install 'nsa-compile[{extra}]'")
        else:
            yield CheckResult(name, "ok", f"{version}, for {purpose}")


def _directories(run_dir: str) -> Iterator[CheckResult]:
    import platformdirs

    tokens = Path(platformdirs.user_cache_path("nsa-compile"))
    yield _directory("token cache", tokens, "warning", "choose another with --set data.cache_dir=PATH")
    yield _directory("runs", Path(run_dir), "problem", "choose another with --set run.dir=PATH")


def _directory(check: str, path: Path, otherwise: Status, advice: str) -> CheckResult:
    """Whether a directory, or the nearest parent that exists, can be written to, and how much fits."""
    existing = nearest_existing(path)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return CheckResult(check, otherwise, f"'{path}' cannot be written to: {error.strerror}", advice)
    free = shutil.disk_usage(existing).free
    full = free < LEAST_DISK
    return _advised(
        check,
        f"'{path}' can be written to, {_gigabytes(free)} free",
        f"little room: make some, or {advice}" if full else "",
    )


def _limits() -> Iterator[CheckResult]:
    if Path("/dev/shm").is_dir():
        room = os.statvfs("/dev/shm")
        size = room.f_frsize * room.f_blocks
        small = size < LEAST_SHARED_MEMORY
        yield _advised(
            "shared memory",
            f"{_gigabytes(size)} at /dev/shm",
            "several processes may need more; of a container, --shm-size=8g" if small else "",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES
    yield _advised(
        "open files",
        f"{'no limit' if soft == resource.RLIM_INFINITY else soft} for a process",
        f"raise it: ulimit -n {min(65536, hard) if hard != resource.RLIM_INFINITY else 65536}" if few else "",
    )


def _openmp() -> Iterator[CheckResult]:
    """Settings of OpenMP that make threads fight over cores."""
    count, settings = cores(), os.environ
    advice = []
    if settings.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        advice.append("unset OMP_WAIT_POLICY: spinning threads take the time of those they wait for")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = settings.get(name, "").partition(",")[0]
        if value.isdigit() and int(value) > count:
            advice.append(f"set {name} to {count} at most, the cores of this process")
        elif value.isdigit() and int(value) == 1 and count > 1:
            advice.append(f"{name} = 1 uses one of {count} cores; right only for as many processes")
    if settings.get("OMP_PROC_BIND", "false").lower() not in ("", "false"):
        advice.append("unset OMP_PROC_BIND: the processes of a run would be bound to the same cores")
    shown = {name: settings[name] for name in sorted(settings) if name.startswith(("OMP_", "MKL_", "KMP_", "GOMP_"))}
    found = ", ".join(f"{name}={value}" for name, value in shown.items()) or "nothing set"
    yield _advised("OpenMP", found, "; ".join(advice))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def report(findings: list[CheckResult]) -> dict[str, Any]:
    """Findings as plain data."""
    return {"ok": all(f.status != "problem" for f in findings), "findings": [vars(f) for f in findings]}

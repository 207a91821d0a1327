"""What must hold before a run starts, settled without torch: a C++ compiler, packages, polite threads."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from importlib.util import find_spec

from nsa_compile import compiler_cache
from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError

# What tensor cores need at least: float8 came with Ada and Hopper; torchao's int8 kernel is written for Ampere.
LEAST_CAPABILITY = {"float8": (8, 9), "int8": (8, 0)}


def check_run(config: RunConfig) -> None:
    """Raise a UserError unless what the configuration asks for is there: a compiler, packages."""
    check_compiler(config)
    check_tensorboard(config)
    check_torchao(config)
    if config.lora.rank:
        _require("peft", f"lora.rank = {config.lora.rank}", "lora.rank=0", extra="lora")
    check_matmul(config)


def check_compiler(config: RunConfig) -> None:
    """Raise a UserError if Inductor is to compile, the blocks or a step of torchao's optimizers, and finds no compiler.

    Also settles where compiled programs are kept, for the processes of the run, too.
    """
    if config.compile.enabled:
        check_nested(config)
    if config.optim.name != "adamw":
        require_cxx(f"optim.name = '{config.optim.name}'", "--set optim.name=adamw")
    if config.compile.enabled or config.optim.name != "adamw":
        compiler_cache.directory()


def check_nested(config: RunConfig) -> None:
    """Raise a UserError if Inductor is to compile and finds no compiler."""
    if config.compile.nested == "inductor":
        require_cxx("compile.nested = 'inductor'", "--set compile.nested=aot_eager")


def check_tensorboard(config: RunConfig) -> None:
    """Raise a UserError if event files are asked for and tensorboard is not installed. Imports neither it nor torch."""
    if config.log.tensorboard:
        _require("tensorboard", "log.tensorboard = true", "log.tensorboard=false")


def check_torchao(config: RunConfig) -> None:
    """Raise a UserError if torchao is asked for and not installed. Imports neither it nor torch."""
    if config.optim.name != "adamw":
        _require("torchao", f"optim.name = '{config.optim.name}'", "optim.name=adamw")
    if config.train.matmul != "native":
        _require("torchao", f"train.matmul = '{config.train.matmul}'", "train.matmul=native")


def _require(package: str, what: str, without: str, extra: str | None = None) -> None:
    """Raise a UserError unless a package is there, which an extra brings, by default one of its name."""
    if find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}; install it with pip install 'nsa-compile[{extra or package}]', "
            f"or use --set {without}"
        )


def check_matmul(config: RunConfig) -> None:
    """Raise a UserError, which says why, unless the device multiplies in the precision that is asked for."""
    kind = config.train.matmul
    if kind == "native":
        return
    import torch  # only who asks for low precision waits for this
    from torch.utils._triton import has_triton

    reason = None
    if config.train.device != "cpu" and torch.cuda.is_available():
        least = LEAST_CAPABILITY[kind]
        found = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        if found < least:
            needed, present = (".".join(map(str, version)) for version in (least, found))
            reason = f"needs GPUs of compute capability {needed}, and there is one of {present}"
    elif kind == "float8":
        reason = "needs a GPU of compute capability 8.9: a CPU would only emulate it, slower than float32"
    elif has_triton():
        reason = "runs on the CPU only where there is no GPU: torchao would take its kernel for the GPU"
    elif not torch.cpu._is_vnni_supported():
        reason = "needs a GPU, or a CPU with units for int8 (VNNI)"
    if reason:
        raise UserError(f"train.matmul = '{kind}' {reason}; use --set train.matmul=native")


def require_cxx(what: str, way_out: str) -> None:
    """Raise a UserError unless Inductor will find a C++ compiler, for `what`; `way_out` names what does without one."""
    chosen = os.environ.get("CXX")
    if chosen is not None:
        # CXX may carry arguments, as in "ccache g++".
        words = shlex.split(chosen)
        reason = _no_compiler(words)
        if reason is None:
            return
        raise UserError(
            f"CXX = '{chosen}' {reason}, and {what} needs a C++ compiler; point CXX at one, unset it, or use {way_out}"
        )
    if shutil.which("g++"):
        return
    if shutil.which("clang++"):
        os.environ["CXX"] = "clang++"  # Inductor looks for g++ only, unless CXX says otherwise
        return
    raise UserError(
        f"{what} needs a C++ compiler and neither g++ nor clang++ is on the PATH; "
        f"install one, point CXX at one, or use {way_out}"
    )


def _no_compiler(words: list[str]) -> str | None:
    """Why a command is no compiler, in words; None where it says its version, which is all that Inductor asks."""
    if not words or not shutil.which(words[0]):
        return "is no program"
    try:
        asked = subprocess.run(
            [*words, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    if not asked.returncode:
        return None
    said = [line.strip() for line in asked.stderr.splitlines() if line.strip()]
    return f"does not say its version ({said[-1] if said else f'its exit code is {asked.returncode}'})"


def wait_passively() -> None:
    """Let OpenMP's threads sleep at a barrier instead of spinning; has an effect only before torch is imported.

    A spinning thread burns the time slice that the thread it waits for needs: on two cores shared with busy neighbours
    the packaged run made 600 tokens/s spinning and 2,200 sleeping. A value the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

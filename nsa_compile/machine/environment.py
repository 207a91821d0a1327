"""What a run ran on: machine, versions, source revision."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

from nsa_compile.extras import installed_version

PACKAGES = ("nsa-compile", "torch", "triton", "numpy", "pydantic", "nvtx", "matplotlib", "tokenizers")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Machine, versions and source revision, as plain data for ``env.json``."""
    return {
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name)) is not None},
        "git": git_revision(),
    }


def git_revision() -> dict[str, Any]:
    """Commit of the package's own checkout and whether it has uncommitted changes; ``None`` outside of one."""
    # Asked about this file, not its folder: site-packages may lie inside somebody else's repository.
    if not _git("ls-files", "--", Path(__file__).name):
        return {"sha": None, "dirty": None}
    return {"sha": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch has allocated on a CUDA device, or that the process has had resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage's: Linux hands that down from the process that started this one.
        return 1024 * int(re.findall(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()

"""What tests let `measure_within` do in its own process, which imports this file: without torch, to start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from nsa_compile import compiler_cache
from nsa_compile.errors import UserError


def work_that_hangs(work, without, send):
    """Prefix 1 never ends, nor does what it has started; prefix 2 ends the process, the others do as they should."""
    for count in {0, 1, 2, 3} - without:
        send("began", count)
        if count == 1:
            cleaning = f"trap 'echo clean > {work}.told; exit' TERM; echo $$ > {work}; while :; do sleep 0.1; done"
            subprocess.run(["sh", "-c", cleaning], check=False)
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        send("measured", {"not_measured": None, "compile_s": float(os.getpid()), "inductor_cache_hit": False})
    send("timings", {count: {"by": os.getpid()} for count in {0, 1, 2, 3} - without})


def work_that_compiles(work, without, send):
    """Tell where compiled programs go; prefix 0 leaves something there and ends the process."""
    for count in {0, 1} - without:
        send("began", count)
        directory = compiler_cache.directory()
        with (Path(work) / "told").open("a") as told:
            print(directory, *sorted(path.name for path in directory.rglob("*.so")), file=told)
        if count == 0:
            (directory / "left.so").touch()
            (directory / "precompiled_headers" / "header").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        send("measured", {"not_measured": None, "compile_s": 1.0, "inductor_cache_hit": False})


def work_that_fails_when_it_comes_again(work, without, send):
    """Prefix 1 ends the process; in the next one prefix 0 raises."""
    measured = {0, 1, 2} - without
    for count in sorted(measured):
        send("began", count)
        if count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        problem = "RuntimeError: not again" if without and count == 0 else None
        send("measured", {"not_measured": problem, "compile_s": 1.0, "inductor_cache_hit": False})
    send("timings", {2: {"forward": {}, "backward": {}}})


def work_that_ends_early(work, without, send):
    sys.exit(3)


def work_that_is_wrong(work, without, send):
    raise UserError(f"seq_len is {work}")


def work_that_is_too_large(work, without, send):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes\nmore")

"""Which line of Python the main thread was at: sampled, or traced line by line.

Lines of the standard library, of torch and of other installed packages stand for whoever called them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import nsa_compile


@dataclass(frozen=True)
class Place:
    """A line of a function."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


Mark = tuple[float, Place | None]
"""A moment, as of ``time.perf_counter_ns``, and where; ``None`` for torch's own machinery."""

_OURS = str(Path(nsa_compile.__file__).parent) + os.sep
_INSTALLED = tuple(
    {*(str(Path(sysconfig.get_path(name))) + os.sep for name in ("stdlib", "purelib", "platlib")),
     str(Path(torch.__file__).parent) + os.sep}
)  # fmt: skip
# What runs compiled code, differentiates and updates: its time is the price of a call, wherever that stands.
_MACHINERY = tuple(
    str(Path(torch.__file__).parent / name) + os.sep
    for name in ("_dynamo", "_functorch", "_inductor", "autograd", "optim")
)
SAMPLE_SECONDS = 0.0005


class Sampler:
    """Looks where the thread that enters the context is, over and over, from another thread."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._stop = threading.Event()

    def __enter__(self) -> Sampler:
        watched = threading.get_ident()
        self._switch = sys.getswitchinterval()
        # A thread in a Python loop hands the interpreter over this often, and no sooner.
        sys.setswitchinterval(SAMPLE_SECONDS)
        self._thread = threading.Thread(target=self._look, args=(watched,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._switch)

    def _look(self, watched: int) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            frame = sys._current_frames().get(watched)
            self.marks.append((time.perf_counter_ns(), _place(frame)))


class LineTracer:
    """Notes each line that the thread that enters the context comes to, in functions called from then on."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def __enter__(self) -> LineTracer:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return None if _is_library(frame.f_code) else self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        # A function that returns leaves its caller where it was.
        self.marks.append((time.perf_counter_ns(), _place(frame.f_back if event == "return" else frame)))
        return self._line


def _place(frame: FrameType | None) -> Place | None:
    """The innermost line outside of libraries, or None where torch's machinery runs inside it."""
    while frame is not None and _is_library(frame.f_code):
        if frame.f_code.co_filename.startswith(_MACHINERY) or _is_generated(frame.f_code):
            return None
        frame = frame.f_back
    return None if frame is None else Place(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_library(code: CodeType) -> bool:
    name = code.co_filename
    return (name.startswith(_INSTALLED) and not name.startswith(_OURS)) or _is_generated(code)


def _is_generated(code: CodeType) -> bool:
    """Whether a compiler wrote the function: Inductor's wrappers, and what has no file."""
    return code.co_filename.startswith(("<", cache_dir() + os.sep))

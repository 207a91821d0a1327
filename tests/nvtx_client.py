"""A real NVTX client, built from C, and checks of what it saw."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvtx_client.c"


@dataclass(frozen=True)
class Event:
    begins: bool
    domain: str
    name: str
    category: str
    payload: int
    thread: int
    ns: int


@dataclass(frozen=True)
class Range:
    name: str
    category: str
    payload: int
    thread: int
    start: int
    end: int
    around: tuple[str, ...]  # the names of the ranges it lies in, outermost first


def build_client(folder: Path) -> Path:
    """The compiled client; skips where it cannot be built."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    places = [*packages.glob("*/include"), *Path("/usr/local").glob("cuda*/include"), Path("/usr/include")]
    headers = next((place for place in places if (place / "nvtx3/nvToolsExt.h").exists()), None)
    if headers is None:
        pytest.skip("NVTX's C headers are not installed (the package nvidia-nvtx or CUDA brings them)")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "nvtx_client.so"
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{headers}", "-o", library, SOURCE], check=True)
    return library


def read_events(log: Path) -> list[Event]:
    rows = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
    return [Event(row[0] == "B", row[1], row[2], row[3], int(row[4]), int(row[5]), int(row[6])) for row in rows]


def ranges_of(events: list[Event]) -> list[Range]:
    """The ranges of all threads. Fails unless each push has its pop and each pop its push."""
    open_ones: dict[int, list[Event]] = defaultdict(list)
    found = []
    for event in events:
        assert event.domain == "nsa"
        stack = open_ones[event.thread]
        if event.begins:
            stack.append(event)
            continue
        assert stack, f"a pop without a push in thread {event.thread}"
        begin = stack.pop()
        around = tuple(outer.name for outer in stack)
        found.append(Range(begin.name, begin.category, begin.payload, begin.thread, begin.ns, event.ns, around))
    left = [event.name for stack in open_ones.values() for event in stack]
    assert not left, f"left open: {left}"
    return sorted(found, key=lambda r: r.start)


def coverage(step: Range, found: list[Range]) -> float:
    """The fraction of a step that ranges directly inside of it cover."""
    inside = [r for r in found if r.around == ("step",) and step.start <= r.start and r.end <= step.end]
    return sum(r.end - r.start for r in inside) / (step.end - step.start)

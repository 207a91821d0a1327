"""Named ranges of a run, for profilers.

Each range is an NVTX range of the domain ``nsa``, which Nsight Systems and other NVTX clients show, and, while torch's
profiler records, a region of the same name there, so that time is attributed the same way without a GPU. Its
category says what kind of work it names, its payload is the step.

Ranges belong to the thread that opens them: a backward pass may run in threads of autograd. The end of a range closes
what was left open inside it, by an exception for instance, and an end without a beginning is ignored, so the ranges of
a thread are balanced and nested whatever happens. Nothing is opened before :func:`enable`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from torch.autograd import profiler

DOMAIN = "nsa"
Category = Literal[
    "step", "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "pass"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
_COLORS = dict(
    zip(CATEGORIES, ("gray", "yellow", "green", "blue", "red", "purple", "orange", "cyan", "white"), strict=True)
)


@dataclass(frozen=True)
class _Open:
    """A range that was opened and not yet closed."""

    name: str
    step: int
    region: Any  # the profiler's, while one records


class _Stack(threading.local):
    """The open ranges of a thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[_Open] = []


_stack = _Stack()
_enabled = False
_step = 0


def enable(on: bool = True) -> None:
    """Open ranges from now on, or no longer."""
    global _enabled
    _enabled = on


def push(name: str, category: Category) -> None:
    """Open a range in this thread; nothing unless ranges are enabled."""
    if not _enabled:
        return
    # Left open in a thread of autograd by a step that failed: nobody else could close them.
    while _stack.open and _stack.open[-1].step != _step:
        _close()
    region = None
    if profiler._is_profiler_enabled:
        region = profiler.record_function(name)
        region.__enter__()
    attributes = _attributes(name, category)
    if attributes is not None:  # no NVTX client, no attributes
        attributes.payload = _step
    _domain().push_range(attributes)
    _stack.open.append(_Open(name, _step, region))


def pop(name: str) -> None:
    """Close the innermost range of this name in this thread, and what was left open inside it."""
    if any(entry.name == name for entry in _stack.open):
        while _close() != name:
            pass


@contextmanager
def span(name: str, category: Category) -> Iterator[None]:
    """A range around a block of code."""
    push(name, category)
    try:
        yield
    finally:
        pop(name)


@contextmanager
def step(number: int) -> Iterator[None]:
    """The range ``step``, whose number is the payload of every range from now on."""
    global _step
    while _stack.open:
        _close()
    _step = number
    with span("step", "step"):
        yield


def rest(name: str, category: Category) -> None:
    """Open a range that ends with the one now open in this thread; nothing where none is."""
    if _stack.open:
        push(name, category)


def _close() -> str:
    closed = _stack.open.pop()
    _domain().pop_range()
    if closed.region is not None:
        closed.region.__exit__(None, None, None)
    return closed.name


@cache
def _domain() -> Any:
    import nvtx  # by whoever opens a range; a program without ranges needs no such package

    return nvtx.get_domain(DOMAIN)


@cache
def _attributes(name: str, category: Category) -> Any:
    domain = _domain()
    return domain.get_event_attributes(message=name, category=domain.get_category_id(category), color=_COLORS[category])

"""Where the time of a step goes, phase by phase."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler

from nsa_compile import ranges
from nsa_compile.train.records.rows import PHASES

OTHER = "other"


class CompileClock:
    """Seconds in which torch compiled, or a compiled block was compared with its loop, since the clock was entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> CompileClock:
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed them
            callback_handler.remove_start_callback(self._begin)
            callback_handler.remove_end_callback(self._end)

    def _begin(self, _: CallbackArgs) -> None:
        self._began = time.perf_counter()

    def _end(self, _: CallbackArgs) -> None:
        self.seconds += time.perf_counter() - self._began


class PhaseTimer:
    """Seconds of each phase of a step: wall time on the CPU, the device's own time on CUDA.

    A step begins with its first phase and ends with :meth:`step_done`; what lies between steps counts for none. A phase
    within another one is taken out of it, and what no phase covers is "other", so that all of them add up to the step::

        with timer.phase("forward"):
            loss = …
        with timer.phase("backward"):
            loss.backward()
        phases = timer.step_done()

    Args:
        device: on CUDA, moments are events on the current stream, which cost no synchronization, and a step ends with
            its last phase.
        on_phase: called with the name of a phase whenever one begins, "other" included.
    """

    def __init__(self, device: torch.device, on_phase: Callable[[str], None] | None = None) -> None:
        self._on_cuda = device.type == "cuda"
        self._now: Callable[[], Any] = _cuda_event if self._on_cuda else time.perf_counter
        self._on_phase = on_phase
        self._phase = OTHER
        self._marks: list[tuple[str, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside for the phase ``name``, one of ``PHASES``, which is a range of that name, too."""
        outer = self._phase
        self._enter(name)
        try:
            with ranges.span(name, cast(ranges.Category, name)):
                yield
        finally:
            self._enter(outer)

    def rest_is(self, name: str) -> None:
        """Count the rest of the present phase for ``name``: for what is called in the middle of a backward pass."""
        self._enter(name)
        ranges.rest(name, cast(ranges.Category, name))

    def step_done(self) -> dict[str, float] | None:
        """End the step: seconds by phase, in the order of ``PHASES``.

        ``None`` for a step without a phase, and on CUDA where the device has not yet done all of it: nothing waits
        here, so call it after what waits for the step.
        """
        marks = self._marks
        self._marks, self._phase = [], OTHER
        if not marks:
            return None
        if not self._on_cuda:
            marks.append((OTHER, self._now()))
        elif not marks[-1][1].query():  # an event recorded here would never be through already
            return None
        phases = dict.fromkeys(PHASES, 0.0)
        for (name, start), (_, end) in itertools.pairwise(marks):
            phases[name] += start.elapsed_time(end) / 1000 if self._on_cuda else end - start
        return phases

    def _enter(self, name: str) -> None:
        if name not in PHASES:
            raise ValueError(f"phase {name!r} must be one of {', '.join(PHASES)}")
        self._marks.append((name, self._now()))
        self._phase = name
        if self._on_phase is not None:
            self._on_phase(name)


def _cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

"""Times on a device: in turns, with a cold L2 cache, forward and backward told apart inside one training step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa_compile.profiles.measure import not_measured, ran_out_of_memory, summarize

REPEATS = (3, 20)  # at least, and at most
DIRECTIONS = ("forward", "backward", "both")
FLUSHED_BYTES = 256 * 2**20  # more than the L2 cache of any GPU so far


class Stopwatch:
    """Marks moments: CUDA events on a GPU, so that nothing waits between them, the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSHED_BYTES if cuda else 0, dtype=torch.int8, device=device)

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Between neighbouring marks."""
        pairs = list(itertools.pairwise(marks))
        if self.device.type != "cuda":
            return [end - start for start, end in pairs]
        marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def step(self, attention: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> dict[str, float]:
        """One forward and backward pass with a cold cache."""
        self._flush.zero_()
        marks = [self.mark()]
        out = attention(*inputs)
        marks.append(self.mark())
        torch.autograd.grad(out, inputs, grad, allow_unused=True)
        marks.append(self.mark())
        forward, backward = self.seconds(marks)
        return {"forward": forward, "backward": backward, "both": forward + backward}


def time_in_turns(
    works: Mapping[str, Callable[..., Tensor]],
    inputs: Sequence[Tensor],
    grad: Tensor,
    device: torch.device,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Each of `works` in turn until `seconds` are over, within `REPEATS`, after two steps each that do not count.

    Returns, for each, the directions with median, range and samples; what does not fit into memory says so.
    """
    stopwatch = Stopwatch(device)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    failed: set[str] = set()
    end = None
    for turn in range(-2, REPEATS[1]):
        if turn == 0:
            end = time.monotonic() + seconds
        if end is not None and turn >= REPEATS[0] and time.monotonic() > end:
            break
        for name, attention in works.items():
            if name in failed:
                continue
            try:
                sample = stopwatch.step(attention, inputs, grad)
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                failed.add(name)
                continue
            if turn >= 0:
                samples[name].append(sample)
    return {
        name: not_measured("does not fit into memory")
        if name in failed
        else {direction: summarize([s[direction] for s in samples[name]]) for direction in DIRECTIONS}
        for name in works
    }

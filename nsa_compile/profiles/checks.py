"""What can be wrong with a compiled block: its numbers, that it raises, its speed; the checks for `blame.bisect`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa_compile.errors import UserError
from nsa_compile.passes.pipeline import pipeline
from nsa_compile.profiles.blame import Check
from nsa_compile.profiles.measure import seconds_of, summarize
from nsa_compile.profiles.probe import Probe, errors, with_passes


def numeric(probe: Probe) -> Check:
    """Values and gradients are those of the uncompiled block in float64, up to rounding as `probe.errors` bounds it."""
    loop, exact = probe.loop(), probe.exact()

    def check(options: Mapping[str, Any]) -> bool:
        found = errors(probe.outcome(probe.compiled(**options)), loop, exact, probe.dtype)
        if not found.explained:
            raise ArithmeticError(
                f"error {found.value:.2g} of the output and {found.gradient:.2g} of the gradients, "
                f"{found.band:,.3g} times what rounding explains"
            )
        return True

    return check


def exception(probe: Probe) -> Check:
    """The block compiles and runs, forward and backward."""

    def check(options: Mapping[str, Any]) -> bool:
        probe.outcome(probe.compiled(**options))
        return True

    return check


@dataclass(frozen=True)
class Slowness:
    """How fast the block is after each prefix of the pipeline.

    Attributes:
        timings: seconds of forward and backward by number of passes, as `measure.summarize` tells them.
        best: the number of passes after which it is fastest.
        factor: how many times slower counts as slow.
    """

    timings: list[dict[str, Any]]
    best: int
    factor: float

    def is_slow(self, timing: Mapping[str, Any]) -> bool:
        """Slower than the best by the factor, and its fastest run slower than the slowest of the best."""
        best = self.timings[self.best]
        return timing["median_s"] > self.factor * best["median_s"] and timing["min_s"] > best["max_s"]

    @property
    def verdict(self) -> str:
        last, best = self.timings[-1], self.timings[self.best]
        ratio = last["median_s"] / best["median_s"]
        n = len(last["samples_s"])
        if self.best == len(self.timings) - 1:
            return f"all passes together are the fastest: {last['median_s'] * 1e3:.3g} ms (median of {n})"
        numbers = (
            f"{last['median_s'] * 1e3:.3g} ms after all passes and {best['median_s'] * 1e3:.3g} ms after {self.best} "
            f"(medians of {n}): {ratio:.2f} times"
        )
        return f"slower: {numbers}" if self.is_slow(last) else f"no significant difference: {numbers}"


def slowness(probe: Probe, disable: Sequence[str], factor: float, repeats: int, **options: Any) -> Slowness:
    """Time the block after each prefix of the pipeline."""
    timings = []
    for count in range(len(pipeline()) + 1):
        torch._dynamo.reset()
        timings.append(time_block(probe, repeats, disable=with_passes(count, disable), **options))
    medians = [t["median_s"] for t in timings]
    return Slowness(timings, medians.index(min(medians)), factor)


def slow(probe: Probe, found: Slowness, repeats: int) -> Check:
    """The block is about as fast as after the best prefix."""

    def check(options: Mapping[str, Any]) -> bool:
        timing = time_block(probe, repeats, **options)
        if found.is_slow(timing):
            times = timing["median_s"] / found.timings[found.best]["median_s"]
            raise TimeoutError(
                f"{timing['median_s'] * 1e3:.3g} ms forward and backward, {times:.1f} times that after "
                f"{found.best} passes"
            )
        return True

    return check


def time_block(probe: Probe, repeats: int, **options: Any) -> dict[str, Any]:
    """Seconds of forward and backward, compilation and a first run excluded."""
    block = probe.compiled(**options)

    def work() -> None:
        block.zero_grad(set_to_none=True)
        probe.backward(probe.forward(block)[1])

    for _ in range(2):  # compiles, forward and backward; then warms up
        work()
    return summarize([seconds_of(work, probe.device) for _ in range(repeats)])


def load_check(name: str) -> Check:
    """The function that `FILE:FUNCTION` names.

    Raises:
        UserError: there is no such file or function, or the file cannot be imported.
    """
    file, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        raise UserError(f"--script '{name}' must be FILE:FUNCTION, for example failing.py:check")
    if not Path(file).is_file():
        raise UserError(f"--script '{name}': there is no file '{file}'; check the path")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"--script '{name}': '{file}' is no Python file; give it the ending .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--script '{name}' cannot be imported: {type(error).__name__}: {error}; correct it") from None
    check = getattr(module, function, None)
    if not callable(check):
        raise UserError(f"--script '{name}': '{file}' has no function '{function}'; define {function}(options) there")
    return check

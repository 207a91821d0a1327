"""What can be wrong with a compiled block: its numbers, that it raises, its speed; the checks for `blame.bisect`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa_compile.errors import UserError
from nsa_compile.passes.bisection import passes_asked_for, without_passes
from nsa_compile.profiles.blame import Check
from nsa_compile.profiles.measure import interleave, show
from nsa_compile.profiles.probe import Probe, errors


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


class Slow:
    """The block is about as fast as after the best prefix of the pipeline.

    Each call times the two in turns, forward and backward, with compilation and a first run excluded. Slow is what
    takes more than `factor` times as long, by the medians of `repeats` runs, and is in its fastest run slower than the
    other in its slowest. `verdict` describes the latest comparison.
    """

    def __init__(self, probe: Probe, *, factor: float, repeats: int, disable: Sequence[str], nested: str) -> None:
        self.probe, self.factor, self.repeats = probe, factor, repeats
        names = passes_asked_for({})
        prefixes = [{"disable": without_passes(names[n:], disable), "nested": nested} for n in range(len(names) + 1)]
        medians = [self._time({"alone": options})["alone"]["median_s"] for options in prefixes]
        self.best = medians.index(min(medians))
        self.reference = prefixes[self.best]
        self.verdict = ""

    def __call__(self, options: Mapping[str, Any]) -> bool:
        timing = self._time({"reference": self.reference, "this": options})
        this, reference = timing["this"], timing["reference"]
        ratio = this["median_s"] / reference["median_s"]
        slower = ratio > self.factor and this["min_s"] > reference["max_s"]
        self.verdict = (
            f"{'slower' if slower else 'no significant difference'}: forward and backward take {show(this)} ms, after "
            f"the best {self.best} passes {show(reference)} ms (median, range, n = {self.repeats}): {ratio:.2f} times"
        )
        if slower:
            raise TimeoutError(self.verdict)
        return True

    def _time(self, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        torch._dynamo.reset()
        blocks = {name: self.probe.compiled(**options) for name, options in variants.items()}

        def work(block: nn.Module) -> None:
            block.zero_grad(set_to_none=True)
            self.probe.backward(self.probe.forward(block)[1])

        works = {name: partial(work, block) for name, block in blocks.items()}
        for first in works.values():
            first()  # compiles; what `interleave` does before it counts is the warm-up
        return interleave(works, self.repeats, self.probe.device)


def load_check(name: str) -> Check:
    """The function that `FILE:FUNCTION` names; a UserError where there is none, or its file cannot be imported."""
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

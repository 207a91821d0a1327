"""Checking the properties on examples for as long as there is time: the configuration first, then around it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.errors import Flaky, Unsatisfiable

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError
from nsa_compile.verification.examples import neighbours, options, reduced
from nsa_compile.verification.properties import PROPERTIES, Ambiguous, Broken, Setting

SCHEMA = 1
# For making a failing example smaller, once there is one.
SHRINK_S = 20.0
MANY = 100_000


@dataclass
class PropertyResult:
    """What became of one property.

    Attributes:
        name: see `PROPERTIES`; title: in words.
        ok: whether it held in all examples.
        examples: how many were run.
        error, bound: of the result that came closest to its bound, as root mean squares; 0 where equality is bitwise.
        message: what was wrong with the smallest failing example.
        command: what checks that example again.
    """

    name: str
    title: str
    ok: bool = True
    examples: int = 0
    error: float = 0.0
    bound: float = 0.0
    seconds: float = 0.0
    message: str | None = None
    command: str | None = None


class _OutOfTime(BaseException):
    """Ends hypothesis' search at once; it takes an Exception for a finding."""


def verify(
    config: RunConfig,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    seconds: float | None = 120.0,
    examples: int | None = None,
    seed: int = 0,
    properties: Sequence[str] = tuple(PROPERTIES),
    config_path: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Check the equivalence properties of the compiler on this machine.

    Args:
        config: what is configured; its first example is this, made small.
        dtype: ``"float32"``, ``"bf16"`` or ``"float64"``; float64 is always checked as well where it is the judge.
        seconds: time for all properties together; each has at least one example.
        examples: instead, this many examples of each property.
        properties: names of `PROPERTIES`.
        config_path: the file that `config` comes from, for the command that repeats a failure.
        tell: is handed a line about each property.

    Returns:
        Plain data: ``schema``, ``ok``, ``device``, ``dtype``, ``seed``, ``sizes`` of the first example, and
        ``properties``, a :class:`PropertyResult` each.

    Raises:
        UserError: no example shows anything about one of the properties.
    """
    setting = Setting(torch.device(device), dtype)
    first = reduced(config)
    results = []
    end = None if seconds is None or examples is not None else time.monotonic() + seconds
    for place, name in enumerate(properties):
        now = time.monotonic()
        share = None if end is None else now + max(0.0, end - now) / (len(properties) - place)
        tell(f"{name}: {_title(name)}")
        search = _Search(name, setting, share, examples)
        search.run(config, first, seed)
        result = search.result
        if result.ok and not result.examples:
            raise UserError(
                f"{name} was checked on no example: in each that was drawn rounding decides which blocks are selected; "
                f"draw others with another --seed than {seed}, or more with --minutes"
            )
        result.seconds = round(time.monotonic() - now, 3)
        if search.failing is not None:
            again = ["nsa-compile", "verify", *options(search.failing, config_path)]
            again += ["--property", name, "--examples", "1", "--device", device, "--dtype", dtype]
            result.command = " ".join(again)
        tell(f"{name}: {'holds' if result.ok else 'BROKEN'}, {result.examples} examples, {result.seconds:.1f} s")
        results.append(result)
    pattern = first.model.pattern
    return {
        "schema": SCHEMA,
        "ok": all(result.ok for result in results),
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "sizes": {
            "seq_len": first.train.seq_len,
            "batch_size": first.train.batch_size,
            "layers": first.model.n_layers,
            "heads": first.model.n_heads,
            "groups": first.model.n_kv_heads,
            "head_dim": first.model.head_dim,
            "pattern": asdict(pattern),
            "nested": first.compile.nested,
            "threads": torch.get_num_threads(),
        },
        "properties": [asdict(result) for result in results],
    }


def _title(name: str) -> str:
    return (PROPERTIES[name].__doc__ or "").split("\n")[0].rstrip(".")


class _Search:
    """The examples of one property, and the smallest that breaks it."""

    def __init__(self, name: str, setting: Setting, end: float | None, examples: int | None) -> None:
        self.check, self.setting, self.end, self.limit = PROPERTIES[name], setting, end, examples
        self.result = PropertyResult(name, _title(name))
        self.failing: RunConfig | None = None
        self.longest = 0.0

    def run(self, config: RunConfig, first: RunConfig, seed: int) -> None:
        """Check the first example, then random ones until time or number is used up."""
        for attempt in range(10):  # of which hardly one is ambiguous
            try:
                self._try(first.changed(run={"seed": first.run.seed + attempt}))
                break
            except Ambiguous:
                continue
            except Broken:
                return
        more = MANY if self.limit is None else self.limit - 1
        if more < 1:
            return

        @hypothesis.seed(seed)
        @settings(
            max_examples=more,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
        )
        @hypothesis.given(neighbours(config))
        def search(example: RunConfig) -> None:
            if self.end is not None and time.monotonic() + self.longest > self.end:
                raise _OutOfTime
            try:
                self._try(example)
            except Ambiguous:
                hypothesis.reject()

        # What fails now and then is broken, too; where nothing could be checked, `verify` says so.
        with contextlib.suppress(Broken, _OutOfTime, Flaky, Unsatisfiable):
            search()

    def _try(self, example: RunConfig) -> None:
        begin = time.monotonic()
        try:
            measured = self.check(example, self.setting)
        except Ambiguous:
            raise
        except Exception as error:
            if self.failing is None:
                self.end = min(self.end or begin + SHRINK_S, begin + SHRINK_S)
            if self.failing is None or _work(example) <= _work(self.failing):
                self.failing = example
                said = str(error).strip().split("\n")[0]
                self.result.message = said if isinstance(error, Broken) else f"{type(error).__name__}: {said}"
            self.result.ok = False
            raise Broken from error
        finally:
            if self.result.examples:  # the first one loads and compiles what all need
                self.longest = max(self.longest, time.monotonic() - begin)
        self.result.examples += 1
        result = self.result
        if result.bound == 0 or measured.error * result.bound > result.error * measured.bound:
            result.error, result.bound = measured.error, measured.bound


def _work(example: RunConfig) -> int:
    return example.train.seq_len * example.train.batch_size * example.model.n_heads * example.model.n_layers

"""Which pass, and which single rewrite of it, makes a check fail."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nsa_compile.backend import last_report, parse_options
from nsa_compile.errors import UserError
from nsa_compile.passes.bisection import first_failing, passes_asked_for, without_passes

# `check(options)` compiles with these options of `nsa_compile.compile`, runs, and returns False or raises on failure.
Check = Callable[[dict[str, Any]], bool | None]


@dataclass(frozen=True)
class Blame:
    """What makes a check fail.

    Attributes:
        pass_name: the pass; None where the check fails without any pass, so that none of them is to blame.
        rewrite: the number of the rewrite, counted from 1 over all passes as `stop_after` counts; None where the pass
            fails before its first rewrite, or does not ask whether it may rewrite.
        match: what that rewrite says of itself, with `file:line` where it knows; None where it raised instead.
        problem: how the check failed: the first line of what it raised, or that it returned False.
        before: the graph before that rewrite (or pass), as readable Python.
        after: the graph after it; None where it raised.
        options: options under which the check fails, and with one rewrite less (or without the pass) does not.
    """

    pass_name: str | None
    rewrite: int | None
    match: str | None
    problem: str
    before: str | None
    after: str | None
    options: dict[str, Any]
    checks: int


def bisect(check: Check, *, first: int = 0, **options: Any) -> Blame | None:
    """Find the pass and the single rewrite that make a check fail, or None where it does not fail.

    Args:
        check: compiles a program with the options it is given (`nsa_compile.compile(f, **options)`), runs it, and
            returns False or raises if the result is wrong. It must judge the same every time.
        first: how many passes a pipeline that is known to do well has; 0, the loop itself, unless one looks for
            slowness, where the loop is the slowest.
        options: further options to compile with, such as `nested="eager"` or `disable=[...]`.

    For a program of several graphs, the answer is about the graph compiled last; `stop_after` counts in each.

    Raises:
        ValueError: an unknown option, or a value it cannot take.
        UserError: the check does not judge the same every time.
    """
    parse_options(options)
    names = passes_asked_for(options)
    disabled = tuple(options.pop("disable", ()))
    with tempfile.TemporaryDirectory() as folder:

        @cache  # each choice of options runs once
        def run(disable: tuple[str, ...], stop_after: int | None) -> _Trial:
            return _run(check, options | {"disable": disable, "stop_after": stop_after}, Path(folder) / str(checks()))

        def checks() -> int:
            return run.cache_info().currsize

        def after_passes(count: int, stop_after: int | None = None) -> _Trial:
            return run(without_passes(names[count:], disabled), stop_after)

        whole = after_passes(len(names))
        if whole.problem is None:
            return None
        start = after_passes(first)
        if start.problem is not None:
            return Blame(None, None, None, start.problem, None, None, start.options, checks())
        bad = first_failing(lambda count: after_passes(count).problem is not None, first, len(names))
        good = bad - 1
        name = names[good]

        # Rewrites of the passes before, after which this one may do none, then one, then two ...
        none = after_passes(good).rewrites
        idle = after_passes(bad, none)
        if idle.problem is not None:
            failing = after_passes(bad)
            return Blame(
                name, None, None, failing.problem or idle.problem,
                failing.graph(name, "before"), failing.graph(name, "after"), failing.options, checks(),
            )  # fmt: skip
        fine, more = none, 1
        while (trial := after_passes(bad, none + more)).problem is None:
            if trial.rewrites < none + more:  # all there are, and yet it does not fail
                raise UserError(
                    "the check failed once and passed once on the same program; make it judge the same every time"
                )
            fine, more = none + more, more * 2
        wrong = first_failing(lambda count: after_passes(bad, count).problem is not None, fine, none + more)
        without, failing = after_passes(bad, wrong - 1), after_passes(bad, wrong)
        assert failing.problem is not None
        return Blame(
            name, wrong, failing.match(wrong), failing.problem,
            without.graph(name, "after"), failing.graph(name, "after"), failing.options, checks(),
        )  # fmt: skip


@dataclass(frozen=True)
class _Trial:
    """One run of the check: how it failed, if it did, and what the passes did in it."""

    problem: str | None
    options: dict[str, Any]
    matches: tuple[str, ...]
    folder: Path

    @property
    def rewrites(self) -> int:
        return len(self.matches)

    def match(self, rewrite: int) -> str | None:
        return self.matches[rewrite - 1] if rewrite <= len(self.matches) else None

    def graph(self, name: str, when: str) -> str | None:
        """The graph before or after a pass; None where compiling did not come that far."""
        found = list(self.folder.glob(f"*_{name}_{when}.py"))
        return found[0].read_text() if found else None


def _run(check: Check, options: dict[str, Any], folder: Path) -> _Trial:
    """Run the check once; the passes leave their graphs in `folder`."""
    earlier = last_report()
    torch._dynamo.reset()
    try:
        passed = check({**options, "cache": False, "dump_dir": str(folder)})
        problem = "the check returned False" if passed is False else None
    except Exception as error:
        problem = first_line(error)
    report = last_report()
    # Where a pass raised there is no report of this compilation.
    matches = [m for p in report.passes for m in p.matches] if report and report is not earlier else []
    return _Trial(problem, options, tuple(matches), folder)


def first_line(error: BaseException) -> str:
    """What was raised, as one line; what Dynamo wraps around an error of a backend is taken off."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    text = str(inner).strip() or repr(inner)
    return f"{type(inner).__name__}: {text.splitlines()[0]}"

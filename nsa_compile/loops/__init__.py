"""Loops as people write them: `loop` makes one program of a `for` loop over positions."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from nsa_compile.backend import IS_LOOPED, keep_report, parse_options
from nsa_compile.capture.refusals import ScanNotCompiled
from nsa_compile.loops.aliases import share
from nsa_compile.loops.items import Anything, Items
from nsa_compile.loops.lists import GrowingList, IsRead, NotRows, elements_of
from nsa_compile.loops.memos import Memos
from nsa_compile.loops.paths import Explorer
from nsa_compile.loops.program import Program, Refused, compile_loop, run_program
from nsa_compile.loops.source import NotALoop, Variables, cut_out_loop
from nsa_compile.loops.state import (
    ITEMS,
    NotFollowed,
    Path,
    Same,
    Snapshot,
    Unseen,
    cells_of,
    distinct,
    drop,
    in_words,
    is_global,
    look,
)
from nsa_compile.memory import memories
from nsa_compile.modes import unobserved, users_mode
from nsa_compile.ops.loop import LoopNotTraced
from nsa_compile.passes.report import Report
from nsa_compile.workarounds import TRACING

__all__ = ["LoopDeclined", "loop"]

log = logging.getLogger("nsa_compile")
SEQUENCES = "a range, a tensor, x.unbind(…), a list of tensors of one shape, or zip, enumerate or reversed of these"


class LoopDeclined(ValueError):
    """A loop that is left as it is written, in one line: what it does, where, and what to write instead."""


def loop(function: Any = None, *, over: str | None = None, **options: Any) -> Any:
    """Compile the `for` loop of a function, as it is written.

    The loop may append to lists and read them, let tensors grow by `torch.cat`, slice them at its position, branch on
    positions, sizes and other Python integers, and keep its state in tuples, lists, dicts and objects such as a cache.
    At the first call, and at the first one with other sizes, its step is traced with the position symbolic, and all
    steps become one graph, which the passes of `nsa_compile.compile` batch. Everything around the loop runs as it is
    written.
    Gradients flow through the loop as they do through the one that is written.

    Args:
        function: a function, or a bound method, with one `for` loop over a `range`, a tensor, `x.unbind(…)`,
            `x.split(…)`, `x.chunk(…)`, a list of tensors of one shape, or `zip`, `enumerate` or `reversed` of these.
        over: the variable of the loop that is meant, where there are several.
        options: those of `nsa_compile.compile`. With `on_decline="error"` a loop that cannot be compiled is an error;
            otherwise it runs as it is written, and one line of the log says why.

    Raises:
        LoopDeclined: there is no such loop, or a `break`, `return` or `yield` leaves it; with `on_decline="error"`,
            what else keeps the loop from being compiled.
    """
    if function is None:
        return functools.partial(loop, over=over, **options)
    parse_options(options)
    if isinstance(function, torch.nn.Module):
        raise LoopDeclined("nsa_compile.loop takes a function: write module.forward = nsa_compile.loop(module.forward)")
    if isinstance(function, types.MethodType):
        return types.MethodType(loop(function.__func__, over=over, **options), function.__self__)
    runner = _Runner(options)
    try:
        rewritten, runner.place = cut_out_loop(function, runner, over)
    except NotALoop as why:
        raise LoopDeclined(
            f"nsa_compile.loop: {getattr(function, '__qualname__', function)} cannot be compiled: {why}"
        ) from why
    looped = functools.wraps(function)(_under_dynamo_as_it_is(rewritten))
    setattr(looped, IS_LOOPED, True)
    return looped


def _under_dynamo_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, hidden from Dynamo: it is traced here."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    why = "nsa_compile.loop compiles it by itself; compile what is around it with fullgraph=False, or not at all"
    return torch.compiler.disable(run, reason=why)


# A loop that reads what changes at every call would be compiled at every call.
MOST_RENEWED = 8


class _Runner(Unseen):
    """Runs the loop of one function, as a program where there is one."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.place = options, ""
        self.programs: dict[Any, Program | NotFollowed] = {}
        self.rows: dict[Any, set[Path]] = {}  # the lists that a program takes as rows
        self.renewed: dict[Any, int] = {}  # how often a program was made again, because something else had changed

    def __call__(self, items: Items, step: types.FunctionType, variables: Variables) -> None:
        if _is_traced() or (not isinstance(items, Anything) and len(items) < 2):
            _as_written(items, step)
            return
        try:
            if isinstance(items, Anything):
                kind = type(items.as_written()).__name__
                of = f"{kind} of something else" if kind in ("zip", "enumerate", "reversed") else kind
                raise NotFollowed(f"it goes over a {of}; it may go over {SEQUENCES}")
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise NotFollowed("it is called within a transform of torch.func, such as torch.vmap")
            if torch.jit.is_tracing():
                raise NotFollowed("it is called within torch.jit.trace")
            on = torch.overrides._get_current_function_mode_stack()
            if (mode := users_mode(on)) is not None:
                raise NotFollowed(f"a TorchFunctionMode ({type(mode).__name__}) is on around it")
            drop(cells_of(step), variables.temporary)
            by_position = items.stacked()
            cells_of(step)[ITEMS].cell_contents = by_position
            now = look(step)
            elsewhere = {path for path in now.containers if _is_held_elsewhere(now, path)}
            key = _key(now, len(items)), *(mode.device for mode in on)
        except NotFollowed as why:
            self._left_as_written(why)
            _as_written(items, step)
            return
        program = self._known(key)
        if program is None:
            with TRACING:  # a trace lends stand-ins to the functions and classes that all threads call
                program = self._known(key)  # another thread may have compiled it meanwhile
                if program is None:
                    program = self.programs[key] = self._compiled(key, items, now, step, variables)
        if not isinstance(program, NotFollowed) and (lost := program.lost & elsewhere):
            path = min(lost, key=str)
            kind = type(now.containers[path].value).__name__
            what = f"another {kind} takes the place of {in_words(path)}, which something else holds, too"
            program = self._left_as_written(NotFollowed(what))
        if isinstance(program, NotFollowed):
            _as_written(items, step)
            return
        try:
            with _as_rows(now, self.rows[key], step) as given:
                finals, lists = run_program(program, given, len(items))
        except Refused as why:
            self._left_as_written(NotFollowed(str(why)))
            _as_written(items, step)
            return
        if rows := {path: now.containers[path].value for path in self.rows[key]}:
            late = {place: what for place, what in program.shared.items() if place.path in rows}
            share(late, given, finals, {**lists, **rows})

    def _left_as_written(self, why: NotFollowed) -> NotFollowed:
        """What is said once of calls that are not compiled, though others may be."""
        if why.reason not in self.programs:
            self.programs[why.reason] = self._declined(NotFollowed(why.reason, why.place))
        return why

    def _known(self, key: Any) -> Program | NotFollowed | None:
        program = self.programs.get(key)
        if not isinstance(program, Program) or (what := program.watched.changed()) is None:
            return program
        self.renewed[key] = self.renewed.get(key, 0) + 1
        if self.renewed[key] <= MOST_RENEWED:
            return None
        self.programs[key] = found = self._declined(NotFollowed(f"{what}, which it reads, changes from call to call"))
        return found

    def _compiled(
        self, key: Any, items: Items, now: Snapshot, step: types.FunctionType, variables: Variables
    ) -> Program | NotFollowed:
        lists = items.lists()
        if any(c.value is x for c in now.containers.values() if c.kind == "list" for x in lists):
            return self._declined(NotFollowed("it goes over a list that the step can change; go over tuple(…) of it"))
        rows: set[Path] = set()
        never: set[Path] = set()
        memos = Memos()
        first: NotFollowed | None = None
        while True:
            try:
                with unobserved(), _without_inference_mode(), _as_rows(now, rows, step):
                    explorer = Explorer(step, len(items), variables, never, memos)
                    exploration = explorer.explore()
                    if lists and exploration.mutated():
                        raise NotFollowed("it goes over a list of tensors, and writes in place, perhaps to one of them")
                    program = compile_loop(exploration, explorer.watched, self.options, copied=bool(lists))
                self.rows[key] = rows
                return program
            except NotRows as error:
                declined = rows & {error.path} or set(rows)  # it may be a list that is made of one of them
                rows -= declined
                never |= declined | {error.path}
                if error.reason:
                    first = first or NotFollowed(error.reason)
            except IsRead as error:
                rows.add(error.path)
            except ScanNotCompiled as why:
                if not isinstance(cause := why.__cause__, LoopNotTraced):
                    raise
                return self._declined(NotFollowed(cause.reason, cause.line))
            except NotFollowed as why:
                # Without its traceback, which would keep this frame and the tensors of this call alive.
                first = first or NotFollowed(why.reason, why.place)
                if not rows:
                    return self._declined(first)
                never, rows = never | rows, set()  # a list of few elements may do as it is

    def _declined(self, why: NotFollowed) -> NotFollowed:
        line = f"the loop at {self.place} runs as it is written: {why.reason}"
        if why.place:
            line += f" ({why.place})"
        if self.options.get("on_decline") == "error":
            raise LoopDeclined(line.replace("runs as it is written", "cannot be compiled")) from why
        log.warning(line)
        keep_report(Report.of_a_loop_as_written(self.place, why.reason, why.place or self.place))
        return why


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Its tensors count no writes, by which the passes tell some of them apart; gradients stay as they are."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


@contextmanager
def _as_rows(now: Snapshot, paths: set[Path], step: types.FunctionType) -> Iterator[Snapshot]:
    """Inside this context the lists of some paths are rows of tensors; after it they are lists again, of what the rows
    have become."""
    if not paths:
        yield now
        return
    before = {path: now.containers[path].value for path in paths}
    given = {path: GrowingList(path, elements) for path, elements in before.items()}
    now.install(given)
    try:
        yield look(step)
    finally:
        after = look(step)
        lists: dict[Path, list[Any]] = {}
        of = {id(x): before[path] for path, x in given.items()}
        were = {x.of: list(before[path]) for path, x in given.items()}
        for path, container in after.containers.items():
            if isinstance(value := container.value, GrowingList):
                lists[path] = of.get(id(value), [])
                lists[path][:] = elements_of(value, were[value.of])
        after.install(lists)


def _is_held_elsewhere(now: Snapshot, path: Path) -> bool:
    """Whether something else than the variables of the step may look at a container later: what the loop does to it
    until another takes its place is not done by the program."""
    return is_global(path) or _references(now, path) > _own_references()


def _references(now: Snapshot, path: Path) -> int:
    return sys.getrefcount(now.containers[path].value)


@functools.cache
def _own_references() -> int:
    """References to a list that one variable of a step holds, and a snapshot of it."""
    own: list[Any] = []

    step: Any = lambda: own  # noqa: E731
    now = look(step)
    return _references(now, next(path for path, x in now.containers.items() if x.value is own))


def _as_written(items: Items, step: types.FunctionType) -> None:
    cells_of(step)[ITEMS].cell_contents = Anything(())
    for item in items.as_written():
        step(item)


def _is_traced() -> bool:
    """Whether somebody traces the loop already."""
    return bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


# Of all modules at once.
_HOOKS: tuple[dict[int, Any], ...] = (
    modules._global_forward_hooks, modules._global_forward_pre_hooks,
    modules._global_backward_hooks, modules._global_backward_pre_hooks,
)  # fmt: skip


def _key(now: Snapshot, length: int) -> Any:
    """What a program depends on: everything that the variables hold, but the elements of tensors."""
    leaves = []
    holders = now.in_memory()
    for path, leaf in holders.items():
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise NotFollowed(f"{in_words(path)} is a tensor of layout {leaf.layout}")
    memory = dict(zip(holders, memories(holders.values()), strict=True))
    for path, leaf in now.leaves.items():
        if isinstance(leaf, Tensor):
            layout = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), memory[path]
            attributes = now.contents.get(path)
            kind: Any = (type(leaf), *layout, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_leaf, attributes)
        elif isinstance(leaf, int | float | bool | str | bytes | complex | type(None)):
            kind = type(leaf).__name__, distinct(leaf)
        elif isinstance(leaf, types.FunctionType):
            kind = Same(leaf.__code__)
        else:
            kind = Same(leaf), now.contents.get(path), memory.get(path)
        leaves.append((path, kind))
    autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast
    settings = torch.are_deterministic_algorithms_enabled(), tuple(Same(x) for of in _HOOKS for x in of.values())
    return length, tuple(leaves), tuple(now.structure().items()), modes, settings

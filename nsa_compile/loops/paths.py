"""The ways that the steps of a loop take: which steps share one, and what each finds.

A step is traced at the first position that no trace covers. The conditions of a trace, evaluated at each position with
the sizes and integers that the steps before it leave, say which positions take the same way. So every position runs
what was traced for it, and no tensor is needed to find out.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from nsa_compile.loops.lists import Appended, IsRead, NotRows, may_be_rows
from nsa_compile.loops.memos import Memos
from nsa_compile.loops.numbers import AT_A_STEP, Number, at_all_steps, text_of
from nsa_compile.loops.source import Variables
from nsa_compile.loops.state import (
    GLOBAL,
    READS_A_NUMBER,
    NotFollowed,
    Path,
    Snapshot,
    cells_of,
    distinct,
    drop,
    equal,
    in_words,
    look,
    module_variables,
)
from nsa_compile.loops.trace import Given, Ref, TensorType, Trace
from nsa_compile.loops.tracing import trace_step
from nsa_compile.loops.watched import Changed, Watched
from nsa_compile.memory import memories, overlaps_itself, share_memory

# Ways that a loop may take; one that takes more has no form that serves all of its steps.
WAYS = 40

Symbol = tuple[Path, int | None]  # a growing dimension of a tensor, or an integer


@dataclass
class Skeleton:
    """All of a loop's state but the sizes and integers that change from step to step."""

    snapshot: Snapshot
    structure: dict[Path, Any]
    leaves: dict[Path, Any]  # what each leaf is, as a hashable description
    tensors: dict[Path, TensorType]
    static: dict[Path, tuple[int | None, ...]]
    symbols: tuple[Symbol, ...]


@dataclass
class Way:
    """A trace, with the function that takes the integers of a step to those of the next, or says None."""

    trace: Trace
    before: int  # number of a skeleton
    after: int
    follow: Callable[..., tuple[int, ...] | None]


@dataclass
class Exploration:
    """Which way each step takes, and the integers it finds."""

    length: int
    ways: list[Way]
    skeletons: list[Skeleton]
    way_of: np.ndarray  # [S]
    before: dict[Symbol, np.ndarray]  # [S]; 0 where there is no such size
    after: dict[Symbol, np.ndarray]
    present: dict[Path, np.ndarray]  # at which steps a tensor is part of the state
    first: Snapshot
    lists: set[Path]
    unread: frozenset[str]  # variables that nobody reads after the loop
    values: dict[tuple[int, Number], dict[int, Any]] = field(
        default_factory=dict
    )  # of numbers, once asked for, by step

    def value(self, number: Any, step: int) -> Any:
        """What a number of the trace of a step is at that step."""
        if not isinstance(number, Number):
            return number
        way = int(self.way_of[step])
        if (way, number) not in self.values:
            steps = np.nonzero(self.way_of == way)[0]  # at others it may be no number
            symbols = self.ways[way].trace.symbols.items()
            given = {str(symbol): steps if what == "t" else self.before[what][steps] for symbol, what in symbols}
            found = at_all_steps(number, given, len(steps))
            self.values[way, number] = dict(zip(steps.tolist(), found.tolist(), strict=True))
        return self.values[way, number][step]

    def is_gone(self, path: Path) -> bool:
        """Whether a path is a variable that nobody reads after the loop."""
        after = self.ways[int(self.way_of[-1])].trace.after
        assert after is not None
        return path[1:] in ((), ("",)) and path[0] in self.unread and path not in after.same.values()

    def mutated(self) -> set[Path]:
        """The tensors of the state that steps write to in place.

        Raises:
            NotFollowed: another name sees such a write, which the program would not show.
        """
        mutated = {path for way in self.ways for path in way.trace.mutated}
        shared = self._shared() if mutated else {}
        for path in sorted(mutated & self.first.leaves.keys(), key=str):
            if isinstance(x := self.first.leaves[path], Tensor) and overlaps_itself(x):
                raise NotFollowed(f"it writes in place to {in_words(path)}, whose elements share memory; write to a "
                                  ".clone()")  # fmt: skip
        for path in sorted(mutated & shared.keys(), key=str):
            other = min(shared[path], key=str)
            words = other if isinstance(other, str) else in_words(other)
            raise NotFollowed(f"it writes in place to {in_words(path)}, which shares elements with {words}")
        for way in self.ways:
            for path in mutated & way.trace.same:
                result = way.trace.results[path]
                if isinstance(result, Ref) and way.trace.shapes[result] != way.trace.shapes[way.trace.state[path]]:
                    raise NotFollowed(f"it changes the shape of {in_words(path)} in place")
            for path in mutated & way.trace.state.keys() - way.trace.same:
                if isinstance(self.first.leaves.get(path), Tensor):
                    raise NotFollowed(
                        f"{in_words(path)} is both written in place and replaced by another tensor; do one of the two"
                    )
        return mutated

    def _shared(self) -> dict[Path, set[Path | str]]:
        """Of each tensor of the state, who else may hold its memory at some step: it may have come there steps ago, and
        under another name."""
        shared: dict[Path, set[Path | str]] = {}
        held = self.first.in_memory()
        pieces: dict[int, list[Path]] = {}
        for path, number in zip(held, memories(held.values()), strict=True):
            pieces.setdefault(number, []).append(path)
        for paths in pieces.values():
            for path in paths if len(paths) > 1 else ():
                shared[path] = {other for other in paths if other != path}
        before: Any = None
        while before != (before := {path: len(found) for path, found in shared.items()}):
            for way in self.ways:
                for path in (p for p in way.trace.memory if isinstance(p, tuple)):
                    if found := _holders(path, way.trace, shared):
                        shared.setdefault(path, set()).update(found)
        return shared


def _holders(path: Path, trace: Trace, shared: dict[Path, set[Path | str]]) -> set[Path | str]:
    """Who else holds the memory of a tensor after a step, given who may have before it."""
    (own,) = trace.memory[path]
    with_it = shared.get(trace.came.get(own, ()), set())
    found: set[Path | str] = {other for other in with_it if isinstance(other, str)}
    for other, memory in trace.memory.items():
        if other != path and any(m == own or trace.came.get(m) in with_it for m in memory):
            found.add(other)
    return found


class _Again(Exception):
    """A trace took something for the same at all steps that is not."""


class Explorer:
    """Finds the ways of one loop."""

    def __init__(
        self,
        step: types.FunctionType,
        length: int,
        variables: Variables,
        never_rows: Collection[Path],
        memos: Memos,
    ) -> None:
        self.step, self.length, self.variables, self.never_rows, self.memos = step, length, variables, never_rows, memos
        self.tensors: set[Path] = set()
        self.growing: dict[Path, set[int]] = {}
        self.integers: set[Path] = set()
        self.lists: set[Path] = set()
        self.plain: set[Path] = set()  # lists that are read
        self.watched = Watched(module_variables(step), step.__globals__)
        self.traced = 0
        self.taken = Counter[str]()  # lines at which Python makes a number of a symbol, by how many traces have done so

    def explore(self) -> Exploration:
        """Trace until every step has a way. The variables are left as they were.

        Raises:
            NotFollowed: there is no end to it, or a step does what no trace can follow.
            IsRead: the list of a path is read; it may be a `GrowingList`, unless `never_rows` has it.
            NotRows: such a list cannot be one.
        """
        cells = cells_of(self.step)
        original = look(self.step)
        try:
            drop(cells, self.variables.temporary)
            first = look(self.step, self.variables.temporary)
            while True:
                try:
                    return self._walk(first)
                except _Again:
                    continue
        finally:
            original.restore()

    def _walk(self, first: Snapshot) -> Exploration:
        self.skeletons: list[Skeleton] = []
        self.known: dict[Any, int] = {}
        ways: list[Way] = []
        number, integers = self._intern(first, first.leaves, {}, None)
        way_of = np.zeros(self.length, np.int64)
        states: list[tuple[int, tuple[int, ...]]] = [(number, integers)]
        by_skeleton: dict[int, list[int]] = {}
        alone = 0  # steps in a row of which each has taken a way of its own
        for t in range(self.length):
            following = None
            for i in by_skeleton.get(number, ()):
                following = ways[i].follow(t, *integers)
                if following is not None:
                    way_of[t], number = i, ways[i].after
                    alone = 0
                    break
            else:
                alone += 1
                if alone > WAYS:  # all of them would, and nothing could be computed together
                    raise self._too_many()
                way = self._trace(t, number, integers, first)
                by_skeleton.setdefault(number, []).append(len(ways))
                ways.append(way)
                following = way.follow(t, *integers)
                if following is None:
                    raise NotFollowed("a step does not meet the conditions that it was traced under")
                way_of[t], number = len(ways) - 1, way.after
            integers = following
            if any(abs(n) >= 2**63 for n in integers):
                raise NotFollowed("an integer of its variables grows beyond 64 bits")
            states.append((number, integers))
        return self._found(first, ways, way_of, states)

    def _found(self, first: Snapshot, ways: list[Way], way_of: np.ndarray, states: list[Any]) -> Exploration:
        symbols = {s for skeleton in self.skeletons for s in skeleton.symbols}
        paths = {p for skeleton in self.skeletons for p in skeleton.tensors}
        tables = {s: np.zeros(self.length + 1, np.int64) for s in symbols}
        present = {p: np.zeros(self.length + 1, bool) for p in paths}
        numbers = np.array([n for n, _ in states])
        for k, skeleton in enumerate(self.skeletons):
            at = np.nonzero(numbers == k)[0]
            if len(at):
                values = np.array([states[t][1] for t in at], np.int64).reshape(len(at), len(skeleton.symbols))
                for j, symbol in enumerate(skeleton.symbols):
                    tables[symbol][at] = values[:, j]
                for path in skeleton.tensors:
                    present[path][at] = True
                    for d, size in enumerate(skeleton.static[path]):
                        if size is not None:
                            tables.setdefault((path, d), np.zeros(self.length + 1, np.int64))[at] = size
        return Exploration(
            self.length,
            ways,
            self.skeletons,
            way_of,
            {s: x[:-1] for s, x in tables.items()},
            {s: x[1:] for s, x in tables.items()},
            present,
            first,
            self.lists,
            self.variables.not_read,
        )

    def _intern(
        self, snapshot: Snapshot, results: dict[Path, Any], shapes: dict[Ref, Any], trace: Trace | None
    ) -> tuple[int, tuple[int, ...]]:
        """The number of the skeleton that results make, and at the start, its integers."""
        structure = snapshot.structure()
        for path in self.lists & structure.keys():
            structure[path] = ("appended",)
        leaves: dict[Path, Any] = {}
        tensors: dict[Path, TensorType] = {}
        static: dict[Path, tuple[int | None, ...]] = {}
        symbols: list[Symbol] = []
        integers: list[int] = []
        inside = tuple(self.lists)
        again = False
        for path, leaf in results.items():
            if any(path[: len(p)] == p for p in inside):
                continue
            if path[0] in self.variables.temporary:
                structure.pop(path[:1], None)
                continue
            if isinstance(leaf, Ref) or (isinstance(leaf, Tensor) and path in self.tensors):
                ref_shape = shapes[leaf] if isinstance(leaf, Ref) else tuple(leaf.shape)
                # pyrefly: ignore[bad-argument-type]
                kind = trace.types[leaf] if isinstance(leaf, Ref) and trace else type_of(leaf)
                grows = self.growing.get(path, set())
                found = {d for d, size in enumerate(ref_shape) if isinstance(size, Number)} - grows
                if found:
                    again = True
                    self.growing.setdefault(path, set()).update(found)
                tensors[path] = kind
                static[path] = tuple(None if d in grows else size for d, size in enumerate(ref_shape))
                leaves[path] = ("tensor", kind, static[path])
                symbols += [(path, d) for d in sorted(grows)]
                integers += [size for d, size in enumerate(ref_shape) if d in grows]
            elif isinstance(leaf, Number) and free_unbacked_symbols(leaf.expr):
                raise NotFollowed(READS_A_NUMBER)
            elif path in self.integers and isinstance(leaf, Number) and not _is_integer(leaf):
                raise NotFollowed(f"{in_words(path)} is an integer at some steps, and none at others{_OF_A_TENSOR}")
            elif path in self.integers and isinstance(leaf, int | Number) and not isinstance(leaf, bool):
                leaves[path] = ("integer",)
                symbols.append((path, None))
                integers.append(leaf)  # pyrefly: ignore[bad-argument-type]
            elif isinstance(leaf, Number):
                if not _is_integer(leaf):
                    why = f"{in_words(path)} becomes a fraction that is computed from the position{_OF_A_TENSOR}"
                    raise NotFollowed(why)
                self.integers.add(path)
                again = True
            else:
                leaves[path] = _constant(leaf)
        if again:
            raise _Again
        for path in [p for p in structure if p[0] in self.variables.temporary]:
            del structure[path]
        key = (tuple(structure.items()), tuple(leaves.items()))
        if key not in self.known:
            self.known[key] = len(self.skeletons)
            self.skeletons.append(Skeleton(snapshot, structure, leaves, tensors, static, tuple(symbols)))
        return self.known[key], tuple(integers)

    def _trace(self, t: int, number: int, integers: tuple[int, ...], first: Snapshot) -> Way:
        self.traced += 1
        if self.traced > 3 * WAYS or len(self.skeletons) > WAYS:
            raise self._too_many()
        skeleton = self.skeletons[number]
        values = dict(zip(skeleton.symbols, integers, strict=True))
        given: dict[Path, Given] = {}
        for path, kind in skeleton.tensors.items():
            sizes = tuple(values[path, d] if size is None else size for d, size in enumerate(skeleton.static[path]))
            growing = tuple(d for d, size in enumerate(skeleton.static[path]) if size is None)
            given[path] = Given(sizes, kind, growing)
        for path, d in skeleton.symbols:
            if d is None:
                given[path] = Given(None, None, value=values[path, None])
        try:
            trace = self._traced(t, skeleton.snapshot, given, first)
        except IsRead as error:
            if isinstance(error, NotRows) or self._may_be_rows(error.path, first):
                raise
            self.plain.add(error.path)
            self.lists.discard(error.path)
            raise _Again from error
        finally:
            first.restore()
        self._compare(t, skeleton, trace)
        assert trace.after is not None
        after, following = self._intern(trace.after, trace.results, trace.shapes, trace)
        names = [next(str(s) for s, what in trace.symbols.items() if what == symbol) for symbol in skeleton.symbols]
        position = next(str(s) for s, what in trace.symbols.items() if what == "t")
        if len(self.known) > WAYS:
            raise self._too_many()
        return Way(trace, number, after, _compiled([position, *names], trace.conditions, following))

    def _traced(self, t: int, before: Snapshot, given: dict[Path, Given], first: Snapshot) -> Trace:
        """The step, followed. What it changes beside its variables may be a cache of what it computes: that is known by
        a step that is the same when the cache is filled, and changes nothing more."""
        objects = [c.value for c in first.containers.values() if c.kind == "object"]
        objects += [x for x in first.leaves.values() if isinstance(x, types.ModuleType | type)]
        traces: list[Trace] = []

        def follow() -> None:
            reached = [c.value for c in first.containers.values()]
            with self.memos.emptied(), self.watched.noting(objects, reached) as noted:
                of, lists = self.variables, self.lists
                tensors = frozenset(self.tensors)
                traces.append(
                    trace_step(self.step, t, before, given, lists, tensors, of.temporary, of.read_after, noted)
                )
                self.taken.update(set(traces[-1].taken))

        try:
            follow()
            held = [*traces[-1].held.values(), *(x for found in traces[-1].held_in_lists.values() for x in found)]
            if not self.memos.kept.isdisjoint(x.object for x in held):
                raise NotFollowed("it leaves behind a tensor that a functools.lru_cache keeps; keep a copy (.clone())")
        except Changed as why:
            first.restore()
            with self.watched.changes_accepted():
                follow()
                if traces[0].describe() != traces[1].describe():
                    raise why from None
        return traces[-1]

    def _may_be_rows(self, path: Path, first: Snapshot) -> bool:
        container = first.containers.get(path)
        return path not in self.never_rows and container is not None and may_be_rows(container.value)

    def _too_many(self) -> NotFollowed:
        ways = "its steps take too many different ways, one for each value of a number or length of a list"
        if not self.never_rows:
            ((place, times),) = self.taken.most_common(1) or [("", 0)]
            if times <= WAYS:
                return NotFollowed(ways)
            needs = "that Python must know there, as range(n) does; n // 2, len(k) and math.sqrt(n) do not"
            return NotFollowed(f"its steps take too many different ways, one for each value of a number {needs}", place)
        held = self.skeletons[-1].leaves
        name = in_words(max(sorted(self.never_rows, key=str), key=lambda p: sum(path[: len(p)] == p for path in held)))
        return NotFollowed(
            f"{ways}; {name} is read element by element, or its elements differ in shape: torch.stack({name}), "
            f"{name}[-n:], {name} + others and del {name}[0] keep it one tensor"
        )

    def _compare(self, t: int, skeleton: Skeleton, trace: Trace) -> None:
        """Find what changes from step to step; where a trace took it for the same, there is another try."""
        assert trace.after is not None
        known = (len(self.tensors), sum(map(len, self.growing.values())), len(self.integers), len(self.lists))
        before = skeleton.snapshot
        for x in trace.written:
            self._note_write(x, before)
        for path, now in trace.results.items():
            if path[0] in self.variables.temporary and path[0] not in self.variables.read_after:
                continue
            was = before.leaves.get(path, _ABSENT)
            if isinstance(now, Ref):
                if trace.state.get(path) != now and path[0] not in self.variables.temporary:
                    self.tensors.add(path)
                self._note_sizes(path, skeleton, trace.shapes[now])
            elif isinstance(now, int) and not isinstance(now, bool):
                if type(was) is int and was != now and path not in self.integers:
                    self.integers.add(path)
            elif GLOBAL in str(path[-1]) and not isinstance(now, Appended) and not equal(was, now):
                raise NotFollowed(f"it changes {in_words(path)}, a variable of the module")
        structure = trace.after.structure()
        for path, what in structure.items():
            was = skeleton.structure.get(path)
            if (
                what[0] == "list"
                and was is not None
                and was[0] == "list"
                and was != what
                and path not in self.plain | self.lists
            ):
                old, new = before.containers[path], trace.after.containers.get(path)
                if new is not None and old.value is new.value and type(new.value) is list and what[2] > was[2]:
                    self.lists.add(path)
        if known != (len(self.tensors), sum(map(len, self.growing.values())), len(self.integers), len(self.lists)):
            raise _Again

    def _note_write(self, x: Tensor, before: Snapshot) -> None:
        found = [path for path, leaf in before.leaves.items() if leaf is x]
        if not found:
            raise NotFollowed("it writes in place to a tensor that is none of its variables")
        others = {path: leaf for path, leaf in before.in_memory().items() if leaf is not x}
        for i in share_memory(x, others.values()):
            raise NotFollowed(f"it writes in place to {in_words(found[0])}, which shares its memory with "
                              f"{in_words([*others][i])}")  # fmt: skip
        if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            raise NotFollowed(f"it writes in place to {in_words(found[0])}, a leaf that asks for a gradient")
        self.tensors.add(found[0])

    def _note_sizes(self, path: Path, skeleton: Skeleton, shape: tuple[Any, ...]) -> None:
        static = skeleton.static.get(path)
        if static is None or len(static) != len(shape):
            return
        for d, (was, now) in enumerate(zip(static, shape, strict=True)):
            if was is not None and was != now:
                self.growing.setdefault(path, set()).add(d)


_ABSENT = object()
_OF_A_TENSOR = "; begin with a tensor, as torch.tensor(0.5, dtype=torch.float64)"


def type_of(x: Tensor) -> TensorType:
    return TensorType(x.dim(), x.dtype, x.device)


def _is_integer(number: Number) -> bool:
    return bool(number.expr.is_integer)


def _constant(value: Any) -> Any:
    if isinstance(value, Appended):
        return ("appended",)
    try:
        if isinstance(value, int | float | bool | str | bytes | complex | type(None)):
            return type(value).__name__, distinct(value)
    except TypeError:
        pass
    return "object", id(value)


def _compiled(names: list[str], conditions: list[Number], results: tuple[Any, ...]) -> Callable[..., Any]:
    """The function from the integers that a step finds to those it leaves, or None if it takes another way."""
    tests = list(dict.fromkeys(text_of(c) for c in conditions)) or ["True"]
    returned = "".join(f"{text_of(r)}, " for r in results)
    source = f"def follow({', '.join(names)}):\n    try:\n"
    source += "".join(f"        if not ({test}): return None\n" for test in tests)
    source += f"        return ({returned})\n"
    source += "    except (ArithmeticError, ValueError): return None\n"  # a step at which the code raises
    scope: dict[str, Any] = dict(AT_A_STEP)
    exec(compile(source, "<conditions of a path>", "exec"), scope)
    return functools.partial(scope["follow"])

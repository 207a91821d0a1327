"""Which tensors share memory after a loop, as a write to one of them would show.

A program gives each of its results memory of its own. The loop as it is written may leave one tensor under two names,
in a list and in a variable say, a row of an input, or a view of another result. These are made one tensor, or views,
again; where that cannot be done, the loop is declined.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from nsa_compile.loops.lists import NotRows
from nsa_compile.loops.paths import Exploration
from nsa_compile.loops.state import ITEMS, NotFollowed, Path, Snapshot, in_words
from nsa_compile.loops.trace import Held, Op, Ref, Trace
from nsa_compile.memory import memory

__all__ = ["Place", "find_shared", "share"]

_COPY = "keep a copy (.clone())"
# Elements up to which it is found out whether two views have any in common; larger ones are taken to have.
_MOST_ELEMENTS = 2**22


@dataclass(frozen=True)
class Place:
    """A tensor that the loop leaves: a leaf of its variables, or what it has appended to a list."""

    path: Path
    index: int | None = None  # among the tensors appended, counted back from the last one: -1

    def __str__(self) -> str:
        words = in_words(self.path)
        return words if self.index is None else f"what is appended to {words}"


@dataclass(frozen=True)
class Before:
    """A tensor that was there before the loop."""

    path: Path


@dataclass
class View:
    """A view of another tensor, by the operators that make it."""

    of: Place | Before
    operators: list[tuple[Op, Ref, int]]  # the result that is meant, and the step


@dataclass
class Spread:
    """A tensor of its own whose elements along some dimensions are one."""

    dims: tuple[int, ...]


@dataclass(frozen=True)
class _Origin:
    """Where a tensor has come from: which object it is, whose memory it has, and the step that made it."""

    object: Any
    memory: Any
    step: int
    held: Held | None


def find_shared(exploration: Exploration, *, copied: bool) -> dict[Place, Any]:
    """What must not be a tensor with memory of its own for each element: the place that it is the tensor of (`Place`,
    `Before`), that of which it is a view with the functions that lead there, or the dimensions along which its elements
    are one (`Spread`).

    Args:
        copied: whether the rows of a list that the loop goes over are copies.

    Raises:
        NotFollowed: two results share memory, and neither is a view of the other.
        NotRows: the rows of a list share memory, and it is another list after the loop.
    """
    finder = _Finder(exploration)
    found = finder.found()
    for place, what in found.items():
        root = what.of if isinstance(what, View) else what
        if copied and isinstance(root, Before) and root.path[0] == ITEMS:
            raise NotFollowed(f"it keeps an element of the list that it goes over, as {place}; {_COPY}")
    return {
        place: (what.of, [finder.replayed(*operator) for operator in what.operators])
        if isinstance(what, View)
        else what
        for place, what in found.items()
    }


def share(
    shared: Mapping[Place, Any], now: Snapshot, finals: dict[Path, Tensor], lists: Mapping[Path, list[Tensor]]
) -> None:
    """Let the results of a program share memory as those of the loop do, in place. Lists that are not among these are
    left alone."""

    done: dict[Place, Tensor] = {}

    def put(place: Place) -> Tensor:
        if place in done:
            return done[place]
        what = shared.get(place)
        x = finals[place.path] if place.index is None else lists[place.path][place.index]
        if isinstance(what, tuple):
            # A trace takes the state to be contiguous. Where it is not, there may be no such view, and the loop copies.
            with contextlib.suppress(RuntimeError):
                x = functools.reduce(lambda y, operator: operator(y), what[1], root_of(what[0]))
        elif isinstance(what, Place | Before):
            x = root_of(what)
        elif isinstance(what, Spread):
            x = _spread(x, what.dims)
        if place.index is None:
            finals[place.path] = x
        else:
            lists[place.path][place.index] = x
        done[place] = x
        return x

    def root_of(what: Place | Before) -> Tensor:
        return now.leaves[what.path] if isinstance(what, Before) else put(what)

    for place in shared:
        if place.path in (finals if place.index is None else lists):
            put(place)


def _spread(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    one = x
    for d in dims:
        one = one.narrow(d, 0, 1)
    return one.expand(x.shape)


class _Finder:
    def __init__(self, exploration: Exploration) -> None:
        self.exploration = exploration
        self.known: dict[tuple[Path, int], _Origin | None] = {}
        tensors = [(path, x) for path, x in exploration.first.leaves.items() if isinstance(x, Tensor)]
        self.before = {id(x): path for path, x in tensors}
        self.rows = {path for way in exploration.ways for path in way.trace.rows}

    def trace(self, step: int) -> Trace:
        return self.exploration.ways[int(self.exploration.way_of[step])].trace

    # -- where tensors have come from

    def origin(self, path: Path, step: int) -> _Origin | None:
        """That of a leaf after a step; step -1 is before the loop. None where it is no tensor."""
        passed: list[tuple[Path, int]] = []
        while (path, step) not in self.known:
            passed.append((path, step))
            if step < 0:
                found = self._of_before(self.exploration.first.leaves.get(path))
                break
            trace = self.trace(step)
            held = trace.held.get(path)
            if held is None:
                found = self._of_before(trace.results.get(path))
                break
            if (given := trace.given.get(held.object)) is None:
                found = self.made(held, step)
                break
            path, step = given, step - 1
        else:
            found = self.known[path, step]
        self.known.update(dict.fromkeys(passed, found))
        return found

    def _of_before(self, x: Any) -> _Origin | None:
        if not isinstance(x, Tensor):
            return None
        return _Origin(Before(self.before[id(x)]) if id(x) in self.before else id(x), memory(x), -1, None)

    def made(self, held: Held, step: int) -> _Origin:
        """The origin of a tensor that a step has made, or was given."""
        trace = self.trace(step)
        if (outside := trace.outside_objects.get(held.object)) is not None:
            return cast(_Origin, self._of_before(outside))
        if (given := trace.given.get(held.object)) is not None and (found := self.origin(given, step - 1)) is not None:
            return found
        piece: Any = (step, held.memory)
        if (came := trace.came.get(held.memory)) is not None and (found := self.origin(came, step - 1)) is not None:
            piece = found.memory
        elif (outside := trace.outside_memory.get(held.memory)) is not None:
            piece = memory(outside)
        return _Origin((step, held.object), piece, step, held)

    # -- the results

    def found(self) -> dict[Place, Any]:
        shared: dict[Place, Any] = {}
        by_object: dict[Any, tuple[Place, _Origin]] = {}
        for place, origin in itertools.chain(self._finals(), self._appended()):
            self._refuse_elements(place, origin)
            if isinstance(origin.object, Before):
                shared[place] = origin.object
            elif origin.object in by_object:
                shared[place] = by_object[origin.object][0]
            else:
                by_object[origin.object] = place, origin
        groups: dict[Any, list[tuple[Place, _Origin]]] = {}
        for place, origin in by_object.values():
            groups.setdefault(origin.memory, []).append((place, origin))
        for piece, group in groups.items():
            of_before = not isinstance(piece, tuple)
            if of_before or len(group) > 1:
                self._settle(group, of_before, shared)
        for place, origin in by_object.values():
            sizes, strides, _ = self._geometry(origin) if origin.held is not None else ((), (), 0)
            dims = tuple(d for d, size in enumerate(sizes) if size > 1 and strides[d] == 0)
            if dims and place not in shared:
                shared[place] = Spread(dims)
        self._check_lists_that_are_read(shared)
        return shared

    def _refuse_elements(self, place: Place, origin: _Origin) -> None:
        """An element that a step has read from a list is a view of rows here, and the list has others in the end."""
        if origin.held is None:
            return
        for path in self.rows:
            own = place == Place(path)
            found = {
                of.memory for step in (origin.step - 1, origin.step) if (of := self.origin(path, step)) is not None
            }
            if origin.memory in found and not own and place.path in self.rows:
                lists = f"the lists {in_words(place.path[:-1])} and {in_words(path[:-1])}"
                raise NotFollowed(f"{lists} hold the same tensors, or one is what the other was; {_COPY}")
            if origin.memory in found and not own:
                raise NotFollowed(f"{place} is what the loop has read from the list {in_words(path[:-1])}; {_COPY}")

    def _check_lists_that_are_read(self, shared: dict[Place, Any]) -> None:
        """They are lists again after the program, when its other results are there."""
        moved = {path for way in self.exploration.ways for path in way.trace.moved}
        for place, what in shared.items():
            of = what.of if isinstance(what, View) else what
            for one in (place, of):
                if isinstance(one, Place) and one.index is not None and one.path in moved:
                    reason = f"{one} shares its memory, and the loop takes elements from the list; {_COPY}"
                    raise NotRows(one.path, reason)
            if self._is_read(of) and not self._is_read(place):
                raise NotFollowed(f"{place} shares its memory with {of}, which the loop reads; {_COPY}")

    def _is_read(self, of: Place | Before) -> bool:
        """Whether it is an element of a list that the loop reads."""
        return isinstance(of, Place) and of.index is not None and of.path not in self.exploration.lists

    def _finals(self) -> Any:
        last = self.exploration.length - 1
        for path in self.trace(last).held:
            if not self._is_gone(path) and (origin := self.origin(path, last)) is not None:
                yield Place(path), origin

    def _is_gone(self, path: Path) -> bool:
        """Whether a path is a variable that nobody reads after the loop."""
        return self.exploration.is_gone(path[:-1] if path in self.rows else path)

    def _appended(self) -> Any:
        """Those that may share memory with others; those of lists that are read come last."""
        lists = {p for way in self.exploration.ways for p in way.trace.held_in_lists if not self._is_gone(p)}
        for path in sorted(lists, key=lambda path: (path not in self.exploration.lists, str(path))):
            index = -sum(len(self.trace(t).held_in_lists.get(path, ())) for t in range(self.exploration.length))
            which = [_which_may_share(way.trace, path) for way in self.exploration.ways]
            for step, way in enumerate(self.exploration.way_of):
                items = self.trace(step).held_in_lists.get(path, [])
                for k in which[int(way)]:
                    yield Place(path, index + k), self.made(items[k], step)
                index += len(items)

    def _settle(self, group: list[tuple[Place, _Origin]], of_before: bool, shared: dict[Place, Any]) -> None:
        """Make views of those tensors of a group with one memory that are views."""
        places = {origin.object: place for place, origin in group}
        by_ref = {(origin.step, origin.held.ref): place for place, origin in group if origin.held is not None}
        alone: list[tuple[Place, _Origin]] = []
        for place, origin in group:
            if (view := self._derived(place, origin, places, by_ref)) is not None:
                shared[place] = view
            elif of_before:
                raise NotFollowed(f"{place} shares its memory with what was there before the loop; {_COPY}")
            else:
                alone.append((place, origin))
        for (one, a), (other, b) in itertools.combinations(alone, 2):
            if _overlap(self._geometry(a), self._geometry(b)):
                same = one.path == other.path
                which = f"tensors appended to {in_words(one.path)}" if same else f"{one} and {other}"
                raise NotFollowed(f"{which} share memory after the loop; {_COPY}")

    def _derived(
        self, place: Place, origin: _Origin, places: dict[Any, Place], by_ref: dict[tuple[int, Ref], Place]
    ) -> View | None:
        """How a tensor is a view of another one of these places, or of one that was there before."""
        operators: list[tuple[Op, Ref, int]] = []
        if origin.held is None:
            raise NotFollowed(f"{place} is a tensor that is there already, and none of the loop's variables; {_COPY}")
        step, ref = origin.step, origin.held.ref
        while True:
            if (of := by_ref.get((step, ref), place)) != place:
                return View(of, operators[::-1])
            trace = self.trace(step)
            if (outside := trace.outside.get(ref)) is not None:
                path = self.before.get(id(outside))
                return None if path is None else View(Before(path), operators[::-1])
            given = next((path for path, state in trace.state.items() if state == ref), None)
            if given is not None:
                before = self.origin(given, step - 1)
                if before is None:
                    return None
                if isinstance(before.object, Before):
                    return View(before.object, operators[::-1])
                if (of := places.get(before.object, place)) != place:
                    return View(of, operators[::-1])
                assert before.held is not None
                step, ref = before.step, before.held.ref
                continue
            op = next((op for op in trace.ops if ref in op.outs), None)
            if op is None or not _is_view(op) or not isinstance(op.args[0], Ref):
                return None
            operators.append((op, ref, step))
            ref = op.args[0]

    # -- numbers

    def _geometry(self, origin: _Origin) -> Any:
        assert origin.held is not None
        return fx.node.map_aggregate(origin.held.geometry, lambda n: self.exploration.value(n, origin.step))

    def replayed(self, op: Op, ref: Ref, step: int) -> Any:
        """The function from the first argument of an operator to one of its results."""
        place = op.outs.index(ref)
        args, kwargs = (
            fx.node.map_aggregate(given, lambda n: self.exploration.value(n, step))
            for given in (op.args[1:], op.kwargs)
        )

        def view(x: Tensor) -> Tensor:
            with torch.no_grad() if op.no_grad else contextlib.nullcontext():
                made = op.func(x, *args, **kwargs)
            return made if isinstance(made, Tensor) else made[place]

        return view


def _which_may_share(trace: Trace, path: Path) -> list[int]:
    """Which of the tensors that a step appends to a list may have the memory of another tensor."""
    every = [held.memory for held in itertools.chain(trace.held.values(), *trace.held_in_lists.values())]
    items = trace.held_in_lists.get(path, [])
    old = trace.came.keys() | trace.outside_memory.keys()
    spread = [0 in held.geometry[1] for held in items]
    return [k for k, held in enumerate(items) if spread[k] or held.memory in old or every.count(held.memory) > 1]


def _is_view(op: Op) -> bool:
    returns = op.func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _overlap(a: Any, b: Any) -> bool:
    """Whether two views of one memory have elements in common."""
    one, other = (_elements(*geometry) for geometry in (a, b))
    return one is None or other is None or bool(np.intersect1d(one, other).size)


def _elements(sizes: Any, strides: Any, offset: int) -> np.ndarray | None:
    if np.prod(sizes) > _MOST_ELEMENTS:
        return None
    found = np.array(offset)
    for size, stride in zip(sizes, strides, strict=True):
        found = np.add.outer(found, np.arange(size) * stride)
    return found.ravel()

"""What a traced step leaves behind: its results, what they share with one another, and what it has written to."""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from nsa_compile.loops.lists import Appended, GrowingList, IsRead
from nsa_compile.loops.numbers import Number, as_number
from nsa_compile.loops.python_numbers import is_symbolic
from nsa_compile.loops.recording import Outside, Recorder, memory_of, value_of
from nsa_compile.loops.state import NotFollowed, Path, Snapshot, in_words, look, parts_of
from nsa_compile.loops.trace import Held, Trace


def note_what_is_left(
    trace: Trace,
    recorder: Recorder,
    outside: Outside,
    before: Snapshot,
    tensors: Collection[Path],
    leaves: dict[Path, Any],
    wrapped: dict[Path, Any],
    grown: dict[Path, Appended],
) -> None:
    """Note in a trace what the variables hold after its step.

    Args:
        before: what they held.
        tensors: the paths at which some step leaves another tensor than it finds.
        leaves, wrapped: what the step was given, as fake tensors and as it saw them.
        grown: the lists that it only appends to.

    Raises:
        NotFollowed: it leaves what no program can make again.
        IsRead: something else than a tensor was appended to a list.
    """
    _note_results(trace, recorder, outside, tensors)
    trace.mutated |= {p for p, x in wrapped.items() if isinstance(x, Tensor) and value_of(x) is not leaves[p]}
    for list_ in grown.values():
        items = [outside.lift(x) if isinstance(x, Tensor) else x for x in list_.items]
        list.__setitem__(list_, slice(1, None), items)
    _note_sharing(trace, recorder, outside, wrapped, grown)
    _note_lists_that_are_read(trace, recorder, outside, before)
    _note_lists_that_grow(trace, recorder, grown)
    _note_outside(trace, recorder, outside)


def _note_results(trace: Trace, recorder: Recorder, outside: Outside, tensors: Collection[Path]) -> None:
    """Tensors, integers and constants, by path."""
    assert trace.after is not None
    for path, leaf in list(trace.after.leaves.items()):
        # One from outside may stand, after this step, where others leave a tensor of the state.
        if isinstance(leaf, Tensor) and path in tensors:
            leaf = trace.after.leaves[path] = outside.lift(leaf)
        if isinstance(leaf, FunctionalTensor):
            trace.results[path] = recorder.ref(value_of(leaf))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            trace.results[path] = number = as_number(leaf)
            if not isinstance(number, Number):  # its conditions leave one value: no later trace is to meet the symbol
                trace.after.leaves[path] = number
        elif isinstance(leaf, torch.Size | slice) and any(map(is_symbolic, _numbers_of(leaf))):
            kind = type(leaf).__name__
            raise NotFollowed(f"{in_words(path)} becomes a {kind} of numbers that change from step to step")
        else:
            trace.results[path] = leaf


def _numbers_of(leaf: torch.Size | slice) -> tuple[Any, ...]:
    return (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else tuple(leaf)


# What torch's stand-in for a tensor has of its own.
_ATTRIBUTES = frozenset({"elem", "_inductor_storage_resized_counter", "_is_functional_tensor"})


def _note_sharing(
    trace: Trace, recorder: Recorder, outside: Outside, wrapped: dict[Path, Any], grown: dict[Path, Appended]
) -> None:
    """Which tensors are one, or lie in one memory: results, the state before, what was appended, what is outside."""
    assert trace.after is not None
    results: list[tuple[Path | str, Any]] = list(trace.after.leaves.items())
    results += [(f"the tensors appended to {in_words(path)}", x) for path, list_ in grown.items() for x in list_.items]
    results += [("a tensor from outside the loop", x) for _, _, x in outside.known.values()]
    for owner, x in results:
        if isinstance(owner, tuple) and x is wrapped.get(owner):
            trace.same.add(owner)
        if not isinstance(x, FunctionalTensor):
            continue
        if "_inference_mode_base" in vars(x):
            raise NotFollowed("it leaves a tensor that is made under inference_mode; write torch.no_grad()")
        if own := vars(x).keys() - _ATTRIBUTES:
            raise NotFollowed(f"it sets .{min(own)} of a tensor that it leaves; keep it beside the tensor")
        trace.memory.setdefault(owner, []).append(memory_of(x))
        if isinstance(owner, tuple):
            trace.held[owner] = _held(x, recorder)
    trace.given = {id(x): path for path, x in wrapped.items()}
    known = [(x, functional) for x, _, functional in outside.known.values() if id(x) not in outside.literals]
    trace.outside_memory = {memory_of(functional): x for x, functional in known}
    trace.outside_objects = {id(functional): x for x, functional in known}


def _note_lists_that_are_read(trace: Trace, recorder: Recorder, outside: Outside, before: Snapshot) -> None:
    assert trace.after is not None
    for path, container in trace.after.containers.items():
        if isinstance(container.value, GrowingList):
            trace.rows.add((*path, ".rows"))
            appended = [outside.lift(x) for x in container.value.appended if isinstance(x, Tensor)]
            trace.held_in_lists[path] = [_held(x, recorder) for x in appended]
            if container.value.cut:
                trace.moved.add(path)
    for path in before.containers.keys() | trace.after.containers.keys():
        was, now = (x.containers[path].value if path in x.containers else None for x in (before, trace.after))
        if was is not now and (isinstance(was, GrowingList) or isinstance(now, GrowingList)):
            trace.moved.add(path)


def held_by_containers(before: Snapshot) -> dict[Path, Any]:
    """What the containers that may change hold now: their keys, and which objects."""
    kinds = ("list", "dict", "set", "object")
    return {path: _holds(x.value, before) for path, x in before.containers.items() if x.kind in kinds}


def _holds(container: Any, before: Snapshot) -> Any:
    parts = parts_of(container, before.module)
    return parts and (parts[1], [id(x) for x in parts[2]])


def note_containers(trace: Trace, before: Snapshot, held: dict[Path, Any]) -> None:
    """Note which containers the step has changed, and which it has put others in the place of."""
    assert trace.after is not None
    for path, what in held.items():
        was, now = before.containers[path].value, trace.after.containers.get(trace.after.same.get(path, path))
        if now is None or now.value is not was:
            trace.replaced.add(path)
        if isinstance(was, GrowingList) or _holds(was, before) != what:
            trace.changed.add(path)


def _note_lists_that_grow(trace: Trace, recorder: Recorder, grown: dict[Path, Appended]) -> None:
    assert trace.after is not None
    for path, list_ in grown.items():
        if trace.after.leaves.get(path) is not list_:
            if path in trace.after.containers and type(trace.after.containers[path].value) is list:
                raise IsRead(path)  # as rows it may be another list at each step
            raise NotFollowed(f"another list takes the place of {in_words(path)}, or it gets another name")
    for path, list_ in grown.items():
        for x in list_.items:
            if not isinstance(x, FunctionalTensor):
                raise IsRead(path)
        trace.appended[path] = [recorder.ref(value_of(x)) for x in list_.items]
        trace.held_in_lists[path] = [_held(x, recorder) for x in list_.items]


def _note_outside(trace: Trace, recorder: Recorder, outside: Outside) -> None:
    """The tensors from outside that the step has read, and those that it has written to."""
    lifted = {id(fake): x for x, fake, _ in outside.known.values()}
    trace.written += [x for x, fake, functional in outside.known.values() if value_of(functional) is not fake]
    for fake, ref in list(recorder.refs.values()):
        if id(fake) in lifted:
            trace.outside[ref] = lifted[id(fake)]
            if id(lifted[id(fake)]) in outside.literals:
                trace.literals.add(ref)


class _Handed(list):
    def append(self, x: Any) -> None:
        super().append((x, value_of(x)))


def begin_lists(before: Snapshot) -> list[Any]:
    """Tensors that are, or that hold, elements of a list that is read, with what they are now; more come as they are
    handed out."""
    GrowingList.handed = handed = _Handed()
    for container in before.containers.values():
        if isinstance(container.value, GrowingList):
            container.value.begin()
    return handed


def adopt_lists(step: types.FunctionType, before: Snapshot, temporary: frozenset[str]) -> None:
    """Take a list that a step puts in the place of one that it reads, as by `K = []`, for one that it reads."""
    read = {path: x.value for path, x in before.containers.items() if isinstance(x.value, GrowingList)}
    if not read:
        return
    after = look(step, temporary)
    now = {path: after.containers[path].value for path in read if path in after.containers}
    new = {path: read[path].instead(value) for path, value in now.items() if type(value) is list}
    if new:
        after.install(new)


def settle_lists(step: types.FunctionType, handed: list[Any], trace: Trace) -> None:
    """Take what a step has appended to lists that it reads into their rows.

    Raises:
        NotFollowed: it has written in place to an element, which the rows would not show.
    """
    for container in look(step).containers.values():
        if isinstance(container.value, GrowingList):
            container.value.settle()
    for x, value in handed:
        if value_of(x) is not value:
            raise NotFollowed("it writes in place to an element of a list that it reads")
        if isinstance(x, FunctionalTensor):
            trace.memory.setdefault("a list that is read", []).append(memory_of(x))


def _held(x: FunctionalTensor, recorder: Recorder) -> Held:
    sizes, strides = (tuple(map(as_number, numbers)) for numbers in (x.shape, x.stride()))
    return Held(id(x), memory_of(x), (sizes, strides, as_number(x.storage_offset())), recorder.ref(value_of(x)))

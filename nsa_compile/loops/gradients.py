"""Which tensors of a loop have a gradient, as far as its operators show: what may have one and what surely has none.

A write in place where gradients are off, or through a tensor without the gradient of its memory, is one that autograd
does not see. What is written there keeps the gradient that it had; in a trace, the new value would take its place.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from nsa_compile.loops.merged import refs_of
from nsa_compile.loops.paths import Exploration
from nsa_compile.loops.recording import WITHOUT_GRADIENT, place_of
from nsa_compile.loops.state import NotFollowed, Path
from nsa_compile.loops.trace import Op, Ref, Trace

REASON = (
    "it writes to a tensor that may have a gradient where autograd does not see it, under no_grad or by .detach() or "
    ".data; y + (new - y).detach() has the value of new and the gradient of y, and is no write"
)
UNCOUNTED = (
    "it writes by .data to a tensor that autograd may have saved, so that the loop's gradients are those of what is "
    "written; write to it under no_grad, where torch takes care"
)


def refuse_unseen_writes(exploration: Exploration) -> None:
    """Decline a loop whose gradients depend on a write that autograd does not see.

    Raises:
        NotFollowed: autograd does not see a write to a tensor that has a gradient at some step, or that it has saved.
    """
    if not any(way.trace.unseen for way in exploration.ways):
        return
    state = set(_at_first(exploration))
    known = -1
    while known != len(state):
        known = len(state)
        for way in exploration.ways:
            found = _with_gradient(way.trace, state)
            state |= {path for path, ref in way.trace.results.items() if isinstance(ref, Ref) and ref in found}
    gradients = [_with_gradient(way.trace, state) for way in exploration.ways]
    for way, found in zip(exploration.ways, gradients, strict=True):
        for write in way.trace.unseen:
            if write.refs & found:
                raise NotFollowed(REASON, place_of(write.stack))
            if not write.is_counted and _may_be_saved(exploration, way.trace, write.refs, gradients):
                raise NotFollowed(UNCOUNTED, place_of(write.stack))


def _may_be_saved(exploration: Exploration, trace: Trace, refs: frozenset[Ref], gradients: list[set[Ref]]) -> bool:
    """Whether autograd may hold a tensor of some step, for an operator, that a step writes to."""
    paths = {path for path, ref in trace.state.items() if ref in refs}
    outside = {id(x) for ref, x in trace.outside.items() if ref in refs}
    for way, found in zip(exploration.ways, gradients, strict=True):
        held = set(refs) if way.trace is trace else set()
        held |= {ref for path, ref in way.trace.state.items() if path in paths}
        held |= {x for path, x in way.trace.results.items() if path in paths and isinstance(x, Ref)}
        held |= {ref for ref, x in way.trace.outside.items() if id(x) in outside}
        for op in way.trace.ops:
            if held.isdisjoint(refs_of([op.args, op.kwargs])):
                continue
            if any(returned.alias_info is not None for returned in op.func._schema.returns):
                held.update(op.outs)
            elif passes_gradients(op) and op.func not in _SAVE_NOTHING and not found.isdisjoint(op.outs):
                return True
    return False


_SAVE_NOTHING = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor})


def without_gradient(exploration: Exploration) -> tuple[set[Path], dict[Path, list[bool]]]:
    """What surely has no gradient after a loop, though other steps may make it with one: tensors of the state, and of
    each list that steps append to, which of the tensors appended."""
    state = _at_first(exploration)
    appended: dict[Path, list[bool]] = {path: [] for path in exploration.lists}
    known: dict[tuple[int, frozenset[Path]], tuple[frozenset[Path], dict[Path, list[bool]]]] = {}
    for way in map(int, exploration.way_of):
        if (way, state) not in known:
            trace = exploration.ways[way].trace
            found = _with_gradient(trace, state)
            after = frozenset(p for p, ref in trace.results.items() if isinstance(ref, Ref) and ref in found)
            known[way, state] = after, {p: [ref not in found for ref in refs] for p, refs in trace.appended.items()}
        state, here = known[way, state]
        for path, has_none in here.items():
            appended[path] += has_none
    results = exploration.ways[int(exploration.way_of[-1])].trace.results
    return {p for p, x in results.items() if isinstance(x, Ref) and p not in state}, appended


def _at_first(exploration: Exploration) -> frozenset[Path]:
    first = exploration.first.leaves
    return frozenset(path for path, x in first.items() if isinstance(x, Tensor) and x.requires_grad)


def _with_gradient(trace: Trace, state: Collection[Path]) -> set[Ref]:
    """The tensors of a step that have a gradient, given those of the state that have one."""
    found = {ref for path, ref in trace.state.items() if path in state}
    found |= {ref for ref, x in trace.outside.items() if x.requires_grad}
    for op in trace.ops:
        if passes_gradients(op) and not found.isdisjoint(refs_of([op.args, op.kwargs])):
            found.update(ref for ref in op.outs if _may_have_one(trace.types[ref].dtype))
    return found


def passes_gradients(op: Op) -> bool:
    """Whether what an operator makes has the gradients of what it reads."""
    return not op.no_grad and op.func is not WITHOUT_GRADIENT


def _may_have_one(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex

"""Writes that autograd does not see: in place where gradients are off, or through a tensor without the gradient of its
memory. What is written there keeps the gradient that it had; in a trace, the new value would take its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.loops.merged import refs_of
from nsa_compile.loops.paths import Exploration
from nsa_compile.loops.recording import WITHOUT_GRADIENT, place_of
from nsa_compile.loops.state import NotFollowed, Path
from nsa_compile.loops.trace import Ref, Trace

REASON = (
    "it writes to a tensor that may have a gradient where autograd does not see it, under no_grad or by .detach() or "
    ".data; y + (new - y).detach() has the value of new and the gradient of y, and is no write"
)


def refuse_unseen_writes(exploration: Exploration) -> None:
    """
    Raises:
        NotFollowed: autograd does not see a write to a tensor that has a gradient at some step.
    """
    if not any(way.trace.unseen for way in exploration.ways):
        return
    first = exploration.first.leaves
    state = {path for path, x in first.items() if isinstance(x, Tensor) and x.requires_grad}
    known = -1
    while known != len(state):
        known = len(state)
        for way in exploration.ways:
            found = _with_gradient(way.trace, state)
            state |= {path for path, ref in way.trace.results.items() if isinstance(ref, Ref) and ref in found}
    for way in exploration.ways:
        found = _with_gradient(way.trace, state)
        for refs, stack in way.trace.unseen:
            if refs & found:
                raise NotFollowed(REASON, place_of(stack))


def _with_gradient(trace: Trace, state: set[Path]) -> set[Ref]:
    """The tensors of a step that have a gradient, given those of the state that have one."""
    found = {ref for path, ref in trace.state.items() if path in state}
    found |= {ref for ref, x in trace.outside.items() if x.requires_grad}
    for op in trace.ops:
        if not op.no_grad and op.func is not WITHOUT_GRADIENT and not found.isdisjoint(refs_of([op.args, op.kwargs])):
            found.update(ref for ref in op.outs if _may_have_one(trace.types[ref].dtype))
    return found


def _may_have_one(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex

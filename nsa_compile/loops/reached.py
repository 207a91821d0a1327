"""Which tensors of before a loop its results depend on: the others get no gradient, as in the loop as it is written.

A carry's first value may be replaced before anybody reads it, or detached, and what the last step makes may be lost. In
the scan all steps are one program, whose gradients of such a tensor would be zeros, where the loop's are None.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from nsa_compile.loops.gradients import passes_gradients
from nsa_compile.loops.lists import BETWEEN
from nsa_compile.loops.merged import needed_for
from nsa_compile.loops.paths import Exploration
from nsa_compile.loops.state import Path
from nsa_compile.loops.trace import Op, Ref, Trace

_Reached = tuple[frozenset[Path], frozenset[Ref]]  # tensors of the state before a step, and tensors from outside


def reached(exploration: Exploration, kept: Collection[Path]) -> tuple[set[Path], set[int]]:
    """What the results of a loop depend on: tensors of the state before the first step, and, by `id`, from outside.

    Args:
        kept: where the loop leaves tensors that were there before, which are no results.
    """
    last = exploration.ways[int(exploration.way_of[-1])].trace
    made = (p for p, x in last.results.items() if isinstance(x, Ref) and p not in kept)
    state = frozenset(p for p in made if not exploration.is_gone(p))
    outside: set[int] = set()
    known: dict[tuple[int, frozenset[Path]], _Reached] = {}
    for way in map(int, exploration.way_of[::-1]):
        trace = exploration.ways[way].trace
        if (way, state) not in known:
            known[way, state] = found = _before(trace, state)
            outside |= {id(trace.outside[ref]) for ref in found[1]}
        state = known[way, state][0]
    return set(state), outside


def _before(trace: Trace, after: frozenset[Path]) -> _Reached:
    """What a step needs for some of the tensors that it leaves, and for what it appends."""
    _, needed = needed_for(trace, after, begins=lambda op: _is_an_empty_list(op) or not passes_gradients(op))
    state = frozenset(path for path, ref in trace.state.items() if ref in needed)
    return state, frozenset(trace.outside.keys() & needed)


def _is_an_empty_list(op: Op) -> bool:
    """Whether it makes the rows of an empty list, cut out of another's: no part of these, as `x[:0]` is one of `x`."""
    return op.func is torch.ops.aten.slice.Tensor and op.key[1][:1] == (BETWEEN,) and list(op.args[2:4]) == [0, 0]

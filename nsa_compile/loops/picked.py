"""Rows picked by a number in a tensor, `K[i]`: in the loop views of K, in a trace copies."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from nsa_compile.loops.intercepted import parts_of
from nsa_compile.loops.left import memory_of
from nsa_compile.loops.state import NotFollowed, in_words
from nsa_compile.loops.trace import Trace

_WRITES = "it writes in place to K[i], a row picked by a tensor, which is part of K; write K[i] = x or K[i] += x"


@dataclass
class _Row:
    base: FunctionalTensor
    row: FunctionalTensor
    index: tuple[Any, ...]
    writes: tuple[int, int]  # to their memories, when the row was picked, or put back
    writes_to_numbers: list[int]  # of the index

    @property
    def is_written(self) -> bool:
        return _writes(self.row) != self.writes[1]


class PickedRows:
    """The rows that a step has picked: nobody may read one after a write to K, and none is left. Who writes to one
    puts it back at once, as `K[i] += x` does."""

    def __init__(self) -> None:
        self.by_memory: dict[int, _Row] = {}

    def note(self, base: Tensor, index: Any, row: Tensor) -> None:
        assert isinstance(base, FunctionalTensor)
        assert isinstance(row, FunctionalTensor)
        index = parts_of(index)
        writes = _writes(base), _writes(row)
        self.by_memory[memory_of(row)] = _Row(base, row, index, writes, list(map(_writes, _numbers(index))))

    def note_put_back(self, base: Tensor, index: Any, value: Any) -> None:
        """That `base[index] = value` is done, or about to be: a row that was picked there is part of K again."""
        row = self.by_memory.get(memory_of(value)) if isinstance(value, FunctionalTensor) else None
        if row is None or row.row is not value or row.base is not base:
            return
        parts, numbers = parts_of(index), _numbers(row.index)
        is_same = len(parts) == len(row.index) and all(map(operator.is_, parts, row.index))
        is_same &= list(map(_writes, numbers)) == row.writes_to_numbers
        # A number that is part of K may be the one that the write to the row has changed.
        if is_same and self._root(row.base) not in map(self._root, numbers):
            row.writes = _writes(row.base), _writes(row.row)

    def check_read(self, func: Any, args: Any, kwargs: Any) -> None:
        """That no row among these is other than it was when it was picked, and no row of one of these.

        Raises:
            NotFollowed: K was written to since, or the row.
        """
        if not self.by_memory:
            return
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FunctionalTensor)]
        for found in filter(None, (self.by_memory.get(memory_of(x)) for x in given)):
            if _writes(found.base) != found.writes[0]:
                why = "it reads K[i], a row picked by a tensor, after a write to K, which that row shows"
                raise NotFollowed(f"{why}; write K[i].clone()")
        if func is Tensor.__setitem__:
            self.note_put_back(*args)
        written = [m for m, x in self.by_memory.items() if x.is_written]
        stale = {self._base(m) for m in written}
        if any(memory_of(x) not in written and self._root(x) in stale for x in given):
            raise NotFollowed(_WRITES)

    def check_left(self, trace: Trace) -> None:
        """That no row was written to, and none is left behind while another may hold the tensor it is part of.

        Raises:
            NotFollowed: it is so.
        """
        if any(x.is_written for x in self.by_memory.values()):
            raise NotFollowed(_WRITES)
        left = {m: owner for owner, memories in trace.memory.items() for m in memories}
        rows = [m for m in left if m in self.by_memory]
        bases = [self._base(m) for m in rows]
        for row, base in zip(rows, bases, strict=True):
            if base in {*left, *trace.came, *trace.outside_memory} or bases.count(base) > 1:
                owner = left[row]
                what = owner if isinstance(owner, str) else in_words(owner)
                why = f"{what} holds K[i], a row picked by a tensor, which is part of K"
                raise NotFollowed(f"{why}; write K[i].clone()")

    def _root(self, x: FunctionalTensor) -> int:
        return self._base(memory_of(x))

    def _base(self, memory: int) -> int:
        while memory in self.by_memory:
            memory = memory_of(self.by_memory[memory].base)
        return memory


def _numbers(index: tuple[Any, ...]) -> list[FunctionalTensor]:
    return [x for x in index if isinstance(x, FunctionalTensor)]


def _writes(x: FunctionalTensor) -> int:
    return torch._functionalize_mutation_counter(x.elem)

"""Rows picked by a number in a tensor, `K[i]`: in the loop views of K, in a trace copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from nsa_compile.loops.left import memory_of
from nsa_compile.loops.state import NotFollowed, in_words
from nsa_compile.loops.trace import Trace


@dataclass
class _Row:
    base: FunctionalTensor
    row: FunctionalTensor
    writes: tuple[int, int]  # to their memories, when the row was picked


class PickedRows:
    """The rows that a step has picked: nobody may write to one, nor read one after a write to K, and none is left."""

    def __init__(self) -> None:
        self.by_memory: dict[int, _Row] = {}

    def note(self, base: Tensor, row: Tensor) -> None:
        assert isinstance(base, FunctionalTensor)
        assert isinstance(row, FunctionalTensor)
        self.by_memory[memory_of(row)] = _Row(base, row, (_writes(base), _writes(row)))

    def check_read(self, *given: Any) -> None:
        """That no row among these is other than it was when it was picked.

        Raises:
            NotFollowed: K was written to since.
        """
        if not self.by_memory:
            return
        for x in pytree.tree_leaves(given):
            found = self.by_memory.get(memory_of(x)) if isinstance(x, FunctionalTensor) else None
            if found is not None and _writes(found.base) != found.writes[0]:
                why = "it reads K[i], a row picked by a tensor, after a write to K, which that row shows"
                raise NotFollowed(f"{why}; write K[i].clone()")

    def check_left(self, trace: Trace) -> None:
        """That no row was written to, and none is left behind while another may hold the tensor it is part of.

        Raises:
            NotFollowed: it is so.
        """
        if any(_writes(x.row) != x.writes[1] for x in self.by_memory.values()):
            raise NotFollowed(
                "it writes in place to K[i], a row picked by a tensor, which is part of K; write to K by index_copy_ "
                "or index_add_"
            )
        left = {m: owner for owner, memories in trace.memory.items() for m in memories}
        rows = [m for m in left if m in self.by_memory]
        bases = [self._base(m) for m in rows]
        for row, base in zip(rows, bases, strict=True):
            if base in {*left, *trace.came, *trace.outside_memory} or bases.count(base) > 1:
                owner = left[row]
                what = owner if isinstance(owner, str) else in_words(owner)
                why = f"{what} holds K[i], a row picked by a tensor, which is part of K"
                raise NotFollowed(f"{why}; write K[i].clone()")

    def _base(self, memory: int) -> int:
        while memory in self.by_memory:
            memory = memory_of(self.by_memory[memory].base)
        return memory


def _writes(x: FunctionalTensor) -> int:
    return torch._functionalize_mutation_counter(x.elem)

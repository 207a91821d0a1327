"""What a carry of a scan is at step t, as a function of the inputs: what `resolve_carries` records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor, fx

from nsa_compile.ir.scans import Declined

# Entries of the table "step, row -> writer" that a buffer with rewritten rows may need.
TABLE_LIMIT = 2**26


@dataclass(frozen=True)
class Invariant:
    """The carry is its initial value at every step."""


@dataclass(frozen=True)
class Known:
    """The carry's value as each step finds it is known."""

    values: Tensor = field(repr=False)  # [S, ...]


@dataclass(frozen=True)
class Latest:
    """The carry is what the previous step computed without it."""


@dataclass(frozen=True)
class Rows:
    """A buffer whose rows along `dim` are written or moved, one event a step at most.

    `written` is the body node that holds the new rows. It meets the buffer in one way, whatever operator writes it: its
    dimensions, aligned with the last ones, broadcast to the buffer's shape with `index_shape` in the place of
    dimension `dim`. That is `(count,)` for rows along a dimension, `()` where the row has none (`buffer[:, t] = k`),
    and several sizes where the row numbers are a tensor of that shape.
    `slots[t]` are the rows that step t writes, `-1` for none. `base[r]` is the row of the old buffer that row r keeps
    when it is not written, at each step or at all, for buffers that shift; None when rows stay where they are.
    A buffer without dimensions counts as one row of them.

    The tables are NumPy arrays, which no tracer sees.
    """

    dim: int
    size: int
    written: fx.Node
    index_shape: tuple[int, ...]
    slots: np.ndarray = field(repr=False)  # [S, count]
    base: np.ndarray | None = field(repr=False, default=None)  # [S | 1, size]

    def layout(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What `written` broadcasts to in a buffer of a shape, and the same with its rows along one dimension."""
        before, after = tuple(shape[: self.dim]), tuple(shape[self.dim + 1 :])
        return (*before, *self.index_shape, *after), (*before, self.count, *after)

    @property
    def steps(self) -> int:
        return self.slots.shape[0]

    @property
    def count(self) -> int:
        return self.slots.shape[1]

    @cached_property
    def write_once(self) -> bool:
        """No row is written twice and none moves: once written, a row stays."""
        used = self.slots[self.slots >= 0]
        return self.base is None and len(np.unique(used)) == len(used)

    @cached_property
    def written_at(self) -> np.ndarray:
        """For a write-once buffer: the step that writes each row, S where none does. `[size]`."""
        steps = np.full(self.size, self.steps)
        t, i = (self.slots >= 0).nonzero()
        steps[self.slots[t, i]] = t
        return steps

    @cached_property
    def which(self) -> np.ndarray:
        """For a write-once buffer: which of its step's `count` rows each row is. `[size]`."""
        which = np.zeros(self.size, dtype=np.int64)
        t, i = (self.slots >= 0).nonzero()
        which[self.slots[t, i]] = i
        return which

    @cached_property
    def table(self) -> np.ndarray:
        """`[S, size]`: where row r comes from after step t; `-1 - r'` is row r' of the initial buffer, `t' * count + i`
        the i-th row that step t' wrote."""
        row = -1 - np.arange(self.size)
        rows = np.empty((self.steps, self.size), dtype=np.int64)
        for t, slots in enumerate(self.slots):
            if self.base is not None:
                base = self.base[t % len(self.base)]
                row = np.where(base >= 0, row[np.maximum(base, 0)], row)
            else:
                row = row.copy()
            written = slots >= 0
            row[slots[written]] = t * self.count + np.arange(self.count)[written]
            rows[t] = row
        return rows


@dataclass(frozen=True)
class Recurrent:
    """The carry is computed from its own earlier values, or so it must be taken.

    `group` are the places of the carries that need each other, this one among them; `why` says why it is nothing else.
    """

    group: tuple[int, ...]
    why: Declined = field(repr=False, compare=False)


Carry = Invariant | Known | Latest | Rows | Recurrent

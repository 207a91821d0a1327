"""What a value known at every step of a scan is, without a table of steps times elements.

A mask such as `position <= t` has S · T entries, but each of its elements is true during one interval of steps only:
two numbers an element say all of it. Three forms cover the masks people write:

- `Separable`: integers `steps[t] + rows[j]`, such as `position - t`;
- `StepMask`: booleans that are true exactly inside (or exactly outside) one interval of steps, element by element;
- `Choice`: one constant where such a mask is true and another where it is false, such as an additive mask.

`Table` holds all values, `[S, ...]`, for small values of any other form. The functions return None where a result has
none of the three forms; it is up to the caller to fall back to a table, or to give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# The integer dtypes that are computed with; sums of numbers up to MODERATE do not overflow the widest of them.
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MODERATE = 2**60

Interval = tuple[Tensor, Tensor]  # first and last step, both included; empty if the last is before the first


@dataclass(frozen=True)
class Table:
    """All values at all steps, `[S, ...]`."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    def table(self) -> Tensor:
        return self.values

    def narrowed(self) -> Table:
        """With a size of 1 where all elements along a dimension agree at every step."""
        return Table(_narrow(self.values, range(1, self.values.dim())))

    def where(self, test: Callable[[Tensor], Tensor]) -> Table:
        """Where the value passes a test, as booleans."""
        return Table(test(self.values))

    def __invert__(self) -> Table:
        return Table(~self.values)

    def run_of(self, wanted: bool) -> tuple[Tensor, Interval]:
        """Of booleans: the first step at which each is `wanted` (S if none), and the first run of such steps."""
        return self._run_of_true if wanted else self._run_of_false

    @cached_property
    def _run_of_true(self) -> tuple[Tensor, Interval]:
        return self._run(self.values)

    @cached_property
    def _run_of_false(self) -> tuple[Tensor, Interval]:
        return self._run(~self.values)

    @staticmethod
    def _run(value: Tensor) -> tuple[Tensor, Interval]:
        steps = value.shape[0]
        index = torch.arange(steps, dtype=torch.int32).reshape(-1, *([1] * (value.dim() - 1)))
        # A minimum over step numbers runs vectorised; argmax down a column does not.
        first = torch.where(value, index, steps).amin(0)
        end = torch.where(~value & (index >= first), index, steps).amin(0)
        return first.long(), (first.long(), end.long() - 1)

    @cached_property
    def mask(self) -> StepMask | None:
        """Of booleans: the same as intervals of steps, if each is true, or false, during one of them."""
        if self.values.dtype != torch.bool:
            return None
        length = self.values.shape[0]
        true = self.values.sum(0)
        first, (start, stop) = self.run_of(True)
        is_inside = (true == stop + 1 - start) | (first == length)
        hole, (hole_start, hole_stop) = self.run_of(False)
        if not bool((is_inside | (length - true == hole_stop + 1 - hole_start) | (hole == length)).all()):
            return None
        start = torch.where(is_inside, start, hole_start)
        return StepMask.of(start, torch.where(is_inside, stop, hole_stop) + 1, ~is_inside, length)

    def true_entries(self) -> tuple[Tensor, Tensor]:
        """Of booleans: step and flat element number of each true entry, by step."""
        t, element = self.values.reshape(self.values.shape[0], self.shape.numel()).nonzero(as_tuple=True)
        return t, element


@dataclass(frozen=True)
class Separable:
    """Integers `steps[t] + rows[j]`."""

    steps: Tensor  # [S]
    rows: Tensor  # [...]

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def table(self) -> Tensor:
        return self.steps.reshape(-1, *([1] * self.rows.dim())) + self.rows

    def range(self) -> tuple[int, int]:
        """The least and the greatest of the integers."""
        if not self.steps.numel() or not self.rows.numel():
            return 0, 0
        ends = (self.steps.min(), self.steps.max(), self.rows.min(), self.rows.max())
        first, last, low, high = map(int, ends)
        return first + low, last + high

    def magnitude(self) -> int:
        """The greatest number that the two parts hold, regardless of sign."""
        return max((abs(int(end)) for x in (self.steps, self.rows) if x.numel() for end in x.aminmax()), default=0)

    def is_moderate(self) -> bool:
        """Whether two such values can be added and compared without an overflow."""
        return self.magnitude() <= MODERATE


@dataclass(frozen=True)
class StepMask:
    """Booleans: element j is true at the steps `start[j] <= t < stop[j]`, or at all others where `outside[j]`."""

    start: Tensor  # [...]
    stop: Tensor  # [...]
    outside: Tensor  # [...], bool
    length: int  # S

    @classmethod
    def inside(cls, start: Tensor, stop: Tensor, length: int) -> StepMask:
        return cls.of(start, stop, torch.zeros_like(start, dtype=torch.bool), length)

    @classmethod
    def of(cls, start: Tensor, stop: Tensor, outside: Tensor, length: int) -> StepMask:
        """In normal form: an empty interval is [0, 0), and what can be written as inside is."""
        start, stop = start.clamp(0, length), stop.clamp(0, length)
        empty = stop <= start
        start, stop = torch.where(empty, 0, start), torch.where(empty, 0, stop)
        before = outside & (stop == length)  # true at [0, start)
        after = outside & (start == 0) & ~before  # true at [stop, S)
        new_start = torch.where(before, 0, torch.where(after, stop, start))
        new_stop = torch.where(before, start, torch.where(after, length, stop))
        return cls(new_start, new_stop, outside & ~before & ~after, length)

    @property
    def shape(self) -> torch.Size:
        return self.start.shape

    def table(self) -> Tensor:
        t = torch.arange(self.length).reshape(-1, *([1] * self.start.dim()))
        return ((self.start <= t) & (t < self.stop)) ^ self.outside

    def run_of(self, wanted: bool) -> tuple[Tensor, Interval]:
        mask = self if wanted else ~self
        # Outside [start, stop), both ends being inside 0 … S, the first run is [0, start).
        empty = ~mask.outside & (mask.stop <= mask.start)
        first = torch.where(mask.outside, 0, torch.where(empty, self.length, mask.start))
        end = torch.where(mask.outside, mask.start, torch.where(empty, self.length, mask.stop))
        return first, (first, end - 1)

    def true_entries(self) -> tuple[Tensor, Tensor]:
        if bool(self.outside.any()):
            return Table(self.table()).true_entries()
        start, counts = self.start.flatten(), (self.stop - self.start).flatten()
        element = torch.arange(len(start)).repeat_interleave(counts)
        offset = torch.arange(len(element)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        t = start[element] + offset
        order = t.argsort(stable=True)
        return t[order], element[order]

    @property
    def count(self) -> int:
        """True entries over all steps."""
        inside = (self.stop - self.start).long()
        return int(torch.where(self.outside, self.length - inside, inside).sum())

    def map(self, movement: Callable[[Tensor], Tensor]) -> StepMask:
        """The mask after its elements have been moved, repeated or dropped."""
        return StepMask(movement(self.start), movement(self.stop), movement(self.outside), self.length)

    def narrowed(self) -> StepMask:
        """With a size of 1 where all elements along a dimension agree at every step."""
        all_of_it = torch.stack(torch.broadcast_tensors(self.start, self.stop, self.outside.long()))
        start, stop, outside = _narrow(all_of_it, range(1, all_of_it.dim()))
        return StepMask(start, stop, outside.bool(), self.length)

    def __invert__(self) -> StepMask:
        return StepMask.of(self.start, self.stop, ~self.outside, self.length)

    def __and__(self, other: StepMask) -> StepMask | None:
        a0, a1, a_out, b0, b1, b_out = torch.broadcast_tensors(
            self.start, self.stop, self.outside, other.start, other.stop, other.outside
        )
        length = self.length
        # Both inside: the intersection. Both outside: outside the union, if that is one interval.
        both_in = ~a_out & ~b_out
        both_out = a_out & b_out
        touching = (torch.maximum(a0, b0) <= torch.minimum(a1, b1)) | (a1 <= a0) | (b1 <= b0)
        # One inside, one outside: what is left of [i0, i1) without [o0, o1), if that is one interval.
        i0, i1 = torch.where(a_out, b0, a0), torch.where(a_out, b1, a1)
        o0, o1 = torch.where(a_out, a0, b0), torch.where(a_out, a1, b1)
        everything = (i0 == 0) & (i1 == length)
        disjoint = (o1 <= i0) | (i1 <= o0) | (o1 <= o0)
        cut_left, cut_right = o0 <= i0, o1 >= i1
        mixed = ~both_in & ~both_out
        splits = mixed & ~everything & ~disjoint & ~cut_left & ~cut_right
        if bool((splits | (both_out & ~touching)).any()):
            return None
        left = torch.where(disjoint, i0, torch.where(cut_left, o1, i0))
        right = torch.where(disjoint | cut_left, i1, o0)
        union = _hull(a0, a1, b0, b1)
        start = torch.where(both_in, torch.maximum(a0, b0), torch.where(both_out, union[0], left))
        stop = torch.where(both_in, torch.minimum(a1, b1), torch.where(both_out, union[1], right))
        whole = mixed & everything & ~disjoint
        start, stop = torch.where(whole, o0, start), torch.where(whole, o1, stop)
        return StepMask.of(start, stop, both_out | whole, length)

    def __or__(self, other: StepMask) -> StepMask | None:
        neither = ~self & ~other
        return None if neither is None else ~neither


def _narrow(x: Tensor, dims: Iterable[int]) -> Tensor:
    for d in dims:
        first = x.narrow(d, 0, min(1, x.shape[d]))
        if x.shape[d] > 1 and torch.equal(x, first.expand_as(x)):
            x = first
    return x


def _hull(a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor) -> Interval:
    """The smallest interval that holds two, of which either may be empty."""
    a_empty, b_empty = a1 <= a0, b1 <= b0
    start = torch.where(a_empty, b0, torch.where(b_empty, a0, torch.minimum(a0, b0)))
    stop = torch.where(a_empty, b1, torch.where(b_empty, a1, torch.maximum(a1, b1)))
    return start, stop


@dataclass(frozen=True)
class Choice:
    """`if_true` where a mask is true, `if_false` where it is not; both constants that broadcast against it."""

    mask: StepMask
    if_true: Tensor
    if_false: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.broadcast_shapes(self.mask.shape, self.if_true.shape, self.if_false.shape)

    def table(self) -> Tensor:
        mask = self.mask.table()
        more = len(self.shape) + 1 - mask.dim()  # dimensions that the constants alone have come after the steps
        return torch.where(mask.reshape(len(mask), *[1] * more, *mask.shape[1:]), self.if_true, self.if_false)

    def where(self, test: Callable[[Tensor], Tensor]) -> StepMask:
        length, shape = self.mask.length, self.shape
        mask = self.mask.map(lambda x: x.expand(shape))
        yes, no = test(self.if_true).expand(shape), test(self.if_false).expand(shape)
        # (yes, no): both: always; neither: never; yes alone: the mask; no alone: its opposite.
        start = torch.where(yes == no, 0, mask.start)
        stop = torch.where(yes == no, torch.where(yes, length, 0), mask.stop)
        outside = torch.where(yes == no, False, mask.outside ^ no)
        return StepMask.of(start, stop, outside, length)


StepValue = Table | Separable | StepMask | Choice


def separable(value: StepValue | Tensor, length: int) -> Separable | None:
    """A constant, or one integer a step, as `steps[t] + rows[j]`; None for numbers that sums could overflow."""
    found = None
    if isinstance(value, Separable):
        found = value
    elif isinstance(value, Tensor) and value.dtype in INTEGERS:
        found = Separable(torch.zeros(length, dtype=torch.int64), value.long())
    elif isinstance(value, Table) and value.values.dtype in INTEGERS and value.shape.numel() == 1:
        found = Separable(value.values.flatten().long(), torch.zeros(value.shape, dtype=torch.int64))
    return found if found is not None and found.is_moderate() else None


def step_mask(value: StepValue | Tensor, length: int) -> StepMask | None:
    """A constant, or booleans at each step, as a mask of intervals; None if they are none."""
    if isinstance(value, StepMask):
        return value
    if isinstance(value, Tensor):
        if value.dtype != torch.bool:
            return None
        return StepMask.inside(torch.zeros(value.shape, dtype=torch.int64), value.long() * length, length)
    return value.mask if isinstance(value, Table) else None


def two_sided(table: Table) -> StepValue:
    """A table whose elements change during one interval of steps alone, as a mask or as a choice of two constants."""
    values = table.values
    if values.dtype == torch.bool:
        return table.mask or table
    first = values[0]
    changed = Table(values != first)
    if table.shape.numel() == 1 or changed.mask is None:
        return table
    at = changed.run_of(True)[0].clamp(max=len(values) - 1)
    other = values.gather(0, at.unsqueeze(0))[0]
    found = Choice(changed.mask, other, first)
    return found if torch.equal(found.table(), values) else table


def compare(op: str, a: Separable, b: Separable) -> StepMask | None:
    """`a op b` for op in lt, le, gt, ge, eq, ne: by search, where the step parts grow or fall steadily."""
    length = len(a.steps)
    rows = a.rows - b.rows  # rows op u(t)
    u = b.steps - a.steps
    if bool((u[1:] < u[:-1]).any()):
        if bool((u[1:] > u[:-1]).any()):
            return None
        flipped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(op, op)
        rows, u, op = -rows, -u, flipped
    flat = rows.contiguous()
    at_least = torch.searchsorted(u, flat)  # the first t with u(t) >= row
    above = torch.searchsorted(u, flat, right=True)  # the first t with u(t) > row
    nothing, everything = torch.zeros_like(at_least), torch.full_like(at_least, length)
    bounds = {
        "le": (at_least, everything),
        "lt": (above, everything),
        "ge": (nothing, above),
        "gt": (nothing, at_least),
        "eq": (at_least, above),
        "ne": (at_least, above),
    }
    mask = StepMask.inside(*bounds[op], length)
    return ~mask if op == "ne" else mask

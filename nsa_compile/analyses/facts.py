"""What is known of the elements of a value while unwritten rows are followed through a step.

The *loop* is the program as written, the *compiled* program the one that finds stale rows (`staleness`); an element e
of a value is claimed by `Facts` as follows:

- `ready[e] <= t`: at step t, e is the same in both. Of an element that is not ready nothing is the same, but its
  magnitude holds in both (`magnitudes`), and so does every other claim;
- `zero[e] > t`: at step t, e is exactly 0 in both;
- `fill[e] > t`: at step t, e is at a floor, -inf or about the lowest number, and the same in both;
- `absorbed[e] > t`: at step t, e is at a floor because something stale was added to one. Its value is the same in both,
  and its gradient reaches what is stale;
- `removed[e] > t`: at step t, e is exactly -inf in both;
- `can_be_true[e] > t`: at step t, e is false in both; `can_be_false` likewise;
- `blank[e] > t`: at step t, e is exactly 0 in the loop, as a row of zeros is that is not written yet;
- `surely_true[e]`, an interval of steps: at those, e is true in both; `surely_false` likewise;
- `surely_kept[e]`, an interval of steps: at those, e is at no floor, so that its magnitude says how large it is.

Each holds a tensor of steps in the element's own layout, with size-1 dimensions where all agree, so that a slice, an
unfold or a transpose is followed by applying it to the steps themselves. Masks are known at compile time or
conjunctions with what is, so for each element the first step at which it can be true, or false, is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from nsa_compile.analyses.magnitudes import Magnitude
from nsa_compile.ir.step_values import StepMask, Table

Steps = Tensor  # int64, broadcastable to the value's shape
Interval = tuple[Steps, Steps]  # first and last step; empty where the last is before the first


@dataclass(frozen=True)
class Facts:
    """What is known of one value; the module says what each field claims. None claims nothing, and 0 for `ready`."""

    ready: Steps | None = None
    zero: Steps | None = None
    fill: Steps | None = None
    removed: Steps | None = None
    can_be_true: Steps | None = None
    can_be_false: Steps | None = None
    blank: Steps | None = None
    absorbed: Steps | None = None
    surely_true: Interval | None = None
    surely_false: Interval | None = None
    surely_kept: Interval | None = None
    # Which guards the stale elements come from, and the last place that might have stopped them.
    sources: frozenset[str] = frozenset()
    trail: tuple[str, fx.Node] | None = None
    # Which guards the stale elements came from that met exact zeros on the way here.
    hollow: frozenset[str] = frozenset()

    @property
    def stale(self) -> bool:
        return self.ready is not None

    @property
    def counted(self) -> Facts:
        """With floors that absorbed something stale counted as stale."""
        if self.absorbed is None:
            return self
        return replace(self, ready=union(self.ready, self.absorbed), absorbed=None)

    @property
    def says_anything(self) -> bool:
        return any(getattr(self, name) is not None for name in (*FIRST_STEPS, *INTERVALS))


@dataclass(frozen=True)
class Given:
    """What is known of the inputs of a body as they come from outside; the facts are not of carries."""

    magnitudes: dict[fx.Node, Magnitude | None] = field(default_factory=dict)
    facts: dict[fx.Node, Facts] = field(default_factory=dict)


FIRST_STEPS = ("ready", "zero", "fill", "removed", "can_be_true", "can_be_false", "blank", "absorbed")
INTERVALS = ("surely_true", "surely_false", "surely_kept")
CLEAN = Facts()
# An interval that holds no step.
EMPTY = (torch.tensor(1), torch.tensor(0))


def ever(value: Table | StepMask) -> bool:
    """Whether a boolean is true anywhere, at any step."""
    first, _ = value.run_of(True)
    return bool((first < steps_of(value)).any())


def steps_of(value: Table | StepMask) -> int:
    return value.length if isinstance(value, StepMask) else value.values.shape[0]


def covers(low: Tensor, high: Tensor, length: int) -> bool:
    """Whether closed intervals cover the steps 0 … length − 1."""
    order = low.argsort()
    reached = -1
    for lo, hi in zip(low[order].tolist(), high[order].tolist(), strict=True):
        if lo > reached + 1:
            break
        reached = max(reached, hi)
    return reached >= length - 1


def or_zero(steps: Steps | None) -> Steps:
    return torch.tensor(0) if steps is None else steps


def union(a: Steps | None, b: Steps | None) -> Steps | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.maximum(a, b)


def unseen_until(start: Steps, exact: Steps | None, while_: Interval | None) -> Steps:
    """Until when nobody sees more of a value than what it exactly is: neither before `start`, nor in an interval."""
    if while_ is None:
        return start
    known = start if exact is None else torch.maximum(start, exact)
    return torch.where(while_[0] <= known, torch.maximum(known, while_[1] + 1), start)


def full_rank(steps: Steps | None, rank: int) -> Steps:
    value = or_zero(steps)
    return value.reshape([1] * (rank - value.dim()) + list(value.shape))


def shrink(steps: Steps) -> Steps:
    for dim in range(steps.dim()):
        if steps.shape[dim] > 1:
            first = steps.narrow(dim, 0, 1)
            if bool((steps == first).all()):
                steps = first
    return steps.clone() if steps.numel() == 1 or any(s == 0 for s in steps.stride()) else steps


def both(a: Steps | None, b: Steps | None) -> Steps | None:
    return None if a is None or b is None else torch.minimum(a, b)


def intersect(a: Interval | None, b: Interval | None) -> Interval | None:
    return None if a is None or b is None else (torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1]))


def either(a: Interval | None, b: Interval | None) -> Interval | None:
    """An interval at which one of two conditions surely holds: the longer one, element by element."""
    if a is None or b is None:
        return b if a is None else a
    longer = (a[1] - a[0]) >= (b[1] - b[0])
    return torch.where(longer, a[0], b[0]), torch.where(longer, a[1], b[1])

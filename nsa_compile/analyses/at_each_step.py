"""The state of a recurrence after each step, by one operator over all of them: sums with factors, and extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile.analyses.affine import Affine, Factor, NotAffine, Term, aligned
from nsa_compile.analyses.batched_body import BatchedBody
from nsa_compile.analyses.terms import Names, arranged, evaluate, is_one, renamed
from nsa_compile.ir.aten import aten, is_inexact
from nsa_compile.ir.scans import ScanRecord, ScanSite, example
from nsa_compile.ops.recurrence import recurrence


@dataclass(frozen=True, eq=False)
class AtEachStep:
    """The state after each step, `h[t] = a[t] * h[t - 1] + b[t]`, or a maximum or minimum in the place of the sum."""

    place: int
    carry: fx.Node
    update: fx.Node
    kept: Sequence[Term] | None  # factors of the state, or what is added to it within an extreme; None for nothing
    added: Sequence[Term]
    names: Names
    kind: str = "sum"
    only: Factor | None = None  # where something is brought

    @property
    def group(self) -> tuple[int, ...]:
        return (self.place,)

    @property
    def yields(self) -> tuple[fx.Node, ...]:
        return self.carry, self.update

    @property
    def form(self) -> str:
        return f"a running {_IN_WORDS[self.kind[:3]]}"

    def _nothing(self, dtype: torch.dtype) -> float:
        """What changes no extreme."""
        of_lowest = self.kind.startswith("min")
        if is_inexact(dtype):
            return math.inf if of_lowest else -math.inf
        return torch.iinfo(dtype).max if of_lowest else torch.iinfo(dtype).min

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        first, steps = body.init[self.place], body.record.length
        dtype, sizes = first.dtype, [axis.size for axis in self.names]
        inner = torch.uint8 if dtype == torch.bool else dtype
        a = None if self.kept is None or is_one(self.kept) else evaluate(self.kept, self.names, body, inner)
        b = evaluate(self.added, self.names, body, inner).expand(steps, *sizes)
        if self.only is not None:
            at = arranged(self.only, self.names, body)
            b = torch.where(at if self.only.how == "true" else ~at, b, self._nothing(b.dtype))
        values = recurrence(a, b, first.to(b.dtype).reshape(sizes), self.kind)
        values = values.reshape(steps, *first.shape).to(dtype)
        before = torch.cat([first.unsqueeze(0), values[:-1]])
        return {self.place: values[-1]}, {self.carry: before, self.update: values}


_IN_WORDS = {"sum": "sum", "log": "log-sum-exp", "max": "maximum", "min": "minimum"}


_EXTREMES = {
    aten.maximum.default: "max",
    aten.minimum.default: "min",
    aten.logaddexp.default: "logsumexp",
    aten.logical_or.default: "max",
    aten.bitwise_or.Tensor: "max",
    aten.logical_and.default: "min",
    aten.bitwise_and.Tensor: "min",
}
_OF_CONDITIONS = (
    aten.logical_or.default, aten.bitwise_or.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor,
)  # fmt: skip
# Of `where(a > b, a, b)`: the extreme, and whether b is taken of equals.
_COMPARED = {
    aten.gt.Tensor: ("max", True),
    aten.ge.Tensor: ("max", False),
    aten.lt.Tensor: ("min", True),
    aten.le.Tensor: ("min", False),
}


def as_extreme(site: ScanSite, record: ScanRecord, place: int, carry: fx.Node, update: fx.Node) -> AtEachStep | None:
    """`max(state + a, b)`, or a minimum, or what `logaddexp` yields; of conditions, `or` and `and`. Where `state` is
    the carry, it may be chosen by a condition: `where(at, max(carry, b), carry)`."""
    affine = Affine(site.body, record, [carry])
    chosen, only = _chosen(update, carry, affine)
    if (extreme := _extreme_of(chosen)) is None:
        return None
    if any(
        example(x).shape != example(carry).shape or example(x).dtype != example(carry).dtype for x in (chosen, update)
    ):
        return None
    kind, a, b, equal = extreme
    if kind == "logsumexp" and example(carry).is_complex():
        raise NotAffine("a complex logarithm has many values, and which one it is depends on the order", update)
    logical = chosen.target in _OF_CONDITIONS
    if logical and example(carry).dtype != torch.bool:
        return None
    state, other = (a, b) if affine.depends(a) else (b, a)
    if not isinstance(other, fx.Node) or affine.depends(other) or not isinstance(state, fx.Node):
        return None
    if example(other).dtype != example(carry).dtype or example(state).shape != example(carry).shape:
        return None
    if state is not carry and (logical or only is not None):
        return None
    if equal is not None:
        kind += "_old" if equal is state else "_new"
    terms = affine.of(state)
    ((own,), added) = [[t for t in terms if (t.state is None) is free] for free in (False, True)]
    if own.number != 1 or own.factors or own.state != own.out:
        raise NotAffine("it is scaled before a maximum or minimum is taken of it", update)
    if added and not is_inexact(example(carry).dtype):
        raise NotAffine("integers that are added before a maximum or minimum is taken may wrap around", update)
    dims = own.out
    if any(len(dim) > 1 for term in terms for dim in term.out):
        raise NotAffine("its dimensions are taken apart", update)
    brought = Term(1, None, None, (aligned(other, dims),), dims)
    names = tuple(a for dim in dims for a in dim)
    kept = [renamed(term, term.out, dims) for term in added] or None
    at = None if only is None else aligned(only[0], dims, only[1])
    return AtEachStep(place, carry, update, kept, [brought], names, kind, at)


def _chosen(update: fx.Node, carry: fx.Node, affine: Affine) -> tuple[fx.Node, tuple[fx.Node, str] | None]:
    """The update of a carry where it is not left as it is, and the condition that it is not, with what this is then."""
    if update.target is aten.where.self:
        condition, *values = update.args
        for value, other, how in ((*values, "true"), (*values[::-1], "false")):
            if other is carry and isinstance(value, fx.Node) and not affine.depends(condition):
                return value, (condition, how)  # pyrefly: ignore[bad-return]
    return update, None


def _extreme_of(node: Any) -> tuple[str, Any, Any, Any] | None:
    """The kind of an extreme, the two values that it is of, and, where it is chosen by a comparison, which of equals it
    is; None for other nodes."""
    if (kind := _EXTREMES.get(node.target)) is not None:
        return kind, *node.args[:2], None
    if node.target is not aten.where.self:
        return None
    condition, x, y = node.args
    compared = _COMPARED.get(condition.target)
    if compared is None or not ((x, y) == condition.args or (y, x) == condition.args):
        return None
    kind, second = compared
    if x is not condition.args[0]:
        kind = "min" if kind == "max" else "max"
    return kind, x, y, y if second else x

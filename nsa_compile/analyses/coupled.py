"""Carries that are computed from one another, element by element: one recurrence of small matrices.

`re = a * re - b * im + x; im = a * im + b * re` is a rotation that shrinks, a recurrence of complex numbers;
`level = u * (level + trend) + x; trend = w * trend + x` one of the matrices `[[u, u], [0, w]]`, one for each element.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from nsa_compile.analyses.affine import Affine, NotAffine, Term
from nsa_compile.analyses.batched_body import BatchedBody
from nsa_compile.analyses.terms import Names, all_axes, evaluate, named_alike
from nsa_compile.ir.aten import is_inexact
from nsa_compile.ir.scans import Declined, ScanRecord, ScanSite, example
from nsa_compile.ops.recurrence import matrix_recurrence, turning_recurrence

__all__ = ["Coupled", "as_coupled"]

MOST = 4  # carries of a group: each element has a matrix of all pairs


@dataclass(frozen=True, eq=False)
class Coupled:
    """`h[t][i] = Σ_j kept[i][j][t] * h[t - 1][j] + added[i][t]`, element by element."""

    places: tuple[int, ...]
    carries: tuple[fx.Node, ...]
    updates: tuple[fx.Node, ...]
    kept: Sequence[Sequence[Sequence[Term]]]
    added: Sequence[Sequence[Term]]
    names: Names

    @property
    def group(self) -> tuple[int, ...]:
        return self.places

    @property
    def yields(self) -> tuple[fx.Node, ...]:
        return *self.carries, *self.updates

    @property
    def form(self) -> str:
        return f"a running sum of {len(self.places)} carries together"

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        firsts, steps = [body.init[place] for place in self.places], body.record.length
        dtype, sizes = firsts[0].dtype, [axis.size for axis in self.names]
        kept = [[evaluate(terms, self.names, body, dtype) for terms in row] for row in self.kept]
        brought = [evaluate(terms, self.names, body, dtype).expand(steps, *sizes) for terms in self.added]
        # What is computed in more than the state is kept in is so beside all others.
        wide = functools.reduce(torch.promote_types, (x.dtype for x in (*itertools.chain(*kept), *brought)))
        kept = [[x.to(wide) for x in row] for row in kept]
        brought, first = [x.to(wide) for x in brought], [x.to(wide).reshape(sizes) for x in firsts]
        if self._turns() and not wide.is_complex:
            parts = torch.broadcast_tensors(*(row[0] for row in kept))
            found = turning_recurrence(*(torch.stack(x, -1) for x in (parts, brought, first)))
            values = found.unbind(-1)
        else:
            rows = [torch.stack([x.expand(steps, *sizes) for x in row], -1) for row in kept]
            columns = (torch.stack(x, -1)[..., None] for x in (brought, first))
            values = matrix_recurrence(torch.stack(rows, -2), *columns)[..., 0].unbind(-1)
        shaped = [x.reshape(steps, *y.shape).to(dtype) for x, y in zip(values, firsts, strict=True)]
        before = [torch.cat([y.unsqueeze(0), x[:-1]]) for x, y in zip(shaped, firsts, strict=True)]
        finals = {place: x[-1] for place, x in zip(self.places, shaped, strict=True)}
        return finals, dict(zip(self.yields, (*before, *shaped), strict=True))

    def _turns(self) -> bool:
        """Whether the matrices are `[[a, -b], [b, a]]`, as complex numbers multiply."""
        if len(self.places) != 2:
            return False
        (a, minus_b), (b, also_a) = ([_counted(terms) for terms in row] for row in self.kept)
        return a == also_a and minus_b == _counted(self.kept[1][0], -1) and bool(b)


def _counted(terms: Sequence[Term], sign: int = 1) -> Counter[tuple[float, frozenset[object]]]:
    return Counter((sign * term.number, frozenset(Counter(term.factors).items())) for term in terms)


def as_coupled(site: ScanSite, record: ScanRecord, group: tuple[int, ...], max_bytes: int) -> Coupled:
    """The form of several carries of one shape.

    Raises:
        Declined: they are of several shapes, too many or too large, or their updates are not linear in them.
    """
    placeholders, outputs = site.placeholders()[0], site.outputs()[0]
    carries, updates = ([nodes[place] for place in group] for nodes in (placeholders, outputs))
    alike = {(example(x).shape, example(x).dtype) for x in (*carries, *updates)}
    together = f"{len(group)} carries are computed from one another"
    if len(group) > MOST:
        raise Declined(f"{together}, more than {MOST}", updates[0])
    if len(alike) > 1:
        raise Declined(f"{together}, of several shapes or dtypes", updates[0])
    if not is_inexact(example(carries[0]).dtype):
        raise Declined(f"{together}, which are integers or conditions", updates[0])
    needed = record.length * example(carries[0]).numel() * example(carries[0]).element_size() * len(group) ** 2
    if needed > max_bytes:
        raise Declined(f"{together}: a matrix for each element at each step takes {needed} bytes", updates[0])
    affine = Affine(site.body, record, carries)
    try:
        found = [affine.of(update) for update in updates]
    except NotAffine as why:
        why.reason = f"{together}, and {why.reason}"
        raise
    dims, named = named_alike([term for terms in found for term in terms], updates[0])
    kept: list[list[list[Term]]] = [[[] for _ in group] for _ in group]
    added: list[list[Term]] = [[] for _ in group]
    for i, term in zip((i for i, terms in enumerate(found) for _ in terms), named, strict=True):
        if term.state is None:
            added[i].append(term)
        elif term.state != dims or term.summed:
            raise NotAffine(f"{together}, and not element by element", updates[i])
        else:
            assert term.source is not None
            kept[i][carries.index(term.source)].append(term)
    return Coupled(group, tuple(carries), tuple(updates), kept, added, all_axes(dims))

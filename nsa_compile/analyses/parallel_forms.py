"""Parallel forms of a recurrence that is linear in its state: what `affine.py` has found, put into operands.

- `AtEachStep`: the state after each step, by one operator over all of them, where a step reads the state as it likes;
- `Coupled`: the states of several carries after each step, which are computed from one another;
- `InChunks`: what products with the state yield, in chunks of steps, where it is read by products alone.

Raises `Declined` where a recurrence has neither.
"""

from __future__ import annotations

from nsa_compile import modes
from nsa_compile.analyses.affine import NotAffine
from nsa_compile.analyses.at_each_step import AtEachStep, as_extreme
from nsa_compile.analyses.batched_body import Recurrence
from nsa_compile.analyses.coupled import as_coupled
from nsa_compile.analyses.in_chunks import in_chunks
from nsa_compile.analyses.terms import State
from nsa_compile.ir.scans import Declined, ScanRecord, ScanSite, constant_value, example


def find_parallel_form(site: ScanSite, record: ScanRecord, group: tuple[int, ...], max_bytes: int) -> Recurrence:
    """The form in which the carries of a group are computed for all steps together.

    Raises:
        Declined: there is none; says which operator of the step stands against it.
    """
    if len(group) > 1:
        for place in group:
            _check_first(site, place)
        return as_coupled(site, record, group, max_bytes)
    (place,) = group
    carry, update = site.placeholders()[0][place], site.outputs()[0][place]
    if (extreme := as_extreme(site, record, place, carry, update)) is not None:
        return extreme
    _check_first(site, place)
    state = State.of(site, record, carry, update)
    steps = record.length * example(carry).numel() * example(carry).element_size()
    try:
        if any(on for _, _, on in modes.autocast_at(site.node)):
            raise NotAffine("autocast computes its products with the state in low precision", carry)
        form: Recurrence = in_chunks(site, record, place, state)
    except NotAffine as why:
        if state.mixed:
            raise
        if steps > max_bytes:
            raise Declined(f"its state at each step takes {steps} bytes, and {why.reason}", update) from why
        return AtEachStep(place, carry, update, state.kept, state.added, state.names)
    return form


def _check_first(site: ScanSite, place: int) -> None:
    first = constant_value(site.init[place], {})
    if first is not None and not bool(first.isfinite().all()):
        why = "its first state is not finite, and would be multiplied with zero where it is replaced"
        raise Declined(why, site.placeholders()[0][place])

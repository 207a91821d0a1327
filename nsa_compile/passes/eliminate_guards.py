"""eliminate_guards: prove that a cache row written after step t is never observed at step t.

Before, the buffer that step t sees is `where(written_at <= t, full, init)`: right whatever the step does with it, and
one copy of the buffer for each step. After, for each buffer whose unwritten rows provably reach no output, it is
`full`, the same for all steps. Where a step picks rows by numbers that depend on data, these are guarded, and not the
buffer (`analyses/picked_rows.py`). A buffer for which that cannot be proven keeps its guard.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.facts import Facts
from nsa_compile.analyses.outside import given_from_outside
from nsa_compile.analyses.picked_rows import guard_picks, take_back
from nsa_compile.analyses.staleness import Analysis, analyse, explain
from nsa_compile.ir.aten import aten
from nsa_compile.ir.carries import Rows
from nsa_compile.ir.rewriting import eliminate_dead_code
from nsa_compile.ir.scans import (
    Declined,
    ScanRecord,
    ScanSite,
    constant_value,
    declined_if_it_fails,
    example,
    find_scans,
    location,
)
from nsa_compile.passes.pipeline import PassContext, register


@register("eliminate_guards", requires=("carries",))
def eliminate_guards(gm: fx.GraphModule, context: PassContext) -> bool:
    """Drop the guards of buffers whose unwritten rows provably reach no output."""
    changed = False
    for site in find_scans(gm):
        record = site.record
        if record is None or record.guards_dropped or record.guards_kept or not context.may_rewrite():
            continue
        try:
            with declined_if_it_fails("its guards stay", site.node):
                dropped, kept, analysis = prove_with_guarded_picks(site, record)
        except Declined as failed:
            context.leave(failed)
            continue
        if not dropped and not kept:
            continue
        record.guards_dropped, record.guards_kept = sorted(dropped), sorted(kept)
        if dropped:
            record.settled, record.hidden = analysis.settled, analysis.hidden
        carries = site.placeholders()[0]
        for view, facts in kept.items():
            op, place, why = explain(facts)
            carry = next((carry for carry in carries if carry.name == view.removesuffix(".before")), None)
            if facts.trail is None and carry is not None:
                place = location(carry)  # where it is written
            declined = Declined(why)
            declined.op, declined.location = op, place
            cache = "a cache" if carry is None else site.name_of(carries.index(carry))
            context.decline(site, declined, f"keeps a copy of {cache} for each step of {{}}")
        if dropped:
            buffers = {view.removesuffix(".before") for view in dropped}
            names = [site.name_of(i) for i, carry in enumerate(carries) if carry.name in buffers]
            context.match(site.node.name, f"dropped the guards of {', '.join(names)}")
        changed = True
    return changed


def prove(site: ScanSite, record: ScanRecord) -> tuple[list[str], dict[str, Facts], Analysis]:
    """Which views of write-once buffers need no guard, and which do, with what was found out about them; and the
    analysis that shows it, with the softmaxes that have to be settled and the operands that have to be hidden.

    All guards are dropped at first; whichever the stale values that reach an output come from are put back, until
    none reach one. The views of a buffer are `name` (after the step's write) and `name.before`.
    """
    if record.proof is not None:
        return record.proof
    with unset_fake_temporarily():
        views = guarded_views(site, record)
    kept: dict[str, Facts] = {}
    while True:
        leaks, analysis = _leaks(site, record, {name: view for name, view in views.items() if name not in kept})
        if not leaks:
            record.proof = [name for name in views if name not in kept], kept, analysis
            return record.proof
        kept.update(leaks)


def prove_with_guarded_picks(site: ScanSite, record: ScanRecord) -> tuple[list[str], dict[str, Facts], Analysis]:
    """The same, with rows that are picked by data guarded by themselves where that helps; the body then has them so."""
    before = prove(site, record)
    if not before[1]:
        return before
    with unset_fake_temporarily():
        zeros = _made_of_zeros(site)
        views = {name: view for name, view in guarded_views(site, record).items() if name in before[1].keys() & zeros}
    guarded = guard_picks(site.body, record, views)
    if not guarded:
        return before
    record.proof = None
    found = prove(site, record)
    if len(found[1]) == len(before[1]):
        take_back(guarded, record)
        found = record.proof = before
    eliminate_dead_code(site.body)
    site.body.recompile()
    return found


def guarded_views(site: ScanSite, record: ScanRecord) -> dict[str, tuple[fx.Node, Tensor, int]]:
    """The views of write-once buffers that a step reads: node, step from which each row is written, dimension."""
    carries, _, _ = site.placeholders()
    updates, _ = site.outputs()
    views = {}
    for carry, update, kind in zip(carries, updates, record.carries, strict=True):
        if isinstance(kind, Rows) and kind.write_once:
            written = torch.from_numpy(kind.written_at)
            never = written >= record.length  # such a row is the initial one at every step
            after = [u for u in update.users if u.target is not aten.clone.default]  # such a copy is the output
            if after or update in site.outputs()[1]:
                views[carry.name] = (update, torch.where(never, 0, written), kind.dim)
            if [u for u in carry.users if u is not update and not _only_feeds(u, update)]:
                views[f"{carry.name}.before"] = (carry, torch.where(never, 0, written + 1), kind.dim)
    return views


def _only_feeds(node: fx.Node, update: fx.Node) -> bool:
    """Whether a use of the old buffer only serves to write the new one."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n is update or n in seen:
            continue
        seen.add(n)
        if not n.users:
            return False
        todo += n.users
    return True


def _leaks(
    site: ScanSite, record: ScanRecord, views: dict[str, tuple[fx.Node, Tensor, int]]
) -> tuple[dict[str, Facts], Analysis]:
    """The views whose stale rows reach an output of the body, or a row it writes, and the analysis that says so."""
    stale: dict[fx.Node, Facts] = {}
    zeros = _made_of_zeros(site)
    for name, (node, ready, dim) in views.items():
        shape = [1] * example(node).dim()
        shape[dim] = ready.shape[0]
        with unset_fake_temporarily():
            steps = ready.reshape(shape)
            stale[node] = Facts(ready=steps, blank=steps if name in zeros else None, sources=frozenset([name]))
    # Views that are not stale are guarded, or looked up in their tables: right at every step.
    analysis = analyse(site.body, record, given_from_outside(site), stale)
    updates, ys = site.outputs()
    written = [kind.written for kind in record.carries if isinstance(kind, Rows)]
    latest = [u for u, kind in zip(updates, record.carries, strict=True) if not isinstance(kind, Rows)]
    leaks: dict[str, Facts] = {}
    for node in [*ys, *written, *latest]:
        facts = analysis.of(node)
        if facts.stale:
            leaks.update(dict.fromkeys(facts.sources, facts))
    return leaks, analysis


def _made_of_zeros(site: ScanSite) -> set[str]:
    """The views of buffers that hold zeros at first, and no gradient is asked for these."""
    carries, _, _ = site.placeholders()
    values = [constant_value(source, {}) for source in site.init]
    with unset_fake_temporarily():
        names = [c.name for c, x in zip(carries, values, strict=True) if x is not None and not bool(x.any())]
    return {view for name in names for view in (name, f"{name}.before")}

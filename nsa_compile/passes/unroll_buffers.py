"""unroll_buffers: attention to a ring, or to a window that is shifted, becomes attention to a cache of all steps.

Before, a step attends to a buffer of w rows that are written over, or moved, and each step would need a copy of it:

    ring = where(slots == t % w, k, ring)
    out  = attention(q, ring, ring_v)                            # masked while the ring is not full

After, the rows are those of a cache that is written once, and the window is a mask:

    cache = index_copy(cache, t, k)
    out   = attention(q, cache, cache_v)                         # masked but for t - w < position <= t

How rows and masks are followed is in `analyses/unrolling.py`. The new step is taken if the passes that come next need
no copy of its caches and make attention nodes of its softmaxes; otherwise the step stays as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from nsa_compile.analyses.masks import Unrecognised
from nsa_compile.analyses.outside import given_from_outside
from nsa_compile.analyses.staleness import analyse
from nsa_compile.analyses.unrolled_picks import PickUnroller
from nsa_compile.analyses.unrolling import Cache, Unroller
from nsa_compile.ir.aten import PICKED, SOFTMAX, aten, operand
from nsa_compile.ir.carries import Recurrent, Rows
from nsa_compile.ir.rewriting import copied_body, eliminate_dead_code
from nsa_compile.ir.scans import (
    RECORD,
    Declined,
    ScanRecord,
    ScanSite,
    Step,
    ancestors,
    declined_if_it_fails,
    example,
    find_scans,
    key_of_example,
    place_of,
    results,
    scan_results,
)
from nsa_compile.ir.step_values import Table
from nsa_compile.passes.eliminate_guards import prove, prove_with_guarded_picks
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.passes.raise_attention import is_attention
from nsa_compile.passes.resolve_carries import LoweredSite, record_of

log = logging.getLogger("nsa_compile")


# Steps times rows of a buffer that is written once and copied for each step.
COPIED_LIMIT = 2**24


@register("unroll_buffers", requires=("carries",))
def unroll_buffers(gm: fx.GraphModule, context: PassContext) -> bool:
    """Turn attention to buffers of rows that move, or are written over, into attention to caches of all steps."""
    changed = False
    if not {"eliminate_guards", "raise_attention", "batch_prefill"}.isdisjoint(context.options.disable):
        return False  # without these, a cache of all steps costs more than the buffer
    for site in find_scans(gm):
        if site.record is None or not context.may_rewrite():
            continue
        left_out: dict[str, Unrecognised] = {}
        try:
            with declined_if_it_fails(_LEFT, site.node):
                trial = _successful_trial(site, left_out) if _has_candidates(site) else None
        except Declined as why:
            context.leave(why)
            continue
        if trial is not None:
            what = ", ".join(sorted({site.name_of(cache.buffer) for cache in trial.caches})) or "picked rows"
            trial.finish()
            context.match(site.node.name, f"all rows of {what} in a cache")
            changed = True
        for product in left_out.values():
            context.leave(Declined(f"{_LEFT}: {product.why}", product.node))
    return changed


_LEFT = "attention to rows that move keeps a copy of them for each step"


def _successful_trial(site: ScanSite, left_out: dict[str, Unrecognised]) -> _Trial | None:
    """A step that is in the place of the scan's own and of use there, or None, with the scan as it was.

    Products that cannot be unrolled, or need not be, are added to those left out.
    """
    while (trial := _Trial.of(site, left_out)) is not None:
        try:
            culprits = trial.put_in_place()
        except Exception:
            trial.take_back()
            raise
        if not culprits:
            return trial
        trial.take_back()
        left_out |= culprits
    return None


def _has_candidates(site: ScanSite) -> bool:
    """Whether there are rows that move, or picked ones, or buffers that would be copied for each step."""
    record = site.record
    assert record is not None
    picks = (aten.index_select.default, aten.index.Tensor, aten.gather.default)
    if any(isinstance(kind, Rows) and not kind.write_once for kind in record.carries):
        return True
    if any(n.target in picks and n not in record.known for n in site.body.graph.nodes):
        return True
    return bool(_copied_buffers(site, record)[0])


def _copied_buffers(site: ScanSite, record: ScanRecord) -> tuple[set[int], set[str]]:
    """Buffers that are written once and would be copied for each step, or might as well, with all that are written at
    the same steps; and the names of the nodes that are the cause."""
    nodes = site.body.graph.nodes
    if not any(n.target in SOFTMAX for n in nodes):
        return set(), set()
    _, kept, proof = prove(site, record)
    causes = {name.removesuffix(".before") for name in kept} | {node.name for node, _ in proof.hidden}
    carries, _, _ = site.placeholders()
    updates, _ = site.outputs()
    once = {
        i: kind
        for i, kind in enumerate(record.carries)
        if isinstance(kind, Rows) and kind.write_once and kind.steps * kind.size <= COPIED_LIMIT
    }
    causes |= {updates[i].name for i in once if carries[i].name in causes}
    return (set(once), causes) if once and causes else (set(), set())


@dataclass
class _Trial:
    """A step that attends to caches of all steps, and what it takes to put it in the place of another one."""

    site: ScanSite
    body: fx.GraphModule
    caches: list[Cache]
    step: fx.Node
    step_is_new: bool
    softmaxes: dict[str, list[str]]  # a product: the softmaxes of the new one
    name: str = ""  # of the step, in the graph that it is put into

    @classmethod
    def of(cls, site: ScanSite, left_out: dict[str, Unrecognised]) -> _Trial | None:
        """The step with all products over moving rows unrolled but those left out; None if there are none.

        Products that cannot be unrolled are added to those left out.
        """
        assert site.record is not None
        buffers, causes = _copied_buffers(site, site.record)
        while True:
            body = copied_body(site.body)
            view = LoweredSite(site.owner, site.node, body)
            record = record_of(view)
            analysis = analyse(body, record, given_from_outside(view), {})
            updates, _ = view.outputs()
            kinds = zip(updates, record.carries, strict=True)
            needed_by_recurrences = ancestors([u for u, kind in kinds if isinstance(kind, Recurrent)])
            step, is_new = _step_index(view, record)
            unroller = Unroller(body, record, analysis, step, buffers)
            moving = {n for n, (i, _) in unroller.buffers.items() if i not in buffers}
            old = set(body.graph.nodes)
            softmaxes: dict[str, list[str]] = {}
            failed = False
            for product in unroller.products():
                read = unroller.read_by(product) | {product}
                picks = any(n.target in PICKED for n in read)
                if read.isdisjoint(moving) and not picks and causes.isdisjoint(n.name for n in read):
                    continue
                if product.name in left_out or product in needed_by_recurrences:
                    continue
                try:
                    new = unroller.unroll(product)
                except Unrecognised as why:
                    left_out[product.name], failed = why, True
                    break
                softmaxes[product.name] = [n.name for n in ancestors([new]) - old if n.target in SOFTMAX]
            by_data = PickUnroller(body, record, analysis)
            for product in by_data.products() if not failed else ():
                if product.name in left_out or product in needed_by_recurrences:
                    continue
                try:
                    new = by_data.unroll(product)
                except Unrecognised as why:
                    left_out[product.name], failed = why, True
                    break
                softmaxes[product.name] = [n.name for n in ancestors([new]) - old if n.target in SOFTMAX]
            if not failed:
                caches = list(unroller.caches.values())
                return cls(site, body, caches, step, is_new, softmaxes) if softmaxes else None

    def put_in_place(self) -> dict[str, Unrecognised]:
        """Let the scan run this step; the products for which that does not help, and why."""
        site, scan = self.site, self.site.node
        carries = len(site.init)
        self.before = scan.args, dict(scan.meta)
        build = _Outside(site.owner, scan)
        self.added = build.added
        output = self.body.graph.output_node()
        returned = results(self.body)
        output.args = ([*returned[:carries], *(cache.after for cache in self.caches), *returned[carries:]],)
        eliminate_dead_code(self.body)
        self.body.recompile()
        self.name = PassContext.add_module(site.owner, f"{operand(scan).target}_unrolled", self.body)
        called = build.graph(self.name)
        called.meta = dict(operand(scan).meta)
        init = [*site.init, *(build.first_rows(cache, site.init[cache.buffer]) for cache in self.caches)]
        xs = [*site.xs, *([build.steps(site.length, example(site.xs[0]).device)] if self.step_is_new else [])]
        scan.args = (called, init, xs, *scan.args[3:])
        key = key_of_example(scan)
        found = scan_results(scan)
        scan.meta[key] = type(scan.meta[key])([*found[:carries], *map(example, init[carries:]), *found[carries:]])
        scan.meta[RECORD] = record = record_of(site)
        dropped, kept, proof = prove_with_guarded_picks(site, record)
        if kept and not self.caches:
            why = Unrecognised("a row that is not written yet might reach an output", next(iter(proof.facts)))
            return dict.fromkeys(self.softmaxes, why)
        for cache in self.caches:
            if kept.keys() & {cache.before.name, f"{cache.before.name}.before"}:
                why = Unrecognised("a row that is not there might reach an output", cache.after)
                return dict.fromkeys(self.softmaxes, why)
        record.guards_dropped, record.settled, record.hidden = sorted(dropped), proof.settled, proof.hidden
        culprits = {}
        by_name = {n.name: n for n in self.body.graph.nodes}
        step = Step(scan.name, self.body, record)
        for product, names in self.softmaxes.items():
            for softmax in (by_name[name] for name in names):
                if not is_attention(step, site, softmax):
                    culprits[product] = Unrecognised("no operator has attention of this form", softmax)
        record.guards_dropped, record.settled, record.hidden = [], {}, {}
        return culprits

    def finish(self) -> None:
        """Renumber what the scan yields."""
        carries = len(self.site.init) - len(self.caches)
        for user in list(self.site.node.users):
            if place_of(user) >= carries:
                user.update_arg(1, place_of(user) + len(self.caches))
        eliminate_dead_code(self.site.owner)

    def take_back(self) -> None:
        """Let the scan run the step that it ran before."""
        scan = self.site.node
        scan.args, scan.meta = self.before
        for node in reversed(self.added):
            self.site.owner.graph.erase_node(node)
        if self.name:
            delattr(self.site.owner, self.name)


def _step_index(site: ScanSite, record: ScanRecord) -> tuple[fx.Node, bool]:
    """The input of a step that says its number, and whether it is a new one."""
    _, xs, _ = site.placeholders()
    for x in xs:
        value = record.known.get(x)
        if isinstance(value, Table) and not value.shape and value.values.dtype == torch.int64:
            with unset_fake_temporarily():
                if torch.equal(value.values, torch.arange(record.length)):
                    return x, False
    fake = example(xs[0])
    with site.body.graph.inserting_after(xs[-1]):
        step = site.body.graph.placeholder("step")
    assert isinstance(fake, FakeTensor)
    with fake.fake_mode:
        step.meta["val"] = torch.empty((), dtype=torch.int64, device=fake.device)
    return step, True


class _Outside:
    """Adds what a scan gets from outside, before it."""

    def __init__(self, owner: fx.GraphModule, scan: fx.Node) -> None:
        self.owner, self.scan = owner, scan
        self.added: list[fx.Node] = []

    def graph(self, name: str) -> fx.Node:
        with self.owner.graph.inserting_before(self.scan):
            self.added.append(self.owner.graph.get_attr(name))
        return self.added[-1]

    def steps(self, length: int, device: torch.device) -> fx.Node:
        return self._call(torch.arange, length, device=device)

    def first_rows(self, cache: Cache, init: fx.Node) -> fx.Node:
        """A cache before the first step."""
        shape, lead = list(cache.shape), cache.lead
        shape[cache.dim] -= lead
        empty = self._call(torch.zeros, shape, dtype=example(init).dtype, device=example(init).device)
        return self._call(torch.cat, [init, empty], cache.dim) if lead else empty

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.owner.graph.inserting_before(self.scan):
            node = self.owner.graph.call_function(target, args, kwargs)
        self.added.append(node)
        fake = next(x.fake_mode for x in scan_results(self.scan) if isinstance(x, FakeTensor))
        with fake, torch.no_grad():
            values: Sequence[Any] = fx.node.map_arg(args, example)
            node.meta["example_value"] = target(*values, **kwargs)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.scan.meta:
                node.meta[key] = self.scan.meta[key]
        return node

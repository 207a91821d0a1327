"""batch_prefill: the scan is gone; its body runs once, for all steps together.

Before:

    scan(body, init, xs, additional)           # S steps, one after the other

After, with every carry resolved to a function of the inputs:

    new_rows = vmap(part of the body)(xs)      # what each step writes, at the steps that write
    full     = init with all new rows in place
    ys       = vmap(rest of the body)(xs, full)

The body is evaluated backwards from its outputs, on demand. A value that is the same at all steps is computed once; a
row that is written every d steps is computed at those steps only. A carry that needs itself to be computed is a
recurrence: `parallelize_recurrences` has found a parallel form for it, or a loop remains over the part of the step that
it needs. Where that is all of the step, the scan is declined before anything has changed. What would be large over all
steps, and is made into something small, is computed in tiles of steps (`step_tiles.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nsa_compile import modes
from nsa_compile.analyses.batched_body import AsLoop, BatchedBody, Recurrence, known_constants
from nsa_compile.analyses.inner_loops import find_inner_loop, leaves_something_outside, recurrent_groups
from nsa_compile.analyses.running_sums import running_rows
from nsa_compile.analyses.step_tiles import InTiles, plan_tiles
from nsa_compile.ir.aten import aten
from nsa_compile.ir.inner_loops import place_inner_loops
from nsa_compile.ir.lowering import trace_to_aten
from nsa_compile.ir.rewriting import inline_graph
from nsa_compile.ir.scans import (
    ESCAPES,
    Declined,
    ScanRecord,
    ScanSite,
    declined_if_it_fails,
    example,
    fake_inputs,
    find_scans,
    place_of,
    results,
)
from nsa_compile.ir.zero_gradients import mark_results, match_results
from nsa_compile.passes.eliminate_guards import guarded_views
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.passes.report import RecurrenceReport


@register("batch_prefill", requires=("carries",))
def batch_prefill(gm: fx.GraphModule, context: PassContext) -> bool:
    """Replace each resolved scan by its body, batched over the sequence."""
    changed = False
    for site in find_scans(gm):
        if site.record is None or not context.may_rewrite():
            continue
        try:
            recurrences = plan_recurrences(site, site.record)
            tiles = _tiles(site, site.record, recurrences, context)
            batched = trace_batched(site, site.record, context.options.max_guard_bytes, [*recurrences, *tiles])
        except Declined as declined:
            context.decline(site, declined)
            continue
        looped = [r for r in recurrences if isinstance(r, AsLoop)]
        for recurrence in looped:
            why = site.record.why_loop(recurrence.group)
            names = ", ".join(map(site.name_of, recurrence.group))
            context.decline(site, why, f"computes {names} of {{}} step by step")
        inputs = [*site.init, *site.xs, *site.additional]
        report = context.scan(site.node.name)
        report.nodes_after = sum(n.op == "call_function" for n in batched.graph.nodes)
        report.batched = not looped
        report.recurrences = [RecurrenceReport(r.group, r.form) for r in recurrences]
        report.carries = [type(c).__name__ for c in site.record.carries]
        report.guards_kept, report.guards_dropped = guards(site, site.record)
        match_results(site, batched)
        modes.end_autocast(site.node, site.node, modes.autocast_at(site.node))
        inline_graph(site.owner, site.node, batched, inputs)
        placed = place_inner_loops(site.owner)
        for made in find_scans(site.owner):
            if made.node in placed:
                mark_results(made)
        in_tiles = f", some of them in tiles of {tiles[0].size} steps" if tiles else ""
        context.match(site.node.name, f"{site.record.length} steps became {report.nodes_after} operators{in_tiles}")
        changed = True
    return changed


def _tiles(
    site: ScanSite, record: ScanRecord, recurrences: Sequence[Recurrence], context: PassContext
) -> list[InTiles]:
    """What is computed in tiles; a note in the report where that cannot be."""
    try:
        with declined_if_it_fails("what is large over all its steps is held", site.node):
            return plan_tiles(site, record, recurrences, context.options.tile_bytes)
    except Declined as why:
        context.leave(why)
        return []


def plan_recurrences(site: ScanSite, record: ScanRecord) -> list[Recurrence]:
    """How each recurrence of a step is computed: in parallel where that was found possible, otherwise by a loop.

    Raises:
        Declined: nothing of the step could be done outside of these loops.
    """
    groups = recurrent_groups(record)
    needed = {group: find_inner_loop(site, record, group) for group in groups}
    unwritten = {*record.settled, *(node for node, _ in record.hidden)}
    for group, loop in needed.items():
        if not unwritten.isdisjoint(loop.nodes):
            why = "the recurrence reads rows of a cache that are not yet written, which only a whole loop does right"
            raise Declined(why, site.outputs()[0][group[0]])
    loops = {g: loop for g, loop in needed.items() if not isinstance(record.parallel.get(g), Recurrence)}
    if loops and not leaves_something_outside(site, record, list(loops.values())):
        raise record.why_loop(next(iter(loops))).afresh()
    return [AsLoop(loops[g]) if g in loops else record.parallel[g] for g in groups]


def guards(site: ScanSite, record: ScanRecord) -> tuple[list[str], list[str]]:
    """Names of the buffer views that keep a guard, and of those that do not."""
    views = guarded_views(site, record)
    return [v for v in views if v not in record.guards_dropped], [v for v in views if v in record.guards_dropped]


def trace_batched(
    site: ScanSite, record: ScanRecord, max_guard_bytes: int, recurrences: Sequence[Recurrence]
) -> fx.GraphModule:
    """The batched form of one scan as a graph of its own, `(init, xs, additional) -> (carries, ys)`.

    Raises:
        Declined: nothing has been changed then.
    """
    n_init, n_xs = len(site.init), len(site.xs)
    with declined_if_it_fails("the step cannot be batched", site.node):
        constants, sums = known_constants(record), running_rows(record, site.body)

    def batched(*inputs: Tensor) -> list[Tensor]:
        init, xs, additional = inputs[:n_init], inputs[n_init : n_init + n_xs], inputs[n_init + n_xs :]
        evaluator = BatchedBody(site, record, init, xs, additional, max_guard_bytes, recurrences, constants, sums)
        return evaluator.final_carries() + evaluator.ys()

    fakes = fake_inputs([*site.init, *site.xs, *site.additional])
    with declined_if_it_fails("the step cannot be batched", site.node):
        try:
            graph = trace_to_aten(batched, fakes)
        except Declined:
            raise
        except Exception:  # vmap writes in place to what it has made, which functionalization follows at more cost
            graph = trace_to_aten(torch.func.functionalize(batched, remove="mutations"), fakes)
        escaping = {place_of(user) for user in site.node.users if ESCAPES in user.meta}
        _keep_outputs_apart(graph, escaping)
    return graph


def _keep_outputs_apart(graph: fx.GraphModule, escaping: Collection[int]) -> None:
    """Copy the outputs that share memory with an input, a constant or another output: those of a loop share none.

    Copied is also what the caller gets to see, who may write to the results of a loop before he asks for gradients: an
    operator such as tanh keeps its result for the backward pass.
    """
    output = graph.graph.output_node()
    given = set(graph.graph.find_nodes(op="placeholder") + graph.graph.find_nodes(op="get_attr"))
    outputs, returned = [], list[fx.Node]()
    for i, value in enumerate(results(graph)):
        source = value
        while source.op == "call_function" and _may_alias(source):
            source = source.all_input_nodes[0]
        if source in given or source in returned or i in escaping:
            with graph.graph.inserting_before(output):
                for _ in range(1 + returned.count(source)):
                    value = _copied(graph, value)
        returned.append(source)
        outputs.append(value)
    output.args = (outputs,)
    graph.recompile()


def _copied(graph: fx.GraphModule, value: fx.Node) -> fx.Node:
    """A copy that stays one: Inductor takes clones away, each by itself, until results share memory with what they
    were copied from (torch 2.13). It computes products. Of two equal ones it makes one; the second of two copies is
    therefore a product of a product.
    """
    x = example(value)

    def call(target: OpOverload, *args: Any, val: Tensor = x) -> fx.Node:
        node = graph.graph.call_function(target, args)
        node.meta = value.meta | {"val": val}
        return node

    if x.dtype == torch.bool:
        return call(aten.ne.Scalar, value, 0)
    if x.dtype.is_complex:
        x = x.resolve_conj()  # a conjugate that is a view has no numbers of its own
        resolved = call(aten.resolve_conj.default, value, val=x)
        numbers = torch.view_as_real(x)
        product = call(aten.mul.Tensor, call(aten.view_as_real.default, resolved, val=numbers), 1, val=numbers)
        return call(aten.view_as_complex.default, product, val=x)
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:  # numbers that are not multiplied
        numbers = x.view(torch.uint8)
        product = call(aten.mul.Tensor, call(aten.view.dtype, value, torch.uint8, val=numbers), 1, val=numbers)
        return call(aten.view.dtype, product, x.dtype)
    return call(aten.mul.Tensor, value, 1)


# What yields its operand, or may: a cat of one tensor and of empty ones is one that Inductor takes away.
_NO_COMPUTATION = {
    aten.reshape.default, aten._unsafe_view.default, operator.getitem, aten.clone.default, aten.cat.default,
    aten.slice_scatter.default, aten.constant_pad_nd.default,
}  # fmt: skip


def _may_alias(node: fx.Node) -> bool:
    """Whether a node may be a view of its first operand, or becomes one."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(a.alias_info is not None for a in schema.arguments)
    return is_view or node.target in _NO_COMPUTATION

"""raise_attention: matmul · scale · mask · softmax · matmul becomes one attention node that knows its mask.

Before, in the body of a scan, or in a graph that is one step by itself:

    scores  = bmm(q, kᵀ) * scale
    scores  = masked_fill(scores, ~keep, -inf)          # or where, or an additive mask, or SDPA in its math form
    weights = softmax(scores)                           # masked once more, cast, reshaped
    out     = bmm(weights, v)

After:

    out = nsa_compile.attention(q, k, v, keep, kind="window", params=[512], ...)

The pattern is anchored at the softmax (`analyses/softmax.py`): up from it to the product of queries and keys, down to
the product with the values. The mask is described by its values, which are known at every step, not by how it was
written. What is not attention in all this stays as it is, and is reported.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.attention_costs import runs_in_place
from nsa_compile.analyses.facts import Given
from nsa_compile.analyses.magnitudes import floor_level
from nsa_compile.analyses.masks import (
    Mask,
    Unrecognised,
    conjunction,
    mask_tensor,
)
from nsa_compile.analyses.nan_rows import keys_there
from nsa_compile.analyses.outside import given_from_outside
from nsa_compile.analyses.scores import (
    KeySet,
    Mass,
    Read,
    build_call,
    build_logits,
    build_scored,
    build_shares,
    key_sets,
    regrouped,
    values_of,
    weighted_values,
)
from nsa_compile.analyses.selection import find_selection, keeps_best
from nsa_compile.analyses.softmax import (
    AttentionRecord,
    Output,
    Product,
    Scores,
    check_read_by,
    remember,
    walk_down,
    walk_up,
)
from nsa_compile.analyses.staleness import Analysis, analyse
from nsa_compile.analyses.weights import weighted_sums
from nsa_compile.ir.aten import SOFTMAX, arguments, aten, operand
from nsa_compile.ir.attention import ATTENTION, NAN_ROWS, WEIGHTED, All, AttentionCall, Blocks, Opaque, Window
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code, replace_earlier
from nsa_compile.ir.scans import (
    Declined,
    ScanRecord,
    ScanSite,
    Step,
    ancestors,
    declined_if_it_fails,
    example,
    find_scans,
    find_steps,
    location,
)
from nsa_compile.passes.pipeline import PassContext, register


@register("raise_attention", requires=("carries",), ensures=("attention",))
def raise_attention(gm: fx.GraphModule, context: PassContext) -> bool:
    """Find attention in step bodies and make each one node that knows its mask."""
    changed = False
    in_place = context.options.attention != "dense" and runs_in_place(gm)
    sites = {site.body: site for site in find_scans(gm)}
    for step in find_steps(gm):
        try:
            with declined_if_it_fails("its values cannot be followed", step.body.graph.output_node()):
                given = given_from_outside(sites[step.body]) if step.body in sites else Given()
                analysis = analyse(step.body, step.record, given, {})
        except Declined as why:
            context.leave(why)
            continue
        for softmax in [n for n in step.body.graph.nodes if n.target in SOFTMAX]:
            try:
                changed |= _raise(step, sites.get(step.body), softmax, analysis, in_place, context)
            except Unrecognised as found:
                context.leave(Declined(found.why, found.node))
        if step.body in sites:
            with contextlib.suppress(Unrecognised):
                changed |= _raise_sums(step, sites[step.body], analysis, context)
        if changed:
            eliminate_dead_code(step.body)
            step.body.recompile()
    return changed


def _raise(
    step: Step, site: ScanSite | None, softmax: fx.Node, analysis: Analysis, in_place: bool, context: PassContext
) -> bool:
    """Make attention of a softmax; of one that is no step of a scan, attention to masked products alone.

    Raises:
        Unrecognised: that is not what it is.
    """
    if site is not None and log_sums(softmax):  # which no other attention yields
        with contextlib.suppress(Unrecognised):
            return _raise_scores(step, site, softmax, analysis, "its log-sum-exp is read as well", context)
    try:
        with (
            unset_fake_temporarily(),
            torch.no_grad(),
            declined_if_it_fails("it cannot be analysed", softmax, Unrecognised),
        ):
            known, outputs = _attention(step, softmax, analysis, by_itself=site is None, in_place=in_place)
    except Unrecognised as found:
        if site is None:
            raise
        try:
            return _raise_scores(step, site, softmax, analysis, found.why, context)
        except Unrecognised as neither:
            context.leave(Declined(neither.why, neither.node))
            raise found from neither
    changed = False
    for output in outputs:
        if context.may_rewrite():
            replace_output(step.body, known, output, step.record)
            context.match(step.name, f"{described(known.mask)} at {location(softmax)}")
            changed = True
    return changed


def _attention(
    step: Step, softmax: fx.Node, analysis: Analysis, *, by_itself: bool, in_place: bool
) -> tuple[AttentionRecord, list[Output]]:
    """A softmax as attention to masked products.

    Raises:
        Unrecognised: it is no such attention.
    """
    record = step.record
    scores = walk_up(softmax, record)
    _check_scores(softmax, scores, analysis)
    mask = conjunction(scores.conditions, record)
    scores.keeps_one = keeps_best(mask, scores.product.shape, record, analysis.magnitudes)
    outputs = walk_down(softmax, scores, mask, record)
    if by_itself:  # no batching will bring its scores and their ranking together
        check_read_by(outputs, softmax, record, may_rank=in_place)
    if isinstance(mask.kind, Opaque) and not mask.data and not by_itself:
        raise Unrecognised("its mask is known, and of no kind that an operator has", softmax)
    if mask.data and not by_itself:
        find_selection(softmax, mask, scores.product.shape, step)  # else it is a program of scores
    return AttentionRecord(softmax, scores, mask), outputs


def _check_scores(softmax: fx.Node, scores: Scores, analysis: Analysis) -> None:
    """That the scores that masks keep stand out from what masks put in the place of others."""
    size = analysis.magnitudes.of(softmax.args[0])
    if not scores.conditions:
        return
    if size is None or not size.stands_out:
        raise Unrecognised("its scores may be infinite, or as low as masked ones", softmax)
    scores.never_nan = softmax.target is aten._safe_softmax.default or size.finite or analysis.one_is_kept(softmax)


def _raise_scores(
    step: Step, site: ScanSite, softmax: fx.Node, analysis: Analysis, why: str, context: PassContext
) -> bool:
    """Make attention by scores of a program of a softmax; `why` it is nothing simpler.

    Raises:
        Unrecognised: that is not what it is.
    """
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        declined_if_it_fails("it cannot be analysed", softmax, Unrecognised),
    ):
        sets, reads, n = _by_scores(step, site, softmax, analysis)
    if not context.may_rewrite():
        return False
    replace_by_scores(step, softmax, sets, reads, n)
    several = f" over {len(sets)} sets of keys" if len(sets) > 1 else ""
    context.match(step.name, f"attention by a program of scores{several} at {location(softmax)}: {why}")
    return True


def _by_scores(
    step: Step, site: ScanSite, softmax: fx.Node, analysis: Analysis
) -> tuple[list[KeySet], list[Read], int]:
    """A softmax as attention by scores of a program: its sets of keys, who reads them, and of how many sequences.

    Raises:
        Unrecognised: it is no such attention.
    """
    sets = key_sets(step, softmax, len(site.xs), floors_vanish=analysis._floors_vanish(softmax))
    size = analysis.magnitudes.of(operand(softmax))
    may_be_removed = size is None or size.bound == math.inf
    never_nan = size is not None and size.finite
    reads = weighted_values(softmax, sets, step.record, never_nan=never_nan, may_be_removed=may_be_removed)
    if any(keys.products and all(r.keys != i for r in reads) for i, keys in enumerate(sets)):
        raise Unrecognised("the weights of a part of its keys are not multiplied with values", softmax)
    if not all(sets[read.keys].products or len(sets[read.keys].columns) == 1 for read in reads):
        raise Unrecognised("the scores of a part of its keys come from no product with queries", softmax)
    products = [read.product for read in reads] + [side.product for keys in sets for side in keys.products]
    if not all(analysis.is_finite(x) for product in products for x in product.node.args):
        raise Unrecognised("what it multiplies may hold infinities or NaN", softmax)
    if analysis.may_be_nan(softmax) and not _keeps_best(sets, analysis, step.record):
        reads = [
            read
            if read.masked or read.without_nan
            else replace(read, nan_from=keys_there(read.product.values, sets[read.keys].mask, step.record))
            for read in reads
        ]
    n = max(read.product.shape[0] for read in reads)
    n = max(n, *(keys.shape[0] for keys in sets if keys.products))
    return [regrouped(keys, n).by_distance(step.record) if keys.products else keys for keys in sets], reads, n


def _keeps_best(sets: list[KeySet], analysis: Analysis, record: ScanRecord) -> bool:
    """Whether a ranking makes sure that a key of the only set is kept."""
    if len(sets) > 1 or not sets[0].products:
        return False
    return keeps_best(sets[0].mask, sets[0].products[0].product.shape, record, analysis.magnitudes)


def is_attention(step: Step, site: ScanSite, softmax: fx.Node) -> bool:
    """Whether a softmax will become an attention node."""
    analysis = analyse(step.body, step.record, given_from_outside(site), {})
    with unset_fake_temporarily(), torch.no_grad():
        for recognise in (
            lambda: _attention(step, softmax, analysis, by_itself=False, in_place=False),
            lambda: _by_scores(step, site, softmax, analysis),
        ):
            try:
                with declined_if_it_fails("it cannot be analysed", softmax, Unrecognised):
                    recognise()
                return True
            except Unrecognised:
                continue
    return False


def replace_by_scores(step: Step, softmax: fx.Node, sets: list[KeySet], reads: list[Read], n: int) -> None:
    """Put attention by scores of a program in the place of the products of the weights of a softmax with values.

    Several sets of keys share one softmax: each gets the part of the weights that its log-sum-exp has.
    """
    rows = example(softmax).numel() // sum(len(keys.columns) for keys in sets)
    products = {read.product.node for read in reads}
    build = NodeBuilder(step.body, [node for node in step.body.graph.nodes if node in products][-1])
    outputs = [_build_output(sets[read.keys], values_of(read, n, build), rows, step.record, build) for read in reads]
    of_sets = {read.keys: mass for read, (_, mass) in zip(reads, outputs, strict=True)}
    if len(sets) > 1:
        masses = [of_sets[i] if i in of_sets else build_logits(keys, rows, build) for i, keys in enumerate(sets)]
        shares = build_shares(masses, build)
    else:
        _replace_log_sums(softmax, outputs[0][1].lse, build)
        masses = [outputs[0][1]]
    none = _without_keys(masses, build) if any(read.nan_from for read in reads) else None
    for read, (out, mass) in zip(reads, outputs, strict=True):
        if len(sets) > 1:
            share = build(aten.select.int, shares, 0, read.keys)
            share = build(aten.reshape.default, share, [n, 1, rows // n, 1])
            share = build(aten._to_copy.default, share, dtype=example(out).dtype)
            out = build(aten.mul.Tensor, out, share)
        elif read.masked:
            kept = build(aten.gt.Scalar, mass.lse, floor_level(example(mass.lse).dtype) / 2)
            kept = build(aten.reshape.default, kept, [n, 1, rows // n, 1])
            out = build(aten.where.ScalarOther, kept, out, 0.0)
        if none is not None and read.nan_from:
            out = _with_nan(out, none, mass.lse, read, build)
        _replace_product(read.product, out, build)


def _without_keys(masses: list[Mass], build: NodeBuilder) -> fx.Node:
    """Which queries keep no key of any set, `[R]`."""
    removed = [build(aten.eq.Scalar, mass.lse, -math.inf) for mass in masses]
    return functools.reduce(lambda a, b: build(aten.bitwise_and.Tensor, a, b), removed)


def _with_nan(out: fx.Node, none: fx.Node, lse: fx.Node, read: Read, build: NodeBuilder) -> fx.Node:
    """An output `[N, 1, m, Dv]` with NaN for the queries `none [R]` that keep no key."""
    n, _, m, _ = example(out).shape
    none, lse = (build(aten.reshape.default, x, [n, 1, m]) for x in (none, lse))
    # NaN of -inf: what comes back to the scores is NaN, too.
    nan = build(aten.where.Scalar, none, math.nan, 0.0)
    nan = build(aten.mul.Tensor, build(aten.where.ScalarOther, none, lse, 0.0), nan)
    nan = build(aten._to_copy.default, build(aten.unsqueeze.default, nan, 3), dtype=example(out).dtype)
    out = build(aten.add.Tensor, out, nan)
    return build(NAN_ROWS, out, none, values_of(read, n, build), list(read.nan_from))


def _replace_product(product: Product, out: fx.Node, build: NodeBuilder) -> None:
    """Put `[N, 1, m, Dv]` in the place of a product of weights and values."""
    m = product.shape[1]
    out = build(aten.reshape.default, out, [product.shape[0], m, example(out).shape[-1]])
    if product.flipped:
        out = build(aten.transpose.int, out, 1, 2)
    out = build(aten.reshape.default, out, list(example(product.node).shape))
    if example(out).dtype != example(product.node).dtype:
        out = build(aten._to_copy.default, out, dtype=example(product.node).dtype)
    replace_earlier(product.node, out)


def _raise_sums(step: Step, site: ScanSite, analysis: Analysis, context: PassContext) -> bool:
    """Make an operator of each sum of values by weights that no softmax has made."""
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        declined_if_it_fails("it cannot be analysed", step.body.graph.output_node(), Unrecognised),
    ):
        found = weighted_sums(step, len(site.xs), analysis)
    changed = False
    for sums in found:
        if not context.may_rewrite():
            break
        build, (n, _, keys) = NodeBuilder(step.body, sums.node), sums.keys.shape
        if sums.read is None:
            ones = build(aten.full.default, [n, keys, 1], 1, dtype=example(sums.node).dtype, device=build.device)
            out = build_call(WEIGHTED, sums.keys, ones, step.record, build)
            replace_earlier(sums.node, build(aten.reshape.default, out, list(example(sums.node).shape)))
        else:
            values = values_of(sums.read, n, build)
            _replace_product(sums.read.product, build_call(WEIGHTED, sums.keys, values, step.record, build), build)
        context.match(step.name, f"values summed by weights of a program at {location(sums.node)}")
        changed = True
    return changed


def _build_output(
    keys: KeySet, values: fx.Node, rows: int, record: ScanRecord, build: NodeBuilder
) -> tuple[fx.Node, Mass]:
    """What a set of keys yields by itself, and what it weighs. A single key yields its value, whatever its score."""
    if keys.products:
        return build_scored(keys, values, record, build)
    n, _, width = example(values).shape
    out = build(aten.expand.default, build(aten.unsqueeze.default, values, 2), [n, 1, rows // n, width])
    return out, build_logits(keys, rows, build)


def log_sums(softmax: fx.Node) -> list[fx.Node]:
    """The log-sum-exps of the scores of a softmax, which both run over the last dimension."""
    scores, last = operand(softmax), example(softmax).dim() - 1
    if arguments(softmax).dim % (last + 1) != last:
        return []
    found = [n for n in scores.users if n.target is aten.logsumexp.default]
    return [n for n in found if [d % (last + 1) for d in arguments(n).dim] == [last]]


def _replace_log_sums(softmax: fx.Node, lse: fx.Node, build: NodeBuilder) -> None:
    """Put the log-sum-exp `[R]` of an attention in the place of those that are computed from all scores."""
    for node in log_sums(softmax):
        if example(lse).dtype == example(node).dtype and node not in ancestors([lse]):
            replace_earlier(node, build(aten.reshape.default, lse, list(example(node).shape)))


def described(mask: Mask) -> str:
    """A mask in words, for reports."""
    match mask.kind:
        case All():
            words = "attention to every key"
        case Window(size):
            words = f"attention to a window of {size}"
        case Blocks(size, stride):
            words = f"attention to blocks of {size} with stride {stride}, once they are complete"
        case Opaque():
            words = "attention under a mask of its own"
    return words + (" and a mask that depends on data" if mask.data else "")


def replace_output(body: fx.GraphModule, known: AttentionRecord, output: Output, record: ScanRecord) -> None:
    """Put an attention node in the place of a product of weights and values."""
    scores: Scores = known.scores
    product = output.product
    build = NodeBuilder(body, product.node)
    n, m, keys = scores.product.shape
    q, k = scores.product.operands(build)
    _, v = product.operands(build)
    call = AttentionCall(
        build(aten.unsqueeze.default, q, 1),
        build(aten.transpose.int, k, 1, 2),
        v,
        mask_tensor(build, scores.conditions, (n, m), keys, record),
        None,
        scores.scale,
        # The kind says all of a mask, or nothing.
        Opaque() if known.mask.data else known.mask.kind,
        nan_from=output.nan_from,
    )
    node = build(ATTENTION, *call.args)
    remember(node, known)
    result = build(aten.squeeze.dim, node, 1)
    if product.flipped:
        result = build(aten.transpose.int, result, 1, 2)
    product.node.replace_all_uses_with(build(aten.reshape.default, result, list(example(product.node).shape)))

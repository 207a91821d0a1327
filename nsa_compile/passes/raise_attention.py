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

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.attention_costs import runs_in_place
from nsa_compile.analyses.magnitudes import given_magnitudes
from nsa_compile.analyses.masks import Mask, Unrecognised, conjunction, mask_tensor
from nsa_compile.analyses.softmax import (
    AttentionRecord,
    Output,
    Scores,
    check_read_by,
    check_scores,
    remember,
    walk_down,
    walk_up,
)
from nsa_compile.analyses.staleness import analyse
from nsa_compile.ir.aten import SOFTMAX, aten
from nsa_compile.ir.attention import ATTENTION, All, AttentionCall, Blocks, Opaque, Window
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code
from nsa_compile.ir.scans import Declined, ScanRecord, example, find_scans, find_steps, location
from nsa_compile.passes.pipeline import PassContext, register


@register("raise_attention", requires=("carries",), ensures=("attention",))
def raise_attention(gm: fx.GraphModule, context: PassContext) -> bool:
    """Find attention in step bodies and make each one node that knows its mask."""
    changed = False
    in_place = context.options.attention != "dense" and runs_in_place(gm)
    given = {site.body: given_magnitudes(site) for site in find_scans(gm)}
    for step in find_steps(gm):
        record = step.record
        analysis = analyse(step.body, record, given.get(step.body, {}), {})
        for softmax in [n for n in step.body.graph.nodes if n.target in SOFTMAX]:
            try:
                with unset_fake_temporarily(), torch.no_grad():
                    scores = walk_up(softmax, record)
                    check_scores(softmax, scores, analysis)
                    outputs = walk_down(softmax, scores, record)
                    if step.body is gm:  # no batching will bring its scores and their ranking together
                        check_read_by(outputs, softmax, record, may_rank=in_place)
                    mask = conjunction(scores.conditions, record)
            except Unrecognised as found:
                context.leave(Declined(found.why, found.node))
                continue
            for output in outputs:
                if context.may_rewrite():
                    replace_output(step.body, AttentionRecord(softmax, scores, mask), output, record)
                    context.match(step.name, f"{described(mask)} at {location(softmax)}")
                    changed = True
        if changed:
            eliminate_dead_code(step.body)
            step.body.recompile()
    return changed


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

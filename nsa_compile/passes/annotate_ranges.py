"""annotate_ranges: say of each node which named range it belongs to.

The last pass, and only on request (`nvtx=True`). It labels nodes and changes no computation; `ir/markers.py`
opens and closes the ranges in the compiled program, forward and backward.

| range | what it names |
|---|---|
| `nsa.proj` | projections, RoPE and the norm before them |
| `nsa.cmp` | compression of blocks (φ) and attention to them, with the ranking where one operator does both |
| `nsa.sel` | ranking, and around `nsa.sel.ranges_v2` |
| `nsa.sel.ranges_v2` | attention to the selected blocks |
| `nsa.win` | attention to the sliding window |
| `nsa.gate` | projection of the gates, and the sum of the branches |
| `nsa.mlp` | the feed-forward layer and the norm before it |
| `nsa.attention` | attention that is of none of the branches |
| `nsa.loop` | a scan that stayed a loop |

`lower_attention` has labelled attention itself. From there on: what leads only into one range belongs to it, products
with weights aside; what follows the branches, up to the next product, combines them. The rest goes by the module it was
written in: a class names its range as `nsa_range`. A label that `torch.fx.traceback.annotate({"nsa_range": …})` left in
the user's model stays.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import fx

from nsa_compile.branches import BRANCH_OF
from nsa_compile.ir.aten import aten
from nsa_compile.ir.markers import LABEL, PARENTS, label_of, set_label
from nsa_compile.ir.scans import find_scans, subgraphs
from nsa_compile.passes.pipeline import PassContext, register

ATTENTIONS = (*BRANCH_OF, "nsa.attention")
PRODUCTS = {
    F.linear, torch._C._nn.linear, torch.matmul, torch.einsum, torch.mm, torch.bmm, torch.addmm,
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.matmul.default, aten.linear.default,
    aten.einsum.default,
}  # fmt: skip
SDPA = {F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}


@register("annotate_ranges", option="nvtx")
def annotate_ranges(gm: fx.GraphModule, context: PassContext) -> bool:
    """Name the range of each node: projections, the three branches, gates, feed-forward layer."""
    if not context.may_rewrite():
        return False
    before = [label_of(node) for graph in subgraphs(gm) for node in graph.graph.nodes]
    for site in find_scans(gm):
        set_label(site.node, "nsa.loop")
    for graph in subgraphs(gm):
        _label(graph.graph)
    labels = [label_of(node) for graph in subgraphs(gm) for node in graph.graph.nodes]
    if labels == before:
        return False
    for name, count in sorted(Counter(label for label in labels if label).items()):
        context.match(name, f"{count} nodes")
    return True


def _label(graph: fx.Graph) -> None:
    nodes = [node for node in graph.nodes if node.op.startswith("call")]
    for node in nodes:
        name = _of_module(node)
        if node.target in SDPA and label_of(node) is None:
            set_label(node, "nsa.attention")
        elif name not in (None, "nsa.proj") and label_of(node) is None:
            set_label(node, name)
    _claim_what_leads_only_into(ATTENTIONS, nodes)
    for node in nodes:
        follows = {label_of(source) for source in node.all_input_nodes} & {*ATTENTIONS, "nsa.gate"}
        if follows and label_of(node) is None and node.target not in PRODUCTS:
            set_label(node, "nsa.gate")
    _claim_what_leads_only_into(("nsa.gate",), nodes)
    for node in nodes:
        name = _of_module(node)
        if name is not None and label_of(node) is None:
            set_label(node, name)
    _claim_what_leads_only_into(("nsa.proj", "nsa.mlp"), nodes)


def _claim_what_leads_only_into(names: tuple[str, ...], nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        if label_of(node) is not None or (node.target in PRODUCTS and names == ATTENTIONS):
            continue
        # What prepares the attention within a range belongs to the range around it.
        into = {PARENTS.get(name, name) if name else None for name in map(label_of, node.users)}
        if len(into) == 1 and (name := into.pop()) in names:
            assert name is not None
            set_label(node, name)


def _of_module(node: fx.Node) -> str | None:
    """The range of the innermost module that a node was written in and whose class names one."""
    kinds = [kind for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    return next((name for kind in reversed(kinds) if (name := getattr(kind, LABEL, None))), None)

"""skinny_products: what multiplies few rows by a weight reads the weight once.

Before, in a step that generates a token of each of M sequences:

    y = mm(x, t(weight))                # x [M, K], weight [N, K]
    z = addmm(bias, x, t(weight))

After:

    y = skinny_linear(x, weight)
    z = skinny_linear(x, weight, bias)

Such a step takes as long as reading its weights takes, and a library's product of few rows reads them at a third of
what memory gives. It also sums in an order that depends on M; the operator does not, so a sequence gets the same numbers
whichever others are decoded beside it. Only where no gradient flows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from nsa_compile.ir.aten import aten
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code, replace_node
from nsa_compile.ir.scans import example, location, subgraphs
from nsa_compile.ops import skinny
from nsa_compile.passes.pipeline import PassContext, register


@register("skinny_products")
def skinny_products(gm: fx.GraphModule, context: PassContext) -> bool:
    """Read the weight once where few rows are multiplied by it."""
    changed = False
    if torch.is_grad_enabled():
        return changed
    for graph in subgraphs(gm):
        for node in list(graph.graph.nodes):
            operands = _operands(node)
            if operands is None or not context.may_rewrite():
                continue
            build = NodeBuilder(graph, node)
            x, transposed, bias = operands
            weight = build(aten.t.default, transposed)
            replace_node(node, build(torch.ops.nsa_compile.skinny_linear.default, x, weight, bias))
            context.match(location(weight), f"{_shape(x)} by a weight {_shape(weight)}")
            changed = True
        if changed:
            eliminate_dead_code(graph)
            graph.recompile()
    return changed


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """`x [M, K]`, `weightᵀ [K, N]` and the bias of a product for the operator."""
    bias: fx.Node | None = None
    if node.target is aten.mm.default and not node.kwargs:
        x, transposed = cast(Any, node.args)
    elif node.target is aten.addmm.default and not node.kwargs:  # else factors
        bias, x, transposed = cast(Any, node.args)
    else:
        return None
    rows, weight = example(x), example(transposed).t()
    if not skinny.takes(rows, weight):
        return None
    if bias is not None and (example(bias).shape != weight.shape[:1] or example(bias).dtype != rows.dtype):
        return None
    return x, transposed, bias


def _shape(node: fx.Node) -> str:
    return str(list(example(node).shape))

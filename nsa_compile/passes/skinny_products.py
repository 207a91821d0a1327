"""skinny_products: what multiplies few rows by a weight reads the weight once.

Before, in a step that generates a token of each of M sequences:

    y = mm(x, t(weight))                # x [M, K], weight [N, K]
    z = addmm(bias, x, t(weight))

After:

    y = skinny_linear(x, weight)
    z = skinny_linear(x, weight, bias)

Such a step takes as long as reading its weights takes, and a library's product of few rows reads them at a quarter to a
half of what memory gives. It also sums in an order that depends on M. The operator does not, so a sequence gets the
same numbers whichever others are decoded beside it. Only where no gradient flows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nsa_compile.ir.aten import aten
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code, replace_node
from nsa_compile.ir.scans import example, location, subgraphs
from nsa_compile.ops import skinny
from nsa_compile.passes.pipeline import PassContext, register

SKINNY = torch.ops.nsa_compile.skinny_linear.default
# As captured, where no other pass had anything to do, and as traced.
LINEAR = {F.linear, torch._C._nn.linear, aten.linear.default}


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
            x, weight, bias = operands
            context.match(location(node), f"{_shape(x)} by a weight {_shape(weight)}")
            replace_node(node, _multiply(NodeBuilder(graph, node), x, weight, bias))
            changed = True
        if changed:
            eliminate_dead_code(graph)
            graph.recompile()
    return changed


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """`x [..., K]`, a weight and the bias of a product for the operator; the weight of `mm` is `[K, N]`."""
    given: list[Any] = list(node.args)
    if node.target in LINEAR:
        x, weight, bias = (*given, None, None)[:3]
        bias = node.kwargs.get("bias", bias)
    elif node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:  # else with factors
        x, weight = given[-2:]
        bias = given[0] if node.target is aten.addmm.default else None
    else:
        return None
    operands = [example(n) for n in (x, weight, bias) if n is not None]
    rows, matrix = operands[0], operands[1] if node.target in LINEAR else operands[1].t()
    # Under autocast, a product that was not traced has another dtype than its operands.
    if any(is_traceable_wrapper_subclass(y) or y.dtype != example(node).dtype for y in operands):
        return None
    if bias is not None and example(bias).shape != matrix.shape[:1]:
        return None
    return (x, weight, bias) if skinny.takes(rows, matrix) else None


def _multiply(build: NodeBuilder, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    if build.before.target not in LINEAR:
        weight = build(aten.t.default, weight)
    *shape, depth = example(x).shape
    if len(shape) == 1:
        return build(SKINNY, x, weight, bias)
    product = build(SKINNY, build(aten.reshape.default, x, [-1, depth]), weight, bias)
    return build(aten.reshape.default, product, [*shape, example(weight).shape[0]])


def _shape(node: fx.Node) -> str:
    return str(list(example(node).shape))

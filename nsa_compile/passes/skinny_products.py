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

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nsa_compile.ir.aten import aten
from nsa_compile.ir.rewriting import NodeBuilder, replace_node
from nsa_compile.ir.scans import example, location, subgraphs
from nsa_compile.ops import skinny
from nsa_compile.passes.pipeline import PassContext, register

SKINNY = torch.ops.nsa_compile.skinny_linear.default
# A graph in which no other pass had anything to do is as captured: it may write, hold transforms and sizes that are
# data. It is touched where it has no more than this in it, as what makes logits has.
LINEAR = {F.linear, torch._C._nn.linear}
PLAIN = LINEAR | {
    torch.rms_norm, F.rms_norm, F.layer_norm, F.silu, F.gelu, torch._C._nn.gelu, torch.tanh, torch.sigmoid,
    operator.add, operator.mul, operator.getitem,
}  # fmt: skip


@register("skinny_products")
def skinny_products(gm: fx.GraphModule, context: PassContext) -> bool:
    """Read the weight once where few rows are multiplied by it."""
    if torch.is_grad_enabled():
        return False
    touched = [graph for graph in subgraphs(gm) if _is_traced(graph) or _is_plain(graph)]
    changed = [_rewrite(graph, context) for graph in touched]
    return any(changed)


def _rewrite(graph: fx.GraphModule, context: PassContext) -> bool:
    changed = False
    for node in list(graph.graph.nodes):
        operands = _operands(node)
        if operands is None or not context.may_rewrite():
            continue
        x, weight, bias = operands
        context.match(location(node), f"{_shape(x)} by a weight {_shape(weight)}")
        replace_node(node, _multiply(NodeBuilder(graph, node), x, weight, bias))
        changed = True
    if changed:
        graph.recompile()
    return changed


def _is_traced(graph: fx.GraphModule) -> bool:
    """Whether a graph is one of functional ATen operators."""
    return all(isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem for n in _calls(graph))


def _is_plain(graph: fx.GraphModule) -> bool:
    return all(n.target in PLAIN and not _writes(n) and not _picks(n) for n in _calls(graph))


def _writes(node: fx.Node) -> bool:
    """Whether an activation is asked to write in place; nothing else is asked for by a truth value."""
    return any(argument is True for argument in (*node.args, *node.kwargs.values()))


def _picks(node: fx.Node) -> bool:
    """Whether rows are picked by a tensor, which may be as many as the data say."""
    return node.target is operator.getitem and len(node.all_input_nodes) > 1


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """`x [..., K]`, a weight and the bias of a product for the operator; the weight of `mm` is `[K, N]`."""
    if node.target not in (*LINEAR, aten.mm.default, aten.addmm.default) or len(node.args) < 2 or node.kwargs:
        return None
    given: list[Any] = list(node.args)
    if node.target in LINEAR:
        x, weight, bias = (*given, None)[:3]
    else:
        x, weight = given[-2:]
        bias = given[0] if node.target is aten.addmm.default else None
    operands = [example(n) for n in (x, weight, bias) if n is not None]
    if any(is_traceable_wrapper_subclass(y) or any(type(size) is not int for size in y.shape) for y in operands):
        return None
    rows, matrix = operands[0], operands[1] if node.target in LINEAR else operands[1].t()
    # Under autocast, a product that was not traced has another dtype than its operands.
    if any(y.dtype != example(node).dtype for y in operands):
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

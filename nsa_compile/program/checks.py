"""What a step checks is checked after the loop, for all steps together.

    step:   assert cond, "too big"                  step:   return …, cond
                                            ->      after:  assert all(conds), "too big"

An assertion has no result, so that a pass would take it for dead code, and no place in a batched graph. As an output of
the step it is a value like others. `torch.linalg.inv` and its like check what they computed: they become the variants
that return a code instead, which torch's own check reads after the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from nsa_compile.ir.scans import ScanSite, example, find_scans, place_of, results, scan_results
from nsa_compile.workarounds import blank

__all__ = ["check_after_loops"]

# To the variant that returns a code as its last result, and the name that torch's message has.
_CHECKING: dict[Any, tuple[Callable[..., Any], str]] = {
    torch.linalg.inv: (torch.linalg.inv_ex, "linalg.inv"),
    torch.inverse: (torch.linalg.inv_ex, "linalg.inv"),
    "inverse": (torch.linalg.inv_ex, "linalg.inv"),
    torch.linalg.cholesky: (torch.linalg.cholesky_ex, "linalg.cholesky"),
    torch.linalg.solve: (torch.linalg.solve_ex, "torch.linalg.solve"),
    torch.linalg.lu_factor: (torch.linalg.lu_factor_ex, "torch.linalg.lu_factor"),
}


def check_after_loops(gm: fx.GraphModule) -> None:
    """Let no step of a captured graph check anything by itself, in place; those of the innermost scans first."""
    for site in find_scans(gm):
        check_after_loops(site.body)
        for node in list(site.body.graph.nodes):
            if node.target is torch._assert_async:
                condition, *said = node.args
                _after(site, condition, partial(_assert, site.owner, said))
                site.body.graph.erase_node(node)
            elif node.target in _CHECKING:
                _check_code(site, node)
            elif node.target is F.one_hot:
                _check_classes(site, node)
        site.body.recompile()
        site.owner.recompile()


def _check_code(site: ScanSite, node: fx.Node) -> None:
    """Let an operator return a code, and torch's own check of it run after the loop."""
    variant, name = _CHECKING[node.target]
    graph, value = site.body.graph, node.meta["example_value"]
    alone = isinstance(value, Tensor)
    values = (value,) if alone else tuple(value)
    # A matrix has a code, and several have one each.
    rest: dict[str, Any] = dict(node.kwargs)
    args: Any = node.args or (rest.pop("A", None) or rest.pop("input"),)
    matrix = args[0]
    code = blank(values[0], example(matrix).shape[:-2], dtype=torch.int32)
    with graph.inserting_before(node):
        computed = graph.call_function(variant, args, rest)
        computed.meta = {**node.meta, "example_value": (*values, code)}
        parts = [graph.call_function(operator.getitem, (computed, i)) for i in range(len(values) + 1)]
    for part, x in zip(parts, (*values, code), strict=True):
        part.meta = {**node.meta, "example_value": x}
    if alone:
        node.replace_all_uses_with(parts[0])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(parts[place_of(user)])
            graph.erase_node(user)
    graph.erase_node(node)

    def check(codes: fx.Node) -> fx.Node:
        return site.owner.graph.call_function(torch._linalg_check_errors, (codes, name), {"is_matrix": False})

    _after(site, parts[-1], check)


def _check_classes(site: ScanSite, node: fx.Node) -> None:
    """Check after the loop what `one_hot` checks of its classes in eager mode alone."""
    given: dict[str, Any] = {**dict(zip(("input", "num_classes"), node.args, strict=False)), **node.kwargs}
    classes, last = given["input"], given.get("num_classes", -1) - 1
    if last < 0:
        return  # as many as the largest class asks for: the step is declined
    graph = site.body.graph
    with graph.inserting_before(node):
        inside = graph.call_function(torch.clamp, (classes, 0, last))
        condition = graph.call_function(torch.eq, (inside, classes))
    for made, value in ((inside, example(classes)), (condition, blank(example(classes), dtype=torch.bool))):
        made.meta = {**node.meta, "example_value": value}
    said = f"one_hot: class values must be at least 0 and at most {last}"
    _after(site, condition, partial(_assert, site.owner, [said]))


def _assert(owner: fx.GraphModule, said: Sequence[Any], conditions: fx.Node) -> fx.Node:
    together = owner.graph.call_function(torch.all, (conditions,))
    together.meta = {**conditions.meta, "example_value": example(conditions).all()}
    return owner.graph.call_function(torch._assert_async, (together, *said))


def _after(site: ScanSite, value: fx.Node, check: Callable[[fx.Node], fx.Node]) -> None:
    """Return a value of the step, too, and check those of all steps behind the scan."""
    output = site.body.graph.output_node()
    with site.body.graph.inserting_before(output):
        own = site.body.graph.call_method("clone", (value,), {"memory_format": torch.contiguous_format})
    own.meta = dict(value.meta)
    output.args = ([*results(site.body), own],)
    yielded = scan_results(site.node)
    stacked = blank(example(value), (site.length, *example(value).shape))
    site.node.meta["example_value"] = (*yielded, stacked)
    with site.owner.graph.inserting_after(site.node):
        values = site.owner.graph.call_function(operator.getitem, (site.node, len(yielded)))
    values.meta = {**site.node.meta, "example_value": stacked}
    with site.owner.graph.inserting_before(values.next):
        checked = check(values)
    checked.meta = {"stack_trace": value.meta.get("stack_trace")}

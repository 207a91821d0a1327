"""Final carries that are tensors of the caller's: a state that no step replaces, the last row of an input.

A loop hands such a tensor on as it is, and whoever writes to the result writes to the original. A captured scan copies
its carries, so what reads one of these is given the original again, or the same view of it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.capture.scans import without_copy
from nsa_compile.ir.scans import (
    ScanSite,
    ancestors,
    example,
    fake_inputs,
    find_scans,
    place_of,
    results,
    scan_results,
    subgraphs,
)
from nsa_compile.memory import memory

__all__ = ["hand_on_originals"]

# Operators between a tensor and a carry that is a view of it. Nobody takes more views than that, one of the other.
MOST_VIEWS = 16


def hand_on_originals(gm: fx.GraphModule) -> None:
    """Let readers of a final carry read what it is a view of, in place."""
    for site in find_scans(gm):
        finals = [n for n in site.node.users if n.target is operator.getitem and place_of(n) < len(site.init)]
        for final in finals:
            original = _Originals(site).after_last_step(final)
            if original is not None:
                _hand_on(gm, site.owner, final, original)
        if site.owner is gm:
            _share(site)
    gm.recompile()


def _share(site: ScanSite) -> None:
    """Let final carries that are one tensor, or a tensor and a view of it, be so again."""
    graph, updates = site.owner.graph, [without_copy(x) for x in results(site.body)[: len(site.init)]]
    for final in [n for n in site.node.users if n.target is operator.getitem and place_of(n) < len(updates)]:
        j = place_of(final)
        earlier = [i for i, base in enumerate(updates) if i < j or base is not updates[j]]
        found = [(i, views) for i in earlier if (views := _views_between(updates[i], updates[j])) is not None]
        if not found:
            continue
        i, views = max(found, key=lambda x: len(x[1]))  # what all of them are views of
        with graph.inserting_before(final):
            base = graph.call_function(operator.getitem, (site.node, i))
            base.meta = {**final.meta, "example_value": scan_results(site.node)[i]}
            value = _copied(graph, views, base)
        final.replace_all_uses_with(value)
        graph.erase_node(final)


def _views_between(base: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """A node of a step, and the views from there to another one; None if that is no view of it. What the step has
    written to is not looked at."""
    views = []
    while node is not base:
        sources = node.all_input_nodes
        if len(sources) != 1 or not _is_view(example(node), example(sources[0])):
            return None
        views.append(node)
        node = sources[0]
    return [base, *reversed(views)]


def _is_view(value: Any, source: Any) -> bool:
    """Whether a tensor that nobody has written to shares its memory with another one; of one within a vmap nothing is
    known."""
    if not isinstance(value, Tensor) or not isinstance(source, Tensor) or value._version:
        return False
    within = any(torch._C._functorch.is_batchedtensor(x) for x in (value, source))
    return not within and memory(value) == memory(source)


def _hand_on(gm: fx.GraphModule, owner: fx.GraphModule, copy: fx.Node, original: fx.Node) -> None:
    """Let readers of a copy read the original; those of a region's result, where that is one, outside of the region: a
    checkpointed region may not return its inputs."""
    if owner is gm:
        copy.replace_all_uses_with(original)
        gm.graph.erase_node(copy)
        return
    views, inputs = _views_of_input(original), owner.graph.find_nodes(op="placeholder")
    places = [i for i, result in enumerate(results(owner)) if result is copy]
    for graph, call in _calls(gm, owner):
        if views is None:
            continue
        given: Any = call.args[len(call.args) - len(inputs) + inputs.index(views[0])]
        for item in [user for user in call.users if place_of(user) in places]:
            with graph.graph.inserting_before(item):
                value = _copied(graph.graph, views, given)
            _hand_on(gm, graph, item, value)


def _calls(gm: fx.GraphModule, region: fx.GraphModule) -> list[tuple[fx.GraphModule, fx.Node]]:
    """The nodes that call a region, each with its graph."""
    held = [(g, n) for g in subgraphs(gm) for n in g.graph.find_nodes(op="get_attr") if getattr(g, n.target) is region]
    return [(graph, call) for graph, node in held for call in node.users]


class _Originals:
    """What the carries of a scan are, where that is no result of a step."""

    def __init__(self, site: ScanSite) -> None:
        self.site = site
        self.carries, self.rows, self.additional = site.placeholders()
        self.updates = [without_copy(x) for x in results(site.body)[: len(self.carries)]]

    def after_last_step(self, final: fx.Node) -> fx.Node | None:
        """The tensor that a final carry is, or a view of it put behind the scan; None if a step computed it."""
        path: list[tuple[fx.Node, list[fx.Node]]] = []  # placeholders of steps, and the views taken of them
        update, step = self.updates[place_of(final)], self.site.length - 1
        while True:
            views = _views_of_input(update)
            if views is None or sum(len(v) for _, v in path) + len(views) > MOST_VIEWS:
                return None
            source = views.pop(0)
            if views:
                path.append((source, views))
            if source not in self.carries or step == 0 or self._is_kept(source):
                break
            update, step = self.updates[self.carries.index(source)], step - 1
        return self._put_behind(final, source, step, path)

    def _is_kept(self, carry: fx.Node) -> bool:
        return self.updates[self.carries.index(carry)] is carry

    def _put_behind(
        self, final: fx.Node, source: fx.Node, step: int, path: list[tuple[fx.Node, list[fx.Node]]]
    ) -> fx.Node:
        graph, site = self.site.owner.graph, self.site
        with graph.inserting_before(final):
            if source in self.carries:
                value = without_copy(site.init[self.carries.index(source)])
            elif source in self.rows:
                rows = site.xs[self.rows.index(source)]
                value = graph.call_function(torch.select, (rows, 0, step))
                value.meta = {**final.meta, "example_value": example(rows)[step]}
            else:
                value = site.additional[self.additional.index(source)]
            for given, views in reversed(path):
                value = _copied(graph, [given, *views], value)
        return value


def _copied(graph: fx.Graph, views: list[fx.Node], value: fx.Node) -> fx.Node:
    """A node and the views of it that follow, taken of `value` instead."""
    mapped = {views[0]: value}
    for view in views[1:]:
        mapped[view] = graph.node_copy(view, mapped.__getitem__)
    return mapped[views[-1]]


def _views_of_input(node: fx.Node) -> list[fx.Node] | None:
    """The input of a step or region that a node is a view of, and the views from there; None if it is none."""
    if node.op == "placeholder":
        return [node]
    nodes = ancestors([node])
    given = [n for n in nodes if n.op == "placeholder"]
    if len(given) != 1 or len(nodes) > MOST_VIEWS or any(n.op == "get_attr" for n in nodes):
        return None
    inner = [n for n in node.graph.nodes if n in nodes and n is not given[0]]
    with unset_fake_temporarily(), torch.no_grad():
        (old,) = fake_inputs(given)
        try:
            new = _run(inner, {given[0]: old})
        except Exception:  # what it is will be found out, and said, when the step is traced
            return None
        shared = isinstance(new, Tensor) and memory(new) == memory(old)
    return [given[0], *inner] if shared else None


def _run(nodes: list[fx.Node], values: dict[fx.Node, Any]) -> Any:
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        if node.op == "call_method":
            values[node] = getattr(args[0], target)(*args[1:], **kwargs)
        elif node.op == "call_function":
            values[node] = target(*args, **kwargs)
        else:
            raise NotImplementedError(node.op)
    return values[nodes[-1]]

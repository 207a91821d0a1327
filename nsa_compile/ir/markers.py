"""Ranges in compiled programs: `push` and `pop` of :mod:`~nsa_compile.ranges` between their kernels.

`annotate_ranges` labels the nodes of a captured graph. AOTAutograd keeps the labels and gives each backward node that
of the forward node it belongs to, so the ranges of both directions are put in after differentiation, when the order of
the kernels is final. Nothing is computed, copied or fused otherwise than without them: they are calls between the
kernels, and a kernel that Inductor fused from several parts belongs to the one most of it comes from. What has no
label, such as the sum of two gradients, is put with what runs before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomSchedulerPass

from nsa_compile import ranges

LABEL = "nsa_range"  # the key in a node's `meta["custom"]`, which all stages of torch.compile keep
PARENTS = {"nsa.sel.ranges_v2": "nsa.sel"}  # ranges that lie within another one


def label_of(node: fx.Node) -> str | None:
    """The innermost range that a node belongs to."""
    return (node.meta.get("custom") or {}).get(LABEL)


def set_label(node: fx.Node, name: str) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), LABEL: name}


def insert(gm: fx.GraphModule, category: ranges.Category) -> None:
    """Put ranges into a graph that runs node by node."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    now = None
    for node, label in zip(nodes, _filled([label_of(node) for node in nodes]), strict=True):
        with gm.graph.inserting_before(node):
            _call(gm.graph, now, label, category)
        now = label
    with gm.graph.inserting_before(gm.graph.output_node()):
        _call(gm.graph, now, None, category)
    gm.recompile()


def compilers() -> dict[str, Callable[..., Callable[..., Any]]]:
    """What makes the two directions of the backend `aot_eager` have ranges."""
    from torch._dynamo.backends.debugging import boxed_nop

    def compiler(category: ranges.Category) -> Callable[..., Callable[..., Any]]:
        def compile_with_ranges(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            insert(gm, category)
            return boxed_nop(gm, example_inputs)

        return compile_with_ranges

    return {"fw_compiler": compiler("forward"), "bw_compiler": compiler("backward")}


def inductor_config(gm: fx.GraphModule) -> dict[str, Any]:
    """The configuration of Inductor that puts ranges into the code of a labelled graph."""
    # Inductor's caches look at neither labels nor this file.
    labels = "".join(f"{node.name}:{label_of(node)}\n" for node in gm.graph.nodes)
    digest = hashlib.sha256(labels.encode() + Path(__file__).read_bytes()).hexdigest()
    return {"_pre_fusion_custom_pass": InductorRanges(digest)}


class InductorRanges(CustomSchedulerPass):
    """Puts ranges into the code Inductor writes, when it writes it: kernels may be put in another order until then.

    It is given to Inductor as a pass before fusion, which gets hold of the scheduler and takes part in the key of
    Inductor's caches; it changes nothing there.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if nodes:
            _mark_kernels(nodes[0].scheduler)
        return nodes

    def uuid(self) -> str:
        return f"nsa_compile ranges {self.digest}"


def _mark_kernels(scheduler: Any) -> None:
    """Let a scheduler write `push` and `pop` where the kernels of a range begin and end."""
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    write_kernels, enter_context = scheduler._codegen, scheduler.enter_context
    category = "backward" if V.graph.is_backward else "forward"
    labels: dict[str, str | None] = {}
    now: str | None = None

    def change(then: str | None) -> None:
        nonlocal now
        if then != now:
            scheduler.flush()  # kernels that were held back to be written as one
            for opens, name in _changes(now, then):
                call = f"push({name!r}, {category!r})" if opens else f"pop({name!r})"
                V.graph.wrapper_code.writeline(f"_nsa_ranges.{call}")
            now = then

    def _codegen(nodes: list[Any]) -> None:
        kernels = [node for node in nodes if not isinstance(node, NopKernelSchedulerNode)]
        names = [node.get_name() for node in kernels]
        labels.update(zip(names, _filled([_label_of_kernel(node) for node in kernels]), strict=True))
        if any(labels.values()):
            V.graph.wrapper_code.add_import_once(f"import {ranges.__name__} as _nsa_ranges")
        write_kernels(nodes)
        change(None)

    def enter(node: Any) -> None:
        change(labels.get(node.get_name(), now))
        enter_context(node)

    scheduler._codegen, scheduler.enter_context = _codegen, enter


def _label_of_kernel(kernel: Any) -> str | None:
    """What most of the operations in a kernel belong to; a call of an operator belongs where the operator does."""
    votes: Counter[str] = Counter()
    for part in kernel.get_nodes():
        labels = {origin: label for origin in part.node.get_origins() if (label := label_of(origin))}
        if part.is_extern() and labels:
            votes[labels[max(labels)]] += 1  # the others are the views it reads
        else:
            votes.update(label for origin, label in labels.items() if not _is_view(origin))
    return max(sorted(votes), key=votes.__getitem__, default=None)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.alias_info for argument in schema.arguments)


def _filled(labels: Sequence[str | None]) -> list[str | None]:
    """Labels for all: without one, that of what runs before, at the start that of what runs next."""
    before = next((label for label in labels if label is not None), None)
    filled = []
    for label in labels:
        before = label or before
        filled.append(before)
    return filled


def _changes(now: str | None, then: str | None) -> Iterator[tuple[bool, str]]:
    """What to close (False) and to open (True) on the way from one range into another."""
    old, new = _path(now), _path(then)
    for name in reversed(old):
        if name not in new:
            yield False, name
    for name in new:
        if name not in old:
            yield True, name


def _path(name: str | None) -> list[str]:
    return [] if name is None else [*_path(PARENTS.get(name)), name]


def _call(graph: fx.Graph, now: str | None, then: str | None, category: ranges.Category) -> None:
    for opens, name in _changes(now, then):
        if opens:
            graph.call_function(ranges.push, (name, category))
        else:
            graph.call_function(ranges.pop, (name,))

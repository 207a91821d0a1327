"""The only ways in which passes change a graph. Each keeps what later stages rely on: shapes, source lines, tags."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from nsa_compile.ir.aten import MASKED_FILL
from nsa_compile.ir.scans import example, place_of, results

LIFT = torch.ops.aten.lift_fresh_copy.default
# In the meta of a node that stays even if nobody reads it: it draws random numbers, say.
KEPT = "nsa_kept"
# In `meta["custom"]`, which tracing keeps, of a mask of the rows that a step does not have, rather than hides.
_ABSENT = "nsa_absent"

# What a node inherits from the node it replaces, where it brings none of its own.
INHERITED = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id", "custom")


def eliminate_dead_code(gm: fx.GraphModule) -> None:
    """Remove what nobody reads, but for what is there for what it does.

    Not `Graph.eliminate_dead_code`: that goes into steps, where it takes writes in place for unused, and while Dynamo
    is at work it removes random operators, too (torch 2.13).
    """
    for node in reversed(gm.graph.nodes):
        if not node.users and not node.is_impure() and KEPT not in node.meta:
            gm.graph.erase_node(node)


def delete_unused_graphs(gm: fx.GraphModule) -> None:
    """Remove the graphs that a graph holds and no longer calls.

    Not `delete_all_unused_submodules`: that also removes what the graphs hold that are still called (torch 2.13).
    """
    called = {n.target for n in gm.graph.find_nodes(op="get_attr")}
    for name, held in list(gm.named_children()):
        if isinstance(held, fx.GraphModule) and name not in called:
            delattr(gm, name)


def inherit_meta(new: fx.Node, old: fx.Node) -> None:
    """Give a new node the source line and tags of the node it stands for. Its shape it must bring itself."""
    for key in INHERITED:
        if key in old.meta and not new.meta.get(key):
            new.meta[key] = old.meta[key]


def mark_absent(mask: fx.Node) -> None:
    """Say of a mask that it is true for rows which are not among those that a step reads."""
    mask.meta["custom"] = {**(mask.meta.get("custom") or {}), _ABSENT: True}


def is_absent(mask: Any) -> bool:
    """Whether `mark_absent` has been told of a mask."""
    return isinstance(mask, fx.Node) and _ABSENT in (mask.meta.get("custom") or {})


def zeroes_absent(node: fx.Node) -> bool:
    """Whether a node makes zeros of what is computed for rows that a step does not have."""
    return node.target in MASKED_FILL and is_absent(node.args[1]) and bool(node.args[2] == 0)


def copied_body(body: fx.GraphModule) -> fx.GraphModule:
    """A step to be changed, where others may run the same one."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    graph.output_node().meta = dict(body.graph.output_node().meta)
    return fx.GraphModule(body, graph)


def inline_graph(owner: fx.GraphModule, node: fx.Node, graph: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Replace a node by the nodes of `graph`, fed with `inputs`.

    Users of a node with several outputs must be `getitem`s; they become users of the graph's outputs. Tensors the graph
    holds as attributes move to `owner`.
    """
    outputs = copy_nodes(owner, node, graph, inputs)
    if isinstance(node.meta.get("val", node.meta.get("example_value")), torch.Tensor):
        _take_place(outputs[0], node)
    for user in list(node.users):
        assert user.target is operator.getitem, f"{node.name} has a user that is no getitem: {user.format_node()}"
        _take_place(outputs[place_of(user)], user)
        owner.graph.erase_node(user)
    _erase(owner, [node])


def replace_graph(owner: fx.GraphModule, graph: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Give a graph the nodes of another one, which takes `inputs` of it and yields the same outputs, then others."""
    output = owner.graph.output_node()
    before = [n for n in owner.graph.nodes if n.op not in ("placeholder", "output")]
    outputs = copy_nodes(owner, output, graph, inputs)
    old_outputs = results(owner)
    for old, new in zip(old_outputs, outputs, strict=False):
        if isinstance(new, fx.Node) and old.op != "placeholder":
            _take_place(new, old)
    # A size has become a number.
    same = [x if isinstance(new, fx.Node) else new for x, new in zip(results(owner), outputs, strict=False)]
    output.args = ((*same, *outputs[len(old_outputs) :]),)
    for node in reversed(before):
        owner.graph.erase_node(node)
    delete_unused_graphs(owner)
    owner.recompile()


def inline_tensors(
    owner: fx.GraphModule, nodes: Sequence[fx.Node], graph: fx.GraphModule, inputs: Sequence[fx.Node]
) -> None:
    """Replace nodes with one tensor each by the outputs of `graph`, in this order, computed where the first stands.

    What `graph` reads must not depend on the nodes; it is moved before the first of them where it comes later.
    """
    order = {n: i for i, n in enumerate(owner.graph.nodes)}
    first = min(nodes, key=order.__getitem__)
    _move_before(first, inputs, order)
    for node, output in zip(nodes, copy_nodes(owner, first, graph, inputs), strict=True):
        _take_place(output, node)
    _erase(owner, nodes)


def _take_place(new: fx.Node, old: fx.Node) -> None:
    """Let `new` stand for `old`, and say as `old` did whether a gradient flows: traced below autograd, it knows nothing
    of that, and a shared region (`nested_compile_region`) believes what its outputs say."""
    if "val" in new.meta and "example_value" in old.meta:
        del new.meta["val"]
        new.meta["example_value"] = old.meta["example_value"]
    old.replace_all_uses_with(new)


def _move_before(anchor: fx.Node, wanted: Sequence[fx.Node], order: dict[fx.Node, int]) -> None:
    late: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        n = todo.pop()
        if n not in late and order[n] > order[anchor]:
            late.add(n)
            todo += n.all_input_nodes
    for n in sorted(late, key=order.__getitem__):
        anchor.prepend(n)


def copy_nodes(owner: fx.GraphModule, node: fx.Node, graph: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Copy the nodes of `graph` in front of `node`; what its outputs have become."""
    mapped: dict[fx.Node, Any] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    mapped.update(zip(placeholders, inputs, strict=True))
    with owner.graph.inserting_before(node):
        for inner in graph.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copied = owner.graph.node_copy(inner, mapped.__getitem__)
            inherit_meta(copied, node)
            mapped[inner] = _held(owner, copied, inner, graph) if inner.op == "get_attr" else copied
    return [mapped[x] if isinstance(x, fx.Node) else x for x in results(graph)]


def _held(owner: fx.GraphModule, copied: fx.Node, inner: fx.Node, graph: fx.GraphModule) -> fx.Node:
    """A constant of `graph`, held on `owner`, as whoever traces the graph next wants it: as a tensor of his."""
    value = operator.attrgetter(str(inner.target))(graph)
    if not isinstance(value, torch.Tensor) or any(n.target is LIFT for n in inner.users):
        copied.target = _adopt(owner, value)
        copied.meta["example_value"] = value
        return copied
    # To lift is to copy, and a copy of what repeats itself has other strides, of which `graph` knows nothing.
    own = value[tuple(slice(0, 1) if not step else slice(None) for step in value.stride())]
    copied.target = _adopt(owner, own)
    copied.meta["example_value"] = own
    lifted = copied.graph.call_function(LIFT, (copied,))
    lifted.meta = dict(copied.meta)
    if own.shape == value.shape:
        return lifted
    repeated = copied.graph.call_function(torch.ops.aten.expand.default, (lifted, list(value.shape)))
    repeated.meta = {**copied.meta, "example_value": value}
    return repeated


def _erase(owner: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        owner.graph.erase_node(node)
    eliminate_dead_code(owner)
    delete_unused_graphs(owner)
    owner.recompile()


def _adopt(owner: fx.GraphModule, tensor: torch.Tensor) -> str:
    """Hold a constant on `owner`; equal constants are held once.

    A plain attribute, not a buffer: AOTAutograd looks up where each buffer came from in the user's model.
    """
    count = 0
    while (held := getattr(owner, f"_nsa_constant_{count}", None)) is not None:
        if (held.dtype, held.stride()) == (tensor.dtype, tensor.stride()) and torch.equal(held, tensor):
            break
        count += 1
    setattr(owner, f"_nsa_constant_{count}", tensor)
    return f"_nsa_constant_{count}"


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Let one node take the place of another."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_earlier(old: fx.Node, new: fx.Node) -> None:
    """Let a node take the place of one that stands before it. What it is computed from must not depend on the old."""
    _move_before(old, [new], {n: i for i, n in enumerate(old.graph.nodes)})
    old.replace_all_uses_with(new)


def _like(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of a mode: a constant that was traced has one of its own."""
    if isinstance(x, FakeTensor) and x.fake_mode is mode:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


class NodeBuilder:
    """Adds nodes before one of a body, with their fake values and its source line."""

    def __init__(self, body: fx.GraphModule, before: fx.Node) -> None:
        self.body, self.before = body, before

    @property
    def device(self) -> torch.device:
        """Of what is computed where nodes are added."""
        value: Any = example(self.before)
        return next(x.device for x in tree_leaves(value) if isinstance(x, torch.Tensor))

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.body.graph.inserting_before(self.before):
            node = self.body.graph.call_function(target, args, kwargs)
        with_values = (n for n in self.body.graph.nodes if "val" in n.meta)
        around = map(example, chain(node.all_input_nodes, self.before.all_input_nodes, with_values))
        mode = next(x.fake_mode for x in around if isinstance(x, FakeTensor))
        with mode, torch.no_grad():
            values = fx.node.map_arg(args, lambda n: tree_map(lambda x: _like(x, mode), example(n)))
            node.meta["val"] = target(*values, **kwargs)
        inherit_meta(node, self.before)
        return node


def constant_node(build: NodeBuilder, tensor: torch.Tensor, device: torch.device) -> fx.Node:
    """A constant of a body, where a builder adds nodes."""
    tensor = tensor.contiguous().to(device)
    with build.body.graph.inserting_before(build.before):
        node = build.body.graph.create_node("get_attr", _adopt(build.body, tensor))
    node.meta["val"] = tensor
    return node

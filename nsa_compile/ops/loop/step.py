"""One step of a loop as two functional ATen graphs, forward and backward.

The body and its vector-Jacobian product are traced together, as AOTAutograd traces a whole program, and taken apart:

- what reads nothing but the additional inputs is the same at every step: it is computed once, before the loop;
- the forward step yields the carries, the outputs, and what the backward step needs and cannot have more cheaply;
- the backward step reads that, the row of each `xs` it needs, and the gradients of its results. Views are taken again
  instead of kept. Nothing else is, so a random number is drawn once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.functional_utils import has_data_mutation
from torch._guards import tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from nsa_compile import modes
from nsa_compile.capture.refusals import line_in_step, why_not_traced
from nsa_compile.capture.scans import ResultsOf, propagate_gradients, run_body
from nsa_compile.workarounds import TRACING

__all__ = ["Layout", "LoopNotTraced", "Scattered", "StepGraphs", "trace_step"]

aten = torch.ops.aten


class LoopNotTraced(RuntimeError):
    """The step of a loop holds what cannot be traced to functional operators: `reason` says what, `line` where."""

    def __init__(self, reason: str, line: str | None = None) -> None:
        super().__init__(f"the step of a scan cannot be traced: {reason}")
        self.reason = reason
        self.line = line


@dataclass(frozen=True)
class Layout:
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        return cls(tuple(map(int, x.shape)), tuple(map(int, x.stride())), x.dtype, x.device)

    @classmethod
    def standard(cls, x: Tensor) -> Layout:
        """As a loop makes it before it starts: contiguous."""
        shape = tuple(map(int, x.shape))
        return cls(shape, torch._prims_common.make_contiguous_strides_for(shape), x.dtype, x.device)

    @classmethod
    def row(cls, x: Tensor) -> Layout:
        """As a loop makes each row of `x [S, ...]`: dense, its dimensions in their order in memory, in which random
        numbers are drawn."""
        return cls.of(torch.empty_like(x.detach()[0]))

    def rows_of(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of `x [S, ...]` in this layout."""
        order = sorted(range(len(self.shape)), key=lambda i: self.stride[i], reverse=True)
        back = [order.index(i) for i in range(len(order))]
        dense = x.permute(0, *(i + 1 for i in order)).contiguous()
        return dense.permute(0, *(i + 1 for i in back)).unbind(0)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def rows(self, count: int) -> Tensor:
        """`count` of them, stacked in the standard layout."""
        return torch.empty((count, *self.shape), dtype=self.dtype, device=self.device)

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Scattered:
    """The gradient of an additional input to which a step adds at some places alone, those of rows that it picked.

    In the place of the gradient the backward step yields where, and what.
    """

    target: OpOverload
    shape: tuple[int, ...]
    dim: int

    def add(self, total: Tensor, index: Tensor, values: Tensor) -> None:
        """Add in place to a sum of the gradient's elements."""
        rows = total.view(self.shape)
        write = rows.index_add_ if self.target is aten.index_add.default else rows.scatter_add_
        write(self.dim, index, values)


@dataclass(frozen=True)
class StepGraphs:
    """The two directions of a step.

    Attributes:
        before: `additional -> what the forward step reads that is the same at every step`.
        forward: `(carries, rows of xs, those) -> (carries, ys, kept)`.
        ys, kept: layouts of a step's outputs, and of what it keeps for the backward step.
        before_backward: as `before`, for the backward step, of the additional inputs that it reads.
        backward: `(kept, rows of xs, those, gradients of carries and ys) -> gradients of the differentiable inputs`.
        rows_read: which `xs` the backward step reads; additional_read: which additional inputs.
        tangents: which carries and ys have gradients at some step, by their place among both.
        with_gradient: which of them have one after the last step.
        gradients: of which inputs (carries, xs, additional in turn) the backward step yields gradients.
        scattered: of these, by their place among them, those of which it yields two tensors: see `Scattered`.
        random: whether the step draws random numbers; is_complex: whether it computes with complex ones.
    """

    before: fx.GraphModule
    forward: fx.GraphModule
    ys: tuple[Layout, ...]
    kept: tuple[Layout, ...]
    before_backward: fx.GraphModule
    backward: fx.GraphModule
    rows_read: tuple[int, ...]
    additional_read: tuple[int, ...]
    tangents: tuple[int, ...]
    with_gradient: tuple[int, ...]
    gradients: tuple[int, ...]
    scattered: dict[int, Scattered]
    random: bool
    is_complex: bool


def trace_step(
    body: fx.GraphModule,
    inputs: Sequence[Layout],
    n_init: int,
    n_xs: int,
    length: int,
    differentiable: Sequence[bool],
    autocast: modes.Autocast,
    read: Collection[int],
    recomputed: bool = False,
) -> StepGraphs:
    """The graphs of a step `body(*carries, *rows, *additional) -> [*carries, *ys]`.

    Args:
        body: of the step; it may mutate what it made itself, set the grad mode and call higher-order operators.
        inputs: layouts of carries, rows of xs, and additional inputs.
        n_init: number of carries; n_xs: of xs; length: of steps.
        differentiable: which inputs have gradients; empty if none.
        autocast: the state that the step runs under.
        read: which results of the loop, carries and ys, somebody reads; no gradient comes from the others.
        recomputed: the backward step computes again what it needs, instead of being handed what the forward step kept.

    Raises:
        LoopNotTraced: the step writes to its inputs, or torch cannot trace it.
    """
    wanted = [bool(flag) and x.differentiable for flag, x in zip(differentiable, inputs, strict=False)]
    wanted += [False] * (len(inputs) - len(wanted))
    # Torch's own modes may be under way: the operator that asks is itself traced. What a step draws from no tensor is
    # drawn in earnest, and a call that brings other gradients than were captured has the step traced while it runs.
    with (
        TRACING,
        preserve_rng_state(),
        modes.unobserved(),
        tracing(None),
        preserve_node_meta(),
        modes.restored(),
        modes.under(autocast),
    ):
        try:
            results_of = _results_of(body, inputs)
            wanted, with_gradient = propagate_gradients(results_of, n_init, length, wanted)
            results = results_of(tuple(wanted))
            tangents = tuple(i for i, (_, has_gradient) in enumerate(results) if has_gradient)
            joint = _trace_joint(body, inputs, wanted, [results[i][0] for i in tangents], tangents)
            live = _live(joint, n_init, len(results), read)
            if not live.issuperset(tangents):
                tangents = tuple(i for i in tangents if i in live)
                joint = _trace_joint(body, inputs, wanted, [results[i][0] for i in tangents], tangents)
        except LoopNotTraced:
            raise
        except Exception as error:
            # torch's interpreter adds where the operator stands.
            line = line_in_step(re.findall(r'File "(.*?)", line (\d+)', str(error)))
            raise LoopNotTraced(why_not_traced(error), line) from error
        with_gradient = tuple(i for i in with_gradient if i in live)
        return _split(joint, len(inputs), n_init, n_xs, len(results), tangents, with_gradient, wanted, recomputed)


def _results_of(body: fx.GraphModule, inputs: Sequence[Layout]) -> ResultsOf:
    @cache
    def results(wanted: tuple[bool, ...]) -> list[tuple[Layout, bool]]:
        leaves = [x.requires_grad_(flag) for x, flag in zip(_fakes(inputs), wanted, strict=True)]
        return [(Layout.of(x), x.requires_grad) for x in run_body(body, leaves)]

    return results


def _fakes(layouts: Sequence[Layout]) -> list[Tensor]:
    """Stand-ins that are not allocated. Their mode is left again: a constant that a step makes stays real."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [x.empty() for x in layouts]


def _trace_joint(
    body: fx.GraphModule,
    inputs: Sequence[Layout],
    wanted: Sequence[bool],
    results: Sequence[Layout],
    tangents: Sequence[int],
) -> fx.GraphModule:
    """`(inputs, gradients of results) -> (results, gradients of inputs)`, a gradient of None where there is none."""

    def joint(*tensors: Tensor) -> list[Tensor | None]:
        primals = [x.detach().requires_grad_(flag) for x, flag in zip(tensors[: len(inputs)], wanted, strict=True)]
        outputs = run_body(body, primals)
        leaves = [x for x, flag in zip(primals, wanted, strict=True) if flag]
        gradients: Iterable[Tensor | None] = [None] * len(leaves)
        if tangents:
            with torch._C._DisableAutocast():  # a backward pass computes in the dtypes of the forward pass
                gradients = torch.autograd.grad(
                    [outputs[i] for i in tangents], leaves, list(tensors[len(inputs) :]), allow_unused=True
                )
        if any(has_data_mutation(x) for x in tensors):
            raise LoopNotTraced("it writes to one of its inputs; write to a copy, x.clone()")
        return [*(x.detach() for x in outputs), *gradients]

    functional = dispatch_functionalize(joint, FunctionalTensorMode())
    traced = make_fx(functional, {}, tracing_mode="real", _allow_non_fake_inputs=True)(*_fakes([*inputs, *results]))
    for node in traced.graph.nodes:
        assert not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable, node.format_node()
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # an additional input may come with other strides
    for node in traced.graph.nodes:
        if _is_copy(node) and not any(user.target in _STRIDED for user in node.users):
            node.replace_all_uses_with(node.args[0])
    _give_memory_of_its_own(traced)
    return traced


# Operators that count from where memory begins, and the place of their offset among the arguments.
_STRIDED = {aten.as_strided.default: 3, aten.as_strided_scatter.default: 4}


def _give_memory_of_its_own(traced: fx.GraphModule) -> None:
    """Let `as_strided` read copies: it counts from where memory begins, which for a row is not where the row does.

    Raises:
        LoopNotTraced: it reads what lies beside the tensor it is given.
    """
    for node in traced.graph.nodes:
        if (place := _STRIDED.get(node.target)) is None or len(node.args) <= place or node.args[place] is None:
            continue
        base = node.args[0]
        start = node.args[place] - base.meta["val"].storage_offset()
        if start < 0 or not torch._prims_common.is_non_overlapping_and_dense_or_false(base.meta["val"]):
            raise LoopNotTraced("it reads memory by as_strided with an offset; write it with slices or select")
        with traced.graph.inserting_before(node):
            copied = traced.graph.call_function(aten.clone.default, (base,))
        copied.meta = {"val": torch.empty_like(base.meta["val"])}
        node.update_arg(0, copied)
        node.update_arg(place, start)


def _live(joint: fx.GraphModule, n_init: int, n_results: int, read: Collection[int]) -> set[int]:
    """The results of a step that those which are read depend on, in this step or in a later one."""
    outputs: Any = joint.graph.output_node().args[0]
    carries = joint.graph.find_nodes(op="placeholder")[:n_init]
    live, reached = set[int](), set[fx.Node]()
    found = set(read)
    while found:
        live |= found
        reached |= _reached([outputs[i] for i in found], stop=())
        found = {i for i in range(n_init) if carries[i] in reached} - live
    return live


def _is_copy(node: fx.Node) -> bool:
    """A copy with the layout of its source does nothing in a functional graph."""
    copies = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
    if node.target not in copies or not isinstance(node.args[0], fx.Node):
        return False
    old, new = node.args[0].meta.get("val"), node.meta.get("val")
    return isinstance(old, Tensor) and isinstance(new, Tensor) and old.stride() == new.stride()


# -- taking the joint graph apart


def _split(
    joint: fx.GraphModule,
    n_inputs: int,
    n_init: int,
    n_xs: int,
    n_results: int,
    tangents: tuple[int, ...],
    with_gradient: tuple[int, ...],
    wanted: Sequence[bool],
    recomputed: bool,
) -> StepGraphs:
    placeholders = joint.graph.find_nodes(op="placeholder")
    carries, rows = placeholders[:n_init], placeholders[n_init : n_init + n_xs]
    additional, gradients_in = placeholders[n_init + n_xs : n_inputs], placeholders[n_inputs:]
    outputs: Any = joint.graph.output_node().args[0]
    results, gradients_out = list(outputs[:n_results]), list(outputs[n_results:])

    fixed = _reading_only(joint, additional)
    backward_nodes = _reading(joint, gradients_in)
    found = [i for i, flag in enumerate(wanted) if flag]
    gradients = tuple(i for i, g in zip(found, gradients_out, strict=True) if g is not None)
    gradients_out = [g for g in gradients_out if g is not None]
    scattered = {}
    for i in reversed(range(len(gradients))):
        if gradients[i] >= n_init + n_xs and (found_parts := _scattered(gradients_out[i])) is not None:
            scattered[i], gradients_out[i : i + 1] = found_parts

    kept: list[fx.Node] = []
    todo = [x for n in backward_nodes for x in n.all_input_nodes] + gradients_out
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or node in backward_nodes or node in fixed or node in rows or node in gradients_in:
            continue
        seen.add(node)
        if _is_view(node) or (recomputed and node.op == "call_function" and not _is_random(node)):
            todo += node.all_input_nodes
        else:
            kept.append(node)
    kept.sort(key={n: i for i, n in enumerate(joint.graph.nodes)}.__getitem__)

    drawn = [n for n in joint.graph.nodes if _is_random(n) and n not in backward_nodes]
    forward_fixed = _border(joint, [*results, *kept, *drawn], fixed, stop=())
    backward_fixed = _border(joint, gradients_out, fixed, stop=kept)
    read = _reached(backward_fixed, stop=())
    additional_read = tuple(i for i, x in enumerate(additional) if x in read)
    rows_read = tuple(i for i, row in enumerate(rows) if row in _reached(gradients_out, stop={*kept, *fixed}))
    return StepGraphs(
        before=_extract(joint, additional, forward_fixed),
        forward=_extract(joint, [*carries, *rows, *forward_fixed], [*results, *kept], also=drawn),
        ys=tuple(Layout.of(n.meta["val"]) for n in results[n_init:]),
        kept=tuple(Layout.of(n.meta["val"]) for n in kept),
        before_backward=_extract(joint, [additional[i] for i in additional_read], backward_fixed),
        backward=_extract(joint, [*kept, *(rows[i] for i in rows_read), *backward_fixed, *gradients_in], gradients_out),
        rows_read=rows_read,
        additional_read=additional_read,
        tangents=tangents,
        with_gradient=with_gradient,
        gradients=gradients,
        scattered=scattered,
        random=any(_is_random(n) for n in joint.graph.nodes),
        is_complex=any(isinstance(x := n.meta.get("val"), Tensor) and x.is_complex() for n in joint.graph.nodes),
    )


_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}


def _scattered(gradient: fx.Node) -> tuple[Scattered, list[fx.Node]] | None:
    """A gradient that is added to zeros at some places: what it is, and its index and values. Not in low precision,
    where a sum of many small parts would lose more than one of few large ones."""
    while gradient.target is aten.reshape.default:
        gradient = cast(fx.Node, gradient.args[0])
    if gradient.target not in (aten.index_add.default, aten.scatter_add.default) or gradient.kwargs:
        return None
    zeros, dim, index, values = cast("tuple[fx.Node, int, fx.Node, fx.Node]", gradient.args)
    value = gradient.meta["val"]
    if zeros.target not in _ZEROS or value.dtype.itemsize < 4:
        return None
    # pyrefly: ignore[bad-argument-type]
    return Scattered(gradient.target, tuple(map(int, value.shape)), dim), [index, values]


def _reading_only(joint: fx.GraphModule, sources: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that are the same at every step: they read `sources` and constants, and draw no random numbers."""
    same = set(sources)
    for node in joint.graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function" and not _is_random(node) and all(n in same for n in node.all_input_nodes)
        ):
            same.add(node)
    return same


def _reading(joint: fx.GraphModule, sources: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on `sources`."""
    found = set(sources)
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found - set(sources)


def _reached(outputs: Sequence[fx.Node], stop: Iterable[fx.Node]) -> set[fx.Node]:
    """What `outputs` are computed from, without going behind `stop`."""
    ends, reached, todo = set(stop), set(), list(outputs)
    while todo:
        node = todo.pop()
        if node not in reached:
            reached.add(node)
            todo += [] if node in ends else node.all_input_nodes
    return reached


def _border(
    joint: fx.GraphModule, outputs: Sequence[fx.Node], fixed: set[fx.Node], stop: Sequence[fx.Node]
) -> list[fx.Node]:
    """The fixed nodes that a step reads directly, in the order of the graph."""
    reached = _reached(outputs, stop={*fixed, *stop})
    return [n for n in joint.graph.nodes if n in reached and n in fixed and n not in stop]


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target is aten.reshape.default:
        return node.target is aten.reshape.default
    return any(a.alias_info is not None for a in node.target._schema.arguments)


def _extract(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], also: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """The part of a graph between `inputs` and `outputs`. It computes `also`, too: a random number that
    nobody reads moves the generator on."""
    graph = fx.Graph(joint)
    env = {node: graph.placeholder(node.name) for node in inputs}
    needed = _reached([*outputs, *also], stop=inputs)
    for node in joint.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output([env[node] for node in outputs])
    return fx.GraphModule(joint, graph)

"""Captured steps in functional ATen: writes in place become values, no_grad regions detaches."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from nsa_compile import modes
from nsa_compile.capture.refusals import why_not_traced
from nsa_compile.capture.scans import applies_functorch
from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.rewriting import eliminate_dead_code
from nsa_compile.ir.scans import UNTRACKED, Declined, ScanSite, example, fake_inputs, place_of, results
from nsa_compile.ir.spellings import normalize_spellings
from nsa_compile.workarounds import DATA, HonestFunctions


def trace_to_aten(
    fn: Callable[..., Any],
    inputs: list[Tensor],
    *,
    decompose_sdpa: bool = True,
    decompositions: dict[OpOverload, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Trace `fn` to ATen below autograd, keeping each node's source line. Autograd comes later, on the result.

    SDPA becomes plain operators, if `decompose_sdpa`: the passes see its mask, and every device computes the same.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = sdpa_kernel(SDPBackend.MATH) if decompose_sdpa else contextlib.nullcontext()
    table = {**_MENDED, **(decompositions or {})}
    with (
        unset_fake_temporarily(),
        tracing(None),
        preserve_node_meta(),
        sdpa,
        modes.restored(),
        torch.no_grad(),
        HonestFunctions(),
    ):
        gm = make_fx(fn, table, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        _write_nothing_in_place(gm)
        if _writes_to_its_own(gm):
            again = torch.func.functionalize(fx.Interpreter(gm).run, remove="mutations")
            gm = make_fx(again, table, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    _fill_numbers(gm)
    _end_slices(gm)
    _multiply_by_noise(gm)
    _let_bags_have_gradients(gm)
    eliminate_dead_code(gm)
    return gm


def _end_slices(gm: fx.GraphModule) -> None:
    """torch.vmap overflows where an open slice is written to, `x[1:] = y`: its end is the greatest integer. And it does
    not count the ends of a row from behind, as in `x[-3:-2] = y`, when it makes indices of them (torch 2.13)."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        write = arguments(node)
        if all(isinstance(end, int | None) for end in (write.start, write.end)):
            ends = slice(write.start, write.end).indices(example(node).shape[write.dim])
            node.args, node.kwargs = (write.self, write.src, write.dim, *ends[:2], write.step), {}


def _fill_numbers(gm: fx.GraphModule) -> None:
    """torch.vmap casts the number beside a tensor by `_to_copy`, which Inductor computes in float32: an integer above
    2²⁴ is another one then (torch 2.13)."""
    for node in gm.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if isinstance(node.args[0], int | float):
            kind = {"dtype": example(node).dtype, "device": example(node).device}
            node.target, node.args, node.kwargs = aten.full.default, ([], node.args[0]), kind


def _multiply_by_noise(gm: fx.GraphModule) -> None:
    """The derivative of a functional rrelu reads the noise that it is given, not what it draws (torch 2.13)."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.rrelu_with_noise_functional.default):
        if not arguments(node).training:
            continue
        x = operand(node)
        with gm.graph.inserting_before(node):
            constant = gm.graph.call_function(aten.detach.default, (x,))
        node.replace_input_with(x, constant)
        with gm.graph.inserting_after(node):
            noise = gm.graph.call_function(operator.getitem, (node, 1))
        with gm.graph.inserting_after(noise):
            product = gm.graph.call_function(aten.mul.Tensor, (x, noise))
        out, drawn = node.meta["val"]
        for made, value in ((constant, example(x)), (noise, drawn), (product, out)):
            made.meta = {**node.meta, "val": value}
        for user in list(node.users):
            if user is not noise and place_of(user) == 0:
                user.replace_all_uses_with(product)


def _let_bags_have_gradients(gm: fx.GraphModule) -> None:
    """Where nothing asks for gradients, as below autograd, torch takes an operator for bags of embeddings that has
    none; the other one has the same result first."""
    for node in gm.graph.find_nodes(op="call_function", target=aten._embedding_bag_forward_only.default):
        if all(place_of(user) == 0 for user in node.users if user.users):
            node.target = aten._embedding_bag.default


def _select_scatter(old: Tensor, new: Tensor, dim: int, index: int) -> Tensor:
    """torch.vmap writes the row several times instead, and the gradient of it counts each of them (torch 2.13)."""
    index %= old.shape[dim]
    return torch.slice_scatter(old, new.unsqueeze(dim), dim, index, index + 1)


def _slice_scatter(old: Tensor, new: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """torch has no derivative of it for complex numbers (torch 2.13)."""
    if not old.is_complex():
        return NotImplemented
    written = torch.arange(old.shape[dim], device=old.device)[start:end:step]
    return torch.index_copy(old, dim, written, new.to(old.dtype))


def _view_as_complex(x: Tensor) -> Tensor:
    """In a batched step x may lie otherwise than this view takes it."""
    return torch.complex(*x.unbind(-1))


def _of_a_number(target: Any) -> Callable[..., Any]:
    """torch takes a tensor without dimensions for one of one element, where an operator works along a dimension."""

    def of_one_element(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if x.dim() else target(x.reshape(1), *args, **kwargs).reshape(())

    return of_one_element


_MENDED: dict[Any, Callable[..., Any]] = {
    **{
        target: _of_a_number(target)
        for target in (aten._softmax.default, aten._safe_softmax.default, aten.transpose.int, aten.flip.default)
    },
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.view_as_complex.default: _view_as_complex,
}


def _write_nothing_in_place(gm: fx.GraphModule) -> None:
    """Some operators of torch write to values of their own below functionalization: rms_norm adds in place, matmul
    squeezes its product. Nobody else reads such a value, so the operator that makes a new one will do.
    """
    for node in gm.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        name = node.target._opname
        packet = getattr(getattr(torch.ops, node.target.namespace), name[:-1], None)
        operator_of_new = getattr(packet, node.target._overloadname, None)
        written = node.args[0]
        own = isinstance(written, fx.Node) and written.op == "call_function" and list(written.users) == [node]
        if name.endswith("_") and name != "copy_" and operator_of_new is not None and own and not is_view(written):
            node.target = operator_of_new


def _writes_to_its_own(gm: fx.GraphModule) -> bool:
    """Whether a write to something else than an input is left, such as one through a view: circular padding has some.
    Functionalization has not seen it, as it is made of one operator below."""
    return any(
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable and node.args[0].op != "placeholder"
        for node in gm.graph.nodes
    )


def lower_body(site: ScanSite) -> fx.GraphModule:
    """The scan's body in functional ATen: in-place operators replaced, no_grad regions turned into detaches.

    Raises:
        Declined: for operators whose meaning is lost on the way down.
    """
    if (why := site.node.meta.get(UNTRACKED)) is not None:
        raise why
    fakes = fake_inputs(site.init) + [x[0] for x in fake_inputs(site.xs)] + fake_inputs(site.additional)
    state = modes.autocast_at(site.node)
    if modes.sets_autocast(site.body.graph.nodes) and any(on for _, _, on in state):
        raise Declined("the step sets autocast, within a region that has autocast already", site.node)
    with modes.under(state):
        lowered = _lower(site.body, fakes)
    _strip_copies(lowered)
    _read_what_is_written(lowered)
    normalize_spellings(lowered)
    copy_outputs(lowered)
    return lowered


def lower_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A whole graph in functional ATen, as a graph of its own; what it writes to its inputs, it writes at the end.

    Raises:
        Declined: for operators whose meaning is lost on the way down, and inputs or outputs that are no tensors.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in (*inputs, *results(gm)):
        if not isinstance(node, fx.Node) or not isinstance(example(node), Tensor):
            raise Declined("the step takes or returns something else than tensors", gm.graph.output_node())
    lowered = _lower(gm, fake_inputs(inputs))
    _strip_copies(lowered, kept=escaping(lowered))
    return lowered


def _lower(body: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    for node in body.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise Declined(f"the step calls the higher-order operator {node.target}, which has no batched form", node)
        if applies_functorch(node):
            raise Declined("the step applies a transform of torch.func, such as vmap", node)

    interpreter = BodyInterpreter(body)

    def run(*args: Tensor) -> list[Tensor]:
        return list(interpreter.run(*args))

    try:
        lowered = trace_to_aten(torch.func.functionalize(run, remove="mutations"), inputs)
    except Exception as error:
        raise Declined(f"it cannot be traced: {why_not_traced(error)}", interpreter.at) from error
    for node in lowered.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        if node.target._schema.is_mutable and node.target is not aten.copy_.default:
            raise Declined(f"functionalization leaves {node.target} in the step", node)
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise Declined(f"{node.target} draws random numbers, whose order a batched step would change", node)
    refuse_strided_writes(lowered)
    return lowered


def refuse_strided_writes(lowered: fx.GraphModule) -> None:
    """Functionalization makes `as_strided_scatter` of a write through `as_strided`, and torch has a wrong derivative
    for it: what is overwritten keeps its gradient (torch 2.13).

    Raises:
        Declined: the graph has one.
    """
    for node in lowered.graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        raise Declined("it writes through as_strided, for which torch has a wrong derivative", node)


class BodyInterpreter(fx.Interpreter):
    """Runs a graph under tracing. What is computed under no_grad reads detached operands.

    Tracing happens below autograd, where grad mode means nothing, so the mode has to become an operator. It stands
    before the computation, and not behind it: what is written in place has no gradient then, either.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.grad_enabled = True
        self.at: fx.Node | None = None  # what runs now, or failed

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        if n.target is torch._C._set_grad_enabled:
            self.grad_enabled = bool(n.args[0])
            return None
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is DATA:
            return args[0].detach()
        return super().call_function(target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        found = super().fetch_args_kwargs_from_env(n)
        if self.grad_enabled or n.op not in ("call_function", "call_method", "call_module"):
            return found
        return torch.utils._pytree.tree_map_only(Tensor, _without_gradient, found)


def _without_gradient(x: Tensor) -> Tensor:
    """A tensor detached; integers never have a gradient."""
    return x.detach() if x.is_floating_point() or x.is_complex() else x


# Not `lift_fresh_copy`: it makes a literal a tensor of whoever traces the graph next.
_COPIES = {aten.clone.default, aten.alias.default}


# What takes no other layout, and has been given a copy for that.
CONTIGUOUS = (aten.native_group_norm.default,)


_VIEWS = (aten.view.default, aten._unsafe_view.default)


def is_view(node: fx.Node) -> bool:
    """Whether a node may share the memory of what it reads, by torch's schema."""
    if node.target is operator.getitem:
        return is_view(operand(node))
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(a.alias_info is not None for a in schema.arguments) or node.target in _VIEWS


def escaping(gm: fx.GraphModule) -> set[fx.Node]:
    """Values that someone outside may hold, and what they are views of: outputs, and what inputs are set to."""
    found: set[fx.Node] = set()
    todo = list(gm.graph.output_node().all_input_nodes)
    todo += [x for n in gm.graph.nodes if n.target is aten.copy_.default for x in n.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes if node.op == "call_function" and is_view(node) else []
    return found


def reshape_views(gm: fx.GraphModule) -> None:
    """A view holds for the strides it was traced with; where others may come, only a reshape is sure to run."""
    nodes = [node for view in _VIEWS for node in gm.graph.find_nodes(op="call_function", target=view)]
    for node in nodes:
        node.target = aten.reshape.default
    if nodes:
        gm.recompile()


def _strip_copies(gm: fx.GraphModule, kept: Collection[fx.Node] = ()) -> None:
    """Drop copies: they kept the loop's outputs from aliasing its inputs, and do nothing in a functional graph."""
    for node in gm.graph.nodes:
        if node.target in _COPIES and (node in kept or any(user.target in CONTIGUOUS for user in node.users)):
            continue
        if node.target in _COPIES:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.view.dtype and getattr(node.args[0], "target", None) is aten.view.dtype:
            original = node.args[0].args[0]
            if example(original).dtype == node.args[1]:
                node.replace_all_uses_with(original)
    reshape_views(gm)
    eliminate_dead_code(gm)
    gm.recompile()


# Operators that read memory, of which a value has none that is written into a buffer.
_READ_MEMORY = frozenset({aten.as_strided.default, aten.view.dtype})


def _read_what_is_written(gm: fx.GraphModule) -> None:
    """Rows that are read where they have just been written are the values written, and those beside them are the
    buffer's from before: so nobody asks what the rest of a buffer holds."""
    if any(node.target in _READ_MEMORY for node in gm.graph.nodes):
        return
    for read in gm.graph.nodes:
        if read.target not in (aten.slice.Tensor, aten.select.int):
            continue
        while (source := operand(read)).target is aten.slice_scatter.default:
            asked, write = _rows(read), _rows(source)
            if asked is None or write is None or asked[0] != write[0] or not len(asked[1]):
                break
            (dim, rows), (_, written) = asked, write
            values = arguments(source).src
            if rows[0] in written and rows[-1] in written and example(values).dtype == example(read).dtype:
                first = rows[0] - written[0]
                read.args = (values, dim, first, *([] if read.target is aten.select.int else [first + len(rows)]))
                read.kwargs = {}
            elif not len(written) or rows[-1] < written[0] or rows[0] > written[-1]:
                read.replace_input_with(source, operand(source))
            else:
                break
    eliminate_dead_code(gm)
    gm.recompile()


def _rows(node: fx.Node) -> tuple[int, range] | None:
    """The dimension and the rows that a slice or a select reads, or that one writes, if they lie side by side."""
    given = arguments(node)
    x = example(operand(node))
    dim = given.dim % x.dim()
    if node.target is aten.select.int:
        return (dim, range(x.shape[dim])[given.index :][:1]) if isinstance(given.index, int) else None
    bounds = (given.start, given.end)
    if given.step != 1 or not all(isinstance(b, int | None) for b in bounds):
        return None
    return dim, range(x.shape[dim])[slice(*bounds)]


def copy_outputs(gm: fx.GraphModule) -> None:
    """Copy each output: while it is a scan, its outputs must alias neither its inputs nor each other."""
    output = gm.graph.output_node()
    copies = []
    for value in results(gm):
        with gm.graph.inserting_before(output):
            copied = gm.graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        copied.meta = dict(value.meta)
        copies.append(copied)
    output.args = (copies,)
    gm.recompile()

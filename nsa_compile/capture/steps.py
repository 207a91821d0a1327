"""What Dynamo does with the step of a scan, mended: which tensors it may read, what it must not do, and why it was not
captured."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo import exc
from torch._dynamo.output_graph import AliasingInfo, SubgraphTracer
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.dicts import SideEffectsProxyDict
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.higher_order_ops import ScanHigherOrderVariable
from torch._dynamo.variables.iter import IteratorVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable, NumpyVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._higher_order_ops.scan import scan_op
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from nsa_compile.capture.picks import UNROLLED, Picks, asks_for_numbers, is_one_mask
from nsa_compile.capture.refusals import (
    ADVANCED,
    ASKS,
    ASKS_FOR_ADDRESS,
    ASKS_FOR_STRIDES,
    DRAWS,
    DRAWS_BY_NUMPY,
    FILLS,
    HOOKS,
    ONE_MASK,
    PLACE,
    READS_GRADIENTS,
    READS_MEMORY,
    TURNS_ON,
    VARYING_NUMBER,
    caller_of_scan,
    frames_of,
    line_in_step,
    line_of,
    refusal,
    why_not_traced,
)
from nsa_compile.capture.scans import turns_gradients_on, without_copy
from nsa_compile.capture.views import why_copies_are_no_views
from nsa_compile.trees import put_together, taken_apart
from nsa_compile.workarounds import blank, without_logged_errors


def mend_steps() -> None:
    """Mend all of it."""
    explain_uncaptured_steps()
    refuse_iterators_from_outside()
    refuse_what_no_step_knows()
    keep_what_steps_find()
    assign_to_what_is_current()
    let_steps_read_views()
    keep_derivatives_of_carries()
    take_results_apart_quickly()
    keep_modes_of_functions()
    let_steps_pick_rows()


def explain_uncaptured_steps() -> None:
    """Say in one line why the step of a scan cannot be captured, and what to write instead.

    Dynamo's own words are of its insides: an unhinted symbol, an internal assertion (torch 2.13). What is no error,
    such as a restart of the analysis, passes.
    """
    original = ScanHigherOrderVariable._call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        place, drawn = caller_of_scan(tx), len(tx.output.random_calls)
        try:
            with without_logged_errors(), _capturing(tx) if place else contextlib.nullcontext() as capture:
                result = original(self, tx, args, kwargs)
        except Exception as error:
            own = isinstance(error, exc.TorchDynamoException)
            failed = isinstance(error, exc.Unsupported | exc.UserError | exc.UncapturedHigherOrderOpError)
            failed |= isinstance(error, exc.ObservedException | exc.TorchRuntimeError) or VARYING_NUMBER in str(error)
            if (own and not failed) or place is None:
                raise
            if not own and isinstance(error.__context__, exc.Unsupported):
                error = error.__context__  # torch fails to write down a graph of nothing, where this one ended
            raise refusal(place, why_not_traced(error), error) from error
        if place is not None and len(tx.output.random_calls) > drawn:
            raise refusal(place, DRAWS)
        if place is not None:
            (scan,) = tx.output.current_tracer.graph.find_nodes(op="call_function", target=scan_op)[-1:]
            body = tx.output.nn_modules[scan.args[0].target]
            if body.graph.find_nodes(op="call_method", target="requires_grad_"):
                raise refusal(place, ASKS)
            if not torch.is_grad_enabled() and _turns_gradients_on(scan, body):
                raise refusal(place, TURNS_ON)
            if (
                capture is not None
                and capture.asks_for_strides is not None
                and (capture.picks.read or _moved(scan, body))
            ):
                raise refusal(place, ASKS_FOR_STRIDES, line=capture.asks_for_strides or None)
            if capture is not None and (found := why_copies_are_no_views(scan, body, capture.picks)) is not None:
                why, node = found
                raise refusal(place, why, line=None if node is None else line_in_step(frames_of(node)))
            if _reads_by_strides(scan, body):
                raise refusal(place, READS_MEMORY)
            body.meta[PLACE] = place
            # The function may write to a result, which gives Dynamo's stand-in for it the gradient of what was written.
            scan.meta["example_value"] = tuple(
                blank(x, requires_grad=x.requires_grad) for x in scan.meta["example_value"]
            )
        return result

    ScanHigherOrderVariable._call_function = call_function


def _memory(node: fx.Node) -> StorageWeakRef:
    return StorageWeakRef(node.meta["example_value"].untyped_storage())


def _turns_gradients_on(scan: fx.Node, body: fx.GraphModule) -> bool:
    """Whether a step computes with gradients of its own accord, of what has one."""
    inputs = [n.meta["example_value"] for n in pytree.tree_leaves(scan.args[1:]) if isinstance(n, fx.Node)]
    graphs = [x for x in body.modules() if isinstance(x, fx.GraphModule)]
    return any(map(turns_gradients_on, graphs)) and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _moved(scan: fx.Node, body: fx.GraphModule) -> set[StorageWeakRef]:
    """The carries and rows that a step has in other strides than the loop as written."""

    def regular(node: Any) -> bool:
        contiguous: bool = without_copy(node).meta["example_value"].is_contiguous()
        return contiguous

    init, xs = cast(Any, scan.args[1:3])
    inputs, results = body.graph.find_nodes(op="placeholder"), cast(Any, body.graph.output_node().args[0])
    return {
        *(_memory(x) for x, *same in zip(inputs, init, results, strict=False) if not all(map(regular, same))),
        *(
            _memory(x)
            for x, rows in zip(inputs[len(init) :], xs, strict=False)
            if not rows.meta["example_value"][0].is_contiguous()
        ),
    }


def _reads_by_strides(scan: fx.Node, body: fx.GraphModule) -> bool:
    """Whether a step reads by strides of memory what it has in others than the loop as written."""
    moved = _moved(scan, body)
    reads = [n for n in body.graph.nodes if getattr(n.target, "__name__", n.target) in _BY_STRIDES]
    inputs = body.graph.find_nodes(op="placeholder")
    given = {_memory(x) for x in inputs if isinstance(x.meta["example_value"], Tensor)}
    return any(_memory(n.args[0]) in (given if _has_offset(n) else moved) for n in reads)


_BY_STRIDES = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")


def _has_offset(read: fx.Node) -> bool:
    """Whether an offset is given. It counts from where the memory of a tensor begins: that of a row, with the first."""
    return isinstance([*read.args, *read.kwargs.values()][-1], int)


def keep_what_steps_find() -> None:
    """Let Dynamo remember the objects that it first met in a step.

    It forgets them with the step, and goes on with what it knows of them: what the function does to such a module or
    list after the scan is not done at the end (torch 2.13). A step changes none of them, or it is not captured.
    """
    original = SideEffects.track_runahead_tensor_and_symvar_side_effects

    def track(self: SideEffects, other: SideEffects) -> None:
        original(self, other)
        if caller_of_scan(InstructionTranslator.current_tx().output.current_tx) is None:
            return
        for item in other.keepalive:
            variable = other.id_to_variable[id(item)]
            if id(item) not in self.id_to_variable and isinstance(
                variable.mutation_type, AttributeMutationExisting | ValueMutationExisting
            ):
                self.id_to_variable[id(item)] = variable
                self.keepalive.append(item)

    SideEffects.track_runahead_tensor_and_symvar_side_effects = track


def assign_to_what_is_current() -> None:
    """Let the attributes of an object that was assigned to before a scan be assigned to after it, too.

    Dynamo sets the record of such assignments aside with each step, and goes on with a copy of it, but the `__dict__`
    of an object keeps the record with which it was made: what is written then is read by nobody (torch 2.13).
    """

    def current(self: SideEffectsProxyDict) -> SideEffects:
        made_with: SideEffects = vars(self)["side_effects"]
        graph = made_with.output_graph_weakref()
        return made_with if graph is None else graph.side_effects

    def remember(self: SideEffectsProxyDict, made_with: SideEffects) -> None:
        vars(self)["side_effects"] = made_with

    SideEffectsProxyDict.side_effects = property(current, remember)  # pyrefly: ignore[no-access]


def _may_have_gradient(dtype: torch.dtype | None) -> bool:
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def keep_derivatives_of_carries() -> None:
    """Let an `autograd.Function` of a carry keep its derivative.

    A carry may start without a gradient and get one at the first step. Dynamo traces a function of what has none
    without its `backward`, and the derivative is that of its `forward` then (torch 2.13).
    """
    original = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found: list[TensorVariable] = []

        def visit(x: Any) -> None:
            if isinstance(x, TensorVariable) and x.requires_grad is False and _may_have_gradient(x.dtype):
                found.append(x)

        if _captures:
            VariableTracker.visit(visit, (args, kwargs))
        for x in found:
            x.requires_grad = True
        try:
            return original(self, tx, args, kwargs)
        finally:
            for x in found:
                x.requires_grad = False

    AutogradFunctionVariable.call_apply = call_apply


@dataclass(eq=False)
class _Capture:
    """A scan whose step Dynamo traces now."""

    tx: Any  # Dynamo's translator of the function that calls the scan operator
    asks_for_strides: str | None = None  # where; empty in a step that is torch's own
    picks: Picks = field(default_factory=Picks)


_captures: list[_Capture] = []  # the innermost last


@contextlib.contextmanager
def _capturing(tx: Any) -> Iterator[_Capture]:
    _captures.append(_Capture(tx))
    try:
        yield _captures[-1]
    finally:
        _captures.pop()


def refuse_iterators_from_outside() -> None:
    """A step is traced once, so an iterator from outside of it would go on by one item instead of one a step.

    Dynamo refuses what a step changes outside of it, but not for a generator or an iterator of a range or dict (torch
    2.13).
    """
    for base in (IteratorVariable, LocalGeneratorObjectVariable):
        _remember_capture(base)
        for kind in (base, *_subclasses(base)):
            if "tp_iternext_impl" in vars(kind):
                _refuse_from_outside(kind)


def refuse_what_no_step_knows() -> None:
    """Refuse what Dynamo answers of the tensors that it traces a step with, and what it draws or seeds for all steps.

    Its numbers for `numpy.random` are torch's, `seed` is dropped, `.grad` of a row is taken for a tensor, and `full` of
    an integer tensor is one of floats (torch 2.13). Strides are answered, and looked at when the step is known.
    """

    def refuse(reason: str) -> Callable[..., None]:
        def refused(*_: Any, **__: Any) -> None:
            raise exc.UncapturedHigherOrderOpError(reason)

        return refused

    def drawn_by_numpy(variable: Any, *_: Any, **__: Any) -> None:
        if str(getattr(variable.value, "__module__", "")).startswith("numpy.random"):
            raise exc.UncapturedHigherOrderOpError(DRAWS_BY_NUMPY)

    def asks_for_strides(_: Any, tx: Any, *__: Any, **___: Any) -> None:
        for capture in _captures:
            capture.asks_for_strides = line_of(tx) or ""

    def hooks(variable: Any, tx: Any, *_: Any, **__: Any) -> None:
        if variable.source is not None or variable.as_proxy().tracer is not tx.output.current_tracer:
            raise exc.UncapturedHigherOrderOpError(HOOKS)

    def calls(variable: Any, _: Any, args: Any, kwargs: Any) -> None:
        if variable.value in (torch.full, torch.full_like):
            fills(args, kwargs, floats=variable.value is torch.full)

    def calls_method(_: Any, __: Any, name: str, args: Any, kwargs: Any) -> None:
        if name == "new_full":
            fills(args, kwargs, floats=False)

    def fills(args: Any, kwargs: Any, *, floats: bool) -> None:
        for filling in (*args[1:2], *(value for name, value in kwargs.items() if name == "fill_value")):
            tensor = filling.realize()
            if isinstance(tensor, TensorVariable) and not (floats and tensor.dtype.is_floating_point):
                raise exc.UncapturedHigherOrderOpError(FILLS)

    _in_steps(TorchInGraphFunctionVariable, "call_function", calls)
    _in_steps(TensorVariable, "call_method", calls_method)
    _in_steps(TensorVariable, "method_register_hook", hooks)
    _in_steps(TensorVariable, "method_data_ptr", refuse(ASKS_FOR_ADDRESS))
    _in_steps(TensorVariable, "method_attr_grad", refuse(READS_GRADIENTS))
    _in_steps(TensorVariable, "method_is_contiguous", asks_for_strides)
    _in_steps(TensorVariable, "method_stride", asks_for_strides)
    _in_steps(NumpyVariable, "call_function", drawn_by_numpy)


def let_steps_pick_rows() -> None:
    """Let a step read and write rows by a number in a tensor, as `k[t]` and `k[:, t] = x`."""
    read, write = TensorVariable.method___getitem__, TensorVariable.method___setitem__
    insert = BuiltinVariable._handle_insert_op_in_graph

    def picks(tx: Any, key: Any) -> Picks | None:
        place = None if _captures or not tx.output.root_tx.one_graph else caller_of_scan(tx)
        if not _captures and place is None:
            return None
        if _captures and is_one_mask(key):
            raise exc.UncapturedHigherOrderOpError(ONE_MASK)
        if not asks_for_numbers(key):
            return None
        if place is not None:
            raise refusal(place, UNROLLED)
        return _captures[-1].picks

    def getitem(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        found = picks(tx, args[0])
        return read(self, tx, *args, **kwargs) if found is None else found.read_row(tx, self, args[0])

    def inserted(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        reads = self.fn is operator.getitem and type(args[0]) is TensorVariable
        found = picks(tx, args[1]) if reads else None
        return insert(self, tx, args, kwargs) if found is None else found.read_row(tx, *args)

    def setitem(self: Any, tx: Any, key: Any, value: Any) -> Any:
        found = picks(tx, key)
        return write(self, tx, key, value) if found is None else found.write_row(tx, self, key, value)

    BuiltinVariable._handle_insert_op_in_graph = inserted
    BuiltinVariable.call_function_handler_cache.clear()
    TensorVariable.method___getitem__ = getitem
    TensorVariable.method___setitem__ = setitem


def _in_steps(kind: Any, name: str, look: Callable[..., None]) -> None:
    """Look at a method's arguments before it runs, while a step is traced."""
    original = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _captures:
            look(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, method)


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [*direct, *(inner for sub in direct for inner in _subclasses(sub))]


def _remember_capture(kind: Any) -> None:
    create = kind.__init__

    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        now = _captures[-1] if _captures else None
        captured_in = kwargs.pop("nsa_captured_in", now)  # Dynamo copies it as it would any attribute
        create(self, *args, **kwargs)
        self.nsa_captured_in = captured_in

    kind.__init__ = created


def _refuse_from_outside(kind: Any) -> None:
    advance = kind.tp_iternext_impl

    def advanced(self: Any, tx: Any) -> Any:
        if _captures and self.nsa_captured_in is not _captures[-1]:
            raise exc.UncapturedHigherOrderOpError(ADVANCED)
        return advance(self, tx)

    kind.tp_iternext_impl = advanced


def let_steps_read_views() -> None:
    """Let a step read a tensor from outside and a view of it, such as `a @ c @ a.mT`.

    To Dynamo these are two inputs of the step that share memory, which it forbids lest one of them be written to (torch
    2.13). It forbids a step to write to any, and what a step of ours returns is a copy.
    """
    original = SubgraphTracer.has_aliasing

    def has_aliasing(self: SubgraphTracer) -> AliasingInfo:
        ours = self.source_target is scan_op and caller_of_scan(InstructionTranslator.current_tx().output.current_tx)
        return AliasingInfo(False, "") if ours else original(self)

    SubgraphTracer.has_aliasing = has_aliasing


def take_results_apart_quickly() -> None:
    """Let Dynamo trace short functions of ours where it takes the results of a step apart and puts them together.

    It traces torch's pytree there, five times a scan, which takes longer than most steps do (torch 2.13).
    """
    original = higher_order_ops._make_inlined
    ours = {
        pytree.tree_flatten: taken_apart,
        pytree.tree_leaves: _leaves,
        pytree.tree_structure: _structure,
        pytree.tree_unflatten: put_together,
    }

    def make_inlined(tx: Any, function: Any) -> Any:
        in_scan = _captures and tx is _captures[-1].tx
        return original(tx, ours.get(function, function) if in_scan else function)

    higher_order_ops._make_inlined = make_inlined  # pyrefly: ignore[bad-assignment]


def _leaves(tree):
    return taken_apart(tree)[0]


def _structure(tree):
    return taken_apart(tree)[1]


def keep_modes_of_functions() -> None:
    """Trace a step under the default device that is set where the scan is called.

    Dynamo hands the scan to the modes of `__torch_function__` that are on, of which this is one, as it does a function
    of torch, and such a mode calls what it is handed without itself: it forgets it within the step (torch 2.13).
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return self._call_function(tx, args, kwargs)

    ScanHigherOrderVariable.call_function = call_function

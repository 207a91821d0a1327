"""How Dynamo captures a scan: as one node, whose results it knows by running the step once on fake tensors."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dynamo import exc
from torch._dynamo.output_graph import AliasingInfo, SubgraphTracer
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.higher_order_ops import ScanHigherOrderVariable
from torch._dynamo.variables.iter import IteratorVariable
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nsa_compile.workarounds import DATA

log = logging.getLogger("nsa_compile")


@cache
def mend_dynamo() -> None:
    """Mend what Dynamo does with a scan, once."""
    capture_scans_by_shape()
    explain_uncaptured_steps()
    refuse_iterators_from_outside()
    keep_what_steps_find()
    let_steps_read_views()


def capture_scans_by_shape() -> None:
    """While Dynamo captures a scan, find the shapes of its results by running its body once.

    Dynamo runs each operator on fake tensors to learn what its results look like. Where gradients are wanted, torch's
    scan then traces, differentiates and partitions its body, and all of that is thrown away: a third of the time a
    model takes to compile (torch 2.13). What is traced later, by AOTAutograd, is not changed.
    """
    differentiate = scan_op.py_kernels.pop(DispatchKey.Autograd)

    @scan_op.py_impl(DispatchKey.Autograd)
    def scan_autograd(
        combine: fx.GraphModule, init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Tensor]
    ) -> Any:
        inputs = (*init, *xs, *additional)
        tensors = [x for x in inputs if isinstance(x, Tensor)]  # a size that varies is an input, too
        modes = _get_current_dispatch_mode_stack()
        # Proxies and functional tensors have modes of their own.
        fake = all(isinstance(x, FakeTensor) for x in tensors) and all(isinstance(m, FakeTensorMode) for m in modes)
        if not fake or torch._guards.TracingContext.try_get() is None:
            wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            if (place := _captured_at(combine)) and (modes or wants_gradients):
                raise ScanNotCompiled(_NOT_OURS.format(place=place, backend="a backend of your own"))
            return differentiate(combine, init, xs, additional)
        return _ShapesOfScan.apply(*_results_of_scan(combine, init, xs, additional), *inputs)


def _results_of_scan(
    combine: fx.GraphModule, init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Any]
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Stand-ins for the results of a scan on fake tensors, and which of them have gradients."""
    inputs = [*init, *(x[0] for x in xs), *additional]
    length = optimization_hint(xs[0].shape[0])
    wanted = [torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in inputs]

    @cache
    def results_of(flags: tuple[bool, ...]) -> list[tuple[Tensor, bool]]:
        pairs = zip(inputs, flags, strict=True)
        leaves = [x.detach().requires_grad_(flag) if isinstance(x, Tensor) else x for x, flag in pairs]
        return [(x, x.requires_grad) for x in run_body(combine, leaves)]

    with _forgetting_symbols(xs[0]):
        ever, with_gradient = propagate_gradients(results_of, len(init), length, wanted)
        results = [x for x, _ in results_of(tuple(ever))]
    rows = [x.new_empty((xs[0].shape[0], *x.shape)) for x in results[len(init) :]]
    return [*(x.new_empty(x.shape) for x in init), *rows], with_gradient


def _forgetting_symbols(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """What a step reads out of tensors is a symbol while it is run, and stays in it."""
    shape_env = x.fake_mode.shape_env if isinstance(x, FakeTensor) else None
    return contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()


# The results of a step, and whether each has a gradient, by which inputs have one.
ResultsOf = Callable[[tuple[bool, ...]], Sequence[tuple[Any, bool]]]


def propagate_gradients(
    results_of: ResultsOf, n_init: int, length: int, first: Sequence[bool]
) -> tuple[list[bool], tuple[int, ...]]:
    """Which inputs have a gradient at some step, and which results after the last one.

    A carry may get a gradient at one step and lose it at another: the two of a swap, say.
    """
    now, ever, stacked = list(first), list(first), set[int]()
    for _ in range(length):
        results = [has_gradient for _, has_gradient in results_of(tuple(now))]
        stacked |= {i for i in range(n_init, len(results)) if results[i]}
        before, now = now, [*results[:n_init], *first[n_init:]]
        if now == before:
            break
        ever = [a or b for a, b in zip(ever, now, strict=True)]
    return ever, (*(i for i in range(n_init) if now[i]), *sorted(stacked))


def run_body(body: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a step as it was captured, with gradients."""
    with torch.enable_grad():
        return list(_Body(body).run(*inputs))


class _Body(fx.Interpreter):
    """Runs a body. A checkpointed region keeps nothing that would have to be computed again, so it is just run."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _Body(args[0]).run(*args[1:])
        if target is DATA:
            return args[0].detach()
        return super().call_function(target, args, kwargs)


class _ShapesOfScan(torch.autograd.Function):
    """A scan on fake tensors, whose results say whether they have gradients."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], with_gradient: Sequence[int], *inputs: Any) -> Any:
        ctx.inputs = inputs
        ctx.mark_non_differentiable(*(x for i, x in enumerate(results) if i not in with_gradient))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *(torch.empty_like(x) if isinstance(x, Tensor) else None for x in ctx.inputs)


class ScanRefused(exc.UncapturedHigherOrderOpError, ValueError):
    """A `nsa_compile.scan` that cannot be captured; says why in one line. Dynamo lets it through as it is."""


class ScanNotCompiled(exc.ShortenTraceback):
    """A `nsa_compile.scan` that was captured and cannot be compiled; says why in one line.

    Dynamo hands on a `ShortenTraceback` as it is, and puts any other error of a backend behind words of its own.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


_NOT_OURS = (
    "nsa_compile.scan at {place} was compiled by {backend}, which would run it as torch's own scan, whose gradients "
    'are wrong; compile with backend="nsa_compile", or leave the call out with torch.compiler.disable'
)


def becomes_a_node() -> bool:
    """Whether the scan that Dynamo is about to trace becomes a node of its graph; else its loop is unrolled.

    Raises:
        ScanRefused: the graph is for one of torch's own backends.
    """
    if torch.compiler.is_exporting():
        return False
    tx = InstructionTranslator.current_tx()
    place = _caller_of_scan(tx.output.current_tx) or "unknown"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        log.warning("scan at %s is unrolled: it lies inside a transform of torch.func", place)
        return False
    if (foreign := _torch_backend(tx.output.compiler_fn)) is not None:
        raise ScanRefused(_NOT_OURS.format(place=place, backend=f"the backend {foreign!r}"))
    return True


def _torch_backend(function: Any) -> str | None:
    """The name of a backend that is one of torch's own; None for any other."""
    name = None
    while True:
        name = name or getattr(function, "compiler_name", None)
        inner = [getattr(function, held, None) for held in ("__wrapped__", "compiler_fn", "func")]
        # torch.compile cuts a model within DistributedDataParallel into pieces for the backend.
        inner.append(getattr(getattr(function, "__self__", None), "backend_compile_fn", None))
        if not (found := [x for x in inner if x is not None]):
            break
        function = found[0]
    module = getattr(function, "__module__", "")
    return (name or getattr(function, "__name__", module)) if module.split(".")[0] == "torch" else None


def explain_uncaptured_steps() -> None:
    """Say in one line why the step of a scan cannot be captured, and what to write instead.

    Dynamo's own words are of its insides: an unhinted symbol, an internal assertion (torch 2.13). What is no error,
    such as a restart of the analysis, passes.
    """
    original = ScanHigherOrderVariable._call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        place, drawn = _caller_of_scan(tx), len(tx.output.random_calls)
        try:
            with _capturing():
                result = original(self, tx, args, kwargs)
        except Exception as error:
            own = isinstance(error, exc.TorchDynamoException)
            failed = isinstance(error, exc.Unsupported | exc.UserError | exc.UncapturedHigherOrderOpError)
            failed |= _VARYING_NUMBER in str(error)
            if (own and not failed) or place is None:
                raise
            raise ScanRefused(f"the step of the scan at {place} cannot be captured: {why_not_traced(error)}") from error
        if place is not None and len(tx.output.random_calls) > drawn:
            raise ScanRefused(f"the step of the scan at {place} cannot be captured: {_DRAWS}")
        if place is not None:
            (scan,) = tx.output.current_tracer.graph.find_nodes(op="call_function", target=scan_op)[-1:]
            body = tx.output.nn_modules[scan.args[0].target]
            if body.graph.find_nodes(op="call_method", target="requires_grad_"):
                raise ScanRefused(f"the step of the scan at {place} cannot be captured: {_ASKS}")
            body.meta[_PLACE] = place
        return result

    ScanHigherOrderVariable._call_function = call_function  # type: ignore[method-assign]


def keep_what_steps_find() -> None:
    """Let Dynamo remember the objects that it first met in a step.

    It forgets them with the step, and goes on with what it knows of them: what the function does to such a module or
    list after the scan is not done at the end (torch 2.13). A step changes none of them, or it is not captured.
    """
    original = SideEffects.track_runahead_tensor_and_symvar_side_effects

    def track(self: SideEffects, other: SideEffects) -> None:
        original(self, other)
        if _caller_of_scan(InstructionTranslator.current_tx().output.current_tx) is None:
            return
        for item in other.keepalive:
            variable = other.id_to_variable[id(item)]
            if id(item) not in self.id_to_variable and isinstance(
                variable.mutation_type, AttributeMutationExisting | ValueMutationExisting
            ):
                self.id_to_variable[id(item)] = variable
                self.keepalive.append(item)

    SideEffects.track_runahead_tensor_and_symvar_side_effects = track  # type: ignore[method-assign]


_captures: list[object] = []  # scans whose steps Dynamo traces now, the innermost last


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    _captures.append(object())
    try:
        yield
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
            raise exc.UncapturedHigherOrderOpError(_ADVANCED)
        return advance(self, tx)

    kind.tp_iternext_impl = advanced


_ADVANCED = "an iterator from outside of the step"


def let_steps_read_views() -> None:
    """Let a step read a tensor from outside and a view of it, such as `a @ c @ a.mT`.

    To Dynamo these are two inputs of the step that share memory, which it forbids lest one of them be written to (torch
    2.13). It forbids a step to write to any, and what a step of ours returns is a copy.
    """
    original = SubgraphTracer.has_aliasing

    def has_aliasing(self: SubgraphTracer) -> AliasingInfo:
        ours = self.source_target is scan_op and _caller_of_scan(InstructionTranslator.current_tx().output.current_tx)
        return AliasingInfo(False, "") if ours else original(self)

    SubgraphTracer.has_aliasing = has_aliasing  # type: ignore[method-assign]


# In the meta of the body of a captured `nsa_compile.scan`: `file:line` of its call.
_PLACE = "nsa_scan_at"


def _captured_at(combine: Any) -> str | None:
    return combine.meta.get(_PLACE) if isinstance(combine, fx.GraphModule) else None


def _caller_of_scan(tx: Any) -> str | None:
    """`file:line` of the call of `nsa_compile.scan` that Dynamo is in; None if it is in torch's own."""
    inside = False
    while tx is not None:
        if tx.f_code.co_filename.endswith("nsa_compile/loop.py"):
            inside = True
        elif inside:
            return f"{tx.f_code.co_filename}:{tx.lineno}"
        tx = getattr(tx, "parent", None)
    return None


# Dynamo's class for a Python float whose value has changed between calls.
_VARYING_NUMBER = "SymFloat"
_DRAWS = (
    "it draws from Python's random, once for all steps; draw a tensor before the scan, one number a step, and scan it"
)
_ASKS = "it calls requires_grad_(); ask for the gradient of a tensor that the scan is given"
# Words of torch's messages, what they mean for the author of a step, and the way out.
_REASONS = (
    (
        (_VARYING_NUMBER,),
        "it reads a Python float that is another one from call to call; pass it as a tensor, as torch.tensor(scale)",
    ),
    (
        ("repeat_interleave",),
        "it repeats rows by numbers of a tensor; give the numbers as Python integers, or index_select rows",
    ),
    (
        ("DynamicOutputShape", "nonzero", "masked_select", "aten.unique"),
        "it selects elements by their values, as x[mask], x[mask] = y and x.nonzero() do, and how many is not known "
        "before it runs; write torch.where(mask, x, 0) or torch.where(mask, y, x) instead",
    ),
    (
        ("unhinted", "data-dependent", "DataDependent", "Data-dependent", "item()", "_local_scalar_dense", "u0"),
        "it reads a number out of a tensor, as k[t], k[:t + 1], k[:, t] = x, t.item() and `if t > 0` with a tensor t "
        "do; write k.index_select(0, t.view(1))[0], a mask such as torch.arange(S) <= t, and "
        "torch.where(torch.arange(S) == t, x, k) instead",
    ),
    (
        (_ADVANCED,),
        "it takes the next item of an iterator from outside of it, one for all steps; make a tensor of the items, one "
        "a step, and scan it",
    ),
    (
        ("side effect",),
        "it changes something outside of it, such as a list, a counter or an attribute; return from the step what is "
        "to be kept, as a part of the carry or as an output",
    ),
    (
        ("input mutation", "mutat"),
        "it writes in place to its carry, to its input or to a tensor from outside; write to a copy, x.clone(), and "
        "return it",
    ),
    (
        ("HOP body output unsupported",),
        "it returns something else than tensors in tuples, lists and dicts, as x.max(-1) is, a class of torch's own; "
        "return its tensors, as tuple(x.max(-1))",
    ),
    (("metadata", "init and carry"), "it returns a carry of another shape or dtype than it was given"),
    (("builtin print", "builtin `print`", "logging"), "it prints or logs; do so with what the scan returns"),
    (("graph_break()", "torch.compiler.disable", "Skip calling"), "it breaks the graph, and a step is captured whole"),
)


def why_not_traced(error: Exception) -> str:
    """What torch says of a step that it cannot trace, in one line."""
    text = f"{type(error).__name__}: {error}"
    for words, reason in _REASONS:
        if any(word in text for word in words):
            return reason
    if found := re.search(r"(Data dependent|Dynamic shape) operator.*?(aten\.\w+)", text, re.DOTALL):
        return f"what {found[2]} returns is not known before it runs; compute it outside of the scan"
    lines = [line for line in str(error).strip().splitlines() if line]
    return lines[0] if lines else type(error).__name__

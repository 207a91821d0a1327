"""The `torch.compile` backend: run the passes on what Dynamo captured, then hand over to Inductor."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nsa_compile import cache, inductor_files, modes
from nsa_compile.cache import constants_digest
from nsa_compile.capture import mend_dynamo
from nsa_compile.capture.guards import guard_what_dynamo_does_not
from nsa_compile.capture.refusals import ScanNotCompiled
from nsa_compile.capture.scans import turns_gradients_on
from nsa_compile.compiler_cache import errors_named
from nsa_compile.inductor_kernels import compile_kernels_together, simplify_plain_indices_by_expanding
from nsa_compile.ir import markers
from nsa_compile.ir.lowering import reshape_views
from nsa_compile.ir.scans import VALUE, WRITTEN, Declined, first_line, subgraphs
from nsa_compile.ops.loop import Compiler
from nsa_compile.ops.loop.step import Layout
from nsa_compile.passes import verifier
from nsa_compile.passes.pipeline import Options, Uncacheable, leave_alone, run_pipeline, sources_digest
from nsa_compile.passes.report import Report
from nsa_compile.passes.skinny_products import SKINNY
from nsa_compile.program.aliases import hand_on_originals
from nsa_compile.program.checks import check_after_loops
from nsa_compile.program.constants import Guarded, mark_constants, marked
from nsa_compile.program.derivatives import with_derivatives_refused
from nsa_compile.program.first_call import FirstCall
from nsa_compile.program.functional import WriteBack, left_to_write, make_functional, with_stand_ins
from nsa_compile.program.loops import keep_loops
from nsa_compile.program.sizes import specialize_shapes
from nsa_compile.program.states import check_state, cloned, describe_difference, differing, tensors_of
from nsa_compile.workarounds import (
    as_function,
    inputs_saved_themselves,
    let_views_of_outputs_keep_their_bases,
    mend_inductor,
)

mend_dynamo()

log = logging.getLogger("nsa_compile")

# Programs, one for each shape, that a function may have; torch's own limit is 8.
SHAPES = 64
_LEAST_OF_A_THREAD = 2**17  # elements, in programs with products of few rows

_last_report: Report | None = None
_explained: list[Report] | None = None


def last_report() -> Report | None:
    """What the passes did in the latest compilation of this process, or why the latest loop runs as it is written; None
    before the first."""
    return _last_report


def keep_report(report: Report) -> None:
    """Make a report the last one, and one of those that `explained` yields."""
    global _last_report
    _last_report = report
    if _explained is not None:
        _explained.append(report)


@contextmanager
def explained() -> Iterator[list[Report]]:
    """The reports of all that is compiled inside, with estimated costs and without the cache, whose source lines may
    be those of an earlier version of the program."""
    global _explained
    reports: list[Report] = []
    _explained = reports
    try:
        yield reports
    finally:
        _explained = None


# An attribute of the functions that `nsa_compile.loop` makes.
IS_LOOPED = "__nsa_looped__"


def compile(model: Callable[..., Any], *, fullgraph: bool = True, **options: Any) -> Callable[..., Any]:
    """`torch.compile` with this backend. `options` are the fields of `passes.pipeline.Options`.

    Raises:
        ValueError: an unknown option, or a value it cannot take; or no function, or one of `nsa_compile.loop`.
    """
    parse_options(options)
    if not callable(model):
        raise ValueError(f"{model!r} is neither a function nor a module, so there is nothing to compile")
    if getattr(model, IS_LOOPED, False):
        name = getattr(model, "__qualname__", model)
        raise ValueError(f"{name} is compiled by nsa_compile.loop, which compiles it by itself; call it as it is")
    # The function, not its name: the name needs an installed package, and a checkout on the path is none.
    return torch.compile(  # pyrefly: ignore[no-matching-overload]  # the overloads leave recompile_limit out
        model, backend=nsa_compile_backend, fullgraph=fullgraph, dynamic=False, options=options, recompile_limit=SHAPES
    )


def compile_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Compile each of `model.blocks` in place, and return the model. Equal blocks are compiled once."""
    blocks: Any = model.blocks
    for block in blocks:
        compile_block(block, **options)
    return model


def compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a module in place."""
    parse_options(options)
    block.compile(backend=nsa_compile_backend, fullgraph=True, dynamic=False, options=options, recompile_limit=SHAPES)


def compile_decode_step(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """The compiled `model.decode_step(state, tokens) -> (state, logits)`, which updates the state in place.

    What is given by name, such as `return_selection` of `NSATransformer.decode_step`, is handed on, and what the step
    then returns beside the logits comes after them. Tensors of the state keep their shapes, dtypes and devices, and
    have no elements in common. No gradient flows. `compile(model.decode_step)` leaves the state as it was, at the cost
    of copying every cache for each token.

    If `decode_step` takes a `block` by name, that is called in the place of `type(block).decode_step` for each of
    `model.blocks`: each is compiled by itself, and equal ones once, as in `NSATransformer.decode_step`. One that takes
    `logits` as well is given the compiled `model.logits`. A block updates its part of the state in place, so a step
    reads what it needs of the old one before it calls the block. The report is that of the blocks.

    Raises:
        ValueError: the model has no such method; when called, if the state is not one that can be updated in place.
    """
    step_of: Any = getattr(model, "decode_step", None)
    if not callable(step_of):
        raise ValueError(
            f"{type(model).__name__} has no method decode_step(state, tokens) that returns (state, logits), which is "
            "what is compiled; nsa_compile.compile takes any function"
        )
    named = inspect.signature(step_of).parameters
    if "block" not in named:
        whole_step = _updating_in_place(step_of, "decode_step", **options)

        def checked_step(state: Any, *args: Any, **asked: Any) -> tuple[Any, ...]:
            check_state(state)
            return whole_step(state, *args, **asked)

        return checked_step

    compiled_block = _updating_in_place(
        lambda layer, block, x, t, **asked: block.decode_step(layer, x, t, **asked), "decode_step of a block", **options
    )

    def in_place(block: nn.Module, layer: Any, x: Tensor, t: Tensor, **asked: Any) -> tuple[Any, ...]:
        return compiled_block(layer, block, x, t, **asked)

    functions: dict[str, Callable[..., Any]] = {"block": in_place}
    if "logits" in named and hasattr(model, "logits"):
        compiled_logits = compile(lambda model, x: model.logits(x), **options)

        def logits(model: nn.Module, x: Tensor) -> Tensor:
            global _last_report
            report_of_block = _last_report
            result = compiled_logits(model, x)
            _last_report = report_of_block
            return result

        functions["logits"] = logits

    def decode_step(state: Any, tokens: Tensor, **asked: Any) -> tuple[Any, ...]:
        check_state(state)
        returned = _without_gradients(step_of, state, tokens, **functions, **asked)
        if (part := differing(state, returned)) is not None:
            raise ValueError(describe_difference("decode_step", part, state, returned))
        # What blocks have updated is the tensor that it was.
        pairs = zip(tensors_of(state), tensors_of(returned[0]), strict=True)
        changed = [(old, new.clone()) for old, new in pairs if new is not old]
        for old, new in changed:
            _without_gradients(old.copy_, new)
        return state, *returned[1:]

    return decode_step


def _updating_in_place(step_of: Callable[..., Any], name: str, **options: Any) -> Callable[..., Any]:
    """A function `(state, *args) -> (state, *outputs)`, compiled such that it writes to the tensors of the state."""

    def step(state: Any, *args: Any, **asked: Any) -> tuple[Any, ...]:
        returned = step_of(state, *args, **asked)
        if (part := differing(state, returned)) is not None:
            return part, returned
        # Copies, as what comes after and the outputs may be what was before. A compiler makes none where they are not.
        copies, outputs = [x.clone() for x in tensors_of(returned[0])], [cloned(x) for x in returned[1:]]
        for old, new in zip(tensors_of(state), copies, strict=True):
            old.copy_(new)
        return None, outputs

    compiled, signature = compile(step, **options), inspect.signature(step_of)
    allowed: set[tuple[Any, ...]] = set()  # how many arguments, and which by name

    def run(state: Any, *args: Any, **asked: Any) -> tuple[Any, ...]:
        if (len(args), *asked) not in allowed:
            try:
                signature.bind(state, *args, **asked)
            except TypeError as error:
                raise TypeError(f"{name}{signature}: {error}") from None
            allowed.add((len(args), *asked))
        part, returned = _without_gradients(compiled, state, *args, **asked)
        if part is not None:
            raise ValueError(describe_difference(name, part, state, returned))
        return state, *returned

    return run


def compile_prefill(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """The compiled `model.prefill(tokens, lengths, max_len) -> (state, logits)`, block by block; no gradient flows.

    Each number of tokens `S` and each `max_len` is a program of its own: fill prompts up to few lengths.
    """
    prefill: Any = model.prefill
    compiled = compile(
        lambda block, x, lengths, max_len, **asked: block.prefill(x, lengths, max_len, **asked), **options
    )
    return lambda *args, **kwargs: _without_gradients(prefill, *args, block=compiled, **kwargs)


def _without_gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return function(*args, **kwargs)


def parse_options(options: dict[str, Any]) -> Options:
    """Options as given to `torch.compile(..., options=...)`, checked."""
    unknown = sorted(set(options) - set(Options.__dataclass_fields__))
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r}; the options are {', '.join(Options.__dataclass_fields__)}")
    return Options(**options)


def nsa_compile_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Tensor], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The entry point Dynamo calls with a captured graph."""
    global _last_report
    chosen = parse_options(dict(options or {}))
    if _explained is not None:
        chosen = replace(chosen, cache=False, estimate=True)
    if chosen.nested == "inductor" and _on_cpu(example_inputs):
        inductor_files.begin_header()
    with modes.unobserved():
        modes.refuse_users_modes()
        guard_what_dynamo_does_not()
        example_inputs = specialize_shapes(gm, example_inputs)
        hand_on_originals(gm)
        check_after_loops(gm)
        mark_constants(gm, example_inputs)
        captured = verifier.snapshot(gm) if chosen.check == "first" else None
    run = _compiled(gm, example_inputs, chosen)
    report = _last_report
    assert report is not None
    if _explained is not None:
        _explained.append(report)
    if captured is not None:
        run = FirstCall(captured, run, chosen, _rewritten, lambda line: setattr(report, "first_call", line))
    return with_derivatives_refused(run) if report.scans or report.attention or _has_few_rows(gm) else run


def _compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """The program of a captured graph, which is compiled again where what it holds has changed."""
    global _last_report
    with modes.unobserved():
        has_constants = any(VALUE in n.meta for n in gm.graph.find_nodes(op="placeholder"))
        as_captured = verifier.snapshot(gm) if has_constants else None
        compiler = _compile_step if options.nested == "inductor" else None
        _last_report, written = optimize(gm, options, example_inputs, compiler)
    if written.meets_another(example_inputs):
        return written.run_as_it_came
    run = written.around(compile_nested(gm, written.examples(example_inputs), options.nested, nvtx=options.nvtx))
    held = marked(gm, written.inputs)
    if not held or as_captured is None:
        return run

    def again(without: set[int], inputs: Sequence[Any]) -> Callable[..., Any]:
        fresh = verifier.snapshot(as_captured)
        for place, node in enumerate(fresh.graph.find_nodes(op="placeholder")):
            if place in without:
                node.meta.pop(VALUE, None)
        return _compiled(fresh, inputs, options)

    return Guarded(run, held, again)


def _rewritten(gm: fx.GraphModule, options: Options, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The program that the passes make of a captured graph, run operator by operator."""
    _, written = optimize(gm, options, inputs)
    return written.around(as_function(gm))


def optimize(
    gm: fx.GraphModule, options: Options, example_inputs: Sequence[Tensor], compiler: Compiler | None = None
) -> tuple[Report, WriteBack]:
    """Make a captured graph ready for a nested backend, in place: make it functional; run the passes, or fetch what
    they made of an equal one before; make what is still a scan a loop. What it wrote to its inputs is left to be done.

    `check="passes"` compares values on the inputs the program was first called with. A `compiler` is for the steps of
    long loops.
    """
    modes.note_autocast(gm)
    try:
        written = make_functional(gm, example_inputs)
    except Declined as declined:
        written = left_to_write(gm, example_inputs)
        report = leave_alone(gm, options, declined)
        keep_loops(gm, compiler)
        return report, written
    marked(gm, written.inputs)
    # What is right without gradients alone is not, where the program turns them on.
    with torch.set_grad_enabled(torch.is_grad_enabled() or turns_gradients_on(gm) is not None):
        report = _run_passes(gm, options, example_inputs)
        for graph in subgraphs(gm):
            reshape_views(graph)  # torch's stand-ins of `roll` have other strides than what it yields (torch 2.13)
        keep_loops(gm, compiler)
    return report, written


def _run_passes(gm: fx.GraphModule, options: Options, example_inputs: Sequence[Tensor]) -> Report:
    key, notes = "", []
    if options.cache and options.dump_dir is None and not options.checks_passes:
        try:
            key = cache.cache_key(gm, options)
        except Uncacheable as why:
            notes.append(f"not kept: {why}")
    if key and (report := cache.load(gm, key)) is not None:
        log.info("passes: cache hit %s", key[:12])
        return report
    report = run_pipeline(gm, options, example_inputs if options.checks_passes else None)
    report.notes += notes
    report.cache_key = key
    if key:
        cache.store(gm, key, report)
    return report


def compile_nested(
    gm: fx.GraphModule, example_inputs: Sequence[Tensor], nested: str, *, nvtx: bool = False
) -> Callable[..., Any]:
    """Compile a rewritten graph with the backend behind this one.

    With `nvtx`, those that `annotate_ranges` named are put in; a graph run eagerly has them in the forward pass only.
    """
    if nested == "eager":
        if nvtx:
            markers.insert(gm, "forward")
        return as_function(gm)
    from torch._dynamo.backends.registry import lookup_backend

    let_views_of_outputs_keep_their_bases()
    if nested == "aot_eager":
        with _limits_named():
            return lookup_backend("aot_eager")(gm, list(example_inputs), **(markers.compilers() if nvtx else {}))
    config = {**(markers.inductor_config(gm) if nvtx else {}), **_for_few_rows(gm)}
    patches = {"config_patches": config} if config else {}
    inductor_files.prepare()
    _part_kept_programs(gm)
    compile_kernels_together()
    simplify_plain_indices_by_expanding()
    mend_inductor()
    negated = [i for i, x in enumerate(example_inputs) if isinstance(x, Tensor) and x.is_neg()]
    if any(WRITTEN in gm.graph.find_nodes(op="placeholder")[i].meta for i in negated):
        raise ScanNotCompiled(
            "the compiled function writes to an input that is a negated view, such as z.conj().imag, and Inductor "
            'knows no such views; give it x.resolve_neg(), or compile with nested="aot_eager"'
        )
    examples = with_stand_ins(example_inputs, _resolved(example_inputs, negated))
    with errors_named(), _limits_named(), inputs_saved_themselves():
        run = _inductor(example_inputs)(gm, examples, **patches)
    return run if not negated else functools.partial(_run_resolved, run, negated)


def _on_cpu(inputs: Sequence[Any]) -> bool:
    return all(x.is_cpu for x in inputs if isinstance(x, Tensor))


def _inductor(inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor, for inputs of these devices.

    Torch's entry starts processes that compile for Triton; to start them takes 3 s of a processor, beside the first
    steps of a program that has nothing for them to do (torch 2.13).
    """
    if _on_cpu(inputs):
        from torch._inductor.compile_fx import compile_fx

        return compile_fx
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend("inductor")


def _run_resolved(run: Callable[..., Any], negated: Sequence[int], *inputs: Any) -> Any:
    """Run a program on inputs without negated views, and write to these what it wrote to their copies."""
    resolved = _resolved(inputs, negated)
    results = run(*resolved)
    copies = {resolved[i].untyped_storage()._cdata for i in negated}
    if any(isinstance(x, Tensor) and x.untyped_storage()._cdata in copies for x in results):
        raise ScanNotCompiled(
            "the compiled function returns an input that is a negated view, such as z.conj().imag, or a view of it, "
            'and Inductor knows no such views; give it x.resolve_neg(), or compile with nested="aot_eager"'
        )
    with torch.no_grad():
        for i in negated:
            if not torch.equal(resolved[i], inputs[i]):
                inputs[i].copy_(resolved[i])
    return results


def _for_few_rows(gm: fx.GraphModule) -> dict[str, Any]:
    """The configuration of Inductor for a program with products of few rows.

    It deals out a sum over some thousand elements, as in a norm, to the threads, unless there are other rows to deal
    out: then what a row becomes would depend on them again, and waking a thread takes longer than the sum (torch 2.13).
    """
    return {"cpp.min_chunk_size": _LEAST_OF_A_THREAD} if _has_few_rows(gm) else {}


def _has_few_rows(gm: fx.GraphModule) -> bool:
    return any(SKINNY in (n.target for n in graph.graph.nodes) for graph in subgraphs(gm))


def _compile_step(direction: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A direction of a loop's step by Inductor, for inputs laid out as these."""
    try:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with torch.no_grad(), tracing(TracingContext(mode)):
            with mode:  # made anew: of one tensor given twice, AOTAutograd would read the first alone ever after
                stand_ins = [Layout.of(x).empty() for x in inputs]
            return compile_nested(copy.deepcopy(direction), stand_ins, "inductor")
    except Exception as error:
        why = first_line(error)
        log.warning("the step of a loop runs operator by operator, as Inductor cannot compile it: %s", why)
        return as_function(direction)


def _part_kept_programs(gm: fx.GraphModule) -> None:
    """Let Inductor and AOTAutograd take no program from disk that is another one.

    AOTAutograd's keys digest the graph before differentiation, the names of its operators, and what else a graph module
    has for attributes. They know neither an operator's signature nor what its backward pass is, so programs of another
    version of this package are kept apart; nor the values of tensors that a graph holds, of which they take shape and
    dtype alone, so a digest of these goes into an attribute (torch 2.13).
    """
    # fx.GraphModule declares tensors and modules.
    gm.nsa_constants = constants_digest(gm)  # pyrefly: ignore[bad-argument-type]
    if _own_tag() not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += _own_tag()


@functools.cache
def _own_tag() -> str:
    return f" nsa_compile {sources_digest()}"


def _resolved(inputs: Sequence[Any], negated: Sequence[int]) -> list[Any]:
    """Inputs without negated views, such as `z.conj().imag`: Inductor reads what lies in memory (torch 2.13)."""
    return [x.resolve_neg() if i in negated else x for i, x in enumerate(inputs)]


@contextmanager
def _limits_named() -> Iterator[None]:
    """Say in one line what AOTAutograd asserts of inputs that share memory (torch 2.13)."""
    try:
        yield
    except AssertionError as error:
        if "does not yet handle" not in str(error):
            raise
        raise ScanNotCompiled(
            "inputs of the compiled function share memory, the function writes to one of them, and torch's AOTAutograd "
            "cannot compile that; write to a copy, x.clone()"
        ) from error

"""One functional graph before any pass looks.

What Dynamo captures may write to tensors, alias them, draw random numbers and update buffers. The passes know nothing
of that. `make_functional` watches a captured graph run on fake tensors, where torch's own schemas and tags say which
operators write and which draw. A graph that writes is traced anew by torch's functionalization: later readers see the
value after the write, and the last value of an input that is written to becomes one more output, which `WriteBack`
copies into the input when the passes are done. From here on dead code is dead, and what depends on no input is a
constant.

A write that cannot be taken out of a graph without changing gradients or aliases declines the graph as a whole.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._guards import TracingContext
from torch._higher_order_ops.scan import scan_op
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_compile import modes
from nsa_compile.capture.refusals import ScanNotCompiled, cannot_be
from nsa_compile.capture.scans import applies_functorch, turns_gradients_on
from nsa_compile.ir.aten import aten, is_inexact
from nsa_compile.ir.dtypes import why_refused
from nsa_compile.ir.lowering import BodyInterpreter, escaping, refuse_strided_writes, trace_to_aten
from nsa_compile.ir.rewriting import KEPT, replace_graph
from nsa_compile.ir.scans import (
    ESCAPES,
    UNTRACKED,
    WRITTEN,
    Declined,
    ScanSite,
    ancestors,
    example,
    fake_inputs,
    find_scans,
    first_line,
    is_single_step,
    location,
    results,
    scan_results,
    subgraphs,
)
from nsa_compile.ir.zero_gradients import has_gradient, match_outputs
from nsa_compile.memory import memories, memory, overlaps_itself, written_by
from nsa_compile.passes.verifier import snapshot
from nsa_compile.program.loops import keep_loops
from nsa_compile.workarounds import HonestFunctions

log = logging.getLogger("nsa_compile")

__all__ = ["WriteBack", "left_to_write", "make_functional", "share_elements", "with_stand_ins"]


@dataclass
class WriteBack:
    """What a graph writes to its inputs, and what is left to be done of that after each call of the compiled program.

    It is done outside the compiled program: where a graph writes to its inputs, AOTAutograd may keep an input for the
    backward pass and find it overwritten there (wrong gradients, torch 2.13).

    Attributes:
        inputs: places of the inputs that are set to the graph's further outputs.
        views: for outputs that are such an input, or a view of it: its place, and the view as a function of it.
        written: places of the inputs that are written to, by the compiled program or after it.
        captured: the graph as it came. It is run where an input that is written to shares elements with another: the
            capture took them for two, and nothing in torch asks again (torch 2.13).
    """

    inputs: list[int] = field(default_factory=list)
    views: dict[int, tuple[int, fx.GraphModule]] = field(default_factory=dict)
    written: list[int] = field(default_factory=list)
    captured: fx.GraphModule | None = None
    _said: bool = False

    def copied(self, inputs: Sequence[Any]) -> list[Any]:
        """What the functional graph is called with: copies of the inputs that are written to."""
        return [x.clone() if i in self.inputs else x for i, x in enumerate(inputs)]

    def examples(self, inputs: Sequence[Any]) -> list[Any]:
        """Stand-ins for what `copied` makes."""
        return with_stand_ins(inputs, self.copied(inputs))

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that leaves behind what the captured graph did, from one that runs the functional graph."""
        if not self.written:
            return run

        def run_and_write(*inputs: Any) -> Any:
            if self.meets_another(inputs):
                return self.run_as_it_came(*inputs)
            if not self.inputs:
                return run(*inputs)
            results = list(run(*self.copied(inputs)))
            n = len(results) - len(self.inputs)
            for place, value in zip(self.inputs, results[n:], strict=True):
                inputs[place].copy_(value)
            return [self.views[i][1](inputs[self.views[i][0]]) if i in self.views else results[i] for i in range(n)]

        return run_and_write

    def meets_another(self, inputs: Sequence[Any]) -> bool:
        """Whether an input that is written to has elements in common with another one, or with itself."""
        if not self.written:
            return False
        if any(overlaps_itself(inputs[i]) for i in self.written):
            return True
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        pieces = memories(tensors)
        of = dict(zip(map(id, tensors), pieces, strict=True))
        written = {of[id(inputs[i])] for i in self.written}
        near = [x for x, piece in zip(tensors, pieces, strict=True) if piece in written]
        storages = {memory(x) for x in near}
        return len(storages) > len(written) or (len(near) > len(written) and share_elements(near))

    def run_as_it_came(self, *inputs: Any) -> list[Any]:
        assert self.captured is not None
        if not self._said:
            self._said = True
            log.warning(
                "an input that is written to shares its memory with another one; such calls run operator by operator, "
                "and loops step by step"
            )
            keep_loops(self.captured)
        return list(self.captured(*inputs))


def share_elements(tensors: Sequence[Tensor]) -> bool:
    """Whether some of these tensors have an element in common. Those of other sizes in one memory may."""
    groups: dict[int, list[Tensor]] = {}
    for x in tensors:
        if x.numel():
            groups.setdefault(memory(x), []).append(x)
    for group in (g for g in groups.values() if len(g) > 1):
        if any(x.itemsize != group[0].itemsize for x in group):
            return True
        group.sort(key=Tensor.storage_offset)
        # One after the other, as the caches of layers in one buffer, they are told apart at once.
        in_line = all(_end(x) <= y.storage_offset() for x, y in itertools.pairwise(group))
        if not in_line and compute_overlapping_tensors(group, symbolic=False):
            return True
    return False


def _end(x: Tensor) -> int:
    return int(x.storage_offset()) + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1


def with_stand_ins(inputs: Sequence[Any], copies: Sequence[Any]) -> list[Any]:
    """Stand-ins for the copies among them: torch has not seen these and would let their sizes vary."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return list(copies)
    mode = context.fake_mode
    return [c if c is x else mode.from_tensor(c, static_shapes=True) for x, c in zip(inputs, copies, strict=True)]


def make_functional(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> WriteBack:
    """Make a captured graph functional, in place, and mark what no pass may remove.

    Raises:
        Declined: the graph writes in a way that cannot be taken out of it, or cannot be run on fake tensors; it is as
            it was.
        ScanNotCompiled: the graph enters inference mode.
    """
    if not find_scans(gm) and not is_single_step(gm):
        return left_to_write(gm, example_inputs)
    _refuse_inference_mode(gm)
    _refuse_hooks(gm)
    _refuse_mixed_dtypes(gm)
    regions = [g for g in subgraphs(gm) if g is not gm]
    effects = {g: _observe(g, [example(n) for n in g.graph.find_nodes(op="placeholder")]) for g in regions}
    effects[gm] = _observe(gm, example_inputs)
    for graph, seen in effects.items():
        if seen.writes and (graph is not gm or regions):
            raise Declined("it writes to a tensor, in a graph with a checkpointed or shared region", seen.writes[0])
        for node in graph.graph.nodes:
            # What nobody reads was left in for what it does.
            if node in seen.random or (not node.users and node.op != "output"):
                node.meta[KEPT] = True
    for site in find_scans(gm):
        draws, site.node.meta[UNTRACKED] = _effects_of_step(site)
        if draws:
            site.node.meta[KEPT] = True
    seen = effects[gm]
    if not seen.writes:
        return WriteBack()
    if seen.hazard is not None:
        raise seen.hazard
    if not torch.is_grad_enabled() and (enters := turns_gradients_on(gm)) is not None:
        raise Declined("it writes to a tensor, and turns gradients on where they are off around it", enters)
    with_gradient = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
    if is_single_step(gm) and not with_gradient and not seen.views:
        return _writing_by_itself(gm, seen.inputs)  # lowering it makes it functional; rows of caches are written then
    return _functionalize(gm, seen)


def left_to_write(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> WriteBack:
    """What a graph that stays as it is writes to its inputs by itself; all that it might where this is not seen."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with unset_fake_temporarily(), fake, modes.restored(), torch.no_grad(), _Watch({}) as watch:
        fakes = [_fresh_like(x.detach()) if isinstance(x, Tensor) else x for x in example_inputs]
        try:
            _Writes(gm).run(*fakes)
        except Exception as error:
            log.debug("what a graph writes to is not known: %s", first_line(error))
            watch.written += _tensors(fakes)
    return _writing_by_itself(gm, _places_of(watch.written, fakes))


class _Writes(fx.Interpreter):
    """Runs a graph for what it writes to, but for its scans, which write to nothing."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target is scan_op:
            return pytree.tree_map_only(Tensor, _fresh_like, n.meta["example_value"])
        if isinstance(n.target, HigherOrderOperator):
            raise NotImplementedError(f"{n.target} may write to what it is given")
        return super().run_node(n)


def _writing_by_itself(gm: fx.GraphModule, written: list[int]) -> WriteBack:
    return WriteBack(written=written, captured=snapshot(gm)) if written else WriteBack()


def _places_of(written: Sequence[Tensor], inputs: Sequence[Any]) -> list[int]:
    """The inputs that have memory that is written to."""
    found = {memory(x) for x in written}
    return [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and memory(x) in found]


def _refuse_inference_mode(gm: fx.GraphModule) -> None:
    """What runs in inference mode has no gradient, and AOTAutograd cannot trace views in it (torch 2.13)."""
    sites = find_scans(gm)
    for graph in [*subgraphs(gm), *(site.body for site in sites)]:
        for node in graph.graph.nodes:
            if node.target is torch.autograd.grad_mode._enter_inference_mode:
                where = f"the scan at {location(sites[0].node)}" if sites else "the attention"
                raise ScanNotCompiled(
                    f"torch.inference_mode is entered in the same compiled function as {where}; write torch.no_grad() "
                    "instead, or enter it around the call of the compiled function"
                )
    for site in sites:
        if find_scans(site.body):
            _refuse_inference_mode(site.body)


def _refuse_hooks(gm: fx.GraphModule) -> None:
    """A hook is given the gradient of all that reads a tensor. A carry is one tensor with what the step before has
    returned, and may read itself: compiled, it is not."""
    for site in find_scans(gm):
        _refuse_hooks(site.body)
        carries, _, _ = site.placeholders()
        places = range(len(carries))
        last = [n for n in site.node.users if n.target is operator.getitem and n.args[1] in places]
        for what, nodes in (("its carry", carries), ("the last carry", last)):
            for user in (user for node in nodes for user in node.users):
                if _registers_hook(user):
                    where = cannot_be("compiled", location(site.node), location(user))
                    raise ScanNotCompiled(
                        f"{where}: a hook is registered on {what}, which another step may read as well; register it on "
                        "a copy, x = x.clone()"
                    )


def _refuse_mixed_dtypes(gm: fx.GraphModule) -> None:
    for site in find_scans(gm):
        _refuse_mixed_dtypes(site.body)
        if modes.sets_autocast(site.body.graph.nodes):
            continue
        with modes.under(modes.autocast_at(site.node)):
            for node in site.body.graph.nodes:
                if (why := _why_refused(node)) is not None:
                    raise ScanNotCompiled(f"{cannot_be('compiled', location(site.node), location(node))}: {why}")


def _why_refused(node: fx.Node) -> str | None:
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
    function: Any = node.target if node.op == "call_function" else getattr(Tensor, str(node.target))
    return why_refused(function, args, kwargs)


def _registers_hook(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "register_hook"


@dataclass
class Effects:
    """What the nodes of a graph do, as seen on fake tensors.

    Attributes:
        writes: nodes that write to a tensor that was there before.
        random: nodes that draw random numbers.
        inputs: places of the inputs that have memory that is written to.
        hazard: why the writes cannot be taken out, if so.
        views: for outputs that are views of an input that is written to: as in `WriteBack`.
    """

    writes: list[fx.Node] = field(default_factory=list)
    random: set[fx.Node] = field(default_factory=set)
    inputs: list[int] = field(default_factory=list)
    hazard: Declined | None = None
    views: dict[int, tuple[int, fx.GraphModule]] = field(default_factory=dict)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _memory_with_gradient(value: Any) -> dict[int, torch.UntypedStorage]:
    return {memory(x): x.untyped_storage() for x in _tensors(value) if x.requires_grad}


class _Watch(TorchDispatchMode):
    """Notes which tensors operators write to, and whether they draw random numbers."""

    supports_higher_order_operators = True

    def __init__(self, with_gradient: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        # Memory in which some tensor with a gradient lies, held so that none is used twice.
        self.with_gradient = with_gradient
        self.written: list[Tensor] = []
        self.draws = False
        self.untracked = False  # a write that autograd does not see, to what it follows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            self.draws |= torch.Tag.nondeterministic_seeded in func.tags
            self.with_gradient |= _memory_with_gradient((args, kwargs))
            for x in written_by(func, args, kwargs):
                self.written.append(x)
                unseen = not torch.is_grad_enabled() or not x.requires_grad
                self.untracked |= unseen and memory(x) in self.with_gradient
        return func(*args, **kwargs)


class _Observer(fx.Interpreter):
    """Runs a captured graph under `_Watch`. Scans write to nothing, and other regions are looked at by themselves."""

    def __init__(self, gm: fx.GraphModule, effects: Effects) -> None:
        super().__init__(gm, garbage_collect_values=False)  # so that no memory is used twice
        self.effects = effects
        self.known: set[int] = set()
        self.versions: dict[fx.Node, int] = {}  # of the results, when they were made
        self.written: list[Tensor] = []
        self.blind: list[fx.Node] = []  # views taken of a tensor with a gradient where autograd is off
        self.with_gradient: dict[int, torch.UntypedStorage] = {}

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            return pytree.tree_map_only(Tensor, _fresh_like, n.meta["example_value"])
        with HonestFunctions(), _Watch(self.with_gradient) as watch:
            result = super().run_node(n)
        self.written += watch.written
        if any(memory(x) in self.known for x in watch.written):
            self.effects.writes.append(n)
            if watch.untracked and self.effects.hazard is None:
                self.effects.hazard = Declined("it writes to a tensor that has a gradient, where autograd is off", n)
        if watch.draws:
            self.effects.random.add(n)
        if isinstance(result, Tensor):
            self.versions[n] = result._version
            sources = [m for m in n.all_input_nodes if m in self.blind and _same_memory(self.env[m], result)]
            if result.requires_grad and (sources or not torch.is_grad_enabled()):
                self.blind.append(n)
        self.known |= {memory(x) for x in _tensors(result)}
        self.with_gradient |= _memory_with_gradient(result)
        return result


def _effects_of_step(site: ScanSite) -> tuple[bool, Declined | None]:
    """Whether a step draws random numbers, itself or in a scan of its own, or may, and why it cannot be traced below
    autograd, if so: what it wrote there would take the place of what has the gradient."""
    inputs = site.body.graph.find_nodes(op="placeholder")
    given = [*site.init, *site.xs, *site.additional]
    with_gradient = torch.is_grad_enabled() and any(_has_gradient(n) for n in given)
    # A carry may get its gradient at a later step, and what is computed around the scan by then.
    own = [n.op != "placeholder" or _has_gradient(n) for n in given]
    own[: len(site.init)] = [True] * len(site.init)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with unset_fake_temporarily(), fake, modes.restored(), HonestFunctions(), _Watch({}) as watch:
        step = _Step(site.body, watch)
        try:
            step.run(*(_stand_in(example(n), with_gradient and has) for n, has in zip(inputs, own, strict=True)))
        except Exception as error:
            why = f"the step cannot be run on fake tensors: {first_line(error)}"
            return True, Declined(why, site.node) if with_gradient else None
    draws = watch.draws or any(_effects_of_step(inner)[0] for inner in find_scans(site.body))
    return draws, None if step.untracked is None else Declined(_UNTRACKED, step.untracked)


_UNTRACKED = (
    "it writes to a tensor that has a gradient, where autograd is off; y + (new - y).detach() has the value of new and "
    "the gradient of y, and is no write"
)


def _has_gradient(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, Tensor) and value.requires_grad


def _stand_in(x: Any, with_gradient: bool) -> Any:
    """A fake tensor, with a gradient if it can have one and anything has."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return _fresh_like(x.requires_grad_() if with_gradient and is_inexact(x.dtype) else x)


class _Step(fx.Interpreter):
    """Runs a step on fake tensors, but for the scans within, and notes the first write that autograd does not see."""

    def __init__(self, body: fx.GraphModule, watch: _Watch) -> None:
        super().__init__(body)
        self.watch = watch
        self.untracked: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            return pytree.tree_map_only(Tensor, _fresh_like, n.meta["example_value"])
        result = super().run_node(n)
        if self.watch.untracked and self.untracked is None:
            self.untracked = n
        return result


def _observe(gm: fx.GraphModule, inputs: Sequence[Any]) -> Effects:
    """Run a graph on fake tensors like its inputs.

    Raises:
        Declined: it cannot be run so.
    """
    effects = Effects()
    for node in gm.graph.nodes:
        if applies_functorch(node):
            raise Declined("it applies a transform of torch.func around a scan", node)
        if _registers_hook(node):
            raise Declined("it registers a hook on a tensor", node)
    observer = _Observer(gm, effects)
    with unset_fake_temporarily(), FakeTensorMode(allow_non_fake_inputs=True), modes.restored():
        fakes = [_like(x) for x in inputs]
        before = [(x.shape, x.stride(), memory(x)) if isinstance(x, Tensor) else None for x in fakes]
        try:
            outputs = observer.run(*fakes)
        except Exception as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Declined(f"it cannot be run on fake tensors: {line}") from error
        after = [(x.shape, x.stride(), memory(x)) if isinstance(x, Tensor) else None for x in fakes]
    effects.inputs = _places_of(observer.written, fakes)
    for node, version in observer.versions.items():
        if observer.env[node]._version != version:  # a write through `.data` is seen by nobody, in eager mode too
            node.meta[WRITTEN] = True
    seen_outside = {memory(x) for x in _tensors(outputs)}
    _mark_escaping(gm, {n for n, x in observer.env.items() if isinstance(x, Tensor) and memory(x) in seen_outside})
    if not effects.writes or effects.hazard is not None:
        return effects
    if before != after:
        effects.hazard = Declined("it changes the shape or the memory of an input", effects.writes[0])
    for node in observer.blind:
        if WRITTEN in node.meta or node in results(gm):
            effects.hazard = Declined("it returns or writes to a view that was taken where autograd is off", node)
    _note_views(gm, effects, observer, inputs, fakes, outputs)
    return effects


def _mark_escaping(gm: fx.GraphModule, seen: Collection[fx.Node]) -> None:
    """Mark the results of scans that the caller gets, or a view of them."""
    for scan in gm.graph.find_nodes(op="call_function", target=scan_op):
        for result in scan.users:
            if result in seen:
                result.meta[ESCAPES] = True


def _like(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if not x.is_leaf:
        return _fresh_like(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def _fresh_like(x: Tensor) -> Tensor:
    """A fake tensor that is no leaf if it has a gradient: a leaf may not be written to while autograd is on."""
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    with torch.enable_grad():
        return fake.requires_grad_().clone() if x.requires_grad else fake


def _note_views(
    gm: fx.GraphModule, effects: Effects, observer: _Observer, inputs: Sequence[Any], fakes: Sequence[Any], outputs: Any
) -> None:
    """Find the outputs that are views of an input that is written to, and how they are made."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    written = {memory(x) for n in effects.writes for x in _tensors(observer.env.get(n))}
    written |= {memory(x) for n in effects.writes for m in n.all_input_nodes for x in _tensors(observer.env.get(m))}
    real: dict[int, int] = {}
    for x in inputs:
        if isinstance(x, Tensor):
            real[memory(x)] = real.get(memory(x), 0) + 1
    for node, x, fake in zip(placeholders, inputs, fakes, strict=True):
        if isinstance(fake, Tensor) and memory(fake) in written and real[memory(x)] > 1:
            effects.hazard = Declined("it writes to an input that shares its memory with another input", node)
    by_memory = {memory(x): n for n, x in zip(placeholders, fakes, strict=True) if isinstance(x, Tensor)}
    for i, (node, value) in enumerate(zip(results(gm), outputs, strict=True)):
        base = by_memory.get(memory(value)) if isinstance(value, Tensor) else None
        if base is None or memory(value) not in written:
            continue
        view = _view_of(base, node, observer)
        if view is None or _geometry(view(fakes[placeholders.index(base)])) != _geometry(value):
            effects.hazard = Declined("it returns a view of an input that it writes to", node)
            return
        effects.views[i] = (placeholders.index(base), view)


def _view_of(base: fx.Node, node: fx.Node, observer: _Observer) -> fx.GraphModule | None:
    """The way from an input to a view of it, or None if it is more than one view after the other."""
    steps: list[fx.Node] = []
    while node is not base:
        sources = node.all_input_nodes
        shared = [n for n in sources if _same_memory(observer.env[n], observer.env[node])]
        if node in observer.effects.writes:
            shared = [n for n in shared if observer.env[n] is observer.env[node]]  # x.add_() is x
        elif len(sources) != 1:
            return None
        else:
            steps.append(node)
        if len(shared) != 1:
            return None
        node = shared[0]
    graph = fx.Graph()
    value = graph.placeholder("base")
    for step in reversed(steps):
        (source,) = step.all_input_nodes
        value = graph.node_copy(step, {source: value}.__getitem__)
    graph.output(value)
    return fx.GraphModule(nn.Module(), graph)


def _geometry(x: Tensor) -> tuple[Any, ...]:
    """Which elements a view has; statements such as `x.t_()` change it without another tensor."""
    return x.shape, x.stride(), x.storage_offset()


def _same_memory(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and memory(a) == memory(b)


# -- functionalization


_layouts: dict[str, list[tuple[tuple[int, ...], torch.dtype, torch.device]]] = {}


@torch.library.custom_op(
    "nsa_compile::captured_scan", mutates_args=(), schema="(Tensor[] tensors, str name) -> Tensor[]"
)
def captured_scan(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """Stands for a scan while the graph around it is traced. What reads no input of the graph is not fake there."""
    return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in _layouts[name]]


@captured_scan.register_fake
def _(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in _layouts[name]]


# A step may draw random numbers, so a scan stays though nobody reads what it yields.
fx.node.has_side_effect(torch.ops.nsa_compile.captured_scan.default)


class _WithoutScans(BodyInterpreter):
    """Runs a captured graph with stand-ins for its scans."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not scan_op:
            return super().call_function(target, args, kwargs)
        _, init, xs, additional = args
        return captured_scan([*init, *xs, *additional], self.scan_name)

    def run_node(self, n: fx.Node) -> Any:
        self.scan_name = n.name
        return super().run_node(n)


def _functionalize(gm: fx.GraphModule, effects: Effects) -> WriteBack:
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target is not scan_op:
            raise Declined(f"it writes to a tensor and calls {node.target}", effects.writes[0])
    scans = {site.node.name: (site.node, site.body) for site in find_scans(gm)}
    for name, (node, _) in scans.items():
        _layouts[name] = [(tuple(x.shape), x.dtype, x.device) for x in scan_results(node)]
    inputs = gm.graph.find_nodes(op="placeholder")
    tensors = [n for n in inputs if isinstance(example(n), Tensor)]
    tensor_at = {n.name: i for i, n in enumerate(tensors)}

    def run(*values: Tensor) -> list[Tensor]:
        everything = [values[tensor_at[n.name]] if n.name in tensor_at else example(n) for n in inputs]
        return list(_WithoutScans(gm).run(*everything))

    try:
        functional = torch.func.functionalize(run, remove="mutations")
        copy = _copy_over if torch.is_grad_enabled() and any(example(n).requires_grad for n in tensors) else _copy
        lowered = trace_to_aten(functional, fake_inputs(tensors), decompositions={aten.copy.default: copy})
        refuse_strided_writes(lowered)
    except Declined:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Declined(f"it writes to a tensor and cannot be made functional: {line}", effects.writes[0]) from error
    finally:
        for name in scans:
            del _layouts[name]
    written = [inputs.index(n) for n in _take_out_copies(lowered, tensors, effects)]
    captured = snapshot(gm)
    outputs = {i: n for i, n in enumerate(results(gm)) if isinstance(n, fx.Node)}
    with_gradient = {i: has_gradient(n) or _was_given_gradient(n, effects) for i, n in outputs.items()}
    replace_graph(gm, lowered, tensors)
    _put_scans_back(gm, scans)
    match_outputs(gm, with_gradient)
    return WriteBack(written, effects.views, written, captured)


def _was_given_gradient(node: fx.Node, effects: Effects) -> bool:
    """Whether a write has put something with a gradient into a result of a scan that had none when the scan was run."""
    seen = node.meta.get("example_value")
    return isinstance(seen, Tensor) and seen.requires_grad and node in ancestors(effects.writes)


def _copy(old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """What `old.copy_(new)` makes of `old`, in operators that have derivatives."""
    return new.to(old.device, old.dtype).expand(old.shape).clone()


def _copy_over(old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """The same, where `old` may have a gradient: eager mode's is of zeros, and what `old` was made of hears of it."""
    never = torch.full((), False, device=old.device)
    return torch.where(never, old, new.to(old.device, old.dtype).expand(old.shape))


def _take_out_copies(lowered: fx.GraphModule, inputs: Sequence[fx.Node], effects: Effects) -> list[fx.Node]:
    """Functionalization writes to inputs at the end; make what it writes further outputs. Returns these inputs."""
    given = dict(zip(lowered.graph.find_nodes(op="placeholder"), inputs, strict=True))
    written, values = [], []
    for node in list(lowered.graph.nodes):
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        if node.target is aten.copy_.default and node.args[0] in given and not node.users:
            written.append(given[node.args[0]])
            values.append(node.args[1])
            lowered.graph.erase_node(node)
        else:
            raise Declined(f"functionalization leaves {node.target} in it", effects.writes[0])
    output = lowered.graph.output_node()
    output.args = ([*results(lowered), *values],)
    return written


def _put_scans_back(gm: fx.GraphModule, scans: dict[str, tuple[fx.Node, fx.GraphModule]]) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.nsa_compile.captured_scan.default):
        tensors, name = node.args
        old, body = scans[name]
        scan = ScanSite(gm, old)
        a, b = len(scan.init), len(scan.init) + len(scan.xs)
        held = f"{name}_body"
        gm.add_submodule(held, body)
        with gm.graph.inserting_before(node):
            got = gm.graph.get_attr(held)
            new = gm.graph.call_function(scan_op, (got, list(tensors[:a]), list(tensors[a:b]), tuple(tensors[b:])))
        new.meta = dict(old.meta) if node.users else {**old.meta, KEPT: True}
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        new._rename(name)
    _mark_escaping(gm, escaping(gm))
    gm.graph.lint()
    gm.recompile()

"""The steps in a captured graph, most of them bodies of scans: finding them, lowering them to ATen, and what the passes
record on them."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._higher_order_ops.scan import scan_op
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_compile import modes
from nsa_compile.passes.rewriting import eliminate_dead_code
from nsa_compile.passes.step_values import StepValue
from nsa_compile.scan_capture import why_not_traced
from nsa_compile.workarounds import DATA, HonestBatchNorm

aten = torch.ops.aten

RECORD = "nsa_scan"
# In the meta of a captured node: the graph writes to it, or to what shares its memory.
WRITTEN = "nsa_written"
# In the meta of what a scan yields: the caller gets it, or a view of it.
ESCAPES = "nsa_escapes"


class Declined(Exception):
    """A step the compiler leaves alone: the operation, where the user wrote it, and why."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.op = "scan" if node is None else str(node.target)
        self.location = "unknown" if node is None else location(node)


@dataclass(frozen=True)
class Decline:
    """A `Declined`, as data for the report."""

    pass_name: str
    op: str
    location: str
    reason: str


@dataclass
class ScanRecord:
    """What the passes learnt about one scan; it lives in the scan node's meta between passes.

    A graph that is one step by itself has one of length 1, on its output node: what is not constant is unknown.
    """

    name: str
    length: int
    carries: list[Any] = field(default_factory=list)  # one resolve_carries.Carry a leaf, once resolved
    known: dict[fx.Node, StepValue] = field(default_factory=dict)  # body node -> its value at every step
    constant: dict[fx.Node, Tensor] = field(default_factory=dict)  # body node -> its value at any step
    guards_kept: list[str] = field(default_factory=list)
    guards_dropped: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        return f"{self.carries}|{self.guards_kept}|{self.guards_dropped}"


@dataclass
class ScanSite:
    """A scan node of graph module `owner`, taken apart."""

    owner: fx.GraphModule
    node: fx.Node

    @property
    def body(self) -> fx.GraphModule:
        return getattr(self.owner, self.node.args[0].target)

    @property
    def init(self) -> list[fx.Node]:
        return list(self.node.args[1])

    @property
    def xs(self) -> list[fx.Node]:
        return list(self.node.args[2])

    @property
    def additional(self) -> list[fx.Node]:
        return list(self.node.args[3])

    @property
    def length(self) -> int:
        return int(example(self.xs[0]).shape[0])

    def placeholders(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """The body's inputs: carries, one row of each xs, additional inputs."""
        nodes = self.body.graph.find_nodes(op="placeholder")
        a, b = len(self.init), len(self.init) + len(self.xs)
        return nodes[:a], nodes[a:b], nodes[b:]

    def outputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The body's outputs: new carries, one row of each ys; what they are copies of, where they are copies."""
        (values,) = self.body.graph.output_node().args
        values = [v.args[0] if v.target is aten.clone.default else v for v in values]
        n = len(self.init)
        return list(values[:n]), list(values[n:])

    @property
    def read(self) -> set[int]:
        """The places of the results, carries and ys, that somebody reads."""
        return {user.args[1] for user in self.node.users if user.users}

    @property
    def record(self) -> ScanRecord | None:
        return self.node.meta.get(RECORD)


def example(node: fx.Node) -> Tensor:
    """The fake tensor a node stands for."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def scan_results(node: fx.Node) -> list[Tensor]:
    """Stand-ins for what a scan yields."""
    value = node.meta.get("example_value")
    return list(value if value is not None else node.meta["val"])


def subgraphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph and the bodies it calls, each once: a checkpointed region hides its scans in one, equal regions share
    one."""
    found = [gm]
    for graph in found:
        for node in graph.graph.find_nodes(op="get_attr"):
            child = getattr(graph, node.target, None)
            is_body_of_scan = any(user.target is scan_op for user in node.users)
            if isinstance(child, fx.GraphModule) and child not in found and not is_body_of_scan:
                found.append(child)
    return found


def find_scans(gm: fx.GraphModule) -> list[ScanSite]:
    return [ScanSite(g, node) for g in subgraphs(gm) for node in g.graph.nodes if node.target is scan_op]


@dataclass(frozen=True)
class Step:
    """A lowered step, and what is known of it: the body of a resolved scan, or a whole graph."""

    name: str
    body: fx.GraphModule
    record: ScanRecord


def find_steps(gm: fx.GraphModule) -> list[Step]:
    """The steps that `resolve_carries` has lowered."""
    steps = [Step(site.node.name, site.body, site.record) for site in find_scans(gm) if site.record is not None]
    record = gm.graph.output_node().meta.get(RECORD)
    return steps if record is None else [*steps, Step(record.name, gm, record)]


def is_single_step(gm: fx.GraphModule) -> bool:
    """Whether a graph may be a step of generation: attention, no loop, and an integer that may be a position."""
    inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    positions = [x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.int64 and x.numel() == 1]
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    has_softmax = any(n.target == "softmax" or getattr(n.target, "__name__", "") == "softmax" for n in calls)
    return bool(positions) and has_softmax and not find_scans(gm)


def name_scans_apart(gm: fx.GraphModule) -> None:
    """Give each scan a name of its own, by which reports tell them apart: bodies count their nodes from the start."""
    taken: set[str] = set()
    for site in find_scans(gm):
        while site.node.name in taken:
            site.node._rename(f"scan_{len(taken)}")
        taken.add(site.node.name)


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def location(node: fx.Node) -> str:
    """`file:line` of the user's innermost frame behind a node."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.endswith("nsa_compile/loop.py"):
            return f"{file}:{line}"
    return "unknown"


def fake_inputs(nodes: list[fx.Node]) -> list[Tensor]:
    """Fresh stand-ins with the shapes, strides and devices of `nodes`, free of Dynamo's fake mode.

    They are fake themselves: nothing is allocated.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=e.device) for e in map(example, nodes)]


@contextlib.contextmanager
def on_fake_inputs(gm: fx.GraphModule) -> Iterator[list[Any]]:
    """Run a captured graph on the fake tensors of its inputs, below autograd. Yields the inputs.

    Constants that passes attached to the graph are real tensors; they may meet the fake ones.
    """
    inputs = [example(n) for n in gm.graph.find_nodes(op="placeholder")]
    # The mode the example values were made in; Dynamo has put another one into its context by now.
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None) or FakeTensorMode()
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, modes.restored(), torch.no_grad():
            yield inputs
    finally:
        mode.allow_non_fake_inputs = allowed


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
    table = {aten.select_scatter.default: _select_scatter, **(decompositions or {})}
    with (
        unset_fake_temporarily(),
        tracing(None),
        preserve_node_meta(),
        sdpa,
        modes.restored(),
        torch.no_grad(),
        HonestBatchNorm(),
    ):
        gm = make_fx(fn, table, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    _write_nothing_in_place(gm)
    eliminate_dead_code(gm)
    return gm


def _select_scatter(old: Tensor, new: Tensor, dim: int, index: int) -> Tensor:
    """torch.vmap writes the row several times instead, and the gradient of it counts each of them (torch 2.13)."""
    index %= old.shape[dim]
    return torch.slice_scatter(old, new.unsqueeze(dim), dim, index, index + 1)


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


def is_view(node: fx.Node) -> bool:
    """Whether a node may share the memory of what it reads, by torch's schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(a.alias_info is not None for a in schema.arguments) or node.target in _VIEWS


def lower_body(site: ScanSite) -> fx.GraphModule:
    """The scan's body in functional ATen: in-place operators replaced, no_grad regions turned into detaches.

    Raises:
        Declined: for operators whose meaning is lost on the way down.
    """
    fakes = fake_inputs(site.init) + [x[0] for x in fake_inputs(site.xs)] + fake_inputs(site.additional)
    state = modes.autocast_at(site.node)
    if modes.sets_autocast(site.body.graph.nodes) and any(on for _, _, on in state):
        raise Declined("the step sets autocast, within a region that has autocast already", site.node)
    with modes.under(state):
        lowered = _lower(site.body, fakes)
    _strip_copies(lowered)
    _copy_outputs(lowered)
    return lowered


def lower_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A whole graph in functional ATen, as a graph of its own; what it writes to its inputs, it writes at the end.

    Raises:
        Declined: for operators whose meaning is lost on the way down, and inputs or outputs that are no tensors.
    """
    inputs, outputs = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node().args[0]
    for node in (*inputs, *outputs):
        if not isinstance(node, fx.Node) or not isinstance(example(node), Tensor):
            raise Declined("the step takes or returns something else than tensors", gm.graph.output_node())
    lowered = _lower(gm, fake_inputs(inputs))
    _strip_copies(lowered, kept=escaping(lowered))
    return lowered


def applies_functorch(node: fx.Node) -> bool:
    """Whether a captured node enters or leaves a transform of torch.func."""
    return "_functorch" in (getattr(node.target, "__module__", None) or "")


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
        return torch.utils._pytree.tree_map_only(Tensor, torch.detach, found)


# Not `lift_fresh_copy`: it makes a literal a tensor of whoever traces the graph next.
_COPIES = {aten.clone.default, aten.alias.default}
_VIEWS = (aten.view.default, aten._unsafe_view.default)


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
    for view in _VIEWS:
        for node in gm.graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default


def _strip_copies(gm: fx.GraphModule, kept: Collection[fx.Node] = ()) -> None:
    """Drop copies: they kept the loop's outputs from aliasing its inputs, and do nothing in a functional graph."""
    for node in gm.graph.nodes:
        if node in kept and node.target in _COPIES:
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


def _copy_outputs(gm: fx.GraphModule) -> None:
    """Copy each output: while it is a scan, its outputs must alias neither its inputs nor each other."""
    output = gm.graph.output_node()
    copies = []
    for value in output.args[0]:
        with gm.graph.inserting_before(output):
            copied = gm.graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        copied.meta = dict(value.meta)
        copies.append(copied)
    output.args = (copies,)
    gm.recompile()


def on_cpu(kwargs: Any) -> dict[str, Any]:
    """Keyword arguments of an operator, with the device it names replaced by the CPU."""
    return {k: "cpu" if k == "device" else v for k, v in kwargs.items()}


class _Determined(TorchDispatchMode):
    """Refuses operators whose result is another one each time: random ones, and memory that nothing was put into."""

    EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags or name in self.EMPTY:
            raise ValueError(f"{func} has another result each time")
        return func(*args, **(kwargs or {}))


def constant_value(node: fx.Node, cache: dict[fx.Node, Tensor | None], limit: int = 2**26) -> Tensor | None:
    """The value of a node of the captured graph that depends on no input (such as `torch.arange(S)`), on the CPU."""
    if node in cache:
        return cache[node]
    cache[node] = None
    if node.op not in ("call_function", "call_method"):
        return None
    target = node.target
    if isinstance(target, HigherOrderOperator) or target is operator.setitem:
        return None
    if isinstance(fake := node.meta.get("example_value"), Tensor) and fake.numel() > limit:
        return None
    operands: dict[fx.Node, Any] = {}
    for operand in node.all_input_nodes:
        value = constant_value(operand, cache, limit)
        if value is None:
            return None
        operands[operand] = value
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    kwargs = on_cpu(kwargs)
    with unset_fake_temporarily(), modes.restored(), torch.no_grad(), _Determined():
        try:
            value = (
                getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
            )
        except Exception:  # an operator that wants its own device, say: not known then
            return None
    cache[node] = value.clone() if isinstance(value, Tensor) else None
    return cache[node]

"""The steps in a captured graph, most of them bodies of scans: finding them, lowering them to ATen, and what the passes
record on them."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_compile import modes
from nsa_compile.capture.refusals import PICKS, SCANS, frames_of
from nsa_compile.ir.aten import SHAPED, aten, operand
from nsa_compile.ir.step_values import StepValue

log = logging.getLogger("nsa_compile")

RECORD = "nsa_scan"
# In the meta of a captured node: the graph writes to it, or to what shares its memory.
WRITTEN = "nsa_written"
# In the meta of an input of a captured graph: its value, which each call of the program sees to.
VALUE = "nsa_value"
# In the meta of a scan: why its step cannot be traced below autograd, a `Declined`, or None.
UNTRACKED = "nsa_untracked"
# In the meta of what a scan yields: the caller gets it, or a view of it.
ESCAPES = "nsa_escapes"


class Declined(Exception):
    """A step the compiler leaves alone: the operation, where the user wrote it, and why."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.op = "scan" if node is None else _name_of(node)
        self.location = "unknown" if node is None else location(node)

    def afresh(self) -> Self:
        """One that was not raised, to be kept: a traceback keeps alive all frames down to those that call the model."""
        return copy.copy(self)


def _name_of(node: fx.Node) -> str:
    """What a user knows an operator by: that of a result of several by the operator, a function without its address."""
    several = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    target = cast(fx.Node, node.args[0]).target if several else node.target
    return str(target) if isinstance(target, str | OpOverload) else getattr(target, "__name__", str(target))


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
    # softmax -> the step from which on each of its scores may be above -inf, in the scores' layout: see `staleness`
    settled: dict[fx.Node, Tensor] = field(default_factory=dict)
    # For a group of recurrent carries: its parallel form, an analyses.batched_body.Recurrence, or why it has none.
    parallel: dict[tuple[int, ...], Any] = field(default_factory=dict)

    # (node, place) -> the step from which on each element of an operand counts, before which it is taken for zero
    hidden: dict[tuple[fx.Node, int], Tensor] = field(default_factory=dict)
    # What scores of a program read -> of which table, and which elements of it for each distance: see `distances`
    by_distance: dict[fx.Node, tuple[fx.Node, Tensor]] = field(default_factory=dict)

    # What stands for rows of a cache that are picked by data, and is guarded by itself: see `picked_rows`
    guarded_picks: set[fx.Node] = field(default_factory=set)

    # What `eliminate_guards` proves of the step, kept for whoever asks again.
    proof: Any = None

    def fingerprint(self) -> str:
        settled = sorted(node.name for node in self.settled)
        hidden = sorted((node.name, place) for node, place in self.hidden)
        distances = sorted(node.name for node in self.by_distance)
        found = (self.carries, self.guards_kept, self.guards_dropped, settled, hidden, distances, self.parallel)
        return "|".join(map(str, found))

    def why_loop(self, group: tuple[int, ...]) -> Declined:
        """Why a group of recurrent carries is computed by a loop."""
        why = self.parallel.get(group)
        return why if isinstance(why, Declined) else self.carries[group[0]].why


# In the meta of a scan node: what the user calls its carries, where that is known.
CARRY_NAMES = "nsa_carry_names"
# The same, where a carry has been split into its parts.
PART_NAMES = "nsa_part_names"


@dataclass
class ScanSite:
    """A scan node of graph module `owner`, taken apart."""

    owner: fx.GraphModule
    node: fx.Node

    def name_of(self, carry: int) -> str:
        """A carry by the user's name, or its number."""
        names = self.node.meta.get(PART_NAMES, self.node.meta.get(CARRY_NAMES, ()))
        return names[carry] if carry < len(names) else f"carry {carry}"

    @property
    def words(self) -> str:
        """What messages call it: `nsa_compile.loop` has no scan to speak of."""
        return "the loop" if CARRY_NAMES in self.node.meta else self.node.name

    @property
    def body(self) -> fx.GraphModule:
        return cast(fx.GraphModule, getattr(self.owner, str(operand(self.node).target)))

    @property
    def init(self) -> list[fx.Node]:
        return list(cast(Any, self.node.args[1]))

    @property
    def xs(self) -> list[fx.Node]:
        return list(cast(Any, self.node.args[2]))

    @property
    def additional(self) -> list[fx.Node]:
        return list(cast(Any, self.node.args[3]))

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
        values = [operand(v) if v.target is aten.clone.default else v for v in results(self.body)]
        n = len(self.init)
        return values[:n], values[n:]

    @property
    def read(self) -> set[int]:
        """The places of the results, carries and ys, that somebody reads."""
        return {place_of(user) for user in self.node.users if user.users}

    @property
    def record(self) -> ScanRecord | None:
        return self.node.meta.get(RECORD)


def results(gm: fx.GraphModule) -> list[Any]:
    """What a graph returns: nodes, or numbers."""
    return list(cast(Any, gm.graph.output_node().args[0]))


def place_of(item: fx.Node) -> int:
    """Which of several results a `getitem` takes."""
    return cast(int, item.args[1])


def example(node: fx.Node) -> Tensor:
    """The fake tensor a node stands for."""
    value: Tensor = node.meta[key_of_example(node)]
    return value


def key_of_example(node: fx.Node) -> str:
    """What it is called in the meta: as captured, or as traced."""
    return "example_value" if "example_value" in node.meta else "val"


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
    """Whether a graph may be a step of generation: attention, no loop, and an integer that may be a position, or one
    for each sequence."""
    inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    integers = [x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.int64]
    calls = {
        n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        for n in gm.graph.nodes
        if n.op in ("call_function", "call_method")
    }
    # Positions of several sequences are compared with those of rows; else integers may be labels.
    has_positions = any(x.numel() == 1 or (x.dim() == 1 and "arange" in calls) for x in integers)
    has_attention = bool({"softmax", "scaled_dot_product_attention"} & calls)
    return has_positions and has_attention and not find_scans(gm)


def name_scans_apart(gm: fx.GraphModule) -> None:
    """Give each scan a name of its own, by which reports tell them apart: bodies count their nodes from the start."""
    taken: set[str] = set()
    for site in find_scans(gm):
        while site.node.name in taken:
            site.node._rename(f"scan_{len(taken)}")
        taken.add(site.node.name)


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
    if node.op == "placeholder" and "stack_trace" not in node.meta:
        node = next((user for user in node.users if "stack_trace" in user.meta), node)
    for file, line in reversed(frames_of(node)):
        if file not in (SCANS, PICKS):
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


# What reads nothing but the shape and dtype of its first operand, as Dynamo and as our passes write it.
_LIKE: set[Any] = {torch.zeros_like, torch.ones_like, torch.full_like, "new_zeros", "new_ones", "new_full", *SHAPED}


def _empty_like(fake: Tensor) -> Tensor:
    with unset_fake_temporarily():
        return torch.empty(fake.shape, dtype=fake.dtype)


def constant_value(node: fx.Node, cache: dict[fx.Node, Tensor | None], limit: int = 2**26) -> Tensor | None:
    """The value of a node of the captured graph that depends on no input's numbers, on the CPU: `torch.arange(S)`,
    `torch.zeros_like(x)`; nor on any but those whose values are marked."""
    if node in cache:
        return cache[node]
    cache[node] = None
    if node.op == "placeholder":
        cache[node] = node.meta.get(VALUE)
        return cache[node]
    if node.op not in ("call_function", "call_method"):
        return None
    target: Any = node.target
    if isinstance(target, HigherOrderOperator) or target is operator.setitem:
        return None
    if isinstance(fake := node.meta.get("example_value"), Tensor) and fake.numel() > limit:
        return None
    operands: dict[fx.Node, Any] = {}
    for source in node.all_input_nodes:
        reads_shape = target in _LIKE and source is node.args[0]
        value = _empty_like(example(source)) if reads_shape else constant_value(source, cache, limit)
        if value is None:
            return None
        operands[source] = value
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


@contextlib.contextmanager
def declined_if_it_fails(what: str, node: fx.Node, kind: type[Exception] = Declined) -> Iterator[None]:
    """Leave alone what torch, or this compiler, cannot cope with in an unforeseen way: raise what is raised of `kind`
    where that is foreseen."""
    try:
        yield
    except kind:
        raise
    except Exception as error:
        log.debug("%s: %s", node.name, what, exc_info=True)
        raise kind(f"{what}: {first_line(error)}", node) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return "torch fails in its own code" if "INTERNAL ASSERT" in line else line

"""A loop as a program: one captured graph with a scan, compiled by the backend, and what to do with its results."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.scan import scan_op

from nsa_compile.backend import nsa_compile_backend
from nsa_compile.ir.scans import CARRY_NAMES
from nsa_compile.loops.aliases import Before, Place, find_shared, share
from nsa_compile.loops.body import Axis, Body, Carry, Table, Val
from nsa_compile.loops.gradients import refuse_unseen_writes, without_gradient
from nsa_compile.loops.lists import separate
from nsa_compile.loops.merged import Merged, Source, leaf_results, merge
from nsa_compile.loops.numbers import Number
from nsa_compile.loops.operators import convert
from nsa_compile.loops.paths import Exploration, type_of
from nsa_compile.loops.reached import reached
from nsa_compile.loops.state import GLOBAL, Container, NotFollowed, Path, Snapshot, in_words, is_global
from nsa_compile.loops.trace import Ref
from nsa_compile.loops.watched import Watched
from nsa_compile.program.constants import mark_pattern

aten = torch.ops.aten


@dataclass
class Part:
    """How a tensor of the state comes out of its buffer after the last step."""

    place: int
    rows: tuple[tuple[int, int, int], ...]  # dimension, first row, number of rows


@dataclass
class Rows:
    """How the tensors appended to a list come out of what the steps yield."""

    # (place, steps, rows by dimension) for each append in a step, and the order of all of them
    columns: list[tuple[int, Table, list[tuple[int, Table, Table]]]]


@dataclass
class Program:
    """A compiled loop."""

    run: Callable[..., Any]
    inputs: list[Path]  # of tensors, as they lie before the loop
    reached: set[Path]  # the inputs that its results depend on
    finals: dict[Path, Part]
    lists: dict[Path, Rows]
    mutated: set[Path]  # tensors written in place, which others may hold, too
    plan: dict[Path, Any]  # what the variables hold afterwards
    shared: dict[Place, Any]  # results that are tensors which were there before, or others, or views of these
    watched: Watched
    lost: set[Path]  # containers that a step changes, and in whose place one puts another
    without_gradient: tuple[set[Path], dict[Path, list[bool]]]  # finals, and of each list which tensors
    refuses: bool  # whether its last result says that the loop has to run as it is written


class Refused(Exception):
    """A program finds in the data that the loop has to run as it is written."""


def compile_loop(exploration: Exploration, watched: Watched, options: dict[str, Any], *, copied: bool) -> Program:
    """The program of an explored loop. `copied`: whether the rows of a list that it goes over are copies.

    Raises:
        NotFollowed: an operator has no form in which sizes may change.
    """
    refuse_unseen_writes(exploration)
    mutated, shared = exploration.mutated(), find_shared(exploration, copied=copied)
    merged = merge(exploration)
    starts: dict[Any, Table] = {}
    for _ in range(3):
        body = Body(merged, starts)
        body.build(convert)
        found = _starts(body)
        if all((found[s] == starts.get(s, 0)).all() for s in found):
            break
        starts = found
    else:
        raise NotFollowed("where its caches begin cannot be settled")
    return _Assembly(body, mutated, shared).program(watched, options)


def _starts(body: Body) -> dict[Any, Table]:
    """Where in its buffer each cache begins at each step, and after the last: it moves on where rows are cut off at its
    front."""
    found: dict[Any, Table] = {}
    for (path, kind), sources in leaf_results(body.merged).items():
        carry = body.carries[path, kind]
        for d, dim in enumerate(carry.dims):
            if not isinstance(dim, Axis):
                continue
            table = np.zeros(body.length + 1, np.int64)
            moves = np.zeros(body.length, np.int64)
            fresh = np.zeros(body.length, bool)
            for way, source in sources.items():
                here = body.way_of == way
                axis = body.value_of(source).dims[d]
                if isinstance(axis, Axis) and axis.root == (path, d) and len(axis.segments) == 1:
                    moves[here] = (axis.only.start - dim.only.start)[here]
                else:
                    fresh |= here
            for t in range(body.length):
                table[t + 1] = 0 if fresh[t] else table[t] + moves[t]
            found[path, d] = table
    return found


class _Assembly:
    """Puts a step into a scan, and the scan into a graph."""

    def __init__(self, body: Body, mutated: set[Path], shared: dict[Place, Any]) -> None:
        self.body, self.exploration, self.mutated, self.shared = body, body.exploration, mutated, shared
        self.merged: Merged = body.merged
        self.graph = fx.Graph()
        self.inputs: list[Path] = []
        self.examples: list[Tensor] = []
        self.nodes: dict[Path, fx.Node] = {}
        self.path_of = {id(x): path for path, x in self.exploration.first.leaves.items() if isinstance(x, Tensor)}
        kept = {place.path for place, what in shared.items() if isinstance(what, Before) and place.index is None}
        state, outside = reached(self.exploration, kept - mutated)
        self.reached = state | {path for number, path in self.path_of.items() if number in outside}

    def program(self, watched: Watched, options: dict[str, Any]) -> Program:
        body = self.body
        carries = list(body.carries.values())
        updates = [self._update(carry) for carry in carries]
        lists, ys = self._yields()
        if body.refused:
            ys.append(functools.reduce(lambda a, b: body.emit(aten.bitwise_or.Tensor, a, b), body.refused))
        step = self._step(carries, updates, ys)
        given = [self._initial(carry) for carry in carries]
        if not carries:
            given = [self._emit(torch.zeros, ())]
        xs = [self._row_input(what) for _, what in body.xs] or [self._emit(torch.arange, body.length)]
        additional = [self._outside(number) for number in body.additional]
        attribute = self.graph.get_attr("step")
        scan = self.graph.create_node("call_function", scan_op, (attribute, given, xs, additional), name="loop")
        scan.meta[CARRY_NAMES] = [in_words(carry.path) for carry in carries]
        scan.meta["stack_trace"] = body.merged.nodes[0].any.stack if body.merged.nodes else ""
        with tracing(TracingContext(body.mode)), body.mode:
            fakes = [[n.meta["example_value"] for n in group] for group in (given, xs, additional)]
            results = scan_op(step, *fakes)
        scan.meta["example_value"] = results
        outputs = []
        for i, value in enumerate(results):
            item = self.graph.call_function(operator.getitem, (scan, i))
            item.meta["example_value"] = value
            outputs.append(item)
        if body.refused:
            outputs[-1] = self._emit(torch.any, outputs[-1])
        self.graph.output(tuple(outputs))
        owner = fx.GraphModule({"step": step}, self.graph)
        examples = self.examples
        with tracing(TracingContext(body.mode)), without_autocast():
            run = nsa_compile_backend(owner, examples, options=options)
        finals = {carry.path: self._part(i, carry) for i, carry in enumerate(carries) if self._is_final(carry)}
        first = max(1, len(carries))
        shifted = {
            path: Rows([(first + place, steps, rows) for place, steps, rows in columns])
            for path, columns in lists.items()
        }
        plan = plan_after(self.exploration)
        traces = [way.trace for way in self.exploration.ways]
        lost = {p for x in traces for p in x.replaced} & {p for x in traces for p in x.changed}
        no_gradient = without_gradient(self.exploration)
        return Program(
            run,
            self.inputs,
            self.reached,
            finals,
            shifted,
            self.mutated,
            plan,
            self.shared,
            watched,
            lost,
            no_gradient,
            bool(body.refused),
        )

    # -- what the step yields

    def _after(self, carry: Carry, d: int) -> Axis | int:
        dim = carry.dims[d]
        if isinstance(dim, int):
            return dim
        body, key = self.body, (carry.path, d)
        if key not in self.exploration.after:
            shapes = {way: self.merged.trace(way).shapes[ref][d] for way, ref in self._results(carry).items()}
            return Axis.of(dim.size, 0, body.number(shapes))
        start = body.starts.get(key, np.zeros(body.length + 1, np.int64))[1:]
        return Axis.of(dim.size, start, start + self.exploration.after[key], key)

    def _results(self, carry: Carry) -> dict[int, Ref]:
        found = {}
        for way in range(len(self.exploration.ways)):
            trace = self.merged.trace(way)
            ref = trace.results.get(carry.path)
            if isinstance(ref, Ref) and trace.types[ref] == carry.type:
                found[way] = ref
        return found

    def _update(self, carry: Carry) -> fx.Node:
        """The next value of a carry, in its buffer."""
        body = self.body
        after = tuple(self._after(carry, d) for d in range(len(carry.dims)))
        carry.after = after
        groups: dict[Source, list[int]] = {}
        for way, ref in self._results(carry).items():
            groups.setdefault(self.merged.source(way, ref), []).append(way)
        parts: list[tuple[Val, Table]] = []
        covered = np.zeros(body.length, bool)
        for source, ways in groups.items():
            steps = body.steps_of(ways)
            covered |= steps
            body.at = steps
            if any(isinstance(dim, Axis) and not dim.count[steps].any() for dim in after):
                parts.append((Val(carry.node, after), steps))  # no rows: whatever stands in the buffer
                continue
            value = body.value_of(source)
            for d, dim in enumerate(after):
                if isinstance(dim, int):
                    value = body.fixed(value, d)
                elif isinstance(value.dims[d], int) and body.fits(value, carry, d):
                    node = body.written(carry.node, d, dim.only.start, value.node)
                    value = Val(node, (*value.dims[:d], dim, *value.dims[d + 1 :]))
                else:
                    value = body.moved(body._as_axis(value, d), d, dim)
            parts.append((Val(value.node, after), steps))
        body.at = body.everywhere
        if not covered.all():
            parts.append((Val(carry.node, after), ~covered))
        return body.choose(parts).node

    def _yields(self) -> tuple[dict[Path, list[Any]], list[fx.Node]]:
        body = self.body
        lists: dict[Path, list[Any]] = {}
        ys: list[fx.Node] = []
        for path in sorted(self.exploration.lists, key=str):
            most = max(len(way.trace.appended.get(path, ())) for way in self.exploration.ways)
            for k in range(most):
                kinds: dict[Any, dict[int, Source]] = {}
                for number, way in enumerate(self.exploration.ways):
                    items = way.trace.appended.get(path, [])
                    if k < len(items):
                        kind = way.trace.types[items[k]]
                        kinds.setdefault(kind, {})[number] = self.merged.source(number, items[k])
                for sources in kinds.values():
                    steps = body.steps_of(list(sources))
                    body.at = steps
                    value = body.chosen(sources)
                    rows = [(d, dim.only.start, dim.count) for d, dim in enumerate(value.dims) if isinstance(dim, Axis)]
                    lists.setdefault(path, []).append((len(ys), np.where(steps, k, -1), rows))
                    ys.append(value.node)
                    body.at = body.everywhere
        return lists, ys

    def _step(self, carries: list[Carry], updates: list[fx.Node], ys: list[fx.Node]) -> fx.GraphModule:
        """The step as a graph of its own: its inputs first, then what its results need."""
        graph, body = fx.Graph(), self.body
        copies: dict[fx.Node, fx.Node] = {}

        def placeholder(node: fx.Node | None, example: Tensor | None = None) -> None:
            new = graph.placeholder(f"input_{len(copies)}" if node is not None else f"nothing_{len(graph.nodes)}")
            new.meta["example_value"] = node.meta["example_value"] if node is not None else example
            if node is not None:
                copies[node] = new

        with body.mode:
            nothing, position = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for carry in carries:
            placeholder(carry.node)
        if not carries:
            placeholder(None, nothing)
        for node, _ in body.xs:
            placeholder(node)
        if not body.xs:
            placeholder(None, position)
        for node in body.additional.values():
            placeholder(node)
        inputs = list(graph.nodes)
        results = [*updates, *ys]
        needed = set(results)
        for node in reversed(list(body.graph.nodes)):
            if node in needed:
                needed |= set(node.all_input_nodes)
        for node in body.graph.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        new_updates = [copies[u] for u in updates] or inputs[:1]
        outputs = []
        for node in [*new_updates, *(copies[y] for y in ys)]:
            own = graph.call_function(torch.clone, (node,), {"memory_format": torch.contiguous_format})
            with body.mode:
                own.meta["example_value"] = torch.clone(
                    node.meta["example_value"], memory_format=torch.contiguous_format
                )
            outputs.append(own)
        graph.output(outputs)
        return fx.GraphModule({}, graph)

    # -- what the loop is given

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self.body.mode:
            node.meta["example_value"] = target(*fakes[0], **fakes[1])
        return node

    def _outside(self, number: int) -> fx.Node:
        """A tensor from outside of the loop, whose numbers are known where they follow a pattern."""
        path = self._outside_path(number)
        node = self._input(path)
        mark_pattern(node, in_words(path), self.exploration.first.leaves[path])
        return node

    def _outside_path(self, number: int) -> Path:
        path = self.path_of.get(id(self.merged.outside[number]))
        if path is None:
            raise NotFollowed(
                "it reads a tensor that is none of its variables, such as one of another module, or one that a cached "
                "function keeps"
            )
        return path

    def _input(self, path: Path) -> fx.Node:
        if path not in self.nodes:
            x = self.exploration.first.leaves[path]
            if x.is_inference():  # no pass may ask for a gradient of such a one
                x = x.clone()
            if path not in self.reached:
                x = x.detach()
            at = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            before = self.graph.inserting_before(at) if at is not None else self.graph.inserting_before()
            with before:
                node = self.graph.placeholder(f"input_{len(self.inputs)}")
            node.meta["example_value"] = self.body.mode.from_tensor(x, static_shapes=True)
            self.inputs.append(path)
            self.examples.append(x)
            self.nodes[path] = node
        return self.nodes[path]

    def _row_input(self, what: Any) -> fx.Node:
        """What the steps take one row of: a table of numbers, or a tensor from outside."""
        if isinstance(what, np.ndarray):
            return self._table(what)
        number, dim, table = what
        x = self._outside(number)
        if dim:
            x = self._emit(torch.movedim, x, dim, 0)
        if len(table) == x.meta["example_value"].shape[0] and (table == np.arange(len(table))).all():
            return x
        return self._emit(torch.index_select, x, 0, self._table(table))

    def _table(self, table: Table) -> fx.Node:
        steps = np.diff(table) if table.dtype.kind == "i" else np.array([0, 1])
        first, step = int(table[0]), int(steps[0]) if len(steps) else 0
        end = first + step * len(table)
        if step and (steps == step).all() and abs(end) < 2**63 - abs(step):  # else there is no number beyond the last
            return self._emit(torch.arange, first, end, step)
        dtype = {"b": torch.bool, "f": torch.float64}.get(table.dtype.kind, torch.int64)
        return self._emit(torch.tensor, table.tolist(), dtype=dtype)

    def _initial(self, carry: Carry) -> fx.Node:
        """The buffer of a carry before the first step."""
        example = carry.node.meta["example_value"]
        x = self.exploration.first.leaves.get(carry.path)
        present = self.exploration.present.get(carry.path)
        if not isinstance(x, Tensor) or present is None or not present[0] or type_of(x) != carry.type:
            return self._emit(torch.zeros, list(example.shape), dtype=example.dtype, device=example.device)
        node = self._input(carry.path)
        padding: list[int] = []
        for have, want in zip(reversed(x.shape), reversed(example.shape), strict=True):
            padding += [0, want - have]
        if any(padding):
            return self._emit(torch.nn.functional.pad, node, padding)
        return self._emit(torch.clone, node, memory_format=torch.contiguous_format)

    # -- what comes out

    def _is_final(self, carry: Carry) -> bool:
        last = int(self.exploration.way_of[-1])
        ref = self.merged.trace(last).results.get(carry.path)
        return isinstance(ref, Ref) and self.merged.trace(last).types[ref] == carry.type

    def _part(self, place: int, carry: Carry) -> Part:
        rows = []
        for d, dim in enumerate(carry.after):
            if isinstance(dim, Axis):
                rows.append((d, int(dim.only.start[-1]), int(dim.count[-1])))
        return Part(place, tuple(rows))


def without_autocast() -> Any:
    """The operators of a step have been traced below autocast: their casts stand among them."""
    stack = contextlib.ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def run_program(program: Program, now: Snapshot, length: int) -> tuple[dict[Path, Tensor], dict[Path, list[Tensor]]]:
    """Run a compiled loop, and let its variables hold what they do after it. Returns the tensors among these, and those
    that it has appended to lists.

    Raises:
        Refused: the loop has to run as it is written, since a step raises: the loop may catch that, and leaves behind
            what the steps before have done. Nothing has been changed.
    """
    with without_autocast():
        leaves = {path: now.leaves[path] for path in program.inputs}
        inputs = {path: x if path in program.reached else x.detach() for path, x in leaves.items()}
        try:
            results = program.run(*(x.clone() if path in program.mutated else x for path, x in inputs.items()))
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            if type(error).__module__.startswith(("nsa_compile.", "torch._dynamo.", "torch._inductor.")):
                raise
            raise Refused(f"one of its steps ends in {type(error).__name__}") from error
    if program.refuses and results[-1]:
        raise Refused("an index is out of bounds at one of its steps")
    finals: dict[Path, Tensor] = {}
    for path, part in program.finals.items():
        x = results[part.place]
        for d, first, count in part.rows:
            x = x.narrow(d, first, count)
        if path in program.without_gradient[0]:
            x = x.detach()
        before = now.leaves.get(path)
        finals[path] = before.copy_(x) if path in program.mutated and isinstance(before, Tensor) else x
    lists = {path: _appended(rows, results, length) for path, rows in program.lists.items()}
    for path, tensors in lists.items():
        has_none = program.without_gradient[1][path]
        tensors[:] = [x.detach() if off else x for x, off in zip(tensors, has_none, strict=True)]
    share(program.shared, now, finals, lists)
    _carry_out(program.plan, now, finals, lists)
    return finals, lists


def _appended(rows: Rows, results: Any, length: int) -> list[Tensor]:
    """The tensors that the steps append to a list, in order."""
    columns = [(separate(results[place]), order, parts) for place, order, parts in rows.columns]
    if len(columns) == 1 and (columns[0][1] >= 0).all() and not columns[0][2]:
        return list(columns[0][0])
    found = []
    for t in range(length):
        here = sorted((int(order[t]), i) for i, (_, order, _) in enumerate(columns) if order[t] >= 0)
        for _, i in here:
            values, _, parts = columns[i]
            x = values[t]
            for d, first, count in parts:
                x = x.narrow(d, int(first[t]), int(count[t]))
            found.append(x)
    return found


# -- the variables after the loop


@dataclass
class Made:
    """An object that the loop has made, or one that was there before: its path then."""

    was: Path | None
    kind: str
    type: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]
    template: Any = None


@dataclass(frozen=True)
class Final:
    """A tensor that the loop has computed."""

    path: Path


@dataclass(frozen=True)
class Was:
    """A tensor, or an object, that was there before the loop."""

    path: Path


@dataclass(frozen=True)
class Grown:
    """A list that the loop has appended to."""

    path: Path


def plan_after(exploration: Exploration) -> dict[Path, Any]:
    """What the variables hold after the last step, without the objects of the call at hand."""
    way = exploration.ways[int(exploration.way_of[-1])]
    trace, after = way.trace, way.trace.after
    assert after is not None
    before = {id(c.value): path for path, c in exploration.first.containers.items() if c.kind != "tuple"}
    before |= {id(x): path for path, x in exploration.first.leaves.items() if isinstance(x, Tensor)}
    built: dict[Path, Any] = {}

    def plan(path: Path) -> Any:
        if path in built:
            return built[path]
        if path in after.same:
            return plan(after.same[path])
        if path in exploration.lists:
            built[path] = Grown(path)
        elif (container := after.containers.get(path)) is not None:
            built[path] = _planned(container, path, plan, before, built)
        elif isinstance(result := trace.results[path], Ref):
            built[path] = Final(path)
        elif isinstance(result, Number):
            built[path] = exploration.value(result, exploration.length - 1)
        elif isinstance(result, Tensor):
            if id(result) not in before:
                raise NotFollowed(f"{in_words(path)} becomes a tensor that is none of its variables")
            built[path] = Was(before[id(result)])
        else:
            built[path] = result
        return built[path]

    cells = [path for path, c in after.containers.items() if len(path) == 1 and c.kind == "cell"]
    others = [p for p in (*after.containers, *after.leaves, *after.same) if len(p) == 1 and p not in cells]
    return {path: plan(path) for path in cells + others}


def _planned(
    container: Container, path: Path, plan: Callable[[Path], Any], before: dict[int, Path], built: dict[Path, Any]
) -> Any:
    was = before.get(id(container.value)) if container.kind != "tuple" else None
    made = Made(was, container.kind, container.type, container.keys, ())
    if container.kind in ("function", "method", "partial", "reference") and was is None:
        raise NotFollowed(f"{in_words(path)} becomes a {container.kind} that the loop has made")
    built[path] = made  # it may hold itself
    made.children = tuple(plan((*path, key)) for key in container.keys)
    if was is None and container.kind in ("dict", "list", "set") and made.type not in (dict, list, set):
        made.template = copy.copy(container.value)
        made.template.clear()
    if was is None and container.kind == "object":
        try:
            _new(made)
        except TypeError as error:
            kind = made.type.__name__
            raise NotFollowed(f"{in_words(path)} becomes a {kind} that the loop has made") from error
    return made


def _carry_out(
    plan: dict[Path, Any],
    now: Snapshot,
    finals: dict[Path, Tensor],
    lists: dict[Path, list[Tensor]],
) -> None:
    from nsa_compile.loops.state import _fill, take_class

    made: dict[int, Any] = {}

    def build(what: Any) -> Any:
        if isinstance(what, Final):
            return finals[what.path]
        if isinstance(what, Was):
            return now.leaves[what.path] if what.path in now.leaves else now.containers[what.path].value
        if isinstance(what, Grown):
            value = now.containers[what.path].value
            if id(what) not in made:
                made[id(what)] = value
                value.extend(lists.get(what.path, []))
            return value
        if not isinstance(what, Made):
            return what
        if id(what) not in made:
            if what.kind == "tuple":
                children = tuple(map(build, what.children))
                made[id(what)] = what.type._make(children) if hasattr(what.type, "_make") else what.type(children)
            else:
                value = now.containers[what.was].value if what.was is not None else _new(what)
                made[id(what)] = value
                take_class(value, what.type)
                _fill(value, what.kind, what.keys, tuple(map(build, what.children)))
        return made[id(what)]

    for path, what in plan.items():
        value = build(what)
        if is_global(path):
            now.module[path[0].removeprefix(GLOBAL)] = value


def _new(what: Made) -> Any:
    if what.template is not None:
        return copy.copy(what.template)
    if what.kind == "rows":
        return what.type(())
    if what.kind == "object":
        return list.__new__(what.type) if issubclass(what.type, list) else object.__new__(what.type)
    return what.type()

"""batch_prefill: the scan is gone; its body runs once, for all steps together.

Before:

    scan(body, init, xs, additional)           # S steps, one after the other

After, with every carry resolved to a function of the inputs:

    new_rows = vmap(part of the body)(xs)      # what each step writes, at the steps that write
    full     = init with all new rows in place
    ys       = vmap(rest of the body)(xs, full)

The body is evaluated backwards from its outputs, on demand. A value that is the same at all steps is computed once; a
row that is written every d steps is computed at those steps only. A carry that needs itself to be computed is a
recurrence, and declines the scan before anything has changed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from nsa_compile.analyses.known import promotes_by_rank
from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.attention import ATTENTION, SELECT, AttentionCall, Opaque, SelectCall
from nsa_compile.ir.carries import Invariant, Known, Latest, Rows
from nsa_compile.ir.lowering import trace_to_aten
from nsa_compile.ir.rewriting import inline_graph
from nsa_compile.ir.scans import (
    ESCAPES,
    Declined,
    ScanRecord,
    ScanSite,
    declined_if_it_fails,
    example,
    fake_inputs,
    find_scans,
    first_line,
    place_of,
    results,
)
from nsa_compile.ir.zero_gradients import match_results
from nsa_compile.passes.eliminate_guards import guarded_views
from nsa_compile.passes.pipeline import PassContext, register

Times = tuple[int, ...]

_ATTENTION = (ATTENTION, SELECT)


@register("batch_prefill", requires=("carries",))
def batch_prefill(gm: fx.GraphModule, context: PassContext) -> bool:
    """Replace each resolved scan by its body, batched over the sequence."""
    changed = False
    for site in find_scans(gm):
        if site.record is None or not context.may_rewrite():
            continue
        try:
            batched = trace_batched(site, site.record, context.options.max_guard_bytes)
        except Declined as declined:
            context.decline(site.node.name, declined)
            continue
        inputs = [*site.init, *site.xs, *site.additional]
        report = context.scan(site.node.name)
        report.nodes_after = sum(n.op == "call_function" for n in batched.graph.nodes)
        report.batched = True
        report.carries = [type(c).__name__ for c in site.record.carries]
        report.guards_kept, report.guards_dropped = guards(site, site.record)
        match_results(site, batched)
        inline_graph(site.owner, site.node, batched, inputs)
        context.match(site.node.name, f"{site.record.length} steps became {report.nodes_after} operators")
        changed = True
    return changed


def guards(site: ScanSite, record: ScanRecord) -> tuple[list[str], list[str]]:
    """Names of the buffer views that keep a guard, and of those that do not."""
    views = guarded_views(site, record)
    return [v for v in views if v not in record.guards_dropped], [v for v in views if v in record.guards_dropped]


def trace_batched(site: ScanSite, record: ScanRecord, max_guard_bytes: int) -> fx.GraphModule:
    """The batched form of one scan as a graph of its own, `(init, xs, additional) -> (carries, ys)`.

    Raises:
        Declined: nothing has been changed then.
    """
    n_init, n_xs = len(site.init), len(site.xs)

    def batched(*inputs: Tensor) -> list[Tensor]:
        init, xs, additional = inputs[:n_init], inputs[n_init : n_init + n_xs], inputs[n_init + n_xs :]
        evaluator = BatchedBody(site, record, init, xs, additional, max_guard_bytes)
        return evaluator.final_carries() + evaluator.ys()

    fakes = fake_inputs([*site.init, *site.xs, *site.additional])
    with declined_if_it_fails("the step cannot be batched", site.node):
        # vmap's own decompositions hold in-place operators (squeeze_); the graph shall hold none.
        graph = trace_to_aten(torch.func.functionalize(batched, remove="mutations"), fakes)
        escaping = {place_of(user) for user in site.node.users if ESCAPES in user.meta}
        _keep_outputs_apart(graph, escaping if torch.is_grad_enabled() else ())
    return graph


def _keep_outputs_apart(graph: fx.GraphModule, escaping: Collection[int]) -> None:
    """Copy the outputs that share memory with an input, a constant or another output: those of a loop share none.

    Copied is also what the caller gets to see, who may write to the results of a loop before he asks for gradients: an
    operator such as tanh keeps its result for the backward pass.
    """
    output = graph.graph.output_node()
    taken = set(graph.graph.find_nodes(op="placeholder") + graph.graph.find_nodes(op="get_attr"))
    outputs = []
    for i, value in enumerate(results(graph)):
        source = value
        while source.op == "call_function" and _may_alias(source):
            source = source.all_input_nodes[0]
        if source in taken or i in escaping:
            with graph.graph.inserting_before(output):
                copied = graph.graph.call_function(aten.clone.default, (value,))
            copied.meta = dict(value.meta)
            value = copied
        taken.add(source)
        outputs.append(value)
    output.args = (outputs,)
    graph.recompile()


def _may_alias(node: fx.Node) -> bool:
    """Whether a node may be a view of its first operand."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(a.alias_info is not None for a in schema.arguments)
    return node.target is aten.reshape.default or node.target is operator.getitem or is_view


class BatchedBody:
    """Evaluates nodes of a resolved body at all steps, or at some, together.

    A value is a pair: the tensor, and whether it has a leading dimension of steps or is the same at all of them.
    """

    def __init__(
        self,
        site: ScanSite,
        record: ScanRecord,
        init: tuple[Tensor, ...],
        xs: tuple[Tensor, ...],
        additional: tuple[Tensor, ...],
        max_guard_bytes: int,
    ) -> None:
        self.site, self.record, self.max_guard_bytes = site, record, max_guard_bytes
        self.init, self.xs = init, xs
        self.carries, x_nodes, additional_nodes = site.placeholders()
        self.updates, self.y_nodes = site.outputs()
        self.all_times: Times = tuple(range(record.length))
        self.x_of = dict(zip(x_nodes, xs, strict=True))
        self.same_of = dict(zip(additional_nodes, additional, strict=True))
        self.carry_of = {carry: i for i, carry in enumerate(self.carries)}
        self.update_of = {
            update: i
            for i, (update, kind) in enumerate(zip(self.updates, record.carries, strict=True))
            if isinstance(kind, Rows)
        }
        self.done: dict[tuple[fx.Node, Times], tuple[Any, bool]] = {}
        self.carries_under_way: set[int] = set()
        self.full: dict[int, Tensor] = {}
        self.stacks: dict[int, Tensor] = {}
        self.queries: dict[tuple[fx.Node, Times], Tensor] = {}

    def ys(self) -> list[Tensor]:
        """The outputs, `[S, ...]`."""
        return [self._spread(self.value(y, self.all_times), self.record.length).contiguous() for y in self.y_nodes]

    def final_carries(self) -> list[Tensor]:
        """The carries after the last step. Those nobody uses are dead code and go."""
        finals = []
        read = self.site.read
        last = (self.record.length - 1,)
        for i, (update, kind) in enumerate(zip(self.updates, self.record.carries, strict=True)):
            if i not in read or update is self.carries[i]:
                finals.append(self.init[i])
            elif isinstance(kind, Rows) and kind.write_once:
                finals.append(self._full(i))
            else:
                tensor, has_steps = self.value(update, last)
                finals.append(tensor[0] if has_steps else tensor)
        return [x.clone(memory_format=torch.contiguous_format) for x in finals]

    # -- values

    def value(self, node: Any, times: Times) -> tuple[Any, bool]:
        """A node at `times`, computed at most once.

        Its operands come first, by a stack of our own: a step may be deeper than Python's.
        """
        if not isinstance(node, fx.Node):
            return node, False
        waiting = [node]
        while waiting:
            key = (waiting[-1], times)
            operands = [] if key in self.done else self._plain_operands(waiting[-1])
            missing = [n for n in operands if (n, times) not in self.done]
            if missing:
                waiting += missing
                continue
            if key not in self.done:
                self.done[key] = self._compute(waiting[-1], times)
            waiting.pop()
        return self.done[node, times]

    def _plain_operands(self, node: fx.Node) -> list[fx.Node]:
        """What a node needs at the same steps; carries, and attention, see to what they need themselves."""
        if node.op != "call_function" or node in self.update_of or node.target in _ATTENTION:
            return []
        return node.all_input_nodes

    def _compute(self, node: fx.Node, times: Times) -> tuple[Any, bool]:
        if node in self.x_of:
            return self._at(self.x_of[node], times), True
        if node in self.same_of:
            return self.same_of[node], False
        if node in self.carry_of:
            return self._before(node, self.carry_of[node], times)
        if node in self.update_of:
            return self._after(node, self.update_of[node], times)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.site.body), False
        if node.target in _ATTENTION:
            with fx.traceback.set_current_meta(node):
                return self._attention(node, times), True
        operands = {n: self.value(n, times) for n in node.all_input_nodes}
        # torch.vmap then leaves the padding index out of the gradient (torch 2.13).
        padded = node.target is aten.embedding.default and arguments(node).padding_idx != -1
        if padded and operands[operand(node)][1]:
            raise Declined("embedding with a padding_idx in weights that differ from step to step", node)
        with fx.traceback.set_current_meta(node):
            return self._apply(node, operands, len(times))

    def _apply(self, node: fx.Node, operands: dict[fx.Node, tuple[Any, bool]], steps: int) -> tuple[Any, bool]:
        """One operator, batched over the operands that have steps."""
        with_steps = [n for n, (_, has_steps) in operands.items() if has_steps]
        if node.target is operator.getitem:
            source, has_steps = operands[operand(node)]
            return source[place_of(node)], has_steps
        if not with_steps:
            return self._call(node, {n: tensor for n, (tensor, _) in operands.items()}), False
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            return _batched_bmm(node, operands), True
        casts = _casts_of_numbers(node)
        operands = {n: (x.to(casts[n]) if n in casts else x, has_steps) for n, (x, has_steps) in operands.items()}
        same = {n: tensor for n, (tensor, has_steps) in operands.items() if not has_steps}

        def one_step(*rows: Tensor) -> Any:
            return self._call(node, {**same, **dict(zip(with_steps, rows, strict=True))})

        try:
            with _no_vmap_fallback():
                result = torch.vmap(one_step)(*(operands[n][0] for n in with_steps))
        except Exception as error:
            raise Declined(f"{node.target} cannot be batched over steps: {first_line(error)}", node) from error
        _check_batched(node, result)
        return result, True

    def _attention(self, node: fx.Node, times: Times) -> Tensor:
        """An attention node, or the selection of its blocks: the steps become its queries.

        Over all steps, and with keys that are the same at all of them, a mask that is known by kind is never computed.
        """
        run: Any = node.target
        call: Any = SelectCall.of(node) if node.target is SELECT else AttentionCall.of(node)
        caches = {name: self.value(getattr(call, name), times) for name in ("k", "v") if hasattr(call, name)}
        narrowing = {name: x for name in call.TENSORS[1 + len(caches) :] if (x := getattr(call, name)) is not None}
        together = not any(has_steps for _, has_steps in caches.values())
        if together and times == self.all_times and not isinstance(call.kind, Opaque):
            narrowing = {name: x for name, x in narrowing.items() if name == "indices"}
        queries = self._spread(self.value(call.q, times), len(times))
        narrow = {name: self._spread(self.value(x, times), len(times)) for name, x in narrowing.items()}
        batched = replace(call, **dict.fromkeys(call.TENSORS[1 + len(caches) :]))
        if together:
            # [S, N, 1, ...] -> [N, S, ...]; one tensor for all who read it, so that they are seen to belong together
            key = (call.q, times)
            if key not in self.queries:
                self.queries[key] = queries.squeeze(2).transpose(0, 1)
            caches = {name: x for name, (x, _) in caches.items()}
            narrow = {name: x.squeeze(2).transpose(0, 1) for name, x in narrow.items()}
            batched = replace(batched, q=self.queries[key], **caches, **narrow)
            return run(*batched.args).transpose(0, 1).unsqueeze(2)
        # Each step sees caches of its own: [S, N, 1, ...] -> [S * N, 1, ...]
        sequences = queries.shape[1]

        def fold(x: Tensor) -> Tensor:
            return x.expand(len(times), sequences, *x.shape[2:]).flatten(0, 1)

        spread = {name: self._spread(x, len(times)) for name, x in caches.items()}
        folded = {name: fold(x) for name, x in {"q": queries, **spread, **narrow}.items()}
        return run(*replace(batched, **folded).args).unflatten(0, (len(times), sequences))

    @staticmethod
    def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        if not isinstance(node.target, OpOverload):
            raise Declined(f"{node.target} is no operator on tensors, and has no batched form", node)
        return node.target(*args, **kwargs)

    def _spread(self, value: tuple[Tensor, bool], steps: int) -> Tensor:
        tensor, has_steps = value
        return tensor if has_steps else tensor.unsqueeze(0).expand(steps, *tensor.shape)

    # -- carries

    def _before(self, node: fx.Node, i: int, times: Times) -> tuple[Tensor, bool]:
        """A carry as a step finds it."""
        kind = self.record.carries[i]
        if isinstance(kind, Invariant):
            return self.init[i], False
        if isinstance(kind, Known):
            return self._at(self._constant(kind.values), times), True
        if isinstance(kind, Latest):
            # Step t finds what step t − 1 left.
            earlier = tuple(t - 1 for t in times if t > 0)
            parts = [self.init[i].unsqueeze(0)] * sum(t == 0 for t in times)
            if earlier:
                with self._not_again(i, node):
                    parts.append(self._spread(self.value(self.updates[i], earlier), len(earlier)))
            return torch.cat(parts), True
        if kind.write_once:
            if f"{node.name}.before" in self.record.guards_dropped:
                return self._full(i), False
            return self._guarded(node, i, times, inclusive=False), True
        before = np.concatenate([-1 - np.arange(kind.size)[None], kind.table[:-1]])
        return self._look_up(node, i, before[list(times)]), True

    def _after(self, node: fx.Node, i: int, times: Times) -> tuple[Tensor, bool]:
        """A buffer as a step leaves it, which is how it mostly reads it."""
        kind = self.record.carries[i]
        if kind.write_once:
            if self.carries[i].name in self.record.guards_dropped:
                return self._full(i), False
            return self._guarded(node, i, times, inclusive=True), True
        return self._look_up(node, i, kind.table[list(times)]), True

    @contextlib.contextmanager
    def _not_again(self, i: int, node: fx.Node) -> Iterator[None]:
        """Compute what carry `i` becomes; if that needs the carry itself, at whatever step, it is a recurrence."""
        if i in self.carries_under_way:
            raise Declined("the carry is computed from its own earlier values (a recurrence)", node)
        self.carries_under_way.add(i)
        try:
            yield
        finally:
            self.carries_under_way.discard(i)

    def _new_rows(self, i: int, times: Times) -> Tensor:
        """What the steps `times` write into buffer `i`: `[len(times) * count, ...]`, rows first."""
        kind = self.record.carries[i]
        with self._not_again(i, kind.written):
            rows = self._spread(self.value(kind.written, times), len(times))
        spread, in_rows = kind.layout(example(self.carries[i]).shape)
        rows = rows.reshape(len(times), *([1] * (len(spread) + 1 - rows.dim())), *rows.shape[1:])
        rows = rows.expand(len(times), *spread).reshape(len(times), *in_rows).to(self.init[i].dtype)
        return rows.movedim(kind.dim + 1, 1).flatten(0, 1)

    def _full(self, i: int) -> Tensor:
        """Buffer `i` with every row that is ever written in place."""
        if i not in self.full:
            kind = self.record.carries[i]
            with fx.traceback.set_current_meta(kind.written):
                written, which = kind.written_at.tolist(), kind.which.tolist()
                times = sorted({t for t in written if t < self.record.length})
                init = self.init[i].movedim(kind.dim, 0)
                if not times:
                    self.full[i] = self.init[i]
                else:
                    rows = self._new_rows(i, tuple(times))
                    position = {t: k for k, t in enumerate(times)}
                    source = [
                        kind.size + position[t] * kind.count + w if t < self.record.length else r
                        for r, (t, w) in enumerate(zip(written, which, strict=True))
                    ]
                    self.full[i] = _pick(init, rows, source).movedim(0, kind.dim)
        return self.full[i]

    def _guarded(self, node: fx.Node, i: int, times: Times, *, inclusive: bool) -> Tensor:
        """`where(written_at <= t, full, init)`, a copy of the buffer for each step."""
        kind = self.record.carries[i]
        self._check_memory(node, len(times))
        full = self._full(i)
        t = np.array(times)[:, None]
        visible = kind.written_at <= t if inclusive else kind.written_at < t
        shape = [len(times)] + [1] * full.dim()
        shape[kind.dim + 1] = kind.size
        mask = self._constant(visible.reshape(shape))
        with fx.traceback.set_current_meta(node):
            return torch.where(mask, full.unsqueeze(0), self.init[i].unsqueeze(0))

    def _look_up(self, node: fx.Node, i: int, table: np.ndarray) -> Tensor:
        """Rows of a buffer that moves or is rewritten: picked for each step from all rows there ever were."""
        kind = self.record.carries[i]
        self._check_memory(node, table.shape[0])
        with fx.traceback.set_current_meta(node):
            if i not in self.stacks:
                initial = self.init[i].reshape(1) if not self.init[i].dim() else self.init[i].movedim(kind.dim, 0)
                self.stacks[i] = torch.cat([initial, self._new_rows(i, self.all_times)])
            index = np.where(table < 0, -1 - table, table + kind.size)
            rows = self.stacks[i].index_select(0, self._constant(index).flatten())
            if not self.init[i].dim():
                return rows
            return rows.unflatten(0, tuple(table.shape)).movedim(1, kind.dim + 1)

    def _check_memory(self, node: fx.Node, copies: int) -> None:
        value = example(node)
        needed = copies * value.numel() * value.element_size()
        if needed > self.max_guard_bytes:
            raise Declined(
                f"a buffer of {list(value.shape)} needs a copy for each of {copies} steps, {needed} bytes, and "
                f"max_guard_bytes is {self.max_guard_bytes}",
                node,
            )

    # -- small helpers

    def _at(self, tensor: Tensor, times: Times) -> Tensor:
        """Rows `times` of `[S, ...]`: as a slice where they are evenly spaced."""
        return tensor if times == self.all_times else _take(tensor, list(times), self._constant)

    def _constant(self, table: np.ndarray | Tensor) -> Tensor:
        """A table as a tensor on the device of the data: computed there if it is large and linear, else a constant of
        the graph. Of what it computes from an `arange`, Inductor gets some gradients wrong (fmod; torch 2.13).
        """
        device = self.xs[0].device
        if isinstance(table, Tensor) and table.dtype != torch.int64:  # NumPy has not every dtype
            return table.to(device)
        value = table.numpy() if isinstance(table, Tensor) else table
        if value.dtype == np.int64 and value.ndim == 2 and value.size and (slopes := _slopes(value)) is not None:
            down, across = (torch.arange(n, device=device) * step for n, step in zip(value.shape, slopes, strict=True))
            return down[:, None] + across + int(value.flat[0])
        return torch.from_numpy(np.ascontiguousarray(value)).to(device)


def _casts_of_numbers(node: fx.Node) -> dict[fx.Node, torch.dtype]:
    """The dtypes to which a pointwise operator, at one step, casts its operands without dimensions.

    They weigh less in the common dtype than tensors with dimensions do, which they become when batched: vmap would
    compute `where(mask, float64, float32[D])` in float64, and compare an int64 with int8s without wrapping around.
    """
    target: Any = node.target
    if torch.Tag.pointwise not in target.tags or not promotes_by_rank(node):
        return {}
    conditions = {node.args[i] for i, a in enumerate(target._schema.arguments) if a.name in ("condition", "mask")}
    operands = [x for x in node.args if isinstance(x, fx.Node | int | float) and x not in conditions]
    common = example(node).dtype
    if common == torch.bool:
        common = elementwise_dtypes(
            *(example(x) if isinstance(x, fx.Node) else x for x in operands),
            type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH,
        )[1]
    return {x: common for x in operands if isinstance(x, fx.Node) and example(x).dim() == 0}


def _check_batched(node: fx.Node, result: Any) -> None:
    """Whether a result at several steps has the shape and dtype of its node at each.

    Raises:
        Declined: it has not; the operator's batched form is not what it does to one step.
    """
    expected: Any = example(node)
    pairs = [(result, expected)] if isinstance(result, Tensor) else list(zip(result, expected, strict=True))
    for batched, one in pairs:
        if isinstance(one, Tensor) and (batched.shape[1:] != one.shape or batched.dtype != one.dtype):
            raise Declined(
                f"{node.target} is {one.dtype}{list(one.shape)} at one step and {batched.dtype}"
                f"{list(batched.shape[1:])} batched",
                node,
            )


@contextlib.contextmanager
def _no_vmap_fallback() -> Iterator[None]:
    """Let vmap refuse an operator without a batching rule; its fallback is a loop, traced once for each step."""
    functorch: Any = torch._C._functorch
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(enabled)


def _slopes(value: np.ndarray) -> list[int] | None:
    """The step along each axis of a table that is linear in its indices, or None if it is not."""
    first = value[(0,) * value.ndim]
    slopes = [int(np.take(value, min(1, size - 1), axis).flat[0] - first) for axis, size in enumerate(value.shape)]
    grid = sum(
        np.arange(size).reshape([-1 if a == axis else 1 for a in range(value.ndim)]) * slope
        for axis, (size, slope) in enumerate(zip(value.shape, slopes, strict=True))
    )
    return slopes if np.array_equal(value, grid + first) else None


def _take(tensor: Tensor, rows: list[int], constant: Any) -> Tensor:
    if len(rows) == 1:
        return tensor[rows[0] : rows[0] + 1]
    step = rows[1] - rows[0]
    if step > 0 and rows == list(range(rows[0], rows[-1] + 1, step)):
        return tensor[rows[0] : rows[-1] + 1 : step]
    return tensor.index_select(0, constant(np.array(rows)))


def _pick(init: Tensor, rows: Tensor, source: list[int]) -> Tensor:
    """Rows `source` of `cat([init, rows])`, in as few pieces as they fall into when these are few."""
    size = init.shape[0]
    runs: list[list[int]] = []
    for s in source:
        if runs and s == runs[-1][1] + 1 and (s != size):
            runs[-1][1] = s
        else:
            runs.append([s, s])
    if len(runs) <= 4:
        pieces = [(init[a : b + 1] if b < size else rows[a - size : b - size + 1]) for a, b in runs]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    index = torch.from_numpy(np.array(source)).to(rows.device)
    return torch.cat([init, rows]).index_select(0, index)


def _batched_bmm(node: fx.Node, operands: dict[fx.Node, tuple[Any, bool]]) -> Tensor:
    """`[b, m, k] @ [b, k, n]` at S steps. An operand that is the same at all steps is not copied S times: the steps
    join the rows (or columns) of the other one."""
    added = operand(node) if node.target is aten.baddbmm.default else None
    first = 0 if added is None else 1
    (a, a_steps), (b, b_steps) = operands[operand(node, first)], operands[operand(node, first + 1)]
    if a_steps and b_steps:
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
    elif a_steps:
        steps, batch, m, _ = a.shape
        product = torch.bmm(a.transpose(0, 1).reshape(batch, steps * m, a.shape[-1]), b)
        product = product.view(batch, steps, m, b.shape[-1]).transpose(0, 1)
    elif b_steps:
        steps, batch, k, n = b.shape
        product = torch.bmm(a, b.permute(1, 2, 0, 3).reshape(batch, k, steps * n))
        product = product.view(batch, a.shape[1], steps, n).permute(2, 0, 1, 3)
    else:
        product = torch.bmm(a, b).unsqueeze(0)
    if added is None:
        return product
    extra, extra_steps = operands[added]
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if beta == 0:  # then what is added is not read: it may be NaN
        return alpha * product
    # It may have fewer dimensions than the product, before which the steps come.
    extra = extra if extra_steps else extra.unsqueeze(0)
    extra = extra.reshape(extra.shape[0], *([1] * (product.dim() - extra.dim())), *extra.shape[1:])
    return beta * extra + alpha * product

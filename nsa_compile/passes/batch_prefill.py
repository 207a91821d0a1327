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
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nsa_compile.passes.attention import attention, select_blocks
from nsa_compile.passes.eliminate_guards import guarded_views
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.passes.resolve_carries import Invariant, Known, Latest, Rows
from nsa_compile.passes.rewriting import inline_graph
from nsa_compile.passes.scans import (
    Declined,
    ScanRecord,
    ScanSite,
    aten,
    example,
    fake_inputs,
    find_scans,
    trace_to_aten,
)

Times = tuple[int, ...]


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
    # vmap's own decompositions hold in-place operators (squeeze_); the graph shall hold none.
    return trace_to_aten(torch.func.functionalize(batched, remove="mutations"), fakes)


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
        used = {user.args[1] for user in self.site.node.users if user.target is operator.getitem}
        last = (self.record.length - 1,)
        for i, (update, kind) in enumerate(zip(self.updates, self.record.carries, strict=True)):
            if i not in used or isinstance(kind, Invariant):
                finals.append(self.init[i].clone())
            elif isinstance(kind, Rows) and kind.write_once:
                finals.append(self._full(i).clone())
            else:
                tensor, has_steps = self.value(update, last)
                finals.append((tensor[0] if has_steps else tensor).clone())
        return finals

    # -- values

    def value(self, node: Any, times: Times) -> tuple[Any, bool]:
        """A node at `times`, computed at most once."""
        if not isinstance(node, fx.Node):
            return node, False
        key = (node, times)
        if key not in self.done:
            self.done[key] = self._compute(node, times)
        return self.done[key]

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
            return operator.attrgetter(node.target)(self.site.body), False
        assert node.op == "call_function", node.format_node()
        if node.target in (attention._opoverload, select_blocks._opoverload):
            with fx.traceback.set_current_meta(node):
                return self._attention(node, times), True
        operands = {n: self.value(n, times) for n in node.all_input_nodes}
        with fx.traceback.set_current_meta(node):
            return self._apply(node, operands, len(times))

    def _apply(self, node: fx.Node, operands: dict[fx.Node, tuple[Any, bool]], steps: int) -> tuple[Any, bool]:
        """One operator, batched over the operands that have steps."""
        with_steps = [n for n, (_, has_steps) in operands.items() if has_steps]
        if node.target is operator.getitem:
            source, has_steps = operands[node.args[0]]
            return source[node.args[1]], has_steps
        if not with_steps:
            return self._call(node, {n: tensor for n, (tensor, _) in operands.items()}), False
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            return _batched_bmm(node, operands), True
        same = {n: tensor for n, (tensor, has_steps) in operands.items() if not has_steps}

        def one_step(*rows: Tensor) -> Any:
            return self._call(node, {**same, **dict(zip(with_steps, rows, strict=True))})

        try:
            with _no_vmap_fallback():
                return torch.vmap(one_step)(*(operands[n][0] for n in with_steps)), True
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise Declined(f"{node.target} cannot be batched over steps: {reason}", node) from error

    def _attention(self, node: fx.Node, times: Times) -> Tensor:
        """An attention node, or the selection of its blocks: the steps become its queries.

        Over all steps, and with keys that are the same at all of them, a mask that is known by kind is never computed.
        """
        selecting = node.target is select_blocks._opoverload
        count = 2 if selecting else 3  # of q and the caches; masks and indices follow, up to five in all
        q, *caches = (self.value(x, times) for x in node.args[:count])
        together = not any(has_steps for _, has_steps in caches)
        by_kind = together and times == self.all_times and (selecting or node.args[6] != "opaque")
        indices = None if selecting else node.args[4]
        narrowing = [
            None if x is None or (by_kind and x is not indices) else self._spread(self.value(x, times), len(times))
            for x in node.args[count:5]
        ]
        rest = node.args[5:]
        queries = self._spread(q, len(times))
        if together:
            # [S, N, 1, ...] -> [N, S, ...]; one tensor for all who read it, so that they are seen to belong together
            key = (node.args[0], times)
            if key not in self.queries:
                self.queries[key] = queries.squeeze(2).transpose(0, 1)
            inputs = [self.queries[key], *(x for x, _ in caches)]
            inputs += [None if x is None else x.squeeze(2).transpose(0, 1) for x in narrowing]
            return node.target(*inputs, *rest).transpose(0, 1).unsqueeze(2)
        # Each step sees caches of its own: [S, N, 1, ...] -> [S * N, 1, ...]
        sequences = queries.shape[1]

        def fold(x: Tensor) -> Tensor:
            return x.expand(len(times), sequences, *x.shape[2:]).flatten(0, 1)

        inputs = [fold(queries), *(fold(self._spread(x, len(times))) for x in caches)]
        inputs += [None if x is None else fold(x) for x in narrowing]
        return node.target(*inputs, *rest).unflatten(0, (len(times), sequences))

    @staticmethod
    def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        assert isinstance(node.target, OpOverload)
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
        shape = list(example(self.carries[i]).shape)
        shape[kind.dim] = kind.count
        missing = len(shape) + 1 - rows.dim()
        if missing == 1 and kind.count == 1 and not _has_row_dim(kind, example(self.carries[i])):
            rows = rows.unsqueeze(kind.dim + 1)
        rows = rows.reshape(rows.shape[0], *([1] * (len(shape) + 1 - rows.dim())), *rows.shape[1:])
        rows = rows.expand(rows.shape[0], *shape).to(self.init[i].dtype)
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
                initial = self.init[i].movedim(kind.dim, 0)
                self.stacks[i] = torch.cat([initial, self._new_rows(i, self.all_times)])
            index = np.where(table < 0, -1 - table, table + kind.size)
            rows = self.stacks[i].index_select(0, self._constant(index).flatten())
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

    def _constant(self, value: np.ndarray) -> Tensor:
        """A table as a tensor on the device of the data: computed there if linear, else a constant of the graph."""
        device = self.xs[0].device
        if value.dtype == np.int64 and value.ndim in (1, 2) and value.size and (slopes := _slopes(value)) is not None:
            axes = [torch.arange(size, device=device) * step for size, step in zip(value.shape, slopes, strict=True)]
            linear = axes[0] if value.ndim == 1 else axes[0][:, None] + axes[1]
            return linear + int(value.flat[0])
        return torch.from_numpy(np.ascontiguousarray(value)).to(device)


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


def _has_row_dim(kind: Rows, carry: Tensor) -> bool:
    """Whether the written value keeps a dimension for the row, as where() and index_copy() do."""
    return example(kind.written).dim() >= carry.dim()


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
    added = node.args[0] if node.target is aten.baddbmm.default else None
    a_node, b_node = node.args[-2:] if added is None else node.args[1:3]
    (a, a_steps), (b, b_steps) = operands[a_node], operands[b_node]
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
    return beta * (extra if extra_steps else extra.unsqueeze(0)) + alpha * product

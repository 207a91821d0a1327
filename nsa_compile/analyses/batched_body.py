"""The values of a resolved body at all its steps together: what batch_prefill computes in place of the loop."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from nsa_compile.analyses.batched_operators import HALF, Value, apply_at_steps, spread
from nsa_compile.analyses.inner_loops import InnerLoop, body_of
from nsa_compile.analyses.running_sums import RunningRows
from nsa_compile.analyses.scores import MASK, used_tiles
from nsa_compile.ir.aten import SHAPED, aten, operand
from nsa_compile.ir.attention import (
    ALWAYS_THERE,
    ATTENTION,
    NAN_ROWS,
    PLACES,
    SCORED,
    SELECT,
    WEIGHTED,
    AttentionCall,
    Opaque,
    SelectCall,
    positions_of_keys,
)
from nsa_compile.ir.carries import Invariant, Known, Latest, Recurrent, Rows
from nsa_compile.ir.inner_loops import run_inner_loop
from nsa_compile.ir.scans import Declined, ScanRecord, ScanSite, example
from nsa_compile.ops.recurrence import recurrence
from nsa_compile.ops.scored import TILE

Times = tuple[int, ...]

_BOUNDED = (
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.maximum.default, aten.minimum.default,
)  # fmt: skip
_FEW = 2**16  # numbers of a constant of the graph
# Rows of a buffer up to which each is a slice of all there were: the gradient of a slice is added up, that of an index
# scattered.
_SLICED = 8

ATTENTIONS = (ATTENTION, SELECT, SCORED, WEIGHTED, PLACES, NAN_ROWS)


@runtime_checkable
class Recurrence(Protocol):
    """How the carries of a group that need each other are computed over all steps, and what of that is read.

    Attributes:
        group: the places of the carries.
        yields: the nodes whose values, at all steps, it computes.
        form: in words.
    """

    @property
    def group(self) -> tuple[int, ...]: ...

    @property
    def yields(self) -> tuple[fx.Node, ...]: ...

    @property
    def form(self) -> str: ...

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        """The final carries by their places, and what it yields, `[S, ...]`."""


@dataclass(frozen=True)
class AsLoop:
    """A recurrence computed by a loop over its part of the step."""

    loop: InnerLoop
    form = "loop"

    @property
    def group(self) -> tuple[int, ...]:
        return self.loop.group

    @property
    def yields(self) -> tuple[fx.Node, ...]:
        return self.loop.yields

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        for node in self.yields:
            body.check_memory(node, body.record.length)
        found = {node: body.value(node, body.all_times) for node in self.loop.inputs}
        rows = [node for node, (_, has_steps) in found.items() if has_steps]
        same = [node for node, (_, has_steps) in found.items() if not has_steps]
        step = body_of(body.site, self.loop, rows, same)
        xs = [found[node][0] for node in rows] or [torch.arange(body.record.length, device=body.xs[0].device)]
        init = [body.init[i] for i in self.group]
        results = run_inner_loop(step, init, xs, [found[node][0] for node in same])
        return dict(zip(self.group, results, strict=False)), dict(
            zip(self.yields, results[len(self.group) :], strict=True)
        )


def known_constants(record: ScanRecord) -> dict[fx.Node, Tensor]:
    """Few numbers that are known, and that Inductor would compute otherwise (torch 2.13): integers that are cut off at
    a bound, which it fails to find ("vr must not be None"), and numbers in 16 bits, which it does not round."""

    def is_constant(node: fx.Node) -> bool:
        dtype = example(node).dtype
        is_index = node.target in _BOUNDED and not dtype.is_floating_point
        return (is_index or dtype in HALF) and example(node).numel() * record.length <= _FEW

    return {node: value.table() for node, value in record.known.items() if is_constant(node)}


class BatchedBody:
    """Evaluates nodes of a resolved body at all steps, or at some, together.

    What a recurrence yields at all steps is computed as a whole, by `recurrences`, one for each group of carries.
    `constants` are those of `known_constants` and `sums` those of `running_rows`, found before anybody traces: a tensor
    that is made under a trace has no numbers yet.

    Raises:
        Declined: a buffer is too large, or an operator has no batched form.
    """

    def __init__(
        self,
        site: ScanSite,
        record: ScanRecord,
        init: tuple[Tensor, ...],
        xs: tuple[Tensor, ...],
        additional: tuple[Tensor, ...],
        max_guard_bytes: int,
        recurrences: Sequence[Recurrence] = (),
        constants: Mapping[fx.Node, Tensor] = MappingProxyType({}),
        sums: Mapping[fx.Node, RunningRows] = MappingProxyType({}),
    ) -> None:
        self.site, self.record, self.max_guard_bytes = site, record, max_guard_bytes
        self.constants, self.sums = constants, sums
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
        self.done: dict[tuple[fx.Node, Times], Value] = {}
        self.recurrence_of = {place: r for r in recurrences for place in r.group}
        self.yielded_by = {node: r for r in recurrences for node in r.yields}
        self.results_of: dict[Recurrence, tuple[dict[int, Tensor], dict[fx.Node, Tensor]]] = {}
        self.full: dict[int, Tensor] = {}
        self.stacks: dict[int, Tensor] = {}
        self.queries: dict[tuple[fx.Node, Times], Tensor] = {}
        self.own_forms: dict[Any, Callable[[fx.Node, Times], Any]] = {
            SCORED: self._by_program, WEIGHTED: self._by_program, PLACES: self._by_program, NAN_ROWS: self._nan_rows
        }  # fmt: skip

    def ys(self) -> list[Tensor]:
        """The outputs, `[S, ...]`."""
        return [spread(self.value(y, self.all_times), self.record.length).contiguous() for y in self.y_nodes]

    def final_carries(self) -> list[Tensor]:
        """The carries after the last step. Those nobody uses are dead code and go."""
        finals = []
        read = self.site.read
        last = (self.record.length - 1,)
        for i, (update, kind) in enumerate(zip(self.updates, self.record.carries, strict=True)):
            if i not in read or update is self.carries[i]:
                finals.append(self.init[i])
            elif isinstance(kind, Recurrent):
                finals.append(self._results(self.recurrence_of[i])[0][i])
            elif isinstance(kind, Rows) and kind.write_once:
                finals.append(self._full(i))
            else:
                tensor, has_steps = self.value(update, last)
                finals.append(tensor[0] if has_steps else tensor)
        return [x.clone(memory_format=torch.contiguous_format) for x in finals]

    # -- values

    def value(self, node: Any, times: Times) -> Value:
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
        if node.op != "call_function" or node in self.update_of or node in self.yielded_by:
            return []
        if node.target in ATTENTIONS or self._is_filled(node):
            return []
        return [self.sums[node].rows] if node in self.sums else node.all_input_nodes

    def _is_filled(self, node: fx.Node) -> bool:
        """Whether a node reads nothing but a shape."""
        return node.target in SHAPED and node in self.record.constant

    def _compute(self, node: fx.Node, times: Times) -> Value:
        if node in self.x_of:
            return self._at(self.x_of[node], times), True
        if node in self.yielded_by:
            return self._at(self._results(self.yielded_by[node])[1][node], times), True
        if node in self.same_of:
            return self.same_of[node], False
        if node in self.carry_of:
            return self._before(node, self.carry_of[node], times)
        if node in self.update_of:
            return self._after(node, self.update_of[node], times)
        if self._is_filled(node):
            return self.record.constant[node].to(self.xs[0].device), False
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.site.body), False
        if node.target in ATTENTIONS:
            with fx.traceback.set_current_meta(node):
                compute = self.own_forms.get(node.target, self._attention)
                return compute(node, times), True
        if node in self.constants:
            return self._at(self._constant(self.constants[node]), times), True
        if (sums := self.sums.get(node)) is not None and not (rows := self.value(sums.rows, times))[1]:
            with fx.traceback.set_current_meta(node):
                return self._running_sum(node, sums, rows[0], times), True
        operands = {n: self.value(n, times) for n in node.all_input_nodes}
        with fx.traceback.set_current_meta(node):
            return compute_at(node, operands, lambda: self._constant(np.array(times)), len(times), self.record)

    def _running_sum(self, node: fx.Node, sums: RunningRows, rows: Tensor, times: Times) -> Tensor:
        """Sums of the first rows of what is the same at all steps."""
        counts = sums.counts[list(times)]
        first = rows.movedim(sums.dim, 0)
        total = recurrence(None, first, torch.zeros_like(first[0]))
        if counts.min() > 0:
            counts = counts - 1
        else:
            total = torch.cat([torch.zeros_like(total[:1]), total])
        found = _take(total, counts.tolist(), self._constant)
        if sums.factor is not None:
            factor = self._at(self._constant(sums.factor), times)
            found = found * factor.reshape(-1, *[1] * (found.dim() - 1))
        found = found if sums.divisor == 1 else found / sums.divisor
        return found.reshape(len(times), *example(node).shape)

    def _attention(self, node: fx.Node, times: Times) -> Tensor:
        """An attention node, or the selection of its blocks: the steps become its queries.

        Over all steps, and with keys that are the same at all of them, a mask that is known by kind is never computed.
        """
        run: Any = node.target
        call: Any = SelectCall.of(node) if node.target is SELECT else AttentionCall.of(node)
        nan_from = getattr(call, "nan_from", ())
        if nan_from and (found := self._at_some_steps(node, times)) is not None:
            return found
        caches = {name: self.value(getattr(call, name), times) for name in ("k", "v") if hasattr(call, name)}
        narrowing = {name: x for name in call.TENSORS[1 + len(caches) :] if (x := getattr(call, name)) is not None}
        together = not any(has_steps for _, has_steps in caches.values())
        if together and times == self.all_times and not isinstance(call.kind, Opaque):
            narrowing = {name: x for name, x in narrowing.items() if name == "indices"}
        queries = spread(self.value(call.q, times), len(times))
        narrow = {name: spread(self.value(x, times), len(times)) for name, x in narrowing.items()}
        none = dict.fromkeys(call.TENSORS[1 + len(caches) :])
        if together:
            # [S, N, 1, ...] -> [N, S, ...]; one tensor for all who read it, so that they are seen to belong together
            key = (call.q, times)
            if key not in self.queries:
                self.queries[key] = queries.squeeze(2).transpose(0, 1)
            caches = {name: x for name, (x, _) in caches.items()}
            narrow = {name: x.squeeze(2).transpose(0, 1) for name, x in narrow.items()}
            batched = replace(call, **{**none, "q": self.queries[key], **caches, **narrow})
            return run(*batched.args).transpose(0, 1).unsqueeze(2)
        # Each step sees caches of its own.
        sequences = queries.shape[1]
        spread_caches = {name: spread(x, len(times)) for name, x in caches.items()}
        if nan_from:
            spread_caches["v"] = self._with_rows_there(spread_caches["v"], nan_from, times)
            call = replace(call, nan_from=ALWAYS_THERE)
        folded = {name: _fold(x, sequences) for name, x in {"q": queries, **spread_caches, **narrow}.items()}
        return run(*replace(call, **{**none, **folded}).args).unflatten(0, (len(times), sequences))

    def _by_program(self, node: fx.Node, times: Times) -> Any:
        """Attention by scores of a program, a sum by weights of one, or a ranking: the steps become its queries."""
        run: Any = node.target
        given_args: Any = node.args
        queries, keys, *others = given_args
        values = [] if node.target is PLACES else [others.pop(0)]
        leaves, program, _, *count = others
        q = [spread(self.value(x, times), len(times)) for x in queries]
        caches = [self.value(x, times) for x in (*keys, *values)]

        def called(q: list[Tensor], caches: list[Tensor], leaves: list[Tensor], tiles: Tensor | None) -> Any:
            return run(q, caches[: len(keys)], *caches[len(keys) :], leaves, program, tiles, *count)

        if not any(has_steps for _, has_steps in caches):
            given = [self._leaf(x, times) for x in leaves]
            of_steps = [_together(x) if has_steps else x for x, has_steps in given]
            tiles = None
            if times == self.all_times:
                tiles = used_tiles(node.meta[MASK], len(times), caches[0][0].shape[1], TILE)
            found = called([_together(x) for x in q], [x for x, _ in caches], of_steps, tiles)
            return pytree.tree_map(_apart, found)
        # Each step sees caches of its own.
        sequences = q[0].shape[1]
        folded = [_fold(spread(self.value(x, times), len(times)), sequences) for x in leaves]
        own = [_fold(spread(x, len(times)), sequences) for x in caches]
        found = called([_fold(x, sequences) for x in q], own, folded, None)
        return pytree.tree_map(lambda x: x.unflatten(0, (len(times), sequences)), found)

    def _leaf(self, node: fx.Node, times: Times) -> Value:
        """What scores of a program read: of a table by the distance of query and key, an element for each distance."""
        table, which = self.record.by_distance.get(node, (node, None))
        value, has_steps = self.value(table, times)
        if which is None:
            return value, has_steps
        if has_steps or times != self.all_times:
            return self.value(node, times)
        return value.flatten().index_select(0, self._constant(which.flatten())).reshape(which.shape), False

    def _nan_rows(self, node: fx.Node, times: Times) -> Tensor:
        """What `nan_rows` does, with the steps as its queries."""
        if (found := self._at_some_steps(node, times)) is not None:
            return found
        given: Any = node.args
        out, none = (spread(self.value(x, times), len(times)) for x in given[:2])
        v, has_steps = self.value(given[2], times)
        if not has_steps:
            return _apart(NAN_ROWS(_together(out), _together(none), v, given[3]))
        sequences = out.shape[1]
        v = self._with_rows_there(v, given[3], times)
        found = NAN_ROWS(*(_fold(x, sequences) for x in (out, none, v)), ALWAYS_THERE)
        return found.unflatten(0, (len(times), sequences))

    def _at_some_steps(self, node: fx.Node, times: Times) -> Tensor | None:
        """Of a node that counts its positions from the first step: some of those of all steps. None of the first."""
        if times == self.all_times[: len(times)]:
            return None
        return self.value(node, self.all_times)[0].index_select(0, self._constant(np.array(times)))

    def _with_rows_there(self, v: Tensor, nan_from: Sequence[int], times: Times) -> Tensor:
        """Values of each step `[·, N, T, Dv]` that pass no gradient on where a row is not among those of the step."""
        steps = np.array(times)[:, None]
        start, stop = positions_of_keys(nan_from, v.shape[2], len(self.all_times))
        there = (start <= steps) & (steps < stop)
        return v if there.all() else torch.where(self._constant(there)[:, None, :, None], v, v.detach())

    # -- carries

    def _results(self, recurrence: Recurrence) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        if recurrence not in self.results_of:
            self.results_of[recurrence] = recurrence.compute(self)
        return self.results_of[recurrence]

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
                parts.append(spread(self.value(self.updates[i], earlier), len(earlier)))
            return torch.cat(parts), True
        if isinstance(kind, Recurrent):
            raise Declined("a recurrence needs the state of another one at each step", node)
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

    def _new_rows(self, i: int, times: Times) -> Tensor:
        """What the steps `times` write into buffer `i`: `[len(times) * count, ...]`, rows first."""
        kind = self.record.carries[i]
        rows = spread(self.value(kind.written, times), len(times))
        written, in_rows = kind.layout(example(self.carries[i]).shape)
        rows = rows.reshape(len(times), *([1] * (len(written) + 1 - rows.dim())), *rows.shape[1:])
        rows = rows.expand(len(times), *written).reshape(len(times), *in_rows).to(self.init[i].dtype)
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
        self.check_memory(node, len(times))
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
        self.check_memory(node, table.shape[0])
        with fx.traceback.set_current_meta(node):
            if i not in self.stacks:
                initial = self.init[i].reshape(1) if not self.init[i].dim() else self.init[i].movedim(kind.dim, 0)
                self.stacks[i] = torch.cat([initial, self._new_rows(i, self.all_times)])
            index = np.where(table < 0, -1 - table, table + kind.size)
            if self.init[i].dim() and index.shape[1] <= _SLICED and all(map(_evenly_spaced, index.T)):
                columns = [_take(self.stacks[i], column.tolist(), self._constant) for column in index.T]
                return torch.stack(columns).movedim(0, kind.dim + 1)
            if self.init[i].dim() and (windows := _windows(self.stacks[i], index)) is not None:
                return windows.movedim(1, kind.dim + 1)
            rows = self.stacks[i].index_select(0, self._constant(index).flatten())
            if not self.init[i].dim():
                return rows
            return rows.unflatten(0, tuple(table.shape)).movedim(1, kind.dim + 1)

    def check_memory(self, node: fx.Node, copies: int) -> None:
        """Refuse what holds too much for each step.

        Raises:
            Declined: it takes more bytes than the options allow.
        """
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
        assert not isinstance(table, Tensor) or not torch._C._functorch.is_functionaltensor(table), "it has no numbers"
        if isinstance(table, Tensor) and table.dtype != torch.int64:  # NumPy has not every dtype
            return table.to(device)
        value = table.numpy() if isinstance(table, Tensor) else table
        if value.dtype == np.int64 and value.ndim == 2 and value.size and (slopes := _slopes(value)) is not None:
            down, across = (torch.arange(n, device=device) * step for n, step in zip(value.shape, slopes, strict=True))
            return down[:, None] + across + int(value.flat[0])
        return torch.from_numpy(np.ascontiguousarray(value)).to(device)


def compute_at(
    node: fx.Node, operands: dict[fx.Node, Value], steps: Callable[[], Tensor], count: int, record: ScanRecord
) -> Value:
    """One operator at `count` steps, whose numbers are `steps`; with what the proof of dropped guards asks of it."""
    if node in record.settled:
        return _settled(node, operands, steps(), count, record)
    hidden = dict(operands)
    for place in range(len(node.args)):
        if (first := record.hidden.get((node, place))) is not None:
            # Zeros where it meets rows of zeros that are not written yet: final rows are there instead.
            x = operand(node, place)
            hidden[x] = torch.where(_from(first, x, steps()), spread(operands[x], count), 0.0), True
    return apply_at_steps(node, hidden)


def _settled(node: fx.Node, operands: dict[fx.Node, Value], steps: Tensor, count: int, record: ScanRecord) -> Value:
    """A softmax that has exact zeros, and passes no gradient on, where its scores are -inf at a step.

    Only where nothing else is left in a row are these not what it has anyway.
    """
    scores = operand(node)
    keep = _from(record.settled[node], scores, steps)
    value = torch.where(keep, spread(operands[scores], count), -torch.inf)
    weights, _ = apply_at_steps(node, {**operands, scores: (value, True)})
    return torch.where(keep, weights, 0.0), True


def _from(first: Tensor, node: fx.Node, steps: Tensor) -> Tensor:
    """Which elements of a node count at each of `steps`, given the step from which on they do."""
    return steps.reshape(-1, *[1] * example(node).dim()) >= first.to(steps.device)


def _together(x: Tensor) -> Tensor:
    """One query at each step, as queries of one sequence: `[S, N, 1, ...]` -> `[N, S, ...]`."""
    return x.squeeze(2).transpose(0, 1)


def _apart(x: Tensor) -> Tensor:
    """The other way round."""
    return x.transpose(0, 1).unsqueeze(2)


def _fold(x: Tensor, sequences: int) -> Tensor:
    """Sequences of their own for each step: `[S, N|1, 1, ...]` -> `[S * N, 1, ...]`."""
    return x.expand(x.shape[0], sequences, *x.shape[2:]).flatten(0, 1)


def _slopes(value: np.ndarray) -> list[int] | None:
    """The step along each axis of a table that is linear in its indices, or None if it is not."""
    first = value[(0,) * value.ndim]
    slopes = [int(np.take(value, min(1, size - 1), axis).flat[0] - first) for axis, size in enumerate(value.shape)]
    grid = sum(
        np.arange(size).reshape([-1 if a == axis else 1 for a in range(value.ndim)]) * slope
        for axis, (size, slope) in enumerate(zip(value.shape, slopes, strict=True))
    )
    return slopes if np.array_equal(value, grid + first) else None


def _windows(rows: Tensor, index: np.ndarray) -> Tensor | None:
    """Rows `[count, width, ...]` by an index `[count, width]` of windows that move on by as many rows at each step.

    They are joined from pieces that each lie in the rows at even distances: the gradient of a row is then the sum of a
    few tensors, where that of picked rows is gathered by additions in whatever order a GPU makes them.
    """
    slopes = _slopes(index)
    if slopes is None or slopes[0] <= 0 or slopes[1] != 1:
        return None
    (count, width), stride = index.shape, slopes[0]
    size = math.gcd(width, stride)
    if width // size > _SLICED:
        return None
    first = int(index[0, 0])
    pieces = rows[first : first + (count - 1) * stride + width].unflatten(0, (-1, size))
    step, last = stride // size, (count - 1) * (stride // size)
    return torch.cat([pieces[i : i + last + 1 : step] for i in range(width // size)], dim=1)


def _evenly_spaced(rows: np.ndarray) -> bool:
    steps = np.diff(rows)
    return len(steps) > 0 and steps[0] > 0 and bool((steps == steps[0]).all())


def _take(tensor: Tensor, rows: list[int], constant: Any) -> Tensor:
    if len(rows) == 1:
        return tensor[rows[0] : rows[0] + 1]
    if _evenly_spaced(np.array(rows)):
        return tensor[rows[0] : rows[-1] + 1 : rows[1] - rows[0]]
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

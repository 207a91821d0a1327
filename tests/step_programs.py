"""A grammar of step programs: what `nsa_compile.scan` may meet, and what the compiler owes each of them.

A drawn program is Python source, so that a failure can be read, pasted and run. It is assembled from *units*, each a
carry or two with their update and their readers, and each with a claim on the compiler:

    "batched"        the scan must go and no guard may stay: the proof is within the compiler's promise
    "correct"        batched, guarded or declined, as the compiler likes: only the numbers count
    "not_unguarded"  some step reads rows that only later steps write, or the carry is a real recurrence: a guard must
                     stay, or the loop must be declined, with a reason
    "declined"       no guard can help: the loop must be declined, with a reason

The claim on a program is the strongest of its units'. The claims themselves are tested in `test_step_programs.py`, by
running every step on caches that already hold the future.
"""

from __future__ import annotations

import itertools
import linecache
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

CLAIMS = ("batched", "correct", "not_unguarded", "declined")  # in ascending strength


@dataclass(frozen=True)
class Program:
    """One drawn program.

    Attributes:
        source: defines `run(scan, init, xs, w)`, which builds the step and calls `scan(step, init, xs)`.
        claim: what the compiler owes it, one of `CLAIMS`.
        init_shapes, xs_shapes: shapes of the carries and inputs that come from outside and require a gradient.
        w_shape: shape of the parameter that the step closes over.
        caches: carries that are written row by row, each row once.
        random: the step draws random numbers, so its values cannot be compared.
        strided: the inputs are transposed views.
    """

    source: str
    claim: str
    init_shapes: dict[str, tuple[int, ...]]
    xs_shapes: dict[str, tuple[int, ...]]
    w_shape: tuple[int, ...]
    caches: tuple[str, ...]
    random: bool = False
    strided: bool = False

    def __repr__(self) -> str:
        return f"<claim: {self.claim}>\n{self.source}"

    def build(self, seed: int = 0) -> tuple[Callable, dict[str, Tensor], dict[str, Tensor], Tensor]:
        """`run` and its arguments `init`, `xs` and `w`: float64 leaves that require a gradient."""
        rng = torch.Generator().manual_seed(seed)

        def leaf(shape: tuple[int, ...]) -> Tensor:
            x = torch.randn(*reversed(shape), generator=rng, dtype=torch.float64).permute(*reversed(range(len(shape))))
            return (x if self.strided else x.contiguous()).requires_grad_()

        init = {name: leaf(shape) for name, shape in self.init_shapes.items()}
        xs = {name: leaf(shape) for name, shape in self.xs_shapes.items()}
        # The source is registered so that stack traces, and with them the compiler's declines, can quote it.
        filename = f"<step program {zlib.crc32(self.source.encode()):08x}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math}
        exec(compile(self.source, filename, "exec"), namespace)
        return namespace["run"], init, xs, leaf(self.w_shape)


# ----------------------------------------------------------------------------------------------------------- judges


def loop(step: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
    """The meaning of a scan: a loop. Deliberately not `nsa_compile.scan`."""
    carry, ys = init, []
    leaves, spec = pytree.tree_flatten(xs)
    for t in range(leaves[0].shape[0]):
        carry, y = step(carry, pytree.tree_unflatten([x[t] for x in leaves], spec))
        ys.append(y)
    return carry, pytree.tree_map(lambda *rows: torch.stack(rows), *ys)


def loop_over_the_future(caches: tuple[str, ...]) -> Callable:
    """A scan whose every step finds its caches filled with what they hold at the end: what batching does when it
    drops the guards. Equal to `loop` exactly where dropping them is right."""

    def scan(step: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
        final, _ = loop(step, init, xs)
        carry, ys = init, []
        leaves, spec = pytree.tree_flatten(xs)
        for t in range(leaves[0].shape[0]):
            x = pytree.tree_unflatten([leaf[t] for leaf in leaves], spec)
            _, y = step({name: final[name] if name in caches else value for name, value in carry.items()}, x)
            carry, _ = step(carry, x)
            ys.append(y)
        return final, pytree.tree_map(lambda *rows: torch.stack(rows), *ys)

    return scan


def values_and_grads(run: Callable, scan: Callable, init: dict, xs: dict, w: Tensor) -> tuple[list, list]:
    """All outputs of `run`, and the gradients of a fixed random projection of them to everything that came in."""
    outputs = pytree.tree_leaves(run(scan, init, xs, w))
    rng = torch.Generator().manual_seed(1)
    # A weight for every output, so that whether an output carries a gradient does not shift the weights of the others.
    floats = [out for out in outputs if out.is_floating_point()]
    weights = [torch.randn(out.shape, generator=rng, dtype=out.dtype) for out in floats]
    loss = sum((out * weight).sum() for out, weight in zip(floats, weights, strict=True) if out.requires_grad)
    inputs = [*init.values(), *xs.values(), w]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    # A gradient that does not exist and one that is zero mean the same.
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
    return [out.detach() for out in outputs], grads


def run_loop(program: Program, seed: int = 0) -> tuple[list, list]:
    """Outputs and gradients of the program as a plain float64 loop: the judge."""
    run, *args = program.build(seed)
    return values_and_grads(run, loop, *args)


# ------------------------------------------------------------------------------------------------------------ source


@dataclass
class Layout:
    """Where the rows of a buffer are, and how it meets one token's vector.

    plain: vectors [D], buffers [R, D]. heads: vectors [B, G, D], buffers [B, R, G, D], scores [B, G, R].
    """

    batch: int  # 0 means plain
    groups: int
    dim: int

    @property
    def plain(self) -> bool:
        return self.batch == 0

    @property
    def vector(self) -> tuple[int, ...]:
        return (self.dim,) if self.plain else (self.batch, self.groups, self.dim)

    @property
    def row_dim(self) -> int:
        return 0 if self.plain else 1

    def buffer(self, rows: int) -> tuple[int, ...]:
        return (rows, self.dim) if self.plain else (self.batch, rows, self.groups, self.dim)

    def one_row(self, name: str) -> str:
        return f"{name}[None]" if self.plain else f"{name}[:, None]"

    def over_rows(self, mask: str) -> str:
        return f"({mask})[:, None]" if self.plain else f"({mask})[:, None, None]"


@dataclass
class Writer:
    """The source of a program while it is drawn."""

    draw: Callable
    layout: Layout
    S: int
    lines: list[str] = field(default_factory=list)
    carry: dict[str, str] = field(default_factory=dict)  # name -> source of its first value
    update: dict[str, str] = field(default_factory=dict)  # name -> source of its next value
    init_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ys: list[str] = field(default_factory=list)
    vectors: list[str] = field(default_factory=list)  # sources of values of the vector's shape
    caches: list[str] = field(default_factory=list)
    claim: str = "batched"
    random: bool = False
    names: Any = field(default_factory=itertools.count)
    time: str = 'x["t"]'

    def pick(self, *choices):
        return self.draw(st.sampled_from(choices))

    def name(self, prefix: str) -> str:
        return f"{prefix}{next(self.names)}"

    def let(self, prefix: str, source: str) -> str:
        name = self.name(prefix)
        self.lines.append(f"{name} = {source}")
        return name

    def demand(self, claim: str) -> None:
        self.claim = max(self.claim, claim, key=CLAIMS.index)

    def value(self) -> str:
        """A vector of this step: an input, something computed from one, or the output of an earlier unit."""
        v = self.pick(*self.vectors)
        return self.pick(v, f"{v} * 2", f"({v} @ w)", f"torch.tanh({v})")

    def emit(self, source: str) -> None:
        """Make a vector an output of the step and available to later units."""
        name = self.let("y", source)
        self.ys.append(name)
        self.vectors.append(name)

    def new_carry(self, prefix: str, shape: tuple[int, ...], first: str | None = None) -> str:
        """A carry that starts from zeros, a constant, or an input that requires a gradient."""
        name = self.name(prefix)
        if first is None:
            first = self.pick("zeros", "constant", "input")
        if first == "input":
            self.init_shapes[name] = shape
            self.carry[name] = f'init["{name}"]'
        else:
            fill = "0.0" if first == "zeros" else "0.7"
            self.carry[name] = f"torch.full({shape}, {fill}, dtype=torch.float64)"
        self.lines.append(f'{name} = carry["{name}"]')
        return name


# ------------------------------------------------------------------------------------------------------------ caches


@dataclass(frozen=True)
class Schedule:
    """When the rows of a write-once cache are written. Row r is written at step `written(r)`, or never."""

    rows: int
    slot: str
    predicate: str | None
    written: str  # source, with r = torch.arange(rows)
    first_row_early: bool  # some row is readable from the first step on, once the step has written


def draw_schedule(p: Writer) -> Schedule:
    kind = p.pick("every step", "every d", "prefix", "reverse")
    spare = p.pick(0, 2)
    t = p.time
    if kind == "every step":
        return Schedule(p.S + spare, t, None, "r", True)
    if kind == "reverse":
        return Schedule(p.S, f"{p.S - 1} - {t}", None, f"{p.S - 1} - r", True)
    if kind == "prefix":  # two rows are there before the first step
        return Schedule(p.S + 2 + spare, f"({t} + 2)", None, "r - 2", True)
    d = p.pick(2, 3)
    predicate = p.pick(f"({t} + 1) % {d} == 0", f"{t} % {d} == {d - 1}")
    return Schedule(p.S // d + 1 + spare, f"{t} // {d}", predicate, f"(r + 1) * {d} - 1", False)


def append(p: Writer, buf: str, new: str, s: Schedule) -> str:
    """The name of `buf` with one row written, in one of the ways people write a row."""
    lay, dim = p.layout, p.layout.row_dim
    new = p.let("row", new)
    forms = ["where", "index_copy", "scatter"] + (["index_put"] if lay.plain else [])
    form = p.pick(*forms)
    if form == "where":
        mask = f"torch.arange({s.rows}) == {s.slot}"
        if s.predicate and p.pick(True, False):  # the predicate inside the mask
            return p.let(
                "buf", f"torch.where({lay.over_rows(f'({mask}) & ({s.predicate})')}, {lay.one_row(new)}, {buf})"
            )
        written = f"torch.where({lay.over_rows(mask)}, {lay.one_row(new)}, {buf})"
    elif form == "index_copy":
        written = f"torch.index_copy({buf}, {dim}, ({s.slot})[None], {lay.one_row(new)})"
    elif form == "index_put":
        written = f"torch.index_put({buf}, ({s.slot},), {new})"
    else:
        row = f"{lay.one_row(new)}"
        shape = lay.buffer(1)
        written = f"torch.scatter({buf}, {dim}, ({s.slot}).expand({shape}), {row})"
    if s.predicate:
        written = f"torch.where({s.predicate}, {written}, {buf})"
    return p.let("buf", written)


def scores(p: Writer, q: str, k: str, grouped: bool) -> str:
    scale = p.pick("", f" / {math.sqrt(p.layout.dim)!r}")
    if p.layout.plain:
        source = p.pick(f"({k} @ {q})", f"({k} * {q}).sum(-1)", f'torch.einsum("rd,d->r", {k}, {q})')
    elif grouped:
        source = p.pick(f"({q} @ {k}.permute(0, 2, 3, 1))", f'torch.einsum("bghd,brgd->bghr", {q}, {k})')
    else:
        source = p.pick(
            f"({k}.transpose(1, 2) @ {q}[..., None]).squeeze(-1)", f'torch.einsum("bgd,brgd->bgr", {q}, {k})'
        )
    return p.let("s", source + scale)


def weighted_sum(p: Writer, prob: str, v: str, grouped: bool) -> str:
    if p.layout.plain:
        return f"{prob} @ {v}"
    if grouped:
        return f"({prob} @ {v}.transpose(1, 2)).sum(2)"
    return f'torch.einsum("bgr,brgd->bgd", {prob}, {v})'


def attention(p: Writer, k: str, v: str, keep: str, *, a_column_is_kept: bool, form: str | None = None) -> None:
    """Attention of one token over a cache under the mask `keep` [rows]; emits a vector, raises the claim."""
    grouped = not p.layout.plain and p.pick(False, True)
    q = p.let("q", p.value())
    if grouped:
        # Not q and -q: over two rows their weights would add up to one for each, whatever the scores are.
        q = p.let("q", f"torch.stack([{q}, -2 * {q}], 2)")
    keep = p.let("keep", keep)

    if form is None:
        with_post_mask = ["min * mask", "min, where"]
        form = p.pick(
            *with_post_mask, *(["-inf", "where -inf", "additive", "sdpa", "-1e9"] if a_column_is_kept else [])
        )
    if form == "sdpa":
        if p.layout.plain:
            p.emit(
                f"F.scaled_dot_product_attention({q}[None, None], {k}[None], {v}[None], "
                f"attn_mask={keep}[None, None])[0, 0]"
            )
        else:
            q3 = q if grouped else f"{q}[:, :, None]"
            k, v = f"{k}.transpose(1, 2)", f"{v}.transpose(1, 2)"
            p.emit(f"F.scaled_dot_product_attention({q3}, {k}, {v}, attn_mask={keep}[None]).sum(2)")
        return

    s = scores(p, q, k, grouped)
    if form == "-inf":
        s = p.let("s", f'{s}.masked_fill(~{keep}, float("-inf"))')
    elif form == "where -inf":
        s = p.let("s", f'torch.where({keep}, {s}, float("-inf"))')
    elif form == "additive":
        s = p.let("s", f'{s} + torch.zeros({keep}.shape, dtype=torch.float64).masked_fill(~{keep}, float("-inf"))')
    elif form == "-1e9":
        s = p.let("s", f"{s}.masked_fill(~{keep}, -1e9)")
        p.demand("correct")
    elif form in ("min * mask", "min, where", "min"):
        s = p.let("s", f"torch.where({keep}, {s}, torch.finfo({s}.dtype).min)")
    elif form == "scores * mask":
        s = p.let("s", f"{s} * {keep}")
    prob = p.let("p", f"torch.softmax({s}, -1)")
    if form in ("min * mask", "mask after only"):
        prob = p.let("p", f"{prob} * {keep}")
    elif form == "min, where":
        prob = p.let("p", f"torch.where({keep}, {prob}, 0.0)")
    p.emit(weighted_sum(p, prob, v, grouped))


def kv_cache(p: Writer) -> tuple[Schedule, str, str, str, str]:
    """A key and a value cache on one schedule; returns their names before and after this step's write."""
    s = draw_schedule(p)
    k = p.new_carry("k", p.layout.buffer(s.rows))
    v = p.new_carry("v", p.layout.buffer(s.rows))
    p.caches += [k, v]
    new_k, new_v = append(p, k, p.value(), s), append(p, v, p.value(), s)
    p.update |= {k: new_k, v: new_v}
    p.lines.append(f"r = torch.arange({s.rows})")
    return s, k, v, new_k, new_v


def with_window(p: Writer, keep: str, s: Schedule) -> str:
    if not s.first_row_early or p.pick(False, True):
        return keep
    strictly_past = keep.endswith((f"< {p.time}", f">= {p.time})"))
    # A window of one row of the strict past would hold none, and what reads it would be zero whatever leaks.
    return f"({keep}) & ({s.written} > {p.time} - {p.pick(2, 4) if strictly_past else p.pick(1, 2, 4)})"


# ------------------------------------------------------------------------------------------------- units, by claim


def causal_attention(p: Writer) -> None:
    """Right masks: nothing after t is seen, and the row of t itself only once it has been written."""
    s, k, v, new_k, new_v = kv_cache(p)
    t = p.time
    if p.pick("after", "before") == "before":
        keep, kept = p.pick(f"{s.written} < {t}", f"~({s.written} >= {t})"), False
        k_read, v_read = k, v
    else:
        keep = p.pick(f"{s.written} <= {t}", f"~({s.written} > {t})", f"{s.written} < {t} + 1", f"{s.written} < {t}")
        kept = s.first_row_early and not keep.endswith(f"< {t}")
        k_read, v_read = new_k, new_v
    attention(p, k_read, v_read, with_window(p, keep, s), a_column_is_kept=kept)


def selected_attention(p: Writer) -> None:
    """Eq. 11 and 12 in small: the best rows, chosen by data, in conjunction with the causal mask."""
    s, _, _, k, v = kv_cache(p)
    causal = p.let("causal", f"{s.written} <= {p.time}")
    q = p.let("q", p.value())
    score = scores(p, q, k, False)
    score = p.let("s", f'torch.where({causal}, {score}, float("-inf")).detach()')
    top = p.let("top", f"torch.topk({score}, {min(2, s.rows)}, dim=-1).indices")
    chosen = p.let("chosen", f"torch.zeros_like({score}, dtype=torch.bool).scatter(-1, {top}, True)")
    keep = p.let("keep", f"{chosen} & {causal}")
    s2 = p.let("s", f"torch.where({keep}, {scores(p, q, k, False)}, torch.finfo(torch.float64).min)")
    prob = p.let("p", f"torch.softmax({s2}, -1) * {keep}")
    p.emit(weighted_sum(p, prob, v, False))


def shift_register(p: Writer) -> None:
    """The last w vectors, oldest first."""
    w = p.pick(2, 3, 5)
    reg = p.new_carry("reg", (w, *p.layout.vector))
    row = p.let("row", p.value())
    forms = {
        "cat": f"torch.cat([{reg}[1:], {row}[None]])",
        "roll": f"torch.roll({reg}, -1, 0).slice_scatter({row}[None], 0, {w - 1}, {w})",
        "cat, then cut": f"torch.cat([{reg}, {row}[None]])[1:]",
    }
    form = p.pick(*forms)
    if form == "cat, then cut":
        p.demand("correct")
    new = p.update[reg] = p.let("reg", forms[form])
    read = p.pick(new, new, reg)
    p.emit(p.pick(f"{read}.mean(0)", f"{read}[0] - {read}[-1]", f"{read}.amax(0)", f"torch.softmax({read}, 0).sum(0)"))


def ring_buffer(p: Writer) -> None:
    """The last w vectors, wherever t % w has put them."""
    w = p.pick(2, 3)
    ring = p.new_carry("ring", (w, *p.layout.vector))
    row = p.let("row", p.value())
    slot = f"{p.time} % {w}"
    mask = f"(torch.arange({w}) == {slot}).view({(w, *[1] * len(p.layout.vector))})"
    new = p.let(
        "ring",
        p.pick(
            f"torch.index_copy({ring}, 0, ({slot})[None], {row}[None])",
            f"torch.where({mask}, {row}[None], {ring})",
        ),
    )
    p.update[ring] = new
    p.emit(p.pick(f"{new}.sum(0)", f"torch.index_select({ring}, 0, ({slot})[None])[0]", f"{new}.amax(0)"))


def counter(p: Writer) -> None:
    """A counter of steps; later units may use it as their clock."""
    name, start = p.name("i"), 0
    p.carry[name] = f"torch.tensor({start})"
    p.lines.append(f'{name} = carry["{name}"]')
    p.update[name] = f"{name} + 1"
    p.time = name
    p.emit(f"{p.value()} * {name}")


def invariant(p: Writer) -> None:
    name = p.new_carry("inv", p.layout.vector)
    p.update[name] = name
    p.emit(f"{p.value()} * {name}")


def delay(p: Writer) -> None:
    """The value of the last step, or of the one before."""
    last = p.new_carry("last", p.layout.vector)
    p.update[last] = p.let("now", p.value())
    read = last
    if p.pick(False, True):
        older = p.new_carry("older", p.layout.vector)
        p.update[older] = last
        read = older
    p.emit(f"{read} - {p.value()}")


def landmark(p: Writer) -> None:
    """One constant row, written at one known step."""
    rows, when = p.pick(2, 3), p.pick(1, 0, 2)
    row = p.pick(0, 1)
    lay, dim = p.layout, p.layout.row_dim
    buf = p.new_carry("k", lay.buffer(rows))
    p.caches.append(buf)
    new = p.let("row", p.value())
    written = f"{buf}.slice_scatter({lay.one_row(new)}, {dim}, {row}, {row + 1})"
    p.update[buf] = p.let("buf", f"torch.where({p.time} == {when}, {written}, {buf})")
    p.lines.append(f"r = torch.arange({rows})")
    k = p.update[buf]
    attention(p, k, k, f"(r != {row}) | ({p.time} >= {when})", a_column_is_kept=True)


BATCHED = (causal_attention, selected_attention, shift_register, ring_buffer, counter, invariant, delay, landmark)


def finite_fill(p: Writer) -> None:
    """A fill that is only nearly -inf. Right as long as a column is kept; it need not be proven."""
    s, _, _, k, v = kv_cache(p)
    form = p.pick("-1e9", "min")
    if s.first_row_early:
        attention(p, k, v, f"{s.written} <= {p.time}", a_column_is_kept=True, form=form)
        p.demand("correct")
    else:  # with no column kept, the fill is all there is: a uniform mean over the whole cache, future included
        attention(p, k, v, f"{s.written} <= {p.time}", a_column_is_kept=False, form=form)
        p.demand("not_unguarded")


def masked_pooling(p: Writer) -> None:
    s, _, _, k, _ = kv_cache(p)
    keep = p.layout.over_rows(f"{s.written} <= {p.time}")
    dim = p.layout.row_dim
    p.emit(p.pick(f"({k} * {keep}).sum({dim})", f"torch.where({keep}, {k}, 0.0).sum({dim})"))
    p.demand("correct")


def own_row(p: Writer) -> None:
    s, _, _, k, _ = kv_cache(p)
    p.emit(f"torch.index_select({k}, {p.layout.row_dim}, ({s.slot})[None]).squeeze({p.layout.row_dim})")
    p.demand("correct" if not s.predicate else "not_unguarded")


def accumulator(p: Writer) -> None:
    """Running sum or maximum: an associative scan, which the compiler may know or not."""
    acc = p.new_carry("acc", p.layout.vector)
    p.update[acc] = p.let("acc", p.pick(f"{acc} + {p.value()}", f"torch.maximum({acc}, {p.value()})"))
    p.emit(p.pick(acc, p.update[acc]))
    p.demand("correct")


def swap(p: Writer) -> None:
    a, b = p.new_carry("a", p.layout.vector), p.new_carry("b", p.layout.vector)
    p.update |= {a: b, b: a}
    p.emit(f"{a} * {p.value()}")
    p.demand("correct")


def overwritten_row(p: Writer) -> None:
    """A constant row, written by every step."""
    buf = p.new_carry("k", p.layout.buffer(2))
    row = p.layout.one_row(p.let("row", p.value()))
    p.update[buf] = p.let("buf", f"{buf}.slice_scatter({row}, {p.layout.row_dim}, 0, 1)")
    p.emit(f"{p.pick(buf, p.update[buf])}.sum({p.layout.row_dim})")
    p.demand("correct")


def two_rows_a_step(p: Writer) -> None:
    buf = p.new_carry("k", p.layout.buffer(2 * p.S))
    p.caches.append(buf)
    first = append(p, buf, p.value(), Schedule(2 * p.S, f"({p.time} * 2)", None, "r // 2", True))
    k = append(p, first, p.value(), Schedule(2 * p.S, f"({p.time} * 2 + 1)", None, "r // 2", True))
    p.update[buf] = k
    p.lines.append(f"r = torch.arange({2 * p.S})")
    attention(p, k, k, f"r // 2 <= {p.time}", a_column_is_kept=True)
    p.demand("correct")


CORRECT = (finite_fill, masked_pooling, own_row, accumulator, swap, overwritten_row, two_rows_a_step)


def leaking_mask(p: Writer) -> None:
    """A mask that keeps rows which are written later."""
    s, _, _, k, v = kv_cache(p)
    t = p.time
    leaks = {
        "off by one": f"{s.written} <= {t} + 1",
        "missing": "torch.ones_like(r, dtype=torch.bool)",
        "window only": f"{s.written} > {t} - 2",
    }
    if s.predicate:
        leaks |= {"another cache's clock": f"r <= {t}", "start instead of end": f"r * {s.written.split()[4]} <= {t}"}
    leak = p.pick(*leaks)
    kept = s.first_row_early or leak not in ("off by one", "window only")
    attention(p, k, v, leaks[leak], a_column_is_kept=kept)
    p.demand("not_unguarded")


def leaking_softmax(p: Writer) -> None:
    """A right mask, applied where it does not silence what it hides."""
    s, _, _, k, v = kv_cache(p)
    form = p.pick("mask after only", "scores * mask")
    attention(p, k, v, f"{s.written} <= {p.time}", a_column_is_kept=False, form=form)
    p.demand("not_unguarded")


def read_before_write(p: Writer) -> None:
    """The mask of the cache after the write, on the cache before it: row t holds its first value, not the token."""
    s, k, v, new_k, new_v = kv_cache(p)
    reads = p.pick((k, v), (k, new_v), (new_k, v))
    attention(p, *reads, f"{s.written} <= {p.time}", a_column_is_kept=s.first_row_early)
    p.demand("not_unguarded")


def late_values(p: Writer) -> None:
    """Values are appended one step after their keys; the mask knows about the keys only."""
    rows, t = p.S, p.time
    k, v = p.new_carry("k", p.layout.buffer(rows)), p.new_carry("v", p.layout.buffer(rows))
    p.caches += [k, v]
    p.update[k] = append(p, k, p.value(), Schedule(rows, t, None, "r", True))
    p.update[v] = append(p, v, p.value(), Schedule(rows, f"({t} - 1).clamp(min=0)", f"{t} >= 1", "r + 1", False))
    p.lines.append(f"r = torch.arange({rows})")
    attention(p, p.update[k], p.update[v], f"r <= {t}", a_column_is_kept=True)
    p.demand("not_unguarded")


def read_everything(p: Writer) -> None:
    """All rows, without a mask."""
    _, k, _, new_k, _ = kv_cache(p)
    dim = p.layout.row_dim
    buf = p.pick(new_k, k)
    p.emit(
        p.pick(
            f"{buf}.sum({dim})",
            f"{buf}.mean({dim})",
            f"{buf}.amax({dim})",
            f"torch.softmax({buf}, {dim}).select({dim}, 0)",
        )
    )
    p.demand("not_unguarded")


def read_ahead(p: Writer) -> None:
    """Rows beyond the one this step writes."""
    rows, dim = p.S, p.layout.row_dim
    buf = p.new_carry("k", p.layout.buffer(rows))
    p.caches.append(buf)
    k = append(p, buf, p.value(), Schedule(rows, p.time, None, "r", True))
    p.update[buf] = k
    ahead = f"({p.time} + 1).clamp(max={rows - 1})[None]"
    p.emit(p.pick(f"{k}.select({dim}, {rows - 1})", f"torch.index_select({k}, {dim}, {ahead}).squeeze({dim})"))
    p.demand("not_unguarded")


def gathered_rows(p: Writer) -> None:
    """Rows picked one by one, by numbers that run ahead or that nobody knows."""
    rows, dim = p.S, p.layout.row_dim
    buf = p.new_carry("k", p.layout.buffer(rows))
    p.caches.append(buf)
    k = append(p, buf, p.value(), Schedule(rows, p.time, None, "r", True))
    p.update[buf] = k
    row = p.pick(
        f"({p.time} + 1).clamp(max={rows - 1})",
        f"{rows - 1} - {p.time}",
        f"({p.vectors[0]} > 0).sum().clamp(max=3) + {rows - 4}",
    )
    p.emit(f"torch.gather({k}, {dim}, ({row}).expand({p.layout.buffer(1)})).squeeze({dim})")
    p.demand("not_unguarded")


def emptied_mask(p: Writer) -> None:
    """What one mask keeps at the first step, another has removed: the softmax is left with the fill of later rows."""
    s, _, _, k, v = kv_cache(p)
    score = scores(p, p.let("q", p.value()), k, False)
    score = p.let("s", f'{score}.masked_fill({s.written} <= 0, float("-inf"))')
    score = p.let("s", f"torch.where({s.written} <= {p.time}, {score}, torch.finfo(torch.float64).min)")
    p.emit(weighted_sum(p, p.let("p", f"torch.softmax({score}, -1)"), v, False))
    p.demand("not_unguarded")


def floored_scores(p: Writer) -> None:
    """What the causal mask keeps at the first step is at the floor already, by a bias: no mask says that."""
    s, _, _, k, v = kv_cache(p)
    score = scores(p, p.let("q", p.value()), k, False)
    early = f"({s.written} <= 0)"
    form = p.pick(
        f'{score} + torch.where({early}, float("-inf"), 0.0)',
        f"{score} + {early}.double() * torch.finfo(torch.float64).min",
        f"{score} + torch.log(1.0 - {early}.double())",
    )
    score = p.let("s", f"torch.where({s.written} <= {p.time}, {form}, torch.finfo(torch.float64).min)")
    p.emit(weighted_sum(p, p.let("p", f"torch.softmax({score}, -1)"), v, False))
    p.demand("not_unguarded")


def padded_weights(p: Writer) -> None:
    """Weights padded with a constant: the last rows are read at full weight at every step."""
    s, _, _, k, v = kv_cache(p)
    keep = p.let("keep", f"{s.written} <= {p.time}")
    score = scores(p, p.let("q", p.value()), k, False)
    score = p.let("s", f"torch.where({keep}, {score}, torch.finfo(torch.float64).min)")
    prob = p.let("p", f"torch.where({keep}, torch.softmax({score}, -1), 0.0)")
    prob = p.let("p", f"F.pad({prob}[..., {p.S}:], ({min(p.S, s.rows)}, 0), value={p.pick(1.0, 20.0)})")
    p.emit(weighted_sum(p, prob, v, False))
    p.demand("not_unguarded")


NOT_UNGUARDED = (
    leaking_mask,
    leaking_softmax,
    read_before_write,
    late_values,
    read_everything,
    read_ahead,
    gathered_rows,
    emptied_mask,
    floored_scores,
    padded_weights,
)


def recurrence(p: Writer) -> None:
    h = p.new_carry("h", p.layout.vector)
    p.update[h] = p.let("h", f"torch.tanh({h} @ w + {p.value()})")
    p.emit(p.update[h])
    p.demand("declined")


def cache_recurrence(p: Writer) -> None:
    """Every row is computed from the rows before it."""
    rows = p.S
    buf = p.new_carry("k", p.layout.buffer(rows))
    p.lines.append(f"r = torch.arange({rows})")
    attention(p, buf, buf, f"r < {p.time}", a_column_is_kept=False)
    k = append(p, buf, f"{p.vectors[-1]} + {p.value()}", Schedule(rows, p.time, None, "r", True))
    p.update[buf] = k
    p.demand("declined")


def data_dependent_write(p: Writer) -> None:
    """Nobody knows before the run which row is written, or whether."""
    rows, x = p.S, p.pick(*p.vectors)
    buf = p.new_carry("k", p.layout.buffer(rows))
    slot = f"(({x} > 0).sum() % {rows})"
    where, when = p.pick((slot, None), (p.time, f"{x}.sum() > 0"))
    k = append(p, buf, p.value(), Schedule(rows, where, when, "r", True))
    p.update[buf] = k
    p.lines.append(f"r = torch.arange({rows})")
    attention(p, k, k, f"r <= {p.time}", a_column_is_kept=True)
    p.demand("declined")


def randomness(p: Writer) -> None:
    last = p.new_carry("last", p.layout.vector)
    x = p.value()
    p.update[last] = p.let("now", p.pick(f"{x} * torch.rand_like({x})", f"F.dropout({x}, 0.5)"))
    p.emit(f"{last} * 2")
    p.random = True
    p.demand("declined")


def mutual_recurrence(p: Writer) -> None:
    """Two carries, neither of which is computed from itself."""
    a, b = p.new_carry("a", p.layout.vector), p.new_carry("b", p.layout.vector)
    p.update |= {a: p.let("a", f"torch.tanh({b} @ w + {p.value()})"), b: p.let("b", f"{a} * {p.value()}")}
    p.emit(a)
    p.demand("declined")


DECLINED = (recurrence, mutual_recurrence, cache_recurrence, data_dependent_write, randomness)

UNITS = {"batched": BATCHED, "correct": CORRECT, "not_unguarded": NOT_UNGUARDED, "declined": DECLINED}


# ---------------------------------------------------------------------------------------------------------- strategy


@st.composite
def step_programs(draw, kind: str | None = None) -> Program:
    """Programs of one to three units: one of the given kind, the rest such as can be batched."""
    if kind is None:
        kind = draw(st.sampled_from(CLAIMS))
    layout = Layout(draw(st.sampled_from([0, 1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 3])))
    p = Writer(draw, layout, S=draw(st.integers(6, 9)))  # two blocks of three tokens
    p.vectors = ['x["a"]', 'x["b"]']

    units = draw(st.lists(st.sampled_from(BATCHED), max_size=2))
    units.insert(draw(st.integers(0, len(units))), draw(st.sampled_from(UNITS[kind])))
    for unit in units:
        p.lines.append(f"# {unit.__name__.replace('_', ' ')}")
        unit(p)

    carry = ", ".join(f'"{name}": {first}' for name, first in p.carry.items())
    update = ", ".join(f'"{name}": {p.update[name]}' for name in p.carry)
    source = "\n".join(
        [
            "def run(scan, init, xs, w):",
            "    def step(carry, x):",
            *(f"        {line}" for line in p.lines),
            f"        return {{{update}}}, ({', '.join(p.ys)},)",
            "",
            f'    xs = {{**xs, "t": torch.arange({p.S})}}',
            f"    return scan(step, {{{carry}}}, xs)",
            "",
        ]
    )
    D = layout.dim
    return Program(
        source=source,
        claim=p.claim,
        init_shapes=p.init_shapes,
        xs_shapes={"a": (p.S, *layout.vector), "b": (p.S, *layout.vector)},
        w_shape=(D, D),
        caches=tuple(p.caches),
        random=p.random,
        strided=draw(st.booleans()),
    )

"""Steps with attention in the forms people write it, as source: what the passes on attention may meet.

A program is one step around a key and a value cache, put together from pieces, so that a near miss is a right program
with one piece changed. Three layouts:

    plain    q [D]          caches [T, D]         scores [T]
    heads    q [B, Hq, D]   caches [B, G, T, D]   scores [B, Hq, 1, T]
    tokens   q [B, G, h, D] caches [B, T, G, D]   scores [B, G, h, T]
"""

from __future__ import annotations

import linecache
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import nsa_compile
from nsa_compile.passes.report import PassReport, Report
from tests.step_programs import loop, values_and_grads

B, G, h, D, Dv = 2, 2, 2, 3, 2
SCALE = 0.6

Outputs = tuple[list[Tensor], list[Tensor]]  # values, gradients


# ----------------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Layout:
    """Shapes of a token, and the ways to write both products; `kk` and `vv` are the caches, one head a query head."""

    query: tuple[int, ...]
    key: tuple[int, ...]  # of one token; the value's has Dv in the place of D
    row_dim: int
    scores: tuple[str, ...]
    outs: tuple[str, ...]
    sdpa: str
    data: tuple[tuple[int, ...], ...]  # shapes of a mask that is data, without its last dimension

    def cache(self, rows: int, width: int) -> tuple[int, ...]:
        shape = [*self.key[:-1], width]
        shape.insert(self.row_dim, rows)
        return tuple(shape)


LAYOUTS = {
    "plain": Layout(
        (D,),
        (D,),
        0,
        (
            "k @ q",
            "q @ k.T",
            "torch.matmul(k, q)",
            'torch.einsum("d,td->t", q, k)',
            'torch.einsum("td,d->t", k, q)',
            "torch.mm(q[None], k.T)[0]",
        ),
        ("p @ v", "torch.matmul(p, v)", 'torch.einsum("t,td->d", p, v)', "torch.mm(p[None], v)[0]", "v.T @ p"),
        "F.scaled_dot_product_attention(q[None, None], k[None], v[None], {})[0, 0]",
        ((),),
    ),
    "heads": Layout(
        (B, G * h, D),
        (B, G, D),
        2,
        (
            "q[:, :, None] @ kk.transpose(-1, -2)",
            "torch.matmul(q[:, :, None], kk.mT)",
            'torch.einsum("bhd,bhtd->bht", q, kk)[:, :, None]',
            'torch.einsum("bhtd,bhd->bht", kk, q)[:, :, None]',
            "(kk @ q[..., None]).transpose(-1, -2)",
            "torch.bmm(q.flatten(0, 1)[:, None], kk.flatten(0, 1).mT).unflatten(0, q.shape[:2])",
        ),
        (
            "(p @ vv).squeeze(2)",
            "torch.matmul(p, vv)[:, :, 0]",
            'torch.einsum("bhqt,bhtd->bqhd", p, vv)[:, 0]',
            "torch.bmm(p.flatten(0, 1), vv.flatten(0, 1)).unflatten(0, q.shape[:2])[:, :, 0]",
        ),
        "F.scaled_dot_product_attention(q[:, :, None], k, v, {}, enable_gqa=True)[:, :, 0]",
        ((), (B, 1, 1), (B, G * h, 1)),
    ),
    "tokens": Layout(
        (B, G, h, D),
        (B, G, D),
        1,
        (
            'torch.einsum("bghd,btgd->bght", q, k)',
            'torch.einsum("btgd,bghd->bght", k, q)',
            "q @ k.permute(0, 2, 3, 1)",
            "torch.matmul(q, k.transpose(1, 2).transpose(-1, -2))",
            "torch.bmm(q.flatten(0, 1), k.transpose(1, 2).flatten(0, 1).mT).unflatten(0, q.shape[:2])",
        ),
        (
            'torch.einsum("bght,btgd->bghd", p, v)',
            "p @ v.transpose(1, 2)",
            "torch.matmul(p, v.transpose(1, 2))",
            "torch.bmm(p.flatten(0, 1), v.transpose(1, 2).flatten(0, 1)).unflatten(0, q.shape[:2])",
        ),
        "F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), {})",
        ((), (B, G, 1), (B, G, h)),
    ),
}


@dataclass(frozen=True)
class AttentionProgram:
    """One step around a cache.

    Attributes:
        layout: a key of `LAYOUTS`.
        lines: the step from `q`, `k`, `v`, `t` and `position` to `out`.
        S, rows: steps, and rows of the caches.
        written: the step that writes row `position`.
        mask: the mask as the report describes it, or None where attention need not be found.
        outside: keys and values come from outside, the same at all steps.
        outside_rows: rows of what comes from outside, where they are others.
        data: shape of a mask of numbers that each step is given as `m`.
        dtype, soft: of everything, and of the softmax where the lines say so.
    """

    layout: str
    lines: tuple[str, ...]
    S: int = 6
    rows: int = 6
    written: str = "position"
    mask: str | None = None
    outside: bool = False
    outside_rows: int | None = None
    data: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    soft: torch.dtype = torch.float64

    @property
    def source(self) -> str:
        lay = LAYOUTS[self.layout]
        over_rows = f"[:, {', '.join(['None'] * (len(lay.key) - lay.row_dim))}]"
        if self.outside:
            caches = [f"k, v = w[..., :{D}], w[..., {D}:]"]
        else:
            caches = [
                f"here = ({self.written} == t){over_rows}",
                f'k = torch.where(here, x["k"].unsqueeze({lay.row_dim}), k)',
                f'v = torch.where(here, x["v"].unsqueeze({lay.row_dim}), v)',
                "carry = k, v",
            ]
        step = ["k, v = carry", 't, q = x["t"], x["q"]', f"position = torch.arange({self.rows})", *caches, *self.lines]
        init = [f"w.new_zeros({lay.cache(self.rows, width)})" for width in (D, Dv)]
        return "\n".join(
            [
                "def run(scan, init, xs, w):",
                "    def step(carry, x):",
                *(f"        {line}" for line in step),
                "        return carry, out",
                "",
                f"    init = ({', '.join(init)})",
                f'    return scan(step, init, {{"t": torch.arange({self.S}), **xs}})[1]',
                "",
            ]
        )

    def __repr__(self) -> str:
        return f"<{self.mask}, {self.dtype}, softmax in {self.soft}>\n{self.source}"

    def build(self, seed: int = 0, exact: bool = False) -> tuple[Callable[..., Any], dict, dict[str, Tensor], Tensor]:
        """`run` and its arguments; with `exact`, the same numbers and the same program in float64."""
        lay = LAYOUTS[self.layout]
        rng = torch.Generator().manual_seed(seed)

        def leaf(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=rng, dtype=torch.float64).to(self.dtype)
            return (x.double() if exact else x).requires_grad_()

        value = (*lay.key[:-1], Dv)
        xs = {"q": leaf(self.S, *lay.query), "k": leaf(self.S, *lay.key), "v": leaf(self.S, *value)}
        w = leaf(*lay.cache(self.outside_rows or self.rows, D + Dv))
        if self.data is not None:
            xs["m"] = leaf(self.S, *self.data, self.rows)
        # The source is registered so that reports can quote its lines.
        filename = f"<attention program {zlib.crc32(self.source.encode()):08x}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        dtypes = {"DTYPE": self.dtype, "SOFT": self.soft} if not exact else {"DTYPE": xs["q"].dtype, "SOFT": w.dtype}
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math, "inf": math.inf, **dtypes}
        exec(compile(self.source, filename, "exec"), namespace)
        return namespace["run"], {}, xs, w


def attention(
    layout: str = "tokens",
    *,
    keep: str | None = "position <= t",
    keep_after: str = "keep",
    before: tuple[str, ...] = (),
    scores: str | None = None,
    scale: str = "s * 0.6",
    masked: str = "s.masked_fill(~keep, -inf)",
    late_scale: str = "s",
    softmax: str = "torch.softmax(s, -1)",
    post: str = "p.masked_fill(~after, 0.0)",
    cast: str = "p",
    out: str | None = None,
    **fields: Any,
) -> AttentionProgram:
    """Attention from its pieces, each in terms of the names of the ones before."""
    lay = LAYOUTS[layout]
    repeated = [f"{x}{x} = {x}.repeat_interleave({h}, 1)" for x in "kv"] if layout == "heads" else []
    lines = [
        *before,
        *repeated,
        *([] if keep is None else [f"keep = {keep}", f"after = {keep_after}"]),
        f"s = {scores or lay.scores[0]}",
        f"s = {scale}",
        *([] if keep is None else [f"s = {masked}"]),
        f"s = {late_scale}",
        f"p = {softmax}",
        *([] if keep is None else [f"p = {post}"]),
        f"p = {cast}",
        f"out = {out or lay.outs[0]}",
    ]
    return AttentionProgram(layout, tuple(lines), **fields)


COMPRESSED = 6  # lines of a selection that are the compressed attention
SCORE = "torch.where(allowed, torch.where(forced, math.inf, importance), -math.inf)"


def selection(
    *,
    S: int = 16,
    l: int = 4,  # noqa: E741
    d: int = 2,
    block: int = 4,
    n: int = 3,
    mass: str = "pc.detach().sum(2)",
    importance: str | None = None,
    allowed: str = "block <= current",
    forced: str = "(block < 1) | (block > current - 1)",
    score: str = SCORE,
    rank: str = "torch.sort(score, dim=-1, descending=True, stable=True)",
    first: str | None = None,
    taken: str = "best > -inf",
    chosen: str = "torch.zeros_like(score, dtype=torch.bool).scatter(-1, index, taken)",
    tokens: str | None = None,
    keep: str = "(tokens & (position <= t))[:, :, None]",
    out: str = "oc + o",
    **fields: Any,
) -> AttentionProgram:
    """Selected attention from its pieces: compressed keys from outside rank the blocks of `block` tokens of a cache."""
    compressed, blocks = (S - l) // d + 1, -(-S // block)
    overlap = {i - j for i in range(block // d) for j in range(l // d)}
    left, right = -min(overlap), max(0, block // d * (blocks - 1) + max(overlap) + 1 - compressed)
    terms = [
        f"{sum(i - j == o for i in range(block // d) for j in range(l // d))} * padded[..., {left + o} : "
        f"{left + o + block // d * (blocks - 1) + 1} : {block // d}]"
        for o in sorted(overlap)
    ]
    n = min(n, blocks)
    lines = (
        f"kc, vc = w[..., :{D}], w[..., {D}:]",
        f"visible = torch.arange({compressed}) * {d} + {l - 1} <= t",
        'sc = torch.einsum("bghd,bngd->bghn", q, kc) * 0.6',
        "pc = torch.softmax(sc.masked_fill(~visible, torch.finfo(sc.dtype).min), -1).masked_fill(~visible, 0.0)",
        'oc = torch.einsum("bghn,bngd->bghd", pc, vc)',
        f"block, current = torch.arange({blocks}), t // {block}",
        f"allowed = {allowed}",
        f"forced = {forced}",
        f"mass = {mass}",
        f"padded = F.pad(mass, ({left}, {right}))",
        f"importance = {importance or ' + '.join(terms)}",
        f"score = {score}",
        f"best, index = {rank}",
        f"best, index = {first or f'best[..., :{n}], index[..., :{n}]'}",
        f"taken = {taken}",
        f"chosen = {chosen}",
        f"tokens = {tokens or f'chosen.repeat_interleave({block}, -1)[..., :{S}]'}",
        f"keep = {keep}",
        'ss = torch.einsum("bghd,btgd->bght", q, k) * 0.5',
        "p = torch.softmax(ss.masked_fill(~keep, torch.finfo(ss.dtype).min), -1).masked_fill(~keep, 0.0)",
        'o = torch.einsum("bght,btgd->bghd", p, v)',
        f"out = {out}",
    )
    return AttentionProgram("tokens", lines, S=S, rows=S, outside_rows=compressed, **fields)


def together(programs: list[AttentionProgram], shared: int = 0) -> AttentionProgram:
    """Several programs of equal shapes as one step, with their first `shared` lines once: compiling takes its time."""
    head = programs[0].lines[:shared]
    assert all(p.lines[:shared] == head for p in programs)
    lines = [*head, "token, outs = (q, k, v), []"]
    for program in programs:
        lines += ["q, k, v = token", *program.lines[shared:], "outs.append(out)"]
    data = next((p.data for p in programs if p.data is not None), None)
    same = [replace(p, lines=(), mask=None, data=data) for p in programs]
    assert all(p == same[0] for p in same)
    return replace(same[0], lines=(*lines, "out = tuple(outs)"))


# ------------------------------------------------------------------------------------------------------------- judging


def run_compiled(program: Any, nested: str = "eager", seed: int = 0, **options: Any) -> tuple[Outputs, Report]:
    """Outputs and gradients through the compiler, and its report."""
    torch._dynamo.reset()
    run, *args = program.build(seed)
    options = {"nested": nested, "cache": False, **options}
    fast = torch.compile(run, backend="nsa_compile", fullgraph=True, dynamic=False, options=options)
    result = values_and_grads(lambda scan, *inputs: fast(nsa_compile.scan, *inputs), None, *args)
    report = nsa_compile.last_report()
    assert report is not None
    return result, report


def run_compiled_step(program: Any, nested: str = "eager", seed: int = 0, **options: Any) -> tuple[Outputs, Report]:
    """Outputs and gradients of a loop around the compiled step, which is given its position, and its report."""
    torch._dynamo.reset()
    run, *args = program.build(seed)

    def scan(step: Callable[..., Any], init: Any, xs: Any) -> Any:
        return loop(nsa_compile.compile(step, nested=nested, cache=False, **options), init, xs)

    result = values_and_grads(run, scan, *args)
    report = nsa_compile.last_report()
    assert report is not None
    return result, report


def assert_equals_loop(program: Any, actual: Outputs, seed: int = 0) -> None:
    """In float64, equal to the loop; in anything less, no further from the loop in float64 than the loop itself is."""
    run, *args = program.build(seed)
    expected = values_and_grads(run, loop, *args)
    assert all(x.isfinite().all() for x in expected[0] + expected[1]), "a test of numbers that are none"
    if program.dtype == program.soft == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
        return
    run, *args = program.build(seed, exact=True)
    exact = values_and_grads(run, loop, *args)
    eps = max(torch.finfo(x).eps for x in (program.dtype, program.soft))
    band = 4 * eps * max(float(x.abs().max()) for x in exact[0] + exact[1])
    for a, e, x in zip(actual[0] + actual[1], expected[0] + expected[1], exact[0] + exact[1], strict=True):
        assert a.dtype == e.dtype
        assert float((a.double() - x).abs().max()) <= 2 * float((e.double() - x).abs().max()) + band


def entry(report: Report, name: str) -> PassReport:
    """What one pass reports."""
    return next(p for p in report.passes if p.name == name)


def line_of(program: AttentionProgram, match: str) -> str:
    """The source line that a match is about."""
    return program.source.splitlines()[int(match.rpartition(":")[2]) - 1].strip()


def raised(report: Report) -> list[str]:
    """The masks of the attention that was found, as the report puts them."""
    return [match.split(": ", 1)[1].split(" at ")[0] for match in entry(report, "raise_attention").matches]


# ------------------------------------------------------------------------------------------------------------- grammar


@dataclass(frozen=True)
class Masking:
    """A mask, and what is known of it."""

    keep: str | None
    described: str
    keeps_one: bool = True  # every step keeps a key
    has_data: bool = False
    same: tuple[str, ...] = ()  # other ways to write the same
    fields: dict[str, Any] | None = None


def maskings(data: tuple[int, ...], S: int = 6) -> list[Masking]:
    """Masks that must be told apart. `data`: shape of a mask of numbers."""
    causal, window = f"attention to a window of {S}", "attention to a window of {}"
    blocks = "attention to blocks of {} with stride {}, once they are complete"
    opaque, depends = "attention by a program of scores", " and a mask that depends on data"
    given = {"data": data}
    outside = {"outside": True, "rows": 5, "S": S}
    # Row j holds the token that completes block j.
    rows = [{"rows": (S - size) // stride + 1, "written": f"position * {stride} + {size - 1}"}
            for size, stride in ((2, 2), (4, 2))]  # fmt: skip
    return [
        Masking("position <= t", causal, same=("~(position > t)", "position < t + 1", "t - position >= 0")),
        Masking("(position <= t) & (position > t - 99)", causal, same=("position <= t",)),
        Masking("position < t", blocks.format(2, 1), keeps_one=False, same=("position + 1 <= t",)),
        Masking("(position <= t) & (position > t - 3)", window.format(3), same=("(t - position < 3) & (t >= position)",)
        ),
        Masking("(position <= t) & (t - position < 2) & (t - position < 4)", window.format(2)),
        Masking("position == t", window.format(1), same=("~(position != t)",)),
        Masking("position * 2 + 1 <= t", blocks.format(2, 2), keeps_one=False, fields=rows[0]),
        Masking("(position * 2 + 3 <= t) & (t >= 0)", blocks.format(4, 2), keeps_one=False, fields=rows[1]),
        Masking("(position <= t) & ((position % 2 == 0) | (position == t))", opaque),
        Masking("position >= 0", "attention to every key", same=("position < 99",), fields=outside),
        Masking(None, "attention to every key", fields=outside),
        Masking("position <= t", causal, fields=outside),  # fewer keys than steps
        Masking("position < 3", opaque, fields=outside),
        Masking('(position <= t) & ((x["m"] > 0) | (position == t))', causal + depends, has_data=True, fields=given),
        Masking('(x["m"] > 0) | (position == 0)', "attention to every key" + depends, has_data=True,
                fields=outside | given),
    ]  # fmt: skip


BEFORE = {
    "masked_fill": "s.masked_fill(~keep, {floor})",
    "where": "torch.where(keep, s, {floor})",
    "where, reversed": "torch.where(keep.logical_not(), {floor}, s)",
    "additive": "s + torch.zeros_like(s).masked_fill(~keep, -inf)",
    "additive, where": "torch.where(keep, 0.0, -inf).to(s.dtype) + s",
    "additive, cast": "s + torch.zeros(keep.shape).masked_fill(~keep, -inf).to(s.dtype)",
}
AFTER = (
    "p * after",
    "p * after.to(p.dtype)",
    "p.masked_fill(~after, 0.0)",
    "p.masked_fill(~after, 0)",
    "torch.where(after, p, 0.0)",
    "torch.where(~after, torch.zeros_like(p), p)",
)
SCALES = {
    "none": {"scale": "s"},
    "scores": {"scale": "s * 0.6"},
    "scores, left": {"scale": "0.6 * s"},
    "divided": {"scale": "s / math.sqrt(3)"},
    "a tensor": {"scale": "s * torch.tensor(0.6, dtype=DTYPE)"},
    "queries": {"before": ("q = q * 0.6",), "scale": "s"},
    "keys": {"before": ("k = k / 1.7",), "scale": "s"},
    "both": {"before": ("q = q / 3**0.25",), "scale": "s / 3**0.25"},
}
SOFTMAXES = ("torch.softmax(s, -1)", "s.softmax(dim=-1)", "F.softmax(s, -1)")


@st.composite
def attention_programs(draw: Callable[..., Any], dtype: torch.dtype = torch.float64) -> AttentionProgram:
    """Attention within the promise, in one of the ways people write it, with the mask that must be recognised."""

    def pick(choices: Any) -> Any:
        return draw(st.sampled_from(list(choices)))

    name = pick(LAYOUTS)
    lay = LAYOUTS[name]
    masking = pick(maskings(pick(lay.data)))
    fields = {"dtype": dtype, "soft": dtype, **(masking.fields or {})}
    again = "keep" if masking.has_data else pick(("keep", *masking.same))
    if pick(("plain", "plain", "sdpa")) == "sdpa" and dtype == torch.float64:
        return _sdpa(pick, name, masking, fields)
    found: str | None = masking.described

    # A row that may be empty needs the lowest number before the softmax and zeros behind it, or it would be NaN.
    form = pick(("masked_fill", "where", "where, reversed")) if not masking.keeps_one else pick(BEFORE)
    floor = pick(("torch.finfo(s.dtype).min", "-inf")) if masking.keeps_one else "torch.finfo(s.dtype).min"
    after = pick(AFTER) if not masking.keeps_one else pick(("p", *AFTER))
    if after == "p" and masking.has_data:
        found = None  # that a key is left at every step is not known
    scale = pick(SCALES)
    pieces: dict[str, Any] = dict(SCALES[scale])
    if scale.startswith("scores") and pick((False, True)):
        late_is_right = floor == "-inf" or form.startswith("additive") or masking.keep is None
        pieces |= {"scale": "s", "late_scale": pieces["scale"]} if late_is_right else {}
    softmax, cast = pick(SOFTMAXES), "p"
    if dtype != torch.float64 and pick((False, True)):
        fields["soft"] = torch.float32
        softmax = pick(("torch.softmax(s.to(SOFT), -1)", "F.softmax(s, -1, dtype=SOFT)"))
        cast = "p.to(DTYPE)"
    return attention(
        name,
        keep=masking.keep,
        keep_after=again,
        scores=pick(lay.scores),
        masked=BEFORE[form].format(floor=floor),
        softmax=softmax,
        post=after,
        cast=cast,
        out=pick(lay.outs),
        mask=found,
        **pieces,
        **fields,
    )


def _sdpa(pick: Callable[..., Any], name: str, masking: Masking, fields: dict[str, Any]) -> AttentionProgram:
    """The same by the operator, whose softmax makes zeros of empty rows."""
    lines = [] if masking.keep is None else [f"keep = {masking.keep}"]
    if masking.keep is None:
        mask = pick(("scale=0.6", "attn_mask=None"))
    else:
        shape = "keep" if fields.get("data") else "keep[None]"
        lines.append(f"keep = {shape}")
        if masking.keeps_one and pick((False, True)):
            lines.append("keep = torch.zeros(keep.shape, dtype=DTYPE).masked_fill(~keep, -inf)")
        mask = pick(("attn_mask=keep", "attn_mask=keep, scale=0.6"))
    lines.append(f"out = {LAYOUTS[name].sdpa.format(mask)}")
    return AttentionProgram(name, tuple(lines), mask=masking.described, **fields)


def fused(report: Report) -> list[str]:
    """What of each selection became attention on indices."""
    return [match.split(": ", 1)[1].split(" at ")[0] for match in entry(report, "fuse_selection_scatter").matches]

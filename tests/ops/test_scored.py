"""Attention to scores of a program: every kernel against loops over the queries, written without programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa_compile import inductor_files, ops
from nsa_compile.ops import cpp
from nsa_compile.ops.dispatch import KERNELS, observe
from nsa_compile.ops.scored import cpu, portable, scored_attention
from nsa_compile.ops.scored.program import OPERATORS, parse
from nsa_compile.ops.tiles import compute_dtype
from tests.ops.problems import kernels, peak_memory
from tests.strategies import few

Scores = Callable[..., Tensor]


@dataclass(frozen=True)
class Leaf:
    """What a tensor of scores holds, and along which of `NSmT` it may differ; in `fixed` dimensions it does.

    One that is fixed in `d` has an element for each distance between a query and a key.
    """

    contents: str
    fixed: str
    free: str = ""

    def make(self, rng: torch.Generator, sizes: dict[str, int], kept: dict[str, bool], dtype: torch.dtype) -> Tensor:
        shape = [n if d in self.fixed or (d in self.free and kept[d]) else 1 for d, n in sizes.items()]
        if self.fixed == "d":
            shape[3] = sizes["S"] + sizes["T"] - 1
        if self.contents in ("queries", "keys"):
            count = torch.arange(max(shape))
            return count.reshape([n if n == max(shape) else 1 for n in shape]).expand(shape).clone()
        if self.contents == "documents":
            some = 3 if "T" in self.fixed else 4  # queries have one that no key has
            return torch.randint(0, some, shape, generator=rng).sort(max(range(4), key=shape.__getitem__)).values
        if self.contents == "integers":
            return torch.randint(-9, 10, shape, generator=rng)
        if self.contents == "widths":
            return torch.randint(1, 90, shape, generator=rng)
        if self.contents == "booleans":
            return torch.rand(shape, generator=rng) < 0.7
        x = torch.randn(shape, generator=rng, dtype=torch.float64)
        if self.contents == "slopes":
            x = x.abs() / 8
        elif self.contents == "positive":
            x = x.abs() + 0.5
        elif self.contents == "removing":  # some keys, and all keys of some queries
            x[torch.rand(shape, generator=rng) < 0.3] = -torch.inf
            x[torch.rand(*shape[:3], 1, generator=rng).expand(shape) < 0.2] = -torch.inf
        elif self.contents in TILED:  # whole tiles of 64 queries and keys, all of those of some queries, and some more
            queries, keys = (max(1, n // 64) for n in (shape[1], shape[3]))
            low = torch.rand(shape[0], queries, shape[2], keys, generator=rng) < 0.6
            low |= torch.rand(shape[0], queries, 1, 1, generator=rng) < 0.2
            low = low.repeat_interleave(64, 1).repeat_interleave(64, 3)
            x = torch.where(_padded(low, shape), TILED[self.contents], 0.0)
            x[torch.rand(shape, generator=rng) < 0.01] = TILED[self.contents]
            if self.contents == "shown in tiles":
                return x == 0
        return x.to(dtype)


TILED = {"shown in tiles": -1.0, "low in tiles": -3e4, "-inf in tiles": -math.inf}


def _padded(x: Tensor, shape: list[int]) -> Tensor:
    """As many of a dimension as there are in a shape, the last one again where there are fewer."""
    for d in (1, 3):
        x = x.index_select(d, torch.arange(shape[d]).clamp(max=x.shape[d] - 1))
    return x


T_, P_ = Leaf("queries", "S"), Leaf("keys", "T")
CAUSAL = "v0 = mul.Tensor(s0, 0.25)\nv1 = le.Tensor(x1, x0)\nv2 = where.self(v1, v0, -inf)\n"


def hidden(score: Tensor, shown: Tensor) -> Tensor:
    return score.masked_fill(~shown, -math.inf)


@dataclass(frozen=True)
class Case:
    """A program, and the same as a function of products and leaves, of one query and head to all keys."""

    text: str
    scores: Scores
    leaves: tuple[Leaf, ...]
    products: int = 1


CASES = {
    "causal": Case(CAUSAL + "return v2", lambda s, t, p: hidden(s * 0.25, p <= t), (T_, P_)),
    "soft cap": Case(
        CAUSAL.replace("v0, -inf", "v5, -inf").replace("v2 =", "v6 =")
        .replace("v1 = le", "v1 = div.Tensor(v0, 2.0)\nv2 = tanh.default(v1)\nv3 = mul.Tensor(v2, 2.0)\nv4 = le")
        .replace("self(v1, v5", "self(v4, v3").replace("v6 =", "v5 =") + "return v5",
        lambda s, t, p: hidden((s * 0.25 / 2).tanh() * 2, p <= t), (T_, P_)),
    "slopes": Case(
        "v0 = sub.Tensor(x1, x0)\nv1 = mul.Tensor(v0, x2)\nv2 = add.Tensor(s0, v1)\nv3 = gt.Tensor(x1, x0)\n"
        "v4 = masked_fill.Scalar(v2, v3, -inf)\nreturn v4",
        lambda s, t, p, slope: hidden(s + (p - t) * slope, p <= t), (T_, P_, Leaf("normal", "", "Nm"))),
    "bias": Case("v0 = add.Tensor(s0, x0)\nreturn v0", lambda s, b: s + b, (Leaf("normal", "ST", "Nm"),)),
    "removing bias": Case(
        "v0 = add.Tensor(s0, x0)\nreturn v0", lambda s, b: s + b, (Leaf("removing", "ST", "N"),)),
    "bias of distances": Case("v0 = add.Tensor(s0, x0)\nreturn v0", lambda s, b: s + b, (Leaf("normal", "d", "Nm"),)),
    "bias of keys": Case("v0 = mul.Tensor(x0, s0)\nreturn v0", lambda s, b: b * s, (Leaf("normal", "T", "N"),)),
    "documents": Case(
        "v0 = eq.Tensor(x0, x1)\nv1 = bitwise_and.Tensor(v0, x2)\nv2 = where.self(v1, s0, -inf)\nreturn v2",
        lambda s, a, b, padding: hidden(s, (a == b) & padding),
        (Leaf("documents", "S", "N"), Leaf("documents", "T", "N"), Leaf("booleans", "T", "N"))),
    "two products": Case(
        "v0 = mul.Tensor(s0, x0)\nv1 = mul.Tensor(s1, 0.5)\nv2 = add.Tensor(v0, v1)\nreturn v2",
        lambda s, r, a: s * a + r * 0.5, (Leaf("positive", ""),), products=2),
    "strides": Case(
        "v0 = sub.Tensor(x0, x1)\nv1 = remainder.Scalar(v0, 3)\nv2 = eq.Scalar(v1, 0)\nv3 = lt.Tensor(v0, x2)\n"
        "v4 = bitwise_or.Tensor(v2, v3)\nv5 = ge.Scalar(v0, 0)\nv6 = bitwise_and.Tensor(v4, v5)\n"
        "v7 = bitwise_not.default(v6)\nv8 = masked_fill.Scalar(s0, v7, -inf)\nreturn v8",
        lambda s, t, p, w: hidden(s, (((t - p) % 3 == 0) | (t - p < w)) & (t >= p)),
        (T_, P_, Leaf("widths", "m"))),
    "blocks of keys": Case(
        "v0 = floor_divide.default(x0, 16)\nv1 = floor_divide.default(x1, 16)\nv2 = eq.Tensor(v0, v1)\n"
        "v3 = where.ScalarOther(v2, s0, -inf)\nreturn v3",
        lambda s, t, p: hidden(s, t.div(16, rounding_mode="floor") == p.div(16, rounding_mode="floor")), (T_, P_)),
    "documents, finite": Case(
        "v0 = ne.Tensor(x0, x1)\nv1 = masked_fill.Scalar(s0, v0, -1000000000.0)\nreturn v1",
        lambda s, a, b: s.masked_fill(a != b, -1e9), (Leaf("documents", "S", "N"), Leaf("documents", "T", "N"))),
    "flags": Case("v0 = where.ScalarOther(x0, s0, -inf)\nreturn v0", hidden, (Leaf("shown in tiles", "ST", "N"),)),
    "low bias": Case("v0 = add.Tensor(s0, x0)\nreturn v0", lambda s, b: s + b, (Leaf("low in tiles", "ST", "Nm"),)),
}  # fmt: skip

# Each of these adds a term made with one operator, of a product `s`, two numbers and two integers that differ between
# queries and keys, and a boolean that differs between both.
TERMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "neg.default": ("neg.default(s0)", lambda s, a, b, i, j, c: -s),
    "reciprocal.default": ("reciprocal.default(x1)", lambda s, a, b, i, j, c: 1 / b),
    "abs.default": ("abs.default(s0)", lambda s, a, b, i, j, c: s.abs()),
    "sqrt.default": ("sqrt.default(x1)", lambda s, a, b, i, j, c: b.sqrt()),
    "rsqrt.default": ("rsqrt.default(x1)", lambda s, a, b, i, j, c: b**-0.5),
    "exp.default": ("exp.default(x0)", lambda s, a, b, i, j, c: a.exp()),
    "exp2.default": ("exp2.default(x0)", lambda s, a, b, i, j, c: 2**a),
    "log.default": ("log.default(x1)", lambda s, a, b, i, j, c: b.log()),
    "log1p.default": ("log1p.default(x1)", lambda s, a, b, i, j, c: (1 + b).log()),
    "tanh.default": ("tanh.default(s0)", lambda s, a, b, i, j, c: s.tanh()),
    "sigmoid.default": ("sigmoid.default(s0)", lambda s, a, b, i, j, c: 1 / (1 + (-s).exp())),
    "silu.default": ("silu.default(s0)", lambda s, a, b, i, j, c: s / (1 + (-s).exp())),
    "relu.default": ("relu.default(s0)", lambda s, a, b, i, j, c: s.clamp(min=0)),
    "sin.default": ("sin.default(s0)", lambda s, a, b, i, j, c: s.sin()),
    "cos.default": ("cos.default(s0)", lambda s, a, b, i, j, c: s.cos()),
    "erf.default": ("erf.default(s0)", lambda s, a, b, i, j, c: s.erf()),
    "sign.default": ("sign.default(x0)", lambda s, a, b, i, j, c: a.sign()),
    "floor.default": ("floor.default(x1)", lambda s, a, b, i, j, c: b.floor()),
    "ceil.default": ("ceil.default(x1)", lambda s, a, b, i, j, c: b.ceil()),
    "maximum.default": ("maximum.default(s0, x0)", lambda s, a, b, i, j, c: s.maximum(a)),
    "minimum.default": ("minimum.default(s0, x0)", lambda s, a, b, i, j, c: s.minimum(a)),
    "pow.Tensor_Scalar": ("pow.Tensor_Scalar(x1, 1.5)", lambda s, a, b, i, j, c: b**1.5),
    "pow.Tensor_Tensor": ("pow.Tensor_Tensor(x1, x0)", lambda s, a, b, i, j, c: b**a),
    "pow.Scalar": ("pow.Scalar(1.5, x0)", lambda s, a, b, i, j, c: 1.5**a),
    "rsub.Scalar": ("rsub.Scalar(s0, 2.0)", lambda s, a, b, i, j, c: 2 - s),
    "clamp.default": ("clamp.default(s0, -0.5, 0.75)", lambda s, a, b, i, j, c: s.clamp(-0.5, 0.75)),
    "clamp_min.default": ("clamp_min.default(s0, -0.25)", lambda s, a, b, i, j, c: s.clamp(min=-0.25)),
    "clamp_max.default": ("clamp_max.default(s0, None, 0.25)".replace("None, ", ""),
                          lambda s, a, b, i, j, c: s.clamp(max=0.25)),
    "div.Tensor": ("div.Tensor(s0, x1)", lambda s, a, b, i, j, c: s / b),
    "div.Scalar": ("div.Scalar(x2, 4)", lambda s, a, b, i, j, c: i / 4),
    "sub.Tensor": ("sub.Tensor(x2, x3)", lambda s, a, b, i, j, c: i - j),
    "sub.Scalar": ("sub.Scalar(x2, 3)", lambda s, a, b, i, j, c: i - 3),
    "mul.Tensor": ("mul.Tensor(x2, x3)", lambda s, a, b, i, j, c: i * j),
    "mul.Scalar": ("mul.Scalar(x4, 3)", lambda s, a, b, i, j, c: 3 * c.long()),
    "add.Scalar": ("add.Scalar(s0, 1.5)", lambda s, a, b, i, j, c: s + 1.5),
    "remainder.Tensor": ("remainder.Tensor(x0, x1)", lambda s, a, b, i, j, c: a - (a / b).floor() * b),
    "remainder.Scalar": ("remainder.Scalar(x2, -4)", lambda s, a, b, i, j, c: i % -4),
    "floor_divide.default": ("floor_divide.default(x2, -4)",
                             lambda s, a, b, i, j, c: i.div(-4, rounding_mode="floor")),
    "where.self": ("where.self(x4, s0, x0)", lambda s, a, b, i, j, c: c * s + ~c * a),
    "where.ScalarSelf": ("where.ScalarSelf(x4, 1.5, s0)", lambda s, a, b, i, j, c: c * 1.5 + ~c * s),
    "where.ScalarOther": ("where.ScalarOther(x4, x2, -7)", lambda s, a, b, i, j, c: c * i - ~c * 7),
    "where.Scalar": ("where.Scalar(x4, 2, 0.5)", lambda s, a, b, i, j, c: c * 2 + ~c * 0.5),
    "masked_fill.Scalar": ("masked_fill.Scalar(s0, x4, 0.5)", lambda s, a, b, i, j, c: ~c * s + c * 0.5),
    "bitwise_and.Tensor": ("bitwise_and.Tensor(x2, x3)", lambda s, a, b, i, j, c: i & j),
    "bitwise_or.Tensor": ("bitwise_or.Tensor(x2, x3)", lambda s, a, b, i, j, c: i | j),
    "bitwise_xor.Tensor": ("bitwise_xor.Tensor(x4, x4)", lambda s, a, b, i, j, c: c ^ c),
    "bitwise_and.Scalar": ("bitwise_and.Scalar(x2, 6)", lambda s, a, b, i, j, c: i & 6),
    "bitwise_or.Scalar": ("bitwise_or.Scalar(x2, 6)", lambda s, a, b, i, j, c: i | 6),
    "bitwise_xor.Scalar": ("bitwise_xor.Scalar(x2, 6)", lambda s, a, b, i, j, c: i ^ 6),
    "bitwise_not.default": ("bitwise_not.default(x2)", lambda s, a, b, i, j, c: -i - 1),
    "logical_not.default": ("logical_not.default(x2)", lambda s, a, b, i, j, c: i == 0),
    "logical_and.default": ("logical_and.default(x2, x4)", lambda s, a, b, i, j, c: (i != 0) & c),
    "logical_or.default": ("logical_or.default(x2, x4)", lambda s, a, b, i, j, c: (i != 0) | c),
    "logical_xor.default": ("logical_xor.default(x2, x4)", lambda s, a, b, i, j, c: (i != 0) ^ c),
    "isnan.default": ("isnan.default(s0)", lambda s, a, b, i, j, c: s != s),
    "to": ("to(x4, 'int')".replace("'", ""), lambda s, a, b, i, j, c: c.long()),
    "scalar_tensor.default": ("scalar_tensor.default(0.5)", lambda s, a, b, i, j, c: torch.tensor(0.5)),
    **{
        f"{name}.{overload}": (
            f"{name}.{overload}(x2, {'x3' if overload == 'Tensor' else '2'})",
            lambda s, a, b, i, j, c, name=name, overload=overload: getattr(torch, name)(
                i, j if overload == "Tensor" else torch.tensor(2)
            ),
        )
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Tensor", "Scalar")
    },
}  # fmt: skip
COPIES = {"clone.default", "detach.default", "alias.default", "add.Tensor"}  # the last adds the terms


def _sum_of(terms: list[str]) -> Case:
    """The sum of some terms, divided by as many."""
    lines, total = [], "s0"
    for name in terms:
        lines.append(f"v{len(lines)} = {TERMS[name][0]}")
        lines.append(f"v{len(lines)} = add.Tensor({total}, v{len(lines) - 1})")
        total = f"v{len(lines) - 1}"
    lines += [f"v{len(lines)} = div.Tensor({total}, {len(terms)}.0)", f"return v{len(lines)}"]

    def scores(s: Tensor, *leaves: Tensor) -> Tensor:
        return sum((TERMS[name][1](s, *leaves) for name in terms), s) / len(terms)

    leaves = (
        Leaf("normal", "S", "N"), Leaf("positive", "T", "N"), Leaf("integers", "S", "N"), Leaf("integers", "T", "N"),
        Leaf("booleans", "ST", "N"),
    )  # fmt: skip
    return Case("\n".join(lines), scores, leaves)


_names = list(TERMS)
CASES |= {f"terms {i}": _sum_of(_names[i::3]) for i in range(3)}


# What programs are drawn from: a scale, a bias, a soft-cap or none, and conditions on keys. Each is lines that make one
# value of another, `{}`, with the numbers of lines and leaves filled in, the same in words of torch, and leaves.
Part = tuple[str, Callable[..., Any], tuple[Leaf, ...]]
SCALES: dict[str, Part] = {
    "a number": ("mul.Tensor({s}, 0.25)", lambda s: s * 0.25, ()),
    "one for each head": ("mul.Tensor({s}, {x0})", lambda s, x: s * x, (Leaf("positive", "", "m"),)),
    "a learned number": ("div.Tensor({s}, {x0})", lambda s, x: s / x, (Leaf("positive", ""),)),
    "one for each query": ("mul.Tensor({s}, {x0})", lambda s, x: s * x, (Leaf("positive", "S", "Nm"),)),
}
BIASES: dict[str, Part] = {
    "none": ("", lambda s: s, ()),
    "slopes": (
        "sub.Tensor({x0}, {x1}); mul.Tensor({v0}, {x2}); add.Tensor({s}, {v1})",
        lambda s, p, t, slope: s + (p - t) * slope,
        (P_, T_, Leaf("slopes", "", "m")),
    ),
    "distances": ("add.Tensor({s}, {x0})", lambda s, x: s + x, (Leaf("normal", "d", "Nm"),)),
    "a table": ("add.Tensor({s}, {x0})", lambda s, x: s + x, (Leaf("normal", "ST", "m"),)),
    "one for each key": ("add.Tensor({s}, {x0})", lambda s, x: s + x, (Leaf("normal", "T", "N"),)),
    "one for each query": ("sub.Tensor({s}, {x0})", lambda s, x: s - x, (Leaf("normal", "S", "Nm"),)),
    "-inf among them": ("add.Tensor({x0}, {s})", lambda s, x: x + s, (Leaf("removing", "ST", "N"),)),
}
CAPS: dict[str, Part] = {
    "none": ("", lambda s: s, ()),
    "tanh": ("tanh.default({s}); mul.Tensor({v0}, 2.0)", lambda s: s.tanh() * 2, ()),
    "learned": (
        "div.Tensor({s}, {x0}); tanh.default({v0}); mul.Tensor({v1}, {x0})",
        lambda s, x: (s / x).tanh() * x,
        (Leaf("positive", "", "m"),),
    ),
}
MASKS: dict[str, Part] = {
    "causal": ("gt.Tensor({x0}, {x1}); masked_fill.Scalar({s}, {v0}, -inf)", lambda s, p, t: hidden(s, p <= t),
               (P_, T_)),
    "window": (
        "sub.Tensor({x1}, {x0}); lt.Tensor({v0}, {x2}); where.ScalarOther({v1}, {s}, -inf)",
        lambda s, p, t, w: hidden(s, t - p < w),
        (P_, T_, Leaf("widths", "", "m")),
    ),
    "documents": (
        "eq.Tensor({x0}, {x1}); where.self({v0}, {s}, -inf)",
        lambda s, a, b: hidden(s, a == b),
        (Leaf("documents", "S", "N"), Leaf("documents", "T", "N")),
    ),
    "padding": ("where.ScalarOther({x0}, {s}, -inf)", hidden, (Leaf("booleans", "T", "N"),)),
    "strides": (
        "sub.Tensor({x0}, {x1}); remainder.Scalar({v0}, 3); ne.Scalar({v1}, 0); masked_fill.Scalar({s}, {v2}, -inf)",
        lambda s, p, t: hidden(s, (p - t) % 3 == 0),
        (P_, T_),
    ),
    "causal, finite": (
        "gt.Tensor({x0}, {x1}); masked_fill.Scalar({s}, {v0}, -30000.0)",
        lambda s, p, t: s.masked_fill(p > t, -3e4),
        (P_, T_),
    ),
    "what removes times a number": (
        "to({x0}, float); mul.Tensor({v0}, -20000.0); add.Tensor({s}, {v1})",
        lambda s, x: s + x * -2e4,
        (Leaf("booleans", "T", "N"),),
    ),
    "a choice of numbers": (
        "where.Scalar({x0}, 0.0, -inf); add.Tensor({s}, {v0})",
        lambda s, x: hidden(s, x),
        (Leaf("shown in tiles", "ST", "Nm"),),
    ),
    "low numbers": ("add.Tensor({s}, {x0})", lambda s, x: s + x, (Leaf("low in tiles", "ST", "N"),)),
    "-inf in tiles": ("add.Tensor({s}, {x0})", lambda s, x: s + x, (Leaf("-inf in tiles", "ST", "Nm"),)),
}  # fmt: skip


def composed(products: int, parts: list[Part]) -> Case:
    """The program of some parts, one after the other, of the sum of some products."""
    lines: list[str] = []
    leaves: list[Leaf] = []
    steps: list[tuple[Callable[..., Any], list[int]]] = []
    total = "s0"
    for i in range(1, products):
        lines.append(f"v{len(lines)} = add.Tensor({total}, s{i})")
        total = f"v{len(lines) - 1}"
    for text, function, read in parts:
        places = []
        for leaf in read:
            if leaf not in (T_, P_) or leaf not in leaves:
                leaves.append(leaf)
            places.append(leaves.index(leaf) if leaf in (T_, P_) else len(leaves) - 1)
        names = {f"x{i}": f"x{place}" for i, place in enumerate(places)} | {"s": total}
        for i, line in enumerate(filter(None, text.split("; "))):
            names[f"v{i}"] = total = f"v{len(lines)}"
            lines.append(f"v{len(lines)} = {line.format(**names)}")
        steps.append((function, places))

    def scores(*given: Tensor) -> Tensor:
        score = sum(given[1:products], given[0])
        for function, places in steps:
            score = function(score, *(given[products + place] for place in places))
        return score

    return Case("\n".join([*lines, f"return {total}"]), scores, tuple(leaves), products)


@dataclass(frozen=True)
class Problem:
    case: Case
    N: int
    S: int
    m: int
    T: int
    D: int
    Dv: int
    kept: tuple[bool, bool]  # whether leaves that may differ between sequences, or heads, do
    layout: str
    through_lse: bool
    tiled: bool
    dtype: torch.dtype
    seed: int

    def tensors(self, dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]:
        """q, k, v and leaves, as they are in the problem's dtype, in another one; floating ones need gradients."""
        dtype = dtype or self.dtype
        rng = torch.Generator().manual_seed(self.seed)
        kept = dict(zip("Nm", self.kept, strict=True))
        sizes = {"N": self.N, "S": self.S, "m": self.m, "T": self.T}

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(self.dtype)

        widths = [self.D, 3][: self.case.products]
        q = [normal(self.N, self.S, self.m, width) for width in widths]
        k = [normal(self.N, self.T, width) for width in widths]
        v = normal(self.N, self.T, self.Dv)
        leaves = [leaf.make(rng, sizes, kept, self.dtype) for leaf in self.case.leaves]

        def ready(x: Tensor) -> Tensor:
            x = laid_out(x.to(dtype) if x.is_floating_point() else x, self.layout)
            return x.requires_grad_(x.is_floating_point())

        return [ready(x) for x in q], [ready(x) for x in k], ready(v), [ready(x) for x in leaves]

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Those of the output and of the log-sum-exp."""
        rng = torch.Generator().manual_seed(self.seed + 1)
        of_out = torch.randn(self.N, self.S, self.m, self.Dv, generator=rng, dtype=torch.float64).to(self.dtype)
        of_lse = torch.randn(self.m, self.S, self.N, generator=rng, dtype=torch.float64)
        return of_out, of_lse.permute(2, 1, 0).to(compute_dtype(of_out)) if self.through_lse else None


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "turned":
        turned = list(reversed(range(x.dim())))
        return x.permute(turned).contiguous().permute(turned).detach()
    if layout == "sliced":  # nothing is contiguous
        return torch.stack([x, x], -1)[..., 0].detach()
    return x.detach().clone()


def differentiated(loss: Tensor, given: tuple[Any, ...]) -> list[Tensor]:
    q, k, v, leaves = given
    wanted = [x for x in (*q, *k, v, *leaves) if x.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def of_pairs(leaf: Tensor, shape: tuple[int, int, int], keys: int) -> Tensor:
    """A leaf `[N, S, m, T]`."""
    if leaf.shape[3] in (1, keys):
        return leaf.expand(*shape, keys)
    leaf = leaf.expand(shape[0], 1, shape[2], -1)
    return torch.stack([leaf[:, 0, :, shape[1] - 1 - s :][..., :keys] for s in range(shape[1])], 1)


def loops(problem: Problem, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Output, log-sum-exp and gradients of all floating inputs, one query and head after the other, in a dtype; and
    the scores `[N, S, m, T]`."""
    given = q, k, v, leaves = problem.tensors(dtype)
    shape, keys = (problem.N, problem.S, problem.m), v.shape[1]
    full = [of_pairs(x, shape, keys) for x in leaves]
    outs, lses, every = [], [], []
    for n, s, h in ((n, s, h) for n in range(shape[0]) for s in range(shape[1]) for h in range(shape[2])):
        products = [(b[n] * a[n, s, h]).sum(-1) for a, b in zip(q, k, strict=True)]
        scores = problem.case.scores(*products, *(x[n, s, h] for x in full))
        every.append(scores.detach())
        kept = scores.detach() > -math.inf
        if not kept.any():
            outs.append(v.new_zeros(problem.Dv))
            lses.append(v.new_full((), -math.inf))
            continue
        scores, values = scores[kept], v[n][kept]
        largest = scores.detach().max()
        weights = (scores - largest).exp()
        outs.append((weights / weights.sum()) @ values)
        lses.append(largest + weights.sum().log())
    out, lse = torch.stack(outs).view(*shape, -1), torch.stack(lses).view(shape)
    of_out, of_lse = problem.gradients()
    loss = (out * of_out.to(dtype)).sum() + 0 * v.sum()
    if of_lse is not None:
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * of_lse.to(dtype)).sum()
    return [out.detach(), lse.detach(), *differentiated(loss, given)], torch.stack(every).view(*shape, keys)


def tiles_of(scores: Tensor) -> Tensor:
    """The tiles in which a score is not -inf."""
    shown = (scores > -math.inf).any(2).any(0)
    rows, columns = (-(-n // 64) for n in shown.shape)
    padded = torch.zeros(rows * 64, columns * 64, dtype=torch.bool)
    padded[: shown.shape[0], : shown.shape[1]] = shown
    return padded.view(rows, 64, columns, 64).any(3).any(1).to(torch.uint8)


def total_of(scores: Tensor) -> Tensor:
    """The sum of the exponentials of scores, `[..., T] -> [...]`, the largest of them taken off."""
    largest = scores.amax(-1, keepdim=True)
    return (scores - largest.masked_fill(largest == -math.inf, 0.0)).exp().sum(-1)


def check(problem: Problem, kernel: Any) -> None:
    """An error may be that of the loops in the problem's dtype, plus a band of roundings of the computation."""
    exact, scores = loops(problem, torch.float64)
    eager, rough = (exact, scores) if problem.dtype == torch.float64 else loops(problem, problem.dtype)
    given = q, k, v, leaves = problem.tensors()
    before = [x.detach().clone() for x in (*q, *k, v, *leaves)]
    of_out, of_lse = problem.gradients()
    with ops.force_implementation(kernel.name):
        tiles = tiles_of(scores) if problem.tiled else None
        out, lse, total = scored_attention(*given, problem.case.text, tiles)
        found = [out, lse]
        loss = (out * of_out).sum().to(lse.dtype)
        if of_lse is not None:
            loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * of_lse).sum()
        found += differentiated(loss, given)
    assert all(torch.equal(x, y) for x, y in zip((*q, *k, v, *leaves), before, strict=True)), "an input was written to"
    assert (out.dtype, lse.dtype, total.dtype) == (problem.dtype, compute_dtype(v), compute_dtype(v))
    totals = [total_of(scores), total_of(rough)]
    names = ["out", "lse", *(f"gradient {i}" for i in range(len(found) - 2)), "total"]
    for name, x, true, other in zip(names, [*found, total], [*exact, totals[0]], [*eager, totals[1]], strict=True):
        assert x.shape == true.shape, name
        assert torch.equal(x == -math.inf, true == -math.inf), f"{name}: an error in what is -inf"
        reach = true.nan_to_num(0, 0, 0).abs().max().item()
        allowed = distance(other, true) + 2 * torch.finfo(x.dtype).eps * reach + band(problem, given, name)
        error = distance(x, true)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def distance(x: Tensor, true: Tensor) -> float:
    return torch.where(x == true, 0.0, x.double() - true).abs().max().item()


def band(problem: Problem, given: tuple[Any, ...], name: str) -> float:
    """Roundings of the computation, from the largest values that enter it."""
    q, k, v, leaves = given
    of_out, of_lse = problem.gradients()
    computed = torch.finfo(compute_dtype(v)).eps

    def largest(*tensors: Tensor | None) -> float:
        sizes = [x.detach().double().nan_to_num(0, 0, 0).abs().max().item() for x in tensors if x is not None]
        return max(sizes, default=0.0)

    numbers = [x for x in leaves if x.is_floating_point()]
    score = sum(largest(a) * largest(b) * a.shape[-1] for a, b in zip(q, k, strict=True)) + largest(*leaves)
    unit = 4 * computed * (1 + score)
    if not name.startswith("gradient"):
        return unit * (problem.T if name == "total" else max(1.0, largest(v)))
    weight = largest(of_out) * largest(v) * problem.Dv
    # The output that the backward pass reads is rounded to the precision of the inputs, and what it takes off with it.
    of_score = unit * (weight + largest(of_lse)) + torch.finfo(problem.dtype).eps * weight
    terms = problem.N * problem.S * problem.m * problem.T
    return of_score * max(1.0, largest(*q, *k, *numbers)) * terms**0.5


@st.composite
def problems(draw: Any, dtypes: tuple[torch.dtype, ...]) -> Problem:
    def one(of: dict[str, Part]) -> Part:
        return of[draw(st.sampled_from(list(of)))]

    masks = draw(st.lists(st.sampled_from(list(MASKS)), max_size=2, unique=True))
    size = st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 100, 129]))
    return Problem(
        case=composed(draw(st.integers(1, 2)), [one(SCALES), one(BIASES), one(CAPS), *(MASKS[x] for x in masks)]),
        N=draw(st.integers(1, 3)),
        S=draw(size),
        m=draw(st.sampled_from([1, 2, 3])),
        T=draw(size),
        D=draw(st.sampled_from([1, 4, 5, 16, 40])),
        Dv=draw(st.sampled_from([1, 7, 16])),
        kept=draw(st.tuples(st.booleans(), st.booleans())),
        layout=draw(st.sampled_from(["plain", "turned", "sliced"])),
        through_lse=draw(st.booleans()),
        tiled=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )


ORDINARY = Problem(CASES["causal"], 2, 100, 2, 129, 16, 7, (True, True), "plain", True, True, torch.float64, 0)


@pytest.mark.deep(but=["terms 0-cpu"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
@pytest.mark.parametrize("case", CASES)
def test_every_program(case, kernel):
    for kept in ((True, True), (False, False)):
        check(replace(ORDINARY, case=CASES[case], kept=kept), kernel)


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored"))
@few(6)  # a kernel is compiled for each
@given(problem=problems((torch.float64, torch.float32, torch.bfloat16, torch.float16)))
def test_equals_the_loops(kernel, problem):
    check(problem, kernel)


def test_every_operator_is_in_a_program():
    tried = {i.operator for case in CASES.values() for i in parse(case.text).instructions}
    assert tried | COPIES == OPERATORS


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_gradcheck(kernel):
    problem = replace(ORDINARY, case=CASES["two products"], S=5, T=6, D=2, Dv=2)
    q, k, v, leaves = problem.tensors()
    with ops.force_implementation(kernel.name):
        assert torch.autograd.gradcheck(
            lambda *x: scored_attention(x[:2], x[2:4], x[4], x[5:], problem.case.text, None)[:2], (*q, *k, v, *leaves)
        )


@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_registration(kernel):
    problem = replace(ORDINARY, case=CASES["slopes"], N=1, S=7, T=9)
    with ops.force_implementation(kernel.name):
        torch.library.opcheck(scored_attention, (*problem.tensors(), problem.case.text, None))


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_tiles_without_a_score_are_not_read(kernel):
    problem = replace(ORDINARY, N=1, S=128, T=192, m=1)
    tiles = torch.tensor([[1, 0, 0], [1, 1, 0]], dtype=torch.uint8)
    results = []
    for spoiled in (0.0, torch.nan):
        given = q, k, v, leaves = problem.tensors()
        with torch.no_grad():
            for x in (*k, v):
                x[:, 128:] += spoiled
        with ops.force_implementation(kernel.name):
            out, lse, _ = scored_attention(q, k, v, leaves, problem.case.text, tiles)
            results.append([out, lse, *differentiated((out * problem.gradients()[0]).sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not any(x.isnan().any() for x in results[0])


@pytest.mark.deep(but=["100.0-dtype0", "100.0-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_masked_tiles_are_read_where_they_weigh_something(size, dtype):
    """A number is added to tiles of scores; products that are large enough make up for it."""
    problem = replace(ORDINARY, case=CASES["low bias"], T=200, m=1)
    (q,), (k,), v, (bias,) = problem.tensors(dtype)
    of_out = torch.randn(v.shape[0], problem.S, 1, problem.Dv, dtype=dtype)
    with torch.no_grad():
        bias.zero_()[..., :64] = -1500
        k[:, 64:] /= 10
        q *= size
    given = [q, k, v, bias]
    exact = [x.detach().double().requires_grad_() for x in given]
    scores = torch.einsum("nsmd,ntd->nsmt", *exact[:2]) + exact[3]
    true = torch.einsum("nsmt,ntd->nsmd", scores.softmax(-1), exact[2])
    with ops.force_implementation("cpu"):
        out, *_ = scored_attention([q], [k], v, [bias], problem.case.text, None)
    found = [out, *torch.autograd.grad((out * of_out).sum(), given)]
    true = [true, *torch.autograd.grad((true * of_out).sum(), exact)]
    for a, b in zip(found, true, strict=True):
        rounding = 4 * torch.finfo(dtype).eps * scores.abs().max().item()  # of a score, and so of the weights
        tolerance = rounding * b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kernel", kernels("scored", torch.float64))
def test_several_sets_of_keys_in_one_softmax(kernel):
    """Outputs weighted by the exponentials of their log-sum-exps are attention to all keys, gradients included."""
    names = ("slopes", "bias", "causal")
    sets = [replace(ORDINARY, case=CASES[name], seed=i).tensors() for i, name in enumerate(names)]
    (q,) = sets[0][0]
    texts = [CASES[name].text for name in names]
    with ops.force_implementation(kernel.name):
        found = [scored_attention([q], *rest, text, None) for (_, *rest), text in zip(sets, texts, strict=True)]
    weights = torch.stack([lse for _, lse, _ in found]).softmax(0)
    joined = sum(weight.unsqueeze(-1) * out for weight, (out, _, _) in zip(weights, found, strict=True))

    scores = []
    for name, (_, (k,), _, leaves) in zip(names, sets, strict=True):
        scores.append(CASES[name].scores(torch.einsum("nsmd,ntd->nsmt", q, k), *leaves))
    expected = torch.cat(scores, -1).softmax(-1) @ torch.cat([v for _, _, v, _ in sets], 1).unsqueeze(1)
    torch.testing.assert_close(joined, expected)
    wanted = [q, *(x for _, k, v, leaves in sets for x in (*k, v, *leaves) if x.requires_grad)]
    gradients = [torch.autograd.grad(x.sin().sum(), wanted) for x in (joined, expected)]
    for x, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(x, exact)


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored", torch.float32))
def test_among_the_lowest_scores_the_sum_tells_how_many_there_are(kernel):
    """Scores set to the lowest number have weights that add up to one, although their log-sum-exp is that number."""
    lowest = torch.finfo(torch.float32).min
    text = f"v0 = where.ScalarOther(x0, s0, {lowest!r})\nreturn v0"
    q, k = torch.ones(1, 2, 1, 4, requires_grad=True), torch.ones(1, 5, 4, requires_grad=True)
    v = torch.arange(5.0).reshape(1, 5, 1).requires_grad_()
    kept = torch.tensor([[False] * 5, [True, False, True, False, False]]).view(1, 2, 1, 5)
    with ops.force_implementation(kernel.name):
        out, lse, total = scored_attention([q], [k], v, [kept], text, None)
        (of_v,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(out.flatten(), torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([lowest, 4 + math.log(2)]))
    torch.testing.assert_close(total.flatten(), torch.tensor([5.0, 2.0]))
    torch.testing.assert_close(of_v.flatten(), torch.tensor([0.7, 0.2, 0.7, 0.2, 0.2]))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    before = torch.get_num_threads()
    try:
        for case in ("bias", "slopes", "bias of keys"):
            problem = replace(ORDINARY, case=CASES[case], S=260, T=200, kept=(False, False), dtype=dtype)
            results = []
            for threads in (1, 2, 3, 2):
                torch.set_num_threads(threads)
                given = problem.tensors()
                with ops.force_implementation("cpu"):
                    out, lse, total = scored_attention(*given, problem.case.text, None)
                    results.append([out, lse, total, *differentiated((out * problem.gradients()[0]).sum(), given)])
            for result in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True)), case
    finally:
        torch.set_num_threads(before)


def test_a_gradient_is_computed_only_where_it_is_asked_for():
    q, k, v, (bias,) = replace(ORDINARY, case=CASES["bias"]).tensors()
    out, *_ = scored_attention(q, k, v, [bias.detach()], CASES["bias"].text, None)
    assert torch.autograd.grad(out.sum(), [q[0], bias], allow_unused=True)[1] is None


@pytest.mark.deep(but=["portable"])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
@pytest.mark.parametrize("name", ["portable", "cpu"])
def test_memory_is_linear(name):
    S = 8192
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, S, *shape, generator=rng).requires_grad_() for shape in ((1, 4), (4,), (4,)))
    t = torch.arange(S)
    tiles = torch.ones(S // 64, S // 64).tril().triu(-1).to(torch.uint8)
    arguments = [q], [k], v, [t.view(1, S, 1, 1), t.view(1, 1, 1, S)], CASES["causal"].text, tiles
    with ops.force_implementation(name):
        scored_attention(*arguments)[0].sum().backward()  # what is loaded and compiled is not counted
        before = peak_memory(reset=True)
        scored_attention(*arguments)[0].sum().backward()
    assert peak_memory() - before < S * S


def test_small_work_compiles_no_kernel(monkeypatch):
    """Writing and compiling one would take longer than all calls without it."""
    monkeypatch.setattr(cpp, "load_generated", None)
    given = replace(ORDINARY, dtype=torch.float32).tensors()
    with observe() as uses:
        scored_attention(*given, ORDINARY.case.text, None)[0].sum().backward()
    assert [use.implementation for use in uses] == ["portable torch"] * 2


def test_flop_counter():
    problem = replace(ORDINARY, case=CASES["causal"])
    with FlopCounterMode(display=False) as counter:
        scored_attention(*problem.tensors(), problem.case.text, None)[0].sum().backward()
    counts = {str(op).removeprefix("nsa_compile."): n for op, n in counter.get_flop_counts()["Global"].items()}
    pairs = 2 * problem.N * problem.S * problem.m * problem.T
    assert counts["scored_attention"] == pairs * (16 + 7)
    assert counts["scored_attention_backward"] == pairs * (3 * 16 + 2 * 7)


def test_integers_too_large_for_the_kernels_are_computed_otherwise(caplog):
    problem = replace(ORDINARY, case=CASES["documents"], dtype=torch.float32)
    q, k, v, (a, b, padding) = problem.tensors()
    apart = 2**31
    with ops.force_implementation("cpu"):
        found = scored_attention(q, k, v, [a * apart, b * apart, padding], problem.case.text, None)
        expected = scored_attention(q, k, v, [a, b, padding], problem.case.text, None)
    assert "may be too large for the C++ kernels" in caplog.text
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


# -- planted faults


# What is wrong, the program that shows it, and the line of the C++ source and what is in its place.
FAULTS = {
    "a key after the last": ("bias of keys", "hide_after(place.keys - i,", "hide_after(place.keys + 1 - i,"),
    "the last key of a block is not read": ("slopes", "std::min(kBlockKeys, all", "std::min(kBlockKeys - 1, all"),
    "a tile of queries too few": ("slopes", "std::min(tile_queries, sizes.queries - place",
                                  "std::min(tile_queries - 1, sizes.queries - place"),
    "the keys of the block before": ("slopes", "= block * kBlockKeys;", "= (block > 0 ? block - 1 : 0) * kBlockKeys;"),
    "a tensor of the first head": ("bias", "place.head(row) * x.stride[2] + key", "place.head(0) * x.stride[2] + key"),
    "what is hidden is read off one row": ("documents", "bounds.include(at(row));", ";"),
    "what weighs something is taken for masked": ("documents, finite", "smallest < kVanishing<T>;", "smallest < T(1);"),
    "flags are those of the first row": ("flags", "      return same;\n    });", "      return false;\n    });"),
    "the log-sum-exp passes nothing on": ("slopes", "width, grad_lse, sequence", "width, Tensor{}, sequence"),
    "a gradient that is added up twice": ("bias of keys", "target[i] += sums_.data()", "target[i] += 2 * sums_.data()"),
    "a row's sum is dropped": ("slopes", "sum0.store(sums[0].lanes + row * kLanes<T>);", ""),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    case, old, new = FAULTS[fault]
    planted, load_generated = "", cpp.load_generated

    def load(operator: str, part: str, text: str) -> Any:
        nonlocal planted
        source = cpp._source(operator, f"{part}.cpp").replace("// PROGRAM\n", text)
        if planted or old not in source:
            return load_generated(operator, part, text)  # one direction shows it; the other's kernel is there
        planted = part
        directory = cpp.kernel_directory(inductor_files.prepare())
        return cpp._obtain(f"{operator}-{part}", directory, source.replace(old, new))

    monkeypatch.setattr(cpp, "load_generated", load)
    cpu._library.cache_clear()
    try:
        with pytest.raises(AssertionError, match="error"):
            check(replace(ORDINARY, case=CASES[case], tiled=False), KERNELS["scored"]["cpu"])
    finally:
        cpu._library.cache_clear()
    assert planted, "the source has no such line"


def _one_key_less(tiles: Tensor | None, queries: int, keys: int) -> Any:
    for rows, columns in _spans(tiles, queries, keys):
        yield rows, slice(columns.start, columns.stop - 1)


def _of_others(scores: Tensor, largest: Tensor) -> Tensor:
    return _exp(scores, largest.roll(1, 1))


_spans, _exp = portable._spans, portable._exp
PORTABLE_FAULTS = {
    "a span that ends one key early": ("_spans", _one_key_less),
    "another row's sum": ("_exp", _of_others),
}


@pytest.mark.parametrize("fault", PORTABLE_FAULTS)
def test_a_planted_fault_of_the_portable_kernel_is_seen(fault, monkeypatch):
    monkeypatch.setattr(portable, *PORTABLE_FAULTS[fault])
    with pytest.raises(AssertionError, match="error"):
        check(replace(ORDINARY, case=CASES["slopes"]), KERNELS["scored"]["portable"])


def test_functions_of_float32_are_accurate():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-30, 1, 400), torch.tensor([0.0, 80, -80, 200, -200])])
    names = ("tanh", "sigmoid", "silu")
    # One key: the log-sum-exp is its score. Each head takes one of the functions.
    text = """v0 = tanh.default(s0)
v1 = sigmoid.default(s0)
v2 = silu.default(s0)
v3 = eq.Scalar(x0, 1)
v4 = where.self(v3, v1, v0)
v5 = eq.Scalar(x0, 2)
v6 = where.self(v5, v2, v4)
return v6"""
    q, ones = x.view(-1, 1, 1, 1).repeat(1, 1, 3, 1), torch.ones(len(x), 1, 1)
    with ops.force_implementation("cpu"):
        _, lse, _ = scored_attention([q], [ones], ones, [torch.arange(3).view(1, 1, 3, 1)], text, None)
    for name, found in zip(names, lse.double().unbind(2), strict=True):
        exact = getattr(torch.nn.functional, name)(x.double())
        error = (found.flatten() - exact).abs() / exact.abs().clamp_min(1e-37)
        assert error.max() < 5 * torch.finfo(torch.float32).eps, name


# A dividend for each query, and divisors.
DIVIDENDS = (2**30 - 1, -(2**30) + 1, 2**30 - 5, -(2**30) + 3, -7, 7, -9, 9, 2**29, 5)
DIVISORS = (3, 7, -3, -7, 1, 2**30 - 1)


@pytest.mark.deep
def test_integer_quotients_are_exact():
    """One head for each divisor and operator: a score is 1 where the number is not what is due."""
    calls = [(name, b) for b in DIVISORS for name in ("floor_divide.default", "remainder.Scalar")]
    due = torch.tensor([[a // b if "divide" in name else a % b for name, b in calls] for a in DIVIDENDS])
    lines, total = [], None
    for i, (name, b) in enumerate(calls):
        n = len(lines)
        lines += [f"v{n} = {name}(x0, {b})", f"v{n + 1} = eq.Scalar(x1, {i})"]
        if total is None:
            total = f"v{n}"
        else:
            lines.append(f"v{n + 2} = where.self(v{n + 1}, v{n}, {total})")
            total = f"v{n + 2}"
    n = len(lines)
    lines += [f"v{n} = ne.Tensor({total}, x2)", f"v{n + 1} = mul.Tensor(s0, v{n})", f"return v{n + 1}"]
    S, m = due.shape
    dividends = torch.tensor(DIVIDENDS).view(1, S, 1, 1).repeat(1, 1, 1, 3)  # with an element for each key: vectors
    leaves = [dividends, torch.arange(m).view(1, 1, m, 1), due.view(1, S, m, 1)]
    q, k, v = torch.ones(1, S, m, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 1)
    with ops.force_implementation("cpu"), observe() as uses:
        _, lse, _ = scored_attention([q], [k], v, leaves, "\n".join(lines), None)
    assert [use.implementation.partition(",")[0] for use in uses] == ["C++"]
    exact = torch.full_like(lse, math.log(3))
    wrong = (lse - exact).abs() > 1e-6
    assert not wrong.any(), [(DIVIDENDS[s], *calls[i]) for _, s, i in wrong.nonzero().tolist()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": []}, "q has 1 tensors and k 0"),
        (
            {"leaves": [torch.zeros(2, 1, 1, 5)]},
            "leaves[0] is torch.float32 [2, 1, 1, 5]; it must broadcast to "
            "[1, 3, 1, 4] or, floating and with an element for each distance, to [1, 1, 1, 6]",
        ),
        ({"leaves": [torch.zeros(1, 1, 1, 6).long()]}, "leaves[0] is torch.int64 [1, 1, 1, 6]; it must broadcast"),
        ({"tiles": torch.zeros(1, 1)}, "tiles is torch.float32 [1, 1]; it must be torch.uint8 [1, 1]"),
        ({"program": "v0 = gamma.default(s0)\nreturn v0"}, "a program of scores has no operator gamma.default"),
        ({"program": "s0 + 1"}, "no program of scores"),
    ],
)
def test_errors_name_value_and_rule(change, message):
    given = {"q": [torch.zeros(1, 3, 1, 2)], "k": [torch.zeros(1, 4, 2)], "v": torch.zeros(1, 4, 2), "leaves": [],
             "program": "return s0", "tiles": None}  # fmt: skip
    with pytest.raises(ValueError) as error:  # noqa: PT011
        scored_attention(**(given | change))
    assert message in str(error.value)

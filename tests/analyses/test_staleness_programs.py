"""Programs written against the proof: masks, scores, sinks, padding, and infinities where they hurt. Each is a step
around a key and a value cache; compiled, it equals its loop in values and gradients, NaN for NaN, whatever that takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nsa_compile
from tests.step_programs import loop, values_and_grads

S, D = 6, 3
INF = math.inf
LOWEST = torch.finfo(torch.float64).min


@dataclass(frozen=True)
class Program:
    """A step `body(q, k, v, t, x, w)`; `row` makes of an input what is written, `w` is closed over.

    Attributes:
        dropped: whether the proof must succeed (True), or must not (False); None where only the numbers count.
    """

    body: Callable[..., Tensor]
    w: Any = 0.0
    row: Callable[..., Tensor] = lambda x, w: x
    init: float = 0.0
    rows: int = S
    dropped: bool | None = False
    change: Callable[[dict[str, Tensor]], None] = field(default=lambda xs: None)

    def run(self, scan: Any, init: Any, xs: Any, w: Tensor) -> Tensor:
        r = torch.arange(self.rows)

        def step(carry: Any, x: Any) -> Any:
            here = (r == x["t"])[:, None]
            k, v = (torch.where(here, self.row(x[n], w), c) for n, c in zip("kv", carry, strict=True))
            return (k, v), self.body(x["q"], k, v, x["t"], x, w)

        first = torch.full((self.rows, D), self.init, dtype=torch.float64)
        return scan(step, (first, first.clone()), {**xs, "t": torch.arange(S)})[1]

    def inputs(self) -> tuple[dict, dict[str, Tensor], Tensor]:
        rng = torch.Generator().manual_seed(0)
        xs = {n: torch.randn(S, D, generator=rng, dtype=torch.float64) for n in "qkv"}
        self.change(xs)
        w = torch.as_tensor(self.w, dtype=torch.float64).clone().requires_grad_()
        return {}, {n: x.requires_grad_() for n, x in xs.items()}, w


def rows() -> Tensor:
    """Made where it is used: a tensor from outside would be data to the compiler."""
    return torch.arange(S)


def attend(s: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(s, -1) @ v


def lowest(s: Tensor, t: Tensor) -> Tensor:
    return s.masked_fill(torch.arange(len(s)) > t, LOWEST)


def infinite(s: Tensor, t: Tensor) -> Tensor:
    return s.masked_fill(torch.arange(len(s)) > t, -INF)


def after(p: Tensor, t: Tensor) -> Tensor:
    return p.masked_fill(torch.arange(p.shape[-1]) > t, 0.0)


LEFT = [-INF, -INF, 0.0, 0.0, 0.0, 0.0]  # two tokens of padding
LEFT_LOW = [LOWEST, LOWEST, 0.0, 0.0, 0.0, 0.0]
REAL = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def pad_with_zero_vectors(xs: dict[str, Tensor]) -> None:
    xs["k"][-2:] = 0.0


def gates(q: Tensor, k: Tensor, t: Tensor, late: int = 0) -> Tensor:
    """Of the three blocks of two rows the products with their mean keys; blocks that are not whole are masked."""
    number = torch.arange(3)
    gate = (k.unflatten(0, (3, 2)).mean(1) @ q).masked_fill(number > t // 2 + late, -INF)
    return gate if late else gate.masked_fill(number == t // 2, INF)


def by_blocks(gate: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    chosen = torch.zeros(3, dtype=torch.bool).scatter(0, gate.topk(2).indices, True).repeat_interleave(2)
    return attend((k @ q).masked_fill(~(chosen & (torch.arange(S) <= t)), -INF), v)


PROGRAMS: dict[str, Program] = {
    # Blocks are ranked by what is read of all their rows.
    "the best blocks": Program(
        lambda q, k, v, t, x, w: by_blocks(gates(q, k, t), q, k, v, t), dropped=True
    ),
    "the best blocks, the last of them not whole": Program(
        lambda q, k, v, t, x, w: by_blocks(gates(q, k, t).nan_to_num(posinf=0.0) + gates(q, k, t, 1), q, k, v, t)
    ),
    "the best blocks, masked one too late": Program(
        lambda q, k, v, t, x, w: by_blocks(gates(q, k, t, 1), q, k, v, t)
    ),
    "the gates of the best blocks": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q, t), v) * gates(q, k, t).topk(2).values.clamp(-1, 1)[1]
    ),
    # What a mask keeps may be at the floor before.
    "a padding bias of -inf, given": Program(lambda q, k, v, t, x, w: attend(lowest(k @ q + w, t), v), LEFT),
    "a padding bias of the lowest, given": Program(lambda q, k, v, t, x, w: attend(lowest(k @ q + w, t), v), LEFT_LOW),
    "a padding bias of -inf, constant": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q + torch.where(rows() < 2, -INF, 0.0), t), v)
    ),
    "a padding bias of the lowest, constant": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q + (rows() < 2).double() * LOWEST, t), v)
    ),
    "a padding bias in two steps": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q + (1.0 - w) * LOWEST, t), v), REAL
    ),
    "the logarithm of a mask": Program(lambda q, k, v, t, x, w: attend(lowest(k @ q + torch.log(w), t), v), REAL),
    "padding filled first": Program(
        lambda q, k, v, t, x, w: attend(lowest((k @ q).masked_fill(w == 0, -INF), t), v), REAL
    ),
    "padding filled first with the lowest": Program(
        lambda q, k, v, t, x, w: attend(lowest((k @ q).masked_fill(w == 0, LOWEST), t), v), REAL
    ),
    "scores given": Program(lambda q, k, v, t, x, w: attend(lowest(w, t), v), LEFT),
    "a padded sink": Program(
        lambda q, k, v, t, x, w: (
            torch.softmax(lowest(F.pad(k @ q, (1, 0), value=-INF)[: S + 1], t), -1)[1:] @ v
        )
    ),
    "a sink beside": Program(
        lambda q, k, v, t, x, w: torch.softmax(lowest(torch.cat([w[:1], k @ q])[:S], t), -1)[1:] @ v[: S - 1], LEFT
    ),
    "a sink of -inf beside masked scores": Program(
        lambda q, k, v, t, x, w: (
            torch.softmax(F.pad((k @ q).masked_fill(t <= rows(), LOWEST), (1, 0), value=-INF), -1)[1:] @ v
        )
    ),
    "an outer product of a bias": Program(
        lambda q, k, v, t, x, w: attend(lowest(torch.where(w < 0, w, k @ q), t), v), LEFT
    ),
    "scores scaled out of range": Program(lambda q, k, v, t, x, w: attend(lowest((k @ q).abs() * -1e308, t), v)),
    "scores scaled out of range twice": Program(
        lambda q, k, v, t, x, w: attend(lowest((k @ q).abs() * -1e200 * 1e107, t), v)
    ),
    "documents that leave nothing": Program(
        lambda q, k, v, t, x, w: attend(
            torch.where((t >= rows()) & (rows() >= 3), k @ q, LOWEST), v
        )
    ),
    "a window before the first row": Program(
        lambda q, k, v, t, x, w: attend((k @ q).masked_fill((t <= rows()) | (t - 3 > rows()), LOWEST), v)
    ),
    "two masks that leave nothing together": Program(
        lambda q, k, v, t, x, w: attend(infinite((k @ q).masked_fill(t >= rows(), LOWEST), t), v),
        dropped=True,
    ),
    # Nothing but -inf is NaN, as it is in the loop.
    "a padding bias of -inf under -inf": Program(
        lambda q, k, v, t, x, w: attend(infinite(k @ q + w, t), v), LEFT, dropped=True
    ),
    "nothing kept at first, and no NaN": Program(
        lambda q, k, v, t, x, w: torch.softmax((k @ q).masked_fill(t <= rows(), -INF), -1).nan_to_num(0.0) @ v,
        dropped=True,
    ),
    "nothing kept at first, and NaN": Program(
        lambda q, k, v, t, x, w: torch.softmax((k @ q).masked_fill(t <= rows(), -INF), -1) @ v
    ),
    "nothing kept, times a mask": Program(
        lambda q, k, v, t, x, w: (torch.softmax((k @ q).masked_fill(t <= rows(), -INF), -1) * (t > rows())) @ v
    ),
    "nothing kept, then zeros": Program(
        lambda q, k, v, t, x, w: (
            torch.softmax((k @ q).masked_fill(t <= rows(), -INF), -1).masked_fill(t <= rows(), 0.0) @ v
        ),
        dropped=None,
    ),
    "nothing kept, added": Program(
        lambda q, k, v, t, x, w: attend(k @ q + torch.zeros(S, dtype=torch.float64).masked_fill(t <= rows(), -INF), v)
    ),
    # Infinities and NaN in caches, or where stale rows go.
    "caches of NaN": Program(lambda q, k, v, t, x, w: after(torch.softmax(lowest(k @ q, t), -1), t) @ v, init=math.nan),
    "caches of -inf": Program(lambda q, k, v, t, x, w: (v * (t >= rows())[:, None]).sum(0), init=-INF),
    "rows of logarithms": Program(
        lambda q, k, v, t, x, w: (v * (t >= rows())[:, None]).sum(0), row=lambda x, w: torch.log(F.relu(x))
    ),
    "rows of zeros, normalised": Program(
        lambda q, k, v, t, x, w: (k * (t >= rows())[:, None]).sum(0),
        row=lambda x, w: x / x.norm(),
        change=pad_with_zero_vectors,
    ),
    "rows masked with -inf": Program(
        lambda q, k, v, t, x, w: after(torch.softmax(lowest(k @ q, t), -1), t) @ v,
        row=lambda x, w: torch.where(x > 1, -INF, x),
    ),
    "a root of hidden rows": Program(
        lambda q, k, v, t, x, w: (v * (t >= rows())[:, None]).pow(2).sum(-1).sqrt().sum(),
    ),
    "a power of hidden rows": Program(
        lambda q, k, v, t, x, w: (v * (t >= rows())[:, None]).abs().pow(0.5).sum(),
    ),
    "the logarithm of weights": Program(
        lambda q, k, v, t, x, w: (torch.softmax(infinite(k @ q, t) + infinite(w, t), -1) + 1e-3).log() @ v, [0.0] * S
    ),
    "a quotient of hidden rows": Program(
        lambda q, k, v, t, x, w: torch.where((t >= rows())[:, None], v / w, 0.0).sum(0), [1.0, 0.0, 2.0]
    ),
    "the opposite of hidden numbers": Program(
        lambda q, k, v, t, x, w: (~(((t >= rows()) & (v[:, 0] > w)).long()) * v[:, 1]).sum()
    ),
    # Within the promise.
    "scores of a product": Program(lambda q, k, v, t, x, w: attend(lowest(k @ q * 0.5, t), v), dropped=True),
    "scores of a sum": Program(lambda q, k, v, t, x, w: attend(infinite((k * q).sum(-1), t), v), dropped=True),
    "a bias of positions": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q - 0.1 * (t - rows()), t), v), dropped=True
    ),
    "capped scores": Program(
        lambda q, k, v, t, x, w: attend(lowest(5 * torch.tanh(k @ q + w), t), v), LEFT, dropped=True
    ),
    "a padding bias, and zeros behind": Program(
        lambda q, k, v, t, x, w: after(torch.softmax(lowest(k @ q + w, t), -1), t) @ v, LEFT, dropped=True
    ),
    "rows that are normalised": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q, t), v),
        row=lambda x, w: F.layer_norm(x * torch.rsqrt(x.pow(2).mean() + 1e-6), (D,)),
        dropped=True,
    ),
    "rows that are normalised otherwise": Program(
        lambda q, k, v, t, x, w: attend(lowest(k @ q, t), v), row=lambda x, w: F.normalize(x, dim=-1), dropped=True
    ),
    "a zero sink": Program(
        lambda q, k, v, t, x, w: torch.softmax(F.pad(infinite(k @ q, t), (1, 0)), -1)[1:] @ v, dropped=True
    ),
    "documents and oneself": Program(
        lambda q, k, v, t, x, w: attend(
            torch.where((t >= rows()) & ((w > 0) | (t == rows())), k @ q, LOWEST), v
        ),
        REAL,
        dropped=True,
    ),
    # Without a mask: rows of zeros have weights, which are made of rows of zeros themselves.
    "every row": Program(lambda q, k, v, t, x, w: (k @ q).sigmoid() @ v),
    "every row, and its weight twice": Program(lambda q, k, v, t, x, w: ((k @ q).relu() + v[:, 0]) @ v),
    "every row, beside the sum of all": Program(lambda q, k, v, t, x, w: (k @ q + (k @ q).sum()) @ v, dropped=False),
    "every row and one more": Program(lambda q, k, v, t, x, w: (k @ q).sigmoid() @ (v + 1), dropped=False),
    "the row before": Program(lambda q, k, v, t, x, w: (k @ q).relu() @ v.roll(1, 0), dropped=False),
    "chosen rows": Program(
        lambda q, k, v, t, x, w: torch.where((t >= rows())[:, None], torch.where(v > w, v, -INF), 0.0).amax(0),
        dropped=True,
    ),
}  # fmt: skip


# Some row holds nothing that stands out, so that unwritten rows have weights; they are rows of zeros.
BY_ROWS_OF_ZEROS = [
    "every row",
    "every row, and its weight twice",
    "a padding bias of -inf, given",
    "a padding bias of the lowest, constant",
    "a padding bias of the lowest, given",
    "padding filled first with the lowest",
    "scores given",
    "a sink beside",
    "documents that leave nothing",
    "a window before the first row",
    "an outer product of a bias",
    "the logarithm of weights",
]


@pytest.mark.deep(but=["a quotient of hidden rows"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_its_loop(name):
    program = PROGRAMS[name]
    check(replace(program, dropped=True) if name in BY_ROWS_OF_ZEROS else program)


@pytest.mark.deep(but=["chosen rows"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_it_does_with_every_pass(name):
    check(PROGRAMS[name], disable=())


@pytest.mark.deep(but=["every row, and its weight twice"])
@pytest.mark.parametrize("name", BY_ROWS_OF_ZEROS)
def test_rows_of_others_keep_their_guards(name):
    check(replace(PROGRAMS[name], init=0.25))


def check(program, disable=("unroll_buffers",), **others):
    """Compare a program with its loop; by itself, the proof keeps or drops the guards that the program says."""
    expected = values_and_grads(program.run, loop, *program.inputs())
    torch._dynamo.reset()
    options = {"nested": "eager", "cache": False, "disable": list(disable), **others}
    fast = torch.compile(program.run, backend="nsa_compile", fullgraph=True, dynamic=False, options=options)
    actual = values_and_grads(lambda scan, *inputs: fast(nsa_compile.scan, *inputs), None, *program.inputs())
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, equal_nan=True)
    (record,) = nsa_compile.last_report().scans
    assert record.batched or record.declines
    if disable == ("unroll_buffers",) and program.dropped is not None:
        assert (record.batched and not record.guards_kept) == program.dropped

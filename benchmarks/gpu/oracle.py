"""What is right: attention at some of the queries, in any precision, and how far a result is from it.

`nsa_at` and `dense_at` are plain torch on the rows of a few queries, so that float64 is affordable at any length. The
gradient that a check sends back is zero at all other queries, so they give the whole gradient of keys and values, too.
At small sizes the reference is `verification/oracle.py` instead, token by token.

Near ties low precision may rightly choose another block. `nsa_at` says how clear each choice is, and a check looks at
queries whose choices are clear in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.problem import Problem
from nsa_compile.models import SparsePattern
from nsa_compile.verification.oracle import nsa_attention_oracle

NAMES = ("out", "dq", "dk", "dv", "dgate")
# Relative distance of the last chosen block's score from the first rejected one's, below which a choice is a near tie.
CLEAR = {torch.bfloat16: 0.02, torch.float16: 0.004, torch.float32: 1e-4}
SAMPLED = 16
_loop_results: dict[Problem, list[Tensor | None]] = {}

Attention = Callable[..., Tensor]


def nsa_at(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, positions: Tensor, pattern: SparsePattern
) -> tuple[Tensor, Tensor]:
    """NSA of q `[B, P, H, D]` at `positions` `[P]` over k, v `[B, S, G, D]`, with gates before sigmoid `[B, P, H, 3]`.

    Returns the output `[B, P, H, D]` and the margin of each choice of blocks `[B, P, G]`.
    """
    length, groups = k.shape[1:3]
    grouped = q.unflatten(2, (groups, -1))  # [B, P, G, h, D]
    block, stride = pattern.compress_block, pattern.compress_stride

    # eq. 7 with the mean as φ, and eq. 8.
    k_cmp, v_cmp = (x.unfold(1, block, stride).mean(-1) for x in (k, v))  # [B, N, G, D]
    end = torch.arange(k_cmp.shape[1], device=q.device) * stride + block - 1
    seen = end <= positions[:, None]  # [P, N]
    o_cmp, p_cmp = _attend(grouped, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), seen[:, None])
    indices, margin = _select(p_cmp.detach().sum(3), positions, length, pattern)

    # eq. 12: the tokens of the chosen blocks.
    within = torch.arange(pattern.select_block, device=q.device)
    tokens = (indices[..., None] * pattern.select_block + within).flatten(-2)  # [B, P, G, n * l']
    kept = (indices >= 0).repeat_interleave(pattern.select_block, -1) & (tokens <= positions[:, None, None])
    o_slc, _ = _attend(grouped, *(_rows(x, tokens) for x in (k, v)), kept)

    # §3.3.3: the last w tokens.
    tokens = positions[:, None] - torch.arange(min(pattern.window, length), device=q.device)  # [P, w]
    everywhere = tokens[None, :, None].expand(q.shape[0], -1, groups, -1)
    o_win, _ = _attend(grouped, *(_rows(x, everywhere) for x in (k, v)), (tokens >= 0)[:, None])

    gates = gate.sigmoid().unflatten(2, (groups, -1))[..., None]
    out = sum(gates[..., i, :] * o for i, o in enumerate((o_cmp, o_slc, o_win)))
    return out.flatten(2, 3), margin


def dense_at(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, positions: Tensor, pattern: SparsePattern, windowed: bool = False
) -> tuple[Tensor, Tensor]:
    """Causal attention with the arguments of `nsa_at`, to all keys or to the last `pattern.window`; nothing is chosen,
    so every margin is infinite."""
    groups, key = k.shape[2], torch.arange(k.shape[1], device=q.device)
    seen = key <= positions[:, None]
    if windowed:
        seen &= key > positions[:, None] - pattern.window
    out, _ = _attend(q.unflatten(2, (groups, -1)), k.transpose(1, 2), v.transpose(1, 2), seen[:, None])
    return out.flatten(2, 3), q.new_full((*q.shape[:2], groups), torch.inf)


REFERENCES = {"nsa": nsa_at, "dense": dense_at, "window": partial(dense_at, windowed=True)}


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """q `[B, P, G, h, D]`, k and v `[B, G, T, D]` or, for each query, `[B, P, G, T, D]`, seen `[..., P, G or 1, T]`.

    Returns output and weights.
    """
    seen, keys = seen[..., None, :], "bgtd" if k.dim() == 4 else "bpgtd"
    scores = torch.einsum(f"bpghd,{keys}->bpght", q, k) * q.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum(f"bpght,{keys}->bpghd", weights.to(v.dtype), v), weights


def _rows(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows `tokens` `[B, P, G, T]` of x `[B, S, G, D]`, as `[B, P, G, T, D]`."""
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    group = torch.arange(x.shape[2], device=x.device)[:, None]
    return x[batch, tokens.clamp(0, x.shape[1] - 1), group]


def _select(p: Tensor, positions: Tensor, length: int, pattern: SparsePattern) -> tuple[Tensor, Tensor]:
    """eq. 9 to 11 for weights summed over heads `[B, P, G, N]`: blocks `[B, P, G, n]`, -1 where none, and margins."""
    ratio, sign = pattern.select_block // pattern.compress_stride, 1 if pattern.index_convention == "minus" else -1
    blocks = torch.arange(-(-length // pattern.select_block), device=p.device)
    score = p.new_zeros(*p.shape[:3], len(blocks))
    for m in range(ratio):
        for n in range(pattern.compress_block // pattern.compress_stride):
            i = ratio * blocks + sign * m - n
            score += torch.where((i >= 0) & (i < p.shape[-1]), p[..., i.clamp(0, p.shape[-1] - 1)], 0)
    current = (positions // pattern.select_block)[:, None, None]
    forced = (blocks < pattern.num_initial) | (blocks > current - pattern.num_local)
    score = score.masked_fill(forced, torch.inf).masked_fill(blocks > current, -torch.inf)
    best, order = score.sort(dim=-1, descending=True, stable=True)
    count = min(pattern.num_selected, len(blocks))
    indices = order[..., :count].masked_fill(best[..., :count] == -torch.inf, -1)
    if count == len(blocks):
        return indices, torch.full_like(best[..., 0], torch.inf)
    last, rejected = best[..., count - 1], best[..., count]
    compete = last.isfinite() & rejected.isfinite()
    return indices, torch.where(compete, (last - rejected) / last, torch.inf)


@dataclass(frozen=True)
class Verdict:
    """How far a result is from float64: root mean squares of the differences over those of the reference.

    Attributes:
        errors: of the output and of each gradient.
        eager: the same of plain torch in the dtype of the inputs.
        queries: how many query-group pairs were compared.
    """

    errors: dict[str, float]
    eager: dict[str, float]
    queries: int
    eps: float

    @property
    def agrees(self) -> bool:
        """Whether all errors are of the size of roundings: twice those of plain torch, and one more."""
        return all(self.errors[name] <= 2 * self.eager[name] + self.eps for name in self.errors)

    @property
    def worst(self) -> float:
        """The largest error in units of plain torch's."""
        return max(self.errors[name] / max(self.eager[name], 1e-30) for name in self.errors)

    def as_data(self) -> dict[str, Any]:
        return {"agrees": self.agrees, "worst_of_eager": self.worst, "queries": self.queries,
                "errors": self.errors, "eager_errors": self.eager}  # fmt: skip


def check_sampled(attention: Attention, problem: Problem, kind: str, device: torch.device) -> Verdict:
    """Compare at some queries, the last and the first among them, with float64."""
    count = min(SAMPLED if problem.groups <= 16 else SAMPLED // 4, problem.seq_len)
    positions = torch.linspace(0, problem.seq_len - 1, count, device=device, dtype=torch.float64).round().long()
    return _check(attention, problem, kind, positions, device, loop=False)


def check_small(attention: Attention, problem: Problem, kind: str, device: torch.device) -> Verdict:
    """Compare every query of a small problem with the same heads per group; NSA with the oracle, token by token."""
    positions = torch.arange(problem.seq_len, device=device)
    return _check(attention, problem, kind, positions, device, loop=kind == "nsa")


def small(problem: Problem) -> Problem:
    """Two groups, and a length at which there is something to select."""
    pattern = replace(problem.pattern, num_selected=4, window=min(problem.pattern.window, 96))
    heads = problem.heads // problem.groups
    return replace(problem, seq_len=6 * pattern.select_block + 8, groups=2, heads=2 * heads, pattern=pattern)


def _check(
    attention: Attention, problem: Problem, kind: str, positions: Tensor, device: torch.device, loop: bool
) -> Verdict:
    inputs = problem.inputs(device)
    exact, margin = _reference(inputs, positions, problem, kind, torch.float64)
    clear = margin > CLEAR.get(problem.dtype, 0.0)  # [B, P, G]
    assert clear.any(), "no choice of blocks is clear; nothing could be compared"
    rows = clear.repeat_interleave(problem.heads // problem.groups, 2)[..., None]  # [B, P, H, 1]
    generator = torch.Generator(device).manual_seed(7)
    shape = (problem.batch_size, len(positions), problem.heads, problem.head_dim)
    grad = (torch.randn(shape, generator=generator, device=device) * rows).to(problem.dtype)

    if loop:  # slow, and the same for every contender
        if problem not in _loop_results:
            _loop_results[problem] = _loop_reference(inputs, grad, problem)
        expected = _loop_results[problem]
    else:
        expected = exact(grad)
    eager = _reference(inputs, positions, problem, kind, problem.dtype)[0](grad)
    full = torch.zeros_like(inputs[0]).index_copy(1, positions, grad)
    out = attention(*inputs)
    gradients = torch.autograd.grad(out, inputs, full, allow_unused=True)
    got = [x if x is None else x.index_select(1, positions) if at_rows else x
           for x, at_rows in zip((out, *gradients), (True, True, False, False, True), strict=True)]  # fmt: skip

    def errors(results: Sequence[Tensor | None]) -> dict[str, float]:
        compared = {}
        for name, ours, reference in zip(NAMES, results, expected, strict=True):
            if ours is None or reference is None:  # dense attention has no gates
                continue
            ours, reference = ours.detach().double(), reference.to(device)
            if name == "out":
                ours, reference = ours * rows, reference * rows
            compared[name] = ((ours - reference).norm() / reference.norm().clamp_min(1e-30)).item()
        return compared

    return Verdict(errors(got), errors(eager), int(clear.sum()), torch.finfo(problem.dtype).eps)


def _reference(
    inputs: Sequence[Tensor], positions: Tensor, problem: Problem, kind: str, dtype: torch.dtype
) -> tuple[Callable[[Tensor], list[Tensor | None]], Tensor]:
    """Plain torch at `positions` in `dtype`: what gives output and gradients for a gradient, and the margins."""
    q, k, v, gate = (x.detach() for x in inputs)
    rows = (q.index_select(1, positions), k, v, gate.index_select(1, positions))
    leaves = [x.to(dtype).requires_grad_() for x in rows]
    out, margin = REFERENCES[kind](*leaves, positions, problem.pattern)

    def results(grad: Tensor) -> list[Tensor | None]:
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype), allow_unused=True)]

    return results, margin


def _loop_reference(inputs: Sequence[Tensor], grad: Tensor, problem: Problem) -> list[Tensor | None]:
    p = problem.pattern
    q, k, v, gate = (x.detach().cpu().double().requires_grad_() for x in inputs)
    out, _ = nsa_attention_oracle(
        q, k, v, k, v, k, v, gate.sigmoid(), l=p.compress_block, d=p.compress_stride, l_sel=p.select_block,
        n=p.num_selected, w=p.window, num_initial=p.num_initial, num_local=p.num_local,
        index_convention=p.index_convention,
    )  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, gate), grad.cpu().double())]

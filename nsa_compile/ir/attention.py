"""The attention node: what raise_attention makes of matmul, scale, mask, softmax and matmul.

`q [N, S, m, D]`: N sequences, S queries, m heads that read the same keys; `k [N, T, D]`, `v [N, T, Dv]`. The node
knows its mask as data, one of `MaskKind`. A tensor `mask` `[N|1, S|1, m|1, T]`, where there is one, is the whole of it,
and the kind only tells what it will be over all steps. `indices [N, S, n]` (-1: none), where given, narrow any mask to
the tokens of blocks of `select_block`.

Passes read nodes as `AttentionCall.of(node)` and `SelectCall.of(node)`, and make new ones of `call.args`. Queries that
see nothing get zeros, or NaN as from a softmax over nothing but -inf. `lower_attention` replaces these nodes; as they
are, they compute densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops.compressed.selection import best_blocks, block_scores, sum_heads
from nsa_compile.ops.scored import scored_attention, scored_places, weighted_sum


@dataclass(frozen=True)
class Window:
    """Query s sees the keys `s - size < p <= s`; with `size >= S` that is plain causal attention."""

    name: ClassVar[str] = "window"
    size: int

    def __str__(self) -> str:
        return f"window of {self.size}"

    def visible(self, s: Tensor, p: Tensor) -> Tensor:
        return (p <= s) & (p > s - self.size)


@dataclass(frozen=True)
class Blocks:
    """Query s sees block p where `p * stride + size - 1 <= s`."""

    name: ClassVar[str] = "blocks"
    size: int
    stride: int

    def __str__(self) -> str:
        return f"blocks of {self.size}, stride {self.stride}"

    def visible(self, s: Tensor, p: Tensor) -> Tensor:
        return p * self.stride + self.size - 1 <= s


@dataclass(frozen=True)
class All:
    """Every key."""

    name: ClassVar[str] = "all"

    def __str__(self) -> str:
        return "no mask"

    def visible(self, s: Tensor, p: Tensor) -> Tensor:
        return (p >= 0).expand(len(s), len(p))


@dataclass(frozen=True)
class Opaque:
    """What the tensor `mask` says."""

    name: ClassVar[str] = "opaque"

    def __str__(self) -> str:
        return "opaque mask"

    def visible(self, s: Tensor, p: Tensor) -> Tensor:
        raise ValueError("an opaque mask needs a tensor")


MaskKind = Window | Blocks | All | Opaque
_KINDS: dict[str, type[MaskKind]] = {kind.name: kind for kind in (Window, Blocks, All, Opaque)}

T = TypeVar("T", fx.Node, Tensor)

# Each key is there at all positions: see `nan_rows`.
ALWAYS_THERE = (0, 0, 0, -1)


@dataclass(frozen=True)
class AttentionCall(Generic[T]):
    """The arguments of an attention node, or of one call of its operator."""

    q: T
    k: T
    v: T
    mask: T | None
    indices: T | None
    scale: float
    kind: MaskKind
    select_block: int = 0
    # Whether a query that sees nothing gets NaN, and when each key is there, see `nan_rows`. (): it gets zeros.
    nan_from: tuple[int, ...] = ()

    TENSORS: ClassVar = ("q", "k", "v", "mask", "indices")

    @classmethod
    def of(cls, node: fx.Node) -> AttentionCall[fx.Node]:
        """The call that a node of the graph is."""
        given: Any = node.args
        call: Any = cls.from_args(*given)
        return call

    @classmethod
    def from_args(
        cls,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        indices: Any,
        scale: float,
        kind: str,
        params: Sequence[int],
        block: int,
        nan_from: Sequence[int],
    ) -> Self:
        return cls(q, k, v, mask, indices, scale, _KINDS[kind](*params), block, tuple(nan_from))

    @property
    def args(self) -> tuple[Any, ...]:
        """As the operator takes them."""
        tensors: tuple[Any, ...] = (self.q, self.k, self.v, self.mask, self.indices)
        name, params = self.kind.name, list(astuple(self.kind))
        return (*tensors, self.scale, name, params, self.select_block, list(self.nan_from))


@dataclass(frozen=True)
class SelectCall(Generic[T]):
    """The arguments of a node that selects blocks, or of one call of its operator.

    eq. 8: weights of `q [N, S, m, D]` over the compressed keys `k [N, T, D]`, under a mask of `kind`, or the tensor
    `mask [1, S, 1, T]`. Their sum over the m heads gives block j the importance
    `Σ factors[i] · p[j · select_block / kind.stride + offsets[i]]` (eq. 9 and 10). The first `num_initial` and the last
    `num_local` of the blocks up to the query's own are always taken; then the best, ties to the lower index (eq. 11).
    Tensors `allowed` and `forced [N|1, S, num_blocks]` replace the positions 0 … S − 1 that these rules are about.
    """

    q: T
    k: T
    mask: T | None
    allowed: T | None
    forced: T | None
    scale: float
    kind: Blocks
    select_block: int
    num_blocks: int
    offsets: Sequence[int]
    factors: Sequence[int]
    num_selected: int
    num_initial: int
    num_local: int

    TENSORS: ClassVar = ("q", "k", "mask", "allowed", "forced")

    @classmethod
    def of(cls, node: fx.Node) -> SelectCall[fx.Node]:
        """The call that a node of the graph is."""
        given: Any = node.args
        call: Any = cls.from_args(*given)
        return call

    @classmethod
    def from_args(
        cls, q: Any, k: Any, mask: Any, allowed: Any, forced: Any, scale: float, params: Sequence[int], *rest: Any
    ) -> Self:
        return cls(q, k, mask, allowed, forced, scale, Blocks(*params), *rest)

    @property
    def args(self) -> tuple[Any, ...]:
        """As the operator takes them."""
        return (
            *(self.q, self.k, self.mask, self.allowed, self.forced, self.scale, list(astuple(self.kind))),
            *(self.select_block, self.num_blocks, list(self.offsets), list(self.factors)),
            *(self.num_selected, self.num_initial, self.num_local),
        )


def chosen(indices: Tensor, select_block: int, keys: int) -> Tensor:
    """The tokens of the selected blocks: `[N, S, n]` -> `[N, S, T]`."""
    blocks = -(-keys // select_block)
    valid = (indices >= 0) & (indices < blocks)
    taken = torch.zeros(*indices.shape[:2], blocks + 1, dtype=torch.bool, device=indices.device)
    taken = taken.scatter(-1, torch.where(valid, indices, blocks).long(), True)[..., :blocks]
    return taken.repeat_interleave(select_block, -1, output_size=blocks * select_block)[..., :keys]


def visible(kind: MaskKind, q: Tensor, k: Tensor) -> Tensor:
    """The mask `[1, S, 1, T]` of a kind, for queries at positions 0 … S − 1."""
    s = torch.arange(q.shape[1], device=q.device)[:, None]
    p = torch.arange(k.shape[1], device=q.device)
    return kind.visible(s, p)[None, :, None]


def keep_mask(call: AttentionCall[Tensor]) -> Tensor | None:
    """All that narrows the keys, `[N|1, S|1, m|1, T]`, or None where nothing does."""
    keep = call.mask
    if keep is None and not isinstance(call.kind, All):
        keep = visible(call.kind, call.q, call.k)
    if call.indices is not None:
        taken = chosen(call.indices, call.select_block, call.k.shape[1])[:, :, None]
        keep = taken if keep is None else keep & taken
    return keep


def weights(q: Tensor, k: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """Attention weights `[N, S, m, T]`, in float32 at least; zeros where a query sees nothing."""
    n, s, m, d = q.shape
    scores = torch.bmm(q.reshape(n, s * m, d), k.transpose(1, 2)).reshape(n, s, m, -1) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if keep is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~keep, 0.0)


def dense(call: AttentionCall[Tensor]) -> Tensor:
    """The attention node, computed over all keys: `[N, S, m, Dv]`."""
    n, s, m, _ = call.q.shape
    keep = keep_mask(call)
    prob = weights(call.q, call.k, keep, call.scale)
    out = torch.bmm(prob.to(call.v.dtype).reshape(n, s * m, -1), call.v).reshape(n, s, m, -1)
    return nan_rows(out, ~keep.any(-1), call.v, call.nan_from) if call.nan_from and keep is not None else out


@torch.library.custom_op("nsa_compile::nan_rows", mutates_args=())
def nan_rows(out: Tensor, none: Tensor, v: Tensor, nan_from: Sequence[int]) -> Tensor:
    """The output `[N, S, m, Dv]` of attention to values `[N, T, Dv]`, with NaN for the queries `none [N|1, S|1, m|1]`
    that see nothing, and in the gradients of the values that are there at their positions.

    `nan_from` is `(p, a, b, n)` for each run of keys, the first of which is p: key p + i is there from position
    a + b · i on, for n positions, or for all that follow if n < 0.
    """
    return out + torch.where(none, torch.nan, 0.0).to(out.dtype).unsqueeze(-1)


@nan_rows.register_fake
def _(out, none, v, nan_from):
    return torch.empty_like(out)


@torch.library.custom_op("nsa_compile::nan_rows_backward", mutates_args=())
def nan_rows_backward(none: Tensor, v: Tensor, queries: int, nan_from: Sequence[int]) -> Tensor:
    """What `nan_rows` adds to the gradient of the values."""
    undefined = none.any(-1).expand(-1, queries).cumsum(-1)  # [N|1, S], those up to a position
    before = F.pad(undefined, (1, 0))
    start, stop = (torch.from_numpy(x).to(v.device) for x in positions_of_keys(nan_from, v.shape[1], queries))
    there = before[:, stop] > before[:, start]
    return torch.where(there, torch.nan, 0.0).to(v.dtype)[:, :, None].expand(v.shape).contiguous()


def positions_of_keys(nan_from: Sequence[int], keys: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions, from the first to before the last, at which each key is there: see `nan_rows`."""
    runs = [nan_from[i : i + 4] for i in range(0, len(nan_from), 4)]
    start, stop = (np.empty(keys, dtype=np.int64) for _ in range(2))
    for (first, offset, stride, positions), (end, *_) in zip(runs, [*runs[1:], [keys]], strict=True):
        start[first:end] = offset + stride * np.arange(max(0, end - first))
        stop[first:end] = start[first:end] + positions if positions >= 0 else queries
    start = start.clip(0, queries)
    return start, np.maximum(start, stop.clip(0, queries))


@nan_rows_backward.register_fake
def _(none, v, queries, nan_from):
    return v.new_empty(v.shape)


def _keep_none(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    out, none, v, ctx.nan_from = inputs
    ctx.queries = out.shape[1]
    ctx.save_for_backward(none, v)


def _nan_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    none, v = ctx.saved_tensors
    return grad, None, nan_rows_backward(none, v, ctx.queries, ctx.nan_from), None


nan_rows.register_autograd(_nan_backward, setup_context=_keep_none)


def gathered(call: AttentionCall[Tensor]) -> Tensor:
    """The attention node for one query, `q [N, 1, m, D]`, over the rows of its blocks. No index may come twice.

    All keys are there: a step finds the caches as they are by then.
    """
    q, k, v, indices, block = call.q, call.k, call.v, call.indices, call.select_block
    assert indices is not None
    keys = k.shape[1]
    within = torch.arange(block, device=k.device)
    rows = (indices.long()[..., None] * block + within).flatten(-2)  # [N, 1, n * block]
    there = (indices >= 0).repeat_interleave(block, -1) & (rows < keys)
    rows = torch.where(there, rows, 0)
    keep = keep_mask(replace(call, indices=None))
    there = there[:, :, None]
    if keep is not None:
        keep = keep.expand(q.shape[0], 1, keep.shape[2], keys)
        there = there & keep.gather(-1, rows[:, :, None].expand(-1, -1, keep.shape[2], -1))
    k, v = (x.gather(1, rows[:, 0, :, None].expand(-1, -1, x.shape[-1])) for x in (k, v))
    out = dense(AttentionCall(q, k, v, there, None, call.scale, Opaque()))
    return nan_rows(out, ~there.any(-1), call.v, ALWAYS_THERE) if call.nan_from else out


@torch.library.custom_op("nsa_compile::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    indices: Tensor | None,
    scale: float,
    kind: str,
    params: Sequence[int],
    select_block: int,
    nan_from: Sequence[int],
) -> Tensor:
    """One attention with its mask as data: `[N, S, m, Dv]`."""
    return dense(AttentionCall.from_args(q, k, v, mask, indices, scale, kind, params, select_block, nan_from))


@attention.register_fake
def _(q, k, v, mask, indices, scale, kind, params, select_block, nan_from):
    return v.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("nsa_compile::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    indices: Tensor | None,
    scale: float,
    kind: str,
    params: Sequence[int],
    select_block: int,
    nan_from: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` by q, k and v."""
    n, s, m, d = q.shape
    keep = keep_mask(AttentionCall.from_args(q, k, v, mask, indices, scale, kind, params, select_block, nan_from))
    none = None if keep is None or not nan_from else ~keep.any(-1)
    prob = weights(q, k, keep, scale).reshape(n, s * m, -1)
    grad = grad.reshape(n, s * m, -1)
    grad_v = torch.bmm(prob.to(v.dtype).transpose(1, 2), grad)
    grad_prob = torch.bmm(grad, v.transpose(1, 2)).to(prob.dtype)
    grad_scores = (prob * (grad_prob - (grad_prob * prob).sum(-1, keepdim=True)) * scale).to(q.dtype)
    grad_q = torch.bmm(grad_scores, k).reshape(n, s, m, d)
    grad_k = torch.bmm(grad_scores.transpose(1, 2), q.reshape(n, s * m, d))
    return grad_q, grad_k, grad_v if none is None else grad_v + nan_rows_backward(none, v, s, nan_from)


@attention_backward.register_fake
def _(grad, q, k, v, mask, indices, scale, kind, params, select_block, nan_from):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*attention_backward(grad, *ctx.saved_tensors, *ctx.rest), *([None] * 7))


attention.register_autograd(_backward, setup_context=_setup_context)


def rank_blocks(call: SelectCall[Tensor]) -> Tensor:
    """The blocks that each query selects, int32 `[N, S, num_selected]`; -1 where there are fewer."""
    keep = visible(call.kind, call.q, call.k) if call.mask is None else call.mask
    p = sum_heads(weights(call.q, call.k, keep, call.scale))  # [N, S, T]
    ratio = call.select_block // call.kind.stride
    score = block_scores(p, call.num_blocks, ratio, call.offsets, call.factors)
    allowed, forced = call.allowed, call.forced
    if allowed is None or forced is None:
        block = torch.arange(call.num_blocks, device=call.q.device)
        current = torch.arange(call.q.shape[1], device=call.q.device)[:, None] // call.select_block
        allowed = block <= current
        forced = (block < call.num_initial) | (block > current - call.num_local)
    return best_blocks(score, allowed, forced, call.num_selected)


@torch.library.custom_op("nsa_compile::select_blocks", mutates_args=())
def select_blocks(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    allowed: Tensor | None,
    forced: Tensor | None,
    scale: float,
    params: Sequence[int],
    select_block: int,
    n_blocks: int,
    offsets: Sequence[int],
    factors: Sequence[int],
    num_selected: int,
    num_initial: int,
    num_local: int,
) -> Tensor:
    """`rank_blocks` as one node; `params` are those of `Blocks`."""
    ranking = (select_block, n_blocks, offsets, factors, num_selected, num_initial, num_local)
    return rank_blocks(SelectCall.from_args(q, k, mask, allowed, forced, scale, params, *ranking))


@select_blocks.register_fake
def _(q, k, mask, allowed, forced, scale, params, select_block, n_blocks, offsets, factors, num_selected, *rest):
    return q.new_empty(*q.shape[:2], num_selected, dtype=torch.int32)


@register_flop_formula(torch.ops.nsa_compile.attention)
def _flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[2] * k[1] * (q[3] + v[2])


@register_flop_formula(torch.ops.nsa_compile.attention_backward)
def _backward_flops(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[2] * k[1] * (3 * q[3] + 2 * v[2])


@register_flop_formula(torch.ops.nsa_compile.select_blocks)
def _ranking_flops(q: Any, k: Any, *rest: Any, out_shape: Any = None) -> int:
    return 2 * q[0] * q[1] * q[2] * k[1] * q[3]


ATTENTION = attention._opoverload
SELECT = select_blocks._opoverload
NAN_ROWS = nan_rows._opoverload
SCORED = scored_attention._opoverload
WEIGHTED = weighted_sum._opoverload
PLACES = scored_places._opoverload

"""The attention node: what raise_attention makes of matmul, scale, mask, softmax and matmul.

`q [N, S, m, D]`: N sequences, S queries, m heads that read the same keys; `k [N, T, D]`, `v [N, T, Dv]`. The node
knows its mask as data, a `kind` with `params`:

- `window (w)`: query s sees the keys `s - w < p <= s`; with `w >= S` that is plain causal attention;
- `blocks (l, d)`: query s sees block p where `p * d + l - 1 <= s`;
- `all`: every key;
- `opaque`: what the tensor `mask` says.

A tensor `mask` `[N|1, S|1, m|1, T]`, where there is one, is the whole of it, and `kind` only tells what it will be over
all steps. `indices [N, S, n]` (-1: none), where given, narrow any mask to the tokens of blocks of `select_block`.

Queries that see nothing get zeros. `lower_attention` replaces these nodes; as they are, they compute densely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops.compressed.selection import best_blocks, block_scores, sum_heads


def visible(kind: str, params: Sequence[int], queries: int, keys: int, device: Any) -> Tensor:
    """The mask `[S, T]` of a kind, for queries at positions 0 … S − 1."""
    s = torch.arange(queries, device=device)[:, None]
    p = torch.arange(keys, device=device)
    if kind == "window":
        return (p <= s) & (p > s - params[0])
    if kind == "blocks":
        return p * params[1] + params[0] - 1 <= s
    if kind == "all":
        return (p >= 0).expand(queries, keys)
    raise ValueError(f"a mask of kind {kind!r} needs a tensor")


def chosen(indices: Tensor, select_block: int, keys: int) -> Tensor:
    """The tokens of the selected blocks: `[N, S, n]` -> `[N, S, T]`."""
    blocks = -(-keys // select_block)
    valid = (indices >= 0) & (indices < blocks)
    taken = torch.zeros(*indices.shape[:2], blocks + 1, dtype=torch.bool, device=indices.device)
    taken = taken.scatter(-1, torch.where(valid, indices, blocks).long(), True)[..., :blocks]
    return taken.repeat_interleave(select_block, -1, output_size=blocks * select_block)[..., :keys]


def keep_mask(
    q: Tensor, k: Tensor, mask: Tensor | None, indices: Tensor | None, kind: str, params: Sequence[int], block: int
) -> Tensor | None:
    """All that narrows the keys, `[N|1, S|1, m|1, T]`, or None where nothing does."""
    keep = mask
    if keep is None and kind != "all":
        keep = visible(kind, params, q.shape[1], k.shape[1], q.device)[None, :, None]
    if indices is not None:
        taken = chosen(indices, block, k.shape[1])[:, :, None]
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


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    indices: Tensor | None,
    scale: float,
    kind: str,
    params: Sequence[int],
    select_block: int,
) -> Tensor:
    """The attention node, computed over all keys: `[N, S, m, Dv]`."""
    n, s, m, _ = q.shape
    prob = weights(q, k, keep_mask(q, k, mask, indices, kind, params, select_block), scale)
    return torch.bmm(prob.to(v.dtype).reshape(n, s * m, -1), v).reshape(n, s, m, -1)


def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    scale: float,
    kind: str,
    params: Sequence[int],
    select_block: int,
) -> Tensor:
    """The attention node for one query, `q [N, 1, m, D]`, over the rows of its blocks. No index may come twice."""
    keys = k.shape[1]
    within = torch.arange(select_block, device=k.device)
    rows = (indices.long()[..., None] * select_block + within).flatten(-2)  # [N, 1, n * select_block]
    there = (indices >= 0).repeat_interleave(select_block, -1) & (rows < keys)
    rows = torch.where(there, rows, 0)
    keep = keep_mask(q, k, mask, None, kind, params, select_block)
    there = there[:, :, None]
    if keep is not None:
        keep = keep.expand(q.shape[0], 1, keep.shape[2], keys)
        there = there & keep.gather(-1, rows[:, :, None].expand(-1, -1, keep.shape[2], -1))
    k, v = (x.gather(1, rows[:, 0, :, None].expand(-1, -1, x.shape[-1])) for x in (k, v))
    return dense(q, k, v, there, None, scale, "opaque", (), select_block)


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
) -> Tensor:
    """One attention with its mask as data: `[N, S, m, Dv]`."""
    return dense(q, k, v, mask, indices, scale, kind, params, select_block)


@attention.register_fake
def _(q, k, v, mask, indices, scale, kind, params, select_block):
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` by q, k and v."""
    n, s, m, d = q.shape
    prob = weights(q, k, keep_mask(q, k, mask, indices, kind, params, select_block), scale).reshape(n, s * m, -1)
    grad = grad.reshape(n, s * m, -1)
    grad_v = torch.bmm(prob.to(v.dtype).transpose(1, 2), grad)
    grad_prob = torch.bmm(grad, v.transpose(1, 2)).to(prob.dtype)
    grad_scores = (prob * (grad_prob - (grad_prob * prob).sum(-1, keepdim=True)) * scale).to(q.dtype)
    grad_q = torch.bmm(grad_scores, k).reshape(n, s, m, d)
    grad_k = torch.bmm(grad_scores.transpose(1, 2), q.reshape(n, s * m, d))
    return grad_q, grad_k, grad_v


@attention_backward.register_fake
def _(grad, q, k, v, mask, indices, scale, kind, params, select_block):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*attention_backward(grad, *ctx.saved_tensors, *ctx.rest), *([None] * 6))


attention.register_autograd(_backward, setup_context=_setup_context)


def rank_blocks(
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
    """The blocks that each query selects, int32 `[N, S, n]` with n = num_selected; -1 where there are fewer.

    eq. 8: weights of `q [N, S, m, D]` over the compressed keys `k [N, T, D]`, under a mask of kind `blocks` with
    `params` (l, d), or the tensor `mask [1, S, 1, T]`. Their sum over the m heads gives block j the importance
    `Σ factors[i] · p[j · select_block / d + offsets[i]]` (eq. 9 and 10). The first `num_initial` and the last
    `num_local` of the blocks up to the query's own are always taken; then the best, ties to the lower index (eq. 11).
    Tensors `allowed` and `forced [N|1, S, n_blocks]` replace the positions 0 … S − 1 that these rules are about.
    """
    keep = keep_mask(q, k, mask, None, "blocks", params, 1)
    p = sum_heads(weights(q, k, keep, scale))  # [N, S, T]
    score = block_scores(p, n_blocks, select_block // params[1], offsets, factors)
    if allowed is None or forced is None:
        block = torch.arange(n_blocks, device=q.device)
        current = torch.arange(q.shape[1], device=q.device)[:, None] // select_block
        allowed = block <= current
        forced = (block < num_initial) | (block > current - num_local)
    return best_blocks(score, allowed, forced, num_selected)


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
    """`rank_blocks` as one node."""
    return rank_blocks(
        *(q, k, mask, allowed, forced, scale, params, select_block, n_blocks),
        *(offsets, factors, num_selected, num_initial, num_local),
    )


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

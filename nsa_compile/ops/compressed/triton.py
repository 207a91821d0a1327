"""Attention over compressed blocks on the GPU, and the selection of blocks that follows from its weights.

Attention is that along a band. Selection is a second kernel: it recomputes the weights tile by tile from the
log-sum-exp. For every term of a selection score it multiplies the queries with just the keys of that term, column b
of the tile being key `b * ratio + offset`; so a score is a sum in registers, no column ever needs its neighbour, and
the extra products are few (5 terms for the 4 compressed blocks a selection block of the paper's 32/16/64). The best n
blocks so far are n 64-bit keys a row, score above index, merged with every tile by a bitonic sort: nothing of size
[S, N] exists in memory, the order is total, so ties go to the lower index whatever the tiles are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_compile.ops.triton_common import (
    LN2,
    LOG2E,
    Tiles,
    band_backward,
    band_forward,
    check_supported,
    dot,
    padded,
    prepare,
    row_offsets,
)

__all__ = ["backward", "forward", "prepare"]

MAX_SELECTED = 256
MAX_HEADS = 64
NONE = tl.constexpr(-(2**63))  # below the sort key of every block


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, stride: int, scale: float, select_block: int,
    offsets: Sequence[int], weights: Sequence[int], num_selected: int, num_initial: int, num_local: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse = band_forward(q, k, v, scale, q.shape[1], block_size, stride)
    indices = _select(
        q, k, lse, block_size, stride, scale, select_block, offsets, weights, num_selected, num_initial, num_local
    )
    return out, lse, indices


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block_size: int, stride: int, scale: float, select_block: int, offsets: Sequence[int], weights: Sequence[int],
    num_selected: int, num_initial: int, num_local: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return band_backward(grad_out, grad_lse, q, k, v, out, lse, scale, q.shape[1], block_size, stride)


def _select(
    q: Tensor, k: Tensor, lse: Tensor, block_size: int, stride: int, scale: float, select_block: int,
    offsets: Sequence[int], weights: Sequence[int], num_selected: int, num_initial: int, num_local: int,
) -> Tensor:  # fmt: skip
    """int32 `[B, S, G, num_selected]`: the forced blocks, ascending, then the others, best first, then -1."""
    (batch, length, heads, width), (num_keys, groups) = q.shape, k.shape[1:3]
    indices = torch.full((batch, length, groups, num_selected), -1, dtype=torch.int32, device=q.device)
    if indices.numel() == 0:
        return indices
    check_supported(q, q)
    kept = min(num_selected, triton.cdiv(length, select_block))
    group_heads = heads // groups
    if kept > MAX_SELECTED or group_heads > MAX_HEADS:
        raise ValueError(
            f"num_selected = {kept} with {group_heads} heads a group; the Triton kernel takes at most {MAX_SELECTED} "
            f'and {MAX_HEADS}: call inside force_implementation("portable")'
        )
    best = max(2, triton.next_power_of_2(kept))
    row_heads = triton.next_power_of_2(group_heads)
    rows, block_n, num_warps, num_stages = _select_tiles(q, best, triton.cdiv(length, select_block))
    rows = max(rows, row_heads)
    queries = rows // row_heads
    grid = (triton.cdiv(length, queries) * batch * groups,)
    with torch.cuda.device_of(q):
        _select_kernel[grid](
            q, k, lse, indices, *q.stride(), *k.stride(),
            length, num_keys, groups, scale * LOG2E, min(block_size, length + 1), min(stride, length + 1),
            min(select_block, length), select_block // stride, num_selected,
            min(num_initial, length), min(num_local, length),
            OFFSETS=tuple(offsets), WEIGHTS=tuple(weights), TERMS=len(offsets),
            HEADS=group_heads, ROW_HEADS=row_heads, D=width, BLOCK_D=padded(width), QUERIES=queries,
            BLOCK_N=block_n, BEST=best, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return indices


def _select_tiles(q: Tensor, best: int, blocks: int) -> Tiles:
    """Tiles of rows and selection blocks: the keys of one tile and the n best must be sorted in registers."""
    if q.dtype == torch.float32 or best > 64:
        return Tiles(16, 32 if q.shape[3] <= 128 else 16, 4, 2)
    return Tiles(128, 64, 8, 3) if blocks > 256 and q.shape[3] <= 128 else Tiles(64, 32, 4, 3)


@triton.jit
def _select_kernel(
    Q, K, LSE, INDICES,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d,
    S, N, G, scale, block_size, stride, select_block, ratio, num_selected, num_initial, num_local,
    OFFSETS: tl.constexpr, WEIGHTS: tl.constexpr, TERMS: tl.constexpr,
    HEADS: tl.constexpr, ROW_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, QUERIES)
    tile = tiles - 1 - tl.program_id(0) % tiles  # late queries see most: first come, first done
    group = (tl.program_id(0) // tiles) % G
    batch = (tl.program_id(0) // tiles // G).to(tl.int64)

    # The heads of a query are padded to a power of two, so that a reshape brings them together.
    rows = tl.arange(0, QUERIES * ROW_HEADS)
    s = tile * QUERIES + rows // ROW_HEADS
    head = group * HEADS + rows % ROW_HEADS
    live = (s < S) & (rows % ROW_HEADS < HEADS)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
    q = tl.load(Q + batch * q_b + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    lse = tl.load(LSE + (batch * S + s) * (G * HEADS) + head, mask=live, other=0.0) / LN2
    # Compressed block j is seen by a row iff j < end.
    end = tl.minimum(tl.maximum(s + 1 - block_size + stride, 0) // stride, N)
    end = tl.where(live, end, 0)
    K += batch * k_b + group.to(tl.int64) * k_h

    query = tile * QUERIES + tl.arange(0, QUERIES)
    current = query // select_block
    best = tl.full([QUERIES, BEST], NONE, tl.int64)
    last = tl.minimum(tile * QUERIES + QUERIES - 1, S - 1) // select_block + 1
    for start in range(0, last, BLOCK_N):
        block = start + n
        score = tl.zeros([QUERIES, BLOCK_N], tl.float32)
        # A loop over the terms, not one copy of its body for each: loads of one term overlap with products of another.
        for term in range(TERMS):
            offset = 0
            weight = 0.0
            for i in tl.static_range(TERMS):
                offset = tl.where(term == i, OFFSETS[i], offset)
                weight = tl.where(term == i, WEIGHTS[i] * 1.0, weight)
            keys = block * ratio + offset
            inside = (keys >= 0) & (keys < N)
            k_at = keys.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
            k = tl.load(K + k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            logits = dot(q, tl.trans(k), None) * scale
            seen = (keys >= 0)[None, :] & (keys[None, :] < end[:, None])
            p = tl.where(seen, tl.exp2(logits - lse[:, None]), 0.0)
            score += weight * tl.sum(tl.reshape(p, [QUERIES, ROW_HEADS, BLOCK_N]), 1)

        forced = (block[None, :] < num_initial) | (block[None, :] > current[:, None] - num_local)
        score = tl.where(forced, float("inf"), score)
        candidates = tl.where(block[None, :] <= current[:, None], _sort_key(score, block[None, :]), NONE)
        best = _merge(best, candidates, BLOCK_N, BEST)

    rank = tl.arange(0, BEST)
    chosen = tl.where(best == NONE, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
    at = ((batch * S + query.to(tl.int64)) * G + group)[:, None] * num_selected + rank[None, :]
    tl.store(INDICES + at, chosen, mask=(query < S)[:, None] & (rank < num_selected)[None, :])


@triton.jit
def _sort_key(score, block):
    """An int64 that is larger for a higher score, and for a lower block among equal scores."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)


@triton.jit
def _merge(best, candidates, BLOCK_N: tl.constexpr, BEST: tl.constexpr):
    """The largest of best `[Q, BEST]` and candidates `[Q, BLOCK_N]`, descending, `[Q, BEST]`."""
    QUERIES: tl.constexpr = best.shape[0]
    if BLOCK_N > BEST:
        candidates = tl.topk(candidates, BEST)
    width: tl.constexpr = min(BLOCK_N, BEST)
    for doubling in tl.static_range(BEST // width):
        if (width << doubling) < BEST:
            candidates = tl.reshape(
                tl.join(candidates, tl.full(candidates.shape, NONE, tl.int64)), [QUERIES, width << (doubling + 1)]
            )
    return tl.topk(tl.reshape(tl.join(best, candidates), [QUERIES, 2 * BEST]), BEST)

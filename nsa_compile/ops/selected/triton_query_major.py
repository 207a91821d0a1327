"""Selected attention on the GPU, query after query: output and dq.

A program takes a few neighbouring queries of a group and all its heads as the rows of its matrix products, and goes
through the blocks that any of those queries selected; rows whose query did not select a block are masked. What limits
it is reading keys and values: once for a tile, however many of its queries share a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_compile.ops.selected.block_lists import blocks_of_tiles
from nsa_compile.ops.triton_common import (
    LN2,
    LOG2E,
    Tiles,
    dot,
    padded,
    softmax_end,
    softmax_step,
    tile_constants,
)

__all__ = ["dq", "forward"]


def _tiles(q: Tensor, v: Tensor, block_size: int, rows: int) -> Tiles:
    """Tiles of so many query-head pairs, at most 64, and of the keys of one block."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:
        return Tiles(16, 16, 4 if width <= 128 else 8, 1)
    most = 64 if width <= 128 else 32
    return Tiles(min(padded(rows), most), min(padded(block_size), most), 4, 2)


def _grid(q: Tensor, groups: int, queries: int, tiles: Tiles) -> tuple[int]:
    rows = q.shape[2] // groups * queries
    return (q.shape[0] * triton.cdiv(q.shape[1], queries) * groups * triton.cdiv(rows, tiles.rows),)


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_size: int, scale: float, queries: int,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Write out `[B, S, Hq, Dv]` and lse `[B, S, Hq]`; blocks `[B, S, G, n]` as `distinct_blocks` makes them."""
    groups = k.shape[2]
    entries, used = blocks_of_tiles(blocks, queries)
    tiles = _tiles(q, v, block_size, q.shape[2] // groups * queries)
    _forward_kernel[_grid(q, groups, queries, tiles)](
        q, k, v, out, lse, entries, used, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        q.shape[1], k.shape[1], groups, entries.shape[3], scale * LOG2E,
        BLOCK_SIZE=block_size, QUERIES=queries, **tile_constants(q, k, v, tiles),
    )  # fmt: skip


def dq(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor, block_size: int,
    scale: float, queries: int, dq: Tensor,
) -> None:  # fmt: skip
    """Write dq `[B, S, Hq, D]`."""
    groups = k.shape[2]
    entries, used = blocks_of_tiles(blocks, queries)
    tiles = _tiles(q, v, block_size, q.shape[2] // groups * queries)
    _dq_kernel[_grid(q, groups, queries, tiles)](
        grad_out, q, k, v, lse, delta, dq, entries, used,
        *grad_out.stride(), *q.stride(), *k.stride(), *v.stride(), *dq.stride(),
        q.shape[1], k.shape[1], groups, entries.shape[3], scale * LOG2E, scale,
        BLOCK_SIZE=block_size, QUERIES=queries, **tile_constants(q, k, v, tiles),
    )  # fmt: skip


@triton.jit
def _key_tile(
    ENTRIES, step, query, s, T, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Of the `step`-th tile of keys: its first position, which keys there are, and which a row sees `[M, N]`."""
    per_block: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    entry = tl.load(ENTRIES + step // per_block)
    within = step % per_block * BLOCK_N
    start = (entry >> QUERIES) * BLOCK_SIZE + within
    n = tl.arange(0, BLOCK_N)
    here = (n < BLOCK_SIZE - within) & (n < T - start)
    selected = (entry >> query) & 1 != 0
    return start, here, selected[:, None] & here[None, :] & (n[None, :] <= (s - start)[:, None])


@triton.jit
def _forward_kernel(
    Q, K, V, OUT, LSE, ENTRIES, USED,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, o_b, o_s, o_h, o_d,
    S, T, G, places, scale,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, group, batch, query, s, head, live = _rows(S, G, HEADS, QUERIES, BLOCK_M)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    q_at = batch * q_b + s.to(tl.int64)[:, None] * q_s + head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(Q + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    K += batch * k_b + group * k_h
    V += batch * v_b + group * v_h
    k_at = n.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
    v_at = n.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    per_block: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    for step in range(tl.load(USED + tile) * per_block):
        start, here, seen = _key_tile(ENTRIES + tile * places, step, query, s, T, QUERIES, BLOCK_SIZE, BLOCK_N)
        k = tl.load(K + start.to(tl.int64) * k_s + k_at, mask=here[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(V + start.to(tl.int64) * v_s + v_at, mask=here[:, None] & (dv < DV)[None, :], other=0.0)
        scores = dot(q, tl.trans(k), None) * scale
        scores = tl.where(seen, scores, float("-inf"))
        acc, largest, total = softmax_step(acc, largest, total, scores, v)

    out, lse = softmax_end(acc, largest, total)
    o_at = batch * o_b + s.to(tl.int64)[:, None] * o_s + head[:, None] * o_h + dv[None, :] * o_d
    tl.store(OUT + o_at, out.to(OUT.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    tl.store(LSE + (batch * S + s) * (G * HEADS) + head, lse, mask=live)


@triton.jit
def _dq_kernel(
    GRAD, Q, K, V, LSE, DELTA, DQ, ENTRIES, USED,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, x_b, x_s, x_h, x_d,
    S, T, G, places, scale, grad_scale,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, group, batch, query, s, head, live = _rows(S, G, HEADS, QUERIES, BLOCK_M)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    live_d = live[:, None] & (d < D)[None, :]
    q_at = batch * q_b + s.to(tl.int64)[:, None] * q_s + head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(Q + q_at, mask=live_d, other=0.0)
    g_at = batch * g_b + s.to(tl.int64)[:, None] * g_s + head[:, None] * g_h + dv[None, :] * g_d
    grad = tl.load(GRAD + g_at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
    flat = (batch * S + s) * (G * HEADS) + head
    delta = tl.load(DELTA + flat, mask=live, other=0.0)
    lse = tl.load(LSE + flat, mask=live, other=0.0) / LN2
    K += batch * k_b + group * k_h
    V += batch * v_b + group * v_h
    k_at = n.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
    v_at = n.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    per_block: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    for step in range(tl.load(USED + tile) * per_block):
        start, here, seen = _key_tile(ENTRIES + tile * places, step, query, s, T, QUERIES, BLOCK_SIZE, BLOCK_N)
        k = tl.load(K + start.to(tl.int64) * k_s + k_at, mask=here[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(V + start.to(tl.int64) * v_s + v_at, mask=here[:, None] & (dv < DV)[None, :], other=0.0)
        scores = dot(q, tl.trans(k), None) * scale
        weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        dweights = dot(grad, tl.trans(v), None)
        dscores = weights * (dweights - delta[:, None])
        dq = dot(dscores, k, dq)

    x_at = batch * x_b + s.to(tl.int64)[:, None] * x_s + head[:, None] * x_h + d[None, :] * x_d
    tl.store(DQ + x_at, (dq * grad_scale).to(DQ.dtype.element_ty), mask=live_d)


@triton.jit
def _rows(S, G, HEADS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of this program: its tile in `[B, tiles, G]`, group, batch; for each row, query in the tile, position, head."""
    parts: tl.constexpr = (QUERIES * HEADS + BLOCK_M - 1) // BLOCK_M
    rows = tl.program_id(0) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = (tl.program_id(0) // parts).to(tl.int64)
    group = tile % G
    tiles = tl.cdiv(S, QUERIES)
    query = tl.minimum(rows // HEADS, QUERIES - 1)
    s = (tile // G % tiles).to(tl.int32) * QUERIES + query
    live = (rows < QUERIES * HEADS) & (s < S)
    return tile, group, tile // G // tiles, query, s, group * HEADS + rows % HEADS, live

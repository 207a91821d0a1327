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

__all__ = ["blocks_of_tiles", "dq", "forward"]

ROOMY = 160 * 1024  # bytes of shared memory a program may have
CHUNK = 64  # places that a program compares with as many at once


def _tiles(q: Tensor, v: Tensor, block_size: int, rows: int) -> Tiles:
    """Tiles of so many query-head pairs, at most 64, and of the keys of one block."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:
        return Tiles(16, 16, 4 if width <= 128 else 8, 1)
    most = 64 if width <= 128 else 32
    rows = min(padded(rows), most)
    return Tiles(rows, min(padded(block_size), most), 2 if rows <= 32 and width <= 128 else 4, 2)


def _forward_tiles(q: Tensor, v: Tensor, block_size: int, rows: int) -> Tiles:
    """As `_tiles`; one block more is loaded ahead where the GPU has the room: A100 and H100 have, others do not."""
    tiles = _tiles(q, v, block_size, rows)
    if tiles.rows < 64 or not q.is_cuda:
        return tiles
    room = triton.runtime.driver.active.utils.get_device_properties(q.device.index)["max_shared_mem"]
    return tiles._replace(num_stages=3) if room >= ROOMY else tiles


def _grid(q: Tensor, groups: int, queries: int, tiles: Tiles) -> tuple[int]:
    rows = q.shape[2] // groups * queries
    return (q.shape[0] * triton.cdiv(q.shape[1], queries) * groups * triton.cdiv(rows, tiles.rows),)


def blocks_of_tiles(indices: Tensor, num_keys: int, block_size: int, queries: int) -> tuple[Tensor, Tensor]:
    """The visible blocks that any query of a tile selected, for tiles of so many neighbouring queries.

    From indices `[B, S, G, n]`: int32 `[B, tiles, G, queries * n]`, each block once, where it is found first, as
    `block << queries | members` with bit i of `members` for query i of the tile; and how many there are, int32
    `[B, tiles, G]`. What comes behind them is not written.
    """
    batch, length, groups, n = indices.shape
    tiles = triton.cdiv(length, queries)
    entries = indices.new_empty(batch, tiles, groups, queries * n, dtype=torch.int32)
    used = indices.new_empty(batch, tiles, groups, dtype=torch.int32)
    _entries_kernel[(used.numel(),)](
        indices.contiguous(), entries, used, length, groups, n, block_size, triton.cdiv(num_keys, block_size),
        QUERIES=queries, CHUNK=min(padded(queries * n), CHUNK), PLACES=min(padded(n), CHUNK), num_warps=1,
    )  # fmt: skip
    return entries, used


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float, queries: int,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Write out `[B, S, Hq, Dv]` and lse `[B, S, Hq]`; indices `[B, S, G, n]`."""
    groups = k.shape[2]
    entries, used = blocks_of_tiles(indices, k.shape[1], block_size, queries)
    tiles = _forward_tiles(q, v, block_size, q.shape[2] // groups * queries)
    _forward_kernel[_grid(q, groups, queries, tiles)](
        q, k, v, out, lse, entries, used, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        q.shape[1], k.shape[1], groups, entries.shape[3], scale * LOG2E,
        BLOCK_SIZE=block_size, QUERIES=queries, **tile_constants(q, k, v, tiles),
    )  # fmt: skip


def dq(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, indices: Tensor, block_size: int,
    scale: float, queries: int, dq: Tensor,
) -> None:  # fmt: skip
    """Write dq `[B, S, Hq, D]`."""
    groups = k.shape[2]
    entries, used = blocks_of_tiles(indices, k.shape[1], block_size, queries)
    tiles = _tiles(q, v, block_size, q.shape[2] // groups * queries)
    _dq_kernel[_grid(q, groups, queries, tiles)](
        grad_out, q, k, v, lse, delta, dq, entries, used,
        *grad_out.stride(), *q.stride(), *k.stride(), *v.stride(), *dq.stride(),
        q.shape[1], k.shape[1], groups, entries.shape[3], scale * LOG2E, scale,
        BLOCK_SIZE=block_size, QUERIES=queries, **tile_constants(q, k, v, tiles),
    )  # fmt: skip


@triton.jit
def _selected_blocks(INDICES, query, place, first, S, G, places, block_size, num_blocks, QUERIES: tl.constexpr):
    """What stands at places of the queries of a tile: a block, or -1 where the query sees none."""
    live = (query < QUERIES) & (first + query < S) & (place < places)
    block = tl.load(INDICES + query.to(tl.int64) * G * places + place, mask=live, other=-1)
    visible = (block >= 0) & (block <= tl.minimum((first + query) // block_size, num_blocks - 1))
    return tl.where(visible, block, -1).to(tl.int32)


@triton.jit
def _entries_kernel(
    INDICES, ENTRIES, USED, S, G, places, block_size, num_blocks,
    QUERIES: tl.constexpr, CHUNK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(S, QUERIES)
    group, first, batch = tile % G, (tile // G % tiles).to(tl.int32) * QUERIES, tile // G // tiles
    INDICES += ((batch * S + first) * G + group) * places
    used = 0
    for start in range(0, QUERIES * places, CHUNK):
        here = start + tl.arange(0, CHUNK)
        block = _selected_blocks(
            INDICES, here // places, here % places, first, S, G, places, block_size, num_blocks, QUERIES
        )
        members = tl.zeros([CHUNK], tl.int32)
        earlier = tl.zeros([CHUNK], tl.int32)
        for query in range(QUERIES):
            for begin in range(0, places, PLACES):
                place = begin + tl.arange(0, PLACES)
                theirs = _selected_blocks(
                    INDICES, query + tl.zeros_like(place), place, first, S, G, places, block_size, num_blocks, QUERIES
                )
                same = block[:, None] == theirs[None, :]
                members |= tl.max(same.to(tl.int32), 1) << query
                earlier |= tl.max((same & ((query * places + place)[None, :] < here[:, None])).to(tl.int32), 1)
        found = ((block >= 0) & (earlier == 0)).to(tl.int32)
        rank = used + tl.cumsum(found, 0) - 1
        tl.store(ENTRIES + tile * QUERIES * places + rank, block << QUERIES | members, mask=found != 0)
        used += tl.sum(found, 0)
    tl.store(USED + tile, used)


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

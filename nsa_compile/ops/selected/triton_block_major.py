"""Selected attention on the GPU, block after block: output, dq, dk and dv.

A program takes a block of keys and some of the queries that selected it, the rows of its products being these queries'
heads, so that a tile is full however few heads share a key. This order was described for small groups by Flash Sparse
Attention (arXiv 2508.18224).

For output and dq each pair of a query and a block yields a partial result of `[h, Dv]` or `[h, D]` in float32, which a
second kernel merges in the order of the query's blocks. All of them at once would take 2 n times the memory of a bf16
output, so queries are taken in chunks whose partial results fit `MAX_PART_BYTES`.
dk and dv are sums along a list. Some blocks, above all the first, are selected by nearly every query, so a long list is
split among programs, whose partial sums are added in order by a last kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_compile.ops.selected.block_lists import Lists, selecting_queries
from nsa_compile.ops.triton_common import (
    LN2,
    LOG2E,
    Tiles,
    dot,
    padded,
    row_offsets,
    softmax_end,
    tile_constants,
)

__all__ = ["dkdv", "dq", "forward"]

MAX_PART_BYTES = 2**31  # a chunk costs some thirty small launches besides
ROWS = 1024  # query-head pairs a program, enough to read a block of keys for, and few enough to share the work evenly
MERGED = 32  # query-head pairs a program that merges


def _tiles(q: Tensor, v: Tensor, block_size: int) -> Tiles:
    """Tiles of query-head pairs that selected a block, and of the keys of the block."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:
        return Tiles(16, 16, 4 if width <= 128 else 8, 1)
    most = 64 if width <= 128 else 32
    return Tiles(most, min(padded(block_size), most), 4 if width <= 128 else 8, 2 if width <= 128 else 1)


def _backward_tiles(q: Tensor, v: Tensor, block_size: int) -> Tiles:
    """As `_tiles`; with D = 128 half as many rows, so that sums of gradients stay in registers."""
    tiles = _tiles(q, v, block_size)
    wide = max(padded(q.shape[3]), padded(v.shape[3])) > 64
    return tiles._replace(rows=32, num_stages=3) if tiles.rows == 64 and wide else tiles


def _chunks(blocks: Tensor, num_blocks: int, heads: int, parts: int, width: int) -> Iterator[tuple[int, int, Lists]]:
    """Ranges of queries, start and stop, and the lists of the pairs within; `parts` of `heads` * `width` for each."""
    batch, length, groups, n = blocks.shape
    step = max(1, MAX_PART_BYTES // (4 * batch * groups * n * parts * heads * width))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield start, stop, selecting_queries(blocks[:, start:stop], num_blocks, max(1, ROWS // heads), start)


def forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block_size: int, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write out `[B, S, Hq, Dv]` and lse `[B, S, Hq]`; blocks `[B, S, G, n]` as `distinct_blocks` makes them."""
    (batch, length, heads, _), (num_keys, groups), n = q.shape, k.shape[1:3], blocks.shape[3]
    heads //= groups
    width = v.shape[3]
    tiles = _tiles(q, v, block_size)
    parts = triton.cdiv(block_size, tiles.keys)
    for start, stop, lists in _chunks(blocks, triton.cdiv(num_keys, block_size), heads, parts, width):
        rows = batch * (stop - start) * groups
        part_out = q.new_empty(rows * n * parts * heads, width, dtype=torch.float32)
        part_lse = part_out.new_empty(part_out.shape[0])
        _forward_kernel[(lists.max_programs * parts,)](
            q, k, v, part_out, part_lse, lists.pairs, lists.queries, lists.begin, lists.program, lists.owner,
            *q.stride(), *k.stride(), *v.stride(), num_keys, groups, lists.num_blocks,
            lists.num_lists, lists.longest, scale * LOG2E, BLOCK_SIZE=block_size, **tile_constants(q, k, v, tiles),
        )  # fmt: skip
        _merge_kernel[(triton.cdiv(rows * heads, MERGED),)](
            out, lse, part_out, part_lse, blocks, *out.stride(), start, stop - start, length, batch, groups, n,
            PARTS=parts, HEADS=heads, DV=width, BLOCK_DV=padded(width), BLOCK_M=MERGED, num_warps=4,
        )  # fmt: skip


def dq(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor, block_size: int,
    scale: float, dq: Tensor,
) -> None:  # fmt: skip
    """Write dq `[B, S, Hq, D]`."""
    (batch, length, heads, width), (num_keys, groups), n = q.shape, k.shape[1:3], blocks.shape[3]
    heads //= groups
    tiles = _backward_tiles(q, v, block_size)
    parts = triton.cdiv(block_size, tiles.keys)
    for start, stop, lists in _chunks(blocks, triton.cdiv(num_keys, block_size), heads, parts, width):
        rows = batch * (stop - start) * groups
        part_dq = q.new_empty(rows * n * parts * heads, width, dtype=torch.float32)
        _dq_kernel[(lists.max_programs * parts,)](
            grad_out, q, k, v, lse, delta, part_dq, lists.pairs, lists.queries, lists.begin, lists.program, lists.owner,
            *grad_out.stride(), *q.stride(), *k.stride(), *v.stride(), length, num_keys, groups,
            lists.num_blocks, lists.num_lists, lists.longest, scale * LOG2E,
            BLOCK_SIZE=block_size, **tile_constants(q, k, v, tiles),
        )  # fmt: skip
        _add_dq_kernel[(triton.cdiv(rows * heads, MERGED),)](
            dq, part_dq, blocks, *dq.stride(), start, stop - start, length, batch, groups, n, scale,
            PARTS=parts, HEADS=heads, D=width, BLOCK_D=padded(width), BLOCK_M=MERGED, num_warps=4,
        )  # fmt: skip


def dkdv(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor, block_size: int,
    scale: float, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Write dk `[B, T, G, D]` and dv `[B, T, G, Dv]`."""
    length, (num_keys, groups), n = q.shape[1], k.shape[1:3], blocks.shape[3]
    # The mean length of a list, were all places used: the partial sums are then at most twice as many as the blocks.
    lists = selecting_queries(blocks, triton.cdiv(num_keys, block_size), max(n * block_size, 64))
    part_dk = q.new_empty(lists.max_parts, block_size, q.shape[3], dtype=torch.float32)
    part_dv = q.new_empty(lists.max_parts, block_size, v.shape[3], dtype=torch.float32)
    tiles = _backward_tiles(q, v, block_size)
    per_block = triton.cdiv(block_size, tiles.keys)
    _dkdv_kernel[(lists.max_programs * per_block,)](
        grad_out, q, k, v, lse, delta, dk, dv, part_dk, part_dv,
        lists.queries, lists.begin, lists.program, lists.part, lists.owner,
        *grad_out.stride(), *q.stride(), *k.stride(), *v.stride(), *dk.stride(), *dv.stride(),
        length, num_keys, groups, lists.num_blocks, lists.num_lists, lists.longest, scale * LOG2E, scale,
        BLOCK_SIZE=block_size, **tile_constants(q, k, v, tiles),
    )  # fmt: skip
    constants = tile_constants(q, k, v, tiles)
    for name in ("HEADS", "BLOCK_M"):
        del constants[name]
    _add_dkdv_kernel[(lists.num_lists * per_block,)](
        dk, dv, part_dk, part_dv, lists.program, lists.part, *dk.stride(), *dv.stride(),
        num_keys, groups, lists.num_blocks, scale, BLOCK_SIZE=block_size, **constants,
    )  # fmt: skip


@triton.jit
def _list(PROGRAM, BEGIN, G, num_blocks, longest, program, owner):
    """Of a program: block, group, batch; where its pairs begin, and how many they are."""
    begin = tl.load(BEGIN + owner) + (program - tl.load(PROGRAM + owner)) * longest
    pairs = tl.minimum(tl.load(BEGIN + owner + 1) - begin, longest).to(tl.int32)
    group = (owner // num_blocks % G).to(tl.int64)
    return owner % num_blocks, group, (owner // num_blocks // G).to(tl.int64), begin, pairs


@triton.jit
def _key_tile(block, part, T, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile of keys: their places in the block, their positions, and which of them there are."""
    within = part * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = block * BLOCK_SIZE + within
    return within, keys, (within < BLOCK_SIZE) & (keys < T)


@triton.jit
def _load_rows(X, rows, live, stride_s, stride_d, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows of X `[T, WIDTH]`, zero where they are not live."""
    d = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
    at = rows.to(tl.int64)[:, None] * stride_s + d[None, :] * stride_d
    return tl.load(X + at, mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _forward_kernel(
    Q, K, V, PART_OUT, PART_LSE, PAIRS, QUERIES, BEGIN, PROGRAM, OWNER,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    T, G, num_blocks, num_lists, longest, scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp over a tile of keys alone, for each of its pairs."""
    parts: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0) // parts
    owner = tl.load(OWNER + program)
    if owner == num_lists:
        return
    block, group, batch, begin, pairs = _list(PROGRAM, BEGIN, G, num_blocks, longest, program, owner)
    if pairs == 0:
        return
    part = tl.program_id(0) % parts
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    _, keys, here = _key_tile(block, part, T, BLOCK_SIZE, BLOCK_N)
    k = _load_rows(K + batch * k_b + group * k_h, keys, here, k_s, k_d, D, BLOCK_D)
    v = _load_rows(V + batch * v_b + group * v_h, keys, here, v_s, v_d, DV, BLOCK_DV)
    Q += batch * q_b

    for row in range(0, pairs * HEADS, BLOCK_M):
        rows = row + m
        live = rows < pairs * HEADS
        s = tl.load(QUERIES + begin + rows // HEADS, mask=live, other=0)
        q_at = row_offsets(s, group * HEADS + rows % HEADS, q_s, q_h)[:, None] + d[None, :] * q_d
        q = tl.load(Q + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        scores = dot(q, tl.trans(k), None) * scale
        scores = tl.where(here[None, :] & (keys[None, :] <= s[:, None]), scores, float("-inf"))
        largest = tl.max(scores, 1)
        weights = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
        out, lse = softmax_end(dot(weights, v, None), largest, tl.sum(weights, 1))
        pair = tl.load(PAIRS + begin + rows // HEADS, mask=live, other=0)
        at = (pair.to(tl.int64) * parts + part) * HEADS + rows % HEADS
        tl.store(PART_OUT + at[:, None] * DV + dv[None, :], out, mask=live[:, None] & (dv < DV)[None, :])
        tl.store(PART_LSE + at, lse, mask=live)


@triton.jit
def _merged_rows(first, length, S, B, G, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a program that merges: for each row, batch, query, head, its place in the chunk and in BLOCKS `[B, S, G]`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < B * length * G * HEADS
    chosen = rows // HEADS  # of [B, length, G]
    s = first + chosen // G % length
    batch = chosen // G // length
    group = chosen % G
    return live, batch, s, group * HEADS + rows % HEADS, chosen, (batch * S + s) * G + group


@triton.jit
def _merge_kernel(
    OUT, LSE, PART_OUT, PART_LSE, BLOCKS, o_b, o_s, o_h, o_d, first, length, S, B, G, places,
    PARTS: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Partial outputs of a query, each weighted with its share of the sum of exponentials."""
    live, batch, s, head, chosen, at_blocks = _merged_rows(first, length, S, B, G, HEADS, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for i in range(places * PARTS):
        place = i // PARTS
        used = live & (tl.load(BLOCKS + at_blocks * places + place, mask=live, other=-1) >= 0)
        at = ((chosen * places + place) * PARTS + i % PARTS) * HEADS + head % HEADS
        lse = tl.load(PART_LSE + at, mask=used, other=float("-inf")) / LN2
        out = tl.load(PART_OUT + at[:, None] * DV + dv[None, :], mask=used[:, None] & (dv < DV)[None, :], other=0.0)
        new_largest = tl.maximum(largest, lse)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - shift)
        weight = tl.exp2(lse - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + out * weight[:, None]
        largest = new_largest
    out, lse = softmax_end(acc, largest, total)
    o_at = batch * o_b + s * o_s + head * o_h
    tl.store(
        OUT + o_at[:, None] + dv[None, :] * o_d, out.to(OUT.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :]
    )
    tl.store(LSE + (batch * S + s) * (G * HEADS) + head, lse, mask=live)


@triton.jit
def _dq_kernel(
    GRAD, Q, K, V, LSE, DELTA, PART_DQ, PAIRS, QUERIES, BEGIN, PROGRAM, OWNER,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    S, T, G, num_blocks, num_lists, longest, scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The part of dq that a tile of keys contributes, for each of its pairs."""
    parts: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0) // parts
    owner = tl.load(OWNER + program)
    if owner == num_lists:
        return
    block, group, batch, begin, pairs = _list(PROGRAM, BEGIN, G, num_blocks, longest, program, owner)
    if pairs == 0:
        return
    part = tl.program_id(0) % parts
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    _, keys, here = _key_tile(block, part, T, BLOCK_SIZE, BLOCK_N)
    k = _load_rows(K + batch * k_b + group * k_h, keys, here, k_s, k_d, D, BLOCK_D)
    v = _load_rows(V + batch * v_b + group * v_h, keys, here, v_s, v_d, DV, BLOCK_DV)
    Q += batch * q_b
    GRAD += batch * g_b

    for row in range(0, pairs * HEADS, BLOCK_M):
        rows = row + m
        live = rows < pairs * HEADS
        s = tl.load(QUERIES + begin + rows // HEADS, mask=live, other=0)
        head = group * HEADS + rows % HEADS
        q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
        q = tl.load(Q + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        g_at = row_offsets(s, head, g_s, g_h)[:, None] + dv[None, :] * g_d
        grad = tl.load(GRAD + g_at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        flat = (batch * S + s) * (G * HEADS) + head
        lse = tl.load(LSE + flat, mask=live, other=0.0) / LN2
        delta = tl.load(DELTA + flat, mask=live, other=0.0)
        scores = dot(q, tl.trans(k), None) * scale
        seen = here[None, :] & (keys[None, :] <= s[:, None])
        weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        dweights = dot(grad, tl.trans(v), None)
        dscores = weights * (dweights - delta[:, None])
        pair = tl.load(PAIRS + begin + rows // HEADS, mask=live, other=0)
        at = (pair.to(tl.int64) * parts + part) * HEADS + rows % HEADS
        tl.store(PART_DQ + at[:, None] * D + d[None, :], dot(dscores, k, None), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _add_dq_kernel(
    DQ, PART_DQ, BLOCKS, x_b, x_s, x_h, x_d, first, length, S, B, G, places, grad_scale,
    PARTS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq of a tile of query-head pairs: the parts of their blocks, added in the order of the blocks."""
    live, batch, s, head, chosen, at_blocks = _merged_rows(first, length, S, B, G, HEADS, BLOCK_M)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(places * PARTS):
        place = i // PARTS
        used = live & (tl.load(BLOCKS + at_blocks * places + place, mask=live, other=-1) >= 0)
        at = ((chosen * places + place) * PARTS + i % PARTS) * HEADS + head % HEADS
        dq += tl.load(PART_DQ + at[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
    x_at = (batch * x_b + s * x_s + head * x_h)[:, None] + d[None, :] * x_d
    tl.store(DQ + x_at, (dq * grad_scale).to(DQ.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _dkdv_kernel(
    GRAD, Q, K, V, LSE, DELTA, DK, DV_OUT, PART_DK, PART_DV, QUERIES, BEGIN, PROGRAM, PART, OWNER,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    S, T, G, num_blocks, num_lists, longest, scale, grad_scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, from up to `longest` of the queries that selected its block."""
    per_block: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0) // per_block
    owner = tl.load(OWNER + program)
    if owner == num_lists:
        return
    block, group, batch, begin, pairs = _list(PROGRAM, BEGIN, G, num_blocks, longest, program, owner)
    first_program = tl.load(PROGRAM + owner)
    alone = tl.load(PROGRAM + owner + 1) - first_program == 1

    within, keys, here = _key_tile(block, tl.program_id(0) % per_block, T, BLOCK_SIZE, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    live_d = here[:, None] & (d < D)[None, :]
    live_dv = here[:, None] & (dv < DV)[None, :]
    k = _load_rows(K + batch * k_b + group * k_h, keys, here, k_s, k_d, D, BLOCK_D)
    v = _load_rows(V + batch * v_b + group * v_h, keys, here, v_s, v_d, DV, BLOCK_DV)
    Q += batch * q_b
    GRAD += batch * g_b

    sum_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for row in range(0, pairs * HEADS, BLOCK_M):
        rows = row + m
        live = rows < pairs * HEADS
        # The last row stands in for those after it: a load without a mask is cheaper, and weights of zero are added.
        rows = tl.minimum(rows, pairs * HEADS - 1)
        s = tl.load(QUERIES + begin + rows // HEADS)
        head = group * HEADS + rows % HEADS
        q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
        q = tl.load(Q + q_at, mask=(d < D)[None, :], other=0.0)
        g_at = row_offsets(s, head, g_s, g_h)[:, None] + dv[None, :] * g_d
        grad = tl.load(GRAD + g_at, mask=(dv < DV)[None, :], other=0.0)
        flat = (batch * S + s) * (G * HEADS) + head
        lse = tl.load(LSE + flat) / LN2
        delta = tl.load(DELTA + flat)

        seen = (keys[:, None] <= s[None, :]) & here[:, None] & live[None, :]
        scores = dot(k, tl.trans(q), None) * scale
        weights = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
        sum_dv = dot(weights, grad, sum_dv)
        dweights = dot(v, tl.trans(grad), None)
        dscores = weights * (dweights - delta[None, :])
        sum_dk = dot(dscores, q, sum_dk)

    if alone:
        x_at = batch * x_b + group * x_h + keys.to(tl.int64)[:, None] * x_s + d[None, :] * x_d
        tl.store(DK + x_at, (sum_dk * grad_scale).to(DK.dtype.element_ty), mask=live_d)
        y_at = batch * y_b + group * y_h + keys.to(tl.int64)[:, None] * y_s + dv[None, :] * y_d
        tl.store(DV_OUT + y_at, sum_dv.to(DV_OUT.dtype.element_ty), mask=live_dv)
    else:
        part = tl.load(PART + owner) + program - first_program
        part_row = (part * BLOCK_SIZE + within)[:, None]
        tl.store(PART_DK + part_row * D + d[None, :], sum_dk, mask=live_d)
        tl.store(PART_DV + part_row * DV + dv[None, :], sum_dv, mask=live_dv)


@triton.jit
def _add_dkdv_kernel(
    DK, DV_OUT, PART_DK, PART_DV, PROGRAM, PART,
    x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    T, G, num_blocks, grad_scale,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys whose list was split, its partial sums added in the order of the list."""
    per_block: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    owner = tl.program_id(0) // per_block
    part = tl.load(PART + owner)
    parts = (tl.load(PART + owner + 1) - part).to(tl.int32)
    if parts == 0:
        return
    block = owner % num_blocks
    group = (owner // num_blocks % G).to(tl.int64)
    batch = (owner // num_blocks // G).to(tl.int64)
    within, keys, here = _key_tile(block, tl.program_id(0) % per_block, T, BLOCK_SIZE, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    live_d = here[:, None] & (d < D)[None, :]
    live_dv = here[:, None] & (dv < DV)[None, :]
    sum_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for i in range(parts):
        part_row = ((part + i) * BLOCK_SIZE + within)[:, None]
        sum_dk += tl.load(PART_DK + part_row * D + d[None, :], mask=live_d, other=0.0)
        sum_dv += tl.load(PART_DV + part_row * DV + dv[None, :], mask=live_dv, other=0.0)
    x_at = batch * x_b + group * x_h + keys.to(tl.int64)[:, None] * x_s + d[None, :] * x_d
    tl.store(DK + x_at, (sum_dk * grad_scale).to(DK.dtype.element_ty), mask=live_d)
    y_at = batch * y_b + group * y_h + keys.to(tl.int64)[:, None] * y_s + dv[None, :] * y_d
    tl.store(DV_OUT + y_at, sum_dv.to(DV_OUT.dtype.element_ty), mask=live_dv)

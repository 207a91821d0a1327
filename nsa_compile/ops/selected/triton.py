"""Attention over selected blocks on the GPU.

Forward and dq: one program for a query and a group; its rows are the heads of the group, which share the selection.
dk and dv: one program for a block of keys, over the queries that selected it. Their lists come from a stable sort of
all (block, query) pairs. Some blocks, above all the first, are selected by nearly every query, so a long list is
split among programs, whose float32 partial sums a last kernel adds in order. No atomics, and no size is read back
from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_compile.ops.triton_common import (
    LN2,
    LOG2E,
    Tiles,
    check_supported,
    dot,
    padded,
    prepare,
    row_offsets,
    softmax_end,
    softmax_step,
)

__all__ = ["backward", "forward", "prepare"]


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    check_supported(q, v)
    (batch, length, heads, _), (num_keys, groups) = q.shape, k.shape[1:3]
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)
    if num_keys == 0 or indices.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    block_size = min(block_size, num_keys)
    blocks, used = _distinct_blocks(indices, num_keys, block_size)
    tiles = _query_tiles(q, v, block_size, heads // groups)
    with torch.cuda.device_of(q):
        _forward_kernel[_query_grid(q, groups, tiles)](
            q, k, v, out, lse, blocks, used, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            length, num_keys, groups, indices.shape[3], scale * LOG2E, block_size, **_constants(q, k, v, tiles),
        )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, indices: Tensor, block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_supported(q, v)
    (length, heads), (num_keys, groups) = q.shape[1:3], k.shape[1:3]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if num_keys == 0 or indices.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    block_size = min(block_size, num_keys)
    blocks, used = _distinct_blocks(indices, num_keys, block_size)
    lists = _selecting_queries(blocks, triton.cdiv(num_keys, block_size), block_size)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    part_dk = q.new_empty(lists.max_parts, block_size, q.shape[3], dtype=torch.float32)
    part_dv = q.new_empty(lists.max_parts, block_size, v.shape[3], dtype=torch.float32)
    strides = [x.stride() for x in (grad_out, q, k, v)]
    tiles = _query_tiles(q, v, block_size, heads // groups)
    key_tiles = _key_tiles(q, v, block_size)
    per_block = triton.cdiv(block_size, key_tiles.keys)
    with torch.cuda.device_of(q):
        _dq_kernel[_query_grid(q, groups, tiles)](
            grad_out, q, k, v, out, lse, delta, dq, blocks, used, *sum(strides, ()), *out.stride(), *dq.stride(),
            length, num_keys, groups, indices.shape[3], scale * LOG2E, scale, block_size,
            **_constants(q, k, v, tiles),
        )  # fmt: skip
        _dkdv_kernel[(lists.max_programs * per_block,)](
            grad_out, q, k, v, lse, delta, dk, dv, part_dk, part_dv,
            lists.queries, lists.begin, lists.program, lists.part, lists.owner, *sum(strides, ()),
            *dk.stride(), *dv.stride(), length, num_keys, groups, lists.num_blocks, lists.num_lists, lists.longest,
            scale * LOG2E, scale, block_size, **_constants(q, k, v, key_tiles),
        )  # fmt: skip
        constants = _constants(q, k, v, key_tiles)
        for name in ("HEADS", "BLOCK_M"):
            del constants[name]
        _add_parts_kernel[(lists.num_lists * per_block,)](
            dk, dv, part_dk, part_dv, lists.program, lists.part, *dk.stride(), *dv.stride(),
            num_keys, groups, lists.num_blocks, scale, block_size, **constants,
        )  # fmt: skip
    return dq, dk, dv


def _distinct_blocks(indices: Tensor, num_keys: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The visible blocks of every row, ascending, each once, and how many places of the row they take.

    int32 `[B, S, G, n]` and `[B, S, G]`. A place is -1 where an index repeats, after the last block, and nowhere else.
    """
    last = torch.arange(indices.shape[1], device=indices.device)[:, None, None] // block_size
    last = last.clamp_max(triton.cdiv(num_keys, block_size) - 1)
    none = torch.iinfo(torch.int32).max
    blocks = indices.masked_fill((indices < 0) | (indices > last), none).int().sort(-1).values
    used = (blocks != none).sum(-1, dtype=torch.int32)
    repeated = torch.zeros_like(blocks, dtype=torch.bool)
    repeated[..., 1:] = blocks[..., 1:] == blocks[..., :-1]
    return blocks.masked_fill_(repeated | (blocks == none), -1), used


class _Lists(NamedTuple):
    """For every list (b, g, block), the queries that selected the block, and the programs that share the list."""

    queries: Tensor  # int32 [pairs], list after list, ascending within each
    begin: Tensor  # int64 [num_lists + 1], where the queries of a list begin
    program: Tensor  # int64 [num_lists + 1], the first program of a list; an empty list has one, which stores zeros
    part: Tensor  # int64 [num_lists + 1], the first partial sum of a list; a list of one program has none
    owner: Tensor  # int32 [max_programs], the list of a program, num_lists where there is nothing left to do
    num_blocks: int
    num_lists: int
    max_programs: int
    max_parts: int
    longest: int  # queries a program


def _selecting_queries(blocks: Tensor, num_blocks: int, block_size: int) -> _Lists:
    """Invert blocks `[B, S, G, n]`. Sizes that depend on the data are replaced by their bounds."""
    batch, length, groups, n = blocks.shape
    num_lists = batch * groups * num_blocks
    # Twice the mean length of a list, were all places used: the partial sums are then at most as many as the blocks.
    longest = max(2 * n * block_size, 64)
    max_programs = num_lists + blocks.numel() // longest
    max_parts = 2 * blocks.numel() // longest

    first = torch.arange(batch * groups, device=blocks.device).view(batch, 1, groups, 1) * num_blocks
    keys = (first + blocks).masked_fill_(blocks < 0, num_lists)
    if num_lists < 2**31:
        keys = keys.int()
    keys, order = keys.flatten().sort(stable=True)
    queries = (order // (groups * n) % length).int()

    every = torch.arange(num_lists + 1, device=blocks.device)
    begin = torch.searchsorted(keys, every.to(keys.dtype))
    programs = ((begin.diff() + longest - 1) // longest).clamp_min_(1)
    program = torch.zeros_like(begin)
    part = torch.zeros_like(begin)
    torch.cumsum(programs, 0, out=program[1:])
    torch.cumsum(programs.masked_fill(programs == 1, 0), 0, out=part[1:])
    owner = torch.searchsorted(program[1:], torch.arange(max_programs, device=blocks.device), right=True).int()
    return _Lists(queries, begin, program, part, owner, num_blocks, num_lists, max_programs, max_parts, longest)


def _query_tiles(q: Tensor, v: Tensor, block_size: int, heads: int) -> Tiles:
    """Tiles of the heads of one query, at most 64, and of the keys of one block."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:
        return Tiles(16, 16, 4 if width <= 128 else 8, 1)
    most = 64 if width <= 128 else 32
    return Tiles(min(padded(heads), most), min(padded(block_size), most), 4, 2)


def _query_grid(q: Tensor, groups: int, tiles: Tiles) -> tuple[int]:
    return (q.shape[0] * q.shape[1] * groups * triton.cdiv(q.shape[2] // groups, tiles.rows),)


def _key_tiles(q: Tensor, v: Tensor, block_size: int) -> Tiles:
    """Tiles of query-head pairs that selected a block, and of the keys of the block."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:
        return Tiles(16, 16, 4 if width <= 128 else 8, 1)
    most = 64 if width <= 128 else 32
    return Tiles(most, min(padded(block_size), most), 4 if width <= 64 else 8, 2 if width <= 128 else 1)


def _constants(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> dict[str, int]:
    return {
        "HEADS": q.shape[2] // k.shape[2],
        "D": q.shape[3],
        "DV": v.shape[3],
        "BLOCK_D": padded(q.shape[3]),
        "BLOCK_DV": padded(v.shape[3]),
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit
def _forward_kernel(
    Q, K, V, OUT, LSE, BLOCKS, USED,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, o_b, o_s, o_h, o_d,
    S, T, G, places, scale, block_size,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    parts: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    heads = program % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (program // parts).to(tl.int64)  # of [B, S, G]
    group = row % G
    s = (row // G % S).to(tl.int32)
    batch = row // G // S

    live = heads < HEADS
    head = group * HEADS + heads
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    q_at = batch * q_b + s.to(tl.int64) * q_s + head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(Q + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    K += batch * k_b + group * k_h
    V += batch * v_b + group * v_h

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    per_block = tl.cdiv(block_size, BLOCK_N)
    for step in range(tl.load(USED + row) * per_block):
        block = tl.load(BLOCKS + row * places + step // per_block)
        within = step % per_block * BLOCK_N + n
        keys = block * block_size + within
        seen = (block >= 0) & (within < block_size) & (keys < T) & (keys <= s)
        k_at = keys.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
        k = tl.load(K + k_at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
        scores = dot(q, tl.trans(k), None) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v_at = keys.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d
        v = tl.load(V + v_at, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        acc, largest, total = softmax_step(acc, largest, total, scores, v)

    out, lse = softmax_end(acc, largest, total)
    o_at = batch * o_b + s.to(tl.int64) * o_s + head[:, None] * o_h + dv[None, :] * o_d
    tl.store(OUT + o_at, out.to(OUT.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    tl.store(LSE + row * HEADS + heads, lse, mask=live)


@triton.jit
def _dq_kernel(
    GRAD, Q, K, V, OUT, LSE, DELTA, DQ, BLOCKS, USED,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, o_b, o_s, o_h, o_d,
    x_b, x_s, x_h, x_d,
    S, T, G, places, scale, grad_scale, block_size,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq, and `delta = sum(grad_out * out)`, which the kernel of dk and dv reads."""
    program = tl.program_id(0)
    parts: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    heads = program % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (program // parts).to(tl.int64)  # of [B, S, G]
    group = row % G
    s = (row // G % S).to(tl.int32)
    batch = row // G // S

    live = heads < HEADS
    head = group * HEADS + heads
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    live_d = live[:, None] & (d < D)[None, :]
    live_dv = live[:, None] & (dv < DV)[None, :]
    q_at = batch * q_b + s.to(tl.int64) * q_s + head[:, None] * q_h + d[None, :] * q_d
    q = tl.load(Q + q_at, mask=live_d, other=0.0)
    g_at = batch * g_b + s.to(tl.int64) * g_s + head[:, None] * g_h + dv[None, :] * g_d
    grad = tl.load(GRAD + g_at, mask=live_dv, other=0.0)
    o_at = batch * o_b + s.to(tl.int64) * o_s + head[:, None] * o_h + dv[None, :] * o_d
    out = tl.load(OUT + o_at, mask=live_dv, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + row * HEADS + heads, delta, mask=live)
    lse = tl.load(LSE + row * HEADS + heads, mask=live, other=0.0) / LN2
    K += batch * k_b + group * k_h
    V += batch * v_b + group * v_h

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    per_block = tl.cdiv(block_size, BLOCK_N)
    for step in range(tl.load(USED + row) * per_block):
        block = tl.load(BLOCKS + row * places + step // per_block)
        within = step % per_block * BLOCK_N + n
        keys = block * block_size + within
        seen = (block >= 0) & (within < block_size) & (keys < T) & (keys <= s)
        k_at = keys.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
        k = tl.load(K + k_at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
        v_at = keys.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d
        v = tl.load(V + v_at, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        scores = dot(q, tl.trans(k), None) * scale
        weights = tl.where(seen[None, :], tl.exp2(scores - lse[:, None]), 0.0)
        dweights = dot(grad, tl.trans(v), None)
        dscores = weights * (dweights - delta[:, None])
        dq = dot(dscores, k, dq)

    x_at = batch * x_b + s.to(tl.int64) * x_s + head[:, None] * x_h + d[None, :] * x_d
    tl.store(DQ + x_at, (dq * grad_scale).to(DQ.dtype.element_ty), mask=live_d)


@triton.jit
def _dkdv_kernel(
    GRAD, Q, K, V, LSE, DELTA, DK, DV_OUT, PART_DK, PART_DV, QUERIES, BEGIN, PROGRAM, PART, OWNER,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    S, T, G, num_blocks, num_lists, longest, scale, grad_scale, block_size,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, from up to `longest` of the queries that selected its block."""
    per_block = tl.cdiv(block_size, BLOCK_N)
    program = tl.program_id(0) // per_block
    owner = tl.load(OWNER + program)
    if owner == num_lists:
        return
    block = owner % num_blocks
    group = (owner // num_blocks % G).to(tl.int64)
    batch = (owner // num_blocks // G).to(tl.int64)
    first_program = tl.load(PROGRAM + owner)
    alone = tl.load(PROGRAM + owner + 1) - first_program == 1
    begin = tl.load(BEGIN + owner) + (program - first_program) * longest
    pairs = tl.minimum(tl.load(BEGIN + owner + 1) - begin, longest).to(tl.int32)

    within = tl.program_id(0) % per_block * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = block * block_size + within
    here = (within < block_size) & (keys < T)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    live_d = here[:, None] & (d < D)[None, :]
    live_dv = here[:, None] & (dv < DV)[None, :]
    k_at = keys.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
    k = tl.load(K + batch * k_b + group * k_h + k_at, mask=live_d, other=0.0)
    v_at = keys.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d
    v = tl.load(V + batch * v_b + group * v_h + v_at, mask=live_dv, other=0.0)
    Q += batch * q_b
    GRAD += batch * g_b

    sum_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
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
        part_row = (part * block_size + within)[:, None]
        tl.store(PART_DK + part_row * D + d[None, :], sum_dk, mask=live_d)
        tl.store(PART_DV + part_row * DV + dv[None, :], sum_dv, mask=live_dv)


@triton.jit
def _add_parts_kernel(
    DK, DV_OUT, PART_DK, PART_DV, PROGRAM, PART,
    x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    T, G, num_blocks, grad_scale, block_size,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys whose list was split, its partial sums added in the order of the list."""
    per_block = tl.cdiv(block_size, BLOCK_N)
    owner = tl.program_id(0) // per_block
    part = tl.load(PART + owner)
    parts = (tl.load(PART + owner + 1) - part).to(tl.int32)
    if parts == 0:
        return
    block = owner % num_blocks
    group = (owner // num_blocks % G).to(tl.int64)
    batch = (owner // num_blocks // G).to(tl.int64)
    within = tl.program_id(0) % per_block * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = block * block_size + within
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    here = (within < block_size) & (keys < T)
    live_d = here[:, None] & (d < D)[None, :]
    live_dv = here[:, None] & (dv < DV)[None, :]
    sum_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for i in range(parts):
        part_row = ((part + i) * block_size + within)[:, None]
        sum_dk += tl.load(PART_DK + part_row * D + d[None, :], mask=live_d, other=0.0)
        sum_dv += tl.load(PART_DV + part_row * DV + dv[None, :], mask=live_dv, other=0.0)
    x_at = batch * x_b + group * x_h + keys.to(tl.int64)[:, None] * x_s + d[None, :] * x_d
    tl.store(DK + x_at, (sum_dk * grad_scale).to(DK.dtype.element_ty), mask=live_d)
    y_at = batch * y_b + group * y_h + keys.to(tl.int64)[:, None] * y_s + dv[None, :] * y_d
    tl.store(DV_OUT + y_at, sum_dv.to(DV_OUT.dtype.element_ty), mask=live_dv)

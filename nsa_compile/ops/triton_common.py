"""Triton kernels for attention along a band, and what all Triton implementations share.

Along a band every query sees one contiguous range of keys: `s - window < p` and `p * stride + block_size - 1 <= s`.
A sliding window is stride 1 and block_size 1; attention over compressed blocks is a window of S.

The rows of a query tile are query-head pairs of one group, row `s * h + i` being head i of query s: the h heads share
their keys, so a tile of 64 rows fills the tensor cores with any h. Sums are float32, softmax is in powers of two, and
every output element is written by one program in a fixed order: no atomics, equal bits from run to run.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_compile.ops.checks import TRITON_DTYPES

__all__ = [
    "LN2",
    "LOG2E",
    "Tiles",
    "band_backward",
    "band_forward",
    "check_supported",
    "dot",
    "padded",
    "prepare",
    "row_offsets",
    "softmax_end",
    "softmax_step",
    "tile_constants",
    "tile_sizes",
]

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
DOT_IN_FLOAT32 = tl.constexpr(triton.knobs.runtime.interpret)

MAX_WIDTH = 256
PROGRAMS = 4096  # of dk and dv, at most, where tiles of keys are split; each writes 256 (D + Dv) bytes of partial sums
MIN_ROWS = 4096  # of a part
ADDED = 16  # keys a program that adds partial sums


class Tiles(NamedTuple):
    rows: int  # query-head pairs
    keys: int
    num_warps: int
    num_stages: int


def prepare() -> None:
    """Compile and run a kernel: a missing C compiler or driver, or too old a GPU, is better found now than later."""
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise RuntimeError(f"the GPU has compute capability {major}.{minor}, the Triton kernels need 8.0")
    _probe_kernel[(1,)](torch.zeros(1, device="cuda"))


@triton.jit
def _probe_kernel(X):
    tl.store(X, 1.0)


def check_supported(q: Tensor, v: Tensor) -> None:
    if q.dtype not in TRITON_DTYPES:
        raise ValueError(
            f"q has dtype {q.dtype}, for which there are no Triton kernels; cast to float32, or call inside "
            'force_implementation("portable")'
        )
    if max(q.shape[3], v.shape[3]) > MAX_WIDTH:
        raise ValueError(
            f"head_dim is {q.shape[3]} for q and {v.shape[3]} for v; the Triton kernels take at most {MAX_WIDTH}: call "
            'inside force_implementation("portable")'
        )


def padded(width: int) -> int:
    """The next power of two that `tl.dot` takes."""
    return max(16, triton.next_power_of_2(width))


def tile_sizes(q: Tensor, v: Tensor, kernel: Literal["forward", "dq", "dkdv"]) -> Tiles:
    """Tiles whose operands fit the shared memory of every GPU since Ampere (99 KiB), and their sums the registers."""
    width = max(padded(q.shape[3]), padded(v.shape[3]))
    if q.dtype == torch.float32:  # no tensor cores: the operands of an exact product live in registers
        return Tiles(32, 32, 8, 1) if width <= 64 else Tiles(16, 16, 4 if width <= 128 else 8, 1)
    if width > 128:
        return Tiles(64, 32, 8, 2) if kernel == "forward" else Tiles(32, 32, 8, 1)
    return Tiles(32, 64, 4, 3) if kernel == "dkdv" else Tiles(64, 32, 4, 3)


def tile_constants(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> dict[str, int]:
    """What the attention kernels are specialised on."""
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
def dot(a, b, acc):
    """`acc + a @ b` in float32; `a` is rounded to the dtype of `b`, and float32 operands are not rounded further."""
    a = a.to(b.dtype)
    if DOT_IN_FLOAT32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def row_offsets(index, head, stride_s, stride_h):
    """Element offsets of rows. Offsets may pass 2^31 in any dimension, so every index is widened before its stride."""
    return index.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h


@triton.jit
def softmax_step(acc, largest, total, scores, v):
    """One tile of the online softmax: scores `[M, N]` in powers of two, -inf where hidden, v `[N, Dv]`."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # rows that have seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(largest - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = dot(weights, v, acc)
    return acc, new_largest, total


@triton.jit
def softmax_end(acc, largest, total):
    """Output `[M, Dv]` and natural log-sum-exp `[M]`; zero and -inf for rows that saw nothing."""
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), (largest + tl.log2(total)) * LN2)
    return acc / total[:, None], lse


@triton.jit
def _seen_end(s, T, block_size, stride):
    """Query s sees no key from this one on."""
    return tl.minimum(tl.maximum(s + 1 - block_size + stride, 0) // stride, T)


@triton.jit
def _unmasked(first, lo, hi, STEP: tl.constexpr):
    """Of the tiles from `first` on, the range of those that lie within lo to hi; `first` twice if there are none."""
    begin = first + tl.cdiv(tl.maximum(lo - first, 0), STEP) * STEP
    end = first + tl.maximum(hi - first, 0) // STEP * STEP
    return tl.where(end > begin, begin, first), tl.where(end > begin, end, first)


@triton.jit
def _masked_tile(i, first, begin, end, STEP: tl.constexpr):
    """Where the i-th tile begins of those from `first` on that are not between begin and end."""
    start = first + i * STEP
    return tl.where(start < begin, start, start + end - begin)


@triton.jit
def _key_tiles(
    tile, S, T, window, block_size, stride, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The keys that a tile of rows sees, first to last, and those of its tiles that every row sees whole."""
    early = tile * BLOCK_M // HEADS
    late = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, S - 1)
    first = tl.maximum(early - window + 1, 0) // BLOCK_N * BLOCK_N
    last = tl.maximum(_seen_end(late, T, block_size, stride), first)
    begin, end = _unmasked(first, late - window + 1, _seen_end(early, T, block_size, stride), BLOCK_N)
    return first, last, begin, end


@triton.jit
def _forward_kernel(
    Q, K, V, OUT, LSE,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, o_b, o_s, o_h, o_d,
    S, T, G, scale, window, block_size, stride,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S * HEADS, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # late queries see most: first come, first done
    group = (tl.program_id(0) // tiles) % G
    batch = (tl.program_id(0) // tiles // G).to(tl.int64)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < S * HEADS
    s = rows // HEADS
    head = group * HEADS + rows % HEADS
    seen_from = s - window + 1
    seen_to = _seen_end(s, T, block_size, stride)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    n = tl.arange(0, BLOCK_N)

    q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
    q = tl.load(Q + batch * q_b + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    K += batch * k_b + group.to(tl.int64) * k_h
    V += batch * v_b + group.to(tl.int64) * v_h
    k_at = n.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
    v_at = n.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first, last, begin, end = _key_tiles(tile, S, T, window, block_size, stride, HEADS, BLOCK_M, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        k = tl.load(K + tl.cast(start, tl.int64) * k_s + k_at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(V + tl.cast(start, tl.int64) * v_s + v_at, mask=(dv < DV)[None, :], other=0.0)
        acc, largest, total = softmax_step(acc, largest, total, dot(q, tl.trans(k), None) * scale, v)
    for i in range(tl.cdiv(last - first - (end - begin), BLOCK_N)):
        start = _masked_tile(i, first, begin, end, BLOCK_N)
        keys = start + n
        k_mask = (keys < T)[:, None] & (d < D)[None, :]
        k = tl.load(K + tl.cast(start, tl.int64) * k_s + k_at, mask=k_mask, other=0.0)
        v_mask = (keys < T)[:, None] & (dv < DV)[None, :]
        v = tl.load(V + tl.cast(start, tl.int64) * v_s + v_at, mask=v_mask, other=0.0)
        seen = (keys[None, :] >= seen_from[:, None]) & (keys[None, :] < seen_to[:, None])
        scores = tl.where(seen, dot(q, tl.trans(k), None) * scale, float("-inf"))
        acc, largest, total = softmax_step(acc, largest, total, scores, v)

    out, lse = softmax_end(acc, largest, total)
    o_at = row_offsets(s, head, o_s, o_h)[:, None] + dv[None, :] * o_d
    tl.store(OUT + batch * o_b + o_at, out.to(OUT.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    tl.store(LSE + (batch * S + s) * (G * HEADS) + head, lse, mask=live)


@triton.jit
def _dq_kernel(
    GRAD, GRAD_LSE, Q, K, V, OUT, LSE, DELTA, DQ,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d, o_b, o_s, o_h, o_d,
    x_b, x_s, x_h, x_d,
    S, T, G, scale, grad_scale, window, block_size, stride,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq, and `delta = sum(grad_out * out) - grad_lse`, which the kernel of dk and dv reads."""
    tiles = tl.cdiv(S * HEADS, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    group = (tl.program_id(0) // tiles) % G
    batch = (tl.program_id(0) // tiles // G).to(tl.int64)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < S * HEADS
    s = rows // HEADS
    head = group * HEADS + rows % HEADS
    seen_from = s - window + 1
    seen_to = _seen_end(s, T, block_size, stride)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    live_d = live[:, None] & (d < D)[None, :]
    live_dv = live[:, None] & (dv < DV)[None, :]

    q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
    q = tl.load(Q + batch * q_b + q_at, mask=live_d, other=0.0)
    g_at = row_offsets(s, head, g_s, g_h)[:, None] + dv[None, :] * g_d
    grad = tl.load(GRAD + batch * g_b + g_at, mask=live_dv, other=0.0)
    o_at = row_offsets(s, head, o_s, o_h)[:, None] + dv[None, :] * o_d
    out = tl.load(OUT + batch * o_b + o_at, mask=live_dv, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    flat = (batch * S + s) * (G * HEADS) + head
    if GRAD_LSE is not None:
        delta -= tl.load(GRAD_LSE + flat, mask=live, other=0.0)
    tl.store(DELTA + flat, delta, mask=live)
    lse = tl.load(LSE + flat, mask=live, other=0.0) / LN2
    K += batch * k_b + group.to(tl.int64) * k_h
    V += batch * v_b + group.to(tl.int64) * v_h
    k_at = n.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
    v_at = n.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first, last, begin, end = _key_tiles(tile, S, T, window, block_size, stride, HEADS, BLOCK_M, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        k = tl.load(K + tl.cast(start, tl.int64) * k_s + k_at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(V + tl.cast(start, tl.int64) * v_s + v_at, mask=(dv < DV)[None, :], other=0.0)
        weights = tl.exp2(dot(q, tl.trans(k), None) * scale - lse[:, None])
        dweights = dot(grad, tl.trans(v), None)
        dq = dot(weights * (dweights - delta[:, None]), k, dq)
    for i in range(tl.cdiv(last - first - (end - begin), BLOCK_N)):
        start = _masked_tile(i, first, begin, end, BLOCK_N)
        keys = start + n
        k_mask = (keys < T)[:, None] & (d < D)[None, :]
        k = tl.load(K + tl.cast(start, tl.int64) * k_s + k_at, mask=k_mask, other=0.0)
        v_mask = (keys < T)[:, None] & (dv < DV)[None, :]
        v = tl.load(V + tl.cast(start, tl.int64) * v_s + v_at, mask=v_mask, other=0.0)
        seen = (keys[None, :] >= seen_from[:, None]) & (keys[None, :] < seen_to[:, None])
        scores = dot(q, tl.trans(k), None) * scale
        weights = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        dweights = dot(grad, tl.trans(v), None)
        dq = dot(weights * (dweights - delta[:, None]), k, dq)

    x_at = row_offsets(s, head, x_s, x_h)[:, None] + d[None, :] * x_d
    tl.store(DQ + batch * x_b + x_at, (dq * grad_scale).to(DQ.dtype.element_ty), mask=live_d)


@triton.jit
def _queries_that_see(start, S, window, block_size, stride, BLOCK_N: tl.constexpr):
    """The queries, first to last, that see any of the keys of a tile."""
    first = tl.minimum(start.to(tl.int64) * stride + block_size - 1, S).to(tl.int32)
    last = tl.minimum(start.to(tl.int64) + BLOCK_N - 1 + window, S).to(tl.int32)
    return first, tl.maximum(first, last)


@triton.jit
def _dkdv_kernel(
    GRAD, Q, K, V, LSE, DELTA, DK, DV_OUT, PART_DK, PART_DV,
    g_b, g_s, g_h, g_d, q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, v_b, v_s, v_h, v_d,
    x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    S, T, G, scale, grad_scale, window, block_size, stride, longest,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, from up to `longest` rows of the queries that see any of them, the last ones first.

    Programs that run at the same time read the same queries, whatever their keys are.
    """
    tiles = tl.cdiv(T, BLOCK_N)
    start = tl.program_id(0) % tiles * BLOCK_N
    group = (tl.program_id(0) // tiles) % G
    batch = tl.program_id(0).to(tl.int64) // tiles // G
    part = tl.program_id(1)
    first, last = _queries_that_see(start, S, window, block_size, stride, BLOCK_N)
    last_row = last * HEADS - part * longest
    first_row = tl.maximum(first * HEADS, last_row - longest)
    if SPLIT:  # noqa: SIM102  # a constant, not a number of the kernel
        if last_row <= first_row:
            return

    keys = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    live_d = (keys < T)[:, None] & (d < D)[None, :]
    live_dv = (keys < T)[:, None] & (dv < DV)[None, :]
    k_at = keys.to(tl.int64)[:, None] * k_s + d[None, :] * k_d
    k = tl.load(K + batch * k_b + group.to(tl.int64) * k_h + k_at, mask=live_d, other=0.0)
    v_at = keys.to(tl.int64)[:, None] * v_s + dv[None, :] * v_d
    v = tl.load(V + batch * v_b + group.to(tl.int64) * v_h + v_at, mask=live_dv, other=0.0)
    Q += batch * q_b
    GRAD += batch * g_b

    sum_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # Queries from `lo` to `hi` see all of the keys.
    lo = tl.minimum((start + BLOCK_N - 1).to(tl.int64) * stride + block_size - 1, S).to(tl.int32)
    hi = tl.where(start + BLOCK_N <= T, tl.minimum(start.to(tl.int64) + window, S), 0).to(tl.int32)
    begin, end = _unmasked(first_row, lo * HEADS, tl.minimum(hi * HEADS, last_row), BLOCK_M)
    for row in range(begin, end, BLOCK_M):
        rows = row + m
        s = rows // HEADS
        head = group * HEADS + rows % HEADS
        q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
        q = tl.load(Q + q_at, mask=(d < D)[None, :], other=0.0)
        g_at = row_offsets(s, head, g_s, g_h)[:, None] + dv[None, :] * g_d
        grad = tl.load(GRAD + g_at, mask=(dv < DV)[None, :], other=0.0)
        flat = (batch * S + s) * (G * HEADS) + head
        lse = tl.load(LSE + flat) / LN2
        delta = tl.load(DELTA + flat)
        weights = tl.exp2(dot(k, tl.trans(q), None) * scale - lse[None, :])
        sum_dv = dot(weights, grad, sum_dv)
        dweights = dot(v, tl.trans(grad), None)
        sum_dk = dot(weights * (dweights - delta[None, :]), q, sum_dk)
    for i in range(tl.cdiv(last_row - first_row - (end - begin), BLOCK_M)):
        rows = _masked_tile(i, first_row, begin, end, BLOCK_M) + m
        live = rows < last_row
        s = rows // HEADS
        head = group * HEADS + rows % HEADS
        q_at = row_offsets(s, head, q_s, q_h)[:, None] + d[None, :] * q_d
        q = tl.load(Q + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        g_at = row_offsets(s, head, g_s, g_h)[:, None] + dv[None, :] * g_d
        grad = tl.load(GRAD + g_at, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        flat = (batch * S + s) * (G * HEADS) + head
        lse = tl.load(LSE + flat, mask=live, other=0.0) / LN2
        delta = tl.load(DELTA + flat, mask=live, other=0.0)
        seen_from = s - window + 1
        seen_to = _seen_end(s, T, block_size, stride)

        seen = (keys[:, None] >= seen_from[None, :]) & (keys[:, None] < seen_to[None, :]) & live[None, :]
        scores = dot(k, tl.trans(q), None) * scale
        weights = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
        sum_dv = dot(weights, grad, sum_dv)
        dweights = dot(v, tl.trans(grad), None)
        sum_dk = dot(weights * (dweights - delta[None, :]), q, sum_dk)

    if SPLIT:
        at = ((part.to(tl.int64) * (tl.num_programs(0) // tiles) + batch * G + group) * T + keys)[:, None]
        tl.store(PART_DK + at * D + d[None, :], sum_dk, mask=live_d)
        tl.store(PART_DV + at * DV + dv[None, :], sum_dv, mask=live_dv)
    else:
        x_at = keys.to(tl.int64)[:, None] * x_s + d[None, :] * x_d
        DK += batch * x_b + group.to(tl.int64) * x_h
        tl.store(DK + x_at, (sum_dk * grad_scale).to(DK.dtype.element_ty), mask=live_d)
        y_at = keys.to(tl.int64)[:, None] * y_s + dv[None, :] * y_d
        DV_OUT += batch * y_b + group.to(tl.int64) * y_h
        tl.store(DV_OUT + y_at, sum_dv.to(DV_OUT.dtype.element_ty), mask=live_dv)


@triton.jit
def _add_dkdv_kernel(
    DK, DV_OUT, PART_DK, PART_DV, x_b, x_s, x_h, x_d, y_b, y_s, y_h, y_d,
    S, T, B, G, grad_scale, window, block_size, stride, longest,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """dk and dv of `ADDED` keys of a tile, its partial sums added in their order."""
    tiles = tl.cdiv(T, ADDED)
    start = tl.program_id(0) % tiles * ADDED
    group = tl.program_id(0).to(tl.int64) // tiles % G
    batch = tl.program_id(0).to(tl.int64) // tiles // G
    first, last = _queries_that_see(start // BLOCK_N * BLOCK_N, S, window, block_size, stride, BLOCK_N)

    keys = (start + tl.arange(0, ADDED)).to(tl.int64)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    live_d = (keys < T)[:, None] & (d < D)[None, :]
    live_dv = (keys < T)[:, None] & (dv < DV)[None, :]
    sum_dk = tl.zeros([ADDED, BLOCK_D], tl.float32)
    sum_dv = tl.zeros([ADDED, BLOCK_DV], tl.float32)
    for part in range(tl.cdiv((last - first) * HEADS, longest)):
        at = (((tl.cast(part, tl.int64) * B + batch) * G + group) * T + keys)[:, None]
        sum_dk += tl.load(PART_DK + at * D + d[None, :], mask=live_d, other=0.0)
        sum_dv += tl.load(PART_DV + at * DV + dv[None, :], mask=live_dv, other=0.0)
    x_at = batch * x_b + group * x_h + keys[:, None] * x_s + d[None, :] * x_d
    tl.store(DK + x_at, (sum_dk * grad_scale).to(DK.dtype.element_ty), mask=live_d)
    y_at = batch * y_b + group * y_h + keys[:, None] * y_s + dv[None, :] * y_d
    tl.store(DV_OUT + y_at, sum_dv.to(DV_OUT.dtype.element_ty), mask=live_dv)


def _band(length: int, window: int, block_size: int, stride: int) -> tuple[int, int, int]:
    """The band, in numbers that fit 32 bits and mean the same for `length` queries."""
    return min(window, length), min(block_size, length + 1), min(stride, length + 1)


def band_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, block_size: int = 1, stride: int = 1
) -> tuple[Tensor, Tensor]:
    """q `[B, S, Hq, D]`, k `[B, T, G, D]`, v `[B, T, G, Dv]`: output `[B, S, Hq, Dv]` and log-sum-exp `[B, S, Hq]`."""
    check_supported(q, v)
    (batch, length, heads, _), (num_keys, groups) = q.shape, k.shape[1:3]
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)
    if num_keys == 0 or out.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    tiles = tile_sizes(q, v, "forward")
    grid = (triton.cdiv(length * (heads // groups), tiles.rows) * batch * groups,)
    with torch.cuda.device_of(q):
        _forward_kernel[grid](
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            length, num_keys, groups, scale * LOG2E, *_band(length, window, block_size, stride),
            **tile_constants(q, k, v, tiles),
        )  # fmt: skip
    return out, lse


def band_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int, block_size: int = 1, stride: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients with respect to q, k and v of `band_forward`."""
    check_supported(q, v)
    (batch, length, heads, _), (num_keys, groups) = q.shape, k.shape[1:3]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if num_keys == 0 or out.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    lse, grad_lse = lse.contiguous(), grad_lse if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(lse)
    band = _band(length, window, block_size, stride)
    strides = [x.stride() for x in (grad_out, q, k, v)]
    with torch.cuda.device_of(q):
        tiles = tile_sizes(q, v, "dq")
        _dq_kernel[(triton.cdiv(length * (heads // groups), tiles.rows) * batch * groups,)](
            grad_out, grad_lse, q, k, v, out, lse, delta, dq, *sum(strides, ()), *out.stride(), *dq.stride(),
            length, num_keys, groups, scale * LOG2E, scale, *band, **tile_constants(q, k, v, tiles),
        )  # fmt: skip
        tiles = tile_sizes(q, v, "dkdv")
        programs = triton.cdiv(num_keys, tiles.keys) * batch * groups
        parts, longest = _parts(programs, min(length, tiles.keys + window - 1) * (heads // groups))
        part_dk, part_dv = (
            x.new_empty((parts, batch, groups, num_keys, x.shape[3]) if parts > 1 else 0, dtype=torch.float32)
            for x in (dk, dv)
        )
        constants = tile_constants(q, k, v, tiles)
        _dkdv_kernel[(programs, parts)](
            grad_out, q, k, v, lse, delta, dk, dv, part_dk, part_dv, *sum(strides, ()), *dk.stride(), *dv.stride(),
            length, num_keys, groups, scale * LOG2E, scale, *band, longest, SPLIT=parts > 1, **constants,
        )  # fmt: skip
        if parts > 1:
            del constants["BLOCK_M"]
            _add_dkdv_kernel[(triton.cdiv(num_keys, ADDED) * batch * groups,)](
                dk, dv, part_dk, part_dv, *dk.stride(), *dv.stride(),
                length, num_keys, batch, groups, scale, *band, longest, ADDED=ADDED, **constants,
            )  # fmt: skip
    return dq, dk, dv


def _parts(programs: int, rows: int) -> tuple[int, int]:
    """Into how many parts the rows that a tile of keys is seen by are split at most, and how many rows a part has.

    A late tile of keys is seen by few queries, and a short sequence has few tiles: parts share the work among all
    multiprocessors. Their number does not depend on the GPU, so that sums are the same on every one.
    """
    parts = min(max(1, PROGRAMS // programs), triton.cdiv(rows, MIN_ROWS))
    longest = triton.cdiv(rows, parts)
    return triton.cdiv(rows, longest), longest

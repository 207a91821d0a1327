"""Attention over selected blocks on the GPU: which loop order computes it, and the steps around the kernels.

dk and dv are always computed block after block. Output and dq have two orders, each in a file of its own: query after
query, or block after block. No atomics, and no size is read back from the device; every order gives the same bits from
run to run.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_compile.ops.selected import triton_block_major, triton_query_major
from nsa_compile.ops.selected.block_lists import distinct_blocks
from nsa_compile.ops.triton_common import check_supported, padded, prepare

__all__ = [
    "MAX_QUERIES",
    "ORDER_TABLE",
    "Order",
    "arch_of",
    "backward",
    "choose_order",
    "forget_measured",
    "forward",
    "prepare",
]

MAX_QUERIES = 8  # of a tile: block and members share 32 bits, which leaves 2^23 blocks
ORDER_TABLE = Path(__file__).parent / "triton_orders.json"


class Order(NamedTuple):
    """How output and dq are computed: "query" takes tiles of so many neighbouring `queries`, "block" ignores these."""

    major: Literal["query", "block"]
    queries: int = 1


def choose_order(heads: int, dim: int, value_dim: int, dtype: torch.dtype, block_size: int, arch: str) -> Order:
    """The order for so many heads a group on a GPU like `arch` ("sm_90"): as measured, or estimated.

    Measurements are in `triton_orders.json`, which `benchmarks/selected_orders.py` writes. The estimate counts bytes
    of forward and dq together, for one query and one of its blocks, as both orders are limited by bytes. Query-major
    reads `2 * block_size * (D + Dv)` elements of keys and values, from the L2 cache, taken to deliver twice what memory
    does. Block-major reads `2 D + Dv` elements for each head, and writes and reads back a float32 part of `D + Dv`.
    For bfloat16, D = 128 and blocks of 64: 64 KiB from the cache against 2.75 KiB a head, so groups of up to 11 go
    block-major. Query-major takes 32 rows a tile: if two neighbours of 16 heads share no block, this costs twice the
    products, which the reading hides; it saves up to half of the reading.
    """
    for row in _measured().get(arch, ()):
        shape = (row["heads"], row["dim"], row["value_dim"], row["dtype"], row["block_size"])
        if shape == (heads, dim, value_dim, str(dtype).removeprefix("torch."), block_size):
            return Order(row["major"], row["queries"])
    read_keys = 2 * block_size * (dim + value_dim) * dtype.itemsize / 2
    read_rows = heads * ((2 * dim + value_dim) * dtype.itemsize + 2 * 4 * (dim + value_dim))
    if read_rows < read_keys and heads < 16:
        return Order("block")
    return Order("query", max(1, 32 // max(heads, 8)))


@cache
def _measured() -> dict[str, list[dict[str, Any]]]:
    return json.loads(ORDER_TABLE.read_text())


def forget_measured() -> None:
    """Read the table of orders anew: for who has just written to it."""
    _measured.cache_clear()


def arch_of(device: torch.device) -> str:
    """The name of a device in the table of orders, such as "sm_90"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _order(q: Tensor, k: Tensor, v: Tensor, block_size: int, order: Order | None) -> Order:
    if order is not None:
        if not 1 <= order.queries <= MAX_QUERIES:
            raise ValueError(f"queries = {order.queries} of the order must be between 1 and {MAX_QUERIES}")
        return order
    heads = q.shape[2] // k.shape[2]
    return choose_order(heads, q.shape[3], v.shape[3], q.dtype, block_size, arch_of(q.device))


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float, order: Order | None = None
) -> tuple[Tensor, Tensor]:
    check_supported(q, v)
    (batch, length, heads, _), num_keys = q.shape, k.shape[1]
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)
    if num_keys == 0 or indices.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    order = _order(q, k, v, block_size, order)
    block_size = min(block_size, num_keys)
    blocks = distinct_blocks(indices, num_keys, block_size)
    with torch.cuda.device_of(q):
        if order.major == "block":
            triton_block_major.forward(q, k, v, blocks, block_size, scale, out, lse)
        else:
            triton_query_major.forward(q, k, v, blocks, block_size, scale, order.queries, out, lse)
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, indices: Tensor, block_size: int,
    scale: float, order: Order | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_supported(q, v)
    num_keys = k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if num_keys == 0 or indices.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    order = _order(q, k, v, block_size, order)
    block_size = min(block_size, num_keys)
    blocks = distinct_blocks(indices, num_keys, block_size)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(q):
        _delta_kernel[(triton.cdiv(delta.numel(), 32),)](
            grad_out, out, delta, *grad_out.stride(), *out.stride(), q.shape[1], q.shape[2], delta.numel(),
            DV=v.shape[3], BLOCK_DV=padded(v.shape[3]), BLOCK_M=32, num_warps=4,
        )  # fmt: skip
        if order.major == "block":
            triton_block_major.dq(grad_out, q, k, v, lse, delta, blocks, block_size, scale, dq)
        else:
            triton_query_major.dq(grad_out, q, k, v, lse, delta, blocks, block_size, scale, order.queries, dq)
        triton_block_major.dkdv(grad_out, q, k, v, lse, delta, blocks, block_size, scale, dk, dv)
    return dq, dk, dv


@triton.jit
def _delta_kernel(
    GRAD, OUT, DELTA, g_b, g_s, g_h, g_d, o_b, o_s, o_h, o_d, S, H, count,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`sum(grad_out * out)` `[B, S, Hq]`, which the gradients of the scores need."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < count
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    batch, s, head = rows // H // S, rows // H % S, rows % H
    mask = live[:, None] & (dv < DV)[None, :]
    grad = tl.load(GRAD + (batch * g_b + s * g_s + head * g_h)[:, None] + dv[None, :] * g_d, mask=mask, other=0.0)
    out = tl.load(OUT + (batch * o_b + s * o_s + head * o_h)[:, None] + dv[None, :] * o_d, mask=mask, other=0.0)
    tl.store(DELTA + rows, tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1), mask=live)

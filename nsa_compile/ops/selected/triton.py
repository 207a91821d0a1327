"""Attention over selected blocks on the GPU: which loop order computes it, and the steps around the kernels.

dk and dv are always computed block after block. Output and dq have two orders, each in a file of its own: query after
query, or block after block. No atomics, and no size is read back from the device; every order gives the same bits from
run to run.
"""

from __future__ import annotations

import json
import math
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
    "SHAPE",
    "Order",
    "arch_of",
    "backward",
    "choose_order",
    "forget_measured",
    "forward",
    "prepare",
]

SHAPE = ("heads", "dim", "value_dim", "dtype", "block_size")  # by which a row of the table is found
MAX_QUERIES = 8  # of a tile: block and members share 32 bits, which leaves 2^23 blocks
ORDER_TABLE = Path(__file__).parent / "triton_orders.json"


class Order(NamedTuple):
    """How output and dq are computed: "query" takes tiles of so many neighbouring `queries`, "block" ignores these."""

    major: Literal["query", "block"]
    queries: int = 1


def choose_order(
    heads: int, dim: int, value_dim: int, dtype: torch.dtype, block_size: int, places: int, length: int, arch: str
) -> Order:
    """The order for so many heads a group on a GPU like `arch` ("sm_90"): as measured, or estimated.

    Measurements are in `triton_orders.json`, which `benchmarks/selected_orders.py` writes; of those of a shape the one
    counts whose length is the nearest. The estimate counts bytes of forward and dq together for a query in the middle
    of the sequence, as both orders are limited by bytes. Query-major takes tiles of up to 64 rows, which the tensor
    cores work through at their full rate, and reads the keys and values of each block that any query of a tile selected
    from the L2 cache, taken to deliver 1.5 times what memory does; neighbours are taken to choose at random, so that
    they share blocks where the sequence has few. Block-major writes to memory, and reads back, a float32 part of
    `D + Dv` for each head and block.
    """
    shape = (heads, dim, value_dim, str(dtype).removeprefix("torch."), block_size)
    measured = [row for row in _measured().get(arch, ()) if shape == tuple(row[name] for name in SHAPE)]
    if measured:
        nearest = min(measured, key=lambda row: abs(math.log(row["seq_len"] / max(length, 1))))
        return Order(nearest["major"], nearest["queries"])
    visible = max(1.0, length / block_size / 2)
    chosen = min(places, visible)

    queries = 1
    while queries < MAX_QUERIES and 2 * queries * heads <= 64:
        queries *= 2
    read = visible * (1 - (1 - chosen / visible) ** queries) / queries  # blocks, for each query of a tile
    keys_bytes = read * 2 * block_size * (dim + value_dim) * dtype.itemsize / 1.5
    part_bytes = chosen * heads * 2 * 4 * (dim + value_dim)
    return Order("block") if part_bytes < keys_bytes and heads < 16 else Order("query", queries)


@cache
def _measured() -> dict[str, list[dict[str, Any]]]:
    return json.loads(ORDER_TABLE.read_text())


def forget_measured() -> None:
    """Read the table of orders again, after it was written."""
    _measured.cache_clear()


def arch_of(device: torch.device) -> str:
    """The name of a device in the table of orders, such as "sm_90"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _order(q: Tensor, k: Tensor, v: Tensor, block_size: int, places: int, order: Order | None) -> Order:
    if order is not None:
        if not 1 <= order.queries <= MAX_QUERIES:
            raise ValueError(f"queries = {order.queries} of the order must be between 1 and {MAX_QUERIES}")
        return order
    heads = q.shape[2] // k.shape[2]
    arch = arch_of(q.device)
    return choose_order(heads, q.shape[3], v.shape[3], q.dtype, block_size, places, q.shape[1], arch)


def forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float, order: Order | None = None
) -> tuple[Tensor, Tensor]:
    check_supported(q, v)
    (batch, length, heads, _), num_keys = q.shape, k.shape[1]
    out = q.new_empty(batch, length, heads, v.shape[3])
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)
    if num_keys == 0 or indices.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    order = _order(q, k, v, block_size, indices.shape[3], order)
    block_size = min(block_size, num_keys)
    with torch.cuda.device_of(q):
        if order.major == "block":
            blocks = distinct_blocks(indices, num_keys, block_size)
            triton_block_major.forward(q, k, v, blocks, block_size, scale, out, lse)
        else:
            triton_query_major.forward(q, k, v, indices, block_size, scale, order.queries, out, lse)
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor, block_size: int, scale: float, order: Order | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_supported(q, v)
    num_keys = k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if num_keys == 0 or indices.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    order = _order(q, k, v, block_size, indices.shape[3], order)
    block_size = min(block_size, num_keys)
    blocks = distinct_blocks(indices, num_keys, block_size)
    lse, grad_lse = lse.contiguous(), grad_lse if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(q):
        _delta_kernel[(triton.cdiv(delta.numel(), 32),)](
            grad_out, grad_lse, out, delta, *grad_out.stride(), *out.stride(), q.shape[1], q.shape[2], delta.numel(),
            DV=v.shape[3], BLOCK_DV=padded(v.shape[3]), BLOCK_M=32, num_warps=4,
        )  # fmt: skip
        if order.major == "block":
            triton_block_major.dq(grad_out, q, k, v, lse, delta, blocks, block_size, scale, dq)
        else:
            triton_query_major.dq(grad_out, q, k, v, lse, delta, indices, block_size, scale, order.queries, dq)
        triton_block_major.dkdv(grad_out, q, k, v, lse, delta, blocks, block_size, scale, dk, dv)
    return dq, dk, dv


@triton.jit
def _delta_kernel(
    GRAD, GRAD_LSE, OUT, DELTA, g_b, g_s, g_h, g_d, o_b, o_s, o_h, o_d, S, H, count,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`sum(grad_out * out) - grad_lse` `[B, S, Hq]`, which the gradients of the scores need."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < count
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    batch, s, head = rows // H // S, rows // H % S, rows % H
    mask = live[:, None] & (dv < DV)[None, :]
    grad = tl.load(GRAD + (batch * g_b + s * g_s + head * g_h)[:, None] + dv[None, :] * g_d, mask=mask, other=0.0)
    out = tl.load(OUT + (batch * o_b + s * o_s + head * o_h)[:, None] + dv[None, :] * o_d, mask=mask, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    if GRAD_LSE is not None:
        delta -= tl.load(GRAD_LSE + rows, mask=live, other=0.0)
    tl.store(DELTA + rows, delta, mask=live)

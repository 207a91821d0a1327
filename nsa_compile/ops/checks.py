"""Argument checks shared by the attention operators; they run on fake tensors as well, so a graph fails when traced."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nsa_compile.ops.compressed.selection import SelectionParameters

__all__ = [
    "TRITON_DTYPES",
    "check_attention",
    "check_compression",
    "check_indices",
    "check_minimum",
    "check_selection",
    "default_scale",
]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # those that the Triton kernels take


def default_scale(q: Tensor, scale: float | None) -> float:
    """`scale`, or `1 / sqrt(D)` for queries `[..., D]`."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q `[B, S, Hq, D]`, k `[B, T, G, D]`, v `[B, T, G, Dv]` of one dtype, on one device, with Hq a multiple of G."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [batch, sequence, heads, head_dim]")
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q {q.dtype}; they must be equal, so cast {name}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; they must be on one device, so move {name}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k has shape {list(k.shape)}; with q {list(q.shape)} it must be [{q.shape[0]}, T, G, {q.shape[3]}]"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {list(v.shape)}; with this k it must be {[*k.shape[:3], 'Dv']}")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k has {k.shape[2]}; Hq must be a positive multiple of G")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"head_dim is {q.shape[3]} for q and {v.shape[3]} for v; both must be at least 1")


def check_minimum(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} = {value} must be at least {minimum}")


def check_compression(block_size: int, stride: int) -> None:
    check_minimum("block_size", block_size, 1)
    check_minimum("stride", stride, 1)


def check_selection(stride: int, selection: SelectionParameters) -> None:
    select_block, offsets, weights, num_selected, num_initial, num_local = selection
    check_minimum("num_selected", num_selected, 0)
    if num_selected == 0:
        return
    check_minimum("select_block", select_block, 1)
    check_minimum("num_initial", num_initial, 0)
    check_minimum("num_local", num_local, 0)
    if select_block % stride:
        raise ValueError(f"select_block = {select_block} must be a multiple of stride = {stride}")
    if len(offsets) != len(weights):
        raise ValueError(f"offsets has {len(offsets)} entries and weights {len(weights)}; each needs one")
    if any(a >= b for a, b in pairwise(offsets)):
        raise ValueError(f"offsets = {list(offsets)} must ascend strictly, because they fix the order of the sum")


def check_indices(q: Tensor, k: Tensor, indices: Tensor) -> None:
    """indices `[B, S, G, n]`, int32 or int64."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices has dtype {indices.dtype}; it must be torch.int32 or torch.int64")
    if indices.device != q.device:
        raise ValueError(f"indices is on {indices.device} and q on {q.device}; they must be on one device")
    if indices.dim() != 4 or indices.shape[:3] != (q.shape[0], q.shape[1], k.shape[2]):
        expected = [q.shape[0], q.shape[1], k.shape[2], "n"]
        raise ValueError(f"indices has shape {list(indices.shape)}; with these q and k it must be {expected}")

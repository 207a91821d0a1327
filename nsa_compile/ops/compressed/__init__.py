"""`nsa_compile::compressed_attention`: attention over compressed blocks (arXiv 2502.11089, eq. 8) and the selection of
blocks that follows from its weights (eq. 9-12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nsa_compile.ops import checks, cpp, flops
from nsa_compile.ops.compressed.selection import SelectionParameters
from nsa_compile.ops.declaration import declare_operator
from nsa_compile.ops.dispatch import register_modules
from nsa_compile.ops.keeping import select_once

__all__ = ["compressed_attention"]


def _check(q: Tensor, k: Tensor, v: Tensor, block_size: int, stride: int, scale: float, *selection: Any) -> None:
    checks.check_attention(q, k, v)
    checks.check_compression(block_size, stride)
    checks.check_selection(stride, SelectionParameters(*selection))


def _forward(
    forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *shared, num_selected, num_initial, num_local = parameters
    if num_selected == 0:
        return forward(q, k, v, *parameters)
    return select_once(
        attend=lambda: forward(q, k, v, *shared, 0, num_initial, num_local)[:2],
        select=lambda: forward(q, k, v, *parameters),
    )


compressed_attention = declare_operator(
    "compressed",
    "int block_size, int stride, float scale, int select_block, int[] offsets, int[] weights, int num_selected,"
    " int num_initial, int num_local",
    check=_check,
    pairs=lambda queries, blocks, block_size, stride, *rest: flops.compressed_pairs(
        queries, blocks, block_size, stride
    ),
    num_indices=lambda *parameters: parameters[6],
    forward=_forward,
)

cpp.register_kernels("compressed")
register_modules("compressed", __name__)

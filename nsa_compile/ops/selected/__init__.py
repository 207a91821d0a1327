"""`nsa_compile::selected_attention`: each query of a group attends to the blocks of keys chosen for it
(arXiv 2502.11089, section 3.3.2)."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops import checks, cpp, flops
from nsa_compile.ops.declaration import declare_operator
from nsa_compile.ops.dispatch import register_modules

__all__ = ["selected_attention"]


def _check(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> None:
    checks.check_attention(q, k, v)
    checks.check_indices(q, k, indices)
    checks.check_minimum("block_size", block_size, 1)


selected_attention = declare_operator(
    "selected",
    "Tensor indices, int block_size, float scale",
    check=_check,
    pairs=lambda queries, keys, indices, block_size, scale: flops.selected_pairs(queries, keys, indices[3], block_size),
)

cpp.register_kernels("selected")
register_modules("selected", __name__)

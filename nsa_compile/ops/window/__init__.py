"""`nsa_compile::window_attention`: query s attends to the keys `s - window < p <= s` (arXiv 2502.11089, 3.3.3)."""

from __future__ import annotations

from torch import Tensor

from nsa_compile.ops import checks, cpp, flops
from nsa_compile.ops.declaration import declare_operator
from nsa_compile.ops.dispatch import register_modules

__all__ = ["window_attention"]


def _check(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> None:
    checks.check_attention(q, k, v)
    checks.check_minimum("window", window, 1)


window_attention = declare_operator(
    "window",
    "int window, float scale",
    check=_check,
    pairs=lambda queries, keys, window, scale: flops.window_pairs(queries, keys, window),
)

cpp.register_kernels("window")
register_modules("window", __name__)

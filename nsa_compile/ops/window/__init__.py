"""`nsa_compile::window_attention`: query s attends to the keys `s - window < p <= s` (arXiv 2502.11089, 3.3.3)."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from torch import Tensor

from nsa_compile.ops import checks, cpp, flops
from nsa_compile.ops.declaration import declare_operator
from nsa_compile.ops.dispatch import Kernel, register_kernel

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
register_kernel(
    Kernel(
        "window", "triton", "Triton", partial(import_module, f"{__name__}.triton"),
        device="cuda", dtypes=checks.TRITON_DTYPES, priority=1,
    )
)  # fmt: skip
register_kernel(Kernel("window", "portable", "portable torch", partial(import_module, f"{__name__}.portable")))

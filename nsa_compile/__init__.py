"""nsa-compile: write the decode step of Native Sparse Attention once; compile the training graph.

Names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_compile.backend import (
        compile,
        compile_block,
        compile_blocks,
        compile_decode_step,
        compile_prefill,
        last_report,
    )
    from nsa_compile.loops import loop
    from nsa_compile.scanning import scan

__version__ = "0.1.0"
__all__ = [
    "compile", "compile_block", "compile_blocks", "compile_decode_step", "compile_prefill", "last_report", "loop",
    "scan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"loop": "loops", "scan": "scanning"}.get(name, "backend")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)

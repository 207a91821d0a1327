"""Models: the decode step, the transformer around it, and their configuration.

Names load on first use, so that validating a configuration does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig, SparsePattern
    from nsa_compile.models.documents import Documents
    from nsa_compile.models.nsa import decode_step, nsa_attention
    from nsa_compile.models.nsa_layer import NSAttention
    from nsa_compile.models.transformer import NSATransformer
    from nsa_compile.models.variant import AttentionVariant

__all__ = [
    "AttentionVariant", "Documents", "NSAConfig", "NSATransformer", "NSAttention", "SparsePattern", "decode_step",
    "nsa_attention",
]  # fmt: skip

_HOME = {
    "AttentionVariant": "variant",
    "Documents": "documents",
    "NSAConfig": "config",
    "SparsePattern": "config",
    "NSATransformer": "transformer",
    "NSAttention": "nsa_layer",
    "decode_step": "nsa",
    "nsa_attention": "nsa",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

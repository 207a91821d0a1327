"""Which implementation computes an operator: C++ on the CPU, Triton on CUDA, the portable one where they cannot."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.checks import TRITON_DTYPES

__all__ = ["IMPLEMENTATIONS", "force_implementation", "implementation"]

logger = logging.getLogger("nsa_compile")

# "vectors" is "cpu" without the processor's matrix unit.
IMPLEMENTATIONS = ("cpu", "vectors", "triton", "portable")
_NATIVE = {"cpu": "cpu", "cuda": "triton"}
_forced: list[str] = []


def implementation(operator: str, q: Tensor) -> ModuleType:
    """The module with `forward` and `backward` of `operator` (window, compressed or selected) for inputs like `q`."""
    if _forced:
        return importlib.import_module(f"nsa_compile.ops.{operator}.{_forced[-1]}")
    return _best(operator, q.device.type, q.dtype)


@cache
def _best(operator: str, device: str, dtype: torch.dtype) -> ModuleType:
    """The native implementation for a device and dtype, or the portable one with a warning that says why.

    Asked once a process.
    """
    portable = importlib.import_module(f"nsa_compile.ops.{operator}.portable")
    name = _NATIVE.get(device)
    if name is None:
        logger.warning(
            "%s attention on %s uses the slow portable implementation: no native one exists", operator, device
        )
        return portable
    if name == "triton" and dtype not in TRITON_DTYPES:
        logger.warning(
            "%s attention on %s uses the slow portable implementation: there are no Triton kernels for %s",
            operator, device, dtype,
        )  # fmt: skip
        return portable
    try:
        module = importlib.import_module(f"nsa_compile.ops.{operator}.{name}")
        prepare = getattr(module, "prepare", None)
        if prepare is not None:
            prepare()
    # A compiler or a driver that is absent or broken surfaces as almost any exception; all of them mean the same here.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        logger.warning(
            "%s attention on %s uses the slow portable implementation: %s cannot be used (%s)",
            operator, device, name, reason,
        )  # fmt: skip
        return portable
    return module


@contextmanager
def force_implementation(name: str) -> Iterator[None]:
    """Inside this context every operator runs on the implementation `name`, whatever the device."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {name!r}; it must be one of {', '.join(IMPLEMENTATIONS)}")
    vectors = name == "vectors"
    _forced.append("cpu" if vectors else name)
    try:
        with cpp.vectors_only() if vectors else nullcontext():
            yield
    finally:
        _forced.pop()

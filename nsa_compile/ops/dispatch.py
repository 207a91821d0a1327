"""Which implementation computes an operator: C++ on the CPU, Triton on CUDA, the portable one where they cannot."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from nsa_compile.ops import cpp
from nsa_compile.ops.checks import TRITON_DTYPES

__all__ = ["IMPLEMENTATIONS", "Use", "force_implementation", "implementation", "observe"]

logger = logging.getLogger("nsa_compile")


@dataclass(frozen=True)
class Use:
    """One call of an operator.

    Attributes:
        operator: window, compressed or selected.
        implementation: what ran it, in words.
        reason: why that is not the one for the device; ``None`` where it is, or where it was forced.
    """

    operator: str
    implementation: str
    reason: str | None


# "vectors" is "cpu" without the processor's matrix unit.
IMPLEMENTATIONS = ("cpu", "vectors", "triton", "portable")
_NATIVE = {"cpu": "cpu", "cuda": "triton"}
_forced: list[str] = []
_observers: list[list[Use]] = []


def implementation(operator: str, q: Tensor) -> ModuleType:
    """The module with `forward` and `backward` of `operator` (window, compressed or selected) for inputs like `q`."""
    if _forced:
        module, reason = importlib.import_module(f"nsa_compile.ops.{operator}.{_forced[-1]}"), None
    else:
        module, reason = _best(operator, q.device.type, q.dtype)
    for seen in _observers:
        seen.append(Use(operator, _describe(module, q.dtype), reason))
    return module


@contextmanager
def observe() -> Iterator[list[Use]]:
    """Inside this context each call of an operator's forward or backward is added to the list, in order."""
    seen: list[Use] = []
    _observers.append(seen)
    try:
        yield seen
    finally:
        # By identity: two that have seen the same are equal.
        _observers[:] = [observer for observer in _observers if observer is not seen]


def _describe(module: ModuleType, dtype: torch.dtype) -> str:
    name = module.__name__.rpartition(".")[2]
    if name != "cpu":
        return {"triton": "Triton", "portable": "portable torch"}[name]
    return "C++, matrix unit" if cpp.uses_matrix_unit(dtype) else "C++, vectors"


@cache
def _best(operator: str, device: str, dtype: torch.dtype) -> tuple[ModuleType, str | None]:
    """The native implementation for a device and dtype, or the portable one and, as a warning too, why.

    Asked once a process.
    """
    name = _NATIVE.get(device)
    reason = None
    if name is None:
        reason = "no native one exists"
    elif name == "triton" and dtype not in TRITON_DTYPES:
        reason = f"there are no Triton kernels for {dtype}"
    if reason is None:
        try:
            module = importlib.import_module(f"nsa_compile.ops.{operator}.{name}")
            prepare = getattr(module, "prepare", None)
            if prepare is not None:
                prepare()
            return module, None
        # A compiler or a driver that is absent or broken surfaces as almost any exception; all mean the same here.
        except Exception as error:
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            reason = f"{name} cannot be used ({why})"
    logger.warning("%s attention on %s uses the slow portable implementation: %s", operator, device, reason)
    return importlib.import_module(f"nsa_compile.ops.{operator}.portable"), reason


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

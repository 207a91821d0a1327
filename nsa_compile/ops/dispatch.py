"""The kernels of the operators, each registered beside its code, and which of them computes a call.

It is the kernel of the highest priority that takes the device and the dtype and that can run: C++ on the CPU, Triton on
CUDA, and the portable one, with a warning, where they cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops.checks import DTYPES, TRITON_DTYPES

__all__ = [
    "KERNELS",
    "Kernel",
    "Use",
    "choose_kernel",
    "force_implementation",
    "observe",
    "register_kernel",
    "register_modules",
]

logger = logging.getLogger("nsa_compile")


@dataclass(frozen=True)
class Kernel:
    """An implementation of an operator.

    Attributes:
        operator: window, compressed or selected.
        name: by which `force_implementation` knows it; each kernel of an operator has another.
        words: what reports call it.
        load: returns its code, at the first use: a module, or what else has `forward` and `backward`, and `prepare`
            where something must be compiled or found before. `prepare` raises if the kernel cannot run here.
        device: the type of the devices that it runs on, ``None`` for all.
        dtypes: of the q, k and v that it takes.
        priority: the highest one computes the operator: above 0 for a kernel made for a device, below 0 for one that
            is only to be forced.
    """

    operator: str
    name: str
    words: str
    load: Callable[[], Any]
    device: str | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    priority: int = 0

    @cached_property
    def code(self) -> Any:
        return self.load()

    def prepare(self) -> None:
        if hasattr(self.code, "prepare"):
            self.code.prepare()

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        return self.code.forward(*arguments, **named)

    def backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        return self.code.backward(*arguments)

    def describe(self, dtype: torch.dtype) -> str:
        """What runs for inputs of a dtype, in words."""
        return self.words


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


KERNELS: dict[str, dict[str, Kernel]] = {}  # of each operator, by name
_forced: list[str] = []
_observers: list[list[Use]] = []


def register_kernel(kernel: Kernel) -> None:
    """Have the operator consider `kernel` from now on; its code is loaded when it is first chosen.

    Raises:
        ValueError: the operator has a kernel of that name.
    """
    kernels = KERNELS.setdefault(kernel.operator, {})
    if kernel.name in kernels:
        raise ValueError(f"{kernel.operator} attention has a kernel {kernel.name!r}; take another name")
    kernels[kernel.name] = kernel
    _best.cache_clear()


def register_modules(operator: str, package: str) -> None:
    """Register the modules `triton` and `portable` of an operator's package: for CUDA and for any device."""

    def register(name: str, words: str, **more: Any) -> None:
        register_kernel(Kernel(operator, name, words, partial(import_module, f"{package}.{name}"), **more))

    register("triton", "Triton", device="cuda", dtypes=TRITON_DTYPES, priority=1)
    register("portable", "portable torch")


def choose_kernel(operator: str, q: Tensor, *, small: bool = False) -> Kernel:
    """The kernel of `operator` (window, compressed or selected) for inputs like `q`.

    Args:
        small: whether the work is too small for a kernel that is compiled for it alone; then the portable one is taken.

    Raises:
        ValueError: the operator has no kernel of the name that is forced.
        RuntimeError: none of its kernels can compute it.
    """
    if _forced or small:
        kernel, reason = _named(operator, _forced[-1] if _forced else "portable")
    else:
        kernel, reason = _best(operator, q.device.type, q.dtype)
    for seen in _observers:
        seen.append(Use(operator, kernel.describe(q.dtype), reason))
    return kernel


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


def _named(operator: str, name: str) -> tuple[Kernel, None]:
    kernels = KERNELS[operator]
    if name not in kernels:
        raise ValueError(f"{operator} attention has no implementation {name!r}; it has {', '.join(kernels)}")
    return kernels[name], None


@cache
def _best(operator: str, device: str, dtype: torch.dtype) -> tuple[Kernel, str | None]:
    """The kernel of the highest priority that can run, and, as a warning too, why it is not the one for the device.

    Asked once a process.
    """
    unfit, failures = "no native one exists", []
    for kernel in sorted(KERNELS[operator].values(), key=lambda kernel: -kernel.priority):
        if kernel.device not in (None, device):
            continue
        if dtype not in kernel.dtypes:
            unfit = f"there are no {kernel.words} kernels for {dtype}"
            continue
        try:
            kernel.prepare()
        # A compiler or a driver that is absent or broken surfaces as almost any exception; all mean the same here.
        except Exception as error:
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            failures.append(f"{kernel.name} cannot be used ({why})")
            continue
        portable = kernel.device is None
        reason = "; ".join(failures) or (unfit if portable else None)
        if reason:
            which = f"slow {kernel.name}" if portable else kernel.name
            logger.warning("%s attention on %s uses the %s implementation: %s", operator, device, which, reason)
        return kernel, reason
    raise RuntimeError(
        f"no kernel of {operator} attention runs for {dtype} on {device}: {'; '.join(failures) or unfit}"
    )


@contextmanager
def force_implementation(name: str) -> Iterator[None]:
    """Inside this context every operator runs on the implementation `name`, whatever the device."""
    names = dict.fromkeys(name for kernels in KERNELS.values() for name in kernels)
    if name not in names:
        raise ValueError(f"implementation is {name!r}; it must be one of {', '.join(names)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()

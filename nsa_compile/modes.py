"""Autocast and grad mode as part of a graph: where in it which holds, and leaving all modes as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

# Device, dtype and whether it is on, for each device that has one.
Autocast = tuple[tuple[str, torch.dtype, bool], ...]

__all__ = ["Autocast", "autocast_at", "autocast_now", "restored", "sets_autocast", "under", "unobserved"]

_DEVICES = ("cpu", "cuda")


def autocast_now() -> Autocast:
    """The state of this thread."""
    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICES)


def sets_autocast(nodes: Iterable[fx.Node]) -> bool:
    """Whether one of the nodes of a captured graph enters autocast, or leaves it."""
    return any(n.target is torch.amp.autocast_mode._enter_autocast for n in nodes)


def autocast_at(node: fx.Node) -> Autocast:
    """The state at a node of a captured graph that runs under the state of this thread."""
    entered: list[fx.Node] = []
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        if earlier.target is torch.amp.autocast_mode._enter_autocast:
            entered.append(earlier)
        elif earlier.target is torch.amp.autocast_mode._exit_autocast:
            entered.remove(earlier.args[0])
    state = {device: (dtype, on) for device, dtype, on in autocast_now()}
    for enter in entered:
        device, dtype, on = cast("tuple[str, torch.dtype | None, bool]", enter.args[:3])
        state[device] = (dtype or torch.get_autocast_dtype(device), bool(on))
    return tuple((device, *value) for device, value in state.items())


@contextlib.contextmanager
def under(state: Autocast) -> Iterator[None]:
    """Trace under a state. Nothing is kept in autocast's cache of weights: what is traced there is no weight."""
    with contextlib.ExitStack() as stack:
        for (device, dtype, on), (_, _, on_now) in zip(state, autocast_now(), strict=True):
            if on or on_now:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False))
        yield


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Run code that is not part of the program, hidden from dispatch modes and saved-tensor hooks.

    A checkpointed region, for one, counts what its forward pass saves, and computes it again.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    with (
        _disable_current_modes(),
        torch.autograd.graph.saved_tensors_hooks(_same, _same) if hooked else contextlib.nullcontext(),
    ):
        yield


def _same(x: Tensor) -> Tensor:
    return x


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Leave grad mode and autocast as they were, whatever a graph that runs in here does and wherever it ends."""
    grad, autocast, cached = torch.is_grad_enabled(), autocast_now(), torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cached)
        for device, dtype, on in autocast:
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)

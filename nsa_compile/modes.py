"""Autocast and grad mode as part of a graph: where in it which holds, and leaving all modes as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._higher_order_ops.scan import scan_op
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from nsa_compile.capture.refusals import ScanNotCompiled

# Device, dtype and whether it is on, for each device that has one.
Autocast = tuple[tuple[str, torch.dtype, bool], ...]

_DEVICES = ("cpu", "cuda")


def autocast_now() -> Autocast:
    """The state of this thread."""
    return tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in _DEVICES)


def sets_autocast(nodes: Iterable[fx.Node]) -> bool:
    """Whether one of the nodes of a captured graph enters autocast, or leaves it."""
    return any(n.target is torch.amp.autocast_mode._enter_autocast for n in nodes)


# In the meta of a scan: the state under which it runs.
_AUTOCAST = "nsa_autocast"


def note_autocast(gm: fx.GraphModule) -> None:
    """Note at each scan of a captured graph the state under which it runs, those of steps and of regions included.

    The graph runs under the state of this thread. Made functional, it says no more where autocast is entered.

    Raises:
        ScanNotCompiled: a scan runs under several states: it lies in a region that is captured once.
    """
    state = autocast_now()
    entered: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            entered.append(node)
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            entered.remove(node.args[0])
        here = _within(entered, state)
        if node.target is scan_op and node.meta.setdefault(_AUTOCAST, here) != here:
            raise ScanNotCompiled(
                "a scan lies in a region of torch.compiler.nested_compile_region that is called under autocast and "
                "without it, or under two kinds of it; call the function as it is, without the region, in one of them"
            )
        for source in node.all_input_nodes:
            held = getattr(gm, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(held, fx.GraphModule):
                with under(here):
                    note_autocast(held)


def _within(entered: Sequence[fx.Node], state: Autocast) -> Autocast:
    now = {device: (dtype, on) for device, dtype, on in state}
    for enter in entered:
        device, dtype, on = cast("tuple[str, torch.dtype | None, bool]", enter.args[:3])
        now[device] = (dtype or torch.get_autocast_dtype(device), bool(on))
    return tuple((device, *value) for device, value in now.items())


def autocast_at(scan: fx.Node) -> Autocast:
    """The state under which a scan runs; that of this thread, where none has been noted."""
    return scan.meta.get(_AUTOCAST) or autocast_now()


def note_no_autocast(scan: fx.Node) -> None:
    """Note at a scan whose step is lowered that it runs without autocast: the casts that it made are in the step."""
    scan.meta[_AUTOCAST] = tuple((device, dtype, False) for device, dtype, _ in autocast_now())


def end_autocast(first: fx.Node, last: fx.Node, state: Autocast) -> None:
    """Run the nodes from `first` to `last` without autocast: the casts that it made are in the graph, and products that
    are in float32 for a reason, such as those of an attention in low precision, stay so."""
    graph = first.graph
    for device, dtype, on in state:
        if on:
            with graph.inserting_before(first):
                entered = graph.call_function(torch.amp.autocast_mode._enter_autocast, (device, dtype, False, False))
            with graph.inserting_after(last):
                graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))


def refuse_users_modes() -> None:
    """Called while Dynamo compiles a graph.

    Raises:
        ScanNotCompiled: a mode of `__torch_function__` is on that is more than a default device.
    """
    on = torch_function_mode_stack_state_mgr.stack  # Dynamo takes them off while a graph is compiled
    if (mode := users_mode(on)) is not None:
        raise ScanNotCompiled(
            f"a TorchFunctionMode ({type(mode).__name__}) is on around what is compiled, which the compiled program "
            "would not go through; leave it outside of the call, or call the function as written"
        )


def users_mode(modes: Sequence[TorchFunctionMode]) -> TorchFunctionMode | None:
    """The first of these modes that is more than a default device."""
    return next((mode for mode in modes if not isinstance(mode, DeviceContext)), None)


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
    """Run code that is not part of the program, hidden from dispatch modes, saved-tensor hooks and anomaly detection.

    A checkpointed region, for one, counts what its forward pass saves, and computes it again. Anomaly detection reads
    whether gradients hold NaN, which those that are traced do not know.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    with (
        _disable_current_modes(),
        torch.autograd.set_detect_anomaly(False),
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

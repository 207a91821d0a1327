"""What a step may do outside of the objects that it holds: draw numbers, look at a clock, write to a file, flip a
switch of torch's. A step is run for one position of each kind, and its program never, so each of these is refused.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import datetime
import io
import random
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from nsa_compile.loops.lists import GrowingList
from nsa_compile.loops.python_math import functions_of_symbols
from nsa_compile.loops.python_numbers import is_of_loop
from nsa_compile.loops.state import NotFollowed, content_of, write_content
from nsa_compile.workarounds import without_logged_errors

# What hides its state, and does with it what a call says.
_HIDDEN: tuple[tuple[Any, str], ...] = (
    (random.Random, "draws random numbers by {type}; draw them before the loop"),
    (torch.Generator, "asks {type} of torch"),
    (io.IOBase, "reads or writes {type}"),
    (contextvars.ContextVar, "uses {type}, which no program of all steps would set"),
)  # fmt: skip
_OF_TIME = ("time", "now", "utcnow", "today")
# What a trace turns off, by the functions that ask whether it is on.
_TURNED_OFF = {
    "is_inference_mode_enabled": "inference mode",
    "is_anomaly_enabled": "the detection of anomalies",
    **dict.fromkeys(
        ("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled"),
        "a backend of scaled_dot_product_attention",
    ),
}
# Functions that have an effect, or have none, by who calls them.
BY_CALLER = {"urandom", "id", *_TURNED_OFF}
_OF_SYSTEM = ("putenv", "unsetenv", "write", "open", "system", "input")


def effect_of(function: Any, caller: str) -> str | None:
    """What a function written in C does beside its result, in words; None for nothing. `caller` is the file that calls
    it: random bytes are numbers if the module `random` asks for them, and names if others do."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
        if module == "time":
            return f"calls time.{name}, which tells another time at each step"
        if name == "urandom" and caller == random.__file__:
            return "draws random numbers by the system; draw them before the loop"
        if module == "gc":
            return "asks for the garbage collector"
        if name == "id" and module == "builtins" and is_of_loop(caller) and "-packages" not in caller:
            return "asks for the address of an object"
        if name in _TURNED_OFF and str(module).startswith("torch"):
            return f"asks whether {_TURNED_OFF[name]} is on"
        if module in ("posix", "nt", "io", "_io", "builtins") and name in _OF_SYSTEM:
            return f"calls {name}"
        return None
    if isinstance(owner, type):
        if issubclass(owner, datetime.date) and function.__name__ in _OF_TIME:
            return f"calls {owner.__name__}.{function.__name__}, which tells another time at each step"
        return None
    if getattr(function, "__name__", "") == "locked":
        return "asks whether a lock is held"
    for kinds, words in _HIDDEN:
        if isinstance(owner, kinds):
            return words.format(type=f"a {type(owner).__name__}")
    return None


@contextlib.contextmanager
def refused_effects() -> Iterator[None]:
    """Inside this context a step may not print, draw random numbers, compile, compute gradients, or leave a switch of
    torch's as it did not find it. `len` and `sum` of a list that grows are its own."""
    of_numpy: Any = numpy.random.get_state.__self__
    drawn, drawn_by_numpy, switches = random.getstate(), content_of(of_numpy), _switches()
    others = _replacements()
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in others]
    for owner, name, other in others:
        setattr(owner, name, other)
    try:
        with without_logged_errors(), _own_parametrizations():  # the loop as written raises them again
            yield
    finally:
        for owner, name, own in replaced:
            setattr(owner, name, own)
        by_numpy = content_of(of_numpy) != drawn_by_numpy
        changed, switched = random.getstate() != drawn or by_numpy, _switches() != switches
        if changed:
            random.setstate(drawn)
            write_content(of_numpy, drawn_by_numpy)
        if switched:
            torch.set_grad_enabled(switches[0])
            torch.set_default_dtype(switches[1])
    if changed:
        raise NotFollowed("it draws random numbers, once for all steps that share a trace; draw them before the loop")
    if switched:
        raise NotFollowed("it leaves gradients, or the default dtype, switched to something else")


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Functions that are others while this thread follows a step: owner, name and the other one."""
    tracing = threading.get_ident()

    def refused(own: Any, why: str, when: Callable[..., bool] = lambda *_, **__: True) -> Any:
        def other(*given: Any, **named: Any) -> Any:
            if threading.get_ident() == tracing and when(*given, **named):
                raise NotFollowed(why)
            return own(*given, **named)

        return other

    own_len, own_sum, own_switch = builtins.len, builtins.sum, torch.set_grad_enabled.__init__

    def length(x: Any, /) -> Any:
        if isinstance(x, torch.Tensor) and x.dim():
            return x.shape[0]  # Python's own makes a number of it, and with that each step a path of its own
        return x.length() if isinstance(x, GrowingList) else own_len(x)

    def added(x: Any, /, start: Any = 0) -> Any:
        return x.added(start) if isinstance(x, GrowingList) else own_sum(x, start)

    def switch(context: Any, mode: Any) -> None:
        # A truth that changes from step to step is a condition.
        own_switch(context, bool(mode) if isinstance(mode, torch.SymBool) else mode)

    prints = "it prints, which a program of all steps would not do"
    # What Dynamo finds out in a trace, it would go by afterwards.
    compiles = "it calls torch.compile, or a function of torch that does so, such as torch.cond"
    computes = "it computes gradients; compute them after the loop"
    hooks = "it hooks what autograd saves, which a program of all steps saves once"
    seed = refused(torch.manual_seed, "it calls torch.manual_seed")
    run_backward = torch.autograd._engine_run_backward
    return [
        (builtins, "print", refused(builtins.print, prints, lambda *_, file=None, **__: file is None)),
        (builtins, "len", length),
        (builtins, "sum", added),
        (torch, "manual_seed", seed),
        (torch.random, "manual_seed", seed),
        (torch, "compile", refused(torch.compile, compiles)),
        (torch.autograd, "_engine_run_backward", refused(run_backward, computes)),
        (torch.set_grad_enabled, "__init__", switch),
        (saved_tensors_hooks, "__enter__", refused(saved_tensors_hooks.__enter__, hooks, _are_of_others)),
        *functions_of_symbols(),
    ]


def _are_of_others(context: saved_tensors_hooks) -> bool:
    """Whether hooks are none of torch's own, which save what they are given."""
    return not all(str(x.__module__).startswith("torch.") for x in (context.pack_hook, context.unpack_hook))


@contextlib.contextmanager
def _own_parametrizations() -> Iterator[None]:
    """What a trace makes of parametrized modules within `parametrize.cached()` is no weight for anybody else."""
    held = parametrize._cache
    parametrize._cache = dict(held)
    try:
        yield
    finally:
        parametrize._cache = held


def _switches() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()

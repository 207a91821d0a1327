"""Symbolic numbers that are Python's own to the code of a loop, and tensors of a trace that are torch's.

A step may ask `isinstance(t, int)` or `type(x)`, and is to hear what it hears in the loop. What depends on a number
without comparing it, such as its text or its place in a dict, would be that of the symbol, and the text of a tensor
that of its stand-in: it is refused. Torch's code, which knows symbols, and this package's hear the truth.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import logging
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import sympy
import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from nsa_compile.loops.python_math import methods_of_symbols
from nsa_compile.loops.state import NotFollowed

_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
SYMBOLIC = tuple(_KINDS)
_SHOWN: dict[type, type] = {**_KINDS, FunctionalTensor: Tensor}
_CHANGING = "a number that changes from step to step"
_TEXT = f"it makes text of {_CHANGING}"
_LOOKED_UP = f"it looks up {_CHANGING} in a dict, a set or a cache; compare it instead"
_KNOW_SYMBOLS = (torch.__path__[0], sympy.__path__[0], str(Path(__file__).parents[1]))
# Code that asks on behalf of whoever called it.
_STANDARD = sysconfig.get_path("stdlib")
_BETWEEN = ("<frozen", numpy.__path__[0], torch.backends.__path__[0])


# Methods of symbols that compute: each calls hundreds of functions of torch's.
_ARITHMETIC = ("add", "sub", "mul", "pow", "and", "or", "xor")
_COMPUTE = {f"__{reverse}{name}__" for name in _ARITHMETIC for reverse in ("", "r")}
_COMPUTE |= {f"__{name}__" for name in ("bool", "int", "index", "float", "neg", "eq", "ne", "lt", "le", "gt", "ge")}
_DIVISIONS = ("truediv", "floordiv", "mod", "divmod", "lshift", "rshift")
_TAKE = {"__int__", "__index__", "__float__"}


class NotHashable(TypeError):
    """A symbolic number has no hash. Libraries that keep results by sizes know that of torch's symbols."""


class unnoted:  # used like a function
    """Inside this context nobody notes what is called: it is torch's, and noting it would take most of the time."""

    def __enter__(self) -> None:
        self.noting = sys.getprofile()
        sys.setprofile(None)

    def __exit__(self, *_: object) -> None:
        note_again(self.noting)


def note_again(noting: Any) -> None:
    """Let what `sys.getprofile` gave note calls again."""
    if noting is None or callable(noting):
        sys.setprofile(noting)
    else:
        noting.enable()  # cProfile, which `sys.setprofile` does not take


class _KindOfKinds(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        return _SHOWN.get(kind, kind)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(cls, x: Any) -> bool:
        return issubclass(x, type)


class PythonType(type, metaclass=_KindOfKinds):
    """What the code of a loop finds under the name `type`: of a stand-in it tells what stands there in the loop."""


@contextlib.contextmanager
def stand_ins_unseen(taken: list[str]) -> Iterator[None]:
    """Inside this context the code of a loop takes a symbolic number for an int, a float or a bool, and a tensor of the
    trace for a tensor. The lines at which Python takes a number out of a symbol are added to those given."""
    changes = [(kind, name, change) for kind in _KINDS for name, change in _changes(kind, taken).items()]
    changes += [(FunctionalTensor, name, change) for name, change in _changes_of_tensors().items()]
    before = [(kind, name, vars(kind).get(name)) for kind, name, _ in changes]
    try:
        for kind, name, change in changes:
            _set(kind, name, change)
        yield
    finally:
        for kind, name, value in before:
            _set(kind, name, value)


def _set(kind: type, name: str, value: Any) -> None:
    """Set an attribute of a class, or take it away if its value is None."""
    if name == "__class__":  # Python would take it for the metaclass
        (attributes,) = (x for x in gc.get_referents(kind.__dict__) if isinstance(x, dict))
        if value is None:
            attributes.pop(name, None)
        else:
            attributes[name] = value
        kind.__doc__ = kind.__doc__  # lets Python forget what it knows of the attributes
    elif value is not None:
        setattr(kind, name, value)
    elif name in vars(kind):
        delattr(kind, name)


def _changes(kind: type, taken: list[str]) -> dict[str, Any]:
    own = _KINDS[kind]

    def missing(self: Any, name: str) -> Any:
        if hasattr(own, name) and _asked_by_loop():
            raise NotFollowed(f"it asks for .{name} of {_CHANGING}")
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def hash_of(self: Any) -> int:
        if _asked_by_loop():
            raise NotHashable(_LOOKED_UP)
        return known_hash(self)

    known_hash: Any = kind.__hash__
    own_methods = {name: x for name, x in vars(kind).items() if isinstance(x, types.FunctionType) and name in _COMPUTE}
    changes: dict[str, Any] = {name: _quiet(method) for name, method in own_methods.items()}
    changes |= {
        "__hash__": hash_of,
        "__class__": property(lambda self: own if _asked_by_loop() else kind),
        "__getattr__": missing,
    }
    if kind is not torch.SymBool:
        divisions = [(f"__{r}{name}__", bool(r), name) for name in _DIVISIONS for r in ("", "r")]
        changes |= {method: _quiet(getattr(kind, method)) for method, _, _ in divisions if hasattr(kind, method)}
        changes |= methods_of_symbols(kind, lambda name: changes.get(name, getattr(kind, name, None)))
        changes["__divmod__"] = lambda self, other: (self // other, self % other)
        changes["__rdivmod__"] = lambda self, other: (other // self, other % self)
        for method, is_reverse, name in divisions:
            if method in changes:
                changes[method] = _raising(changes[method], is_reverse, name.endswith("shift"))
    if kind is torch.SymInt:
        changes["__round__"] = _rounding(kind.__round__)
    changes |= {name: _taking(changes[name], taken) for name in _TAKE & changes.keys()}
    return changes | {name: _no_text(getattr(kind, name)) for name in ("__repr__", "__str__", "__format__")}


def _taking(known: Callable[..., Any], taken: list[str]) -> Callable[..., Any]:
    """A method that makes a number of a symbol, with which a step is one of its own; notes the line of the loop."""

    def method(self: Any) -> Any:
        if (frame := frame_of_loop(sys._getframe(1))) is not None:
            taken.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return known(self)

    return method


def _quiet(known: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's that nobody notes the calls of."""

    def method(*args: Any) -> Any:
        with unnoted():
            return known(*args)

    return method


def _changes_of_tensors() -> dict[str, Any]:
    def refuse(self: Any) -> str:
        if _asked_by_loop():
            raise NotFollowed("it makes text of a tensor")
        return known(self)

    known: Any = FunctionalTensor.__repr__
    kind = property(lambda self: Tensor if _asked_by_loop() else FunctionalTensor)
    return {"__class__": kind, "__repr__": refuse}


def _raising(known: Callable[..., Any], is_reverse: bool, is_shift: bool) -> Callable[..., Any]:
    """A division or a shift that raises at the steps at which Python's does: these take a way of their own."""

    def method(self: Any, other: Any) -> Any:
        by = self if is_reverse else other
        if type(by) in (int, float, torch.SymInt, torch.SymFloat) and _asked_by_loop():
            if is_shift and by < 0:
                raise ValueError("negative shift count")
            if not is_shift and by == 0:
                raise ZeroDivisionError("division by zero")
        return known(self, other)

    return method


def _rounding(known: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, places: Any = None) -> Any:
        if places is not None and places < 0:
            raise NotFollowed(f"it rounds {_CHANGING} to tens")
        return known(self, places)

    return method


def _no_text(known: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if _asked_by_loop():
            raise NotFollowed(_TEXT)
        return known(self, *args)

    return method


def _asked_by_loop() -> bool:
    frame = sys._getframe(2)
    return _asks(frame.f_code.co_filename) is not False and frame_of_loop(frame) is not None


def frame_of_loop(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame of a loop's code, or of a library that it uses, that runs in a frame or has asked for what runs there;
    None if torch has, or the import of a module."""
    asks: types.FrameType | None = None
    while frame is not None and frame.f_code.co_name != "trace_step":
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib") or (asks is None and _asks(file) is False):
            return None
        if file == logging.__file__:
            asks = None  # whoever logs, not the handler
        elif asks is None and _asks(file):
            asks = frame
        frame = frame.f_back
    return asks


def is_of_loop(file: str) -> bool:
    """Whether a file holds code of a loop, or of a library that it uses."""
    return _asks(file) is True


@functools.cache
def _asks(file: str) -> bool | None:
    """Whether a file holds code of a loop; None if that of whoever calls it counts."""
    is_standard = file.startswith(_STANDARD) and "site-packages" not in file
    if is_standard or file.startswith(_BETWEEN):
        return None
    return not file.startswith(_KNOW_SYMBOLS)


@functools.cache
def may_ask_what_it_is(code: types.CodeType) -> bool:
    """Whether a function may ask what a number is in a way that no symbol can answer: `flag is True`, `t is 0`."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return any(b.opname == "IS_OP" and a.opname == "LOAD_CONST" and isinstance(a.argval, int) for a, b in pairs)


def holds_symbols(frame: types.FrameType) -> bool:
    """Whether a variable of a function, or an attribute of one, is a symbolic number."""
    values = list(frame.f_locals.values())
    values += [x for value in values for x in getattr(value, "__dict__", {}).values()]
    return any(map(is_symbolic, values))


def is_symbolic(value: Any) -> bool:
    return type(value) in _KINDS

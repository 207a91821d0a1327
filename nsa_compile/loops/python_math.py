"""Floating-point numbers that are made of numbers which change from step to step, and functions of Python's `math`.

Torch's symbols compute with real numbers: they put sums and products into another order, cancel them, and take a
remainder for an integer. What Python computes is rounded at each operation. So each operation on floating-point
numbers is a function here, of which nothing is known but what Python makes of it at a step; a comparison is decided at
the step that is traced, and is a condition of the trace.
"""

from __future__ import annotations

import math
import operator
import struct
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

from nsa_compile.loops.state import READS_A_NUMBER, NotFollowed

_OF_MATH = (
    "sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "gamma", "lgamma", "pow", "fmod", "remainder",
    "hypot", "copysign", "fabs", "degrees", "radians", "isqrt", "gcd", "lcm", "comb", "perm", "factorial", "isfinite",
    "isinf", "isnan", "isclose",
)  # fmt: skip
_OWN: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _OF_MATH}
_NAMES = {function: name for name, function in _OWN.items()}


def _float_of(bits: int) -> float:
    """A constant, which as a number of sympy's would be printed with fewer digits."""
    return float(struct.unpack("<d", int(bits).to_bytes(8, "little"))[0])


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
_COMPARISONS: dict[str, Any] = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OF_FLOATS: dict[str, Any] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "int": int,
    "float": float,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "is_integer": float.is_integer,
}
_FUNCTIONS: dict[str, Any] = {
    **_ARITHMETIC,
    **_COMPARISONS,
    **_OF_FLOATS,
    **{f"math_{name}": function for name, function in _OWN.items()},
    "float_of": _float_of,
    "not_": operator.not_,
    "defined": lambda _: True,  # its operand has raised, if it does
}
# What expressions call them when they are evaluated.
BY_NAME = {f"nsa_{name}": function for name, function in _FUNCTIONS.items()}
# Of these it is known that no number makes them raise.
_NEVER_RAISE = {"add", "sub", "mul", "neg", "pos", "abs", *_COMPARISONS, "is_integer"}


def _symbol(name: str, is_integer: bool) -> Any:
    handler = "nsa_integer" if is_integer else "nsa_number"
    known = {"_torch_handler_name": handler, "is_real": True, "eval": classmethod(lambda cls, *args: None)}
    return type(f"nsa_{name}", (sympy.Function,), known | ({"is_integer": True} if is_integer else {}))


_SYMBOLS = {(name, is_integer): _symbol(name, is_integer) for name in _FUNCTIONS for is_integer in (False, True)}

# Torch asks between which numbers each function lies (torch 2.13).
SymPyValueRangeAnalysis.nsa_number = staticmethod(lambda *_: ValueRanges.unknown())
SymPyValueRangeAnalysis.nsa_integer = staticmethod(lambda *_: ValueRanges.unknown_int())

_conditions: dict[int, list[Any]] = {}  # of the trace that a thread makes


@contextmanager
def noting_conditions(conditions: list[Any]) -> Iterator[None]:
    """Inside this context what is decided about floating-point numbers is added to these conditions, as expressions."""
    _conditions[threading.get_ident()] = conditions
    try:
        yield
    finally:
        del _conditions[threading.get_ident()]


def _is_symbolic(x: Any) -> bool:
    return type(x) in (torch.SymInt, torch.SymFloat)


def _hint(x: Any) -> Any:
    """What a number is at the step that is traced.

    Raises:
        NotFollowed: it is one of a tensor's.
    """
    if not _is_symbolic(x):
        return x
    if x.node.hint is None:
        raise NotFollowed(READS_A_NUMBER)
    return x.node.hint


def _are_integers_of_tensors(given: tuple[Any, ...]) -> bool:
    """Whether there is one whose number no step tells, as the length of `x[x > 0]`, and none of floating point."""
    unknown = any(_is_symbolic(x) and x.node.hint is None for x in given)
    return unknown and not any(type(x) in (torch.SymFloat, float) for x in given)


def _expression(x: Any) -> Any:
    if _is_symbolic(x):
        return x.node.expr
    if isinstance(x, float):
        bits = int.from_bytes(struct.pack("<d", x), "little")
        return _SYMBOLS["float_of", False](sympy.Integer(bits))
    return sympy.Integer(int(x))


def _is_number(x: Any) -> bool:
    return _is_symbolic(x) or type(x) in (int, float, bool)


def _made(name: str, given: tuple[Any, ...], hint: Any) -> Any:
    """The result of a function of numbers, of which `hint` is that at the step that is traced."""
    env = next(x.node.shape_env for x in given if _is_symbolic(x))
    conditions = _conditions[threading.get_ident()]
    expr = _SYMBOLS[name, type(hint) is int](*map(_expression, given))
    if type(hint) is bool:
        conditions.append(expr if hint else _SYMBOLS["not_", False](expr))
        return hint
    if name not in _NEVER_RAISE:
        conditions.append(_SYMBOLS["defined", False](expr))
    return env.create_symfloatnode(expr, hint=hint) if type(hint) is float else env.create_symintnode(expr, hint=hint)


def methods_of_symbols(kind: type, known: Callable[[str], Any]) -> dict[str, Callable[..., Any]]:
    """Methods of symbolic numbers that are others while a step is followed; `known` says which one a name has else."""
    changes: dict[str, Callable[..., Any]] = {}
    for name, operation in _ARITHMETIC.items():
        for reverse in ("", "r"):
            method = f"__{reverse}{name}__"
            if (own := known(method)) is not None or kind is torch.SymFloat:
                changes[method] = _arithmetic(name, operation, bool(reverse), own)
    for name, operation in _COMPARISONS.items():
        changes[f"__{name}__"] = _comparison(name, operation, known(f"__{name}__"))
    if kind is torch.SymFloat:
        for name in ("neg", "pos", "abs", "floor", "ceil", "trunc", "round"):
            changes[f"__{name}__"] = _of_one(name)
        changes["is_integer"] = _of_one("is_integer")
        changes["__bool__"] = lambda self: _made("ne", (self, 0), bool(_hint(self)))
        changes["__int__"] = _taken("int")
        changes["__float__"] = _taken("float")
    return {name: _in_a_trace(method, known(name)) for name, method in changes.items()}


def _in_a_trace(method: Callable[..., Any], known: Any) -> Callable[..., Any]:
    """A method that is another one to the thread that follows a step, and to no other."""

    def other(*given: Any) -> Any:
        return (method if threading.get_ident() in _conditions else known)(*given)

    return other


def _arithmetic(name: str, operation: Callable[..., Any], is_reverse: bool, known: Any) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented if known is None else known(self, other)
        given = (other, self) if is_reverse else (self, other)
        if _are_integers_of_tensors(given) and known is not None:
            return known(self, other)
        hints = tuple(map(_hint, given))
        if not any(type(x) is float for x in hints) and (name != "pow" or hints[1] >= 0) and name != "truediv":
            return known(self, other)
        value = operation(*hints)
        if type(value) is not float:
            return known(self, other)
        if not any(type(x) is float for x in hints) and name == "pow":
            assert given[1] < 0  # a condition of the trace: from 0 on the power is an integer
        return _made(name, given, value)

    return method


def _comparison(name: str, operation: Callable[..., Any], known: Any) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not _is_number(other) or _are_integers_of_tensors((self, other)):
            return known(self, other)
        hints = _hint(self), _hint(other)
        if not any(type(x) is float for x in hints):
            return known(self, other)
        return _made(name, (self, other), bool(operation(*hints)))

    return method


def _of_one(name: str) -> Callable[..., Any]:
    def method(self: Any, *more: Any) -> Any:
        return _made(name, (self, *more), _FUNCTIONS[name](_hint(self), *map(_hint, more)))

    return method


def _taken(name: str) -> Callable[..., Any]:
    """A number that Python takes out of a symbol: the step is one of its own."""

    def method(self: Any) -> Any:
        value = _FUNCTIONS[name](_hint(self))
        made = _made(name, (self,), value)
        _made("eq", (made, value), True)
        return value

    return method


def makes_numbers(function: Any) -> bool:
    """Whether a function is one that `made_by` knows another form of."""
    return function is float or function is int or _is_of_math(function)


def _is_of_math(function: Any) -> bool:
    return type(function) is types.BuiltinFunctionType and function in _NAMES


def made_by(function: Any, *given: Any, **named: Any) -> Any:
    """What a function is called for in a loop; `float`, `int` and those of `math` take symbolic numbers, too."""
    if (function is float or function is int) and len(given) == 1 and not named:
        (value,) = given
        if type(value) is torch.SymBool:
            return function(bool(value))
        if _is_symbolic(value) and threading.get_ident() in _conditions:
            kind = torch.SymFloat if function is float else torch.SymInt
            return value if type(value) is kind else _made(function.__name__, given, function(_hint(value)))
    elif _is_of_math(function):
        function = getattr(math, _NAMES[function])
    return function(*given, **named)


def functions_of_symbols() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What stands in the place of functions of `math` while a step is followed: owner, name and the other one."""
    return [(math, name, _of_symbols(name, own)) for name, own in _OWN.items()]


def _of_symbols(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def function(*given: Any, **named: Any) -> Any:
        are_symbols = not named and any(map(_is_symbolic, given)) and all(map(_is_number, given))
        if not are_symbols or threading.get_ident() not in _conditions:
            return own(*given, **named)
        return _made(f"math_{name}", given, own(*map(_hint, given)))

    return function

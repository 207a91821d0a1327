"""Functions of Python's `math`, `float` and `int` of numbers that change from step to step: they stay symbolic.

Python's own take a number out of a symbol, and with that each step would be a way of its own.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._sympy.functions import make_opaque_unary_fn

_LARGEST_EXPONENT = math.log(torch.finfo(torch.float64).max)


def _never(x: Any) -> bool:
    return False


# By function, of which numbers it raises what: the steps at which it does take a way of their own. Of other functions
# torch does not know between which numbers they lie, which it asks of a condition (torch 2.13).
_RAISES: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    **dict.fromkeys(("log", "log2"), (lambda x: x <= 0, ValueError)),
    **dict.fromkeys(("exp", "sinh", "cosh"), (lambda x: abs(x) > _LARGEST_EXPONENT, OverflowError)),
    **dict.fromkeys(("asin", "acos"), (lambda x: abs(x) > 1, ValueError)),
    **dict.fromkeys(("sin", "cos", "tan", "tanh", "atan"), (_never, ValueError)),
    "sqrt": (lambda x: x < 0, ValueError),
}
_SYMBOLS = {name: make_opaque_unary_fn(name) for name in _RAISES}
# What expressions call them when they are evaluated.
BY_NAME = {symbol.__name__: getattr(math, name) for name, symbol in _SYMBOLS.items()}
_NAMES = {getattr(math, name): name for name in (*_RAISES, "pow", "fabs")}


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, torch.SymInt | torch.SymFloat)


def makes_numbers(function: Any) -> bool:
    """Whether a function is one that `made_by` knows another form of."""
    return function is float or function is int or _is_of_math(function)


def _is_of_math(function: Any) -> bool:
    return type(function) is types.BuiltinFunctionType and function in _NAMES


def made_by(function: Any, *given: Any, **named: Any) -> Any:
    """What a function is called for in a loop; `float`, `int` and those of `math` take symbolic numbers, too."""
    if (function is float or function is int) and len(given) == 1 and not named:
        (value,) = given
        if _is_symbolic(value):
            return torch.sym_float(value) if function is float else torch.sym_int(value)
        if isinstance(value, torch.SymBool):
            return function(bool(value))
    elif _is_of_math(function):
        function = getattr(math, _NAMES[function])
    return function(*given, **named)


def functions_of_symbols() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What stands in the place of functions of `math` while a step is followed: owner, name and the other one."""
    several: list[tuple[Any, str, Callable[..., Any]]] = [(math, "pow", _power), (math, "fabs", _magnitude)]
    return [*((math, name, _of_symbols(name, getattr(math, name))) for name in _RAISES), *several]


_own_power, _own_magnitude = math.pow, math.fabs


def _power(x: Any, y: Any) -> Any:
    # Of other numbers `math.pow` raises what `**` does not.
    if (_is_symbolic(x) and y >= 0) or (_is_symbolic(y) and x > 0):
        return torch.sym_float(x) ** torch.sym_float(y)
    return _own_power(x, y)


def _magnitude(x: Any) -> Any:
    return abs(torch.sym_float(x)) if _is_symbolic(x) else _own_magnitude(x)


def _of_symbols(name: str, own: Callable[..., float]) -> Callable[..., Any]:
    raises, error = _RAISES[name]

    def function(*given: Any) -> Any:
        if not given or not _is_symbolic(given[0]) or any(map(_is_symbolic, given[1:])):
            return own(*given)
        if raises(given[0]):
            raise error("math domain error" if error is ValueError else "math range error")
        node = given[0].node
        value = node.shape_env.create_symfloatnode(_SYMBOLS[name](node.expr), hint=own(node.hint))
        return value / own(*given[1:]) if given[1:] else value  # math.log(x, base)

    return function

"""Functions of Python's `math`, `float` and `int` of numbers that change from step to step: they stay symbolic.

Python's own take a number out of a symbol, and with that each step would be a way of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._sympy.functions import make_opaque_unary_fn

_LARGEST_EXPONENT = math.log(torch.finfo(torch.float64).max)


def _never(x: Any) -> bool:
    return False


# By function, of which numbers it raises what: the steps at which it does take a way of their own.
_RAISES: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    **dict.fromkeys(("log", "log2", "log10"), (lambda x: x <= 0, ValueError)),
    **dict.fromkeys(("exp", "expm1", "sinh", "cosh"), (lambda x: abs(x) > _LARGEST_EXPONENT, OverflowError)),
    **dict.fromkeys(("asin", "acos"), (lambda x: abs(x) > 1, ValueError)),
    **dict.fromkeys(("sin", "cos", "tan", "tanh", "atan", "asinh", "erf", "degrees", "radians"), (_never, ValueError)),
    "sqrt": (lambda x: x < 0, ValueError),
    "log1p": (lambda x: x <= -1, ValueError),
    "acosh": (lambda x: x < 1, ValueError),
    "atanh": (lambda x: abs(x) >= 1, ValueError),
}
_SYMBOLS = {name: make_opaque_unary_fn(name) for name in _RAISES}
# What expressions call them when they are evaluated.
BY_NAME = {symbol.__name__: getattr(math, name) for name, symbol in _SYMBOLS.items()}


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, torch.SymInt | torch.SymFloat)


def as_float(*value: Any) -> Any:
    """Python's `float`, of a symbolic number too."""
    return torch.sym_float(value[0]) if len(value) == 1 and _is_symbolic(value[0]) else float(*value)


def as_int(*value: Any, **base: Any) -> Any:
    """Python's `int`, of a symbolic number too."""
    return torch.sym_int(value[0]) if len(value) == 1 and _is_symbolic(value[0]) else int(*value, **base)


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

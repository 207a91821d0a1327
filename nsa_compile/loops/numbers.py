"""Integers that a trace knows as expressions of a step's position and sizes, evaluated at all steps together."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.printers import PythonPrinter

from nsa_compile.loops.state import NotFollowed


@dataclass(frozen=True)
class Number:
    """An expression of the integers that a step is given."""

    expr: Any

    @functools.cached_property
    def text(self) -> str:
        return _printed(self.expr)


def text_of(value: Any) -> str:
    """A number, or an expression, as Python reads it."""
    return value.text if isinstance(value, Number) else repr(value)


def as_number(value: Any, is_expression: bool = False) -> Any:
    """A symbolic number, or an expression of some, as a `Number`; one that is no longer symbolic as a number of
    Python's; anything else as it is."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        expr = value.node.expr
        return Number(expr) if expr.free_symbols else kind(expr)
    if is_expression and isinstance(value, sympy.Basic):
        return Number(value)
    return value


@functools.lru_cache(maxsize=65536)
def _printed(expr: Any) -> str:
    return PythonPrinter().doprint(expr)


def _choose(one: Any) -> Any:
    return lambda *values: functools.reduce(one, values)


_AT_ALL_STEPS = {
    **SYMPY_INTERP,
    "max": _choose(np.maximum),
    "min": _choose(np.minimum),
    "Max": _choose(np.maximum),
    "Min": _choose(np.minimum),
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "Mod": np.mod,
    "PythonMod": np.mod,
    "IntTrueDiv": np.true_divide,
    "FloatTrueDiv": np.true_divide,
    "ToFloat": lambda x: np.asarray(x, dtype=np.float64),
    "Eq": np.equal,
    "Ne": np.not_equal,
    "Lt": np.less,
    "Le": np.less_equal,
    "Gt": np.greater,
    "Ge": np.greater_equal,
    "And": _choose(np.logical_and),
    "Or": _choose(np.logical_or),
    "Not": np.logical_not,
    "Identity": lambda x: x,
    "float": lambda x: np.asarray(x, dtype=np.float64),
    "math": math,
    "sympy": sympy,
    "torch": torch,
}


def at_all_steps(number: Any, given: dict[str, np.ndarray], steps: int) -> np.ndarray:
    """A number at each step, given the symbols by name: `[S]`."""
    if not isinstance(number, Number):
        return np.full(steps, number)
    with np.errstate(all="ignore"):
        try:
            value = eval(compile(number.text, "<number>", "eval"), dict(_AT_ALL_STEPS), given)
            return np.broadcast_to(np.asarray(value), (steps,))
        except Exception:  # what numpy has no form for is evaluated step by step
            names = [str(s) for s in number.expr.free_symbols]
            if not given.keys() >= set(names):
                raise NotFollowed("it reads a number out of a tensor, so that its way depends on data") from None
            code = compile(number.text, "<number>", "eval")
            scope = {**SYMPY_INTERP, "math": math}
            rows = zip(*(given[name].tolist() for name in names), strict=True)
            return np.array([_at_a_step(code, scope, dict(zip(names, row, strict=True))) for row in rows])


def _at_a_step(code: Any, scope: dict[str, Any], given: dict[str, Any]) -> Any:
    try:
        return eval(code, scope, given)
    except (ArithmeticError, ValueError):  # at a step that takes another way, as no trace asks for it here
        return math.nan

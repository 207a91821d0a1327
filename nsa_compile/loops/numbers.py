"""Integers that a trace knows as expressions of a step's position and sizes, evaluated at all steps together."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.printers import PythonPrinter

from nsa_compile.loops.python_math import BY_NAME
from nsa_compile.loops.state import READS_A_NUMBER, NotFollowed


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
        expr = value.node.expr
        return Number(expr) if expr.free_symbols else value.node.hint
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
    "sympy": sympy,
    "torch": torch,
}
# Functions of `math` round as Python's own do, so they are called step by step.
AT_A_STEP = {**SYMPY_INTERP, **BY_NAME, "math": math}


def at_all_steps(number: Any, given: dict[str, np.ndarray], steps: int) -> np.ndarray:
    """A number at each step, given the symbols by name: `[S]`."""
    if not isinstance(number, Number):
        return np.full(steps, number)
    if not _may_be_large(number.expr):
        with np.errstate(all="ignore"), contextlib.suppress(Exception):  # there may be no form of numpy's
            value = eval(compile(number.text, "<number>", "eval"), dict(_AT_ALL_STEPS), given)
            return np.broadcast_to(np.asarray(value), (steps,))
    return _step_by_step(number, given)


@functools.lru_cache(maxsize=65536)
def _may_be_large(expr: Any) -> bool:
    """Whether integers on the way to a number may be beyond 64 bits, which numpy would not tell."""
    if any(abs(n) >= 2**31 for n in expr.atoms(sympy.Integer)):
        return True
    products = [x for x in expr.atoms(sympy.Mul) if sum(not a.is_number for a in x.args) > 1]
    grows = [x for x in expr.atoms(sympy.Function) if type(x).__name__ in ("PowByNatural", "LShift", "RShift")]
    return bool(products or grows or expr.atoms(sympy.Pow))


def _step_by_step(number: Number, given: dict[str, np.ndarray]) -> np.ndarray:
    """A number at each step, by Python's own integers."""
    names = [str(s) for s in number.expr.free_symbols]
    if not given.keys() >= set(names):
        raise NotFollowed(READS_A_NUMBER)
    code, scope = compile(number.text, "<number>", "eval"), AT_A_STEP
    rows = zip(*(given[name].tolist() for name in names), strict=True)
    found = [_at_a_step(code, scope, dict(zip(names, row, strict=True))) for row in rows]
    known = [x for x in found if x is not None]
    if any(isinstance(x, int) and abs(x) >= 2**63 for x in known):
        raise NotFollowed("a number that changes from step to step grows beyond 64 bits")
    return np.array([type(known[0])() if x is None else x for x in found] if known else np.zeros(len(found), np.int64))


def _at_a_step(code: Any, scope: dict[str, Any], given: dict[str, Any]) -> Any:
    try:
        return eval(code, scope, given)
    except (ArithmeticError, ValueError):  # at a step that takes another way, as no trace asks for it here
        return None

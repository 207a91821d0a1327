"""C++ of a program of scores and of its derivatives, for the loops of `cpu.cpp`.

Values come in three kinds: floating numbers are vectors of the type of the computation, `Vec<T>`, integers are vectors
of as many integers, `Vec<Int>`, and booleans masks, `Vec<T>` with all bits set or none. What does not differ between
the keys is computed once for a row of scores, what differs between the keys alone once for a block of keys.

Where the bounds of integers, and of numbers that masks add, decide that the scores of a whole tile are masked, the tile
is skipped: one of -inf, and one of a finite number that weighs nothing beside the other scores of each row. Where they
decide that none is masked, the tile is computed without these conditions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nsa_compile.ops.scored.program import Instruction, Program, parse

__all__ = ["LeafType", "bounds_of_integers", "generate"]

Kind = Literal["bool", "int", "float"]
_KINDS: tuple[Kind, ...] = ("bool", "int", "float")  # in the order in which they are promoted


@dataclass(frozen=True)
class LeafType:
    """A tensor that scores are made of: its dtype, and whether it differs between rows (queries, heads) and keys."""

    dtype: torch.dtype
    by_row: bool
    by_key: bool

    @property
    def kind(self) -> Kind:
        return "float" if self.dtype.is_floating_point else "bool" if self.dtype == torch.bool else "int"


@dataclass(frozen=True)
class _Value:
    """One value: a product, a leaf, the gradient of the score, or an operator of other values and numbers."""

    operator: str
    operands: tuple[Any, ...]  # of an operator: numbers of values, as `_Ref`, and literals
    kind: Kind
    by_row: bool
    by_key: bool


@dataclass(frozen=True)
class _Ref:
    number: int


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ALWAYS_FLOAT = {"div", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "tanh", "sigmoid", "silu", "sin",
                 "cos", "erf"}  # fmt: skip
_ALWAYS_BOOL = {*_COMPARISONS, "logical_not", "logical_and", "logical_or", "logical_xor", "isnan"}
_SAME_AS_FIRST = {"clone", "detach", "alias"}
_LOGICAL = {"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "bitwise_xor"}


class _Values:
    """The values of programs, each once.

    Args:
        leaves: their types.
        identities: numbers that values have in common with those of other objects of this class.
        assumed: what the booleans of some identities are taken to be.
    """

    def __init__(
        self, leaves: Sequence[LeafType], identities: dict[Any, int], assumed: Mapping[int, bool] | None = None
    ) -> None:
        self.leaves, self.identities, self.assumed = leaves, identities, assumed or {}
        self.values: list[_Value] = []
        self.identity: list[int] = []  # of each value
        self.numbers: dict[int, int] = {}  # of the values, by identity

    def add(self, value: _Value) -> Any:
        # Equal numbers of different types, and zeros of different signs, are not the same.
        operands = [(self.identity[x.number],) if isinstance(x, _Ref) else repr(x) for x in value.operands]
        identity = self.identities.setdefault((value.operator, value.kind, *operands), len(self.identities))
        if identity in self.assumed:
            return self.assumed[identity]
        if identity not in self.numbers:
            self.numbers[identity] = len(self.values)
            self.values.append(value)
            self.identity.append(identity)
        return _Ref(self.numbers[identity])

    def run(self, program: Program, gradient: Any = None) -> list[Any]:
        """The results of a program: references and numbers."""
        names: dict[str, Any] = {"g": gradient}

        def operand(x: Any) -> Any:
            if not isinstance(x, str):
                return x
            if x not in names:
                names[x] = self._input(x)
            return names[x]

        for i, instruction in enumerate(program.instructions):
            if instruction.operator == "to":
                x, kind = instruction.operands
                names[f"v{i}"] = self.cast(operand(x), kind)  # pyrefly: ignore[bad-argument-type]
            else:
                names[f"v{i}"] = self._instruction(instruction, [operand(x) for x in instruction.operands])
        return [operand(x) for x in program.results]

    def _input(self, name: str) -> _Ref:
        number = int(name[1:])
        if name[0] == "s":
            return self.add(_Value("product", (number,), "float", True, True))
        leaf = self.leaves[number]
        return self.add(_Value("leaf", (number,), leaf.kind, leaf.by_row, leaf.by_key))

    def kind(self, x: Any) -> Kind:
        if isinstance(x, _Ref):
            return self.values[x.number].kind
        return "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float"

    def operation(self, operator: str, operands: Sequence[Any], kind: Kind) -> Any:
        used = [self.values[x.number] for x in operands if isinstance(x, _Ref)]
        by_row, by_key = any(v.by_row for v in used), any(v.by_key for v in used)
        return self.add(_Value(operator, tuple(operands), kind, by_row, by_key))

    def cast(self, x: Any, kind: Kind) -> Any:
        if self.kind(x) == kind:
            return x
        if not isinstance(x, _Ref):
            return {"bool": bool, "int": int, "float": float}[kind](x)
        return self.operation("cast", [x], kind)

    def _instruction(self, instruction: Instruction, operands: list[Any]) -> Any:
        name = instruction.operator.partition(".")[0]
        if name in _SAME_AS_FIRST:
            return operands[0]
        if name == "scalar_tensor":
            return operands[0]
        if name == "masked_fill":
            x, condition, value = operands
            return self._where(condition, self.cast(value, self.kind(x)), x)
        if name == "where":
            return self._where(*operands)
        if name in _LOGICAL:
            return self._bitwise(_LOGICAL[name], [self.cast(x, "bool") for x in operands], "bool")
        if name == "logical_not":
            return self._not(self.cast(operands[0], "bool"))
        if name == "bitwise_not" and self.kind(operands[0]) == "bool":
            return self._not(operands[0])
        if name == "rsub":
            name, operands = "sub", [operands[1], operands[0]]
        common = _promoted(self.kind(x) for x in operands if x is not None)
        if name.startswith("bitwise_"):
            return self._bitwise(name, [self.cast(x, common) for x in operands], common)
        if name in _COMPARISONS and common == "bool":
            if name in ("eq", "ne"):
                different = self._bitwise("bitwise_xor", operands, "bool")
                return different if name == "ne" else self._not(different)
            common = "int"
        if name in ("add", "mul") and common == "bool":
            return self._bitwise("bitwise_or" if name == "add" else "bitwise_and", operands, "bool")
        if name in ("maximum", "minimum") and common == "bool":
            return self._bitwise("bitwise_or" if name == "maximum" else "bitwise_and", operands, "bool")
        if name in ("floor", "ceil") and common != "float":
            return operands[0]
        if name in _ALWAYS_FLOAT:
            common = "float"
        operands = [x if x is None else self.cast(x, common) for x in operands]
        return self.operation(name, operands, "bool" if name in _ALWAYS_BOOL else common)

    def _where(self, condition: Any, if_true: Any, if_false: Any) -> Any:
        condition = self.cast(condition, "bool")
        common = _promoted((self.kind(if_true), self.kind(if_false)))
        if_true, if_false = self.cast(if_true, common), self.cast(if_false, common)
        if isinstance(condition, bool):
            return if_true if condition else if_false
        return self.operation("where", [condition, if_true, if_false], common)

    def _not(self, x: Any) -> Any:
        return not x if isinstance(x, bool) else self.operation("not", [x], "bool")

    def _bitwise(self, name: str, operands: Sequence[Any], kind: Kind) -> Any:
        for x, other in (operands, operands[::-1]) if len(operands) == 2 else ():
            if kind == "bool" and isinstance(x, bool):
                if name == "bitwise_xor":
                    return self._not(other) if x else other
                return other if x == (name == "bitwise_and") else x
        return self.operation(name, operands, kind)

    def needed(self, results: Iterable[Any]) -> list[int]:
        """The numbers of the values that results are made of, in order."""
        todo = [x.number for x in results if isinstance(x, _Ref)]
        found: set[int] = set()
        while todo:
            if (number := todo.pop()) not in found:
                found.add(number)
                todo += [x.number for x in self.values[number].operands if isinstance(x, _Ref)]
        return sorted(found)


def _promoted(kinds: Iterable[Kind]) -> Kind:
    return max(kinds, key=_KINDS.index)


# -- what is known of all scores of a tile

_SUNK = -1000.0  # as in `scores.h`: numbers that masks put in the place of scores, or add to them, are no higher
_ALL = "Reach<T>::all()"


class _Highest:
    """What the scores of a tile do not exceed, as an expression of C++: of -inf, they are not read; of a number far
    below the other scores of all rows, neither.

    Attributes:
        expression: of a `Reach<T>`.
        conditions: the booleans that decide it, by number: what each is where it puts a low number in a score's place.
        integers: the values of integers and booleans that it reads.
    """

    def __init__(self, values: _Values, score: Any) -> None:
        self.values = values
        self.conditions: dict[int, bool] = {}
        self.integers: set[int] = set()
        self.expression, low = self._reach(score)
        if not low:
            self.expression = _ALL

    def _reach(self, x: Any) -> tuple[str, bool]:
        """An expression, and whether it may be low."""
        if not isinstance(x, _Ref):
            return f"Reach<T>::of({_scalar(float(x))})", x <= _SUNK
        value = self.values.values[x.number]
        if value.kind != "float":
            self.integers.add(x.number)
            return f"Reach<T>::of(v{x.number})", False
        operands = [y for y in value.operands if y is not None]
        match value.operator:
            case "product":
                return f"products[{operands[0]}]", False
            case "leaf":
                return f"numbers[{operands[0]}]", True
            case "cast":
                return self._reach(operands[0])
            case "where":
                return self._where(*operands)
            case "add" | "sub":
                (a, a_low), (b, b_low) = map(self._reach, operands)
                return (f"reach_{value.operator}({a}, {b})", True) if a_low or b_low else (_ALL, False)
            case "neg":
                a, low = self._reach(operands[0])
                return f"reach_neg({a})", low
            case "mul" | "div":
                return self._multiple(value.operator, *operands)
        return _ALL, False

    def _where(self, condition: _Ref, if_true: Any, if_false: Any) -> tuple[str, bool]:
        for when, x in ((True, if_true), (False, if_false)):
            if not isinstance(x, _Ref) and x <= _SUNK:
                self.conditions.setdefault(condition.number, when)
        (a, a_low), (b, b_low) = self._reach(if_true), self._reach(if_false)
        if not (a_low or b_low):
            return _ALL, False
        self.integers.add(condition.number)
        return f"reach_where(v{condition.number}, {a}, {b})", True

    def _multiple(self, operator: str, a: Any, b: Any) -> tuple[str, bool]:
        if operator == "mul" and not isinstance(a, _Ref):
            a, b = b, a
        if isinstance(b, _Ref) or (operator == "div" and b == 0) or not math.isfinite(b):
            return _ALL, False
        factor = 1 / b if operator == "div" else float(b)
        x, low = self._reach(a)
        return f"reach_mul({x}, {_scalar(factor)})", low or (x != _ALL and abs(factor) >= -_SUNK)


# -- bounds of integers

Bounds = tuple[int, int]


def bounds_of_integers(
    program: str, derivatives: str | None, leaves: Sequence[LeafType], bounds: Sequence[Bounds | None]
) -> Bounds | None:
    """Between which numbers all integers of programs lie, given those of each leaf of integers; None: not known."""
    values = _Values(leaves, {})
    _run_all(values, program, derivatives)
    known: list[Bounds | None] = []
    for value in values.values:
        known.append(_bounds(value, bounds, known) if value.kind == "int" else (0, 1))
        if known[-1] is None:
            return None
    literals = [
        x for v in values.values for x in v.operands if isinstance(x, int) and v.operator not in ("leaf", "product")
    ]
    every = [b for b, value in zip(known, values.values, strict=True) if value.kind == "int" and b is not None]
    every += [(x, x) for x in literals]
    return (min(b[0] for b in every), max(b[1] for b in every)) if every else (0, 0)


def _bounds(value: _Value, leaves: Sequence[Bounds | None], known: Sequence[Bounds | None]) -> Bounds | None:
    if value.operator == "leaf":
        return leaves[value.operands[0]]

    def of(x: Any) -> Bounds | None:
        return known[x.number] if isinstance(x, _Ref) else (int(x), int(x))

    operands = [of(x) for x in value.operands if x is not None]
    if any(b is None for b in operands):
        return None
    a, b = [*operands, (0, 0)][:2]
    assert a is not None
    assert b is not None
    match value.operator:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            products = [x * y for x in a for y in b]
            return min(products), max(products)
        case "neg" | "abs":
            largest = max(map(abs, a))
            return -largest, largest
        case "maximum" | "minimum" | "clamp" | "clamp_min" | "clamp_max":
            return min(x[0] for x in operands if x), max(x[1] for x in operands if x)
        case "where":
            chosen = [x for x in operands[1:] if x]
            return min(x[0] for x in chosen), max(x[1] for x in chosen)
        case "cast":
            return (0, 1) if isinstance(value.operands[0], _Ref) and a == (0, 1) else None
        case "sign":
            return -1, 1
        case "remainder" | "floor_divide":
            if b[0] <= 0 <= b[1]:
                return None
            largest = max(map(abs, (*a, *b)))
            return -largest, largest
        case "bitwise_and" | "bitwise_or" | "bitwise_xor" | "bitwise_not":
            bits = max(x.bit_length() for pair in operands if pair for x in pair)
            return -(2**bits), 2**bits
    return None


# -- C++

_FUNCTIONS = {
    "exp": "{}.exp()", "exp2": "{}.exp2()", "log": "{}.log()", "log1p": "{}.log1p()", "sqrt": "{}.sqrt()",
    "sin": "{}.sin()", "cos": "{}.cos()", "erf": "{}.erf()", "floor": "{}.floor()", "ceil": "{}.ceil()",
    "tanh": "tanh_of({})", "sigmoid": "sigmoid_of({})", "silu": "({0} * sigmoid_of({0}))",
    "reciprocal": "(Vec<T>(T(1)) / {})", "rsqrt": "(Vec<T>(T(1)) / {}.sqrt())", "neg": "negative({})",
    "abs": "{}.abs()", "relu": "at::vec::clamp_min({}, {type}(0))", "sign": "sign_of({})", "not": "not_of({})",
    "isnan": "({0} != {0})", "bitwise_not": "({} ^ Vec<Int>(-1))",
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})",
    "maximum": "at::vec::maximum({}, {})", "minimum": "at::vec::minimum({}, {})",
    "bitwise_and": "({} & {})", "bitwise_or": "({} | {})", "bitwise_xor": "({} ^ {})",
    "remainder": "remainder_of({}, {})", "floor_divide": "floor_divide({}, {})",
    "clamp_min": "at::vec::maximum({}, {})", "clamp_max": "at::vec::minimum({}, {})",
    "where": "choose({}, {}, {})",
}  # fmt: skip
_STORED = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half",
    torch.int64: "int64_t", torch.bool: "bool",
}  # fmt: skip
_OF_BOUNDS = {"add", "sub", "mul", "neg", "maximum", "minimum", "remainder", "floor_divide", "clamp_min", "clamp_max",
              "where", "not", "bitwise_and", "bitwise_or", *_COMPARISONS}  # fmt: skip


def _number(x: Any, kind: Kind) -> str:
    """A number as a vector."""
    if kind == "bool":
        return f"mask_of<T>({'true' if x else 'false'})"
    if kind == "int":
        return f"Vec<Int>({int(x)})"
    x = float(x)
    if math.isnan(x):
        return "Vec<T>(std::numeric_limits<T>::quiet_NaN())"
    if math.isinf(x):
        return f"Vec<T>({'-' if x < 0 else ''}kInfinity<T>)"
    return f"Vec<T>(T({x!r}))"


def _scalar(x: float) -> str:
    return f"{'-' if x < 0 else ''}kInfinity<T>" if math.isinf(x) else f"T({x!r})"


def _type(kind: Kind) -> str:
    return "Vec<Int>" if kind == "int" else "Vec<T>"


def _element(kind: Kind) -> str:
    return {"bool": "Mask<T>", "int": "Int", "float": "T"}[kind]


def _stored(dtype: torch.dtype) -> str:
    return _STORED[dtype]


@dataclass(frozen=True)
class _Writer:
    """Writes values as expressions of C++."""

    values: _Values

    def operand(self, x: Any, kind: Kind) -> str:
        if not isinstance(x, _Ref):
            return _number(x, kind)
        return "gradient" if self.values.values[x.number].operator == "gradient" else f"v{x.number}"

    def expression(self, value: _Value) -> str:
        operator, operands = value.operator, value.operands
        if operator == "cast":
            source = self.values.kind(operands[0])
            return f"{source}_to_{value.kind}<T, Int>({self.operand(operands[0], source)})"
        kind = _promoted(self.values.kind(x) for x in operands if x is not None)
        if operator == "where":
            written = [self.operand(operands[0], "bool"), *(self.operand(x, value.kind) for x in operands[1:])]
        else:
            written = ["" if x is None else self.operand(x, kind) for x in operands]
        if operator in _COMPARISONS:
            compared = f"({written[0]} {_COMPARISONS[operator]} {written[1]})"
            return f"bits<T>{compared}" if kind == "int" else compared
        if operator == "clamp":
            x = written[0]
            for bound, name in zip(written[1:], ("maximum", "minimum"), strict=False):
                x = f"at::vec::{name}({x}, {bound})" if bound else x
            return x
        if operator == "pow":
            return self._power(written[0], operands[1], kind, written[1])
        if operator == "div" and not isinstance(operands[1], _Ref) and operands[1] != 0:
            return f"({written[0]} * {_number(1 / operands[1], 'float')})"
        return _FUNCTIONS[operator].format(*written, type=_type(kind))

    def _power(self, x: str, exponent: Any, kind: Kind, written: str) -> str:
        if isinstance(exponent, _Ref) and kind == "float":
            return f"{x}.pow({written})"
        powers: dict[float, str] = {1: "{0}", 2: "({0} * {0})", 3: "({0} * {0} * {0})"}
        if kind == "float":
            powers |= {0.5: "{0}.sqrt()", -0.5: "(Vec<T>(T(1)) / {0}.sqrt())", -1: "(Vec<T>(T(1)) / {0})"}
            powers |= {-2: "(Vec<T>(T(1)) / ({0} * {0}))"}
        if exponent in powers:
            return powers[exponent].format(x)
        if kind != "float":
            raise ValueError(f"a program of scores raises integers to the power of {exponent}")
        return f"{x}.pow({_number(exponent, 'float')})"


def _run_all(values: _Values, program: str, derivatives: str | None = None) -> tuple[Any, list[Any]]:
    """The score, and the derivatives, of texts."""
    (score,) = values.run(parse(program))
    score = values.cast(score, "float")
    if derivatives is None:
        return score, []
    gradient = values.add(_Value("gradient", (), "float", True, True))
    return score, [values.cast(x, "float") for x in values.run(parse(derivatives), gradient)]


def _tables(leaves: Sequence[LeafType], wanted: Sequence[int], highest: _Highest) -> list[str]:
    def table(name: str, flags: Iterable[bool]) -> str:
        written = ", ".join("true" if flag else "false" for flag in flags)
        return f"  static constexpr bool {name}[] = {{{written or 'false'}}};"

    both = [x.by_row and x.by_key for x in leaves]
    return [
        table("kBounded", (x.kind != "float" and not y for x, y in zip(leaves, both, strict=True))),
        table("kFlags", (x.kind == "bool" and y for x, y in zip(leaves, both, strict=True))),
        table("kNumbers", (f"numbers[{i}]" in highest.expression for i in range(len(leaves)))),
        table("kByKey", (x.by_key for x in leaves)),
        table("kWantedByKey", (leaves[i].by_key for i in wanted)),
        f"  static constexpr bool kReadsProducts = {str('products[' in highest.expression).lower()};",
    ]


def _known(values: _Values, highest: _Highest) -> list[str]:
    """What is known of a tile from the bounds of its leaves, and of its products: functions of them."""
    bounds = [
        f"    [[maybe_unused]] const Bounds v{number} = {_bounds_of(values, values.values[number])};"
        for number in values.needed(_Ref(x) for x in highest.integers)
    ]
    shown = [f"v{number}.{'all_false' if low else 'all_true'}()" for number, low in highest.conditions.items()]
    return [
        "  static bool shown([[maybe_unused]] const Bounds* leaves) {",
        *bounds,
        f"    return {' && '.join(shown) or 'true'};",
        "  }",
        "  static T highest([[maybe_unused]] const Bounds* leaves, [[maybe_unused]] const Reach<T>* numbers,",
        "                   [[maybe_unused]] const Reach<T>* products) {",
        *bounds,
        f"    return {highest.expression}.high;",
        "  }",
    ]


def _bounds_of(values: _Values, value: _Value) -> str:
    if value.kind == "float":
        return "Bounds::all()"
    return f"leaves[{value.operands[0]}]" if value.operator == "leaf" else _bounds_expression(values, value)


def _bounds_expression(values: _Values, value: _Value) -> str:
    operands = [x for x in value.operands if x is not None]
    if value.operator == "cast" and isinstance(operands[0], _Ref):
        source = values.values[operands[0].number]
        same = source.kind == "bool" and value.kind == "int"
        return f"v{operands[0].number}" if same else f"Bounds::{'booleans' if value.kind == 'bool' else 'all'}()"
    if value.operator not in _OF_BOUNDS or any(values.kind(x) == "float" for x in operands):
        return f"Bounds::{'booleans' if value.kind == 'bool' else 'all'}()"
    written = [f"v{x.number}" if isinstance(x, _Ref) else f"Bounds{{{int(x)}, {int(x)}}}" for x in operands]
    boolean = "_booleans" if value.operator.startswith("bitwise") and value.kind == "bool" else ""
    if value.operator.startswith("bitwise") and not boolean:
        return "Bounds::all()"
    return f"bounds_{value.operator}{boolean}({', '.join(written)})"


class _Loops:
    """A function over the scores of a tile of rows and a block of keys.

    Forwards it writes the scores in place of the first product, and keeps the maxima. Backwards it writes the weights
    there, the gradients of the products to `dweights` and in place of the other products, and adds to those of leaves.
    """

    def __init__(self, values: _Values, leaves: Sequence[LeafType]) -> None:
        self.values, self.leaves = values, leaves
        self.writer = _Writer(values)
        # Statements: once for a block; for each vector of its keys; once for a row; for each vector of a row.
        self.block: list[str] = []
        self.keys: list[str] = []
        self.row: list[str] = []
        self.scores: list[str] = []
        self.after: list[str] = []  # those of each vector of a row that need the gradient of the score

    def place(self, results: Sequence[Any]) -> None:
        """Put the statements of all that results are made of where they belong."""
        values = self.values
        needed = values.needed(results)
        rows_read = {x.number for x in results if isinstance(x, _Ref)}
        for number in needed:
            value = values.values[number]
            if value.by_row and value.by_key:
                rows_read.update(x.number for x in value.operands if isinstance(x, _Ref))
        late: set[int] = set()
        for number in needed:
            value = values.values[number]
            if value.operator == "gradient" or any(isinstance(x, _Ref) and x.number in late for x in value.operands):
                late.add(number)
            if value.operator in ("product", "leaf"):
                self._input(number, value)
            elif value.operator != "gradient":
                statement = f"const {_type(value.kind)} v{number} = {self.writer.expression(value)};"
                if value.by_key and not value.by_row:
                    self.keys.append(statement)
                    if number in rows_read:
                        self.block.append(f"alignas(64) {_element(value.kind)} k{number}[kBlockKeys];")
                        self.keys.append(f"v{number}.store(k{number} + i);")
                elif value.by_key:
                    (self.after if number in late else self.scores).append(statement)
                else:
                    (self.row if value.by_row else self.block).append(statement)
            if number in rows_read and value.by_key and not value.by_row:
                self.scores.append(self._loaded(number, value.kind))

    def _input(self, number: int, value: _Value) -> None:
        j = value.operands[0]
        if value.operator == "product":
            self.scores.append(f"const Vec<T> v{number} = Vec<T>::loadu(products[{j}] + row * kBlockKeys + i);")
            return
        element = _element(value.kind)
        read = f"<{_stored(self.leaves[j].dtype)}, {element}>(leaves[{j}], place"
        if not value.by_key:
            (self.row if value.by_row else self.block).append(
                f"const {_type(value.kind)} v{number} = one_of{read}, {'row' if value.by_row else '0'});"
            )
        elif value.by_row:
            self.block.append(f"alignas(64) {element} b{number}[kBlockKeys];")
            self.row.append(f"const {element}* k{number} = keys_of{read}, row, b{number});")
            self.scores.append(self._loaded(number, value.kind))
        else:
            self.block.append(f"alignas(64) {element} b{number}[kBlockKeys];")
            self.block.append(f"const {element}* k{number} = keys_of{read}, 0, b{number});")
            self.keys.append(self._loaded(number, value.kind))

    @staticmethod
    def _loaded(number: int, kind: Kind) -> str:
        return f"const {_type(kind)} v{number} = {_type(kind)}::loadu(k{number} + i);"

    def function(self, head: str, begin: Sequence[str], inner: Sequence[str], end: Sequence[str]) -> list[str]:
        """The statements of a row's begin, of each of its vectors, and of its end, among those of the values."""
        each_vector = "for (int64_t i = 0; i < place.columns; i += kLanes<T>) {"
        return [
            f"  static void {head} {{",
            *(f"    {x}" for x in self.block),
            *(["    " + each_vector, *(f"      {x}" for x in self.keys), "    }"] if self.keys else []),
            "    for (int64_t row = 0; row < place.rows; row++) {",
            *(f"      {x}" for x in (*self.row, *begin)),
            "      " + each_vector,
            *(f"        {x}" for x in inner),
            "      }",
            *(f"      {x}" for x in end),
            "    }",
            "  }",
        ]


_PLACE = "const Place& place, [[maybe_unused]] const Tensor* leaves, T* const* products"


def _forward(name: str, values: _Values, score: Any, leaves: Sequence[LeafType], *, softmax: bool) -> list[str]:
    loops = _Loops(values, leaves)
    loops.place([score])
    if not softmax:
        inner = [
            *loops.scores,
            f"const Vec<T> weight = hide_after(place.keys - i, {loops.writer.operand(score, 'float')}, T(0));",
            "weight.store(products[0] + row * kBlockKeys + i);",
        ]
        return loops.function(f"{name}({_PLACE}, T*)", [], inner, [])
    inner = [
        *loops.scores,
        f"const Vec<T> score = hide_after(place.keys - i, {loops.writer.operand(score, 'float')});",
        "score.store(products[0] + row * kBlockKeys + i);",
        "largest = at::vec::clamp_min(score, largest);",
    ]
    begin = ["Vec<T> largest = Vec<T>::loadu(maxima + row * kLanes<T>);"]
    end = ["largest.store(maxima + row * kLanes<T>);"]
    return loops.function(f"{name}({_PLACE}, T* maxima)", begin, inner, end)


def _backward(
    name: str,
    values: _Values,
    score: Any,
    derivatives: Sequence[Any],
    leaves: Sequence[LeafType],
    products: int,
    wanted: Sequence[int],
    *,
    softmax: bool,
) -> list[str]:
    loops = _Loops(values, leaves)
    loops.place([score, *derivatives])
    result = loops.writer.operand(score, "float")
    of_softmax = [
        f"const Vec<T> score = hide_after(place.keys - i, {result});",
        "const Vec<T> weight = exp_nonpositive(score - row_lse);",
        "const Vec<T> gradient = weight * (Vec<T>::loadu(dweights + row * kBlockKeys + i) - row_delta);",
        "const Vec<T> none = weight == Vec<T>(T(0));",  # a key that is not read passes nothing on, whatever it was
    ]
    of_sum = [
        f"const Vec<T> weight = {result};",
        "const Vec<T> gradient = Vec<T>::loadu(dweights + row * kBlockKeys + i);",
        "const Vec<T> none = hide_after(place.keys - i, Vec<T>(T(0))) != Vec<T>(T(0));",
    ]
    inner = [
        *loops.scores,
        *(of_softmax if softmax else of_sum),
        *loops.after,
        *(
            f"const Vec<T> d{n} = choose(none, Vec<T>(T(0)), {loops.writer.operand(x, 'float')});"
            for n, x in enumerate(derivatives)
        ),
        "weight.store(products[0] + row * kBlockKeys + i);",
        "d0.store(dweights + row * kBlockKeys + i);",
        *(f"d{n}.store(products[{n}] + row * kBlockKeys + i);" for n in range(1, products)),
    ]
    begin, end = ["const Vec<T> row_lse(lse[row]), row_delta(delta[row]);"] if softmax else [], []
    for n, j in enumerate(wanted):
        if leaves[j].by_key:
            begin.append(f"T* const sum{n} = sums[{n}].keys(place, row);")
            inner.append(f"add_lanes(sum{n} + i, d{products + n}, place.keys - i);")
        else:
            begin.append(f"Vec<T> sum{n} = Vec<T>::loadu(sums[{n}].lanes + row * kLanes<T>);")
            inner.append(f"sum{n} = sum{n} + d{products + n};")
            end.append(f"sum{n}.store(sums[{n}].lanes + row * kLanes<T>);")
    of_rows = "const T* lse, const T* delta" if softmax else "const T*, const T*"
    arguments = f"{_PLACE}, T* dweights, {of_rows}, [[maybe_unused]] const LeafSums<T>* sums"
    return loops.function(f"{name}({arguments})", begin, inner, end)


def generate(
    program: str,
    derivatives: str | None,
    leaves: Sequence[LeafType],
    products: int,
    wanted: Sequence[int],
    *,
    softmax: bool = True,
) -> str:
    """The struct `Program` of `cpu.cpp`: its `scores` or, with derivatives, its `gradients`. Without a softmax the
    program's result is a weight."""
    identities: dict[Any, int] = {}
    mixed = _Values(leaves, identities)
    result = _run_all(mixed, program, derivatives)[0]
    highest = _Highest(mixed, result if softmax else 0.0)  # which weights are zero is not found out by bounds
    conditions = highest.conditions
    shown = _Values(leaves, identities, {mixed.identity[number]: not low for number, low in conditions.items()})
    function = "scores" if derivatives is None else "gradients"
    lines = [
        "template <typename T>",
        "struct Program {",
        "  using Int = IntOf<T>;",
        f"  static constexpr int64_t kProducts = {products}, kLeaves = {len(leaves)}, kWanted = {len(wanted)};",
        f"  static constexpr bool kSoftmax = {'true' if softmax else 'false'};",
        *_tables(leaves, wanted, highest),
        *_known(mixed, highest),
    ]
    for name, values in (("mixed", mixed), ("shown", shown)):
        score, found = _run_all(values, program, derivatives)
        if derivatives is None:
            lines += _forward(f"{function}_{name}", values, score, leaves, softmax=softmax)
        else:
            lines += _backward(f"{function}_{name}", values, score, found, leaves, products, wanted, softmax=softmax)
        if not conditions:
            lines = [line.replace(f"{function}_mixed(", f"{function}_shown(") for line in lines]
            break
    called = f"{function}_shown(arguments...)"
    lines += [
        "  template <typename... Arguments>",
        f"  static void {function}([[maybe_unused]] bool shown, const Arguments&... arguments) {{",
        f"    {f'shown ? {called} : {function}_mixed(arguments...)' if conditions else called};",
        "  }",
        "};",
    ]
    return "\n".join(lines) + "\n"

"""Scores of an attention as a program: any function of products, positions and tensors, one element at a time.

A program is text, so that an operator can take it as an argument:

    v0 = mul.Tensor(s0, 0.125)
    v1 = gt.Tensor(x0, x1)
    v2 = masked_fill.Scalar(v0, v1, -inf)
    return v2

`s0`, `s1`, … are the products of queries and keys, `x0`, `x1`, … further tensors that broadcast to the scores, `g` the
gradient of the score in a program of derivatives. The functions are ATen's operators. Floating numbers are computed in
one dtype, that of the accumulation; integers are int64.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from nsa_compile.workarounds import TRACING

__all__ = ["OPERATORS", "SPELLED", "Instruction", "Program", "derivative", "parse", "spelled_out"]

aten = torch.ops.aten

_BINARY = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "bitwise_and", "bitwise_or",
           "bitwise_xor")  # fmt: skip
_UNARY = ("neg", "reciprocal", "abs", "sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "tanh", "sigmoid", "relu", "sin",
          "cos", "erf", "sign", "bitwise_not", "logical_not", "floor", "ceil", "clone", "detach", "alias",
          "isnan")  # fmt: skip
_OTHERS = ("maximum.default", "minimum.default", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
           "rsub.Scalar", "silu.default", "logical_and.default", "logical_or.default", "logical_xor.default",
           "clamp.default", "clamp_min.default", "clamp_max.default", "where.self", "where.ScalarSelf",
           "where.ScalarOther", "where.Scalar", "masked_fill.Scalar", "floor_divide.default",
           "scalar_tensor.default")  # fmt: skip

#: The operators of a program, `name.overload`; `to` is a cast to `float`, `int` or `bool`.
OPERATORS = frozenset(
    {f"{name}.{overload}" for name in _BINARY for overload in ("Tensor", "Scalar")}
    | {f"{name}.default" for name in _UNARY}
    | set(_OTHERS)
    | {"to"}
)

# What the derivatives of these operators are made of.
_DECOMPOSED: Any = get_decompositions(
    [
        aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, aten.silu_backward, aten.full_like,
        aten.zeros_like, aten.ones_like, aten.addcmul, aten.sgn,
    ]
)  # fmt: skip

# Functions of one number that are programs themselves, in values and derivatives.
SPELLED = (aten.gelu.default, aten.leaky_relu.default, aten.hardtanh.default)

# Operators whose results have no gradient.
_WITHOUT_GRADIENT = frozenset(
    {"detach", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor",
     "logical_not", "logical_and", "logical_or", "logical_xor"}
)  # fmt: skip

Operand = str | float | int | bool


@dataclass(frozen=True)
class Instruction:
    """One line: `v<i> = operator(operands)`."""

    operator: str
    operands: tuple[Operand | None, ...]

    def __str__(self) -> str:
        return f"{self.operator}({', '.join(_written(x) for x in self.operands)})"


@dataclass(frozen=True)
class Program:
    """Instructions, and what they return: names or numbers."""

    instructions: tuple[Instruction, ...]
    results: tuple[Operand, ...]

    def __str__(self) -> str:
        lines = [f"v{i} = {instruction}" for i, instruction in enumerate(self.instructions)]
        return "\n".join([*lines, f"return {', '.join(_written(x) for x in self.results)}"])

    def passes_on(self, name: str) -> bool:
        """Whether a gradient of the result reaches an operand: what is only compared gets none."""
        reached: set[Any] = {name}
        for i, instruction in enumerate(self.instructions):
            kind = instruction.operator.partition(".")[0]
            if kind not in _WITHOUT_GRADIENT and not reached.isdisjoint(instruction.operands):
                reached.add(f"v{i}")
        return not reached.isdisjoint(self.results)

    def evaluate(self, given: Mapping[str, Tensor], dtype: torch.dtype) -> list[Any]:
        """The results, of tensors that broadcast; what is floating is computed in `dtype`."""
        values: dict[str, Any] = {name: _as(x, dtype) for name, x in given.items()}

        def value(x: Any) -> Any:
            return values[x] if isinstance(x, str) and x in values else x

        for i, instruction in enumerate(self.instructions):
            values[f"v{i}"] = _apply(instruction.operator, [value(x) for x in instruction.operands], dtype)
        return [value(x) for x in self.results]


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.bool:
        return x
    return x.to(dtype if x.dtype.is_floating_point else torch.int64)


def _apply(operator: str, operands: list[Any], dtype: torch.dtype) -> Any:
    if operator == "to":
        x, kind = operands
        return x.to({"float": dtype, "int": torch.int64, "bool": torch.bool}[kind])
    name, _, overload = operator.partition(".")
    if overload in ("Tensor", "self") or name in ("maximum", "minimum", "logical_and", "logical_or", "logical_xor"):
        operands = [_number(x, dtype) for x in operands]
    elif operator not in ("scalar_tensor.default", "pow.Scalar"):
        # Of `where` the first is a condition, and the others are numbers where the overload says so.
        places = {"ScalarSelf": (0, 2), "ScalarOther": (0, 1)}.get(overload, (0,))
        operands = [_number(x, dtype) if i in places else x for i, x in enumerate(operands)]
    result = _overload(operator)(*operands)
    return result.to(dtype) if result.dtype.is_floating_point else result


def _number(x: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor, for operators that take no number in its place."""
    if isinstance(x, Tensor):
        return x
    kinds = {bool: torch.bool, int: torch.int64}
    return torch.scalar_tensor(x, dtype=kinds.get(type(x), dtype))


@cache
def _overload(operator: str) -> Any:
    name, _, overload = operator.partition(".")
    return getattr(getattr(aten, name), overload)


def _written(x: Operand | None) -> str:
    return x if isinstance(x, str) else repr(x)


@cache
def parse(text: str) -> Program:
    """A program from its text.

    Raises:
        ValueError: the text is no program.
    """
    lines = text.strip().splitlines()
    try:
        instructions = []
        for i, line in enumerate(lines[:-1]):
            (statement,) = ast.parse(line.strip()).body
            assert isinstance(statement, ast.Assign)
            assert isinstance(statement.value, ast.Call)
            assert ast.unparse(statement.targets[0]) == f"v{i}"
            call = statement.value
            instructions.append(Instruction(ast.unparse(call.func), tuple(_read(x) for x in call.args)))
        first, _, rest = lines[-1].strip().partition(" ")
        assert first == "return"
        returned = ast.parse(f"({rest},)", mode="eval").body
        assert isinstance(returned, ast.Tuple)
        results: Any = tuple(_read(x) for x in returned.elts)
    except (AssertionError, SyntaxError, ValueError, IndexError):
        raise ValueError(f"no program of scores: {text!r}") from None
    for instruction in instructions:
        if instruction.operator not in OPERATORS:
            raise ValueError(f"a program of scores has no operator {instruction.operator}")
    return Program(tuple(instructions), results)


def _read(x: ast.expr) -> Any:
    if isinstance(x, ast.Name):
        return float("inf") if x.id == "inf" else float("nan") if x.id == "nan" else x.id
    if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub):
        return -_read(x.operand)
    if isinstance(x, ast.Constant):
        return x.value
    raise ValueError


@cache
def derivative(text: str, wanted: tuple[str, ...], integers: tuple[str, ...], booleans: tuple[str, ...]) -> str:
    """The program of the derivatives of a program's result by some of its operands, times `g`.

    Args:
        text: the program.
        wanted: names of floating operands.
        integers: names of those that are integers; booleans: of those that are booleans. All others are floating.

    Raises:
        ValueError: the derivatives are no program.
    """
    program = parse(text)
    names = sorted({x for i in program.instructions for x in i.operands if isinstance(x, str) and x[0] in "sx"})
    names += [name for name in wanted if name not in names]
    kinds: dict[str, torch.dtype] = {**dict.fromkeys(integers, torch.int64), **dict.fromkeys(booleans, torch.bool)}

    def differentiate(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(names, tensors, strict=False))
        leaves = [given[name].detach().requires_grad_() for name in wanted]
        (score,) = program.evaluate({**given, **dict(zip(wanted, leaves, strict=True))}, torch.float64)
        if not isinstance(score, Tensor) or not score.requires_grad:
            return [torch.zeros_like(x) for x in leaves]
        grads = torch.autograd.grad(score, leaves, tensors[-1], allow_unused=True)
        return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, grads, strict=True)]

    with TRACING, _disable_current_modes(), torch.enable_grad():  # whoever traces what calls this is not to see it
        # Only the operators are recorded.
        examples = [torch.ones(2, dtype=torch.float64).to(kinds.get(name, torch.float64)) for name in (*names, "g")]
        written = make_fx(differentiate, _DECOMPOSED)(*examples)  # some derivatives write in place
        graph = make_fx(functionalize(written), _DECOMPOSED)(*examples)
    return str(from_graph(graph.graph, (*names, "g")))


def spelled_out(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Program:
    """The program of one of `SPELLED` with its further arguments; of the number `x`."""
    decompositions: Any = get_decompositions(SPELLED)
    with TRACING, _disable_current_modes():
        traced = make_fx(lambda x: [function(x, *arguments, **named)], decompositions)
        return from_graph(traced(torch.ones(2, dtype=torch.float64)).graph, ["x"])


def from_graph(graph: fx.Graph, names: Sequence[str]) -> Program:
    """A program of a graph of ATen's operators on single elements; `names` are those of its inputs."""
    graph.eliminate_dead_code()
    operands: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), names, strict=True))
    instructions: list[Instruction] = []
    results: Any = ()
    for node in graph.nodes:
        if node.op == "output":
            returned: Any = node.args[0]
            results = tuple([operands[x] if isinstance(x, fx.Node) else x for x in returned])
        elif node.op == "call_function":
            operands[node] = _recorded(node, operands, instructions)
    return Program(tuple(instructions), results)


def _recorded(node: fx.Node, operands: dict[fx.Node, Any], instructions: list[Instruction]) -> Any:
    """The name or number of what a node computes, recorded as an instruction unless it is a copy."""
    target: Any = node.target
    name = f"{target._schema.name.removeprefix('aten::')}.{target._overloadname}"
    args = [operands.get(x, x) if isinstance(x, fx.Node) else x for x in node.args]
    if name in ("clone.default", "detach.default", "alias.default"):
        return args[0]
    if name in ("scalar_tensor.default", "full.default", "full_like.default"):
        return args[0] if name == "scalar_tensor.default" else args[1]
    if name == "_to_copy.default":
        name, args = "to", [args[0], _kind(node.kwargs["dtype"])]
    if name == "div.Tensor_mode" and node.kwargs["rounding_mode"] == "floor":
        name = "floor_divide.default"
    if name not in OPERATORS:
        raise ValueError(f"a program of scores has no operator {name}")
    recorded: Any = args
    instructions.append(Instruction(name, tuple(recorded)))
    return f"v{len(instructions) - 1}"


def _kind(dtype: Any) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"

"""A grammar of whole models around `nsa_compile.scan`: what a stranger may write, drawn from a seed.

`tests/step_programs.py` draws what the compiler promises. This one draws what torch allows: statements before, inside
and after scans, in place or not, on inputs, intermediates, masks, step indices, buffers and through views; random
operators; layers, buffers and tied weights; several scans; caches and recurrences of many kinds; dtypes; and the ways
in which models are called. Nothing here knows the passes: the only rule is what eager torch does.

A program is Python source that stands alone once `scan` is given. It defines

    CALLS                (S, B) of each call
    NESTED, FULLGRAPH    how it is compiled
    MODE                 "grad", "no_grad", "inference_mode" or "checkpoint" around each call
    arguments(S, B)      keyword arguments of a call, and the tensors they are made of
    model, run           the module that owns the state, and what is compiled: `run(**arguments)` gives a dict

Each statement stands on lines of its own and ends in `#: piece`, the entry of the grammar that drew it, so that
`tests/model_judge.py` can drop statements and name what is left. Carries, inputs and outputs of a scan are dicts that
are filled line by line for the same reason. Not every program is legal in eager mode; the judge passes over those.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

Shape = tuple[str, ...]  # sizes as source: "S", "B", "G", "D", or a number

HEADER = """\
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
"""


@dataclass(frozen=True)
class Program:
    """Program `number` of seed `seed`; `pieces` are the entries of the grammar that it is made of."""

    seed: int
    number: int
    source: str
    pieces: frozenset[str]


@dataclass(frozen=True)
class Value:
    """A tensor that a statement may use."""

    name: str
    shape: Shape
    kind: str = "float"  # float, int or bool
    fixed: bool = False  # writing to it is an error in eager mode: a leaf that requires a gradient, or an expanded view


# ------------------------------------------------------------------------------------------------- tables of statements
# {v} is a value, {o} another of its shape and kind (or itself), {n} a fresh name.

NEW_FLOAT = {
    "scale": "{v} * 2",
    "add": "{v} + {o}",
    "multiply": "{v} * {o}",
    "tanh": "torch.tanh({v})",
    "sigmoid": "{v}.sigmoid()",
    "relu": "F.relu({v})",
    "gelu": "F.gelu({v})",
    "clone": "{v}.clone()",
    "flip": "{v}.flip(0)",
    "roll": "{v}.roll(1, 0)",
    "cumsum": "{v}.cumsum(0)",
    "where positive": "torch.where({v} > 0, {v}, {o})",
    "masked fill": "{v}.masked_fill({v} < 0, 0.0)",
    "linear": "self.lin({v})",
    "matmul": "{v} @ self.w",
    "tied": "{v} @ self.lin.weight",
    "tied transposed": "({v} @ self.w.T) / 2",
    "layer norm": "self.norm({v})",
    "batch norm": "self.bn({v}.reshape(-1, D)).view({v}.shape)",
    "literal": "{v} * torch.tensor([0.5] * D, dtype={v}.dtype)",
    "literal scalar": "{v} + torch.tensor(0.5)",
    "global": "{v} * TABLE",
    "global parameter": "{v} * GAIN",
    "number": "{v} * NUMBER",
    "buffer": "{v} + self.mean",
    "round trip": "{v}.float().to({v}.dtype)",
    "detach new": "{v} * {v}.detach()",
    "normalize": "F.normalize({v}, dim=-1, eps=0.1)",
    "softmax": "torch.softmax({v}, -1)",
    "empty like": "torch.empty_like({v}).copy_({v})",
    "zeros then fill": "torch.zeros_like({v}).add_({v})",
    "stack": "torch.stack([{v}, {o}]).sum(0)",
    "unbind": "torch.stack([row * 2 for row in {v}.unbind(-1)], -1)",
    "chunk": "torch.cat(list({v}.chunk(2, -1))[::-1], -1)",
    "boolean": "(({v} > 0) & ({o} < 1)).to({v}.dtype)",
    "einsum": 'torch.einsum("...i,ij->...j", {v}, self.w)',
    "item free scalar": "{v} * {o}.mean()",
}
VIEWS = {
    "slice all": "{v}[:]",
    "two transposes": "{v}.transpose(0, -1).transpose(0, -1)",
    "transposed copy": "{v}.transpose(0, -1).contiguous().transpose(0, -1)",
    "reshape": "{v}.reshape({v}.shape)",
    "view": "{v}.view({v}.shape)",
    "flat view": "{v}.view(-1).view({v}.shape)",
    "flat reshape": "{v}.reshape(-1).reshape({v}.shape)",
    "unsqueeze squeeze": "{v}.unsqueeze(0).squeeze(0)",
    "detach": "{v}.detach()",
    "data": "{v}.data",
    "expand as": "{v}.expand_as({v})",
    "narrow": "{v}.narrow(0, 0, {v}.shape[0])",
    "movedim": "{v}.movedim(0, -1).movedim(-1, 0)",
    "as strided": "{v}.as_strided({v}.shape, {v}.stride())",
    "unfold": "{v}.unfold(0, 1, 1).squeeze(-1)",
    "alias": "{v}",
    "view as": "{v}.view_as({v})",
}
WRITES_FLOAT = {
    "mul_": "{v}.mul_(3)",
    "add_": "{v}.add_({o}, alpha=0.5)",
    "augmented": "{v} += {o} * 0.5",
    "augmented slice": "{v}[1:] *= 2",
    "masked_fill_": "{v}.masked_fill_({v} < 0, 0.25)",
    "zero slice": "{v}[:2].zero_()",
    "zero_": "{v}.zero_()",
    "fill_": "{v}.fill_(0.5)",
    "copy_": "{v}.copy_({o} * 2)",
    "copy_ row": "{v}.copy_({o}[0] * 2)",
    "clamp_": "{v}.clamp_(min=0)",
    "relu_": "{v}.relu_()",
    "torch relu_": "torch.relu_({v})",
    "relu inplace": "F.relu({v}, inplace=True)",
    "dropout none": "F.dropout({v}, 0.5, training=False)",
    "tanh_": "{v}.tanh_()",
    "neg_": "{v}.neg_()",
    "out=": "torch.mul({v}.detach(), 2, out={v})",
    "out= add": "torch.add({o}.detach(), 1, out={v})",
    "set row": "{v}[0] = 0.5",
    "set last column": "{v}[..., -1] = {o}[..., 0] * 2",
    "set masked": "{v}[{v} > 0.5] = 0.5",
    "set rows": "{v}[torch.tensor([0])] = {o}[:1] * 2",
    "set slice": "{v}[1:] = {o}[:-1] * 0.5",
    "set strided": "{v}[::2] = 1.5",
    "set ellipsis": "{v}[...] = {o} + 1",
    "index_add_": "{v}.index_add_(0, torch.zeros(1, dtype=torch.int64), {o}[:1] * 2)",
    "index_fill_": "{v}.index_fill_(0, torch.tensor([0]), 0.5)",
    "index_copy_": "{v}.index_copy_(0, torch.tensor([0]), {o}[-1:] * 2)",
    "index_put_": "{v}.index_put_((torch.tensor([0, 0]),), {o}[:1] * 2, accumulate=True)",
    "scatter_": "{v}.scatter_(0, torch.zeros({v}[:1].shape, dtype=torch.int64), 0.75)",
    "through transpose": "{v}.transpose(0, -1).mul_(2)",
    "through view": "{v}.view(-1)[:2].zero_()",
    "through select": "{v}.select(-1, 0).add_(1)",
    "through chain": "{v}[1:].transpose(0, -1)[..., :1].mul_(3)",
    "through unbind": "{v}.unbind(0)[0].mul_(2)",
    "through chunk": "{v}.chunk(2, -1)[0].zero_()",
    "through diagonal": "{v}.view({v}.shape[0], -1).diagonal().fill_(2)",
    "through flatten": "{v}.flatten()[:1].fill_(3)",
    "through expand": "{v}[..., :1].expand({v}.shape)[..., 0].add_(1)",
    "detach write": "{v}.detach().mul_(2)",
    "data write": "{v}.data.mul_(2)",
    "data slice": "{v}.data[:1].fill_(0.5)",
    "no grad write": "with torch.no_grad():\n    {v}.mul_(2)",
    "no grad copy": "with torch.no_grad():\n    {v}.copy_({o} + 1)",
    "swap halves": "{v}[:1], {v}[-1:] = {v}[-1:].clone(), {v}[:1].clone()",
    "chained": "{v}.mul_(2).add_(1)",
    "lerp_": "{v}.lerp_({o} * 2, 0.25)",
    "addcmul_": "{v}.addcmul_({o}, {o}, value=0.1)",
    "in place where": "torch.where({v} > 0, {v}.detach() * 2, {v}.detach(), out={v}.detach())",
    "put_": "{v}.put_(torch.tensor([0]), torch.ones(1, dtype={v}.dtype))",
    "masked_scatter_": "{v}.masked_scatter_({v} > 0, {o}.detach().abs())",
    "cumsum_": "{v}.cumsum_(0)",
    "tril_": "{v}.tril_()",
    "foreach": "torch._foreach_mul_([{v}], 2.0)",
    "resize-free set": "{v}.t_() if {v}.dim() == 2 and {v}.shape[0] == {v}.shape[1] else {v}.mul_(1)",
}
NEW_INT = {
    "int plus": "{v} + 1",
    "int minus": "{v} - 1",
    "int half": "{v} // 2",
    "int modulo": "{v} % 3",
    "int clamp": "{v}.clamp(max=2)",
    "int flip": "{v}.flip(0)",
    "int clone": "{v}.clone()",
    "int32": "{v}.int()",
    "int cast": "{v}.to(torch.int16).long()",
    "int where": "torch.where({v} > 2, {v} - 1, {v})",
    "int cumsum": "torch.ones_like({v}).cumsum(0) - 1",
    "int sort": "{v}.sort(dim=0)[0]",
}
WRITES_INT = {
    "int set tail": "{v}[2:] = 0",
    "int set head": "{v}[0] = 1",
    "int remainder_": "{v}.remainder_(3)",
    "int fill_": "{v}.fill_(0)",
    "int clamp_": "{v}.clamp_(max=2)",
    "int add_": "{v}.add_(1)",
    "int through view": "{v}.view(-1)[:1].add_(1)",
    "int copy_": "{v}.copy_({v}.flip(0))",
    "int where out": "torch.sub({v}, 1, out={v})",
    "int masked_fill_": "{v}.masked_fill_({v} > 2, 1)",
    "int mul_": "{v}.mul_(2)",
    "int slice slice": "{v}[1:][:1].fill_(0)",
    "int augmented": "{v} //= 2",
    "int zero_": "{v}.zero_()",
    "int index_add_": "{v}.index_add_(0, torch.tensor([0]), {v}[-1:].clone())",
}
NEW_BOOL = {
    "not": "~{v}",
    "and": "{v} & {o}.flip(0)",
    "or": "{v} | {o}.t() if {v}.dim() == 2 and {v}.shape[0] == {v}.shape[1] else {v}",
    "bool clone": "{v}.clone()",
    "bool roll": "{v}.roll(1, -1)",
    "bool float": "{v}.to(torch.float64).cumsum(-1) > 0",
}
WRITES_BOOL = {
    "triu_": "{v}.triu_()",
    "tril_ bool": "{v}.tril_()",
    "fill_diagonal_": "{v}.fill_diagonal_(True)",
    "bool set column": "{v}[..., 0] = True",
    "bool set row": "{v}[:1] = False",
    "logical_not_": "{v}.logical_not_()",
    "logical_and_": "{v}.logical_and_({o}.flip(0))",
    "bool fill_": "{v}.fill_(True)",
    "bool augmented": "{v} |= {o}.flip(-1)",
    "bool transposed": "{v}.t().triu_()",
    "bool copy_": "{v}.copy_({v}.roll(1, 0))",
    "bool masked": "{v}[{v}] = False",
    "bool diagonal": "{v}.diagonal().fill_(True)",
    "bool xor": "{v}.bitwise_xor_({o}.flip(0))",
}
NEW = {"float": NEW_FLOAT, "int": NEW_INT, "bool": NEW_BOOL}
WRITES = {"float": WRITES_FLOAT, "int": WRITES_INT, "bool": WRITES_BOOL}
RANDOM = {
    "dropout": "F.dropout({v}, 0.5)",
    "dropout module": "self.drop({v})",
    "bernoulli": "{v} * torch.bernoulli(torch.full_like({v}, 0.5))",
    "bernoulli_": "{v} * torch.empty_like({v}).bernoulli_(0.5)",
    "multinomial": "{v} * torch.multinomial(torch.ones(3), 2)[0]",
    "poisson": "{v} + torch.poisson(torch.ones({v}.shape, dtype={v}.dtype))",
    "normal": "{v} + torch.normal(0.0, 1.0, {v}.shape, dtype={v}.dtype)",
    "normal_": "{v} + torch.empty_like({v}).normal_()",
    "rand": "{v} * torch.rand({v}.shape, dtype={v}.dtype)",
    "randn_like": "{v} + torch.randn_like({v})",
    "randint": "{v} * torch.randint(0, 3, {v}.shape)",
    "randperm": "{v}[torch.randperm({v}.shape[0])]",
    "uniform_": "{v} + torch.zeros_like({v}).uniform_(-1, 1)",
    "exponential_": "{v} + torch.zeros_like({v}).exponential_()",
    "random_": "{v} + torch.zeros({v}.shape[-1]).random_(0, 3)",
    "rrelu": "F.rrelu({v}, training=True)",
    "gumbel": "F.gumbel_softmax({v}, dim=-1)",
    "alpha dropout": "F.alpha_dropout({v}, 0.5, training=True)",
    "rand generator": "{v} * torch.rand({v}.shape, generator=GENERATOR, dtype={v}.dtype)",
    "bernoulli generator": "{v} * torch.bernoulli(torch.full_like({v}, 0.5), generator=GENERATOR)",
    "unused draw": "(torch.rand(2), {v})[1]",
}
# Statements on the module's state. They read and write buffers in the middle of the model.
STATE = {
    "count calls": "self.count.add_(1)",
    "count calls augmented": "self.count += 1",
    "running mean": "self.mean.lerp_({v}.detach().reshape(-1, D).mean(0).to(self.mean.dtype), 0.1)",
    "assign buffer": "self.mean = self.mean * 0.9",
    "assign count": "self.count = self.count + 1",
    "buffer copy_": "self.mean.copy_({v}.detach().reshape(-1, D).sum(0))",
    "buffer slice": "self.mean[:1].fill_(0.5)",
    "global write": "TABLE.mul_(1.5)",
    "global slice write": "TABLE[:1] = 0.5",
    "parameter write": "with torch.no_grad():\n    self.w.mul_(0.9)",
    "parameter data": "self.w.data.add_(0.1)",
}

# What a step may not hold: it reads a number out of a tensor, or writes to what it was given. Drawn rarely, since such
# a program shows nothing else.
REFUSED = {
    "read to t",
    "read item",
    "mask index",
    "mask closed over",
    "item",
    "in place on carry",
    "written row",
    "count in step",
    "batch norm inside",
    "batch norm in step",
}


# ----------------------------------------------------------------------------------------------------------- the writer


@dataclass
class Writer:
    """The source of a program while it is drawn."""

    rng: random.Random
    indent: int = 2
    lines: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)  # lines of `arguments`
    names: list[str] = field(default_factory=list)  # of the arguments
    modules: dict[str, str] = field(default_factory=dict)  # attribute -> constructor
    scope: list[Value] = field(default_factory=list)
    count: int = 0
    random_allowed: bool = False
    usual: float = 0.5  # share of the first entry of a table of alternatives
    token: Shape = ("B", "D")
    dtype: str = "torch.float64"

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *choices):
        return self.rng.choice(choices)

    def any_of(self, table: dict[str, Any]) -> str:
        """An entry of a table."""
        piece = self.pick(*table)
        return piece if piece not in REFUSED or self.chance(0.1) else self.any_of(table)

    def likely(self, usual: str, table: dict[str, Any]) -> str:
        """The usual entry of a table, or any."""
        return usual if self.chance(self.usual) else self.any_of(table)

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def say(self, source: str, piece: str) -> None:
        """A statement, over several lines if need be."""
        for line in source.split("\n"):
            self.lines.append("    " * self.indent + f"{line}  #: {piece}")

    def let(self, prefix: str, source: str, piece: str) -> str:
        name = self.fresh(prefix)
        self.say(f"{name} = {source}", piece)
        return name

    def define(self, prefix: str, source: str, piece: str, shape: Shape, kind: str = "float", fixed: bool = False):
        value = Value(self.let(prefix, source, piece), shape, kind, fixed)
        self.scope.append(value)
        return value

    def find(self, kind: str | None = None, shape: Shape | None = None, writable: bool = False) -> Value | None:
        """A value in scope, later ones rather than early ones."""
        fits = [
            v
            for v in self.scope
            if (kind is None or v.kind == kind) and (shape is None or v.shape == shape) and not (writable and v.fixed)
        ]
        return fits[-1 - min(int(self.rng.expovariate(0.7)), len(fits) - 1)] if fits else None

    def fill(self, template: str, value: Value) -> str:
        """A template with its holes filled."""
        for name in ("lin", "norm", "bn", "drop"):
            if f"self.{name}" in template:
                self.module(name)
        other = self.find(value.kind, value.shape) or value
        return template.replace("{v}", value.name).replace("{o}", other.name)

    def module(self, name: str) -> str:
        self.modules[name] = MODULES[name]
        return f"self.{name}"

    def argument(self, shape: Shape, kind: str = "float") -> Value:
        """A new argument of the model: one of the ways a caller may own a tensor."""
        name = self.fresh("x" if kind == "float" else kind[0])
        size = f"({', '.join(shape)},)"
        draws = {
            # Rounded to bfloat16, so that the same numbers can be had in any dtype.
            "float": f"torch.randn({size}, dtype=torch.float64).bfloat16().to({self.dtype})",
            "int": f"torch.randint(0, 3, {size})",
            "bool": f"(torch.rand({size}) > 0.3)",
        }
        draw, fixed = draws[kind], False
        form = self.pick(
            "leaf", "leaf", "leaf", "plain", "computed", "strided", "view of a base", "view of a plain base"
        )
        if kind != "float":
            form = self.pick("plain", "plain", "strided", "view of a plain base")
        if form == "leaf":
            self.inputs.append(f"leaves['{name}'] = args['{name}'] = {draw}.requires_grad_()  #: argument")
            fixed = True
        elif form == "plain":
            self.inputs.append(f"leaves['{name}'] = args['{name}'] = {draw}  #: argument")
        elif form == "computed":
            self.inputs.append(f"leaves['{name}'] = {draw}.requires_grad_()  #: argument")
            self.inputs.append(f"args['{name}'] = leaves['{name}'] * 1  #: computed argument")
        elif form == "strided":
            flipped = f"({', '.join(reversed(shape))},)"
            dims = ", ".join(str(d) for d in reversed(range(len(shape))))
            self.inputs.append(
                f"leaves['{name}'] = args['{name}'] = {draw.replace(size, flipped)}.permute({dims})  #: strided"
            )
        else:
            base = draw.replace(size, f"({shape[0]} + 2, {', '.join(shape[1:])})")
            grad = ".requires_grad_()" if form == "view of a base" else ""
            view = f"leaves['{name}'][1:-1]"
            if grad and self.chance(0.5):
                view = f"(leaves['{name}'] * 1)[1:-1]"
            elif grad:
                fixed = True
            self.inputs.append(f"leaves['{name}'] = {base}{grad}  #: view argument")
            self.inputs.append(f"args['{name}'] = {view}  #: view argument")
        self.names.append(name)
        value = Value(name, shape, kind, fixed)
        self.scope.append(value)
        return value

    def twin(self, value: Value) -> Value:
        """The same tensor, or a part of the same memory, passed a second time."""
        name = self.fresh("x")
        view = self.pick("", "", ".detach()", "[:]", ".view_as({0})", ".transpose(0, -1).transpose(0, -1)")
        self.inputs.append(
            f"args['{name}'] = args['{value.name}']{view.format(f'args[{value.name!r}]')}  #: twin argument"
        )
        self.names.append(name)
        twin = replace(value, name=name)
        self.scope.append(twin)
        return twin

    # ------------------------------------------------------------------------------- statements outside of steps

    def statement(self) -> None:
        """One statement on a value in scope."""
        value = self.find(self.pick("float", "float", "float", "int", "bool"))
        if value is None:
            return
        forms = ["new"] * 3 + ["view"] * 2 + ["write"] * 4 + ["state"] + ["random"] * self.random_allowed
        form = self.pick(*forms)
        if form == "write":
            target = self.find(value.kind, writable=True)
            if target is None:
                return
            if target.kind == "float" and self.chance(0.2) and not target.fixed:  # read before the write
                self.define("before", f"{target.name} * 1.5", "read before", target.shape)
            piece = self.any_of(WRITES[target.kind])
            self.say(self.fill(WRITES[target.kind][piece], target), piece)
        elif form == "view":
            piece = self.any_of(VIEWS)
            self.define("h", self.fill(VIEWS[piece], value), piece, value.shape, value.kind, fixed=value.fixed)
        elif form == "state" and value.kind == "float" and value.shape[-1:] == ("D",):
            piece = self.any_of(STATE)
            self.say(self.fill(STATE[piece], value), piece)
        elif form == "random" and value.kind == "float":
            piece = self.any_of(RANDOM)
            self.define("h", self.fill(RANDOM[piece], value), piece, value.shape)
        elif value.shape[-1:] == ("D",) or value.kind != "float":
            piece = self.any_of(NEW[value.kind])
            self.define("h", self.fill(NEW[value.kind][piece], value), piece, value.shape, value.kind)

    def floats(self, shape: Shape) -> Value:
        """A float value of a shape: one in scope, or a new argument."""
        found = self.find("float", shape)
        return found if found is not None and self.chance(0.8) else self.argument(shape)


MODULES = {
    "lin": "nn.Linear(D, D, dtype=DTYPE)",
    "norm": "nn.LayerNorm(D, dtype=DTYPE)",
    "bn": "nn.BatchNorm1d(D, dtype=DTYPE)",
    "drop": "nn.Dropout(0.5)",
    "emb": "nn.Embedding(5, D, dtype=DTYPE)",
    "gru": "nn.GRUCell(D, D, dtype=DTYPE)",
}


# ------------------------------------------------------------------------------------------------------- steps of scans


@dataclass
class Step:
    """The body of a step while it is drawn; `c` is the carry, `n` the next one, `x` the row of the inputs."""

    w: Writer
    carry: dict[str, str] = field(default_factory=dict)  # key -> first value
    xs: dict[str, str] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)  # sources of values of the token's shape
    outputs: dict[str, Shape | None] = field(default_factory=dict)  # key -> shape of a row, if it is of floats
    shapes: dict[str, tuple[Shape, str]] = field(default_factory=dict)  # of the carries, with their kind
    before: list[tuple[str, str]] = field(default_factory=list)  # statements before the scan, with their pieces

    @property
    def token(self) -> Shape:
        return self.w.token

    def value(self) -> str:
        v = self.w.pick(*self.values[-4:])
        return self.w.pick(v, v, f"({v} * 2)", f"torch.tanh({v})", f"({v} @ self.w)")

    def let(self, prefix: str, source: str, piece: str) -> str:
        return self.w.let(prefix, source, piece)

    def emit(self, source: str, piece: str) -> str:
        """A value of the token's shape, for later units and, mostly, an output."""
        name = self.let("y", source, piece)
        self.values.append(name)
        if self.w.chance(0.8):
            self.out(name, piece, self.token)
        return name

    def out(self, source: str, piece: str, shape: Shape | None = None) -> None:
        key = self.w.fresh("y")
        self.outputs[key] = shape
        self.w.say(f'ys["{key}"] = {source}', piece)

    def new_carry(self, shape: Shape, first: str | None = None, kind: str = "float") -> str:
        """The source of a carry in the step; `first` is its first value."""
        key = self.w.fresh("c")
        size = f"({', '.join(shape)}{',' if len(shape) == 1 else ''})"
        if first is None:
            first = self.w.pick(
                f"torch.zeros({size}, dtype=DTYPE)",
                f"torch.zeros({size}, dtype=DTYPE)",
                f"torch.full({size}, 0.5, dtype=DTYPE)",
                f"torch.zeros((), dtype=DTYPE).expand({size})",
                "input",
                "input",
            )
        if first == "input":
            found = self.w.find("float", shape)
            first = found.name if found and self.w.chance(0.5) else self.w.argument(shape).name
        self.carry[key] = first
        self.shapes[key] = (shape, kind)
        return f'c["{key}"]'

    def update(self, carry: str, source: str, piece: str) -> None:
        self.w.say(f"{carry.replace('c[', 'n[', 1)} = {source}", piece)

    def time(self) -> str:
        if "t" not in self.xs:
            index = self.w.find("int", ("S",)) if self.w.chance(0.6) else None
            self.xs["t"] = index.name if index else "torch.arange(S)"
        return 'x["t"]'

    def other_xs(self, key: str, shape: Shape, kind: str, fallback: str) -> str:
        """A row of another input of the scan: a value in scope, or made on the spot."""
        found = self.w.find(kind, shape) if self.w.chance(0.6) else None
        self.xs.setdefault(key, found.name if found else fallback)
        return f'x["{key}"]'


SLOTS = {
    "slot": "{t}",
    "slot ring": "({t} % {R})",
    "slot shifted": "(({t} + 1) % {R})",
    "slot halves": "({t} // 2)",
    "slot backwards": "({R} - 1 - {t}).clamp(min=0)",
    "slot clamped": "{t}.clamp(max={R} - 1)",
    "slot spread": "(({t} * 2) % {R})",
    "slot constant": "torch.tensor(0)",
    "slot by data": "(({y} > 0).sum() % {R})",
}
PREDICATES = {
    "when odd": "{t} % 2 == 1",
    "when late": "{t} >= 1",
    "when first": "{t} == 0",
    "when data": "{y}.sum() > 0",
    "when flag": "flag",
}
# {k} cache, {row} new row with the cache's dimensions, {y} the token, {i} the slot, {p} the dimension of the rows.
CACHE_WRITES = {
    "write where": "torch.where({hot}, {row}, {k})",
    "write where not": "torch.where(~{hot}, {k}, {row})",
    "write masked": "{k}.masked_fill({hot}, 0.0) + {hot} * {row}",
    "write product": "{k} * (1 - {hot}.to({k}.dtype)) + {hot}.to({k}.dtype) * {row}",
    "write lerp": "torch.lerp({k}, {row}.expand_as({k}), {hot}.to({k}.dtype))",
    "write index_copy": "{k}.index_copy({p}, {i}.view(1), {row})",
    "write index_copy twice": "{k}.index_copy({p}, torch.stack([{i}, {i}]), torch.cat([{row}, {row} * 2], {p}))",
    "write scatter": "{k}.scatter({p}, {i}.expand({row}.shape), {row})",
    "write scatter_add": "{k}.scatter_add({p}, {i}.expand({row}.shape), {row})",
    "write index_add": "{k}.index_add({p}, {i}.view(1), {row})",
    "write index_fill": "{k}.index_fill({p}, {i}.view(1), 0.5)",
    "write index_put": "{k}.movedim({p}, 0).index_put(({i}.view(1),), {row}.movedim({p}, 0)).movedim(0, {p})",
    "write index_put adding": "{k}.movedim({p}, 0).index_put(({i},), {y}, accumulate=True).movedim(0, {p})",
    "write cat shift": "torch.cat([{k}.narrow({p}, 1, {k}.shape[{p}] - 1), {row}], {p})",
    "write roll": "{k}.roll(-1, {p}).index_copy({p}, torch.tensor([{k}.shape[{p}] - 1]), {row})",
    "write slice_scatter": "torch.slice_scatter({k}, {row}, {p}, 0, 1)",
    "write select_scatter": "torch.select_scatter({k}, {y}, {p}, 0)",
}
# Statements on a copy of the cache, {n}.
CACHE_STATEMENTS = {
    "write set item": "{n}[{colons}{i}] = {y}",
    "write set item list": "{n}[{colons}{i}.view(1)] = {row}",
    "write index_copy_": "{n}.index_copy_({p}, {i}.view(1), {row})",
    "write through select": "{n}.select({p}, 0).copy_({y})",
    "write through index": "{n}.movedim({p}, 0)[{i}] = {y}",
    "write narrow copy_": "{n}.narrow({p}, 0, 1).copy_({row})",
    "write masked set": "{n}[{hot}.expand_as({n})] = 0.5",
}


def cache(s: Step) -> None:
    """A cache of rows, written once a step or less, and its readers."""
    w, y = s.w, s.value()
    p = len(s.token) - 1 if w.chance(w.usual) else w.rng.randrange(len(s.token))
    rows = "S" if w.chance(w.usual) else w.pick("S", "S", "(S + 1)", "3", "4")
    shape = (*s.token[:p], rows, *s.token[p:])
    k, t = s.new_carry(shape), s.time()
    new = write_rows(s, k, y, t, p, rows)
    s.update(k, new, "cache")
    for _ in range(w.pick(1, 1, 2)):
        read_rows(s, w.pick(new, new, new, k), w.pick(new, new, k), t, p, rows)


def write_rows(s: Step, k: str, y: str, t: str, p: int, rows: str) -> str:
    """The cache with the token `y` written into it; mostly at its position."""
    w = s.w
    piece = w.likely("slot", SLOTS)
    i = s.let("i", SLOTS[piece].format(t=t, R=rows, y=y), piece)
    row, broadcast = f"{y}.unsqueeze({p})", "row"
    if not w.chance(w.usual) and w.chance(0.5):
        rest = max(p - 1, 0)
        broadcast, row = w.pick(
            ("row without batch", f"{y}[0].unsqueeze({rest})"),
            ("row of batch 1", f"{y}[:1].unsqueeze({p})"),
            ("row mean", f"{y}.mean(0, keepdim=True).unsqueeze({p})"),
            ("row column", f"{y}[..., :1].unsqueeze({p})"),
            ("row scalar", f"{y}.sum()"),
            ("row vector", f"{y}.reshape(-1, D).sum(0)"),
        )
    row = s.let("row", row, broadcast)
    ones = ", ".join(["-1"] + ["1"] * (len(s.token) - p))
    hot = f"(torch.arange({rows}) == {i}).view({ones})"
    holes = {"k": k, "row": row, "y": y, "i": i, "p": p, "hot": hot, "colons": ":, " * p}
    if w.chance(0.3):
        piece = w.any_of(CACHE_STATEMENTS)
        # A step that writes to its own carry writes to the caller's tensor in eager mode.
        new = s.let("k", k if w.chance(0.02) else f"{k}.clone()", "cache copied")
        w.say(CACHE_STATEMENTS[piece].format(n=new, **holes), piece)
    else:
        piece = w.likely(w.pick("write where", "write index_copy", "write scatter", "write where not"), CACHE_WRITES)
        new = s.let("k", CACHE_WRITES[piece].format(**holes), piece)
    if w.chance(0.25):
        piece = w.any_of(PREDICATES)
        when = PREDICATES[piece].format(t=t, y=y)
        if piece == "when flag":
            when = s.other_xs("flag", ("S",), "bool", "torch.arange(S) % 3 != 1")
        new = s.let("k", f"torch.where({when}, {new}, {k})", piece)
    return new


MASKS = {
    "mask causal": "({r} <= {t})",
    "mask strict": "({r} < {t})",
    "mask window": "(({r} <= {t}) & ({r} > {t} - 2))",
    "mask sink": "((({r} == 0) | ({r} > {t} - 2)) & ({r} <= {t}))",
    "mask blocks": "({r} // 2 <= {t} // 2)",
    "mask ahead": "({r} <= {t} + 1)",
    "mask none": "({r} >= 0)",
    "mask data": "(({r} <= {t}) & ({s} > -0.5))",
    "mask row": "keep",
    "mask closed over": "MASK[{t}]",
    "mask index": "torch.arange(9)[:, None].ge(torch.arange({R}))[{t}]",
}
FILLS = ('float("-inf")', "-math.inf", "torch.finfo({s}.dtype).min", "-1e9", "-1e4", "-1e9")
MASKING = {
    "masked_fill": "{s}.masked_fill(~{m}, {f})",
    "where fill": "torch.where({m}, {s}, {f})",
    "where tensor": "torch.where({m}, {s}, torch.full_like({s}, {f}))",
    "additive": "{s} + torch.zeros({m}.shape, dtype={s}.dtype).masked_fill({m}.logical_not(), {f})",
    "log mask": "{s} + {m}.to({s}.dtype).log()",
    "masked_fill_ scores": "{s}.clone().masked_fill_(~{m}, {f})",
    "arithmetic": "{s} * {m} + (1 - {m}.to({s}.dtype)) * -1e9",
    "not masked": "{s}",
}
BEFORE_MASK = {
    "alibi": "{s} - 0.5 * ({t} - {r}).abs()",
    "left padding": "{s} + torch.zeros({R}, dtype={s}.dtype).masked_fill({r} < 1, {f})",
    "padding bias": "{s} + {pad}",
    "scale scores": "{s} / math.sqrt(D)",
    "softcap": "5 * torch.tanh({s} / 5)",
    "column at floor": "{s}.index_fill(-1, torch.tensor([0]), {f})",
    "log of data": "{s} + torch.log(({pad} > -1).to({s}.dtype))",
    "pad and cut": "F.pad({s}, (1, 0), value={f})[..., 1:]",
    "pad and shift": "F.pad({s}, (1, 0), value={f})[..., :-1]",
    "clamped scores": "{s}.clamp(max=2.0)",
    "roll scores": "{s}.roll(1, -1)",
}
SOFTMAX = {
    "softmax weights": "torch.softmax({s}, -1)",
    "F.softmax": "F.softmax({s}, dim=-1, dtype={s}.dtype)",
    "log_softmax": "F.log_softmax({s}, -1).exp()",
    "softmax by hand": "F.normalize(({s} - {s}.amax(-1, keepdim=True)).exp(), p=1, dim=-1)",
    "softmax nan_to_num": "torch.softmax({s}, -1).nan_to_num(0.0)",
    "softmax masked again": "torch.softmax({s}, -1) * {m}",
    "softmax where": "torch.where({m}, torch.softmax({s}, -1), 0.0)",
    "softmax renormalized": "F.normalize(torch.softmax({s}, -1) * {m}, p=1, dim=-1)",
    "sigmoid weights": "torch.sigmoid({s}) * {m}",
    "relu weights": "F.relu({s}).square() * {m}",
    "softmax with sink": "torch.softmax(torch.cat([torch.zeros_like({s}[..., :1]), {s}], -1), -1)[..., 1:]",
    "softmax dropout": "F.dropout(torch.softmax({s}, -1), 0.5)",
}
READS = {
    "read all": "{k}.sum({p})",
    "read mean": "{k}.mean({p})",
    "read max": "{k}.amax({p})",
    "read first": "{k}.select({p}, 0)",
    "read last": "{k}.select({p}, {R} - 1)",
    "read at t": "{k}.index_select({p}, {t}.view(1)).squeeze({p})",
    "read before t": "{k}.index_select({p}, ({t} - 1).clamp(min=0).view(1)).squeeze({p})",
    "read indexed": "{k}.movedim({p}, 0)[{t}]",
    "read gathered": "{k}.gather({p}, {t}.expand({y}.unsqueeze({p}).shape)).squeeze({p})",
    "read masked sum": "({k} * ({r} <= {t}).to({k}.dtype).view({ones})).sum({p})",
    "read masked max": "torch.where(({r} <= {t}).view({ones}), {k}, -1e9).amax({p})",
    "read masked mean": "({k} * ({r} <= {t}).view({ones})).sum({p}) / ({t} + 1)",
    "read cumsum": "{k}.cumsum({p}).select({p}, 0)",
    "read flip": "{k}.flip({p}).select({p}, 0)",
    "read prefix slice": "{k}.movedim({p}, 0)[:2].sum(0)",
    "read to t": "{k}.movedim({p}, 0)[: {t} + 1].sum(0)",
    "read item": "{k}.movedim({p}, 0)[{t}.item()]",
}


def read_rows(s: Step, k: str, v: str, t: str, p: int, rows: str) -> None:
    """A reader of the cache: attention over its rows mostly."""
    w, y = s.w, s.value()
    r = f"torch.arange({rows})"
    ones = ", ".join(["-1"] + ["1"] * (len(s.token) - p))
    if not w.chance(w.usual):
        piece = w.any_of(READS)
        s.emit(READS[piece].format(k=k, p=p, t=t, r=r, R=rows, y=y, ones=ones), piece)
        return
    if w.chance(0.15):
        top_k(s, k, y, t, p, rows)
        return
    keys, values = f"{k}.movedim({p}, -2)", f"{v}.movedim({p}, -2)"
    if p == len(s.token) - 1:
        keys, values = k, v
    fill = w.pick(*FILLS)
    if w.chance(0.12):
        mask = MASKS[w.pick("mask causal", "mask window", "mask sink")].format(r=r, t=t)
        attention = (
            f"F.scaled_dot_product_attention({y}.unsqueeze(-2), {keys}, {values}, attn_mask={mask}.unsqueeze(0))"
        )
        s.emit(f"{attention}.squeeze(-2)", "sdpa")
        return
    form = w.pick(
        "({k} @ {q}.unsqueeze(-1)).squeeze(-1)",
        "({k} * {q}.unsqueeze(-2)).sum(-1)",
        'torch.einsum("...d,...rd->...r", {q}, {k})',
        "({q}.unsqueeze(-2) @ {k}.transpose(-1, -2)).squeeze(-2)",
    )
    score = s.let("s", form.format(k=keys, q=y), "scores")
    if w.chance(0.3):
        piece = w.any_of(BEFORE_MASK)
        template = BEFORE_MASK[piece]
        pad = w.floats((rows,)).name if "{pad}" in template else ""
        score = s.let("s", template.format(s=score, t=t, r=r, R=rows, pad=pad, f=fill.format(s=score)), piece)
    piece = w.likely(w.pick("mask causal", "mask window", "mask row"), MASKS)
    if rows != "S" and piece in ("mask row", "mask closed over"):
        piece = "mask causal"
    mask = MASKS[piece].format(r=r, t=t, s=score, R=rows)
    if piece == "mask row":
        mask = s.other_xs("keep", ("S", "S"), "bool", "torch.ones(S, S, dtype=torch.bool).tril()")
    if piece == "mask closed over":
        found = w.find("bool", ("S", "S"))
        mask = mask.replace("MASK", found.name if found else "torch.ones(9, S, dtype=torch.bool)")
    mask = s.let("m", mask, piece)
    piece = w.likely(w.pick("masked_fill", "where fill"), MASKING)
    score = s.let("s", MASKING[piece].format(s=score, m=mask, f=fill.format(s=score)), piece)
    piece = w.likely("softmax weights", SOFTMAX)
    if piece == "softmax dropout" and not w.random_allowed:
        piece = "softmax weights"
    weights = s.let("p", SOFTMAX[piece].format(s=score, m=mask), piece)
    s.emit(
        w.pick(
            f"({weights}.unsqueeze(-2) @ {values}).squeeze(-2)",
            f"({weights}.unsqueeze(-1) * {values}).sum(-2)",
            f'torch.einsum("...r,...rd->...d", {weights}, {values})',
        ),
        "weighted sum",
    )


def top_k(s: Step, k: str, y: str, t: str, p: int, rows: str) -> None:
    """The rows with the best scores, gathered, or kept by a mask. Ties are broken by the position."""
    w = s.w
    keys = f"{k}.movedim({p}, -2)"
    r = f"torch.arange({rows})"
    score = s.let("s", f"({keys} * {y}.unsqueeze(-2)).sum(-1) + {r} * 0.01", "top-k scores")
    if w.chance(0.7):
        score = s.let("s", f"torch.where({r} <= {t}, {score}, -1e3 + {r})", "top-k causal")
    picked = s.let("i", f"{score}.topk(min(2, {score}.shape[-1]), -1)[1]", "top-k")
    if w.chance(0.5):
        s.emit(f"{keys}.gather(-2, {picked}.unsqueeze(-1).expand(*{picked}.shape, D)).sum(-2)", "top-k gather")
    else:
        mask = s.let("m", f"torch.zeros_like({score}, dtype=torch.bool).scatter(-1, {picked}, True)", "top-k scatter")
        s.emit(
            f"(torch.softmax({score}.masked_fill(~{mask}, -math.inf), -1).unsqueeze(-1) * {keys}).sum(-2)", "top-k mask"
        )


# Carries of the token's shape: {c} the carry, {y} a value of the step, {t} the position.
RECURRENCES = {
    "exponential average": "{c} * 0.9 + {y} * 0.1",
    "lerp average": "torch.lerp({c}, {y}, 0.25)",
    "rnn": "torch.tanh({c} @ self.w + {y})",
    "gated": "torch.sigmoid({y}) * {c} + {y}",
    "running sum": "{c} + {y}",
    "running max": "torch.maximum({c}, {y})",
    "running min": "torch.minimum({c}, {y})",
    "last value": "{y}",
    "last value scaled": "{y} * 2",
    "invariant": "{c}",
    "invariant view": "{c}.view({c}.shape)",
    "negated": "-{c}",
    "replaced at first": "torch.where({t} == 0, {y}, {c})",
    "replaced at odd": "torch.where({t} % 2 == 1, {y}, {c})",
    "replaced by data": "torch.where({y} > 0, {y}, {c})",
    "replaced at one": "torch.where(({t} == 1) | ({t} == 3), {y}, {c})",
    "replaced bool": "torch.where((torch.arange(S) - {t}).bool().all(), {c}, {y})",
    "kept after": "torch.where({t} < 2, {y}, {c})",
    "constant": "torch.ones_like({c})",
    "literal": "torch.tensor([0.5] * D, dtype=DTYPE).expand({c}.shape)",
    "gru cell": "self.gru({y}.reshape(-1, D), {c}.reshape(-1, D)).view({c}.shape)",
    "linear in step": "self.lin({c}) + {y}",
    "layer norm in step": "self.norm({c} + {y})",
    "batch norm in step": "self.bn(({c} + {y}).reshape(-1, D)).view({c}.shape)",
    "detached": "{c}.detach() + {y}",
    "in place on copy": "{c}.clone().mul_(0.5).add_({y})",
    "in place on carry": "{c}.mul_(0.5)",
    "in place on value": "(torch.zeros_like({c}).add_({y}))",
    "transposed": "({c}.flip(-1) + {y}).contiguous()",
    "cast": "({c}.float() + {y}.float()).to(DTYPE)",
    "checkpointed": "checkpoint(lambda a, b: torch.tanh(a + b), {c}, {y}, use_reentrant=False)",
    "vmapped": "torch.vmap(lambda a, b: a * 0.5 + b)({c}, {y})",
    "autocast in step": "AUTOCAST",
    "python loop": "sum([{c} * 0.5 for _ in range(2)]) + {y}",
    "buffer in step": "{c} + self.mean * {y}",
    "global in step": "{c} * 0.5 + TABLE * {y}",
    "dropout in step": "F.dropout({c} + {y}, 0.5)",
    "noise in step": "{c} * 0.5 + torch.randn_like({y})",
    "bernoulli in step": "{c} * 0.5 + {y} * torch.bernoulli(torch.full_like({y}, 0.5))",
    "rand in step": "{c} * 0.5 + torch.rand({y}.shape, dtype=DTYPE)",
}
RANDOM_RECURRENCES = {"dropout in step", "noise in step", "bernoulli in step", "rand in step"}


def recurrence(s: Step) -> None:
    w, y, t = s.w, s.value(), s.time()
    c = s.new_carry(s.token)
    piece = w.any_of(RECURRENCES)
    if piece in RANDOM_RECURRENCES and not w.random_allowed:
        piece = "exponential average"
    for name in ("gru", "lin", "norm", "bn"):
        if f"self.{name}(" in RECURRENCES[piece]:
            w.module(name)
    if piece == "autocast in step":
        new = w.fresh("a")
        w.say(f'with torch.autocast("cpu", dtype=torch.bfloat16):\n    {new} = ({c} @ self.w + {y}).to(DTYPE)', piece)
    else:
        new = s.let("a", RECURRENCES[piece].format(c=c, y=y, t=t), piece)
    s.update(c, new, piece)
    s.emit(w.pick(new, new, c, f"{c} + {new}", f"{new} * {y}"), "carry read")


def two_carries(s: Step) -> None:
    """Carries that change places or feed each other: delays, swaps, an LSTM."""
    w, y = s.w, s.value()
    a, b = s.new_carry(s.token), s.new_carry(s.token)
    piece = w.pick("swap", "delay", "lstm", "normalizer", "fibonacci")
    if piece == "swap":
        s.update(a, b, piece)
        s.update(b, a if w.chance(0.5) else y, piece)
    elif piece == "delay":
        s.update(a, y, piece)
        s.update(b, a, piece)
    elif piece == "lstm":
        i, f = s.let("i", f"torch.sigmoid({y} + {a} @ self.w)", piece), s.let("f", f"torch.sigmoid({y} - {a})", piece)
        new = s.let("b", f"{f} * {b} + {i} * torch.tanh({y})", piece)
        s.update(b, new, piece)
        s.update(a, f"torch.tanh({new})", piece)
    elif piece == "normalizer":
        s.update(a, f"torch.maximum({a}, {y})", piece)
        s.update(b, f"{b} * ({a} - torch.maximum({a}, {y})).exp() + ({y} - torch.maximum({a}, {y})).exp()", piece)
    else:
        s.update(a, f"{b} + {y}", piece)
        s.update(b, f"{a} * 0.5", piece)
    s.emit(f"{a} + {b} * 2", piece)


def matrix_state(s: Step) -> None:
    """Linear attention and the delta rule."""
    w, y = s.w, s.value()
    state = s.new_carry((*s.token, "D"))
    q = s.let("q", f"torch.softmax({y}, -1)", "matrix state")
    outer = f"{q}.unsqueeze(-1) * {y}.unsqueeze(-2)"
    piece = w.pick("linear attention", "decayed linear attention", "delta rule")
    if piece == "delta rule":
        read = s.let("r", f"({q}.unsqueeze(-2) @ {state}).squeeze(-2)", piece)
        outer = f"{q}.unsqueeze(-1) * ({y} - {read}).unsqueeze(-2)"
    decay = " * 0.9" if piece == "decayed linear attention" else ""
    new = s.let("m", f"{state}{decay} + {outer}", piece)
    s.update(state, new, piece)
    s.emit(f"({q}.unsqueeze(-2) @ {new}).squeeze(-2)", piece)


INT_DTYPES = ("torch.int64", "torch.int64", "torch.int32", "torch.int16", "torch.uint8", "torch.int8")
COUNTER_DTYPES = (*INT_DTYPES, "torch.float32", "torch.float64", "torch.bfloat16")


def counter(s: Step) -> None:
    """A counter of any dtype, up or down, used as a position, a clock or a number."""
    w, y = s.w, s.value()
    dtype = w.pick(*COUNTER_DTYPES)
    start = f"torch.full((), {w.pick('0', '0', '1', '3')}, dtype={dtype})"
    if w.chance(0.3):  # a start that is changed in place before the scan
        name = w.fresh("start")
        change = w.pick("add_(2)", "fill_(1)", "sub_(1)", "zero_()", "mul_(2)")
        s.before += [(f"{name} = {start}", "counter start"), (f"{name}.{change}", "counter start")]
        start = name
    c = s.new_carry((), start, "int")
    step = (
        "{c} + 1"
        if w.chance(w.usual)
        else w.pick(
            "{c} + 1",
            "{c} - 1",
            "{c} + 2",
            "({c} + 1) % 3",
            "{c} * 2",
            "torch.where({c} > 1, 0, {c} + 1)",
            "{c} + {flag}.to({c}.dtype)",
            "1 + {c}",
            "torch.add({c}, 1)",
            "{c}.clone().add_(1)",
        )
    )
    piece = f"counter {step}"
    new = s.let("n_", f"({step.format(c=c, flag=f'({y}.sum() > 0)')}).to({dtype})", piece)
    s.update(c, new, "counter")
    use = w.pick("number", "number", "where", "output", "index", "position")
    if use == "number":
        s.emit(f"{y} * {new}.to({y}.dtype)", "counter number")
    elif use == "where":
        s.emit(f"torch.where({c} > 1, {y}, {y} * 2)", "counter where")
    elif use == "output":
        s.out(w.pick(new, f"{c} * 2", f"{c} == 2"), "counter output")
    elif use == "index":
        s.emit(f"{y} * torch.arange(20, dtype=DTYPE).index_select(0, {c}.long().clamp(0, 19).view(1))", "counter index")
    else:
        rows = "S"
        p = len(s.token) - 1
        k = s.new_carry((*s.token[:p], rows, *s.token[p:]))
        cache_ = write_rows(s, k, y, f"{c}.long()", p, rows)
        s.update(k, cache_, "cache")
        read_rows(s, cache_, cache_, f"{c}.long()", p, rows)


# Integer and boolean carries of shape [B...]: {f} a float of that shape.
INT_CARRIES = {
    "position of the best": ("-1", "torch.where({f} > 0.3, {t}.to({c}.dtype), {c})"),
    "position of the last match": ("-1", "torch.where(({f} > 0), {t}.to({c}.dtype), {c})"),
    "count": ("0", "{c} + ({f} > 0).to({c}.dtype)"),
    "countdown": ("3", "{c} - 1"),
    "previous token": ("-1", "{tok}.to({c}.dtype)"),
    "maximum token": ("-5", "torch.maximum({c}, {tok}.to({c}.dtype))"),
    "invariant int": ("-2", "{c}"),
    "replaced int": ("-1", "torch.where({t} == 1, {tok}.to({c}.dtype), {c})"),
}
BOOL_CARRIES = {
    "seen": ("False", "{c} | ({f} > 0.5)"),
    "toggle": ("True", "~{c}"),
    "previous flag": ("False", "{f} > 0"),
    "all so far": ("True", "{c} & ({tok} > 0)"),
}


def int_carry(s: Step) -> None:
    w, y, t = s.w, s.value(), s.time()
    lead = s.token[:-1]
    size = f"({', '.join(lead)}{',' if len(lead) == 1 else ''})" if lead else "()"
    token = s.other_xs(
        "tok",
        ("S", *lead),
        "int",
        f"(torch.arange(S).view(-1{', 1' * len(lead)}) % 3).expand(S, {', '.join(lead)})"
        if lead
        else "torch.arange(S) % 3",
    )
    if w.chance(0.7):
        piece = w.any_of(INT_CARRIES)
        first, update = INT_CARRIES[piece]
        dtype = w.pick("torch.int64", "torch.int64", "torch.int32", "torch.int16", "torch.int8")
    else:
        piece = w.any_of(BOOL_CARRIES)
        (first, update), dtype = BOOL_CARRIES[piece], "torch.bool"
    c = s.new_carry(lead, f"torch.full({size}, {first}, dtype={dtype})", "int")
    new = s.let("z", update.format(c=c, f=f"{y}.sum(-1)", t=t, tok=token), piece)
    s.update(c, new, piece)
    use = w.pick("output", "output", "old output", "number", "where", "embedding")
    if use in ("output", "old output"):
        s.out(new if use == "output" else c, f"int carry {use}")
    elif use == "number":
        s.emit(f"{y} * {new}.to({y}.dtype).unsqueeze(-1)", "int carry number")
    elif use == "where":
        s.emit(f"torch.where(({new} > 0).unsqueeze(-1), {y}, -{y})", "int carry where")
    else:
        w.module("emb")
        s.emit(f"self.emb({c}.long().clamp(0, 4)) + {y}", "int carry embedding")


def embedding(s: Step) -> None:
    lead = s.token[:-1]
    fallback = (
        f"(torch.arange(S).view(-1{', 1' * len(lead)}) % 3).expand(S, {', '.join(lead)})"
        if lead
        else "torch.arange(S) % 3"
    )
    token = s.other_xs("tok", ("S", *lead), "int", fallback)
    s.w.module("emb")
    s.emit(
        s.w.pick(f"self.emb({token})", f"F.embedding({token}, self.emb.weight) @ self.w", f"self.emb.weight[{token}]"),
        "embedding",
    )


POINTWISE = {
    "layer": "self.lin({y})",
    "layer norm inside": "self.norm({y})",
    "tied inside": "{y} @ self.w.T",
    "literal inside": "{y} * torch.tensor([1.5] * D, dtype=DTYPE)",
    "scalar literal inside": "{y} * torch.tensor(1.5)",
    "global inside": "{y} * TABLE",
    "gain inside": "{y} * GAIN",
    "number inside": "{y} * NUMBER",
    "buffer inside": "{y} + self.mean",
    "table row": "{y} + torch.arange(9 * D, dtype=DTYPE).view(9, D)[{t}]",
    "rotary row": "{y} * torch.cos(torch.arange(9, dtype=DTYPE))[{t}]",
    "table select": "{y} + torch.arange(9 * D, dtype=DTYPE).view(9, D).index_select(0, {t}.view(1)).squeeze(0)",
    "batch norm inside": "self.bn({y}.reshape(-1, D)).view({y}.shape)",
    "written value": "{y}.clone().mul_(2)",
    "written relu": "F.relu({y}.clone(), inplace=True)",
    "written row": "{y}.mul_(2)",
    "out= inside": "torch.mul({y}.detach(), 2, out=torch.empty_like({y}))",
    "detach inside": "{y}.detach() * {y}",
    "no grad inside": "NO_GRAD",
    "set item inside": "SET_ITEM",
    "nested scan": "NESTED_SCAN",
    "dropout inside": "F.dropout({y}, 0.5)",
    "bernoulli inside": "{y} * torch.bernoulli(torch.full_like({y}, 0.5))",
    "randperm inside": "{y}[..., torch.randperm(D)]",
    "item": "{y} * {t}.item()",
    "data branch": "torch.where({y}.sum() > 0, {y}, -{y})",
    "sort": "{y}.sort(-1)[0]",
    "argmax": "{y} * {y}.argmax(-1, keepdim=True)",
    "one hot": "F.one_hot({t} % D, D).to(DTYPE) * {y}",
    "count in step": "COUNT",
    "cumsum inside": "{y}.cumsum(-1)",
    "cat inside": "torch.cat([{y}[..., 1:], {y}[..., :1]], -1)",
    "new zeros": "{y}.new_zeros({y}.shape).copy_({y})",
    "mask by time": "{y} * (torch.arange(D) <= {t})",
    "linspace": "{y} * torch.linspace(0, 1, D, dtype=DTYPE)",
    "closure row": "{y} + CLOSED",
}
RANDOM_POINTWISE = {"dropout inside", "bernoulli inside", "randperm inside"}


def pointwise(s: Step) -> None:
    """A statement of the step that needs no carry."""
    w, y, t = s.w, s.value(), s.time()
    piece = w.any_of(POINTWISE)
    if piece in RANDOM_POINTWISE and not w.random_allowed:
        piece = "layer"
    template = POINTWISE[piece]
    for name in ("lin", "norm", "bn"):
        if f"self.{name}(" in template:
            w.module(name)
    if template == "NO_GRAD":
        name = w.fresh("g")
        w.say(f"with torch.no_grad():\n    {name} = {y} * 2", piece)
        s.emit(f"{name} + {y}", piece)
    elif template == "SET_ITEM":
        name = s.let("e", f"{y}.clone()", piece)
        w.say(
            w.pick(f"{name}[..., 0] = 0.5", f"{name}[:1] = 0", f"{name}[{name} > 0] = 1", f"{name}[..., :1] += 1"),
            piece,
        )
        s.emit(name, piece)
    elif template == "COUNT":
        w.say("self.count.add_(1)", piece)
        s.emit(f"{y} * 1.5", piece)
    elif template == "NESTED_SCAN":
        inner = w.fresh("inner")
        update = w.pick("h * 0.5 + z", "h + z", "torch.tanh(h + z)", "z")
        w.say(f"def {inner}(h, z):\n    h = {update}\n    return h, h * 2", piece)
        final, all_ = w.fresh("h"), w.fresh("z")
        w.say(f"{final}, {all_} = scan({inner}, {y}, torch.stack([{y}, {y} * 2, {y} + 1]))", piece)
        s.emit(w.pick(final, f"{all_}.sum(0)", f"{all_}[1] + {final}"), piece)
    elif template == "{y} + CLOSED":
        closed = w.floats(s.token).name
        s.emit(f"{y} + {closed}", piece)
    else:
        s.emit(template.format(y=y, t=t), piece)


Unit = Callable[[Step], None]
UNITS: dict[Unit, int] = {
    cache: 6,
    recurrence: 5,
    two_carries: 2,
    matrix_state: 1,
    counter: 3,
    int_carry: 3,
    embedding: 1,
    pointwise: 4,
}
TAME_UNITS: dict[Unit, int] = {cache: 5, pointwise: 2, embedding: 1, counter: 1}
WITHOUT_CARRY = (embedding, pointwise)


# ------------------------------------------------------------------------------------------------------- whole programs


def scan_over(w: Writer) -> None:
    """A scan over values in scope: its carries, inputs and step, and names for what comes out."""
    tokens = ("S", *w.token)
    s = Step(w)
    s.xs["x"] = w.floats(tokens).name
    if w.chance(0.3):
        s.xs["z"] = w.floats(tokens).name
    s.values = [f'x["{key}"]' for key in s.xs]

    outside, w.lines = w.lines, []
    w.indent += 1
    # A recurrence keeps the loop, so most scans must do without one for any to be batched.
    units = UNITS if w.chance(0.4) else TAME_UNITS
    chosen = w.rng.choices(list(units), list(units.values()), k=w.pick(1, 1, 1, 2, 2, 3))
    if w.chance(0.95) and all(unit in WITHOUT_CARRY for unit in chosen):
        chosen.append(cache)
    for unit in chosen:
        unit(s)
    w.indent -= 1
    body, w.lines = w.lines, outside

    init, xs, step = w.fresh("init"), w.fresh("xs"), w.fresh("step")
    for source, piece in s.before:
        w.say(source, piece)
    w.say(f"{init}, {xs} = {{}}, {{}}", "scan")
    for key, first in s.carry.items():
        w.say(f'{init}["{key}"] = {first}', "first carry")
    for key, source in s.xs.items():
        w.say(f'{xs}["{key}"] = {source}', "scanned input")
    w.say(f"def {step}(c, x):\n    n, ys = dict(c), {{}}", "scan")
    w.lines += [*body, "    " * (w.indent + 1) + "return n, ys  #: scan"]
    call = f"scan({step}, {init}, {xs})"
    if w.chance(0.04):
        call = f"checkpoint(lambda: {call}, use_reentrant=False)"
    final, rows = w.fresh("final"), w.fresh("rows")
    w.say(f"{final}, {rows} = {call}", "scan")
    for key, (shape, kind) in s.shapes.items():
        w.define("h", f'{final}["{key}"]', "final carry", shape, kind)
    for key, row in s.outputs.items():
        if row is None:
            w.define("h", f'{rows}["{key}"]', "rows", ("S",), "other")
        else:
            w.define("h", f'{rows}["{key}"]', "rows", ("S", *row))


def surroundings(w: Writer) -> None:
    """Step indices, masks and further arguments for statements and scans to use."""
    if w.chance(0.5):
        source = w.pick(
            "torch.arange(S)",
            "torch.arange(S)",
            "torch.arange(S).clone()",
            "torch.zeros(S, dtype=torch.int64)",
            "torch.ones(S, dtype=torch.int64).cumsum(0) - 1",
            "torch.arange(S + 1)[:-1]",
            "torch.full((S,), 2)",
        )
        w.define("t", source, "index", ("S",), "int")
    if w.chance(0.3):
        source = w.pick(
            "torch.ones(S, S, dtype=torch.bool)",
            "torch.ones(S, S, dtype=torch.bool).tril()",
            "torch.arange(S)[:, None] >= torch.arange(S)",
            "torch.eye(S, dtype=torch.bool)",
        )
        w.define("m", source, "mask", ("S", "S"), "bool")
    for shape, kind, p in (
        (("S",), "int", 0.1),
        (("S",), "bool", 0.08),
        (("S", "S"), "bool", 0.08),
        (("S", *w.token), "float", 0.15),
        (w.token, "float", 0.15),
        (("S", *w.token[:-1]), "int", 0.1),
    ):
        if w.chance(p):
            w.argument(shape, kind)
    if w.chance(0.12):
        w.twin(w.scope[0] if w.chance(0.5) else w.find("float"))


# How the model is called. FIRST stands for the name of the first argument.
RUNS = {
    "plain": "run = model",
    "function": """
def run(**a):
    return model(**a)""",
    "called twice": """
def run(**a):
    return {"first": model(**a), "second": model(**a)}""",
    "added up": """
def run(**a):
    one, two = [model(**a) for _ in range(2)]
    return {key: one[key] + two[key] for key in one}""",
    "checkpoint": """
def run(**a):
    return checkpoint(model, use_reentrant=False, **a)""",
    "two checkpoints": """
def run(**a):
    a["FIRST"] = checkpoint(lambda x: x * 2, a["FIRST"], use_reentrant=False)
    return checkpoint(model, use_reentrant=False, **a)""",
    "autocast": """
def run(**a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**a)""",
    "no grad inside": """
def run(**a):
    with torch.no_grad():
        return model(**a)""",
    "enable grad inside": """
def run(**a):
    with torch.enable_grad():
        return model(**a)""",
    "func grad": """
def run(**a):
    x = a.pop("FIRST")
    def loss(x):
        return sum(y.float().sum() for y in model(**a, FIRST=x).values())
    return {"grad": torch.func.grad(loss)(x)}""",
    "vmap": """
def run(**a):
    x = a.pop("FIRST")
    return torch.vmap(lambda x: model(**a, FIRST=x))(torch.stack([x, x * 2]))""",
    "grad inside": """
def run(**a):
    out = model(**a)
    loss = sum(y.sum() for y in out.values() if y.requires_grad)
    return {**out, "grad": torch.autograd.grad(loss, model.w, retain_graph=True)[0]}""",
    "eval": """
model.eval()
run = model""",
    "tuple": """
def run(**a):
    return tuple(model(**a).values())""",
}
PLAIN_RUNS = ("plain", "plain", "function")
BREAKS = ("torch._dynamo.graph_break()", 'print(end="")')


def draw(seed: int, number: int) -> Program:
    """Program `number` of a seed; nothing else decides."""
    rng = random.Random(f"{seed}/{number}")
    w = Writer(rng)
    w.token = w.pick(("B", "D"), ("B", "D"), ("B", "D"), ("B", "D"), ("D",), ("B", "G", "D"))
    w.dtype = rng.choices(["torch.float64", "torch.float32", "torch.bfloat16"], [86, 9, 5])[0]
    w.random_allowed = w.chance(0.2)
    w.usual = w.pick(0.9, 0.9, 0.7, 0.3)
    fullgraph = w.chance(0.75)
    D, G = w.pick(1, 2, 2, 2, 3), w.pick(1, 2)
    sizes = [2, 2, D, 1, 3] if w.chance(0.97) else [0]
    lengths = [1, 2, 3, 3, 4, 4, 5, 6] if w.chance(0.97) else [0, 9]
    calls = [(w.pick(*lengths), w.pick(*sizes)) for _ in range(w.pick(1, 1, 1, 1, 1, 1, 1, 2, 3))]

    def pause() -> None:
        if not fullgraph and w.chance(0.3):
            w.say(w.pick(*BREAKS), "graph break")

    first = w.argument(("S", *w.token))
    surroundings(w)
    for n in range(w.pick(1, 1, 1, 1, 1, 2, 3)):
        for _ in range(w.pick(0, 0, 1, 2, 3) if n == 0 else w.pick(0, 0, 1, 2)):
            w.statement()
        pause()
        scan_over(w)
    pause()
    for _ in range(w.pick(0, 0, 0, 1, 2, 3, 4)):
        w.statement()
    results = [v.name for v in w.scope if not any(v.name == name for name in w.names)][-7:] or [first.name]
    chosen = rng.sample(results, min(len(results), w.pick(1, 2, 3, 5)))
    chosen += [v.name for v in w.scope if v.name in w.names and w.chance(0.05)]
    run_kind = w.pick(*PLAIN_RUNS) if w.chance(0.8) else w.pick(*RUNS)
    source = assemble(w, first, chosen, run_kind, D, G, calls, fullgraph)
    pieces = frozenset(line.split("#: ")[1] for line in source.splitlines() if "#: " in line)
    return Program(seed, number, source, pieces)


def assemble(w: Writer, first: Value, outputs: list[str], run_kind: str, D: int, G: int, calls, fullgraph) -> str:
    """The module's source around the statements of `forward`."""
    nested = w.rng.choices(["eager", "aot_eager"], [85, 15])[0]
    mode = w.rng.choices(["grad", "no_grad", "inference_mode", "checkpoint"], [86, 6, 4, 4])[0]
    modules = {name: constructor for name, constructor in MODULES.items() if name in w.modules}
    tied = ["self.lin.weight = self.w  #: tied weights"] if "lin" in modules and w.chance(0.1) else []
    run = RUNS[run_kind].strip().replace("FIRST", first.name)
    run = "\n".join(f"{line}  #: run {run_kind}" for line in run.split("\n"))
    batch = f"{first.name}.shape[1]" if "B" in first.shape else "1"
    lines = [
        HEADER,
        f"CALLS = {calls}",
        f"NESTED, FULLGRAPH, MODE = {nested!r}, {fullgraph}, {mode!r}",
        f"DTYPE, D, G = {w.dtype}, {D}, {G}",
        "TABLE = torch.randn(D, dtype=torch.float64).bfloat16().to(DTYPE)",
        "GAIN = nn.Parameter(torch.full((), 1.5, dtype=DTYPE))",
        "NUMBER = 1.5",
        "GENERATOR = torch.Generator().manual_seed(7)",
        "",
        "",
        "def arguments(S, B):",
        "    args, leaves = {}, {}",
        *(f"    {line}" for line in w.inputs),
        "    return args, leaves",
        "",
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.w = nn.Parameter(torch.randn(D, D, dtype=torch.float64).bfloat16().to(DTYPE))",
        '        self.register_buffer("mean", torch.zeros(D, dtype=DTYPE))',
        '        self.register_buffer("count", torch.zeros((), dtype=torch.int64))',
        *(f"        self.{name} = {constructor}  #: module {name}" for name, constructor in modules.items()),
        *(f"        {line}" for line in tied),
        "",
        f"    def forward(self, {', '.join(f'{name}=None' for name in w.names)}):",
        f"        S, B = {first.name}.shape[0], {batch}",
        *w.lines,
        "        out = {}",
        *(f'        out["{name}"] = {name}  #: output' for name in dict.fromkeys(outputs)),
        "        return out",
        "",
        "",
        "model = Model()",
        run,
        "",
    ]
    return "\n".join(lines)

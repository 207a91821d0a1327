"""What is known of one step of a loop that was traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa_compile.loops.numbers import Number
from nsa_compile.loops.state import PLAIN, Path, Snapshot


@dataclass(frozen=True)
class Ref:
    """A tensor of a trace: a leaf of the state, a tensor from outside, or a result of an operator."""

    number: int


@dataclass
class Op:
    """An operator that a step has run. Symbolic integers among its arguments are `Number`s, tensors `Ref`s."""

    func: Any
    args: Any
    kwargs: Any
    outs: list[Ref]
    key: Any  # where in the program it ran, by which traces of other paths are laid beside this one
    stack: str
    no_grad: bool


@dataclass(frozen=True)
class TensorType:
    """What a path through the step takes for granted of a tensor of the state."""

    rank: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Held:
    """A tensor that a step leaves behind. Objects and memory are numbered within the trace."""

    object: int
    memory: int
    geometry: tuple[tuple[Any, ...], tuple[Any, ...], Any]  # sizes, strides and offset in that memory: ints and Numbers
    ref: Ref


@dataclass(frozen=True)
class Unseen:
    """A write in place that autograd does not see."""

    refs: frozenset[Ref]  # what it leaves with another value, and the gradient that it had
    is_counted: bool  # whether torch would tell that what it has saved was written to
    stack: str


@dataclass
class Trace:
    """A path through the step."""

    ops: list[Op] = field(default_factory=list)
    shapes: dict[Ref, tuple[Any, ...]] = field(default_factory=dict)  # ints and Numbers
    types: dict[Ref, TensorType] = field(default_factory=dict)
    state: dict[Path, Ref] = field(default_factory=dict)
    outside: dict[Ref, Tensor] = field(default_factory=dict)
    literals: set[Ref] = field(default_factory=set)  # of these, what the step has made of numbers
    conditions: list[Number] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)  # lines of the loop at which Python makes a number of a symbol
    symbols: dict[Any, Any] = field(default_factory=dict)  # what each is: "t", or a path and a dimension
    after: Snapshot | None = None
    results: dict[Path, Ref | Number | Any] = field(default_factory=dict)  # leaves after the step
    written: list[Tensor] = field(default_factory=list)  # tensors from outside that the step has written to
    appended: dict[Path, list[Ref]] = field(default_factory=dict)
    mutated: set[Path] = field(default_factory=set)  # tensors of the state that the step has written to in place
    same: set[Path] = field(default_factory=set)  # where it has left the tensor that it was given
    memory: dict[Path | str, list[int]] = field(default_factory=dict)  # whose elements results and appended tensors are
    came: dict[int, Path] = field(default_factory=dict)  # the tensor of the state whose memory that was
    outside_memory: dict[int, Tensor] = field(default_factory=dict)  # the tensor from outside whose memory that was
    given: dict[int, Path] = field(default_factory=dict)  # the objects of the state
    held: dict[Path, Held] = field(default_factory=dict)  # the tensors among the results
    held_in_lists: dict[Path, list[Held]] = field(default_factory=dict)  # those appended, also to lists that are read
    unseen: list[Unseen] = field(default_factory=list)
    rows: set[Path] = field(default_factory=set)  # of lists that are read
    moved: set[Path] = field(default_factory=set)  # lists that are read, if elements were taken or it is another now
    changed: set[Path] = field(default_factory=set)  # containers that hold something else now
    replaced: set[Path] = field(default_factory=set)  # containers in whose place is another now
    outside_objects: dict[int, Tensor] = field(default_factory=dict)  # what a tensor from outside is in the trace

    def describe(self) -> Any:
        """What a step computes: equal for two traces of one that does the same."""
        ops = [(str(op.func), repr((op.args, op.kwargs)), op.outs, op.no_grad) for op in self.ops]
        known = (Ref, Number, *PLAIN)  # an object that is neither may be one that the step has made
        results = {path: x if isinstance(x, known) else type(x) for path, x in self.results.items()}
        outside = {ref: id(x) for ref, x in self.outside.items() if ref not in self.literals}
        literals = {ref: self.outside[ref].tolist() for ref in self.literals}
        return ops, results, outside, literals, self.conditions, self.appended, self.mutated, self.same


@dataclass
class Given:
    """A leaf of the state as a trace gets it."""

    sizes: tuple[int, ...] | None  # of a tensor
    type: TensorType | None
    growing: tuple[int, ...] = ()  # its dimensions whose sizes are symbolic
    value: int = 0  # of an integer

"""What a graph costs on paper: arithmetic, traffic, memory and operators of its forward pass, from shapes alone.

The graph is run on fake tensors and every ATen operator noted. Exactly:

- *operators*: ATen operators that are no view, each counted as often as it runs.
- *flops*: by the formulas of `torch.utils.flop_counter`, custom operators' own among them: matrix products, attention
  and convolutions, a multiply and an add counting as two. Operators without a formula count nothing.
- *bytes moved*: what each such operator reads and writes, as if it ran alone: fusion is the nested backend's matter.
  A tensor counts with its elements, along an expanded dimension once.
- *peak bytes*: the most memory alive at one time. Inputs and constants of the graph live throughout, outputs from the
  operator that makes them to the end, everything else until the last operator that reads it. Views share a storage.

A scan counts its body S times. Its peak is one step's (the carries it finds, all it makes) plus the final carries and
the stacked outputs. Checkpointed and shared regions are walked into, once a call: recomputation belongs to a backward
pass. Any other higher-order operator counts as one operator without a look inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nsa_compile.ir.scans import on_fake_inputs


@dataclass(frozen=True)
class Estimate:
    """The cost of one run of a graph, as defined above."""

    operators: int
    flops: int
    bytes_moved: int
    peak_bytes: int


def estimate(gm: fx.GraphModule) -> Estimate:
    """Estimate a captured graph at the shapes it was captured with.

    Raises:
        Exception: whatever an operator raises that does not run on fake tensors.
    """
    with on_fake_inputs(gm) as inputs:
        ledger = _Ledger(held=_tensors(inputs))
        ledger.hold(_Costs(gm, ledger).run(*inputs))
    return Estimate(ledger.operators, ledger.flops, ledger.bytes_moved, ledger.peak())


def peak_of(work: Callable[[], Any], inputs: Iterable[Tensor]) -> int:
    """Most bytes alive at one time of what `work` makes on fake tensors; its `inputs` are not counted.

    What it returns lives to its end.
    """
    ledger = _Ledger(held=(), elsewhere=inputs)
    with ledger:
        ledger.hold(work())
    return ledger.peak()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass
class _Life:
    """A storage, from the operator that makes it to the last that reads it. Held, so that its address stays its own."""

    storage: torch.UntypedStorage
    size: int
    born: int
    last: int


class _Ledger(TorchDispatchMode):
    """Notes of every operator that runs under it what it costs and which storages it reads and makes.

    `held` live throughout; `elsewhere` are storages that another ledger accounts for.
    """

    def __init__(self, held: Iterable[Tensor], elsewhere: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.operators = self.flops = self.bytes_moved = 0
        self.time = 0  # operators so far, views among them
        self.lives: dict[int, _Life] = {}
        self.within: dict[int, int] = {}  # time of a scan -> peak of its body
        for x in elsewhere:
            self._meet(x, born=0).size = 0
        self.throughout = [self._meet(x, born=0) for x in held]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, made = _tensors((args, kwargs)), _tensors(out)
        if made and (self.use(read, made) or func._schema.is_mutable):
            self.operators += 1
            self.bytes_moved += sum(map(_elements_bytes, (*read, *made)))
            if formula := flop_registry.get(func.overloadpacket):
                self.flops += int(formula(*args, **kwargs, out_val=out))
        return out

    def use(self, read: list[Tensor], made: list[Tensor]) -> bool:
        """Advance the time by one operator. Returns whether it made a storage: a view does not."""
        self.time += 1
        known = len(self.lives)
        for x in read:
            if x.untyped_storage()._cdata not in self.lives:  # a constant of the graph
                self.throughout.append(self._meet(x, born=0))
                known += 1
            self._meet(x, born=0)
        for x in made:
            self._meet(x, born=self.time)
        return len(self.lives) > known

    def hold(self, outputs: Any) -> None:
        """Let the outputs of the graph live to its end."""
        self.throughout += [self._meet(x, born=self.time) for x in _tensors(outputs)]

    def opaque(self, read: list[Tensor], made: list[Tensor]) -> None:
        """An operator that is not looked into."""
        self.use(read, made)
        self.operators += 1
        self.bytes_moved += sum(map(_elements_bytes, (*read, *made)))

    def loop(self, step: _Ledger, length: int, read: list[Tensor], made: list[Tensor]) -> None:
        """A scan over `length` steps that each cost `step`."""
        self.use(read, made)
        self.operators += length * step.operators
        self.flops += length * step.flops
        self.bytes_moved += length * step.bytes_moved
        self.within[self.time] = step.peak()

    def peak(self) -> int:
        for life in self.throughout:
            life.last = self.time
        changes = [0] * (self.time + 2)
        for life in self.lives.values():
            changes[life.born] += life.size
            changes[life.last + 1] -= life.size
        alive = accumulate(changes)
        return max(size + self.within.get(time, 0) for time, size in enumerate(alive))

    def _meet(self, x: Tensor, born: int) -> _Life:
        storage = x.untyped_storage()
        life = self.lives.setdefault(storage._cdata, _Life(storage, int(storage.nbytes()), born, born))
        life.last = self.time
        return life


def _elements_bytes(x: Tensor) -> int:
    """Bytes of the elements an operator reads or writes; those of an expanded dimension lie on top of each other."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= int(size) if stride != 0 or size == 0 else 1
    return elements * x.element_size()


# Higher-order operators that run the graph they are given first, once, and where the inputs of that begin.
_REGIONS = {tag_activation_checkpoint: 1, invoke_subgraph: 2}


class _Costs(fx.Interpreter):
    """Runs a graph on fake tensors under a ledger, and knows the operators that have graphs for arguments."""

    def __init__(self, gm: fx.GraphModule, ledger: _Ledger) -> None:
        super().__init__(gm)
        self.ledger = ledger

    def run_node(self, n: fx.Node) -> Any:
        if not isinstance(n.target, HigherOrderOperator):
            with self.ledger:
                return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in _REGIONS:
            return _Costs(args[0], self.ledger).run(*args[_REGIONS[n.target] :])
        outputs = n.meta["example_value"]
        if n.target is scan_op:
            body, init, xs, additional = args
            self.ledger.loop(_one_step(body, init, xs, additional), len(xs[0]), _tensors(args), _tensors(outputs))
        else:
            self.ledger.opaque(_tensors((args, kwargs)), _tensors(outputs))
        return outputs


def _one_step(body: fx.GraphModule, init: list[Tensor], xs: list[Tensor], additional: list[Tensor]) -> _Ledger:
    """A step of a scan: its carries are its own, rows and further inputs lie in the memory around it."""
    carries, rows = [torch.empty_like(x) for x in init], [x[0] for x in xs]
    step = _Ledger(held=carries, elsewhere=_tensors([rows, additional]))
    step.hold(_Costs(body, step).run(*carries, *rows, *additional))
    return step

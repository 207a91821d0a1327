"""Modes under which a step is traced: one writes down its operators, one lets tensors from outside take part."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from nsa_compile.loops import lists
from nsa_compile.loops.numbers import as_number
from nsa_compile.loops.state import NotFollowed
from nsa_compile.loops.trace import Op, Ref, TensorType, Trace, Unseen
from nsa_compile.memory import written_by


class Recorder(TorchDispatchMode):
    """Writes down functional operators on fake tensors. It stands where torch's proxy mode would, below the mode that
    makes writes in place functional."""

    def __init__(self, trace: Trace, step: types.FunctionType, fake: FakeTensorMode) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.trace, self.code, self.fake = trace, step.__code__, fake
        self.refs: dict[int, tuple[Tensor, Ref]] = {}

    def ref(self, x: Tensor) -> Ref:
        if id(x) not in self.refs:
            ref = Ref(len(self.refs))
            self.refs[id(x)] = (x, ref)
            self.trace.shapes[ref] = tuple(as_number(s) for s in x.shape)
            self.trace.types[ref] = TensorType(x.dim(), x.dtype, x.device)
        return self.refs[id(x)][1]

    def _noted(self, value: Any) -> Any:
        return self.ref(value) if isinstance(value, Tensor) else as_number(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or func in _ASKS:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotFollowed(f"{func} draws random numbers")
        if torch.is_grad_enabled() and not self.trace_no_grad:
            raise NotFollowed("it turns gradients on, and they are off around the loop")
        no_grad = self.trace_no_grad and not torch.is_grad_enabled()
        noted = pytree.tree_map(self._noted, (list(args), kwargs))
        out = func(*args, **kwargs)
        outs = [self.ref(x) for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if free_unbacked_symbols([x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]):
            raise NotFollowed(f"the result of {func} has a size that depends on data")
        key, stack = self._place()
        self.trace.ops.append(Op(func, noted[0], noted[1], outs, (str(func), key), stack, no_grad))
        return out

    trace_no_grad = True

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _place(self) -> tuple[Any, str]:
        return place(self.code)

    def stack(self) -> str:
        """The frames from the step inwards."""
        return self._place()[1]


def place(code: types.CodeType) -> tuple[Any, str]:
    """Where in the program a step is now: a key, and the frames from the step inwards, as tracebacks tell them."""
    key: list[Any] = []
    lines: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        if not is_ours(frame.f_code.co_filename):
            key.append((id(frame.f_code), frame.f_lasti))
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n')
        elif not key and frame.f_code.co_filename == LISTS:  # what stacks a list is not what joins two
            key.append(frame.f_code.co_name)
        if frame.f_code is code:
            break
        frame = frame.f_back
    return tuple(key), "".join(reversed(lines))


def place_of(stack: str) -> str | None:
    """`file:line` of the innermost of such frames."""
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return None
    file, line, *_ = lines[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"


def value_of(x: Any) -> Any:
    """The fake tensor that a tensor of a trace is now: another one, where it was written to."""
    if not isinstance(x, FunctionalTensor):
        return x
    torch._sync(x)
    return torch._from_functional_tensor(x.elem)


def memory_of(x: FunctionalTensor) -> int:
    return x.elem.untyped_storage()._cdata


_TORCH, LISTS = torch.__path__[0], lists.__file__


def is_ours(file: str) -> bool:
    return file.startswith(_TORCH) or "nsa_compile/loops/" in file


_ASKS = {torch.ops.aten.sym_size.int, torch.ops.aten.is_contiguous.default}


class Outside(TorchDispatchMode):
    """Lets tensors from outside the step, such as parameters, take part as fake ones."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.known: dict[int, tuple[Tensor, Tensor, Any]] = {}
        self.literals: set[int] = set()

    def lifted(self, x: Any) -> Any:
        """Arguments of an operator with their tensors lifted."""
        if isinstance(x, Tensor):
            return self.lift(x)
        if type(x) is tuple or type(x) is list:
            return type(x)([self.lifted(y) for y in x])
        if type(x) is dict:
            return {k: self.lifted(y) for k, y in x.items()}
        return x if type(x) in _PLAIN else pytree.tree_map_only(Tensor, self.lift, x)

    def lift(self, x: Tensor) -> Any:
        if isinstance(x, FunctionalTensor | FakeTensor) or torch._is_functional_tensor(x):
            return x
        if id(x) not in self.known:
            if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise NotFollowed(f"it reads a tensor of type {type(x).__name__}")
            with _disable_current_modes():
                fake = self.fake.from_tensor(x.detach(), static_shapes=True)
            functional = FunctionalTensor.to_functional(fake)
            # Of a leaf, autograd then refuses what it refuses in the loop.
            self.known[id(x)] = x, fake, functional.requires_grad_(x.requires_grad and x.is_leaf)
        return self.known[id(x)][2]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            self.literals.add(id(args[0]))
        return func(*self.lifted(args), **self.lifted(kwargs or {}))


WITHOUT_GRADIENT = torch.ops.aten.detach.default


class Functional(FunctionalTensorMode):
    """Makes writes in place functional, and notes those that autograd does not see."""

    def __init__(self, recorder: Recorder, outside: Outside) -> None:
        super().__init__()
        self.recorder, self.outside = recorder, outside
        self.given: list[FunctionalTensor] = []  # the state
        self.made: dict[int, list[weakref.ref[FunctionalTensor]]] = {}  # by memory
        # Tensors without the gradient that their memory has, and whether it counts what is written to them.
        self.blind: Any = WeakIdKeyDictionary()

    def _sync_view_replay_annotations(self, args: Any, kwargs: Any) -> None:
        """It asks for torch's own tracer, which is not here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.recorder.trace_no_grad:  # around the loop nothing has a gradient
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, FunctionalTensor)]
        is_off = not torch.is_grad_enabled()
        if is_off:
            with torch.enable_grad():  # what was written before, was so with gradients
                for y in given:
                    torch._sync(y)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for x in written_by(func, args, kwargs):
                if isinstance(x, FunctionalTensor) and (is_off or x in self.blind):
                    self._note_write(x, self.blind.get(x, True))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for x in pytree.tree_leaves(out):
            if isinstance(x, FunctionalTensor):
                self._note_made(func, x, given, is_off)
        return out

    def _note_made(self, func: Any, x: FunctionalTensor, given: list[FunctionalTensor], is_off: bool) -> None:
        memory = memory_of(x)
        of = [y for y in given if y is not x and memory_of(y) == memory]
        if of and (is_off or func is WITHOUT_GRADIENT or any(y in self.blind for y in of)):
            self.blind[x] = all(self.blind.get(y, True) for y in of)
        self.made.setdefault(memory, []).append(weakref.ref(x))

    def _note_write(self, x: FunctionalTensor, is_counted: bool) -> None:
        """Note the tensors that keep a gradient which the write does not change, and what it changes uncounted."""
        memory = memory_of(x)
        found = [x, *self._made_in(memory), *(y for y in self._from_before() if memory_of(y) == memory)]
        refs = frozenset(self.recorder.ref(value_of(y)) for y in found if y not in self.blind)
        self.recorder.trace.unseen.append(Unseen(refs, is_counted, self.recorder.stack()))

    def _made_in(self, memory: int) -> list[FunctionalTensor]:
        alive = (made() for made in self.made.get(memory, []))
        return [y for y in alive if y is not None and memory_of(y) == memory]

    def _from_before(self) -> list[Any]:
        return [*self.given, *(functional for _, _, functional in self.outside.known.values())]

    def detach_in_place(self, x: Any) -> Any:
        """`x.detach_()`, where no other tensor lies in the memory of x: its elements as a constant."""
        alone = all(y is x for y in self._made_in(memory_of(x)))
        if not alone or any(y is x for y in self._from_before()):
            raise NotFollowed(
                "it calls detach_() on a tensor of before the step, or one with views; write x = x.detach()"
            )
        with torch.set_grad_enabled(self.recorder.trace_no_grad):
            constant = value_of(x.detach())
        torch._functionalize_replace(x.elem, constant)
        torch._functionalize_commit_update(x.elem)
        return x


# What holds no tensors; most arguments are such.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.SymInt})

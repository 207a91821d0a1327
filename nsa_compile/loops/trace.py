"""One step of a loop, traced with its integers symbolic: the operators it runs, the conditions that led there."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from nsa_compile.loops import intercepted
from nsa_compile.loops.effects import refused_effects
from nsa_compile.loops.lists import Appended, GrowingList, IsRead
from nsa_compile.loops.numbers import Number, as_number
from nsa_compile.loops.python_numbers import (
    SYMBOLIC,
    NotHashable,
    frame_of_loop,
    is_symbolic,
    stand_ins_unseen,
    unnoted,
)
from nsa_compile.loops.state import PLAIN, NotFollowed, Path, Snapshot, cells_of, drop, in_words, look


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
    stack_of_condition: list[str] = field(default_factory=list)
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
    rows: set[Path] = field(default_factory=set)  # of lists that are read
    moved: set[Path] = field(default_factory=set)  # lists that are read, if elements were taken or it is another now
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


class _Recorder(TorchDispatchMode):
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


def place(code: types.CodeType) -> tuple[Any, str]:
    """Where in the program a step is now: a key, and the frames from the step inwards, as tracebacks tell them."""
    key: list[Any] = []
    lines: list[str] = []
    frame = sys._getframe(2)
    while frame is not None:
        if not _is_ours(frame.f_code.co_filename):
            key.append((id(frame.f_code), frame.f_lasti))
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n')
        if frame.f_code is code:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(key), "".join(reversed(lines))


_TORCH = torch.__path__[0]


def _is_ours(file: str) -> bool:
    return file.startswith(_TORCH) or "nsa_compile/loops/" in file


_ASKS = {torch.ops.aten.sym_size.int, torch.ops.aten.is_contiguous.default}


class _Sizes(ShapeEnv):
    """Sizes that may be 0 or 1, of which torch itself does not ask whether they are.

    Where torch asks, to broadcast or to find a layout, it says what is right if that is unknown. So a first step, whose
    caches are empty, takes the way of the others. A condition of the loop's own is one, as any other.
    """

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        expr = sym_node.expr
        is_layout = isinstance(expr, sympy.Eq | sympy.Ne) and {0, 1} & set(expr.args)
        is_layout = is_layout or (isinstance(expr, sympy.StrictLessThan) and expr.args[1] == 2)
        if fallback_value is not None and is_layout:
            known = self._maybe_evaluate_static(expr)
            return fallback_value if known is None else bool(known)
        return super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)


class _Functional(FunctionalTensorMode):
    def _sync_view_replay_annotations(self, args: Any, kwargs: Any) -> None:
        """It asks for torch's own tracer, which is not here."""


class _Outside(TorchDispatchMode):
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


# What holds no tensors; most arguments are such.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.SymInt})


class _Rewritten(TorchFunctionMode):
    """Functions that would make a symbolic integer a number replaced by ones that do not; and tensors from outside
    by fake ones before autograd sees them, lest a write in place leaves its mark on them."""

    def __init__(self, outside: _Outside) -> None:
        super().__init__()
        self.outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in intercepted.REFUSED:
            raise NotFollowed(intercepted.REFUSED[func])
        if func in intercepted.NOT_ASKED and isinstance(args[0], FunctionalTensor) and frame_of_loop(sys._getframe(1)):
            raise NotFollowed(intercepted.NOT_ASKED[func])
        args, kwargs = self.outside.lifted(args), self.outside.lifted(kwargs or {})
        replacement = intercepted.REPLACED.get(func)
        try:
            with unnoted():
                if replacement is not None:
                    with self:
                        result = replacement(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
                return func(*args, **kwargs)
        except Exception as error:
            # An `except` of the loop's own must not see it: it may be one that numbers instead of symbols do not raise.
            raise NotFollowed(_in_a_line(error)) from error


def trace_step(
    step: types.FunctionType,
    index: int,
    before: Snapshot,
    given: dict[Path, Given],
    lists: set[Path],
    tensors: Collection[Path],
    temporary: frozenset[str],
    read_after: frozenset[str],
    noted: Callable[[], AbstractContextManager[None]],
) -> Trace:
    """Follow the step once, from the state that a snapshot describes, in the context `noted`. What it changes is put
    back by the caller. `tensors` are the paths at which some step leaves another tensor than it finds.

    Raises:
        NotFollowed: the step does what no trace can follow.
    """
    trace = Trace()
    env = _Sizes(duck_shape=False, specialize_zero_one=False)
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=False)
    fake.cache_enabled = False  # what is kept of results with symbolic sizes is used by this trace alone
    recorder, outside = _Recorder(trace, step, fake), _Outside(fake)
    recorder.trace_no_grad = torch.is_grad_enabled()
    leaves: dict[Path, Any] = {}
    position = _integer(env, "t", index)
    trace.symbols[cast(Any, position).node.expr] = "t"
    with fake:
        for path, leaf in given.items():
            leaves[path] = _symbolic(env, path, leaf, trace)
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            trace.state[path] = recorder.ref(leaf)
    cells = cells_of(step)
    try:
        with fake, recorder, _Functional(), _no_custom_gradients():
            wrapped = {p: FunctionalTensor.to_functional(x) if isinstance(x, Tensor) else x for p, x in leaves.items()}
            grown = {path: Appended(path) for path in lists}
            trace.came = {_memory(x): path for path, x in wrapped.items() if isinstance(x, FunctionalTensor)}
            before.install({**wrapped, **grown})
            drop(cells, temporary)
            with outside, _Rewritten(outside), refused_effects(), stand_ins_unseen():
                handed = _begin_lists(before)
                with noted():
                    step(position)
                    drop(cells, temporary - read_after)
                _settle_lists(step, handed, trace)
            trace.after = look(step, temporary)
            for path, content in before.contents.items():
                leaf = before.leaves[path]
                if path not in given and trace.after.contents.get(path) != content:
                    raise NotFollowed(f"it changes {in_words(path)}, a {type(leaf).__name__}, in place")
            _note_results(trace, recorder, outside, before, tensors, leaves, wrapped, grown)
    except NotFollowed as why:
        raise NotFollowed(why.reason, why.place or _line_of(why, step)) from why
    except IsRead:
        raise
    except Exception as error:
        raise NotFollowed(_in_a_line(error), _line_of(error, step)) from error
    for guard in env.guards:
        trace.conditions.append(as_number(guard.expr, True))
        trace.stack_of_condition.append(str(getattr(guard, "sloc", "")))
    return trace


def _integer(env: ShapeEnv, name: str, hint: int, lowest: int | None = None) -> torch.SymInt:
    """A symbolic integer. Sizes are not torch's own, of which it takes for granted that none is 0."""
    source = ConstantSource(name)
    symbol = env.create_symbol(
        hint, source, DimDynamic.DYNAMIC, constraint_dim=None, positive=None, do_not_specialize_zero_one=True
    )
    if lowest is not None:
        env.var_to_range[symbol] = ValueRanges(lowest, int_oo)
    return env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def _symbolic(env: ShapeEnv, path: Path, leaf: Given, trace: Trace) -> Any:
    if leaf.sizes is None:
        number = _integer(env, f"s{len(trace.symbols)}", leaf.value)
        trace.symbols[number.node.expr] = (path, None)
        return number
    assert leaf.type is not None
    sizes: list[Any] = list(leaf.sizes)
    for d in leaf.growing:
        sizes[d] = _integer(env, f"s{len(trace.symbols)}", leaf.sizes[d], lowest=0)
        trace.symbols[sizes[d].node.expr] = (path, d)
    return torch.empty(sizes, dtype=leaf.type.dtype, device=leaf.type.device)


def _note_results(
    trace: Trace,
    recorder: _Recorder,
    outside: _Outside,
    before: Snapshot,
    tensors: Collection[Path],
    leaves: dict[Path, Any],
    wrapped: dict[Path, Any],
    grown: dict[Path, Appended],
) -> None:
    """What the step has left: tensors, integers and constants, by path."""
    assert trace.after is not None

    for path, leaf in list(trace.after.leaves.items()):
        # One from outside may stand, after this step, where others leave a tensor of the state.
        if isinstance(leaf, Tensor) and path in tensors:
            leaf = trace.after.leaves[path] = outside.lift(leaf)
        if isinstance(leaf, FunctionalTensor):
            trace.results[path] = recorder.ref(_value_of(leaf))
        elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            trace.results[path] = number = as_number(leaf)
            if not isinstance(number, Number):  # its conditions leave one value: no later trace is to meet the symbol
                trace.after.leaves[path] = number
        elif isinstance(leaf, torch.Size | slice) and any(map(is_symbolic, _numbers_of(leaf))):
            kind = type(leaf).__name__
            raise NotFollowed(f"{in_words(path)} becomes a {kind} of numbers that change from step to step")
        else:
            trace.results[path] = leaf
    for path, x in wrapped.items():
        if isinstance(x, Tensor) and _value_of(x) is not leaves[path]:
            trace.mutated.add(path)
    for list_ in grown.values():
        items = [outside.lift(x) if isinstance(x, Tensor) else x for x in list_.items]
        list.__setitem__(list_, slice(1, None), items)
    results: list[tuple[Path | str, Any]] = list(trace.after.leaves.items())
    results += [(f"the tensors appended to {in_words(path)}", x) for path, list_ in grown.items() for x in list_.items]
    results += [("a tensor from outside the loop", x) for _, _, x in outside.known.values()]
    for owner, x in results:
        if isinstance(x, FunctionalTensor):
            if vars(x).keys() - _ATTRIBUTES:
                what = f"sets .{min(vars(x).keys() - _ATTRIBUTES)} of a tensor that it leaves"
                raise NotFollowed(f"it {what}; keep it beside the tensor")
            trace.memory.setdefault(owner, []).append(_memory(x))
        if isinstance(owner, tuple) and isinstance(x, FunctionalTensor):
            trace.held[owner] = _held(x, recorder)
        if isinstance(owner, tuple) and x is wrapped.get(owner):
            trace.same.add(owner)
    for path, container in trace.after.containers.items():
        if isinstance(container.value, GrowingList):
            trace.rows.add((*path, ".rows"))
            appended = [x for x in container.value.appended if isinstance(x, FunctionalTensor)]
            trace.held_in_lists[path] = [_held(x, recorder) for x in appended]
            if container.value.cut:
                trace.moved.add(path)
    for path in before.containers.keys() | trace.after.containers.keys():
        was, now = (x.containers[path].value if path in x.containers else None for x in (before, trace.after))
        if was is not now and (isinstance(was, GrowingList) or isinstance(now, GrowingList)):
            trace.moved.add(path)
    trace.given = {id(x): path for path, x in wrapped.items()}
    known = [(x, functional) for x, _, functional in outside.known.values() if id(x) not in outside.literals]
    trace.outside_memory = {_memory(functional): x for x, functional in known}
    trace.outside_objects = {id(functional): x for x, functional in known}
    for path, list_ in grown.items():
        if trace.after.leaves.get(path) is not list_:
            raise NotFollowed(f"another list takes the place of {in_words(path)}, or it gets another name")
    lifted = {id(fake): x for x, fake, _ in outside.known.values()}
    for x, fake, functional in list(outside.known.values()):
        value = _value_of(functional)
        if value is not fake:
            trace.written.append(x)
    for path, items in grown.items():
        for x in items.items:
            if not isinstance(x, FunctionalTensor):
                raise IsRead(path)
        trace.appended[path] = [recorder.ref(_value_of(x)) for x in items.items]
        trace.held_in_lists[path] = [_held(x, recorder) for x in items.items]
    for fake, ref in list(recorder.refs.values()):
        if id(fake) in lifted:
            trace.outside[ref] = lifted[id(fake)]
            if id(lifted[id(fake)]) in outside.literals:
                trace.literals.add(ref)


# What torch's stand-in for a tensor has of its own.
_ATTRIBUTES = frozenset({"elem", "_inductor_storage_resized_counter", "_is_functional_tensor"})


def _numbers_of(leaf: torch.Size | slice) -> tuple[Any, ...]:
    return (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else tuple(leaf)


def _begin_lists(before: Snapshot) -> list[Any]:
    """Tensors that are, or that hold, elements of a list that is read, with what they are now; more come as they are
    handed out."""
    GrowingList.handed = handed = _Handed()
    for container in before.containers.values():
        if isinstance(container.value, GrowingList):
            container.value.begin()
    return handed


class _Handed(list):
    def append(self, x: Any) -> None:
        super().append((x, _value_of(x)))


def _settle_lists(step: types.FunctionType, handed: list[Any], trace: Trace) -> None:
    """Take what a step has appended to lists that it reads into their rows.

    Raises:
        NotFollowed: it has written in place to an element, which the rows would not show.
    """
    for container in look(step).containers.values():
        if isinstance(container.value, GrowingList):
            container.value.settle()
    for x, value in handed:
        if _value_of(x) is not value:
            raise NotFollowed("it writes in place to an element of a list that it reads")
        if isinstance(x, FunctionalTensor):
            trace.memory.setdefault("a list that is read", []).append(_memory(x))


def _value_of(x: Any) -> Any:
    if not isinstance(x, FunctionalTensor):
        return x
    torch._sync(x)
    return torch._from_functional_tensor(x.elem)


def _held(x: FunctionalTensor, recorder: _Recorder) -> Held:
    sizes, strides = (tuple(map(as_number, numbers)) for numbers in (x.shape, x.stride()))
    return Held(id(x), _memory(x), (sizes, strides, as_number(x.storage_offset())), recorder.ref(_value_of(x)))


def _memory(x: FunctionalTensor) -> int:
    return x.elem.untyped_storage()._cdata


@contextlib.contextmanager
def _no_custom_gradients() -> Iterator[None]:
    """A trace below autograd would lose the gradients that a `torch.autograd.Function` defines."""

    tracing = threading.get_ident()

    def apply(cls: Any, *inputs: Any, **named: Any) -> Any:
        if threading.get_ident() == tracing:
            raise NotFollowed(f"it applies {cls.__name__}, a torch.autograd.Function")
        return own.__get__(None, cls)(*inputs, **named)

    own: Any = torch.autograd.Function.__dict__.get("apply")
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


def _line_of(error: BaseException, step: types.FunctionType) -> str | None:
    """`file:line` of the innermost frame of an error that is the user's."""
    found, entered = None, False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        entered |= code is step.__code__
        if entered and not _is_ours(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _in_a_line(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, NotHashable):
        return str(error)
    if "DataDependent" in kind or "unbacked" in str(error).lower():
        return "it reads a number out of a tensor, so that its way depends on data"
    if "_linalg_check_errors" in str(error):
        return "it inverts or factorizes a matrix, and torch checks at each step whether that is possible"
    if "SymIntArrayRef" in str(error):
        return "it calls a function of torch that takes no size that changes from step to step"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if any(kind.__name__ in first for kind in SYMBOLIC):
        return f"it does with a number that changes from step to step what torch's symbols cannot: {first}"
    return f"it raises {kind}: {first}" if first else f"it raises {kind}"

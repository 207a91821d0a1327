"""One step of a loop, traced with its integers symbolic: the operators it runs, the conditions that led there."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from nsa_compile.ir.dtypes import why_refused
from nsa_compile.loops import intercepted
from nsa_compile.loops.effects import refused_effects
from nsa_compile.loops.left import (
    adopt_lists,
    begin_lists,
    held_by_containers,
    note_containers,
    note_what_is_left,
    settle_lists,
)
from nsa_compile.loops.lists import Appended, GrowingList, IsRead
from nsa_compile.loops.numbers import as_number
from nsa_compile.loops.picked import PickedRows
from nsa_compile.loops.python_math import noting_conditions
from nsa_compile.loops.python_numbers import (
    SYMBOLIC,
    NotHashable,
    frame_of_loop,
    stand_ins_unseen,
    unnoted,
)
from nsa_compile.loops.recording import Functional, Outside, Recorder, is_ours, memory_of
from nsa_compile.loops.state import READS_A_NUMBER, NotFollowed, Path, Snapshot, cells_of, drop, in_words, look
from nsa_compile.loops.trace import Given, Trace
from nsa_compile.loops.watched import is_of_library


class _Sizes(ShapeEnv):
    """Sizes that may be 0 or 1, of which torch itself does not ask whether they are.

    Where torch asks, to broadcast or to find a layout, it says what is right if that is unknown. So a first step, whose
    caches are empty, takes the way of the others. A condition of the loop's own is one, as any other; and where torch
    has asserted a size of 1, as in a view that drops it, it is told so, and asks no more.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asserted = set[Any]()

    def evaluate_sym_node(self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        expr = sym_node.expr
        is_layout = isinstance(expr, sympy.Eq | sympy.Ne) and {0, 1} & set(expr.args)
        is_layout = is_layout or (isinstance(expr, sympy.StrictLessThan) and expr.args[1] == 2)
        if fallback_value is not None and is_layout:
            known = self._maybe_evaluate_static(expr)
            return expr in self.asserted or fallback_value if known is None else bool(known)
        found = super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        if isinstance(expr, sympy.Eq) and found:
            self.asserted.add(expr)
        return found


class _Rewritten(TorchFunctionMode):
    """Functions that would make a symbolic integer a number replaced by ones that do not; and tensors from outside
    by fake ones before autograd sees them, lest a write in place leaves its mark on them."""

    def __init__(self, outside: Outside, functional: Functional) -> None:
        super().__init__()
        self.outside, self.functional, self.picked = outside, functional, PickedRows()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in intercepted.REFUSED:
            raise NotFollowed(intercepted.REFUSED[func])
        if not all(issubclass(kind, Tensor) or is_of_library(kind) for kind in types):
            raise NotFollowed("it hands a function of torch an object that has a __torch_function__ of its own")
        if func in intercepted.NOT_ASKED and frame_of_loop(sys._getframe(1)):
            if func in intercepted.KNOWN_OUTSIDE and not isinstance(args[0], FunctionalTensor):
                return func(*args, **(kwargs or {}))
            raise NotFollowed(intercepted.NOT_ASKED[func])
        args, kwargs = self.outside.lifted(args), self.outside.lifted(kwargs or {})
        self.picked.check_read(func, args, kwargs)
        if (why := why_refused(func, args, kwargs)) is not None:
            raise NotFollowed(why)
        replacement = intercepted.REPLACED.get(func)
        if func in intercepted.DETACH_IN_PLACE:
            return self.functional.detach_in_place(args[0])
        try:
            with unnoted():
                if replacement is not None:
                    with self:
                        result = replacement(*args, **kwargs)
                    if result is not NotImplemented:
                        if func is Tensor.__getitem__ and intercepted.shows_a_row(args[1]):
                            self.picked.note(args[0], args[1], result)
                        if func is Tensor.__setitem__:
                            self.picked.note_put_back(*args)
                        return result
                result = func(*args, **kwargs)
                if func == intercepted.DATA:
                    self.functional.blind[result] = False  # nobody counts what is written to it
                return result
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
    recorder, outside = Recorder(trace, step, fake), Outside(fake)
    recorder.trace_no_grad = GrowingList.with_gradients = torch.is_grad_enabled()
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
    decided: list[Any] = []
    try:
        # What torch's own functions call, such as that of nn.MultiheadAttention, is attention in plain operators, too.
        functional = Functional(recorder, outside)
        with fake, recorder, functional, _no_custom_gradients(), sdpa_kernel(SDPBackend.MATH):
            wrapped = {p: FunctionalTensor.to_functional(x) if isinstance(x, Tensor) else x for p, x in leaves.items()}
            functional.given += [x for x in wrapped.values() if isinstance(x, FunctionalTensor)]
            grown = {path: Appended(path) for path in lists}
            trace.came = {memory_of(x): path for path, x in wrapped.items() if isinstance(x, FunctionalTensor)}
            before.install({**wrapped, **grown})
            drop(cells, temporary)
            held = held_by_containers(before)
            rewritten = _Rewritten(outside, functional)
            with outside, rewritten, refused_effects(), stand_ins_unseen(trace.taken), noting_conditions(decided):
                handed = begin_lists(before)
                with noted():
                    step(position)
                    drop(cells, temporary - read_after)
                adopt_lists(step, before, temporary)
                settle_lists(step, handed, trace)
            trace.after = look(step, temporary)
            note_containers(trace, before, held)
            for path, content in before.contents.items():
                leaf = before.leaves[path]
                if path not in given and trace.after.contents.get(path) != content:
                    raise NotFollowed(f"it changes {in_words(path)}, a {type(leaf).__name__}, in place")
            note_what_is_left(trace, recorder, outside, before, tensors, leaves, wrapped, grown)
            rewritten.picked.check_left(trace)
    except NotFollowed as why:
        raise NotFollowed(why.reason, why.place or _line_of(why, step)) from why
    except IsRead:
        raise
    except Exception as error:
        raise NotFollowed(_in_a_line(error), _line_of(error, step)) from error
    for expr in (*(guard.expr for guard in env.guards), *decided):
        trace.conditions.append(as_number(expr, True))
    return trace


def _integer(env: ShapeEnv, name: str, hint: int, lowest: int | None = None) -> torch.SymInt:
    """A symbolic integer. Sizes are not torch's own, of which it takes for granted that none is 0."""
    source = ConstantSource(name)
    symbol = env.create_symbol(
        hint, source, DimDynamic.DYNAMIC, constraint_dim=None, positive=None, do_not_specialize_zero_one=True
    )
    if lowest is not None:
        env.var_to_range[symbol] = ValueRanges(lowest, int_oo)  # pyrefly: ignore[unsupported-operation]
    return env.create_symintnode(symbol, hint=hint, source=source)  # pyrefly: ignore[bad-return]


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


@contextlib.contextmanager
def _no_custom_gradients() -> Iterator[None]:
    """A trace below autograd would lose the gradients that a `torch.autograd.Function` defines."""

    tracing = threading.get_ident()

    def apply(cls: Any, *inputs: Any, **named: Any) -> Any:
        if threading.get_ident() == tracing:
            raise NotFollowed(f"it applies {cls.__name__}, a torch.autograd.Function")
        return own.__get__(None, cls)(*inputs, **named)

    own: Any = torch.autograd.Function.__dict__.get("apply")
    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = own


def _line_of(error: BaseException, step: types.FunctionType) -> str | None:
    """`file:line` of the innermost frame of an error that is the user's."""
    found, entered = None, False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        entered |= code is step.__code__
        if entered and not is_ours(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _in_a_line(error: Exception) -> str:
    kind = type(error).__name__
    if isinstance(error, NotHashable):
        return str(error)
    if "DataDependent" in kind or "unbacked" in str(error).lower():
        return READS_A_NUMBER
    if ".numpy() is not supported" in str(error):
        return "it makes an array of a tensor, so that its way may depend on data"
    if "functional_mode must not be None" in str(error):
        return "it makes a tensor of memory that it is given, as torch.from_numpy and set_() do; do so before the loop"
    if "functorch transform" in str(error):
        return "it calls a transform of torch.func, such as torch.vmap"
    if "_linalg_check_errors" in str(error):
        return "it inverts or factorizes a matrix, and torch checks at each step whether that is possible"
    if "SymIntArrayRef" in str(error):
        return "it calls a function of torch that takes no size that changes from step to step"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if any(kind.__name__ in first for kind in SYMBOLIC):
        return f"it does with a number that changes from step to step what torch's symbols cannot: {first}"
    return f"it raises {kind}: {first}" if first else f"it raises {kind}"

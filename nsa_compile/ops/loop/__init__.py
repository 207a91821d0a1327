"""`nsa_compile::loop`: a scan that stays a loop, with a backward pass of its own.

torch's scan operator is a prototype whose gradients are wrong in several ways, so no graph is handed on with one. The
loop runs the step as two functional graphs (`step.py`), one operator after the other as eager mode does, or compiled:
the forward loop keeps what the backward loop needs, once for each step; parameters, and whatever is made of them alone,
once.

A program is known by a digest of all that it does, so that code which a compiler has kept from an earlier process finds
it: the process that uses such code has registered the program before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile import modes
from nsa_compile.ops.declaration import refuse_second_derivatives
from nsa_compile.ops.loop.step import Layout, LoopNotTraced, StepGraphs, trace_step
from nsa_compile.workarounds import as_function

__all__ = ["Compiler", "LoopNotTraced", "Program", "program", "register", "run_loop"]

# Of a direction of a step and its inputs: a function of inputs laid out as these.
Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Sequence[Tensor]]]
_compiling = threading.RLock()


class Program:
    """A loop: its step, the layouts of what the step reads, its length, and which of its results are read.

    Results that had a gradient as captured (`with_gradient`) have one, though it may be zero in what is left of a step.
    A step that is `recomputed` in the backward pass keeps nothing for it. A `compiler` is given each direction of the
    step when it first runs.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        inputs: Sequence[Layout],
        n_init: int,
        n_xs: int,
        length: int,
        autocast: modes.Autocast,
        read: Sequence[int],
        with_gradient: Sequence[int] = (),
        recomputed: bool = False,
        compiler: Compiler | None = None,
    ) -> None:
        self.with_gradient, self.recomputed, self.compiler = tuple(with_gradient), recomputed, compiler
        self.body, self.inputs, self.autocast, self.read = body, tuple(inputs), autocast, tuple(read)
        self.n_init, self.n_xs, self.length = n_init, n_xs, length
        self._graphs: dict[tuple[bool, ...], StepGraphs] = {}
        self._compiled: dict[Any, Callable[..., Sequence[Tensor]]] = {}

    def graphs(self, differentiable: Sequence[bool]) -> StepGraphs:
        """The two directions of the step, where these inputs have gradients (none of them, if empty).

        Raises:
            LoopNotTraced: the step holds something that has no functional form.
        """
        key = tuple(differentiable)
        if key not in self._graphs:
            self._graphs[key] = trace_step(
                self.body, self.inputs, self.n_init, self.n_xs, self.length, key, self.autocast, self.read,
                self.recomputed,
            )  # fmt: skip
        return self._graphs[key]

    def compiles(self, step: StepGraphs) -> bool:
        """Whether the directions of a step are compiled. None is that draws random numbers, which a compiler would
        draw in another way, or computes with complex ones, of which Inductor knows little (torch 2.13)."""
        return self.compiler is not None and not (step.random or step.is_complex)

    def function(
        self, step: StepGraphs, direction: fx.GraphModule, inputs: Sequence[Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        """What runs a direction of a step on inputs laid out as these."""
        if self.compiler is None or not self.compiles(step):
            return as_function(direction)
        key = direction, tuple(map(Layout.of, inputs))
        with _compiling:
            if key not in self._compiled:
                self._compiled[key] = self.compiler(direction, inputs)
        return self._compiled[key]

    def digest(self) -> str:
        shape = (
            f"{self.inputs}|{self.n_init}|{self.n_xs}|{self.length}|{self.autocast}|{self.read}|{self.with_gradient}|"
            f"{self.recomputed}|{self.compiler is not None}"
        )
        text = f"{shape}|{torch.__version__}\n{_text(self.body)}"
        if " at 0x" in text:  # an object without a name: nothing but this process knows what it does
            text = uuid.uuid4().hex
        return hashlib.sha256(text.encode()).hexdigest()

    def rows_of(self, xs: Sequence[Tensor], places: Sequence[int] | None = None) -> list[tuple[Tensor, ...]]:
        """The rows of xs, all or those at `places`, in the layouts that the step was traced with."""
        layouts = self.inputs[self.n_init : self.n_init + self.n_xs]
        chosen = layouts if places is None else [layouts[i] for i in places]
        return [layout.rows_of(x) for layout, x in zip(chosen, xs, strict=True)]

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Inputs of the loop as carries, xs and additional inputs."""
        a, b = self.n_init, self.n_init + self.n_xs
        return list(tensors[:a]), list(tensors[a:b]), list(tensors[b:])


_programs: dict[str, Program] = {}


def register(loop: Program, taken: Collection[str] = ()) -> str:
    """Register a program, and return the name by which the operator finds it.

    It is none of those `taken` in the same graph: AOTAutograd computes equal operators once, and two results of the
    caller's would be one tensor.
    """
    digest = loop.digest()
    key = next(name for i in itertools.count() if (name := f"{digest}.{i}") not in taken)
    _programs.setdefault(key, loop)
    return key


def program(key: str) -> Program:
    return _programs[key]


def _text(gm: fx.GraphModule) -> str:
    lines = []
    for node in gm.graph.nodes:
        lines.append(f"{node.op} {node.name} {_name(node.target)} {node.args} {node.kwargs}")
        if node.op == "get_attr":
            held = getattr(gm, node.target)
            if isinstance(held, fx.GraphModule):
                lines.append(_text(held))
            elif isinstance(held, Tensor):
                lines.append(f"{Layout.of(held)} {held.detach().cpu().tolist()}")
    return "\n".join(lines)


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}:{type(target).__name__}"


def run_loop(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The final carries, and the outputs of all steps, `[S, ...]` each.

    Args:
        key: of a registered program.
        tensors: carries, xs `[S, ...]`, and additional inputs.
    """
    # Operators record nothing in inference mode, with gradients enabled within it or not; an autograd function does.
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if recorded and any(x.requires_grad for x in tensors):
        differentiable = [x.requires_grad for x in tensors]
        *results, _ = _Differentiable.apply(key, differentiable, *_with_gradients(key, differentiable, tensors))
        return results
    return _operator(key, [])(tensors[0], list(tensors[1:]), key, [])


def _with_gradients(key: str, differentiable: Sequence[bool], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, those that no result depends on without what they were made of: no gradient is asked of that, which
    may have been overwritten since. One stays as it is, so that results may have a gradient of zero."""
    found = program(key).graphs(differentiable).gradients or [differentiable.index(True)]
    return [
        x.detach() if flag and i not in found else x
        for i, (x, flag) in enumerate(zip(tensors, differentiable, strict=True))
    ]


class _Differentiable(torch.autograd.Function):
    """The loop and its backward loop."""

    @staticmethod
    def forward(ctx: Any, key: str, differentiable: list[bool], *tensors: Tensor) -> Any:
        ctx.key, ctx.differentiable = key, differentiable
        step = program(key).graphs(ctx.differentiable)
        outputs = _operator(key, ctx.differentiable)(tensors[0], list(tensors[1:]), key, ctx.differentiable)
        results = outputs[: program(key).n_init + len(step.ys)]
        history = tensors[0].new_empty(0, dtype=torch.float32)
        with_gradient = {*step.with_gradient, *program(key).with_gradient}
        ctx.mark_non_differentiable(*(x for i, x in enumerate(results) if i not in with_gradient))
        # Nothing else: somebody may write to an input that backward does not need.
        _, xs, additional = program(key).split(tensors)
        read = [*(xs[i] for i in step.rows_read), *(additional[i] for i in step.additional_read)]
        # Nor to an index of an operator whose gradient nobody asks for. Indices are small.
        read = [x if x.is_floating_point() or x.is_complex() else x.clone() for x in read]
        ctx.save_for_backward(*read, *outputs[len(results) :], history)
        return *results, history

    @staticmethod
    @torch._disable_dynamo  # a backward pass within a compiled function: saved tensors of a checkpoint are read once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step = program(ctx.key).graphs(ctx.differentiable)
        *saved, history = ctx.saved_tensors  # read once: it may be computed
        n = len(step.rows_read) + len(step.additional_read)
        wanted = [gradients[i] for i in step.tangents]
        # What the loop has kept has no history, and what it is given may have none.
        read = [*saved[:n], *([history] if torch.is_grad_enabled() else [])]
        found = loop_backward(wanted, saved[n:], read, ctx.key, ctx.differentiable)
        by_input = dict(zip(step.gradients, found, strict=True))
        return None, None, *(by_input.get(i) for i in range(len(ctx.differentiable)))


_LAZY = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in ("Conjugate", "Negative"))
)


@contextlib.contextmanager
def _as_called_by_itself() -> Iterator[None]:
    """Run operators without autocast, whose casts are in the graphs, and so that they see conjugate and negated views.

    What AOTAutograd compiles calls an operator with those left out: `c.conj() * x` was `c * x` in it (torch 2.13).
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - _LAZY), torch._C._DisableAutocast():
        yield


def _run(first: Tensor, rest: Sequence[Tensor], program: str, differentiable: Sequence[bool]) -> list[Tensor]:
    """The operator. One tensor is no part of the list, as torch learns from it where the operator runs."""
    known = _programs[program]
    step = known.graphs(differentiable)
    with _as_called_by_itself():
        init, xs, additional = known.split([x.resolve_neg() for x in (first, *rest)])
        fixed = as_function(step.before)(*additional)
        carries: Sequence[Tensor] = [x.contiguous() for x in init]
        n = len(carries)
        stacks = [layout.rows(known.length) for layout in (*step.ys, *step.kept)]
        into = [x.unbind(0) for x in stacks]
        compiled, run = known.compiles(step), None
        for t, row in enumerate(zip(*known.rows_of(xs), strict=True)):
            run = run or known.function(step, step.forward, [*carries, *row, *fixed])
            results = run(*carries, *row, *fixed)
            carries = [x.contiguous() for x in results[:n]] if compiled else results[:n]
            for rows, value in zip(into, results[n:], strict=True):
                rows[t].copy_(value)
        # A step may hand an input on as it is; nobody may write to it through the result.
        return [*(x.clone(memory_format=torch.contiguous_format) for x in carries), *stacks]


def _fake(first: Tensor, rest: Sequence[Tensor], program: str, differentiable: Sequence[bool]) -> list[Tensor]:
    known = _programs[program]
    step = known.graphs(differentiable)
    carries = [x.new_empty(x.shape) for x in [first, *rest][: known.n_init]]
    return [*carries, *(layout.rows(known.length) for layout in (*step.ys, *step.kept))]


@torch.library.custom_op(
    "nsa_compile::loop_backward",
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor[] kept, Tensor[] read, str program, bool[] differentiable) -> Tensor[]",
)
def loop_backward(
    gradients: Sequence[Tensor],
    kept: Sequence[Tensor],
    read: Sequence[Tensor],
    program: str,
    differentiable: Sequence[bool],
) -> list[Tensor]:
    """Gradients of the inputs that have one (`StepGraphs.gradients`).

    `gradients` are those of the results that have one (`StepGraphs.tangents`), `read` the xs and the additional inputs
    that it reads; where second derivatives may be asked for, behind them a tensor with the history of the results.
    """
    known = _programs[program]
    step = known.graphs(differentiable)
    n, n_rows = known.n_init, known.n_init + known.n_xs
    with _as_called_by_itself():
        # What a compiled step reads lies in memory as it is.
        gradients, kept, read = ([x.resolve_neg() for x in some] for some in (gradients, kept, read))
        xs, additional = read[: len(step.rows_read)], read[len(step.rows_read) :][: len(step.additional_read)]
        fixed = as_function(step.before_backward)(*additional)
        of_carry = {place: i for i, place in enumerate(step.gradients) if place < n}
        carried = [i for i in step.tangents if i < n]
        compiled, run = known.compiles(step), None
        running = [g.contiguous() for g in gradients[: len(carried)]]
        rows_of_ys = [(g.contiguous() if compiled else g).unbind(0) for g in gradients[len(carried) :]]
        rows_kept = [x.unbind(0) for x in kept]
        rows_of_xs = known.rows_of(xs, step.rows_read)
        # Copied into their place at once: small tensors that live on between large ones keep memory from being reused.
        stacks = {i: known.inputs[place].rows(known.length)
                  for i, place in enumerate(step.gradients) if n <= place < n_rows}  # fmt: skip
        into = {i: x.unbind(0) for i, x in stacks.items()}
        sums: dict[int, Tensor] = {}
        found: list[Tensor] = []
        for t in reversed(range(known.length)):
            of_step = (rows_kept, rows_of_xs, rows_of_ys)
            kept_rows, rows, wanted = ([x[t] for x in some] for some in of_step)
            read_by_step = [*kept_rows, *rows, *fixed, *running, *wanted]
            run = run or known.function(step, step.backward, read_by_step)
            found = list(run(*read_by_step))
            for i, scattered in sorted(step.scattered.items()):
                if i not in sums:
                    sums[i] = known.inputs[step.gradients[i]].rows(1)[0].zero_()
                scattered.add(sums[i], *found[i : i + 2])
                found[i : i + 2] = [sums[i]]
            running = [
                found[of_carry[place]] if place in of_carry else torch.zeros_like(old)
                for place, old in zip(carried, running, strict=True)
            ]
            running = [x.contiguous() for x in running] if compiled else running
            for i, place in enumerate(step.gradients):
                if i in into:
                    into[i][t].copy_(found[i])
                elif place >= n_rows and i not in step.scattered:
                    sums[i] = sums[i].add_(found[i]) if i in sums else found[i].clone()
        first = {i: found[i].clone(memory_format=torch.contiguous_format) for i in of_carry.values()}
        total = {i: x if x.is_sparse else x.contiguous() for i, x in sums.items()}
        results = first | stacks | total
        return [results[i] for i in range(len(step.gradients))]


refuse_second_derivatives(loop_backward, "a scan that stays a loop")


def _refuse_batched_gradients(*_: Any) -> Any:
    raise RuntimeError(
        "batched gradients, as is_grads_batched=True and vectorize=True ask for, go through a scan that stays a loop; "
        "ask for one after the other, or call the function as written, without compiling it"
    )


loop_backward.register_vmap(_refuse_batched_gradients)
# What `torch.autograd.grad` batches by is not what torch.vmap does.
_batched = torch.library.Library("nsa_compile", "IMPL", "Batched")
_batched.impl("loop_backward", _refuse_batched_gradients)


@loop_backward.register_fake
def _fake_backward(*arguments: Any) -> list[Tensor]:
    program, differentiable = arguments[-2:]
    known = _programs[program]
    scanned = range(known.n_init, known.n_init + known.n_xs)
    layouts = [(known.inputs[i], i in scanned) for i in known.graphs(differentiable).gradients]
    return [
        x.rows(known.length) if rows else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, rows in layouts
    ]


def _define(name: str, *tags: torch.Tag) -> Any:
    operator = torch.library.custom_op(
        f"nsa_compile::{name}",
        _run,
        mutates_args=(),
        schema="(Tensor first, Tensor[] rest, str program, bool[] differentiable) -> Tensor[]",
        tags=tags,
    )
    operator.register_fake(_fake)
    return operator


loop = _define("loop")
# Of two equal loops that draw random numbers none stands for the other, and neither may run twice.
random_loop = _define("random_loop", torch.Tag.nondeterministic_seeded)


def _operator(key: str, differentiable: Sequence[bool]) -> Any:
    return random_loop if program(key).graphs(differentiable).random else loop

"""The first call of a compiled program, compared with the loop that it was compiled from.

The loop runs on copies of the real inputs in the program's own precision and, where the program has a form in double
precision, in that as well: the judge. A compiled program may be off the judge by `TOLERATED` times what the loop itself
is off by, and by one rounding of the result. Where that does not explain a difference, the loop runs again on inputs
that differ from the real ones by a few roundings, which tells what rounding does to this program: a choice between two
values that are nearly equal may go the other way. What is still not explained is an error, and names the pass.

Loops are dear. Beyond `BUDGET` each makes only its first steps; the rows after them are taken from what the passes make
of the same graph, whose further results are those of its scans. A scan's first rows depend on no later one, so this is
the loop's own result wherever the compiled program is right; what is not seen is a fault of later rows alone.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

from nsa_compile import modes
from nsa_compile.errors import Miscompiled
from nsa_compile.ir.aten import is_inexact
from nsa_compile.ir.scans import find_scans
from nsa_compile.passes.bisection import first_failing, passes_asked_for, without_passes
from nsa_compile.passes.pipeline import Options
from nsa_compile.program.eager_loop import (
    EagerLoop,
    Unchecked,
    cost_of_step,
    in_double,
    used_results,
    wide,
    without_regions,
)

log = logging.getLogger("nsa_compile")

__all__ = ["FirstCall"]

# Elements that the loops of one run may compute, an operator counted as `ELEMENTS_PER_CALL`: a second or so forward.
BUDGET = 2**28
# How much worse than the loop a compiled program may be before rounding no longer explains it.
TOLERATED = 2.0
# How often the loop runs on inputs that differ by a rounding, before a difference is called an error.
JITTERS = 4

Program = Callable[..., Any]
# Runs the passes over a graph, in place, and returns the program, run operator by operator.
Rewrite = Callable[[fx.GraphModule, Options, Sequence[Any]], Program]


class FirstCall:
    """A compiled program that compares its first call with the loop; later calls go straight to it.

    Args:
        captured: the graph as it was before any pass; it is changed.
        program: the compiled program.
        options: what it was compiled with.
        rewrite: runs the passes again, on a graph like `captured`.
        tell: takes one line that says what was compared.
    """

    def __init__(
        self,
        captured: fx.GraphModule,
        program: Program,
        options: Options,
        rewrite: Rewrite,
        tell: Callable[[str], None],
    ) -> None:
        self.captured: fx.GraphModule | None = captured
        self.program, self.options, self.rewrite, self.tell = program, options, rewrite, tell
        self.warned = False

    def __call__(self, *inputs: Any) -> Any:
        """Call the program.

        Raises:
            Miscompiled: it computes something else than the loop; the next call is compared again.
        """
        if self.captured is not None:
            self._compare(self.captured, inputs)
        return self.program(*inputs)

    def _compare(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> None:
        promised = all(_is_promised(x) for x in inputs if isinstance(x, Tensor))
        start = time.perf_counter()
        try:
            if not promised:
                raise Unchecked("an input holds NaN or infinity; the next call is compared")
            # Whoever takes the time of compilations counts this one in.
            with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "first call"), _untouched():
                told = compare(captured, self.program, inputs, self.options, self.rewrite)
            self.tell(f"{told}, in {time.perf_counter() - start:.1f} s")
        except Unchecked as why:
            self.tell(f"not compared with the loop: {why}")
            if not self.warned:
                log.warning("the first call is not compared with the loop: %s", why)
            self.warned = True
        if promised:
            self.captured = None


def _is_promised(x: Tensor) -> bool:
    """Whether the compiler promises anything for a tensor's values: -inf masks scores, which is seen to."""
    return not x.is_floating_point() or not bool((x.isnan() | x.isposinf()).any())


@contextmanager
def _untouched() -> Iterator[None]:
    """Leave the random generators, autocast and grad mode as they were, hidden from modes and hooks."""
    states = _random_states()
    with modes.restored(), modes.unobserved():
        torch.set_autocast_cache_enabled(False)  # casts of copies would stay in it
        try:
            yield
        finally:
            _set_random_states(states)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _random_states() -> list[Tensor]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpus]


def _set_random_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, device)


# ---------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Outcome:
    """What a call leaves: outputs and inputs that were written to, and gradients, each by a name for people; and all
    inputs, since some operators do not say that they write (`native_batch_norm`)."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    inputs: dict[str, Tensor]


def _outcome(program: Program, inputs: Sequence[Any], names: Sequence[str], *, double: bool = False) -> Outcome:
    """Call a program on copies of its inputs, and differentiate the sum of all it leaves, weighted at random."""
    states = _random_states()
    with modes.restored():
        try:
            return _run(program, inputs, names, double)
        finally:
            _set_random_states(states)


def _run(program: Program, inputs: Sequence[Any], names: Sequence[str], double: bool) -> Outcome:
    leaves = _copies(inputs, wide if double else lambda x: x)
    given = [_not_a_leaf(leaf) if isinstance(x, Tensor) and not x.is_leaf and x.requires_grad else leaf
             for x, leaf in zip(inputs, leaves, strict=True)]  # fmt: skip
    before = [_version(x) for x in given]
    outputs = program(*given)
    values = {f"output {i}": y for i, y in enumerate(outputs) if isinstance(y, Tensor)}
    for name, x, version in zip(names, given, before, strict=True):
        if isinstance(x, Tensor) and (version is None or _version(x) != version):
            values[_after(name)] = x
    wanted = {f"the gradient of input {name}": x for name, x in zip(names, leaves, strict=True) if _has_gradient(x)}
    gradients: dict[str, Tensor] = {}
    if wanted and torch.is_grad_enabled():
        found: Sequence[Tensor | None] = [None] * len(wanted)
        ends = {i: y for i, y in enumerate(values.values()) if _has_gradient(y)}
        if ends:
            weights = [_weights(y, i) for i, y in ends.items()]
            found = torch.autograd.grad(list(ends.values()), list(wanted.values()), weights, allow_unused=True)
        gradients = {
            name: torch.zeros_like(x) if g is None else g
            for (name, x), g in zip(wanted.items(), found, strict=True)
        }  # fmt: skip
    after = {_after(name): x.detach() for name, x in zip(names, given, strict=True) if isinstance(x, Tensor)}
    return Outcome({name: y.detach() for name, y in values.items()}, gradients, after)


def _after(name: str) -> str:
    return f"input {name} after the call"


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _version(x: Any) -> int | None:
    """A number that changes when a tensor is written to; None if there is none, or no tensor."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


def _weights(y: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)


def _copies(inputs: Sequence[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    """Copies of all tensors, put through `change`, with their strides; those that share memory share it again.

    Raises:
        Unchecked: an input is a tensor of a kind that cannot be copied so.
    """
    groups: dict[Any, list[Tensor]] = {}
    for x in inputs:
        if isinstance(x, Tensor):
            if type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.layout != torch.strided or x.is_conj():
                raise Unchecked(f"an input is a {type(x).__name__} of layout {x.layout}")
            groups.setdefault((x.untyped_storage()._cdata, x.dtype, x.is_neg()), []).append(x)
    copied: dict[int, Tensor] = {}
    with torch.no_grad():
        for group in groups.values():
            start = min(x.storage_offset() for x in group)
            stop = max(x.storage_offset() + _extent(x) for x in group)
            flat = change(group[0].detach().as_strided((stop - start,), (1,), start).clone())
            for x in group:
                view = flat.as_strided(x.shape, x.stride(), x.storage_offset() - start)
                copied[id(x)] = view.detach().requires_grad_(x.requires_grad)
    return [copied[id(x)] if isinstance(x, Tensor) else x for x in inputs]


def _extent(x: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 0 if x.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def _not_a_leaf(x: Tensor) -> Tensor:
    """A copy with the same strides that autograd lets be written to."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _jittered(inputs: Sequence[Any], by: float, seed: int) -> list[Any]:
    """Inputs that are larger or smaller by a share `by` of themselves, at random."""
    moved = _copies(inputs, lambda x: _jitter(x, by, seed))
    # As in the call, what is no leaf may be written to.
    return [_not_a_leaf(m) if _has_gradient(x) and not x.is_leaf else m for x, m in zip(inputs, moved, strict=True)]


def _moved(inputs: Sequence[Any], by: float) -> list[Any]:
    """The same, with gradients that go to the inputs."""
    return [
        x + (_jitter(x.detach(), by, JITTERS) - x.detach()) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    ]


def _jitter(x: Tensor, by: float, seed: int) -> Tensor:
    """Whole numbers stay as they are: they count, mask, or fill."""
    if not x.dtype.is_floating_point or x.numel() == 0:
        return x
    signs = 2 * torch.randint(2, x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device) - 1
    moved = (x.double() * (1 + by * signs.double())).to(x.dtype)
    return torch.where(x.isfinite() & (x != x.round()), moved, x)


# ------------------------------------------------------------------------------------------------ the comparison


def compare(
    captured: fx.GraphModule, program: Program, inputs: Sequence[Any], options: Options, rewrite: Rewrite
) -> str:
    """Compare a compiled program with the loop on these inputs, and say what was compared.

    Raises:
        Miscompiled: they differ by more than rounding explains.
        Unchecked: they cannot be compared.
    """
    loops = Loops(captured, inputs, rewrite)
    references = loops.references(options)
    if references.random and options.nested == "inductor":
        raise Unchecked("it draws random numbers, and Inductor draws others; nested='aot_eager' draws the same")
    if references.random and loops.steps:
        raise Unchecked("it draws random numbers, in a loop that is too long to be run whole")
    actual = _outcome(program, inputs, loops.names)
    problem = references.problem(actual)
    if problem is not None:
        raise Miscompiled(f"{_culprit(loops, options)}: the compiled program differs from its loop: {problem}")
    counts = f"{_count(actual.values, 'value')} and {_count(actual.gradients, 'gradient')}"
    return f"equal to the loop at the first call: {counts}{loops.extent}"


def _count(things: Mapping[str, Any], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _culprit(loops: Loops, options: Options) -> str:
    """What makes a compiled program differ from its loop, found by running it after more and fewer passes."""
    names = passes_asked_for(dataclasses.asdict(options))

    def fails(count: int) -> bool:
        trial = dataclasses.replace(options, disable=without_passes(names[count:], options.disable))
        try:
            program = loops.rewritten(loops.captured, trial)
            return loops.references(trial).problem(_outcome(program, loops.inputs, loops.names)) is not None
        except Exception:
            return True

    if not fails(len(names)):
        return "the kept result of the passes" if options.nested == "eager" else f"nested backend {options.nested}"
    if fails(0):
        return "no pass"
    return f"pass {names[first_failing(fails, 0, len(names)) - 1]}"


class Loops:
    """The loops of a captured graph on its first inputs: all their steps, or the first ones.

    Attributes:
        steps: how many steps each scan makes, where not all of them.
    """

    def __init__(self, captured: fx.GraphModule, inputs: Sequence[Any], rewrite: Rewrite) -> None:
        self.captured, self.inputs, self.rewrite = captured, inputs, rewrite
        self.names = [n.name for n in captured.graph.find_nodes(op="placeholder")]
        self.steps = self._affordable()
        self._whole: References | None = None

    @property
    def extent(self) -> str:
        """How much of the loops is run, in words; nothing where there is no loop."""
        lengths = {site.node.name: site.length for site in find_scans(self.captured)}
        made = sum(self.steps.get(name, length) for name, length in lengths.items())
        return f", {made} of {sum(lengths.values())} steps" if lengths else ""

    def _affordable(self) -> dict[str, int]:
        cost = sum(site.length * cost_of_step(site.body) for site in find_scans(self.captured))
        if cost <= BUDGET:
            return {}
        without_regions(self.captured)
        sites = find_scans(self.captured)
        if any(site.owner is not self.captured or used_results(site.node) is None for site in sites):
            log.warning("first call: no prefix of the loop can be told apart, so all its steps are compared")
            return {}
        return {site.node.name: max(1, site.length * BUDGET // cost) for site in sites}

    def rewritten(self, graph: fx.GraphModule, options: Options) -> Program:
        """What the passes make of a graph, run operator by operator."""
        plain = dataclasses.replace(
            options, nested="eager", check=False, cache=False, dump_dir=None, on_decline="warn", estimate=False
        )
        return self.rewrite(copy.deepcopy(graph), plain, self.inputs)

    def references(self, options: Options) -> References:
        """What the loop leaves. Where it makes its first steps only, that depends on the passes."""
        if self.steps:
            return References(self, self._results(options))
        self._whole = self._whole or References(self, None)
        return self._whole

    def _results(self, options: Options) -> NamedResults:
        """What the scans yield in the program that the passes make of the graph, as a function of its inputs."""
        graph = copy.deepcopy(self.captured)
        output = graph.graph.output_node()
        outputs: Any = output.args[0]
        places: list[tuple[str, int]] = []
        nodes: list[fx.Node] = []
        for site in find_scans(graph):
            used = used_results(site.node) or {}
            places += [(site.node.name, place) for place in used]
            nodes += used.values()
        output.args = ((*outputs, *nodes),)
        graph.recompile()
        run = self.rewritten(graph, options)

        def results(inputs: Sequence[Any]) -> dict[tuple[str, int], Tensor]:
            # Copies, since the program may write to its inputs.
            found = list(run(*[x.clone() if isinstance(x, Tensor) else x for x in inputs]))
            return dict(zip(places, found[-len(places) :], strict=True))

        return results


class References:
    """What the loop leaves: in its own precision, in double precision if it can, and, in doubt, on other inputs.

    Attributes:
        random: whether it drew random numbers.
        dtypes: floating dtypes that it computed in.
    """

    def __init__(self, loops: Loops, results: NamedResults | None) -> None:
        self.loops, self.results = loops, results
        self.random = False
        self.dtypes: set[torch.dtype] = set()
        try:
            self.eager = self._loop(loops.inputs)
        except Unchecked:
            raise
        except Exception as error:
            raise Unchecked(f"the loop itself raises {_line(error)}") from error
        self.exact = None if self.random or self.dtypes == {torch.float64} else self._in_double()
        self.others: list[Outcome] = []

    def problem(self, actual: Outcome) -> str | None:
        """What rounding does not explain, if anything."""
        while (found := self._judged(actual)) is not None and len(self.others) < JITTERS:
            pair, sign = divmod(len(self.others), 2)
            # Both ways, since a choice turns around in one of the two. Roundings add up in sums, which narrow dtypes
            # make in float32.
            by = self.eps * 8 if self.eps <= torch.finfo(torch.float32).eps else self.eps
            self.others.append(self._loop(_jittered(self.loops.inputs, by * (1 - 2 * sign), pair)))
        return found

    @property
    def eps(self) -> float:
        """Twice the largest rounding: that of the coarsest dtype the program computes in."""
        return max((torch.finfo(dtype).eps for dtype in self.dtypes), default=torch.finfo(torch.float32).eps)

    def _loop(self, inputs: Sequence[Any]) -> Outcome:
        def run(*given: Any) -> Any:
            def rest() -> dict[tuple[str, int], Tensor]:
                assert self.results is not None
                self.dtypes |= loop.dtypes
                return self.results(_moved(given, self.eps))

            states = _random_states()
            loop = EagerLoop(self.loops.captured, self.loops.steps, rest)
            outputs = loop.run(*given)
            self.dtypes |= loop.dtypes
            self.random |= any(not torch.equal(a, b) for a, b in zip(states, _random_states(), strict=True))
            return outputs

        return _outcome(run, inputs, self.loops.names)

    def _in_double(self) -> Outcome | None:
        """What the loop leaves in double precision; None where something in it asks for another one."""

        def run(*given: Any) -> Any:
            def rest() -> dict[tuple[str, int], Tensor]:
                assert self.results is not None
                pairs = zip(given, self.loops.inputs, strict=True)
                back = [g.to(x.dtype) if isinstance(x, Tensor) else x for g, x in pairs]
                with _default_dtype(default), modes.under(state):
                    return {place: wide(x) for place, x in self.results(back).items()}

            with modes.under(tuple((device, dtype, False) for device, dtype, _ in state)):
                return EagerLoop(graph, self.loops.steps, rest).run(*given)

        default, state = torch.get_default_dtype(), modes.autocast_now()
        try:
            graph = in_double(self.loops.captured)
            with _default_dtype(torch.float64):
                return _outcome(run, self.loops.inputs, self.loops.names, double=True)
        except Exception as error:
            log.info("first call: no judge in double precision: %s", _line(error))
            return None

    def _judged(self, actual: Outcome) -> str | None:
        eager, exact = self.eager, self.exact or self.eager
        for kind in ("values", "gradients"):
            a, e, x, *others = (dict(getattr(outcome, kind)) for outcome in (actual, eager, exact, *self.others))
            for one, outcome in zip((a, e, x, *others), (actual, eager, exact, *self.others), strict=True):
                one |= {name: y for name, y in outcome.inputs.items() if name in a or name in e}
            if a.keys() != e.keys():
                return f"only one of them leaves {min(a.keys() ^ e.keys())}"
            scale = max((_rms(y) for y in x.values()), default=0.0)
            for name in e:
                found = _difference(a[name], e[name], x[name], [o[name] for o in others], self.eps, scale)
                if found is not None:
                    return f"{name} {found}"
        return None


# Of inputs: what the scans yield, by name and place.
NamedResults = Callable[[Sequence[Any]], dict[tuple[str, int], Tensor]]


def _difference(
    actual: Tensor, eager: Tensor, exact: Tensor, others: Sequence[Tensor], eps: float, scale: float
) -> str | None:
    """How a result differs from the loop's, if by more than rounding explains.

    Args:
        actual: the compiled program's.
        eager: the loop's.
        exact: the judge's; the loop's again where there is no judge.
        others: the loop's on inputs that differ by roundings.
        eps: of the precision.
        scale: the size of the largest of all results of the kind: sums that cancel are as wrong as their terms.
    """
    if (actual.dtype, actual.shape) != (eager.dtype, eager.shape):
        return f"is {actual.dtype}{list(actual.shape)}, and the loop's {eager.dtype}{list(eager.shape)}"
    if not is_inexact(eager.dtype):
        share, explained = _unequal(actual, eager), max((_unequal(o, eager) for o in (exact, *others)), default=0.0)
        return f"differs in {share:.3%} of its elements" if share > TOLERATED * explained else None
    actual, eager, exact, *others = (_real(y) for y in (actual, eager, exact, *others))
    share = _unequal(_nonfinite(actual), _nonfinite(eager))
    if share > TOLERATED * max((_unequal(_nonfinite(o), _nonfinite(eager)) for o in others), default=0.0):
        return f"has NaN or infinity in other places than the loop's ({share:.3%} of its elements)"
    finite = torch.stack([y.isfinite() for y in (actual, eager, exact, *others)]).all(0)
    actual, eager, exact, *others = (torch.where(finite, y, 0) for y in (actual, eager, exact, *others))
    size, error = _rms(exact), _rms(actual - exact)
    noise = max(_rms(y - exact) for y in (eager, *others))
    floor = eps / 2 * scale
    if noise < eps**0.5 * size:  # the loop gets this one right however small it is, so it is no sum that cancels
        floor = min(floor, eps**0.5 * size)
    allowed = TOLERATED * noise + floor
    return f"is off by {error:.3g} of {size:.3g} where rounding explains {allowed:.3g}" if error > allowed else None


def _real(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def _nonfinite(x: Tensor) -> Tensor:
    """0 where a number is finite, and which of NaN and the infinities it is elsewhere."""
    return torch.where(x.isfinite(), 0, x).nan_to_num(nan=2, posinf=1, neginf=-1)


def _unequal(a: Tensor, b: Tensor) -> float:
    """The share of elements that differ."""
    return float((a != b).double().mean()) if a.numel() else 0.0


def _rms(x: Tensor) -> float:
    if x.numel() == 0 or not is_inexact(x.dtype):
        return 0.0
    return float(_real(x).nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"

"""Judge programs of `tests/model_programs.py`: run as written and compiled, then compare all that a caller can see.

    python -c "from tests.model_judge import *; print(judge(open('program.py').read()))"

Seen are values, dtypes and gradients of the outputs, arguments, parameters, buffers and global tensors after the call,
memory shared between any of them, and the random state left behind. After each call the outputs are overwritten, as
their owner may, and the first shape is called once more at the end: a frozen draw or a constant handed out shows then.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import math
import re
import signal
import sys
import traceback
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.backend import nsa_compile_backend
from nsa_compile.capture import steps

FAILURES = ("wrong_value", "wrong_grad", "wrong_state", "wrong_alias", "wrong_random", "crash", "timeout")
RIGHT = ("batched", "looped", "declined_whole", "no_scan_seen", "one_line_error")
# `torch_differs`: torch.compile alone, with the loop written out in Python, fails in the same way.
VERDICTS = (*RIGHT, "torch_differs", "eager_fails", *FAILURES)


Compiler = Callable[[Callable, dict], Callable]  # of `run`, and the program's names, to what is called instead


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of `VERDICTS`; `cause` says more in a line, without what differs from program to program."""

    kind: str
    cause: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


# ----------------------------------------------------------------------------------------------------- what is observed


@dataclass
class Observation:
    """All that the caller of one call can see, cloned."""

    outputs: dict[str, Any]
    needs_grad: dict[str, bool]
    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    shared: set[tuple[str, str]]  # pairs of names, one of them an output's, that share memory
    random_state: list[Tensor] = field(default_factory=list)
    state_twice: bool = False  # written to when gradients are asked for, by a region that is computed again


class Subject:
    """A program, loaded afresh, called with the arguments of its n-th call; with another seed, on other numbers."""

    def __init__(self, source: str, scan: Callable, compiler: Compiler | None = None, seed: int = 0):
        self.seed = 1000 * seed
        # The source is registered so that stack traces can quote it.
        filename = f"<model program {zlib.crc32(source.encode()):08x}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        # Dynamo looks globals up in the module of that name.
        module = sys.modules["model_program"] = types.ModuleType("model_program")
        self.namespace: dict[str, Any] = module.__dict__
        self.namespace["scan"] = scan
        torch.manual_seed(self.seed)
        exec(compile(source, filename, "exec"), self.namespace)
        self.calls: list[tuple[int, int]] = self.namespace["CALLS"]
        run = self.namespace["run"]
        self.run = run if compiler is None else compiler(run, self.namespace)
        model = self.namespace["model"]
        self.owned = {
            **{name: x for name, x in self.namespace.items() if isinstance(x, Tensor)},
            "GAIN": self.namespace["GAIN"],
        }
        self.model = model

    def state(self) -> dict[str, Tensor]:
        return {**self.owned, **dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def all_calls(self) -> list[Observation]:
        return [self.call(n) for n in range(len(self.calls) + 1)]

    def call(self, n: int) -> Observation:
        """The n-th call; the one after the last repeats the first."""
        torch.manual_seed(self.seed + 100 + n)
        args, leaves = self.namespace["arguments"](*self.calls[n % len(self.calls)])
        torch.manual_seed(self.seed + 200 + n)
        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        mode = self.namespace["MODE"]
        with modes.get(mode, nullcontext)():
            result = checkpoint(self.run, use_reentrant=False, **args) if mode == "checkpoint" else self.run(**args)
        generators = [x for x in self.namespace.values() if isinstance(x, torch.Generator)]
        random_state = [torch.get_rng_state(), *(g.get_state() for g in generators)]

        flat, _ = pytree.tree_flatten_with_path(result)
        outputs = {f"output {pytree.keystr(path)}": x for path, x in flat}
        tensors = {name: x for name, x in outputs.items() if isinstance(x, Tensor)}
        inputs = {f"argument {name}": x for name, x in args.items()} | {f"leaf {n}": x for n, x in leaves.items()}
        inputs |= self.state()
        before = {name: x.detach().clone() for name, x in inputs.items()}
        grads = gradients(tensors, {name: x for name, x in inputs.items() if x.is_leaf and x.requires_grad})
        seen = Observation(
            outputs={name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in outputs.items()},
            needs_grad={name: x.requires_grad for name, x in tensors.items()},
            grads=grads,
            state={name: x.detach().clone() for name, x in inputs.items()},
            shared=shared_memory(tensors, inputs),
            random_state=random_state,
            state_twice=any(not torch.equal(x.nan_to_num(), before[name].nan_to_num()) for name, x in inputs.items()),
        )
        for x in tensors.values():  # they belong to the caller
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                if not any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
                    x.detach().fill_(1)
        return seen


def gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a fixed random projection of all outputs; one that does not exist and one that is zero mean the same."""
    rng = torch.Generator().manual_seed(1)
    loss: Any = 0
    for out in outputs.values():
        if out.is_floating_point():
            weight = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.dtype)
            if out.requires_grad:
                loss = loss + (out * weight).sum().double()
    if not isinstance(loss, Tensor) or not leaves:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x).detach() if g is None else g.detach().clone()
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }


def shared_memory(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> set[tuple[str, str]]:
    def memory(x: Tensor) -> int:
        return x.untyped_storage().data_ptr() if x.numel() else 0

    everything = [*outputs.items(), *inputs.items()]
    pairs = itertools.combinations(everything, 2)
    return {(a, b) for (a, x), (b, y) in pairs if a in outputs and memory(x) and memory(x) == memory(y)}


# ------------------------------------------------------------------------------------------------------------ comparing

# Gradients and values of float64 are compared tightly. Where a program rounds to less on the way, first coarsely, then
# against the same program in float64.
BANDS = {"float64": (1e-9, 1e-10), "float32": (1e-3, 1e-3), "bfloat16": (0.1, 0.2)}
FARTHER = "farther from float64 than eager"
ROUNDINGS = {
    "float32": 4 * 2.0**-23,
    "bfloat16": 4 * 2.0**-8,
}  # that a compiled program may add, of the largest element
OTHER_NUMBERS = 8  # draws on which a result within its band that is too far from the exact one is judged again


def precision(source: str) -> str:
    """The least precise dtype that a program rounds to."""
    if "torch.bfloat16\n" in source or re.search(r"DTYPE, D, G = torch.bfloat16|autocast|dtype=torch.bfloat16", source):
        return "bfloat16"
    return "float32" if re.search(r"DTYPE, D, G = torch.float32|\.float\(\)|torch\.float32", source) else "float64"


def close(actual: Tensor, expected: Tensor, least: str) -> bool:
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    rtol, atol = BANDS[least]
    scale = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    atol *= max(1.0, scale) if least != "float64" else max(1.0, min(scale, 1e6))
    return torch.allclose(actual.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def in_float64(source: str) -> str | None:
    """The same program, rounding to nothing less; arguments and weights are numbers that all dtypes have."""
    if "autocast" in source:
        return None
    for less, more in (
        ("torch.float32", "torch.float64"),
        ("torch.bfloat16", "torch.float64"),
        (".float()", ".double()"),
    ):
        source = source.replace(less, more)
    return source


def as_exact(actual: Tensor, expected: Tensor, exact: Any, least: str) -> bool | None:
    """Whether a result is as near as eager's to the exact one: twice as far, and a few roundings.

    None where eager's own is far from it: the other program is another one then; its random numbers are, or a decision
    fell otherwise.
    """
    if not isinstance(exact, Tensor) or exact.shape != expected.shape or not expected.is_floating_point():
        return None
    if not expected.numel() or not close(expected, exact, least):
        return None
    scale = max(1.0, exact.nan_to_num(0, 0, 0).abs().max().item())
    far, eager_is = ((x.double() - exact.double()).nan_to_num(0, 0, 0).abs().max().item() for x in (actual, expected))
    return far <= 2 * eager_is + ROUNDINGS[least] * scale


def difference(
    kind: str, actual: dict[str, Any], expected: dict[str, Any], exact: dict[str, Any], least: str
) -> Verdict | None:
    if list(actual) != list(expected):
        return Verdict(kind, "another structure")
    for name, wanted in expected.items():
        got = actual[name]
        what = re.sub(r"\d+", "", name.split("[")[0].strip()) if kind != "wrong_state" else name.split(" ")[0]
        if not isinstance(wanted, Tensor):
            if got != wanted:
                return Verdict(kind, f"{what}: not a tensor, {got!r} instead of {wanted!r}")
        elif not isinstance(got, Tensor) or got.shape != wanted.shape:
            return Verdict(kind, f"{what}: another shape")
        elif got.dtype != wanted.dtype:
            return Verdict(kind, f"{what}: {got.dtype} instead of {wanted.dtype}")
        elif not close(got, wanted, least):
            if wanted.is_floating_point() and bool((wanted.isnan() & ~got.isnan()).any()):
                return Verdict(kind, f"{what}: a number where eager has NaN")
            if wanted.is_floating_point() and bool((got.isnan() & ~wanted.isnan()).any()):
                return Verdict(kind, f"{what}: NaN where eager has a number")
            return Verdict(kind, f"{what}: other numbers")
        elif as_exact(got, wanted, exact.get(name), least) is False:
            return Verdict(kind, f"{what}: {FARTHER}")
    return None


def compare(seen: Observation, wanted: Observation, exact: Observation | None, least: str) -> Verdict | None:
    """The first difference, or None. `exact` is the same program's in float64."""
    reference = exact or Observation({}, {}, {}, {}, set())
    values = difference("wrong_value", seen.outputs, wanted.outputs, reference.outputs, least)
    same_random = all(torch.equal(a, b) for a, b in zip(seen.random_state, wanted.random_state, strict=True))
    if not same_random:
        return Verdict("wrong_random", "the generator is in another state" + (", values differ" if values else ""))
    if values:
        return values
    if found := difference("wrong_state", seen.state, wanted.state, reference.state, least):
        return found
    if found := difference("wrong_grad", seen.grads, wanted.grads, reference.grads, least):
        return found
    if seen.shared != wanted.shared:
        lost, new = wanted.shared - seen.shared, seen.shared - wanted.shared
        a, b = sorted(lost or new)[0]
        words = [re.sub(r"\W.*", "", name) for name in (a, b)]
        return Verdict("wrong_alias", f"{'lost' if lost else 'new'}: {words[0]} with {words[1]}")
    for name, needed in wanted.needs_grad.items():
        if seen.needs_grad[name] != needed:
            return Verdict("wrong_grad", f"an output {'lost' if needed else 'got'} its requires_grad")
    return None


# -------------------------------------------------------------------------------------------------------------- verdict


def nsa_compiler(reports: list[Any]) -> Compiler:
    """Compile as the program says, and collect the reports of all its graphs."""

    def backend(gm: Any, inputs: Any, **options: Any) -> Callable:
        before = nsa_compile.last_report()
        try:
            return nsa_compile_backend(gm, inputs, **options)
        finally:
            if nsa_compile.last_report() is not before:
                reports.append(nsa_compile.last_report())

    def compiler(run: Callable, namespace: dict) -> Callable:
        options = {"nested": namespace["NESTED"], "cache": False}
        # The first form is `nsa_compile.compile`'s, the second the README's.
        dynamic = False if namespace["FULLGRAPH"] else None
        return torch.compile(run, backend=backend, fullgraph=namespace["FULLGRAPH"], dynamic=dynamic, options=options)

    return compiler


def what_happened(reports: list[Any]) -> Verdict:
    """The verdict on a program that came out right."""
    scans = [scan for report in reports for scan in report.scans]
    if any(report.left_alone for report in reports):
        return Verdict("declined_whole")
    if not scans:
        return Verdict("no_scan_seen")
    return Verdict("batched" if all(scan.batched for scan in scans) else "looped")


# Of autograd's message where a saved tensor was written to.
OVERWRITTEN = "needed for gradient computation has been modified by an inplace operation"


def judge(source: str, compiler: Compiler | None = None) -> Verdict:
    """Run a program as written and compiled, on the same arguments and random state.

    Args:
        source: a program of `model_programs`.
        compiler: in place of the project's own; the judge's tests plant faults with it.
    """
    torch._dynamo.reset()
    reports: list[Any] = []
    try:
        with quiet():
            eager = Subject(source, nsa_compile.scan)
            wanted = eager.all_calls()
    except Exception as e:
        return Verdict("eager_fails", f"{type(e).__name__}: {first_line(e)}")
    if eager.namespace["MODE"] == "checkpoint" and any(x.state_twice for x in wanted):
        return Verdict("eager_fails", "what is computed again is written again")
    verdict = against(wanted, source, nsa_compile.scan, compiler or nsa_compiler(reports))
    if verdict is not None and FARTHER in verdict.cause:
        verdict = with_other_numbers(source, compiler or nsa_compiler([]), verdict)
    if verdict is None:
        return what_happened(reports)
    if verdict.failed and overwrites_what_backward_needs(source):
        return Verdict("eager_fails", "a checkpointed region overwrites what its backward needs")
    if verdict.kind == "wrong_grad" and right_where_saved_tensors_are_kept(source, compiler or nsa_compiler([])):
        return Verdict("eager_fails", "a write through .data overwrites what its backward needs")
    if OVERWRITTEN in verdict.cause and right_where_it_keeps_copies(wanted, source, compiler or nsa_compiler([])):
        return Verdict("one_line_error", f"torch: {OVERWRITTEN}")
    if verdict.failed and "NaN" in verdict.cause and makes_nan(source):
        return Verdict("eager_fails", "a layer makes NaN")  # which is not promised to come out alike
    if verdict.failed and compiler is None:
        theirs = against(wanted, source, python_loop, torch_alone)
        alone = same_failure(theirs, verdict) or both_crash_nested(theirs, verdict, source)
        wrong = verdict.kind in ("wrong_value", "wrong_state", "wrong_grad")
        if alone or (wrong and as_functionalized(source)):
            return Verdict("torch_differs", f"{verdict.kind}: {verdict.cause}")
        if wrong and with_contiguous_results(source):
            return Verdict("eager_fails", "it depends on the strides of what a scan returns")
    return verdict


def with_other_numbers(source: str, compiler: Compiler, verdict: Verdict) -> Verdict | None:
    """A result farther from the exact one than eager mode's, judged again: it stands if one is so with other weights
    and arguments, half of the time.

    On one draw, eager mode may be near by luck. Other spellings of the same program are as far then, eagerly: softmax
    attention by `scaled_dot_product_attention`, or divided by its sum after the product, is on 3 to 28 of 100 draws.
    """
    least, found = precision(source), dict[str, list[bool]]()
    for seed in range(1, OTHER_NUMBERS + 1):
        torch._dynamo.reset()
        try:
            with quiet():
                wanted, exact = Subject(source, nsa_compile.scan, seed=seed).all_calls(), exactly(source, seed)
                seen = Subject(source, nsa_compile.scan, compiler, seed).all_calls()
        except Exception as error:
            return judged_error(error)
        for got, eager, best in zip(seen, wanted, exact, strict=True):
            if wrong := compare(got, eager, None, least):
                return wrong
            for kind in ("outputs", "state", "grads"):
                for name, x in getattr(eager, kind).items():
                    near = as_exact(getattr(got, kind)[name], x, getattr(best, kind).get(name), least)
                    found.setdefault(name, []).extend([] if near is None else [near])
    return verdict if any(x and 2 * sum(x) <= len(x) for x in found.values()) else None


class _DrawsInStandardOrder(TorchDispatchMode):
    """`bernoulli_` as functionalization has it: eager mode draws in the order of the elements in memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].copy_(torch.bernoulli(args[0], *(args[1:] or (0.5,)), **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def as_functionalized(source: str) -> bool:
    """Whether a program comes out in all as eager mode does where `bernoulli_`, which is a part of dropout, too, draws
    as its functional form does (torch 2.13)."""
    try:
        with quiet(), _DrawsInStandardOrder():
            seen = Subject(source, nsa_compile.scan).all_calls()
        torch._dynamo.reset()
        return against(seen, source, nsa_compile.scan, nsa_compiler([])) is None
    except Exception:
        return False


def with_contiguous_results(source: str) -> bool:
    """Whether a program comes out in all as eager mode does where what scans return has no strides of its own."""

    def scan(*given: Any) -> Any:
        return pytree.tree_map(lambda x: x if x.is_contiguous() else x.contiguous(), nsa_compile.scan(*given))

    try:
        with quiet():
            seen = Subject(source, scan).all_calls()
        return against(seen, source, nsa_compile.scan, nsa_compiler([])) is None
    except Exception:
        return False


def with_nested(source: str, nested: str) -> str:
    """The same program with another nested backend."""
    return re.sub(r"^NESTED, FULLGRAPH, MODE = '\w+'", f"NESTED, FULLGRAPH, MODE = '{nested}'", source, flags=re.M)


def overwrites_what_backward_needs(source: str) -> bool:
    """Whether a program runs only because of its checkpoints: what these compute again, autograd does not watch, and
    eager gradients are those of the tensors as overwritten (torch 2.13)."""
    if "checkpoint(" not in source and "'checkpoint'" not in source:
        return False
    try:
        with quiet():
            plain = Subject(source.replace("'checkpoint'", "'grad'"), nsa_compile.scan)
            plain.namespace["checkpoint"] = lambda run, *args, use_reentrant, **kwargs: run(*args, **kwargs)
            for n in range(len(plain.calls)):
                plain.call(n)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def right_where_saved_tensors_are_kept(source: str, compiler: Compiler) -> bool:
    """Whether a compiled program that writes through `.data` is in all as eager mode is where autograd saves copies.

    Autograd does not watch such writes. Eager gradients are wrong then, without a word, wherever the tensor written to
    is one that was saved; which ones are is nobody's promise, and a batched scan saves others than its steps do.
    """
    if ".data" not in source:
        return False
    torch._dynamo.reset()
    with quiet():
        eager = Subject(source, nsa_compile.scan)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            kept = eager.all_calls()
    return against(kept, source, nsa_compile.scan, compiler) is None


def right_where_it_keeps_copies(wanted: list[Any], source: str, compiler: Compiler) -> bool:
    """Whether a compiled program is right but for what it saves for its backward pass, and is written to after it.

    Autograd watches such writes and says so. A compiled scan saves other tensors than its steps do.
    """
    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        return against(wanted, source, nsa_compile.scan, compiler) is None


class _MakesNan(TorchDispatchMode):
    """Notes whether an operator makes NaN of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _has_nan((args, kwargs))
        result = func(*args, **(kwargs or {}))
        # What a new tensor holds is nobody's number.
        self.made |= not before and "empty" not in str(func) and _has_nan(result)
        return result


def _has_nan(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    tensors = (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
    return any(isinstance(x, float) and math.isnan(x) for x in leaves) or any(bool(x.isnan().any()) for x in tensors)


def makes_nan(source: str) -> bool:
    """Whether an operator of a program, run as written, makes NaN, as a softmax over nothing but -inf does."""
    with quiet():
        eager = Subject(source, nsa_compile.scan)
        with _MakesNan() as watch:
            for n in range(len(eager.calls) + 1):
                eager.call(n)
    return watch.made


def against(wanted: list[Observation], source: str, scan: Callable, compiler: Compiler) -> Verdict | None:
    """What is wrong with a compiled program, if anything."""
    least = precision(source)
    exact = exactly(source) if least != "float64" else []
    try:
        with quiet():
            subject = Subject(source, scan, compiler)
            pairs = itertools.zip_longest(wanted, exact)
            differences = (compare(subject.call(n), *pair, least) for n, pair in enumerate(pairs))
            return next((found for found in differences if found is not None), None)
    except Exception as e:
        return judged_error(e)


def exactly(source: str, seed: int = 0) -> list[Observation]:
    """What the same program gives in float64, if there is one."""
    if (raised := in_float64(source)) is None:
        return []
    try:
        with quiet():
            return Subject(raised, nsa_compile.scan, seed=seed).all_calls()
    except Exception:
        return []


def torch_alone(run: Callable, namespace: dict) -> Callable:
    compiled = torch.compile(run, backend=namespace["NESTED"], fullgraph=namespace["FULLGRAPH"], dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        with steps._capturing(None):  # which knows `k[t]`, as torch alone does not
            return compiled(*args, **kwargs)

    return call


def python_loop(step: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
    """The meaning of a scan, written out."""
    rows, spec = pytree.tree_flatten(xs)
    carry, ys = init, []
    for t in range(rows[0].shape[0]):
        carry, y = step(carry, pytree.tree_unflatten([x[t] for x in rows], spec))
        ys.append(y)
    return carry, pytree.tree_map(lambda *column: torch.stack(column), *ys)


def same_failure(one: Verdict | None, other: Verdict) -> bool:
    """Whether two failures are of a kind; errors also have to say the same, wherever they are raised."""
    if one is None or one.kind != other.kind:
        return False
    return one.kind != "crash" or one.cause.split(" | in ")[0] == other.cause.split(" | in ")[0]


def both_crash_nested(theirs: Verdict | None, ours: Verdict, source: str) -> bool:
    """Whether torch.compile alone crashes, too, and ours does not where no backend of torch's comes after it."""
    crash = ours.kind == "crash" and theirs is not None and theirs.kind == "crash"
    return (
        crash and "NESTED, FULLGRAPH, MODE = 'eager'" not in source and not judge(with_nested(source, "eager")).failed
    )


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else ""


def general(message: str) -> str:
    """A message without what differs from program to program."""
    message = re.sub(r"<model program \w+>:\d+", "<program>", message)
    message = re.sub(r"\b([a-z]+_?)\d+\b", r"\1N", message)
    message = re.sub(r"0x[0-9a-f]+", "0xN", message)
    # Torch's own words, whoever hands it the graph, and whatever computed the tensor that was overwritten.
    message = re.sub(r"backend='\w+'", "backend=…", message)
    message = re.sub(r", which is output \d+ of \w+,", ",", message)
    message = re.sub(r"\d+(\.\d+)?", "N", message)
    return re.sub(r"\[(N(, )?)*\]", "[sizes]", message)[:300]


# What a user cannot know: words of torch's insides.
INSIDES = re.compile(
    r"FakeTensor|functorch|storage|unhinted|<class|proxy|0x|dispatch|HigherOrderOperator", re.IGNORECASE
)


def judged_error(e: BaseException) -> Verdict:
    """One clear line of ours, or a crash, told with the place that raised it."""
    chain = [e]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    said = getattr(e, "inner_exception", e)  # Dynamo wraps what a backend raises
    message = first_line(said)
    known = type(said).__module__.startswith("nsa_compile") or message.startswith(("scan:", "the step of the scan at"))
    # Dynamo adds the place in the user's code to its own errors, in further lines.
    alone = isinstance(said, TorchDynamoException) or len(str(said).strip().splitlines()) == 1
    if known and alone and not INSIDES.search(message):
        return Verdict("one_line_error", general(message))
    root = chain[-1]
    frames = [f for f in traceback.extract_tb(root.__traceback__) if "/nsa_compile/" in f.filename]
    words = f"{type(e).__name__}: {general(first_line(e))}"
    if root is not e:
        words += f" | from {type(root).__name__}: {general(first_line(root))}"
    return Verdict("crash", words + (f" | in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""))


# ------------------------------------------------------------------------------------------------------------ shrinking


class TimeLimit(BaseException):
    """A program ran for too long."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Of processor time: a busy machine is no reason."""

    def expired(*_: Any) -> None:
        raise TimeLimit

    previous = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def judge_in_time(source: str, seconds: int = 30) -> Verdict:
    try:
        with time_limit(seconds):
            return judge(source)
    except TimeLimit:
        return Verdict("timeout", f"more than {seconds} s of processor time")


def shrink(source: str, fails: Callable[[str], bool]) -> str:
    """Drop statements, calls and arguments while `fails` stays true: larger pieces first."""
    tried: set[str] = set()
    changed = True
    while changed:
        changed, position = False, 0
        while (candidate := next(itertools.islice(smaller(source), position, None), None)) is not None:
            if candidate not in tried and fails(candidate):
                source, changed = candidate, True  # what follows moves up to this position
            else:
                position += 1
            tried.add(candidate)
    return source


def smaller(source: str) -> Iterator[str]:
    """The source with less in it: one call, runs of 8, 4, 2 and 1 statements, one argument, simpler settings."""
    tree = ast.parse(source)
    lines = source.splitlines()
    settings = next(i for i, line in enumerate(lines) if line.startswith("NESTED, "))
    calls = next(i for i, line in enumerate(lines) if line.startswith("CALLS = "))

    def with_line(i: int, line: str) -> Iterator[str]:
        if lines[i] != line:
            yield "\n".join([*lines[:i], line, *lines[i + 1 :]]) + "\n"

    called = ast.literal_eval(lines[calls].split(" = ")[1])
    for call in called if len(called) > 1 else []:
        yield from with_line(calls, f"CALLS = [{call}]")
    bodies = [
        node.body for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.With)) and len(node.body) > 1
    ]
    bodies.append([node for node in tree.body if isinstance(node, (ast.Expr,))])
    for size in (16, 8, 4, 2, 1):
        for body in bodies:
            for start in range(max(len(body) - size, 0), -1, -size):
                dropped = body[start : start + size]
                if len(dropped) == size and not isinstance(dropped[-1], ast.Return) and len(body) > size:
                    first = min(d.lineno for d in dropped)
                    yield "\n".join(lines[: first - 1] + lines[dropped[-1].end_lineno :]) + "\n"
    for before, after in (
        ("'aot_eager'", "'eager'"),
        ("'no_grad'", "'grad'"),
        ("'inference_mode'", "'grad'"),
        ("'checkpoint'", "'grad'"),
    ):
        yield from with_line(settings, lines[settings].replace(before, after))
    yield from with_line(settings, lines[settings].replace("False, '", "True, '"))  # FULLGRAPH
    for before, after in (("torch.float32,", "torch.float64,"), ("torch.bfloat16,", "torch.float64,")):
        yield from with_line(settings + 1, lines[settings + 1].replace(before, after))
    for i, line in enumerate(lines):
        if line.startswith("    def forward(self, "):
            names = re.findall(r"(\w+)=None", line)
            for name in names[1:]:
                yield from with_line(i, line.replace(f", {name}=None", ""))
        if "requires_grad_()" in line:
            yield from with_line(i, line.replace(".requires_grad_()", ""))
    runs = [i for i, line in enumerate(lines) if "#: run" in line]
    if runs and lines[runs[0]].strip() != "run = model":
        yield "\n".join([*lines[: runs[0]], "run = model", *lines[runs[-1] + 1 :]]) + "\n"

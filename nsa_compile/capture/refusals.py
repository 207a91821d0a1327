"""What is said of a scan that cannot be captured or compiled: one line, with the way out."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import exc
from torch._dynamo.symbolic_convert import InstructionTranslator

log = logging.getLogger("nsa_compile")


class ScanRefused(exc.UncapturedHigherOrderOpError, ValueError):
    """A `nsa_compile.scan` that cannot be captured; says why in one line. Dynamo lets it through as it is."""


class ScanNotCompiled(exc.ShortenTraceback):
    """A `nsa_compile.scan` that was captured and cannot be compiled; says why in one line.

    Dynamo hands on a `ShortenTraceback` as it is, and puts any other error of a backend behind words of its own.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


# The file that calls steps, and the folder of lines that no author of a step has written.
SCANS = str(Path(__file__).parents[1] / "scanning.py")
PICKS = str(Path(__file__).parent / "picks.py")
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
NOT_OURS = (
    "nsa_compile.scan at {place} was compiled by {backend}, which would run it as torch's own scan, whose gradients "
    'are wrong; compile with backend="nsa_compile", or leave the call out with torch.compiler.disable'
)


def becomes_a_node() -> bool:
    """Whether the scan that Dynamo is about to trace becomes a node of its graph; else its loop is unrolled.

    Raises:
        ScanRefused: the graph is for one of torch's own backends.
    """
    if torch.compiler.is_exporting():
        return False
    tx = InstructionTranslator.current_tx()
    place = caller_of_scan(tx.output.current_tx) or "unknown"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        log.warning("scan at %s is unrolled: it lies inside a transform of torch.func", place)
        return False
    if (operator := _branching_operator(tx.output.current_tracer)) is not None:
        log.warning("scan at %s is unrolled: it lies inside torch's %s", place, operator)
        return False
    if (foreign := _torch_backend(tx.output.compiler_fn)) is not None:
        raise ScanRefused(NOT_OURS.format(place=place, backend=f"the backend {foreign!r}"))
    return True


def _branching_operator(tracer: Any) -> str | None:
    """The operator within whose function Dynamo is, if torch runs that by itself: no pass looks into it."""
    while tracer is not None:
        name = getattr(tracer.source_target, "_name", None)
        if name in ("cond", "while_loop", "map_impl", "associative_scan"):
            return str(name)
        tracer = tracer.parent
    return None


def _torch_backend(function: Any) -> str | None:
    """The name of a backend that is one of torch's own; None for any other."""
    name = None
    while True:
        name = name or getattr(function, "compiler_name", None)
        inner = [getattr(function, held, None) for held in ("__wrapped__", "compiler_fn", "func")]
        # torch.compile cuts a model within DistributedDataParallel into pieces for the backend.
        inner.append(getattr(getattr(function, "__self__", None), "backend_compile_fn", None))
        if not (found := [x for x in inner if x is not None]):
            break
        function = found[0]
    module = getattr(function, "__module__", "")
    return (name or getattr(function, "__name__", module)) if module.split(".")[0] == "torch" else None


# In the meta of the body of a captured `nsa_compile.scan`: `file:line` of its call.
PLACE = "nsa_scan_at"


def captured_at(combine: Any) -> str | None:
    return combine.meta.get(PLACE) if isinstance(combine, fx.GraphModule) else None


def caller_of_scan(tx: Any) -> str | None:
    """`file:line` of the call of `nsa_compile.scan` that Dynamo is in; None if it is in torch's own."""
    inside = False
    while tx is not None:
        if tx.f_code.co_filename == SCANS:
            inside = True
        elif inside:
            return f"{tx.f_code.co_filename}:{tx.lineno}"
        tx = getattr(tx, "parent", None)
    return None


def line_of(tx: Any) -> str | None:
    """`file:line` of the step that Dynamo traces now."""
    frames = []
    while tx is not None:
        frames.append((tx.f_code.co_filename, tx.lineno))
        tx = getattr(tx, "parent", None)
    return line_in_step(reversed(frames))


def refusal(place: str, why: str, error: Exception | None = None, line: str | None = None) -> ScanRefused:
    """That the step of the scan at `place` cannot be captured, and at which of its lines, where known."""
    if line is None:
        line = line_in_step((frame.filename, frame.lineno) for frame in getattr(error, "real_stack", ()))
    return ScanRefused(f"{cannot_be('captured', place, line)}: {why}")


def cannot_be(what: str, place: str, line: str | None) -> str:
    """How a message on a step begins."""
    return f"the step of the scan at {place} cannot be {what}{f' at {line}' if line not in (None, place) else ''}"


def line_in_step(frames: Iterable[tuple[str, Any]]) -> str | None:
    """`file:line` of the innermost of `frames` within a step that is not torch's own."""
    found = None
    for file, line in frames:
        if file == SCANS:
            found = None
        elif not file.startswith(TORCH) and file != PICKS:
            found = f"{file}:{line}"
    return found


def frames_of(node: fx.Node) -> list[tuple[str, int]]:
    """The files and lines that Dynamo was in when it traced a node, the innermost last."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return [(file, int(line)) for file, line in found]


# Dynamo's class for a Python float whose value has changed between calls.
VARYING_NUMBER = "SymFloat"
ADVANCED = "an iterator from outside of the step"
DRAWS = (
    "it draws from Python's random, once for all steps; draw a tensor before the scan, one number a step, and scan it"
)
DRAWS_BY_NUMPY = "it calls numpy.random; draw a tensor before the scan, one row a step, and scan it"
ASKS_FOR_ADDRESS = (
    "it calls data_ptr(), and where a tensor of a compiled step lies is not known before it runs; compare values"
)
ASKS_FOR_STRIDES = (
    "it asks for strides, by is_contiguous() or stride(), and a carry or row is not contiguous, which a compiled step "
    "does not keep; give the scan x.contiguous(), or do not ask"
)
READS_GRADIENTS = "it reads .grad, which no tensor has while it runs; give the scan what it is to read"
FILLS = "it fills a tensor with a number out of another one; write t.expand(size), or torch.zeros(size) + t"
HOOKS = "it registers a hook on a tensor from outside, anew at each step; register it once, before the scan"
ONE_MASK = (
    "it reads or writes by a mask of one number, as x[t > 2] = y, which a tensor of bool or uint8 is; write "
    "x = torch.where(t > 2, y, x), and x[t.long()] where the number of a row is meant"
)
READS_MEMORY = (
    "it calls as_strided(), which reads memory as it lies, and a compiled step has its tensors elsewhere; use views"
)
TURNS_ON = "it turns gradients on, where they are off around the scan; turn them on around the scan"
ASKS = "it calls requires_grad_(); ask for the gradient of a tensor that the scan is given"
# Words of torch's messages, what they mean for the author of a step, and the way out.
_REASONS = (
    (
        (VARYING_NUMBER,),
        "it reads a Python float that is another one from call to call; pass it as a tensor, as torch.tensor(scale)",
    ),
    (("Random.random",), DRAWS),
    (
        ("`torch.nn.functional.one_hot` with data-dependent",),
        "it calls one_hot without num_classes, so that its numbers say how long a row is; give it num_classes",
    ),
    (
        ("outputs FakeTensor(..., size=(u",),  # of an operator that selects elements within
        "it calls what selects elements by their values, such as torch.combinations; call it before the scan, on "
        "torch.arange(n), and pick by the numbers that it returns, as x[pairs]",
    ),
    (("assertion failed (cannot compile partial graph)",), "an assert of it fails, whatever numbers it is given"),
    (
        ("repeat_interleave",),
        "it repeats rows by numbers of a tensor; give the numbers as Python integers, or index_select rows",
    ),
    (("hook removal",), "it removes a hook, which cannot be captured; register only what is to stay"),
    (("bincount",), "it calls bincount, whose length is known by its numbers alone; write one_hot(x, n).sum(0)"),
    (
        ("DynamicOutputShape", "nonzero", "masked_select", "aten.unique"),
        "it selects elements by their values, as x[mask], x[mask] = y and x.nonzero() do, and how many is not known "
        "before it runs; write torch.where(mask, x, 0) or torch.where(mask, y, x) instead",
    ),
    (
        ("(Generator)",),
        "it draws by a torch.Generator; draw a tensor by it before the scan, one row a step, and scan it",
    ),
    (
        ("trace_autograd_ops", "retain_grad"),
        "it calls backward(), torch.autograd.grad or retain_grad(); call torch.func.grad in the step, or ask for "
        "gradients of what the scan returns",
    ),
    (
        (
            "unhinted",
            "data-dependent",
            "DataDependent",
            "Data-dependent",
            "item()",
            "_local_scalar_dense",
            "u0",
            "tolist",
            "`range` with argument types ['Tensor'",
            "PendingUnbackedSymbolNotFound",
        ),
        "it reads a number out of a tensor, as k[: t + 1], k[t, [0, 1]], k[int(t)], t.item(), range(t) and `if t > 0` "
        "with a tensor t do; write a mask such as torch.arange(S) <= t, k[t][[0, 1]], k[t, :2] = x, k[t], and "
        "torch.where(t > 0, a, b) instead, or a Python loop over range(S) under nsa_compile.loop, where t is a number",
    ),
    (
        (ADVANCED,),
        "it takes the next item of an iterator from outside of it, one for all steps; make a tensor of the items, one "
        "a step, and scan it",
    ),
    (
        ("side effect",),
        "it changes something outside of it, such as a list, a counter or an attribute; return from the step what is "
        "to be kept, as a part of the carry or as an output",
    ),
    (
        ("input mutation", "mutat"),
        "it writes in place to its carry, to its input or to a tensor from outside; write to a copy, x.clone(), and "
        "return it",
    ),
    (
        ("HOP body output unsupported",),
        "it returns something else than tensors in tuples, lists and dicts, such as a named tuple, which x.max(-1) is, "
        "too; return its tensors, as tuple(x.max(-1))",
    ),
    (("metadata", "init and carry"), "it returns a carry of another shape or dtype than it was given"),
    (("builtin print", "builtin `print`", "LoggingLogger"), "it prints or logs; do so with what the scan returns"),
    (("graph_break()", "torch.compiler.disable", "Skip calling"), "it breaks the graph, and a step is captured whole"),
)


# How torch names a function that it does not trace.
_CALLS = (
    r"module: (?:<unknown module>|([\w.]+)), qualname: ([\w.]+)",
    r"torch\.\* op returned non-Tensor(?s:.*)target: <(?:built-in )?function (\w+)",
    r"Dynamo does not know how to trace builtin operator `(\w+)`",
)


def why_not_traced(error: Exception) -> str:
    """What torch says of a step that it cannot trace, in one line."""
    text = f"{type(error).__name__}: {error}"
    for words, reason in _REASONS:
        if any(word in text for word in words):
            return reason
    if found := re.search(r"(Data dependent|Dynamic shape) operator.*?(aten\.\w+)", text, re.DOTALL):
        return f"what {found[2]} returns is not known before it runs; compute it outside of the scan"
    for call in _CALLS:
        if found := re.search(call, text):
            name = ".".join(filter(None, found.groups()))
            return f"it calls {name}, which cannot be captured; call it outside of the scan"
    if found := re.search(r"raised exception (.*)|: ConstantVariable\(str: (.*)\)$", text):
        return f"it raises {found[1] or found[2]}"
    if isinstance(error, exc.TorchRuntimeError) and (found := re.search(r"got (\w+\(.*\))$", text, re.MULTILINE)):
        return f"it raises {found[1]}"
    if found := re.search(r"when making fake tensor call(?s:.*)debug context: (\w+Error .*)", text):
        return f"it raises {found[1]}"
    if found := re.search(r"Explanation: (.+)", text):
        return found[1].rstrip(".")
    lines = [line for line in str(error).strip().splitlines() if line]
    return lines[0] if lines else type(error).__name__

"""Which operator and which backend each attention of each layer really used, as observed while it ran.

The blocks of the model run one after the other, forward and then backward, under torch's profiler. Operators are
recognised by the events they leave; which implementation ran one of ours, `ops/dispatch.py` tells while it runs; the
branch is the range that was open. The reasons for what should be otherwise come from torch's warnings and from the
report of the compiler's passes.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

import nsa_compile
from nsa_compile import ranges
from nsa_compile.branches import BRANCH_OF, BRANCHES
from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError
from nsa_compile.machine.environment import describe_environment
from nsa_compile.models import NSATransformer
from nsa_compile.ops.dispatch import Use, observe
from nsa_compile.passes.report import Report
from nsa_compile.profiles.attribution import Event, segments
from nsa_compile.profiles.measure import interleave, named_kernels, random_tokens, traced
from nsa_compile.train.distributed.group import choose_device
from nsa_compile.train.distributed.world import World

SCHEMA = 1
PLAIN = "matrix products and softmax"
MATH = "SDPA, math"
SDPA = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "SDPA, flash",
    "aten::_scaled_dot_product_flash_attention": "SDPA, flash",
    "aten::_scaled_dot_product_cudnn_attention": "SDPA, cuDNN",
    "aten::_scaled_dot_product_efficient_attention": "SDPA, memory-efficient",
    "aten::_scaled_dot_product_attention_math": MATH,
}
ATTENTION_OF = {**BRANCH_OF, "nsa.attention": "attention", "nsa.loop": "loop"}
ARMS = {
    "flash only": [SDPBackend.FLASH_ATTENTION],
    "no flash": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
_OURS = re.compile(r"nsa_compile::(window|compressed|selected)_attention(_backward)?$")


@dataclass(frozen=True)
class Observed:
    """An attention of one layer in one direction.

    Attributes:
        branch: compressed, selected, window, loop, or attention where there are no branches.
        calls: how often; once for each step where a loop stayed a loop.
        seen_as: the event that showed it, and whether the dispatch of our operators was watched as well.
    """

    layer: int
    direction: str
    branch: str
    backend: str
    calls: int
    seen_as: str
    reason: str | None = None


def audit_attention(config: RunConfig, arm: str | None = None, repeats: int = 5) -> dict[str, Any]:
    """Run the configured model's blocks once, warm, and tell what computed their attentions.

    Args:
        config: model, sequence length, batch and dtype; the weights are random.
        arm: a key of `ARMS`: allow SDPA these backends only, and time that against all of them. The passes then hand
            their graph to no compiler, since one would settle on a backend before it runs.
        repeats: how often each side of that comparison is timed.

    Returns:
        Plain data of the version ``schema``: ``observed``, what the compiler chose, and ``fallbacks`` with reasons.

    Raises:
        UserError: SDPA cannot run on the backends of the arm, or the model does not use it.
    """
    if arm is not None and config.compile.enabled:
        config = config.changed(compile={"nested": "eager"})
    config.require_equal_layers()
    device = choose_device(config, World())
    torch.manual_seed(config.run.seed)
    model = NSATransformer(config.model).to(device)
    if config.compile.enabled:
        options = {"nested": config.compile.nested, "disable": config.compile.disable}
        nsa_compile.compile_blocks(model, nvtx=True, **options)
    tokens = random_tokens(config.model, config.train.seq_len, config.train.batch_size).to(device)
    run = partial(_layer_by_layer, model, tokens, config.train.dtype)

    allowed = partial(sdpa_kernel, ARMS[arm]) if arm is not None else nullcontext
    compared = None if arm is None else _compare(arm, allowed, run, repeats, device)
    with allowed(), named_kernels():
        run(lambda layer, direction: nullcontext())  # compiles
        observed = _observe(run, device)
    if arm is not None and not any(row.backend.startswith("SDPA") for row in observed):
        raise UserError(
            f"--{arm.replace(' ', '-')} has nothing to act on: no attention of this model ran through SDPA; "
            "use --set model.attention=dense"
        )
    report = nsa_compile.last_report() if config.compile.enabled else None
    return {
        "schema": SCHEMA,
        "environment": describe_environment(device),
        "settings": {
            "device": device.type,
            "dtype": config.train.dtype,
            "seq_len": config.train.seq_len,
            "batch_size": config.train.batch_size,
            "attention": config.model.attention,
            "layers": config.model.n_layers,
            "compiled": config.compile.nested if config.compile.enabled else None,
            "sdpa": arm or "any backend",
        },
        "observed": [asdict(row) for row in observed],
        "choices": {} if report is None else {c.branch: [c.what, c.operator] for c in report.attention},
        "fallbacks": find_fallbacks(observed, config, report, arm),
        "comparison": compared,
    }


def _layer_by_layer(
    model: NSATransformer, tokens: Tensor, dtype: str, around: Callable[[int, str], AbstractContextManager[Any]]
) -> None:
    """The blocks forward, then backward, each inside of `around(layer, direction)`."""
    passed = []
    x = model.embedding(tokens).detach()
    for layer, block in enumerate(model.blocks):
        x = x.detach().requires_grad_()
        with around(layer, "forward"), torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            y = block(x)
        passed.append((x, y))
        x = y
    gradient = torch.ones_like(x)
    for layer, (x, y) in reversed(list(enumerate(passed))):
        with around(layer, "backward"):
            y.backward(gradient)
        assert x.grad is not None
        gradient = x.grad


@contextmanager
def _watched(uses: dict[str, list[Use]], layer: int, direction: str) -> Iterator[None]:
    """A named region of the trace; the calls of our operators inside of it are added to `uses`."""
    name = f"audit {layer} {direction}"
    with record_function(name), observe() as uses[name]:
        yield


def _observe(run: Callable[..., None], device: torch.device) -> list[Observed]:
    uses: dict[str, list[Use]] = {}
    ranges.enable()
    try:
        with traced(device) as events, ranges.step(1):
            run(partial(_watched, uses))
    finally:
        ranges.enable(False)
    return recognise(events, uses)


def recognise(events: Sequence[Event], uses: dict[str, list[Use]]) -> list[Observed]:
    """The attentions in a trace whose regions ``audit <layer> <direction>`` name layers.

    `uses` are, for each such region, the calls of our operators that were seen inside of it, in order.
    """
    regions = [event for event in events if event.name.startswith("audit ")]
    found: dict[Event, tuple[str, str]] = {}
    for thread in {event.thread for event in events}:
        for segment in segments(event for event in events if event.thread == thread):
            _attentions(segment.path, found)
    rows: list[Observed] = []
    for region in regions:
        _, layer, direction = region.name.split()
        inside = [(e, found[e]) for e in sorted(found, key=lambda e: e.start) if region.start <= e.start < region.end]
        called = Counter((branch, what, event.name) for event, (branch, what) in inside)
        for (branch, what, name), calls in called.items():
            row = Observed(int(layer), direction, branch, what, calls, name)
            used = {use for use in uses.get(region.name, ()) if _OURS.match(name) and use.operator == branch}
            rows += [
                replace(row, backend=use.implementation, reason=use.reason, seen_as=f"{name}, dispatch") for use in used
            ] or [row]
    # The math backend has no backward of its own: its gradients are those of the operators it is made of.
    by_math = {(row.layer, row.branch) for row in rows if row.backend == MATH}
    rows = [
        replace(row, backend=MATH) if row.backend == PLAIN and (row.layer, row.branch) in by_math else row
        for row in rows
    ]
    return sorted(rows, key=lambda row: (row.layer, row.direction != "forward"))


def _attentions(path: tuple[Event, ...], found: dict[Event, tuple[str, str]]) -> None:
    """Add what a moment of the trace shows: the event of an attention, its branch and its backend."""
    branch = "attention"
    for event in path:
        name = event.name
        branch = ATTENTION_OF.get(name, branch)
        if ours := _OURS.match(name):
            found[event] = (ours[1], "nsa_compile")
        elif (fused := SDPA.get(name.removesuffix("_backward"))) is not None:
            found[event] = (branch, fused)
        elif "softmax" in name and event.category in ("cpu_op", "kernel") and "log_softmax" not in name:
            if not name.startswith("autograd::"):
                found[event] = (branch, PLAIN)
        else:
            continue
        return  # what runs inside of it is part of it


def find_fallbacks(
    observed: Sequence[Observed], config: RunConfig, report: Report | None, arm: str | None = None
) -> list[dict[str, Any]]:
    """What is slower than it should be, each with its layers and the reason.

    Dense attention that was chosen because it is faster at the size at hand is none.
    """
    found: dict[tuple[str, str, str], set[int]] = {}

    def add(row: Observed, what: str, reason: str) -> None:
        found.setdefault((row.branch, what, reason), set()).add(row.layer)

    choices = {} if report is None else {choice.branch: choice for choice in report.attention}
    scanned = config.model.variant.scanned
    for row in observed:
        if row.branch == "loop" or (scanned and row.calls >= config.train.seq_len):
            add(row, "a loop over the tokens stayed one", _why_loop(report))
        elif row.reason is not None:
            add(row, row.backend, row.reason)
        elif row.backend == MATH and arm is None:
            add(row, row.backend, "SDPA took no faster backend")
        elif row.direction == "forward" and (row.backend == PLAIN or (scanned and row.branch == "attention")):
            choice = choices.get(row.branch)
            if not scanned:
                add(row, row.backend, "SDPA did not run")
            elif choice is None:
                add(row, row.backend, _why_not_raised(report))
            elif "opaque mask" in choice.what:
                add(row, row.backend, f"{choice.what}, which no operator computes; {_why_not_raised(report)}")
    if scanned:
        seen = {(row.branch, row.layer) for row in observed if _OURS.match(row.seen_as.partition(",")[0])}
        for branch, choice in choices.items():
            expected = branch in BRANCHES and f"{branch}_attention" in choice.operator
            missing = {layer for layer in range(config.model.n_layers) if (branch, layer) not in seen}
            if expected and missing:
                found[branch, "not observed", f"{choice.operator} was chosen for {choice.what} and did not run"] = (
                    missing
                )
    return [
        {"branch": branch, "what": what, "reason": reason, "layers": sorted(layers)}
        for (branch, what, reason), layers in found.items()
    ]


def _why_loop(report: Report | None) -> str:
    if report is None:
        return "compile.enabled = false"
    why = [f"{d.op} at {d.location}: {d.reason}" for scan in report.scans for d in scan.declines]
    return "; ".join(why) or _why_not_raised(report)


def _why_not_raised(report: Report | None) -> str:
    if report is None:
        return "compile.enabled = false"
    why = [f"{p.name} did not run: {p.skipped}" for p in report.passes if p.skipped and p.skipped != "not asked for"]
    why += [f"{d.op} at {d.location}: {d.reason}" for d in report.declines]
    return "; ".join(why) or "no pass took it for attention"


def _compare(
    arm: str, allowed: Callable[[], Any], run: Callable[..., None], repeats: int, device: torch.device
) -> dict[str, Any]:
    """Time the blocks with the backends of an arm and with all of them; a UserError if SDPA cannot run on the first."""

    def timed(context: Callable[[], Any]) -> None:
        with context():
            run(lambda layer, direction: nullcontext())

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            timed(allowed)
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            said = [str(warning.message).splitlines()[0] for warning in told]
            why = "; ".join(dict.fromkeys([str(error).splitlines()[0].rstrip("."), *said]))
            raise UserError(
                f"--{arm.replace(' ', '-')} is not available for this model on {device.type}: {why}; leave it out"
            ) from None
    timings = interleave({arm: partial(timed, allowed), "any backend": partial(timed, nullcontext)}, repeats, device)
    return {"repeats": repeats, "timings": timings}

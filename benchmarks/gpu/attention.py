"""Cells of the comparison: one problem, every contender checked against float64 and then timed beside the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.contenders import CONTENDERS, Attention, Contender, NotAvailable
from benchmarks.gpu.oracle import Verdict, check_sampled, check_small, small
from benchmarks.gpu.problem import PATTERNS, Problem
from benchmarks.gpu.timing import time_in_turns
from nsa_compile.profiles.measure import not_measured, peak_memory, ran_out_of_memory

SEQ_LENS = (8192, 65536, 32768, 16384, 4096, 131072)  # what the bars are about comes first
HEADS_PER_GROUP = (16, 4, 1)
SECONDS_PER_CELL = 15.0


class DeviceBroken(Exception):
    """A kernel left the device in a state in which nothing runs any more; only another process can go on."""


def key(problem: Problem) -> str:
    """What a cell is called in the record."""
    pattern = next(name for name, pattern in PATTERNS.items() if pattern == problem.pattern)
    return f"S={problem.seq_len} h={problem.heads // problem.groups} {pattern}"


def problems(seq_lens: Sequence[int], heads_per_group: Sequence[int], base: Problem) -> list[Problem]:
    """The cells in their order: overlapping blocks first; blocks without overlap only where others need them."""
    cells = []
    for heads in heads_per_group:
        groups = max(1, base.heads // heads)
        cells += [replace(base, seq_len=length, groups=groups) for length in seq_lens]
    plain = PATTERNS["64/64/64"]
    if 16 in heads_per_group and base.pattern == PATTERNS["32/16/64"]:
        cells += [replace(base, seq_len=s, groups=base.heads // 16, pattern=plain) for s in seq_lens if s >= 8192]
    return cells


def measure_cell(
    problem: Problem,
    device: torch.device,
    contenders: Sequence[Contender] = CONTENDERS,
    seconds: float = SECONDS_PER_CELL,
    small_checks: dict[str, Any] | None = None,
    crashed: Sequence[str] = (),
    entering: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Check and time every contender on a problem.

    Args:
        small_checks: verdicts on small problems of earlier cells, read and added to.
        crashed: contenders that broke the device before; they are left out.
        entering: told the name of each contender before it runs for the first time.

    Raises:
        DeviceBroken: the device has to be left to another process.
    """
    small_checks = {} if small_checks is None else small_checks
    torch._dynamo.reset()  # the programs of dozens of cells would pass Dynamo's limit of recompilations
    results: dict[str, dict[str, Any]] = {}
    works: dict[str, Attention] = {}
    for contender in contenders:
        if contender.name in crashed:
            results[contender.name] = not_measured("broke the device when it ran")
            continue
        entering(contender.name)
        try:
            attention, result = _checked(contender, problem, device, small_checks)
        except NotAvailable as why:
            results[contender.name] = not_measured(str(why))
        # Whatever a foreign kernel raises is the reason why it is not measured.
        except Exception as error:
            results[contender.name] = not_measured(reason(error))
        else:
            results[contender.name] = result
            if "not_measured" not in result:
                works[contender.name] = attention
        _free(device)

    entering("")
    inputs = problem.inputs(device)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator(device).manual_seed(3), device=device)
    grad = grad.to(problem.dtype)
    for name, timing in time_in_turns(works, inputs, grad, device, seconds).items():
        results[name] |= timing
        if "both" in timing:
            results[name]["peak_bytes"] = peak_memory(partial(_step, works[name], inputs, grad), device)
    return {
        "seq_len": problem.seq_len,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "heads_per_group": problem.heads // problem.groups,
        "useful_flops": {kind: problem.flops(kind) for kind in ("nsa", "dense", "window")},
        "contenders": results,
    }


def _step(attention: Attention, inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> None:
    torch.autograd.grad(attention(*inputs), inputs, grad, allow_unused=True)


def _checked(
    contender: Contender, problem: Problem, device: torch.device, small_checks: dict[str, Any]
) -> tuple[Attention, dict[str, Any]]:
    """The function to be timed, and what its comparison with float64 came to."""
    few = small(problem)
    name = f"{contender.name} {few}"
    if name not in small_checks:
        small_checks[name] = check_small(contender.build(few, device), few, contender.kind, device).as_data()
    attention = contender.build(problem, device)
    sampled: Verdict = check_sampled(attention, problem, contender.kind, device)
    result = {"kind": contender.kind, "public": contender.public, "check": sampled.as_data()}
    result["small_check"] = small_checks[name]
    if not (sampled.agrees and small_checks[name]["agrees"]):
        if not contender.public:
            return attention, result | not_measured("differs from the float64 oracle")
        # Its own definition may deviate; its time is of interest all the same, and the table says so.
        result["note"] = "differs from the oracle"
    return attention, result


def reason(error: BaseException) -> str:
    """An error in one line.

    Raises:
        DeviceBroken: it is of a kind after which nothing runs on the device any more.
    """
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    if ran_out_of_memory(error):
        return "does not fit into memory"
    if "CUDA error" in text or "device-side assert" in text:
        raise DeviceBroken(text) from error
    return f"{type(error).__name__}: {text}"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""The measurements of `nsa-compile bench`. Each is a generator of rows of plain data, one a size.

All variants of a row run in the same process on equal inputs, in turns, after a warm-up each; one of them is always
dense attention.
"""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nsa_compile
from nsa_compile import inductor_files
from nsa_compile.branches import BRANCHES
from nsa_compile.config import OptimSection
from nsa_compile.machine.matmul_rate import best_of, busy, measure_matmul, multiplied_dtypes
from nsa_compile.models import NSAConfig, SparsePattern, nsa_attention
from nsa_compile.models.flops import training_flops_per_token
from nsa_compile.ops import selected_attention
from nsa_compile.ops.dispatch import choose_kernel
from nsa_compile.ops.selected.ranges import selected_attention_v1
from nsa_compile.profiles.measure import (
    SEED,
    build,
    forward_backward,
    interleave,
    not_measured,
    peak_memory,
    random_tokens,
    ratio,
    seconds_of,
)
from nsa_compile.train.optim import make_optimizer
from nsa_compile.train.steps import train_step

Row = dict[str, Any]
Timed = Callable[[], Any]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """SDPA of q `[B, S, Hq, D]` over k, v `[B, S, G, D]`, causal without a mask; the baseline of what is measured."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = attn_mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=causal, enable_gqa=True).transpose(1, 2)


@dataclass(frozen=True)
class Measuring:
    """What all benchmarks measure by: lengths, timed runs of each variant, device, longest of dense attention."""

    seq_lens: Sequence[int]
    repeats: int
    device: torch.device
    max_dense_seq_len: int | None = None

    def too_long(self, seq_len: int) -> dict[str, Any] | None:
        """Why dense attention is left out at this length, if it is."""
        if self.max_dense_seq_len is None or seq_len <= self.max_dense_seq_len:
            return None
        return not_measured(f"longer than --max-dense-seq-len {self.max_dense_seq_len}")

    def beside_dense(self, works: Mapping[str, Timed], seq_len: int) -> dict[str, dict[str, Any]]:
        """The timings of `works`, the one named dense left out where the sequence is too long for it."""
        skipped = self.too_long(seq_len)
        timed = {name: work for name, work in works.items() if skipped is None or name != "dense"}
        return interleave(timed, self.repeats, self.device) | ({} if skipped is None else {"dense": skipped})


# -- attention


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes of one attention layer, and how the sparse variant is compiled."""

    batch_size: int
    heads: int
    groups: int
    head_dim: int
    pattern: SparsePattern
    dtype: str
    attention: Literal["auto", "sparse", "dense"]
    nested: str

    def inputs(self, seq_len: int, device: torch.device) -> list[Tensor]:
        """q, keys and values of three branches, and gates, as `nsa_attention` takes them; gradients are wanted."""
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(heads: int, dim: int) -> Tensor:
            shape = (self.batch_size, seq_len, heads, dim)
            return torch.randn(shape, generator=generator, device=device).to(getattr(torch, self.dtype))

        keys_and_values = [normal(self.groups, self.head_dim) for _ in range(6)]
        tensors = [normal(self.heads, self.head_dim), *keys_and_values, normal(self.heads, 3).sigmoid()]
        return [x.detach().requires_grad_() for x in tensors]


def attention(problem: AttentionProblem, by: Measuring, memory: bool = False) -> Iterator[Row]:
    """Whole NSA attention, compiled, against causal SDPA on the same queries: two rows a length."""

    def nsa(*tensors: Tensor) -> Tensor:
        return nsa_attention(*tensors, pattern=problem.pattern)

    for seq_len in by.seq_lens:
        torch._dynamo.reset()
        tensors = problem.inputs(seq_len, by.device)
        q, k_slc, v_slc = tensors[0], tensors[3], tensors[4]
        compiled = nsa_compile.compile(nsa, nested=problem.nested, attention=problem.attention)
        for direction, run in (("forward", _forward), ("forward+backward", output_and_gradients)):
            works = {
                "sparse": partial(run, compiled, *tensors),
                "dense": partial(run, dense_attention, q, k_slc, v_slc),
            }
            timings = by.beside_dense(works, seq_len)
            row: Row = {"seq_len": seq_len, "direction": direction, **timings}
            row["ratio"] = ratio(timings["dense"], timings["sparse"])
            row |= _what_was_compiled(q)
            if memory:
                measured = [name for name in works if "median_s" in timings[name]]
                row["peak_bytes"] = {name: peak_memory(works[name], by.device) for name in measured}
            yield row


def _forward(fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    with torch.no_grad():
        fn(*inputs)


def output_and_gradients(fn: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Forward and backward, with a gradient for each of the inputs."""
    out = fn(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _what_was_compiled(q: Tensor) -> dict[str, Any]:
    """Whether the latest compilation batched its loop, the operators that it chose, and what runs them for `q`."""
    report = nsa_compile.last_report()
    assert report is not None, "something was compiled"
    operators = {choice.branch: choice.operator for choice in report.attention}
    sparse = [name for name in BRANCHES if f"{name}_attention" in operators.get(name, "")]
    implementations = {name: choose_kernel(name, q).name for name in sparse}
    return {"batched": all(s.batched for s in report.scans), "operators": operators, "implementations": implementations}


# -- prefill


def prefill(
    config: NSAConfig, by: Measuring, eager_repeats: int, max_eager_seconds: float, nested: str
) -> Iterator[Row]:
    """The loop over the tokens against the compiled graph and dense attention, forward and backward of the whole model.

    A length whose loop does not fit into memory or time is recorded as not measured; nothing is extrapolated.
    """
    device = by.device
    rows: list[Row] = []
    for seq_len in by.seq_lens:
        stopped = next((r for r in rows if "memory" in r["eager"].get("not_measured", "")), None)
        expected = _expected_eager_seconds(rows, seq_len)
        skipped = None
        if stopped:
            skipped = not_measured("a shorter sequence did not fit into memory already")
        elif max_eager_seconds == 0 or (expected is not None and expected > max_eager_seconds):
            skipped = not_measured(f"a run would take longer than {max_eager_seconds:g} s")

        torch._dynamo.reset()
        tokens = random_tokens(config, seq_len).to(device)
        compiled = nsa_compile.compile_blocks(build(config).to(device), nested=nested, cache=False)
        first_call = seconds_of(partial(forward_backward, compiled, tokens), device)
        report = nsa_compile.last_report()
        assert report is not None
        models: dict[str, nn.Module] = {"compiled": compiled}
        if not skipped and eager_repeats:
            models["eager"] = build(config).to(device)
        too_long = by.too_long(seq_len)
        if not too_long:
            models["dense"] = _compiled_dense(config, nested, device)
        for name, model in models.items():
            # Every token takes the same way through the loop, so a few of them warm it up.
            forward_backward(model, tokens[:, :32] if name == "eager" else tokens)
        works = {name: partial(forward_backward, model, tokens) for name, model in models.items()}
        counts = {name: eager_repeats if name == "eager" else by.repeats for name in works}
        timings = interleave(works, counts, device, warm_up=False)

        eager, fast = timings.get("eager", skipped or not_measured("skipped")), timings["compiled"]
        dense = too_long or timings["dense"]
        row = {"seq_len": seq_len, "eager": eager, "compiled": fast, "ratio": ratio(eager, fast)}
        row |= {"first_call_s": first_call, "batched": all(s.batched for s in report.scans)}
        row |= {"dense": dense, "dense_ratio": ratio(dense, fast)}
        rows.append(row)
        yield row


def _expected_eager_seconds(rows: list[Row], seq_len: int) -> float | None:
    """A lower bound from the last length measured, as time grows at least linearly. Only decides what to skip."""
    measured = [row for row in rows if "median_s" in row["eager"]]
    return measured[-1]["eager"]["median_s"] * seq_len / measured[-1]["seq_len"] if measured else None


def _compiled_dense(config: NSAConfig, nested: str, device: torch.device) -> nn.Module:
    """The same transformer with dense attention, each block compiled without this project's passes."""
    model = build(replace(config, attention="dense")).to(device)
    if nested == "inductor":
        inductor_files.prepare()
    for block in model.blocks:
        block.compile(backend=nested, fullgraph=True, dynamic=False)
    return model


@contextmanager
def limited_memory(gigabytes: float) -> Iterator[None]:
    """Let an allocation beyond the limit fail in this process instead of taking the machine down; 0 is no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if gigabytes:
        resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 2**30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- selection

PATTERNS = ("random", "sequential", "duplicates", "gaps", "single block", "all invalid")
# Of the largest value of what is compared, and at least of 1: the two versions add in different orders.
TOLERANCES = {"float32": 2e-5, "float64": 1e-12}


def selection(problem: AttentionProblem, by: Measuring) -> Iterator[Row]:
    """The loop over queries and token ranges (v1) against the operator (v2) on each pattern of indices.

    Values and gradients are compared in float32 and float64; times are of forward + backward in float32.
    """
    block_size, scale = problem.pattern.select_block, problem.head_dim**-0.5

    def v1(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return selected_attention_v1(q, k, v, indices, block_size, scale)

    def v2(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return selected_attention(q, k, v, indices, block_size=block_size, scale=scale)[0]

    def dense(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        return dense_attention(q, k, v)

    for seq_len in by.seq_lens:
        for pattern in PATTERNS:
            indices = selection_indices(pattern, problem, seq_len).to(by.device)
            parity = {}
            for dtype, tolerance in TOLERANCES.items():
                q, k, v = replace(problem, dtype=dtype).inputs(seq_len, by.device)[:3]
                parity[dtype] = _parity(
                    values_and_gradients(v1, q, k, v, indices), values_and_gradients(v2, q, k, v, indices), tolerance
                )
            q, k, v = replace(problem, dtype="float32").inputs(seq_len, by.device)[:3]
            works = {
                name: partial(values_and_gradients, fn, q, k, v, indices)
                for name, fn in (("v1", v1), ("v2", v2), ("dense", dense))
            }
            timings = by.beside_dense(works, seq_len)
            yield {
                "seq_len": seq_len,
                "pattern": pattern,
                "equal": all(p["equal"] for p in parity.values()),
                "parity": parity,
                **timings,
                "ratio": ratio(timings["v1"], timings["v2"]),
                "implementations": {"selected": choose_kernel("selected", q).name},
            }


def selection_indices(pattern: str, problem: AttentionProblem, seq_len: int) -> Tensor:
    """Block indices `[B, S, G, n]` of a pattern; some of them point nowhere, or after the query."""
    count, block = problem.pattern.num_selected, problem.pattern.select_block
    shape = (problem.batch_size, seq_len, problem.groups, count)
    blocks = -(-seq_len // block)
    place = torch.arange(count)
    generator = torch.Generator().manual_seed(SEED)
    if pattern == "random":
        return torch.randint(-1, blocks + 1, shape, generator=generator)
    if pattern == "sequential":
        return place.expand(shape)
    if pattern == "duplicates":
        return torch.randint(0, blocks, (*shape[:3], 1), generator=generator).expand(shape)
    if pattern == "gaps":
        return (2 * place).expand(shape)
    if pattern == "single block":
        own = torch.arange(seq_len)[:, None, None] // block
        return torch.where(place == count // 2, own, -1).expand(shape)
    assert pattern == "all invalid"
    return torch.full(shape, -1)


def values_and_gradients(
    fn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, indices: Tensor
) -> dict[str, Tensor]:
    """The output and the gradients of q, k and v, for an output gradient that differs between positions."""
    out = fn(q, k, v, indices)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _parity(v1: dict[str, Tensor], v2: dict[str, Tensor], tolerance: float) -> dict[str, Any]:
    """Largest absolute differences, and whether all of them are within the tolerance."""
    differences = {name: (v1[name] - v2[name]).abs().max().item() for name in v1}
    allowed = {name: tolerance * max(1.0, v1[name].abs().max().item()) for name in v1}
    return {
        # JSON has no NaN: a difference that is not finite is null, and never equal.
        "max_abs_difference": {name: d if math.isfinite(d) else None for name, d in differences.items()},
        "tolerance": tolerance,
        "equal": all(differences[name] <= allowed[name] for name in v1),
    }


# -- step


def step(
    config: NSAConfig,
    by: Measuring,
    batch_size: int,
    dtype: str,
    attention: Literal["auto", "sparse", "dense"],
    nested: str,
) -> Iterator[Row]:
    """A training step (forward, backward, clipping, AdamW) of the model against the same one with dense attention.

    The machine's rate of matrix products is measured before and after each length; MFU is of the best so far.
    """
    device = by.device
    trainer_dtype = "bf16" if dtype == "bfloat16" else dtype
    used = multiplied_dtypes(trainer_dtype)
    rates = [measure_matmul(device, used)]
    optim = OptimSection()
    for seq_len in by.seq_lens:
        torch._dynamo.reset()
        tokens = random_tokens(config, seq_len + 1, batch_size).numpy()
        models = {"sparse": build(config).to(device), "dense": _compiled_dense(config, nested, device)}
        nsa_compile.compile_blocks(models["sparse"], nested=nested, attention=attention)
        works = {
            name: partial(
                train_step, model, make_optimizer(model, optim), [tokens], optim.lr, optim.clip, device, trainer_dtype
            )
            for name, model in models.items()
        }
        timings = by.beside_dense(works, seq_len)
        rates.append(measure_matmul(device, used))
        row: Row = {"seq_len": seq_len, **timings, "ratio": ratio(timings["dense"], timings["sparse"])}
        row |= {"peak_flops": best_of(rates), "busy": busy(rates[-2:])}
        for name, model in models.items():
            counted = config if name == "sparse" else replace(config, attention="dense")
            flops = training_flops_per_token(counted, seq_len)
            row[name] |= {"parameters": sum(p.numel() for p in model.parameters())}
            if "median_s" in row[name]:
                rate = batch_size * seq_len / row[name]["median_s"]
                row[name] |= {"tokens_per_s": rate, "mfu": rate * flops / row["peak_flops"]}
                samples = row[name]["samples_s"]
                row[name]["std_s"] = statistics.stdev(samples) if len(samples) > 1 else None
        yield row | _what_was_compiled(next(models["sparse"].parameters()))

"""Recurrences of the zoo, forward and backward on the CPU: as a loop, as a compiled loop, as what the compiler makes.

    python benchmarks/recurrences.py
    python benchmarks/recurrences.py --fla PATH                  beside flash-linear-attention, checked out at PATH
    python benchmarks/recurrences.py --designs gla --seq-len 512 --repeats 3

Each design is the function that its layer runs for a token (`nsa_compile/models/zoo`), over `[B, S, H, D]`. Measured
are the eager loop; the loop compiled with every pass off, so that it stays a loop; the compiled form as it is today;
and the chunkwise PyTorch code of flash-linear-attention, compiled by Inductor, for the designs that it has it for.
Nothing is fetched; that code needs einops. Before the timing each form's values and gradients are compared with the
eager loop's: the greatest difference, as a share of the greatest value.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

import nsa_compile
from nsa_compile.models.zoo.gated_delta_net import gated_delta_rule
from nsa_compile.models.zoo.gla import gated_linear_attention
from nsa_compile.models.zoo.linear import linear_attention
from nsa_compile.models.zoo.mamba2 import ssd
from nsa_compile.models.zoo.recurrent import unit
from nsa_compile.passes import ORDER
from nsa_compile.profiles.measure import CPU, interleave, make_record, not_measured, ratio, show, write_record

RECORD = Path(__file__).parent / "results" / "recurrences.json"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
FORMS = {"eager": "eager loop", "loop": "compiled as a loop", "compiled": "compiled", "fla": "fla, Inductor"}


@dataclass(frozen=True)
class Problem:
    """Sizes of one measurement; `draw` gives what a token's queries, keys and values are cut from, `[B, S, H, D]`."""

    batch: int
    seq_len: int
    heads: int
    dim: int

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, self.seq_len, self.heads, *shape)

    def state(self, *shape: int) -> Tensor:
        return torch.zeros(self.batch, self.heads, *shape)


@dataclass(frozen=True)
class Design:
    """A recurrence: its inputs, the loop over them, and the file and function of flash-linear-attention, if any."""

    inputs: Callable[[Problem], Sequence[Tensor]]
    loop: Callable[..., Tensor]
    peer: tuple[str, str] | None
    theirs: Callable[..., Tensor] | None  # the function and the inputs, to the output


def rows(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1) for x in inputs)


def linear_loop(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def step(state: tuple[Tensor, Tensor], token: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        s, z, o = linear_attention(*state, *token)
        return (s, z), o

    init = problem.state(problem.dim, problem.dim), problem.state(problem.dim)
    return nsa_compile.scan(step, init, rows(q, k, v))[1].transpose(0, 1)


def state_loop(recurrence: Callable[..., tuple[Tensor, Tensor]], problem: Problem, *inputs: Tensor) -> Tensor:
    init = problem.state(problem.dim, problem.dim)
    return nsa_compile.scan(lambda s, token: recurrence(s, *token), init, rows(*inputs))[1].transpose(0, 1)


def ssd_loop(problem: Problem, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    def step(s: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, dt, b, c = token
        return ssd(s, x, dt, a, b, c)

    return nsa_compile.scan(step, problem.state(problem.dim, problem.dim), rows(x, dt, b, c))[1].transpose(0, 1)


def features(p: Problem) -> Sequence[Tensor]:
    return F.elu(p.draw(p.dim)) + 1, F.elu(p.draw(p.dim)) + 1, p.draw(p.dim)


def decayed(p: Problem) -> Sequence[Tensor]:
    return p.draw(p.dim) * p.dim**-0.5, p.draw(p.dim), p.draw(p.dim), F.logsigmoid(p.draw(p.dim)) / 16


def selective(p: Problem) -> Sequence[Tensor]:
    dt = torch.empty(p.batch, p.seq_len, p.heads).uniform_(0.001, 0.1)
    return p.draw(p.dim), dt, p.draw(p.dim), p.draw(p.dim), -torch.empty(p.heads).uniform_(1, 16)


def written(p: Problem) -> Sequence[Tensor]:
    q, k, g = unit(p.draw(p.dim)) * p.dim**-0.5, unit(p.draw(p.dim)), -F.softplus(p.draw() - 3)
    return q, k, p.draw(p.dim), p.draw().sigmoid(), g


DESIGNS = {
    "linear attention": Design(
        features,
        linear_loop,
        ("linear_attn", "naive_chunk_linear_attn"),
        lambda f, q, k, v: f(q, k, v, scale=1.0, normalize=True),
    ),
    "gla": Design(decayed, partial(state_loop, gated_linear_attention), None, None),
    "mamba2": Design(
        selective,
        ssd_loop,
        ("simple_gla", "naive_chunk_simple_gla"),
        lambda f, x, dt, b, c, a: f(c, b, x * dt[..., None], dt * a, scale=1.0)[0],
    ),
    "gated delta rule": Design(
        written,
        partial(state_loop, gated_delta_rule),
        ("gated_delta_rule", "naive_chunk_gated_delta_rule"),
        lambda f, q, k, v, beta, g: f(q, k, v, g, beta, scale=1.0)[0],
    ),
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fla_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for the globals of its functions
    spec.loader.exec_module(module)
    return module


def forms(design: Design, problem: Problem, fla: Path | None) -> dict[str, Callable[..., Tensor]]:
    loop = partial(design.loop, problem)
    found = {
        "eager": loop,
        "loop": nsa_compile.compile(loop, disable=ORDER, cache=False),
        "compiled": nsa_compile.compile(loop, cache=False),
    }
    if fla is not None and design.peer is not None:
        folder, name = design.peer
        theirs = getattr(load(fla / "fla" / "ops" / folder / "naive.py"), name)
        found["fla"] = torch.compile(partial(design.theirs, theirs), fullgraph=True, dynamic=False)
    return found


def results(f: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs."""
    o = f(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, weight)]


def difference(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(given, expected, strict=True))


def measure(name: str, problem: Problem, repeats: int, clock: str, fla: Path | None) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    design = DESIGNS[name]
    inputs = [x.detach().requires_grad_() for x in design.inputs(problem)]
    weight = problem.draw(problem.dim)
    row: dict[str, Any] = {"design": name, "difference": {}, "first_call_s": {}}
    works = {}
    expected: list[Tensor] = []
    for form, f in forms(design, problem, fla).items():
        start = time.perf_counter()
        given = results(f, inputs, weight)
        row["first_call_s"][form] = time.perf_counter() - start
        expected = expected or given
        row["difference"][form] = difference(given, expected)
        works[form] = partial(results, f, inputs, weight)
        if form == "compiled":
            row["verdict"] = [scan.verdict for scan in nsa_compile.last_report().scans]
    timings = interleave(
        works, {form: 3 if form in ("eager", "loop") else repeats for form in works}, clock=CLOCKS[clock]
    )
    reason = "no checkout was given" if fla is None else "flash-linear-attention has no chunkwise PyTorch code for it"
    row |= {form: timings.get(form, not_measured(reason)) for form in FORMS}
    row["ratios"] = {form: ratio(row[form], row["compiled"]) for form in FORMS if form != "compiled"}
    return row


@click.command()
@click.option("--designs", default=",".join(DESIGNS), show_default=True, help="Which of them.")
@click.option("--seq-len", default=4096, show_default=True, help="Tokens of a sequence, S.")
@click.option("--heads", default=8, show_default=True, help="Heads, H.")
@click.option("--dim", default=64, show_default=True, help="Width of keys and values, D.")
@click.option("--threads", default=2, show_default=True, help="Threads of the CPU.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs, in turns; 3 at most of a loop.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True, help="What is counted.")
@click.option("--fla", type=click.Path(exists=True, path_type=Path), help="A checkout of flash-linear-attention.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, help="Where the record goes.")
def main(designs, seq_len, heads, dim, threads, repeats, clock, fla, out) -> None:
    """Time recurrences as loops, and as they are compiled."""
    chosen = designs.split(",")
    if unknown := [name for name in chosen if name not in DESIGNS]:
        raise click.UsageError(f"'{unknown[0]}' is no design; there are {', '.join(DESIGNS)}")
    torch.set_num_threads(threads)
    problem = Problem(1, seq_len, heads, dim)
    settings = {
        "batch": 1, "seq_len": seq_len, "heads": heads, "dim": dim, "dtype": "float32", "threads": threads,
        "repeats": repeats, "clock": clock, "direction": "forward+backward",
    }  # fmt: skip
    measured: list[dict[str, Any]] = []
    for name in chosen:
        measured.append(measure(name, problem, repeats, clock, fla))
        write_record(out, make_record("recurrences", settings, measured, CPU))
    table = [
        (
            row["design"],
            ", ".join(row["verdict"]),
            *(show(row[form]) for form in FORMS),
            *(f"{r:.2f}" if (r := row["ratios"][form]) else "" for form in FORMS if form != "compiled"),
            f"{max(row['difference'].values()):.1e}",
        )
        for row in measured
    ]
    times = [f"{title}, ms" for title in FORMS.values()]
    ratios = [f"{FORMS[form]} / compiled" for form in FORMS if form != "compiled"]
    print(tabulate(table, headers=("design", "verdict", *times, *ratios, "difference"), disable_numparse=True))
    print(out)


if __name__ == "__main__":
    main()

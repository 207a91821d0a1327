"""Attentions and recurrences of the zoo, forward and backward on the CPU, against what they are to be as fast as.

    python benchmarks/zoo.py
    python benchmarks/zoo.py --only scores/,recurrences/gla --repeats 3
    python benchmarks/zoo.py --only recurrences/ --fla PATH      beside flash-linear-attention, checked out at PATH

Four parts: `scores` are attentions whose scores are a program, against SDPA with a dense mask and against causal
attention by this package's own kernel; `selection` are layers that rank blocks or tokens, against dense causal SDPA and
against selected attention to as many keys whose indices are given; `recurrences` are the functions that a layer runs
for a token, against the eager loop, the loop compiled as a loop, and the chunkwise PyTorch code of
flash-linear-attention compiled by Inductor; `compile` are whole blocks, compiled in a new process with an empty cache,
against a block of NSA. Nothing is fetched; the code of flash-linear-attention needs einops.

Before the timing, forms that compute the same are compared, values and gradients: the greatest difference from the
first of them, as a share of the greatest value. A ratio is the time of another form over that of the compiled one; its
bar is the least that it is to be. `--only` replaces the rows that it names in a record that is there.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import nsa_compile
from nsa_compile import ops
from nsa_compile.models import NSAConfig
from nsa_compile.models.transformer import apply_rope
from nsa_compile.models.variant import find
from nsa_compile.models.zoo.gated_delta_net import gated_delta_rule
from nsa_compile.models.zoo.gla import gated_linear_attention
from nsa_compile.models.zoo.linear import linear_attention
from nsa_compile.models.zoo.mamba2 import ssd
from nsa_compile.models.zoo.recurrent import unit
from nsa_compile.passes import ORDER
from nsa_compile.profiles.bench import dense_attention
from nsa_compile.profiles.measure import (
    CPU,
    build,
    forward_backward,
    in_a_new_process,
    interleave,
    load_module,
    make_record,
    not_measured,
    processor_seconds,
    ran_out_of_memory,
    random_tokens,
    ratio,
    show,
    summarize,
    write_record,
)

WORKER_FLAG = "--worker"
RECORD = Path(__file__).parent / "results" / "zoo.json"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
HEADS, DIM = 8, 64


@dataclass(frozen=True)
class Contest:
    """Forms of one computation, and what they are measured against.

    Attributes:
        inputs: to the tensors that every form takes; floating ones get gradients.
        forms: by name, each a function of the inputs to a tensor; `compiled` is the one that the others are held to.
        bars: of a form, the least time of it over that of `compiled`.
        same: forms that compute the same, the first of which is the judge of the others.
        slow: forms that are run three times at most.
    """

    sizes: dict[str, int]
    inputs: Callable[[], Sequence[Tensor]]
    forms: Callable[[], dict[str, Callable[..., Tensor]]]
    bars: dict[str, float]
    same: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


# -- scores that are a program


def causal_loop(score: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
    """Attention of each token by scores that `score(scores [B, H, S], how long ago [S], *learned)` makes of products;
    what that puts beyond the last token takes weight and has no value."""

    def step(state: tuple[Tensor, Tensor], token: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        t, q, k, v = token
        positions = torch.arange(state[0].shape[1])
        keys, values = (
            torch.where((positions == t)[:, None, None], x[:, None], cache)
            for x, cache in zip((k, v), state, strict=True)
        )
        scores = torch.einsum("bhd,bshd->bhs", q, keys) * q.shape[-1] ** -0.5
        scores = score(scores, t - positions, *learned)
        weights = scores.softmax(-1)[..., : len(positions)]
        return (keys, values), torch.einsum("bhs,bshd->bhd", weights, values)

    tokens = (torch.arange(q.shape[1]), *rows(q, k, v))
    return nsa_compile.scan(step, (torch.zeros_like(k), torch.zeros_like(v)), tokens)[1].transpose(0, 1)


def of_heads(x: Tensor, scores: Tensor) -> Tensor:
    """`[H]` beside scores `[B, H, ..., S]`."""
    return x.view(-1, *[1] * (scores.dim() - 2))


def causal(scores: Tensor, ago: Tensor) -> Tensor:
    return scores.masked_fill(ago < 0, -torch.inf)


def soft_cap(scores: Tensor, ago: Tensor) -> Tensor:
    return causal(30 * (scores / 30).tanh(), ago)


def alibi(scores: Tensor, ago: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1.0, scores.shape[1] + 1)
    return causal(scores - of_heads(slopes, scores) * ago, ago)


def t5(scores: Tensor, ago: Tensor, table: Tensor) -> Tensor:
    """A learned bias `[H, 32]` by distance: 16 have their own, those above share them by logarithm, up to 128."""
    far = 16 + ((ago.clamp_min(1) / 16).log() / math.log(128 / 16) * 16).long()
    bucket = torch.where(ago < 16, ago.clamp_min(0), far.clamp_max(31))
    return causal(scores + table[:, bucket], ago)


def sinks(scores: Tensor, ago: Tensor, logits: Tensor) -> Tensor:
    return torch.cat([causal(scores, ago), of_heads(logits, scores).expand(*scores.shape[:-1], 1)], -1)


SCORES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "soft-cap": (soft_cap, ()),
    "alibi": (alibi, ()),
    "t5": (t5, ((HEADS, 32),)),
    "sinks": (sinks, ((HEADS,),)),
}


def scores_contest(name: str, seq_len: int) -> Contest:
    score, learned = SCORES[name]
    ago = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    mask = torch.zeros(seq_len, seq_len).masked_fill(ago < 0, -torch.inf)

    def inputs() -> list[Tensor]:
        return [torch.randn(1, seq_len, HEADS, DIM) for _ in range(3)] + [torch.randn(shape) for shape in learned]

    def dense(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        scores = torch.einsum("bshd,bthd->bhst", q, k) * DIM**-0.5
        weights = score(scores, ago, *learned).softmax(-1)[..., :seq_len]
        return torch.einsum("bhst,bthd->bshd", weights, v)

    def with_mask(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        """What a mask costs; it holds no bias, which would cost a gradient, too."""
        return dense_attention(q, k, v, attn_mask=mask)

    def plain(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return ops.window_attention(q, k, v, window=seq_len)[0]

    def forms() -> dict[str, Callable[..., Tensor]]:
        compiled = nsa_compile.compile(partial(causal_loop, score), cache=False)
        return {"dense": dense, "compiled": compiled, "SDPA, dense mask": with_mask, "plain kernel": plain}

    bars = {"SDPA, dense mask": 2.0, "plain kernel": 1 / 1.15}
    return Contest({"seq_len": seq_len}, inputs, forms, bars, ("dense", "compiled"), ("dense",))


# -- layers that select


# Of each: groups of keys and values, its sizes at a length, and the blocks that each query reads with their sizes.
@dataclass(frozen=True)
class Selection:
    attention: str
    groups: int
    pattern: Callable[[int], dict[str, int]]
    reads: Callable[[int], tuple[int, int]]
    bar: Callable[[int], dict[str, float]] = lambda _: {"as many keys": 1 / 1.2}


SELECTIONS = {
    "moba": Selection("moba", HEADS, lambda _: {}, lambda _: (3, 512)),
    "msa": Selection("msa", 2, lambda _: {}, lambda _: (16, 128)),
    "infllm-v2": Selection(  # its defaults are for 32,768
        "infllm_v2",
        2,
        lambda n: {"num_selected": n // 512, "window": n // 16, "dense_len": 0},
        lambda n: (n // 512 + n // 1024, 64),
    ),
    "dsa": Selection(
        "dsa",
        HEADS,
        lambda _: {"num_selected": 512, "q_rank": 64, "kv_rank": 64, "rope_dim": 16, "index_heads": 4, "index_dim": 32},
        lambda _: (8, 64),
        lambda n: {"SDPA, causal": 4.0 if n >= 32_768 else 2.0},
    ),
}


class Plain(nn.Module):
    """Projections and rotations of a layer of the zoo around another attention `[B, S, H, D]`."""

    def __init__(self, model: NSAConfig, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.attention = model, attention
        self.q = nn.Linear(model.dim, model.n_heads * DIM, bias=False)
        self.k, self.v = (nn.Linear(model.dim, model.n_kv_heads * DIM, bias=False) for _ in range(2))
        self.out = nn.Linear(model.n_heads * DIM, model.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, DIM)) for f in (self.q, self.k, self.v))
        t = torch.arange(x.shape[1])
        q, k = (apply_rope(y, t, self.model.rope_theta) for y in (q, k))
        return self.out(self.attention(q, k, v).flatten(2))


def some_blocks(seq_len: int, groups: int, count: int, block: int) -> Tensor:
    """`[1, S, G, count]`: of each query its own block and others before it."""
    own = torch.arange(seq_len)[:, None, None] // block
    ranked = torch.rand(seq_len, groups, -(-seq_len // block))
    number = torch.arange(ranked.shape[-1])
    ranked = ranked.masked_fill(number > own, -1.0).masked_fill(number == own, 2.0)
    found = ranked.topk(min(count, ranked.shape[-1]))
    return found.indices.masked_fill(found.values < 0, -1).int().unsqueeze(0)


def selection_contest(name: str, seq_len: int) -> Contest:
    selection = SELECTIONS[name]
    variant = find(selection.attention)
    model = NSAConfig(
        vocab_size=256, dim=DIM, n_layers=1, n_heads=HEADS, n_kv_heads=selection.groups, head_dim=DIM,
        attention=selection.attention, pattern=variant.pattern(**selection.pattern(seq_len)),
    )  # fmt: skip
    count, block = selection.reads(seq_len)

    def inputs() -> list[Tensor]:
        return [torch.randn(1, seq_len, DIM)]

    def trained(layer: nn.Module, x: Tensor) -> Tensor:
        """The output of a layer, and its own loss, if it has one, where a gradient meets it."""
        if not variant.auxiliary:
            return layer(x)
        out, loss = layer(x, return_auxiliary=True)
        return out + loss

    def forms() -> dict[str, Callable[..., Tensor]]:
        indices = some_blocks(seq_len, selection.groups, count, block)

        def given(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ops.selected_attention(q, k, v, indices, block_size=block)[0]

        layer = variant.layer(model)
        return {
            "compiled": nsa_compile.compile(partial(trained, layer), cache=False),
            "SDPA, causal": torch.compile(Plain(model, dense_attention), dynamic=False),
            "as many keys": torch.compile(Plain(model, given), dynamic=False),
        }

    sizes = {"seq_len": seq_len, "groups": selection.groups, "keys_read": count * block}
    return Contest(sizes, inputs, forms, selection.bar(seq_len), (), ("SDPA, causal",))


# -- recurrences


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


def recurrence_contest(name: str, seq_len: int, fla: Path | None) -> Contest:
    design, problem = DESIGNS[name], Problem(1, seq_len, HEADS, DIM)
    loop = partial(design.loop, problem)

    def forms() -> dict[str, Callable[..., Tensor]]:
        found = {
            "eager": loop,
            "loop": nsa_compile.compile(loop, disable=ORDER, cache=False),
            "compiled": nsa_compile.compile(loop, cache=False),
        }
        if fla is not None and design.peer is not None:
            folder, function = design.peer
            theirs = getattr(load_module(fla / "fla" / "ops" / folder / "naive.py", f"fla_{folder}"), function)
            found["fla"] = torch.compile(partial(design.theirs, theirs), fullgraph=True, dynamic=False)
        return found

    bars = {"eager": 40.0, "loop": 5.0, "fla": 1.0}
    same = ("eager", "loop", "compiled", "fla")
    return Contest({"seq_len": seq_len}, partial(design.inputs, problem), forms, bars, same, ("eager", "loop"))


# -- one contest


def results(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the inputs, of parameters as well."""
    for x in inputs:
        x.grad = None
    out = f(*inputs)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def difference(given: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(given, expected, strict=True))


def measure(contest: Contest, repeats: int, clock: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [x.detach().requires_grad_() for x in contest.inputs()]
    row: dict[str, Any] = {**contest.sizes, "first_call_s": {}, "difference": {}}
    works: dict[str, Callable[[], Any]] = {}
    timings: dict[str, dict[str, Any]] = {}
    expected: list[Tensor] = []
    for form, f in contest.forms().items():
        work = partial(results, f, inputs)
        start = time.perf_counter()
        try:
            given = work()
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            timings[form] = not_measured("does not fit into memory")
            continue
        row["first_call_s"][form] = time.perf_counter() - start
        if form in contest.same:
            expected = expected or given
            row["difference"][form] = difference(given, expected)
        works[form] = work
        if form == "compiled":
            row["verdict"] = [scan.verdict for scan in nsa_compile.last_report().scans]
    counts = {form: min(3, repeats) if form in contest.slow else repeats for form in works}
    timings |= interleave(works, counts, warm_up=False, clock=CLOCKS[clock])
    ours = timings["compiled"]
    row |= {
        "times": timings,
        "ratios": {form: ratio(time, ours) for form, time in timings.items() if form != "compiled"},
    }
    return row | {"bars": {form: bar for form, bar in contest.bars.items() if form in timings}}


# -- compiling blocks

COMPILED = (
    "gqa", "streaming", "gpt_oss", "longformer", "bigbird", "moba", "quest", "infllm_v2", "msa", "qsa", "dsa", "linear",
    "retnet", "gla", "mamba2", "delta_net", "gated_delta_net", "kda",
)  # fmt: skip


def worker(attention: str, seq_len: int) -> None:
    """The measured process: compile a block, run it forward and backward, print what it took."""
    torch.set_num_threads(2)
    groups = 4 if attention == "dsa" else 2
    config = NSAConfig(
        vocab_size=256, dim=256, n_layers=1, n_heads=4, n_kv_heads=groups, head_dim=64, attention=attention,
        pattern=find(attention).pattern(**({"rope_dim": 32} if attention == "dsa" else {})),
    )  # fmt: skip
    tokens = random_tokens(config, seq_len)
    model = nsa_compile.compile_blocks(build(config))
    taken = []
    for _ in range(2):
        before = time.perf_counter(), processor_seconds()
        forward_backward(model, tokens)
        taken.append((time.perf_counter() - before[0], processor_seconds() - before[1]))
    wall, processor = (first - second for first, second in zip(*taken, strict=True))
    print(json.dumps({"wall": wall, "processor": processor}))


def compile_times(attention: str, seq_len: int, repeats: int) -> list[dict[str, float]]:
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            found.append(in_a_new_process(__file__, WORKER_FLAG, attention, seq_len, cache=cache))
    return found


@cache
def compile_times_of_nsa(seq_len: int, repeats: int) -> list[dict[str, float]]:
    return compile_times("nsa", seq_len, repeats)


def measure_compiling(attention: str, seq_len: int, repeats: int, clock: str) -> dict[str, Any]:
    runs = {"compiled": compile_times(attention, seq_len, repeats), "nsa": compile_times_of_nsa(seq_len, repeats)}
    timings = {form: summarize([run[clock] for run in found]) for form, found in runs.items()}
    ratios = {"nsa": ratio(timings["nsa"], timings["compiled"])}
    return {"seq_len": seq_len, "times": timings, "ratios": ratios, "bars": {"nsa": 1 / 1.3}}


# -- the command


def cases(fla: Path | None) -> dict[str, Callable[[int, str], dict[str, Any]]]:
    """Every row by name: measures it, given repetitions and a clock."""
    found: dict[str, Callable[[int, str], dict[str, Any]]] = {}

    def add(name: str, make: Callable[[], Contest]) -> None:
        found[name] = lambda repeats, clock: measure(make(), repeats, clock)

    for name in SCORES:
        add(f"scores/{name}/2048", partial(scores_contest, name, 2048))
    for name in SELECTIONS:
        for seq_len in (8192, 32_768):
            add(f"selection/{name}/{seq_len}", partial(selection_contest, name, seq_len))
    for name in DESIGNS:
        add(f"recurrences/{name}/4096", partial(recurrence_contest, name, 4096, fla))
    for name in COMPILED:
        found[f"compile/{name}/2048"] = partial(measure_compiling, name, 2048)
    return found


def verdicts(row: dict[str, Any]) -> str:
    """Each ratio that has a bar, and whether it is met."""
    words = []
    for form, bar in row["bars"].items():
        found = row["ratios"][form]
        words.append(
            f"{form}: " + (f"{found:.2f} of {bar:.2f}{'' if found >= bar else ', short'}" if found else "none")
        )
    return "; ".join(words)


@click.command()
@click.option("--only", default="", help="Beginnings of names, with commas between them; everything without it.")
@click.option("--threads", default=2, show_default=True, help="Threads of the CPU.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs, in turns; 3 at most of a loop.")
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True, help="What is counted.")
@click.option("--memory", default=16.0, show_default=True, help="GiB of addresses that this process may take.")
@click.option("--fla", type=click.Path(exists=True, path_type=Path), help="A checkout of flash-linear-attention.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, help="Where the record goes.")
def main(only, threads, repeats, clock, memory, fla, out) -> None:
    """Time the zoo against what it is to be as fast as."""
    torch.set_num_threads(threads)
    limit = int(memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    chosen = {name: case for name, case in cases(fla).items() if name.startswith(tuple(only.split(",")))}
    if not chosen:
        raise click.UsageError(f"no name begins with '{only}'; there are {', '.join(cases(fla))}")
    settings = {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32", "direction": "forward+backward"}
    settings |= {"threads": threads, "clock": clock, "memory_gib": memory}
    measured: dict[str, dict[str, Any]] = {}
    if only and out.exists():
        measured = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))["results"]}
    for name, case in chosen.items():
        row = {"name": name, "repeats": repeats, "clock": clock, **case(repeats, clock)}
        measured[name] = row
        write_record(out, make_record("zoo", settings, list(measured.values()), CPU))
        print(f"{name}: {show(row['times']['compiled'])} ms; {verdicts(row)}", flush=True)
    table = [
        (
            name,
            show(row["times"]["compiled"]),
            verdicts(row),
            f"{max(row.get('difference', {}).values(), default=0):.1e}",
        )
        for name, row in measured.items()
    ]
    print(tabulate(table, headers=("name", "compiled, ms", "ratios and bars", "difference"), disable_numparse=True))
    print(out)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER_FLAG]:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main()

"""What the attention operators cost: nanoseconds per query-key pair and per query, forward + backward.

    python benchmarks/operator_costs.py
    python benchmarks/operator_costs.py --device vectors
    python benchmarks/operator_costs.py --seq-lens 128,256 --repeats 1 --out costs.json

Writes nsa_compile/analyses/operator_costs.json, by which `lower_attention` chooses between an operator that follows its
mask and dense attention. Each operator is timed at several lengths and sizes of its mask, in turns with dense
attention, and `time = per_query * queries + per_pair * pairs` is fitted to the medians, each by its share: an error of
10 % counts the same at every size. A figure is for one key/value head with all its query heads, so it compares with
others of the same file only. Pairs of dense attention are all of them, S * T: `dense` and `dense_causal` are SDPA,
`dense_scores` is what stands in for it where a query may see nothing or reads selected blocks. `compressed` leaves the
selection out, because dense attention does, too; what both together cost stands beside it. The device `vectors` is a
CPU without its matrix unit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

import nsa_compile.analyses
from nsa_compile.ir import attention
from nsa_compile.ops import compressed_attention, flops, force_implementation, selected_attention, window_attention
from nsa_compile.ops.compressed.selection import best_blocks_at
from nsa_compile.ops.dispatch import choose_kernel
from nsa_compile.profiles.bench import dense_attention
from nsa_compile.profiles.measure import SEED, interleave, make_record, write_record

COSTS = Path(nsa_compile.analyses.__file__).parent / "operator_costs.json"
GROUPS, HEADS, DIM = 2, 4, 64  # key/value heads, query heads of each, width
BLOCK, STRIDE, SELECT_BLOCK = 32, 16, 64
WINDOWS = (64, 256, 512)
COUNTS = (4, 8, 16)  # selected blocks
# Eq. 9 for these blocks: which compressed blocks count for a selection block, and how much.
SELECTION: dict[str, Any] = {"select_block": SELECT_BLOCK, "offsets": (-1, 0, 1, 2, 3), "weights": (1, 2, 2, 2, 1)}
SELECTION |= {"num_selected": 16, "num_initial": 1, "num_local": 2}

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # in float32 a GPU would leave its tensor cores aside

Case = tuple[str, str, int, Callable[[], Any]]


def cases(seq_len: int, device: torch.device) -> Iterator[Case]:
    """Operator, size of its mask, pairs it works on, and the work itself."""
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(length: int, heads: int) -> Tensor:
        x = torch.randn(1, length, heads, DIM, generator=generator, device=device)
        return x.to(DTYPES[device.type]).requires_grad_()

    q, k, v = normal(seq_len, GROUPS * HEADS), normal(seq_len, GROUPS), normal(seq_len, GROUPS)
    position = torch.arange(seq_len, device=device)
    mask = (position > position[:, None] - WINDOWS[-1]) & (position <= position[:, None])
    yield "dense", "masked", seq_len**2, partial(run, partial(dense_attention, attn_mask=mask), q, k, v)
    yield "dense_causal", "causal", seq_len**2, partial(run, dense_attention, q, k, v)
    for window in WINDOWS:
        fn = partial(window_attention, window=window)
        yield "window", f"{window} keys", flops.window_pairs(seq_len, seq_len, window), partial(run, fn, q, k, v)
    blocks = max(0, (seq_len - BLOCK) // STRIDE + 1)
    k_cmp, v_cmp = normal(blocks, GROUPS), normal(blocks, GROUPS)
    yield "dense_scores", "blocks", seq_len * blocks, partial(run, dense_scores, q, k_cmp, v_cmp)
    pairs = flops.compressed_pairs(seq_len, blocks, BLOCK, STRIDE)
    for name, selection in (("compressed", {}), ("compressed_with_selection", SELECTION)):
        fn = partial(compressed_attention, block_size=BLOCK, stride=STRIDE, **selection)
        yield name, f"{blocks} blocks", pairs, partial(run, fn, q, k_cmp, v_cmp)
    for count in COUNTS:
        score = torch.rand(1, seq_len, GROUPS, -(-seq_len // SELECT_BLOCK), generator=generator, device=device)
        indices = best_blocks_at(score, position, SELECT_BLOCK, count, 1, 2)
        fn = partial(selected_attention, indices=indices, block_size=SELECT_BLOCK)
        # As lower_attention counts them: it knows how many blocks there are, not which.
        pairs = flops.window_pairs(seq_len, seq_len, count * SELECT_BLOCK)
        yield "selected", f"{count} blocks", pairs, partial(run, fn, q, k, v)


def dense_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(2, (GROUPS, HEADS)).transpose(1, 2).flatten(0, 1)  # [G, S, h, D]
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    return attention.dense(attention.AttentionCall(q, k, v, None, None, DIM**-0.5, attention.Blocks(BLOCK, STRIDE)))


def run(fn: Callable[..., Any], *inputs: Tensor) -> None:
    """Forward and backward of a function or an operator, which returns more than its output."""
    out = fn(*inputs)
    out = out if isinstance(out, Tensor) else out[0]
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def fit(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Nanoseconds per pair and per query: least squares of relative errors, nothing below zero."""
    terms = ("pairs", "queries")
    time = np.array([sample["ns"] for sample in samples])
    matrix = np.array([[sample[term] for term in terms] for sample in samples]) / time[:, None]
    cost, *_ = np.linalg.lstsq(matrix, np.ones_like(time), rcond=None)
    if (cost < 0).any():  # one term explains it all: the other costs nothing that could be measured
        one = [float(column.sum() / (column**2).sum()) for column in matrix.T]
        errors = [((column * c - 1) ** 2).sum() for column, c in zip(matrix.T, one, strict=True)]
        cost = np.array([c if i == int(np.argmin(errors)) else 0.0 for i, c in enumerate(one)])
    return {f"per_{name}": float(f"{c:.4g}") for name, c in zip(("pair", "query"), cost, strict=True)}


@click.command()
@click.option("--seq-lens", default="512,1024,2048,4096", show_default=True, help="Sequence lengths.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs of each case, in turns, after a warm-up.")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "vectors", "cuda"]))
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU; torch's default without it.")
@click.option("--out", type=click.Path(path_type=Path), default=COSTS, show_default=True)
def main(seq_lens, repeats, device, threads, out) -> None:
    """Measure the costs of the attention operators; those of other devices in the file stay."""
    if threads:
        torch.set_num_threads(threads)
    on = torch.device("cpu" if device == "vectors" else device)
    samples: list[dict[str, Any]] = []
    for seq_len in (int(word) for word in seq_lens.split(",")):
        here = list(cases(seq_len, on))
        with force_implementation("vectors") if device == "vectors" else nullcontext():
            timings = interleave({f"{name}, {size}": work for name, size, _, work in here}, repeats, on)
        for name, size, pairs, _ in here:
            timing = timings[f"{name}, {size}"]
            if "median_s" in timing:
                ns = timing["median_s"] * 1e9 / GROUPS
                samples.append({"operator": name, "size": size, "queries": seq_len, "pairs": pairs, "ns": ns, **timing})
        print(f"measured S = {seq_len}", flush=True)

    costs, table = {}, []
    for name in dict.fromkeys(sample["operator"] for sample in samples):
        mine = [sample for sample in samples if sample["operator"] == name]
        costs[name] = fit(mine)
        off = max(abs(predict(costs[name], sample) / sample["ns"] - 1) for sample in mine)
        table.append((name, costs[name]["per_pair"], costs[name]["per_query"], f"{off:.0%}"))
    x = torch.empty(0, device=on)
    settings = {
        "heads": HEADS, "head_dim": DIM, "dtype": str(DTYPES[on.type]).removeprefix("torch."), "device": device,
        "repeats": repeats,
        "unit": f"ns of forward + backward for one key/value head and its {HEADS} query heads",
        "implementations": {name: choose_kernel(name, x).name for name in ("window", "compressed", "selected")},
    }  # fmt: skip
    kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    measured = {**kept.get("measured", {}), device: make_record("operator_costs", settings, samples, on)}
    write_record(out, {**kept, device: costs, "measured": measured})
    print(tabulate(table, headers=("operator", "ns per pair", "ns per query", "largest error of the fit")))
    print(out)


def predict(cost: dict[str, float], sample: dict[str, Any]) -> float:
    return cost["per_pair"] * sample["pairs"] + cost["per_query"] * sample["queries"]


if __name__ == "__main__":
    main()

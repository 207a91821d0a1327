"""One compiled NSA attention with and without `fuse_selection_scatter`: forward + backward, on the CPU.

    python benchmarks/fusion.py
    python benchmarks/fusion.py --seq-lens 1024,2048 --repeats 3

Without the pass a query's blocks stay a mask over all keys, and attention through it stays dense. Both variants run on
the same inputs, in turns, with causal SDPA beside them.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate

import nsa_compile
from nsa_compile.models import SparsePattern, nsa_attention
from nsa_compile.profiles.bench import AttentionProblem, dense_attention, output_and_gradients
from nsa_compile.profiles.measure import CPU, interleave, make_record, ratio, show, write_record

RECORD = Path(__file__).parent / "results" / "fusion.json"
PASS = "fuse_selection_scatter"


@click.command()
@click.option("--seq-lens", default="2048,4096,8192", show_default=True, help="Sequence lengths.")
@click.option("--repeats", default=5, show_default=True, help="Timed runs of each variant, in turns, after a warm-up.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(seq_lens, repeats, out) -> None:
    """Time attention with the pass on and off."""
    problem = AttentionProblem(1, 8, 2, 64, SparsePattern(), "float32", "auto", "inductor")
    rows: list[dict[str, Any]] = []
    for seq_len in (int(word) for word in seq_lens.split(",")):
        torch._dynamo.reset()
        inputs = problem.inputs(seq_len, CPU)
        attention = partial(nsa_attention, pattern=problem.pattern)
        works = {
            "on": partial(output_and_gradients, nsa_compile.compile(attention), *inputs),
            "off": partial(output_and_gradients, nsa_compile.compile(attention, disable=(PASS,)), *inputs),
            "dense": partial(output_and_gradients, dense_attention, inputs[0], inputs[3], inputs[4]),
        }
        timings = interleave(works, repeats, CPU)
        rows.append({"seq_len": seq_len, **timings, "ratio": ratio(timings["off"], timings["on"])})
        write_record(out, make_record("fusion", {"repeats": repeats, "disabled": PASS, **asdict(problem)}, rows))
    table = [(r["seq_len"], *(show(r[name]) for name in ("on", "off", "dense")), f"{r['ratio']:.1f}") for r in rows]
    print(tabulate(table, headers=("S", "on, ms (range)", "off, ms (range)", "dense SDPA, ms (range)", "off / on")))
    print(out)


if __name__ == "__main__":
    main()

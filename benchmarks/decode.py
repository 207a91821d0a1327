"""A compiled decode step with and without `fuse_selection_scatter`, at several cache lengths, on the CPU.

    python benchmarks/decode.py
    python benchmarks/decode.py --cache-lens 4096 --tokens 50

One token goes through one layer. With the pass it reads the rows of its n selected blocks and of its window; without,
the selected branch scores the whole cache. The caches are full of random rows, and the token stands at their end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch.utils._pytree import tree_leaves

import nsa_compile
from nsa_compile.profiles.measure import (
    CPU,
    build,
    interleave,
    make_record,
    model_config,
    ratio,
    show,
    write_record,
)

RECORD = Path(__file__).parent / "results" / "decode.json"
PASS = "fuse_selection_scatter"


@click.command()
@click.option("--cache-lens", default="4096,32768", show_default=True, help="Rows of the caches.")
@click.option(
    "--tokens", default=30, show_default=True, type=click.IntRange(min=1), help="Timed tokens of each, in turns."
)
@click.option("--out", metavar="PATH", help="Where the record goes; benchmarks/results/decode.json without it.")
@torch.no_grad()
def main(cache_lens, tokens, out) -> None:
    """Time a decode step with the pass on and off."""
    path = Path(out) if out else RECORD
    config = model_config(layers=1, dim=256, head_dim=64)
    model = build(config)
    rows: list[dict[str, Any]] = []
    for length in (int(word) for word in cache_lens.split(",")):
        torch._dynamo.reset()
        state = model.init_state(1, length)
        for leaf in tree_leaves(state):
            if leaf is not None and leaf.is_floating_point():
                leaf.normal_()
        token = torch.zeros(1, dtype=torch.int64)
        steps = {
            "on": nsa_compile.compile_decode_step(model),
            "off": nsa_compile.compile_decode_step(model, disable=(PASS,)),
        }

        def decode(step: Any, state: Any = state, token: torch.Tensor = token, length: int = length) -> None:
            state.t.fill_(length - 1)  # the step counts on
            step(state, token)

        timings = interleave({name: partial(decode, step) for name, step in steps.items()}, tokens, CPU)
        rows.append({"cache_len": length, **timings, "ratio": ratio(timings["off"], timings["on"])})
        settings = {"tokens": tokens, "disabled": PASS, "layers": 1, "dim": config.dim, "heads": config.n_heads}
        write_record(path, make_record("decode", settings, rows))
    table = [(r["cache_len"], *(show(r[n]) for n in ("on", "off")), f"{r['ratio']:.1f}") for r in rows]
    headers = ("cache", "on, ms (range)", "off, ms (range)", "off / on")
    print(tabulate(table, headers=headers))
    print(path)


if __name__ == "__main__":
    main()

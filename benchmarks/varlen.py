"""Packed documents in one compiled NSAttention, forward + backward, against the same documents alone, on the CPU.

    python benchmarks/varlen.py
    python benchmarks/varlen.py --repeats 3

Documents that fill a sequence of 4,096 tokens: eight of 512, and eight whose ends were drawn at random. Packed, they
are given as `cu_seqlens`, and finding them is in the time. Alone, each is a sequence of its own, of its own length;
those of one length are a batch. `filled` are those documents as one batch, filled up to the longest. Seconds are
processor time of one thread, so that other work of the machine counts for little.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch import Tensor

import nsa_compile
from nsa_compile.models import Documents, NSAttention, SparsePattern
from nsa_compile.profiles.measure import CPU, SEED, interleave, make_record, ratio, show, write_record

RECORD = Path(__file__).parent / "results" / "varlen.json"
TOKENS, COUNT = 4096, 8
SIZES = {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64}


def forward_backward(layer: NSAttention, batches: list[Tensor], **documents: Tensor) -> None:
    for x in batches:
        layer(x, **documents).square().mean().backward()


def mixes() -> dict[str, list[int]]:
    """The lengths of the documents of each mix."""
    generator = torch.Generator().manual_seed(SEED)
    ends = (torch.randperm(TOKENS - 1, generator=generator)[: COUNT - 1] + 1).sort().values.tolist()
    return {
        "equal": [TOKENS // COUNT] * COUNT,
        "drawn": [end - start for start, end in pairwise([0, *ends, TOKENS])],
    }


@click.command()
@click.option("--repeats", default=7, show_default=True, help="Timed runs of each variant, in turns, after a warm-up.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(repeats, out) -> None:
    """Time packed documents and the same ones alone."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    layer = NSAttention(**SIZES, pattern=SparsePattern())
    nsa_compile.compile_block(layer)

    def batch(*shape: int) -> Tensor:
        return torch.randn(*shape, SIZES["dim"], requires_grad=True)

    rows: list[dict[str, Any]] = []
    for mix, lengths in mixes().items():
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        alone = [batch(lengths.count(length), length) for length in sorted(set(lengths))]
        works = {
            "packed": partial(forward_backward, layer, [batch(1, TOKENS)], cu_seqlens=cu_seqlens),
            "alone": partial(forward_backward, layer, alone),
            "filled": partial(forward_backward, layer, [batch(len(lengths), max(lengths))]),
        }
        timings = interleave(works, repeats, CPU, clock=time.process_time)
        places = sum(row.numel() for row in Documents.of(cu_seqlens=cu_seqlens).rows)
        rows.append({
            "mix": mix, "lengths": lengths, "places": places, **timings,
            "ratio": ratio(timings["packed"], timings["alone"]),
        })  # fmt: skip
        settings = {"repeats": repeats, **SIZES, "pattern": asdict(layer.pattern), "tokens": TOKENS}
        write_record(out, make_record("varlen", {**settings, "seconds": "processor time"}, rows))
    table = [
        (r["mix"], f"{r['places'] / TOKENS:.2f}", *(show(r[name]) for name in works), f"{r['ratio']:.2f}") for r in rows
    ]
    headers = ("documents", "places / tokens", *(f"{name}, ms (range)" for name in works), "packed / alone")
    print(tabulate(table, headers=headers))
    print(out)


if __name__ == "__main__":
    main()

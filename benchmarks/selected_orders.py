"""Which loop order of selected attention is fastest on this GPU, for each number of heads a group.

    python benchmarks/selected_orders.py
    python benchmarks/selected_orders.py --heads 4,16 --dim 64 --seq-len 32768
    TRITON_INTERPRET=1 python benchmarks/selected_orders.py --device cpu --seq-len 8 --dim 16 --heads 2 --out o.json

Writes nsa_compile/ops/selected/triton_orders.json, by which `choose_order` chooses; rows of other shapes, lengths and
GPUs stay.
Forward and backward are timed together, in turns. The blocks are those that random queries select from random keys:
neighbours share little beyond the forced ones, the worst case for tiles of several queries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate

from nsa_compile.ops import compressed_attention
from nsa_compile.ops.selected import triton as selected
from nsa_compile.profiles.measure import SEED, interleave

GROUPS, BLOCK, STRIDE, PLACES = 4, 32, 16, 16
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ORDERS = (*(selected.Order("query", queries) for queries in (1, 2, 4, 8)), selected.Order("block"))


def works(
    heads: int, dim: int, seq_len: int, batch_size: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> dict[selected.Order, Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(length: int, heads: int) -> torch.Tensor:
        return torch.randn(batch_size, length, heads, dim, generator=generator, device=device).to(dtype)

    q, k, v, grad = (normal(seq_len, n * GROUPS) for n in (heads, 1, 1, heads))
    compressed = normal(max(1, (seq_len - BLOCK) // STRIDE + 1), GROUPS)
    ratio = block_size // STRIDE
    weights = {"offsets": range(-1, ratio), "weights": (1, *[2] * (ratio - 1), 1)}  # eq. 9
    *_, indices = compressed_attention(
        q, compressed, compressed, block_size=BLOCK, stride=STRIDE, select_block=block_size, num_selected=PLACES,
        num_initial=1, num_local=2, **weights,
    )  # fmt: skip

    def run(order: selected.Order) -> None:
        out, lse = selected.forward(q, k, v, indices, block_size, dim**-0.5, order)
        selected.backward(grad, None, q, k, v, out, lse, indices, block_size, dim**-0.5, order)

    return {order: partial(run, order) for order in ORDERS}


def measure(
    heads: int,
    dim: int,
    seq_len: int,
    batch_size: int,
    block_size: int,
    dtype: str,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """A row of the table: the shape, its fastest order, and the milliseconds of each."""
    work = works(heads, dim, seq_len, batch_size, block_size, DTYPES[dtype], device)
    orders = {f"{order.major} {order.queries}": order for order in work}
    timings = interleave(dict(zip(orders, work.values(), strict=True)), repeats, device)
    measured = {name: row["median_s"] * 1e3 for name, row in timings.items() if "median_s" in row}
    fastest = orders[min(measured, key=lambda name: measured[name])]
    shape = {"heads": heads, "dim": dim, "value_dim": dim, "dtype": dtype, "block_size": block_size}
    return {**shape, **fastest._asdict(), "seq_len": seq_len, "batch_size": batch_size, "milliseconds": measured}


def keep(row: Mapping[str, Any], arch: str, out: Path | None = None) -> None:
    """Put a row into a table, in place of that of the same shape and length; that of `choose_order` is read anew."""
    out = out or selected.ORDER_TABLE
    table = json.loads(out.read_text()) if out.exists() else {}
    others = [r for r in table.get(arch, ()) if any(r[name] != row[name] for name in (*selected.SHAPE, "seq_len"))]
    out.write_text(json.dumps({**table, arch: [*others, dict(row)]}, indent=2) + "\n")
    selected.forget_measured()


@click.command()
@click.option("--heads", default="1,2,4,8,16", show_default=True, help="Heads a group, separated by commas.")
@click.option("--dim", default=128, show_default=True, help="Width of queries, keys and values.")
@click.option("--seq-len", default=16384, show_default=True, help="Queries and keys.")
@click.option("--batch-size", default=1, show_default=True, help="Sequences: enough of short ones to fill a GPU.")
@click.option("--block-size", default=64, show_default=True, help="Keys a selected block.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--repeats", default=10, show_default=True, help="Timings of each order.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Another table than that of `choose_order`.")
def main(
    heads: str,
    dim: int,
    seq_len: int,
    batch_size: int,
    block_size: int,
    dtype: str,
    repeats: int,
    device: str,
    out: Path | None,
) -> None:
    """Time every loop order for each number of heads, and keep the fastest."""
    on, view = torch.device(device), []
    for count in map(int, heads.split(",")):
        row = measure(count, dim, seq_len, batch_size, block_size, dtype, repeats, on)
        keep(row, selected.arch_of(on), out)
        view.append((count, row["major"], row["queries"], *(f"{ms:.3f}" for ms in row["milliseconds"].values())))
    names = row["milliseconds"]
    click.echo(tabulate(view, headers=["heads", "fastest", "queries", *(f"{name}, ms" for name in names)]))


if __name__ == "__main__":
    main()

"""``nsa-compile verify``: the equivalence properties on the user's own machine."""

from __future__ import annotations

import json
from typing import Any

import click

from nsa_compile.cli import FiniteRange, run_options
from nsa_compile.errors import UserError

NAMES = ("paths", "future", "gradients", "replay", "passes", "operators")


@click.command()
@click.option("--minutes", type=FiniteRange(min=0, min_open=True), help="Minutes for all properties; 2 by default.")
@click.option("--examples", type=click.IntRange(min=1), help="Examples of each property, instead of a time.")
@click.option(
    "--property",
    "properties",
    type=click.Choice(NAMES),
    multiple=True,
    help="Check only this property; may be given several times.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to check; train.device by default.")
@click.option("--dtype", type=click.Choice(["float32", "bf16", "float64"]), help="Precision; train.dtype by default.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random examples.")
@run_options
def verify(
    config_path: str | None,
    overrides: tuple[str, ...],
    minutes: float | None,
    examples: int | None,
    properties: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Check on this machine that the compiler changes nothing but speed.

    The configured model is made small and checked first, then random ones around it, until the time is over. Exit code
    1 if a property is broken; the smallest example that breaks it is printed as a command.

    \b
    nsa-compile verify
    nsa-compile verify --config my_run.yaml --minutes 10 --dtype bf16
    nsa-compile verify --property operators --examples 20 --json
    """
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.config import load_config

    config = load_config(config_path, overrides)
    if minutes is not None and examples is not None:
        raise UserError("--minutes and --examples both say how much to check; give one of them")
    if not (variant := config.model.variant).verified:
        raise UserError(f"model.attention = '{variant.name}' leaves nothing to verify; use --set model.attention=nsa")

    from nsa_compile.machine.preflight import check_compiler, wait_passively

    check_compiler(config.changed(compile={"enabled": True}))
    wait_passively()

    from nsa_compile.verification.verify import verify as run

    record = run(
        config,
        device=_device(device or config.train.device),
        dtype=dtype or config.train.dtype,
        seconds=60 * (minutes or 2.0),
        examples=examples,
        seed=seed,
        properties=properties or NAMES,
        config_path=config_path,
        tell=lambda line: click.echo(line, err=True),
    )
    click.echo(json.dumps(record, indent=2) if as_json else _render(record))
    if not record["ok"]:
        click.get_current_context().exit(1)


def _device(name: str) -> str:
    import torch

    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UserError("--device cuda: torch finds no usable GPU here; use --device cpu")
    return "cuda" if found and name != "cpu" else "cpu"


def _render(record: dict[str, Any]) -> str:
    from tabulate import tabulate

    sizes, pattern = record["sizes"], record["sizes"]["pattern"]
    rows = [
        [
            result["name"],
            "holds" if result["ok"] else "BROKEN",
            str(result["examples"]),
            f"{result['error']:.2g} ≤ {result['bound']:.2g}" if result["bound"] else "bitwise",
            f"{result['seconds']:.1f} s",
            result["title"],
        ]
        for result in record["properties"]
    ]
    blocks = "/".join(
        str(pattern[key]) for key in ("compress_block", "compress_stride", "select_block", "num_selected", "window")
    )
    lines = [
        f"{record['device']}, {record['dtype']}, {sizes['threads']} threads, {sizes['nested']}; first example: "
        f"S = {sizes['seq_len']}, batch {sizes['batch_size']}, {sizes['layers']} layers, {sizes['heads']} heads in "
        f"{sizes['groups']} groups of width {sizes['head_dim']}, pattern {blocks}",
        "",
        tabulate(rows, ["property", "", "examples", "closest to its bound", "time", "what it says"]),
    ]
    for result in record["properties"]:
        if not result["ok"]:
            lines += ["", f"{result['name']}: {result['message']}", f"again: {result['command']}"]
    return "\n".join(lines)

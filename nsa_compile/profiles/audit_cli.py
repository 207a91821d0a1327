"""`nsa-compile audit`: what really ran."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import click

from nsa_compile.cli import SuggestingGroup, run_options
from nsa_compile.errors import UserError


@click.group(cls=SuggestingGroup)
def audit() -> None:
    """Show what really ran.

    \b
    nsa-compile audit attention
    nsa-compile audit attention --set model.attention=dense --no-flash
    """


@audit.command(short_help="Which operator and backend computed each attention.")
@click.option("--flash-only", is_flag=True, help="Allow SDPA its flash backend alone, and time it against all of them.")
@click.option("--no-flash", is_flag=True, help="Allow SDPA any backend but flash, and time it against all of them.")
@run_options
@click.pass_context
def attention(
    ctx: click.Context,
    flash_only: bool,
    no_flash: bool,
    config_path: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run each layer of a configured model once and tell which operator and backend computed its attentions.

    Observed, not derived from the configuration: the events that ran, forward and backward, and the dispatch of this
    package's operators. Exit code 1 if an attention fell back to something slower, with the reason.

    \b
    nsa-compile audit attention
    nsa-compile audit attention --config my_run.yaml --json
    nsa-compile audit attention --set model.attention=dense --flash-only
    """
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.config import load_config
    from nsa_compile.machine.preflight import check_run, wait_passively
    from nsa_compile.train.distributed.world import check_device

    if flash_only and no_flash:
        raise UserError("--flash-only and --no-flash exclude each other; give one of them")
    config = load_config(config_path, overrides)
    check_run(config)
    wait_passively()
    check_device(config)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces each start and stop of the profiler otherwise

    from nsa_compile.profiles.audit import audit_attention

    result = audit_attention(config, "flash only" if flash_only else "no flash" if no_flash else None)
    click.echo(json.dumps(result, indent=2) if as_json else render_audit(result))
    if result["fallbacks"]:
        ctx.exit(1)


def render_audit(result: Mapping[str, Any]) -> str:
    """The audit for a terminal; layers with the same attentions share their lines."""
    from tabulate import tabulate

    from nsa_compile.profiles.measure import show

    settings = result["settings"]
    compiled = f"compiled with {settings['compiled']}" if settings["compiled"] else "not compiled"
    rows: dict[tuple[str, ...], list[int]] = {}
    for row in result["observed"]:
        key = (row["direction"], row["branch"], row["backend"], str(row["calls"]), row["seen_as"])
        rows.setdefault(key, []).append(row["layer"])
    table = [(spans(layers), *key) for key, layers in rows.items()]
    shape = f"{settings['layers']} layers, {settings['batch_size']} × {settings['seq_len']} tokens"
    where = f"{settings['dtype']}, {settings['device']}, {compiled}, SDPA: {settings['sdpa']}"
    lines = [
        f"{settings['attention']} attention, {shape}, {where}",
        "",
        tabulate(table, headers=("layer", "direction", "attention", "computed by", "calls", "seen as")),
    ]
    if result["choices"]:
        lines += ["", "Chosen by lower_attention:"]
        lines += [f"  {branch}: {operator} for {what}" for branch, (what, operator) in result["choices"].items()]
    if result["comparison"]:
        timings = result["comparison"]["timings"]
        lines += ["", f"Forward and backward of all blocks, ms (n = {result['comparison']['repeats']}, in turns):"]
        lines += [f"  {name}: {show(timing)}" for name, timing in timings.items()]
    lines.append("")
    for found in result["fallbacks"]:
        lines.append(
            f"FALLBACK  layers {spans(found['layers'])}, {found['branch']}: {found['what']}; {found['reason']}"
        )
    return "\n".join(lines if result["fallbacks"] else [*lines, "ok  no fallback"])


def spans(numbers: list[int]) -> str:
    """Ascending numbers in short: ``0-3,7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)

"""`nsa-compile profile passes`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import click

from nsa_compile.cli import FiniteRange, run_options
from nsa_compile.errors import UserError
from nsa_compile.files import write_json


@click.command(short_help="What each pass of the compiler costs and brings.")
@run_options
@click.option(
    "--seq-len", type=click.IntRange(min=1), default=256, show_default=True,
    help="Tokens of the block. train.seq_len is not used: early prefixes loop over the tokens.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=2), default=5, show_default=True, help="Timed runs of each prefix.")
@click.option(
    "--limit", "limit_s", type=FiniteRange(min=1, max=86_400), default=120, show_default=True,
    help="Seconds to compile and first run a prefix; what takes longer is not measured.",
)  # fmt: skip
@click.option("--out", metavar="DIR", help="Write passes.html, passes.json and the graphs here.")
def passes(
    config_path: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    seq_len: int,
    repeats: int,
    limit_s: float,
    out: str | None,
) -> None:
    """Compile one block of a configured model after 0, 1, 2, … passes, and measure each.

    Time of the pass, nodes and operators, matches and declines, estimated arithmetic, traffic and memory; measured time
    forward and backward, peak memory, kernels, and the error against the uncompiled block in float64. The first
    time, compiling the programs takes some minutes on two cores.

    \b
    nsa-compile profile passes --out profile
    nsa-compile profile passes --set compile.nested=aot_eager --json
    nsa-compile profile passes --config my_run.yaml --seq-len 512 --repeats 9
    """
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.arguments import check_directory, check_seq_len
    from nsa_compile.config import load_config
    from nsa_compile.machine.preflight import require_cxx, wait_passively
    from nsa_compile.train.distributed.world import check_device

    config = load_config(config_path, overrides)
    check_seq_len(config, seq_len)
    if config.compile.nested == "inductor":
        require_cxx("compile.nested = 'inductor'", "--set compile.nested=aot_eager")
    if out is not None:
        check_directory(Path(out))
        if find_spec("matplotlib") is None:
            raise UserError(
                "--out needs matplotlib for its plots; pip install 'nsa-compile[plots]', or leave --out out"
            )

    wait_passively()
    check_device(config)

    from nsa_compile.profiles.pass_page import render_profile, write_profile_page
    from nsa_compile.profiles.pass_profile import profile_passes

    record, graphs = profile_passes(
        config, seq_len=seq_len, repeats=repeats, limit_s=limit_s, tell=lambda line: click.echo(line, err=True)
    )
    if out is not None:
        folder = Path(out)
        folder.mkdir(exist_ok=True)
        for number, graph in enumerate(graphs):
            (folder / f"graph_{number}.py").write_text(graph)
        write_json(folder / "passes.json", record)
        write_profile_page(folder / "passes.html", record, graphs)
    click.echo(json.dumps(record, indent=2) if as_json else render_profile(record))
    if out is not None:
        click.echo(f"page: {Path(out) / 'passes.html'}", err=as_json)

"""`nsa-compile profile`: where time goes, in a training step and pass by pass."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from nsa_compile.cli import FiniteRange, SuggestingGroup, run_options
from nsa_compile.errors import UserError
from nsa_compile.files import replace, write_json, write_text

if TYPE_CHECKING:
    from nsa_compile.config import RunConfig


@click.group(cls=SuggestingGroup)
def profile() -> None:
    """Show where time goes.

    \b
    nsa-compile profile step
    nsa-compile profile step --config my_run.yaml --steps 20
    nsa-compile profile passes --out profile
    """


@profile.command(short_help="Where the time of a training step goes.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps to profile.")
@click.option(
    "--warmup",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Steps before those; the first one compiles.",
)
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this machine.")
@click.option("--out", metavar="DIR", help="Where the files go; without it, a new directory in run.dir.")
@run_options
@click.pass_context
def step(
    ctx: click.Context,
    steps: int,
    warmup: int,
    nproc: int,
    out: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a few warm training steps under torch's profiler and say what they spend their time on.

    Time by phase and branch, forward and backward apart, operators, the share of Python, host syncs, data loading. The
    exit code is 1 where a check failed: a Python hot spot, a host sync in the step, a sum that is not the whole. With
    several processes, the report is about the first, with what it sent and what it waited for.

    \b
    nsa-compile profile step
    nsa-compile profile step --set train.seq_len=256 --steps 20
    nsa-compile profile step --config my_run.yaml --out profile --json
    """
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.arguments import writing
    from nsa_compile.config import load_config
    from nsa_compile.data import load_corpus
    from nsa_compile.machine.preflight import check_run, wait_passively
    from nsa_compile.train.distributed.world import World, check_port, check_world

    config = load_config(config_path, overrides)
    check_run(config)
    world = World.from_environment(os.environ) or World()
    check_world(config, max(nproc, world.size), max(nproc, world.local_size))
    corpus = load_corpus(config, world.rank, world.size)
    directory = _directory(config, out) if world.main else Path()
    wait_passively()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it announces each start and stop of the profiler otherwise
    if nproc > world.size:
        check_port(config.ddp.port)
        ctx.exit(_in_processes(config, nproc, ctx, directory))

    from nsa_compile.profiles.step_profile import profile_step
    from nsa_compile.profiles.step_views import render_step, write_page
    from nsa_compile.train.distributed.group import barrier, broadcast, choose_device, process_group

    # What cannot be written takes nothing with it that was measured: the files come last.
    with process_group(config.ddp, world, choose_device(config, world)), TemporaryDirectory() as made:
        directory = broadcast(directory)
        result = profile_step(config, corpus, Path(made), steps, warmup, world)
        sound = broadcast(all(check["ok"] for check in result["checks"].values()))
        if world.main:
            click.echo(json.dumps(result | {"directory": str(directory)}, indent=2) if as_json else render_step(result))
        with writing(directory, "DIR"):
            for file in Path(made).iterdir():
                replace(directory / file.name, file.read_bytes())
            if world.main:
                write_json(directory / "profile.json", result)
                write_page(result, directory)
                click.echo(f"files in {directory}: profile.html, profile.json, {result['trace']}", err=True)
        barrier()  # the first to leave ends the others
    if not sound:
        ctx.exit(1)


def _in_processes(config: RunConfig, nproc: int, ctx: click.Context, directory: Path) -> int:
    """The same command in `nproc` processes that know of each other; the exit code of the first that failed."""
    from nsa_compile.config import options_of
    from nsa_compile.launch.launcher import run_processes

    given = ctx.params
    words = ["--steps", str(given["steps"]), "--warmup", str(given["warmup"]), "--out", str(directory)]
    words += options_of(given["config_path"], given["overrides"])
    words += ["--json"] if given["as_json"] else []
    codes = run_processes(config, nproc, ("-m", "nsa_compile", "profile", "step", *words))
    return next((code if code > 0 else 1 for _, code in sorted(codes.items())), 0)


def _directory(config: RunConfig, out: str | None) -> Path:
    """The directory that was asked for, or a new one beside the runs; a UserError where it cannot be written to."""
    from nsa_compile.arguments import check_directory, writing
    from nsa_compile.train.records.run_directory import create_run_directory

    if out is None:
        return create_run_directory(config.changed(run={"name": f"{config.run.name}-profile"}))
    directory = Path(out)
    check_directory(directory)
    with writing(directory, "DIR"):
        directory.mkdir(exist_ok=True)
    return directory


@profile.command(short_help="What each pass of the compiler costs and brings.")
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
    from nsa_compile.arguments import check_directory, check_seq_len, writing
    from nsa_compile.config import load_config
    from nsa_compile.machine.preflight import check_nested, wait_passively
    from nsa_compile.train.distributed.world import check_device

    config = load_config(config_path, overrides)
    check_seq_len(config, seq_len)
    check_nested(config)
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
    click.echo(json.dumps(record, indent=2) if as_json else render_profile(record))
    if out is not None:
        folder = Path(out)
        with writing(folder, "DIR"):
            folder.mkdir(exist_ok=True)
            for number, graph in enumerate(graphs):
                write_text(folder / f"graph_{number}.py", graph)
            write_json(folder / "passes.json", record)
            write_profile_page(folder / "passes.html", record, graphs)
        click.echo(f"page: {folder / 'passes.html'}", err=as_json)

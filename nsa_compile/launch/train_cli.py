"""``nsa-compile train``: a run in this process, as one of several, or with several of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import run_options
from nsa_compile.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from nsa_compile.config import RunConfig
    from nsa_compile.train.distributed.world import World


@click.command()
@click.option(
    "--resume",
    default="never",
    show_default=True,
    metavar="auto|never|PATH",
    help="Go on with the newest run of the same configuration, or with a run directory or checkpoint.",
)
@click.option(
    "--init-from",
    metavar="PATH|hf:ORG/NAME",
    help="Begin with the weights of a run, a checkpoint, an exported or converted folder; sets train.init_from.",
)
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this machine.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the resolved configuration and stop.")
@run_options
@click.pass_context
def train(
    ctx: click.Context,
    config_path: str | None,
    overrides: tuple[str, ...],
    resume: str,
    init_from: str | None,
    nproc: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a model and leave its files in a directory of its own.

    \b
    nsa-compile train
    nsa-compile train --set train.steps=50 --set data.name=my_text.txt
    nsa-compile train --config configs/shakespeare_cpu.yaml --json
    nsa-compile train --resume auto
    nsa-compile train --nproc 2
    nsa-compile train --config my_run.yaml --init-from runs/shakespeare-cpu-20260101-120000
    """
    from nsa_compile.train.distributed.world import World
    from nsa_compile.train.signals import EXIT_CODES, leave_on_signals

    if init_from is not None:
        overrides = (*overrides, f"train.init_from={json.dumps(init_from, ensure_ascii=False)}")

    world = World.from_environment(os.environ)
    with leave_on_signals(quiet=world is not None and not world.main):
        summary = _train(world, config_path, overrides, resume, nproc, dry_run, as_json)
    if summary is not None and summary["interrupted"]:
        ctx.exit(EXIT_CODES[summary["stopped_by"]])


def _train(
    world: World | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    resume: str,
    nproc: int,
    dry_run: bool,
    as_json: bool,
) -> dict[str, Any] | None:
    """Do what the options say, and return the summary of the run; ``None`` for a dry one."""
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.config import load_config, options_of
    from nsa_compile.data import load_corpus
    from nsa_compile.launch.start import open_run
    from nsa_compile.machine.preflight import check_run, wait_passively
    from nsa_compile.train.checkpoints.resume import find_run
    from nsa_compile.train.distributed.world import check_port, check_world
    from nsa_compile.train.records.run_directory import check_output

    config = load_config(config_path, overrides)
    if world is not None and world.size > 1:
        for option, given in ((f"--nproc {nproc}", nproc > 1), ("--dry-run", dry_run)):
            if given:
                raise UserError(
                    f"{option} is for a command of its own, and this is one of {world.size} processes already; "
                    "leave it out"
                )
        from nsa_compile.launch.worker import run_worker

        summary = run_worker(world, config, resume)
        if world.main:
            _tell(summary, as_json)
        return summary
    check_run(config)
    check_world(config, nproc, nproc)
    # A process that is killed to be started again needs somebody who does so, even if it is alone.
    launched = nproc > 1 or config.watchdog.restarts
    check_port(config.ddp.port if launched else None)
    corpus = load_corpus(config)
    found = find_run(config, resume)
    if config.train.init_from is not None and found.directory is None:
        from nsa_compile.models import NSATransformer
        from nsa_compile.train.checkpoints.source import begin_with

        # Before the run has a directory: whether it can.
        begin_with(NSATransformer(config.model), config.train.init_from, config.data.tokenizer)
    for note in found.notes:
        click.echo(note, err=True)
    if dry_run:
        check_output(config.run.dir)
        click.echo(json.dumps(config.plain(), indent=2) if as_json else config.to_yaml(), nl=as_json)
        return None
    with open_run(config, found) as start:
        wait_passively()
        if launched:
            summary = _launch(config, start.directory, nproc, options_of(config_path, overrides))
        else:
            from nsa_compile.launch.launcher import watched
            from nsa_compile.train.loop import run

            with watched(config, start.directory):
                summary = run(config, corpus, start.directory, start.checkpoint)
    _tell(summary, as_json)
    return summary


def _launch(config: RunConfig, directory: Path, nproc: int, options: list[str]) -> dict[str, Any]:
    """Train in processes of their own and return the summary they left; without one, leave with their exit code."""
    from nsa_compile.files import open_regular
    from nsa_compile.launch.launcher import launch
    from nsa_compile.train.signals import EXIT_CODES

    path = directory / "summary.json"
    try:
        path.unlink(missing_ok=True)  # of the part of the run before
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be written: {error.strerror}; remove it") from None
    code = launch(config, directory, nproc, options)
    if code not in (0, *EXIT_CODES.values()):
        raise SystemExit(code)
    try:
        with open_regular(path) as file:
            summary: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        if code:  # stopped before there was anything to tell
            raise SystemExit(code) from None
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"the run is over, and its '{path}' cannot be read: {reason}; look into it") from None
    return summary


def _tell(summary: dict[str, Any], as_json: bool) -> None:
    from nsa_compile.train.report.summary import render

    click.echo(json.dumps(summary, indent=2) if as_json else render(summary))

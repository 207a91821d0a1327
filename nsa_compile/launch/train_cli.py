"""``nsa-compile train``: a run in this process, as one of several, or with several of its own."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from nsa_compile.cli import run_options
from nsa_compile.errors import UserError


@click.command()
@click.option(
    "--resume",
    default="never",
    show_default=True,
    metavar="auto|never|PATH",
    help="Go on with the newest run of the same configuration, or with a run directory or checkpoint.",
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
    """
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.config import load_config
    from nsa_compile.data import load_corpus
    from nsa_compile.launch.start import open_run
    from nsa_compile.machine.preflight import check_run, wait_passively
    from nsa_compile.train.checkpoints.resume import find_run
    from nsa_compile.train.distributed.world import World, check_port, check_world
    from nsa_compile.train.records.run_directory import check_output
    from nsa_compile.train.signals import EXIT_CODES

    config = load_config(config_path, overrides)
    world = World.from_environment(os.environ)
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
    else:
        check_run(config)
        check_world(config, nproc, nproc)
        # A process that is killed to be started again needs somebody who does so, even if it is alone.
        launched = nproc > 1 or config.watchdog.restarts
        check_port(config.ddp.port if launched else None)
        corpus = load_corpus(config)
        found = find_run(config, resume)
        for note in found.notes:
            click.echo(note, err=True)
        if dry_run:
            check_output(config.run.dir)
            click.echo(json.dumps(config.plain(), indent=2) if as_json else config.to_yaml(), nl=as_json)
            return
        with open_run(config, found) as start:
            wait_passively()
            from nsa_compile.launch.launcher import launch, watched

            if launched:
                options = [word for override in overrides for word in ("--set", override)]
                options += ["--config", config_path] if config_path else []
                summary_file = start.directory / "summary.json"
                summary_file.unlink(missing_ok=True)  # of the part of the run before
                code = launch(config, start.directory, nproc, options)
                if code not in (0, *EXIT_CODES.values()) or not summary_file.exists():
                    ctx.exit(code)
                summary = json.loads(summary_file.read_text(encoding="utf-8"))
            else:
                from nsa_compile.train.loop import run

                with watched(config, start.directory):
                    summary = run(config, corpus, start.directory, start.checkpoint)
        _tell(summary, as_json)
    if summary["interrupted"]:
        ctx.exit(EXIT_CODES[summary["stopped_by"]])


def _tell(summary: dict[str, Any], as_json: bool) -> None:
    from nsa_compile.train.report.summary import render

    click.echo(json.dumps(summary, indent=2) if as_json else render(summary))

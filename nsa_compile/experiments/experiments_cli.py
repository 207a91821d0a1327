"""``nsa-compile ab``, ``sweep`` and ``scaling``: variants of a run, trained in turns and compared. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import json_option, set_option, stacked

if TYPE_CHECKING:
    from nsa_compile.experiments.experiment import Plan

# Short names of keys that are swept often.
ALIASES = {"buckets": "ddp.bucket_mb"}


# The options that every experiment has, but for ``--set`` and ``--nproc``.
_experiment_options = stacked(
    click.option("--config", "config_path", metavar="FILE", help="Run configuration; without it, the packaged run."),
    click.option("--steps", type=int, help="Steps of a run; train.steps without it."),
    click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each variant."),
    click.option(
        "--window", type=click.IntRange(min=2), default=50, show_default=True, help="Steps at the end that count."
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the order of runs."),
    click.option("--out", metavar="DIR", help="Directory for runs and results; an experiment in it continues."),
    json_option,
)


def _nproc_option(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--nproc", type=click.IntRange(min=1), default=default, show_default=True, help="Processes of a run."
    )


@click.command()
@set_option("Key that B changes; several make one variant.")
@set_option("Override one key for both.", "--base-set", "base")
@_nproc_option(1)
@_experiment_options
def ab(
    overrides: tuple[str, ...],
    base: tuple[str, ...],
    nproc: int,
    config_path: str | None,
    steps: int | None,
    **others: Any,
) -> None:
    """Compare the throughput of a configuration (A) with that of a changed one (B).

    \b
    nsa-compile ab --set optim.fused=true --base-set optim.fused=false --steps 100
    nsa-compile ab --set compile.enabled=false --repeats 8 --json
    """
    from nsa_compile.experiments.experiment import ab_plan

    _run(ab_plan(config_path, overrides, base, nproc=nproc, steps=steps), **others)


@click.command()
@click.argument("key")
@click.argument("values", nargs=-1, required=True)
@set_option("Override one key for all.")
@_nproc_option(2)
@_experiment_options
def sweep(
    key: str,
    values: tuple[str, ...],
    overrides: tuple[str, ...],
    nproc: int,
    config_path: str | None,
    steps: int | None,
    **others: Any,
) -> None:
    """Compare the throughput of several values of a configuration key; 'buckets' is short for ddp.bucket_mb.

    The highest mean wins; of values without a significant difference to it, the one with the lowest variance.

    \b
    nsa-compile sweep buckets 25 50 100 --nproc 2 --steps 300 --config my_run.yaml
    nsa-compile sweep train.activation_checkpointing none all --nproc 1
    """
    from nsa_compile.experiments.experiment import sweep_plan

    _run(sweep_plan(config_path, ALIASES.get(key, key), values, overrides, nproc=nproc, steps=steps), **others)


class Counts(click.Command):
    """A command whose ``--nproc`` takes several values, as in ``--nproc 1 2 4``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        for place, word in enumerate(args):
            # A number after a number: the option it belongs to is said again.
            if word.isdecimal() and place >= 2 and args[place - 1].isdecimal() and spread[-2] == "--nproc":
                spread.append("--nproc")
            spread.append(word)
        return super().parse_args(ctx, spread)


@click.command(cls=Counts)
@click.option(
    "--nproc", "counts", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True,
    help="Numbers of processes, as in --nproc 1 2 4.",
)  # fmt: skip
@click.option("--strong", is_flag=True, help="Share train.batch_size among the processes: strong scaling.")
@set_option("Override one key for all.")
@_experiment_options
def scaling(
    counts: tuple[int, ...],
    strong: bool,
    overrides: tuple[str, ...],
    config_path: str | None,
    steps: int | None,
    **others: Any,
) -> None:
    """Compare throughput per process on several numbers of processes.

    Weak scaling: train.batch_size sequences for each process. All have the same number of threads.

    \b
    nsa-compile scaling --nproc 1 2 --steps 100
    nsa-compile scaling --nproc 1 2 4 8 --strong --config my_run.yaml
    """
    from nsa_compile.experiments.experiment import scaling_plan

    _run(scaling_plan(config_path, counts, overrides, strong=strong, steps=steps), **others)


def _run(plan: Plan, repeats: int, window: int, seed: int, out: str | None, as_json: bool) -> None:
    from nsa_compile.arguments import check_directory, writing
    from nsa_compile.experiments.experiment import run_experiment
    from nsa_compile.experiments.views import render_text, write_views
    from nsa_compile.train.records.run_directory import check_output

    run = plan.arms[0].config.run
    if out:
        directory = Path(out)
        check_directory(directory, parents=True)
    else:
        directory = Path(run.dir) / f"{plan.kind}-{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        check_output(run.dir)
    try:
        record = run_experiment(
            plan, directory, repeats=repeats, window=window, seed=seed, tell=lambda line: click.echo(line, err=True)
        )
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        click.echo(f"\nstopped; go on with the same command and --out {directory}", err=True)
        raise
    click.echo(json.dumps(record, indent=2) if as_json else render_text(record))
    with writing(directory, "DIR"):
        files = write_views(record, directory)
    if not as_json:
        click.echo("\n".join(f"file: {path}" for path in files))
    for failure in record["failures"]:
        click.echo(f"error: {failure['arm']} failed: {failure['last_line']} (see {failure['log']})", err=True)
    if record["failures"]:
        click.get_current_context().exit(1)

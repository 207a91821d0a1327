"""`nsa-compile validate`: the whole runbook of a configuration, with a verdict."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsa_compile.cli import json_option, set_option
from nsa_compile.errors import UserError

if TYPE_CHECKING:
    from nsa_compile.validation.runbook import Phase, PhaseOutcome, Runbook


@click.command()
@click.argument("config_path", metavar="CONFIG", required=False)
@set_option("Override one key, e.g. --set accept.mfu=0.3.")
@click.option(
    "--preset",
    default="quick",
    show_default=True,
    type=click.Choice(["quick", "full"]),
    help="Ten minutes on two cores, or the runs that give figures worth quoting.",
)
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this machine.")
@click.option("--out", metavar="DIR", help="The directory to make; RUN.DIR/validate-NAME-TIME without it.")
@click.option("--resume", metavar="DIR", help="Go on with a validation that was stopped.")
@json_option
@click.pass_context
def validate(
    ctx: click.Context,
    config_path: str | None,
    overrides: tuple[str, ...],
    preset: str,
    nproc: int,
    out: str | None,
    resume: str | None,
    as_json: bool,
) -> None:
    """Carry out the validation runbook for a configuration and say GO or NO-GO.

    Preflight, parity of selected attention, equivalence of what is compiled, baseline, bucket sweep, attention audit,
    profile, scaling, fused optimizer, and a longer run under the watchdog. The targets are in the section `accept`
    of the configuration. The report is written after every phase: report.md, report.html and report.json. Exit code 1
    with NO-GO.

    \b
    nsa-compile validate my_run.yaml
    nsa-compile validate my_run.yaml --preset full --nproc 2 --set accept.scaling=0.9
    nsa-compile validate --resume runs/validate-my-run-20260101-120000
    """
    # Everything a user can get wrong is found before torch is imported.
    plan = None if resume else _plan(config_path, overrides, preset, nproc, out)
    if resume:
        others = ctx.params.keys() - {"resume", "as_json"}
        if any(ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE for name in others):
            raise UserError(
                "--resume goes on with what was begun: CONFIG and the other options come from there; leave them out"
            )

    from nsa_compile.validation.phases import PHASES
    from nsa_compile.validation.report import report_document, write_report
    from nsa_compile.validation.runbook import begin, carry_out, load_plan

    if plan is None:
        assert resume is not None
        plan = load_plan(Path(resume))
    else:
        begin(plan)
    click.echo(f"validation in {plan.directory}", err=True)
    outcomes: list[PhaseOutcome] = []
    chosen = plan

    # A terminal gets a bar, a log file lines.
    on_terminal = sys.stderr.isatty()
    with click.progressbar(length=len(PHASES), label="validate", file=sys.stderr, hidden=not on_terminal) as bar:

        def tell(phase: Phase, outcome: PhaseOutcome | None) -> None:
            if outcome is None:
                bar.label = phase.name
                bar.render_progress()
                return
            outcomes.append(outcome)
            write_report(chosen, outcomes, [p.name for p in PHASES[len(outcomes) :]])
            bar.update(1)
            if not on_terminal:
                click.echo(f"[{len(outcomes)}/{len(PHASES)}] {_line(outcome)}", err=True)

        try:
            carry_out(plan, PHASES, tell)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            click.echo(f"\nstopped; go on with nsa-compile validate --resume {plan.directory}", err=True)
            raise
    document = report_document(plan, outcomes, [])
    click.echo(
        json.dumps(document, indent=2)
        if as_json
        else _summary(plan, outcomes, document["verdict"], document["reasons"])
    )
    if document["verdict"] != "GO":
        ctx.exit(1)


def _plan(config_path: str | None, overrides: tuple[str, ...], preset: str, nproc: int, out: str | None) -> Runbook:
    from nsa_compile.config import load_config
    from nsa_compile.experiments.runs import Arm, check_arms
    from nsa_compile.train.records.run_directory import check_output

    if config_path is None:
        raise UserError("CONFIG is missing: name a run configuration, for example configs/shakespeare_cpu.yaml")
    config = load_config(config_path, overrides)
    check_arms([Arm(config.run.name, config, nproc)])
    if out is None:
        check_output(config.run.dir)
    name = f"validate-{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"

    from nsa_compile.validation.runbook import Runbook

    return Runbook((Path(out) if out else Path(config.run.dir) / name).absolute(), config, preset, nproc)


def _line(outcome: PhaseOutcome) -> str:
    return f"{outcome.phase}: {outcome.status}, {outcome.seconds:.0f} s"


def _summary(plan: Runbook, outcomes: list[PhaseOutcome], decision: str, reasons: list[str]) -> str:
    lines = [_line(outcome) for outcome in outcomes]
    lines += ["", decision, *(f"  {reason}" for reason in reasons), "", f"report: {plan.directory / 'report.html'}"]
    return "\n".join(lines)

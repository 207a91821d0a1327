"""``nsa-compile doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look at versions, compiler, processor, GPUs, process groups, packages, directories and limits of this machine.

    A warning is something slower or missing that the packaged run does without. A problem keeps nsa-compile train from
    running; with one, the exit code is 1.

    \b
    nsa-compile doctor
    nsa-compile doctor --json
    """
    from tabulate import tabulate

    from nsa_compile.machine.doctor import examine, report

    findings = examine()
    facts = report(findings)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        rows = [(f.check, f.status, f.found + (f"\n→ {f.advice}" if f.advice else "")) for f in findings]
        click.echo(tabulate(rows, headers=("", "", "found"), disable_numparse=True, maxcolwidths=(None, None, 100)))
    if not facts["ok"]:
        ctx.exit(1)

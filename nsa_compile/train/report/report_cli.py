"""``nsa-compile report``: a run as one HTML page."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import click

from nsa_compile.arguments import check_file
from nsa_compile.errors import UserError


@click.command()
@click.argument("run")
@click.option("--out", metavar="FILE", help="The page; RUN/report.html without it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def report(run: str, out: str | None, as_json: bool) -> None:
    """Write what a run has left so far as one HTML page, and its curves as PNG files beside it.

    The run may be over, interrupted or still at work; files that are missing or damaged are named on the page.

    \b
    nsa-compile report runs/shakespeare-cpu-20260101-120000
    nsa-compile report runs/shakespeare-cpu-20260101-120000 --out report.html --json
    """
    directory = Path(run)
    if not directory.is_dir():
        raise UserError(f"'{run}' must be the directory of a run, and is none; see ls runs")
    path = directory / "report.html" if out is None else Path(out)
    check_file(path)
    if find_spec("matplotlib") is None:
        raise UserError("a report needs matplotlib for its curves; install it with pip install 'nsa-compile[plots]'")

    from nsa_compile.train.report.report_page import write_report
    from nsa_compile.train.report.run_record import read_run

    record = read_run(directory)
    plots = write_report(record, path)
    if as_json:
        result = {
            "run": run,
            "report": str(path),
            "plots": [str(plot) for plot in plots],
            "status": record.status,
            "summary": record.summary,
            "problems": record.problems,
        }
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(f"{record.status}\nreport: {path}\nplots:  {path.with_name(path.stem + '_plots')}")
    for problem in record.problems:
        click.echo(f"warning: {problem}", err=True)

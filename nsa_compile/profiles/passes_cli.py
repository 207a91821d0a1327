"""`nsa-compile passes`: what the compiler's passes are, and what they do to a model."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import FiniteRange, SuggestingGroup, json_option, run_options, set_option
from nsa_compile.errors import UserError
from nsa_compile.files import write_text

if TYPE_CHECKING:
    from nsa_compile.config import RunConfig
    from nsa_compile.passes.report import PassReport, Report
    from nsa_compile.profiles.blame import Blame, Check


@click.group(cls=SuggestingGroup)
def passes() -> None:
    """Show the compiler's passes and what they did.

    \b
    nsa-compile passes list
    nsa-compile passes explain my_step.py
    nsa-compile passes explain --config my_run.yaml --set train.seq_len=256
    nsa-compile passes diff batch_prefill
    nsa-compile passes bisect --check numeric
    """


@passes.command("list", short_help="The passes in the order they run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def list_passes(as_json: bool) -> None:
    """List the passes in the order they run, with what each requires and ensures.

    \b
    nsa-compile passes list
    nsa-compile passes list --json
    """
    from nsa_compile.passes.pipeline import pipeline
    from nsa_compile.profiles.rendering import render_pass_list

    found = pipeline()
    if not as_json:
        click.echo(render_pass_list(found))
        return
    rows = [
        {"order": order, "name": p.name, "summary": p.summary, "requires": p.requires, "ensures": p.ensures}
        for order, p in enumerate(found, start=1)
    ]
    click.echo(json.dumps({"passes": rows}, indent=2))


@passes.command(short_help="What each pass does to a program or a model.")
@click.argument("script", metavar="[SCRIPT]", required=False)
@click.option("--config", "config_path", metavar="FILE", help="Run configuration; without it, the packaged run.")
@set_option("Override one key, e.g. --set train.seq_len=256.")
@json_option
def explain(script: str | None, config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run the Python program SCRIPT and tell what each pass did to every graph that it compiles.

    Times, nodes, matches, estimated cost, and for everything left alone the operation, its source line and the reason.

    Without SCRIPT, the same for one block of a configured model. That needs no C++ compiler: the rewritten graph is run
    as it is.

    \b
    nsa-compile passes explain my_step.py
    nsa-compile passes explain --config my_run.yaml --json
    nsa-compile passes explain --set 'compile.disable=[eliminate_guards]'
    """
    if script is not None:
        if config_path or overrides:
            raise UserError(f"'{script}' compiles its own program, so --config and --set do not apply; leave them out")
        _explain_script(script, as_json)
        return
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.config import load_config

    config = load_config(config_path, overrides)

    from nsa_compile.profiles.rendering import render_report

    report, carry_names = explain_model(config)
    if as_json:
        explained: dict[str, Any] = {
            "attention": config.model.attention,
            "seq_len": config.train.seq_len,
            "batch_size": 1,
            "dtype": config.train.dtype,
            "carries": carry_names,
            "report": report.to_dict(),
        }
        click.echo(json.dumps(explained, indent=2))
        return
    what = f"One block ({config.model.attention} attention) of 1 × {config.train.seq_len} tokens, {config.train.dtype}"
    click.echo(f"{what}. Equal blocks compile once.\n\n{render_report(report, carry_names)}")


def _explain_script(script: str, as_json: bool) -> None:
    """Print the reports of all that a Python program compiles, after what it prints itself."""
    import contextlib
    import runpy
    import sys
    from unittest import mock

    if not Path(script).is_file():
        raise UserError(f"there is no file '{script}'; give the path of a Python program")

    from nsa_compile import backend
    from nsa_compile.profiles.rendering import render_report

    with (
        backend.explained() as reports,
        mock.patch.object(sys, "argv", [script]),
        mock.patch.object(sys, "path", [str(Path(script).resolve().parent), *sys.path]),
        contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            first = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            raise UserError(f"'{script}' failed: {first}; python {script} shows where") from None
        except SystemExit as left:
            if left.code not in (None, 0):
                raise UserError(f"'{script}' left with {left.code!r}; python {script} shows why") from None
    if not reports:
        raise UserError(
            f"'{script}' compiled nothing; call a function made by nsa_compile.compile, nsa_compile.loop or "
            'torch.compile(..., backend="nsa_compile") in it'
        )
    if as_json:
        click.echo(json.dumps({"script": script, "reports": [report.to_dict() for report in reports]}, indent=2))
        return
    for number, report in enumerate(reports, start=1):
        click.echo(f"Report {number} of {len(reports)} on {script}.\n\n{render_report(report)}\n")


def explain_model(config: RunConfig, **options: Any) -> tuple[Report, list[str]]:
    """The report of compiling one block of `config`'s model, and the names of the caches its loop carries.

    `options` are further fields of `passes.pipeline.Options`.
    """
    import dataclasses

    import torch

    import nsa_compile
    from nsa_compile.models import NSATransformer

    config.require_equal_layers()
    torch.manual_seed(config.run.seed)
    model = NSATransformer(dataclasses.replace(config.model, n_layers=1))
    # Without the cache: a kept result has the source lines of an earlier compilation.
    nsa_compile.compile_blocks(
        model, nested="eager", disable=config.compile.disable, cache=False, estimate=True, **options
    )
    tokens = torch.randint(config.model.vocab_size, (1, config.train.seq_len))
    with torch.autocast("cpu", torch.bfloat16, enabled=config.train.dtype == "bf16"):
        model(tokens)
    report = nsa_compile.last_report()
    assert report is not None, "the forward pass compiles"

    names: list[str] = []
    if config.model.variant.scanned:
        block: Any = model.blocks[0]
        caches = block.attention.init_state(1, 1)
        names = [name for name, cache in caches._asdict().items() if cache is not None]
    return report, names


@passes.command(short_help="The graph before and after one pass, side by side.")
@click.argument("pass_name", metavar="PASS")
@run_options
@click.option("--width", type=click.IntRange(min=40), help="Characters in a line; as many as the terminal has.")
@click.option("--out", metavar="FILE", help="Write the comparison as one HTML page instead, with lines at full length.")
def diff(
    pass_name: str,
    config_path: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    width: int | None,
    out: str | None,
) -> None:
    """Show what one pass did to the graph of a block of a configured model, with the model's own source lines.

    The graph before the pass stands on the left, after it on the right; equal lines are folded.

    \b
    nsa-compile passes diff batch_prefill --set train.seq_len=256
    nsa-compile passes diff lower_attention --width 200 | less -R
    nsa-compile passes diff eliminate_guards --config my_run.yaml --out guards.html
    """
    from nsa_compile.arguments import check_file, writing
    from nsa_compile.config import load_config

    config = load_config(config_path, overrides)
    if out is not None:
        check_file(Path(out))
    _check_pass(pass_name)

    import tempfile

    from nsa_compile.passes.pipeline import pipeline
    from nsa_compile.profiles.graph_diff import count_changes, render_side_by_side, side_by_side, write_page

    # A pass that runs only where it is asked for is asked for here.
    asked = {p.option: True for p in pipeline() if p.name == pass_name and p.option}
    with tempfile.TemporaryDirectory() as folder:
        report, _ = explain_model(config, dump_dir=folder, **asked)
        entry = next(p for p in report.passes if p.name == pass_name)
        if entry.skipped:
            raise UserError(f"{pass_name} did not run, so there is nothing to compare: {_why_skipped(entry)}")
        before, after = (
            next(Path(folder).glob(f"*_{pass_name}_{when}.py")).read_text() for when in ("before", "after")
        )
    rows = side_by_side(before, after)
    removed, added = count_changes(rows)
    what = (
        f"{pass_name}: {entry.nodes_before} nodes before, {entry.nodes_after} after; {removed} lines went, {added} came"
    )
    if not rows:
        what = _unchanged(entry)
    if as_json:
        result = {
            "pass": pass_name,
            "changed": entry.changed,
            "matches": entry.matches,
            "before": before,
            "after": after,
        }
        click.echo(json.dumps({**result, "page": out}, indent=2))
    else:
        click.echo("\n".join([what, *(f"  match    {match}" for match in entry.matches)]))
    if out is not None:
        with writing(Path(out), "FILE"):
            write_page(Path(out), pass_name, what, [("before", before), ("after", after)], rows, entry.matches)
        click.echo(f"page: {out}", err=as_json)
    elif rows and not as_json:
        click.echo(f"\n{render_side_by_side(rows, width or shutil.get_terminal_size((160, 24)).columns)}")


def _check_pass(name: str) -> None:
    """Raise a UserError unless there is such a pass."""
    import difflib

    from nsa_compile.passes import ORDER

    if name not in ORDER:
        close = difflib.get_close_matches(name, ORDER, n=1)
        advice = f"did you mean '{close[0]}'?" if close else f"the passes are {', '.join(ORDER)}"
        raise UserError(f"there is no pass '{name}'; {advice}")


def _why_skipped(entry: PassReport) -> str:
    if entry.skipped == "disabled":
        return "compile.disable names it; take it out there, or choose another pass"
    return f"it {entry.skipped}; enable that with --set 'compile.disable=[]'"


def _unchanged(entry: PassReport) -> str:
    if entry.changed:
        return (
            f"{entry.name}: the text of the graph is the same before and after ({entry.nodes_after} nodes); what it "
            "found is recorded on the nodes, for later passes"
        )
    return f"{entry.name} left the graph as it was, {entry.nodes_after} nodes"


@passes.command(short_help="The pass, and the rewrite, that makes a check fail.")
@run_options
@click.option(
    "--check", "kind", type=click.Choice(["numeric", "exception", "slow"]), help="What fails; numeric without --script."
)
@click.option(
    "--script", metavar="FILE:FUNCTION", help="A check of your own: FUNCTION(options) fails or returns False."
)
@click.option(
    "--seq-len", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of the block that is checked."
)
@click.option(
    "--factor", type=FiniteRange(min=1, min_open=True), default=1.5, show_default=True,
    help="slow: how many times slower than after the best prefix counts.",
)  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=2), default=7, show_default=True, help="slow: timed runs.")
@click.option("--out", metavar="DIR", help="Write the graphs around the rewrite here, before.py and after.py.")
@click.pass_context
def bisect(
    ctx: click.Context,
    config_path: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    kind: str | None,
    script: str | None,
    seq_len: int,
    factor: float,
    repeats: int,
    out: str | None,
) -> None:
    """Find the pass, and the single rewrite of it, that makes a check of a configured model's block fail.

    \b
    numeric    values and gradients differ from the uncompiled block in float64 by more than rounding
    exception  the block does not compile, or does not run
    slow       forward and backward take --factor times as long as after the best prefix of the pipeline

    With --script, FUNCTION(options) compiles a program of yours with nsa_compile.compile(f, **options), and raises or
    returns False where the result is wrong.

    Exit code 0: the check does not fail. 1: it fails, and what is to blame is named.

    \b
    nsa-compile passes bisect
    nsa-compile passes bisect --check slow --set compile.nested=aot_eager
    nsa-compile passes bisect --script failing.py:check --out blame
    """
    from nsa_compile.arguments import check_directory, check_seq_len, writing
    from nsa_compile.config import load_config
    from nsa_compile.machine.preflight import check_nested, wait_passively
    from nsa_compile.train.distributed.world import check_device

    config = load_config(config_path, overrides)
    if script and kind:
        raise UserError(f"--check {kind} and --script {script} are two checks; leave one out")
    check_seq_len(config, seq_len)
    if out is not None:
        check_directory(Path(out))
    check_nested(config)

    wait_passively()
    check_device(config)

    from nsa_compile.profiles import blame, checks
    from nsa_compile.profiles.rendering import render_blame

    options: dict[str, Any] = {"nested": config.compile.nested, "disable": config.compile.disable}
    first, slow = 0, None
    if script:
        check: Check = checks.load_check(script)
    else:
        from nsa_compile.profiles.probe import Probe

        probe = Probe(config, seq_len)
        if kind == "slow":
            check = slow = checks.Slow(probe, factor=factor, repeats=repeats, **options)
            first = slow.best
        else:
            check = checks.exception(probe) if kind == "exception" else checks.numeric(probe)
    culprit = blame.bisect(check, first=first, **options)
    if as_json:
        settings = {"check": script or kind or "numeric", "seq_len": None if script else seq_len}
        click.echo(json.dumps({**settings, "blame": culprit and asdict(culprit)}, indent=2))
    else:
        healthy = f"the check does not fail, so there is nothing to blame{f'; {slow.verdict}' if slow else ''}"
        click.echo(render_blame(culprit, out) if culprit else healthy)
    if culprit and out is not None:
        with writing(Path(out), "DIR"):
            _write_graphs(culprit, Path(out))
    ctx.exit(1 if culprit else 0)


def _write_graphs(culprit: Blame, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, graph in (("before", culprit.before), ("after", culprit.after)):
        if graph is not None:
            write_text(folder / f"{name}.py", graph)

"""`nsa-compile passes`: what the compiler's passes are, and what they do to a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import SuggestingGroup

if TYPE_CHECKING:
    from nsa_compile.config import RunConfig
    from nsa_compile.passes.report import Report


@click.group(cls=SuggestingGroup)
def passes() -> None:
    """Show the compiler's passes and what they did.

    \b
    nsa-compile passes list
    nsa-compile passes explain
    nsa-compile passes explain --config my_run.yaml --set train.seq_len=256
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


@passes.command(short_help="What each pass does to a model.")
@click.option("--config", "config_path", metavar="FILE", help="Run configuration; without it, the packaged run.")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key, e.g. --set train.seq_len=256."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; logs go to stderr.")
def explain(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Compile one block of a configured model and tell what each pass did to its graph.

    Times, nodes, matches, estimated cost, and for everything left alone the operation, its source line and the reason.
    No C++ compiler is needed: the rewritten graph is run as it is.

    \b
    nsa-compile passes explain
    nsa-compile passes explain --set 'compile.disable=[eliminate_guards]'
    nsa-compile passes explain --config my_run.yaml --json
    """
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


def explain_model(config: RunConfig) -> tuple[Report, list[str]]:
    """The report of compiling one block of `config`'s model, and the names of the caches its loop carries."""
    import dataclasses

    import torch

    import nsa_compile
    from nsa_compile.models import NSATransformer

    torch.manual_seed(config.run.seed)
    model = NSATransformer(dataclasses.replace(config.model, n_layers=1))
    # Without the cache: a kept result would tell of an earlier compilation, in another place of the source perhaps.
    nsa_compile.compile_blocks(model, nested="eager", disable=config.compile.disable, cache=False, estimate=True)
    tokens = torch.randint(config.model.vocab_size, (1, config.train.seq_len))
    with torch.autocast("cpu", torch.bfloat16, enabled=config.train.dtype == "bf16"):
        model(tokens)
    report = nsa_compile.last_report()
    assert report is not None, "the forward pass compiles"

    names: list[str] = []
    if config.model.attention == "nsa":
        block: Any = model.blocks[0]
        caches = block.attention.init_state(1, 1)
        names = [name for name, cache in caches._asdict().items() if cache is not None]
    return report, names

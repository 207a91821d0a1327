"""``nsa-compile config``: configurations shown, checked, compared and explained. Imports no torch."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from nsa_compile.cli import SuggestingGroup, run_options
from nsa_compile.errors import UserError, printable
from nsa_compile.models.variant import REGISTERED, find


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Show, check, compare and explain configurations.

    \b
    nsa-compile config keys train
    nsa-compile config show --set train.steps=50
    nsa-compile config validate configs/*.yaml
    nsa-compile config diff my_run.yaml runs/shakespeare-cpu-20260101-120000
    """


@config.command(short_help="The configuration with every default filled in.")
@run_options
def show(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print a configuration with every default filled in, as YAML that --config takes back.

    \b
    nsa-compile config show --config my_run.yaml --set train.steps=50
    """
    from nsa_compile.config import load_config

    resolved = load_config(config_path, overrides)
    click.echo(json.dumps(resolved.plain(), indent=2) if as_json else resolved.to_yaml(), nl=as_json)


@config.command(short_help="Check configuration files.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...], as_json: bool) -> None:
    """Check files, one line for each; exit code 2 if one is wrong.

    \b
    nsa-compile config validate configs/shakespeare_cpu.yaml my_run.yaml
    """
    from nsa_compile.config import load_config

    mistakes: dict[str, str | None] = {}
    for file in files:
        try:
            load_config(file)
            mistakes[file] = None
        except UserError as error:
            mistakes[file] = str(error)
    if as_json:
        rows = [{"file": file, "ok": mistake is None, "error": mistake} for file, mistake in mistakes.items()]
        click.echo(json.dumps({"files": rows}, indent=2))
    else:
        for file, mistake in mistakes.items():
            click.echo(f"{printable(file)}: {mistake or 'ok'}")
    if any(mistakes.values()):
        ctx.exit(2)


@config.command(short_help="The keys in which two configurations differ.")
@click.argument("one")
@click.argument("other")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def diff(ctx: click.Context, one: str, other: str, as_json: bool) -> None:
    """Print the keys in which two configurations differ, defaults filled in; each is a file or the directory of a run.

    Exit code 0 if there are none, 1 if there are some.

    \b
    nsa-compile config diff my_run.yaml runs/shakespeare-cpu-20260101-120000
    """
    from tabulate import tabulate

    from nsa_compile.config import flatten, load_config

    left, right = (dict(flatten(load_config(_file_of(path)).plain())) for path in (one, other))
    # Sizes that only one attention has are null in the other.
    every = {**left, **right}
    differences = {key: [left.get(key), right.get(key)] for key in every if left.get(key) != right.get(key)}
    if as_json:
        click.echo(json.dumps({"differences": differences}, indent=2))
    elif differences:
        rows = [(key, *map(json.dumps, values)) for key, values in differences.items()]
        click.echo(tabulate(rows, headers=("key", one, other), disable_numparse=True))
    if differences:
        ctx.exit(1)


@config.command(short_help="Every key with its type, default and meaning.")
@click.argument("section", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def keys(section: str | None, as_json: bool) -> None:
    """List every key, or those of one section, with its type, default and meaning.

    \b
    nsa-compile config keys
    nsa-compile config keys model.pattern
    """
    from tabulate import tabulate

    from nsa_compile.config import RunConfig

    sections = [(name, schema) for name, schema in _sections(RunConfig.model_json_schema()) if name]
    if section is not None and section not in dict(sections):
        raise UserError(f"'{section}' is no section; the sections are {', '.join(dict(sections))}")
    chosen = [(name, schema) for name, schema in sections if section in (None, name)]
    if as_json:
        rows = [{**row, "key": f"{name}.{row['key']}"} for name, schema in chosen for row in _keys(schema)]
        click.echo(json.dumps({"keys": rows}, indent=2))
        return
    for name, schema in chosen:
        summary = schema["description"].partition("\n\n")[0].replace("\n", " ").replace("``", "")
        table = [
            (
                f"{name}.{row['key']}",
                row["type"],
                "required" if row["required"] else json.dumps(row["default"]),
                row["meaning"],
            )
            for row in _keys(schema)
        ]
        headers = ("key", "type", "default", "meaning")
        widths = (None, 34, None, 60)
        of = f" of {', '.join(schema['attentions'])}" if "attentions" in schema else ""
        keys = tabulate(table, headers, disable_numparse=True, maxcolwidths=widths) if table else "no keys"
        click.echo(f"{name}{of}: {summary}\n{keys}\n")


def completions(incomplete: str) -> list[str]:
    """What may stand behind ``--set``: keys that begin so, or the values of a key that takes one of a few."""
    from nsa_compile.config import RunConfig

    entries = {
        f"{name}.{key}": entry
        for name, schema in _sections(RunConfig.model_json_schema())
        for key, entry in schema["properties"].items()
        if name and not _is_section(entry)
    }
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in entries if name.startswith(key)]
    entry = entries.get(key, {})
    choices = ["true", "false"] if entry.get("type") == "boolean" else entry.get("enum", [])
    return [f"{key}={choice}" for choice in choices if choice.startswith(value)]


def _file_of(path: str) -> str:
    return str(Path(path) / "config.resolved.yaml") if Path(path).is_dir() else path


def _sections(schema: dict[str, Any], root: dict[str, Any] | None = None, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and JSON schema of a section and of all below it; `root` holds what they refer to."""
    root = root or schema
    yield name, schema
    for key, entry in schema["properties"].items():
        # The pattern is a section of its own for each attention.
        inner = [root["$defs"][entry["$ref"].rpartition("/")[2]]] if "$ref" in entry else entry.get("oneOf", [])
        for section in inner:
            yield from _sections(section, root, f"{name}.{key}".lstrip("."))


def _keys(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Key, type, default and meaning of each key of a section; sections within it have rows of their own. Those of a
    pattern also say of which attentions."""
    for key, entry in schema["properties"].items():
        if not _is_section(entry):
            yield {
                "key": key,
                "type": _type(entry),
                "required": key in schema.get("required", ()),
                "default": entry.get("default"),
                "meaning": " ".join(_meanings(*REGISTERED)[schema["title"], key].replace("``", "").split()).rstrip("."),
                **{name: schema[name] for name in ("attentions",) if name in schema},
            }


def _is_section(entry: dict[str, Any]) -> bool:
    return "$ref" in entry or "oneOf" in entry


@cache
def _meanings(*attentions: str) -> dict[tuple[str, str], str]:
    """The text below each field of a section, by class and field; `attentions` are those of patterns."""
    from nsa_compile import config
    from nsa_compile.models import config as model_config

    found = {}
    patterns = [kind for name in attentions for kind in find(name).pattern.__mro__ if kind is not object]
    for module in {config, model_config, *(sys.modules[kind.__module__] for kind in patterns)}:
        for section in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(section, ast.ClassDef):
                continue
            for statements in pairwise(section.body):
                match statements:
                    case ast.AnnAssign(target=ast.Name(key)), ast.Expr(ast.Constant(str(text))):
                        found[section.name, key] = text
    # A pattern may take some of its sizes from another one.
    for name in attentions:
        kind, *bases = find(name).pattern.__mro__
        inherited = {key: text for base in reversed(bases) for (of, key), text in found.items() if of == base.__name__}
        found = {(kind.__name__, key): text for key, text in inherited.items()} | found
    return found


def _type(entry: dict[str, Any]) -> str:
    """The values a key takes, in words."""
    from nsa_compile.models.config import MAX_SIZE

    if "anyOf" in entry:
        return " or ".join(_type(choice) for choice in entry["anyOf"])
    if "enum" in entry:
        return ", ".join(entry["enum"])
    if entry["type"] == "array":
        return f"list of {_type(entry['items'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    # Without the bound that all sizes share, since no machine gets near it.
    bounds = [f"{sign} {entry[name]}" for name, sign in signs.items() if entry.get(name, MAX_SIZE) != MAX_SIZE]
    return " ".join([entry["type"], *bounds])

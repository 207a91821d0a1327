"""A hook of mkdocs: the reference of commands and configuration keys, from the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import click
from click.testing import CliRunner

from nsa_compile.cli import cli

WIDTH = 84  # of the help texts, in columns


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what is made from the code where a page asks for it."""
    for marker, made in (("<!-- keys -->", keys), ("<!-- commands -->", commands)):
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown


def keys() -> str:
    """A heading and a table for each section, of what `nsa-compile config keys --json` prints."""
    printed = CliRunner().invoke(cli, ["config", "keys", "--json"], catch_exceptions=False).stdout
    parts = []
    for section, rows in groupby(json.loads(printed)["keys"], _section):
        lines = [f"| `{row['key']}` | {row['type']} | {_default(row)} | {_cell(row['meaning'])} |" for row in rows]
        parts.append(
            "\n".join([f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|", *lines])
        )
    return "\n\n".join(parts)


def _section(row: dict[str, Any]) -> str:
    """The section that a key lies in; a pattern is one of its own for each attention."""
    section = row["key"].rpartition(".")[0]
    return f"{section} of {', '.join(row['attentions'])}" if "attentions" in row else section


def _default(row: dict[str, Any]) -> str:
    return "required" if row["required"] else f"`{json.dumps(row['default'])}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def commands() -> str:
    """A heading and the help text of each command."""
    root = click.Context(cli, info_name="nsa-compile", terminal_width=WIDTH, max_content_width=WIDTH)
    return "\n\n".join(_helps(cli, root))


def _helps(command: click.Command, context: click.Context) -> Iterator[str]:
    depth = context.command_path.count(" ") + 2
    yield f"{'#' * depth} {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, click.Context(inner, info_name=name, parent=context))

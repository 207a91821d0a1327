"""``nsa-compile ckpt``: the checkpoints of a run. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import click

from nsa_compile.cli import SuggestingGroup
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.train.checkpoints.files import (
    Checkpoint,
    best_checkpoint,
    checkpoint_paths,
    delete_checkpoint,
    delete_leftovers,
    file_problems,
    read_checkpoint,
    readable_checkpoints,
    superfluous,
)


@click.group(cls=SuggestingGroup)
def ckpt() -> None:
    """List, verify and prune the checkpoints of a run.

    \b
    nsa-compile ckpt ls runs/shakespeare-cpu-20260101-120000
    nsa-compile ckpt verify runs/shakespeare-cpu-20260101-120000
    nsa-compile ckpt prune runs/shakespeare-cpu-20260101-120000 --keep 2 --dry-run
    """


@ckpt.command("ls", short_help="The checkpoints of a run.")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def list_checkpoints(run: str, as_json: bool) -> None:
    """List step, size, age and validation loss; the best has the lowest loss, a run resumes from the last.

    \b
    nsa-compile ckpt ls runs/shakespeare-cpu-20260101-120000 --json
    """
    from tabulate import tabulate

    directory = _checkpoints_of(run)
    readable = readable_checkpoints(directory)
    best, last = best_checkpoint(readable), readable[-1] if readable else None
    rows = [_row(c, best=c is best, last=c is last) for c in readable]
    names = {c.path.name for c in readable}
    damaged = [path.name for path in checkpoint_paths(directory) if path.name not in names]
    if as_json:
        click.echo(json.dumps({"run": run, "checkpoints": rows, "damaged": damaged}, indent=2))
        return
    table = [
        (
            row["step"],
            f"{row['bytes'] / 1e6:,.1f} MB",
            _age(time.time() - row["created"]),
            "–" if row["val_loss"] is None else f"{row['val_loss']:.4f}",
            ", ".join(mark for mark in ("best", "last") if row[mark]),
        )
        for row in rows
    ]
    headers = ("step", "size", "age", "val loss", "")
    click.echo(tabulate(table, headers=headers, disable_numparse=True, colalign=("right",) * 4) if table else "none")
    for name in damaged:
        try:
            read_checkpoint(directory / name)
        except CheckpointError as error:
            click.echo(f"{name}: {error}; see nsa-compile ckpt verify '{run}'")


@ckpt.command(short_help="Read every checkpoint whole.")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def verify(run: str, as_json: bool) -> None:
    """Compare every file with its SHA-256; exit code 5, and a line for each damaged file, if one differs.

    \b
    nsa-compile ckpt verify runs/shakespeare-cpu-20260101-120000
    """
    paths = checkpoint_paths(_checkpoints_of(run))
    found: list[dict[str, Any]] = []
    for path in paths:
        note = None
        try:
            checkpoint = read_checkpoint(path)
            problems, note = file_problems(checkpoint), checkpoint.note
        except CheckpointError as error:
            problems = [str(error)]
        found.append({"name": path.name, "problems": problems, "note": note})
        for line in () if as_json else problems or ["ok" if note is None else f"ok, but {note}"]:
            click.echo(f"{path.name}: {line}")
    if as_json:
        click.echo(json.dumps({"run": run, "checkpoints": found}, indent=2))
    if damaged := sum(bool(entry["problems"]) for entry in found):
        raise CheckpointError(f"{damaged} of {len(paths)} checkpoints in '{run}' are damaged; resuming skips them")


@ckpt.command(short_help="Delete old checkpoints.")
@click.argument("run")
@click.option("--keep", required=True, type=click.IntRange(min=1), help="Newest good checkpoints to keep.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
def prune(run: str, keep: int, dry_run: bool) -> None:
    """Delete all but the newest checkpoints and the best one by validation loss.

    What is kept is read whole first; damaged checkpoints do not count and are left where they are.

    \b
    nsa-compile ckpt prune runs/shakespeare-cpu-20260101-120000 --keep 2
    """
    from nsa_compile.train.records.run_directory import lock_run_directory

    directory = _checkpoints_of(run)
    # Who only looks may do so beside a run at work.
    with contextlib.nullcontext() if dry_run else lock_run_directory(Path(run)):
        old = _old_checkpoints(directory, keep)
        for checkpoint in old:
            if not dry_run:
                delete_checkpoint(checkpoint)
            click.echo(f"{'would delete' if dry_run else 'deleted'} {checkpoint.path.name}")
        if not dry_run:
            delete_leftovers(directory)
    if not old:
        click.echo("nothing to delete")


def _old_checkpoints(directory: Path, keep: int) -> list[Checkpoint]:
    """What may go once everything that stays has been found good."""
    candidates = readable_checkpoints(directory)
    verified: set[int] = set()
    while True:
        old = superfluous(candidates, keep, keep_best=True)
        unread = [c for c in candidates if c not in old and c.step not in verified]
        if not unread:
            return old
        for checkpoint in unread:
            if file_problems(checkpoint):
                candidates.remove(checkpoint)
            verified.add(checkpoint.step)


def _checkpoints_of(run: str) -> Path:
    directory = Path(run) / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"'{run}' must be the directory of a run, with 'checkpoints' in it; see ls runs")
    if directory.is_symlink():
        raise CheckpointError(f"'{directory}' is a symbolic link, which is not followed; name the run it leads to")
    return directory


def _row(checkpoint: Checkpoint, *, best: bool, last: bool) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "bytes": checkpoint.bytes,
        "created": checkpoint.created,
        "val_loss": checkpoint.val_loss,
        "best": best,
        "last": last,
    }


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"

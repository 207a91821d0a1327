"""The report of a run as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_compile.errors import UserError
from nsa_compile.files import make_directory, replace
from nsa_compile.page import Block, Chart, Code, Heading, Table, Text, draw, size, write_page
from nsa_compile.train.checkpoints.files import best_checkpoint
from nsa_compile.train.records.plots import run_figures
from nsa_compile.train.report.run_record import RunRecord, environment_rows, latest_layers
from nsa_compile.train.report.summary import size_and_result_rows

# The newest of a run that goes wrong all the time.
MAX_FINDINGS = 200


def write_report(record: RunRecord, path: Path) -> list[Path]:
    """Write the page to ``path`` and its pictures, as PNG files too, to ``<name of the page>_plots`` beside it.

    Returns:
        The PNG files.

    Raises:
        UserError: they cannot be written.
    """
    charts, pictures = _draw(record)
    folder = path.with_name(f"{path.stem}_plots")
    try:
        make_directory(folder)
        for name, content in pictures.items():
            replace(folder / f"{name}.png", content)
        write_page(path, record.directory.absolute().name, record.directory, blocks(record, charts), record.problems)
    except OSError as error:
        raise UserError(
            f"the report cannot be written to '{path}': {error.strerror or error}; choose another place with --out FILE"
        ) from None
    return [folder / f"{name}.png" for name in pictures]


def blocks(record: RunRecord, charts: Sequence[Block]) -> list[Block]:
    """What the page shows."""
    environments: list[Block] = [
        block
        for name, content in record.environments.items()
        for block in (Heading(name, level=3), Table(list(environment_rows(content))))
    ]
    return [
        Heading("Summary"),
        Table([("status", record.status), *_summary_rows(record)]),
        Heading("Curves"),
        *(charts or [Text("No step has been recorded.")]),
        Heading("Gates and selection"),
        *_statistics(record),
        Heading("Checkpoints"),
        _checkpoints(record),
        Heading("Watchdog"),
        *_findings(record),
        Heading("Environment"),
        *(environments or [Text("Not recorded.")]),
        Heading("Configuration"),
        Code(record.config_text or "Not recorded."),
    ]


def _statistics(record: RunRecord) -> list[Block]:
    step, layers = latest_layers(record)
    if not layers:
        return [Text("None recorded: the run has dense attention, log.stats_every = 0, or has not come that far.")]
    columns = record.variant.columns
    return [
        Text(f"Of each layer after step {step}: {record.variant.legend}"),
        Table([[_cell(layer[name]) for name in columns] for layer in layers], list(columns.values()), left=1),
    ]


def _checkpoints(record: RunRecord) -> Block:
    best = best_checkpoint(record.checkpoints)
    rows = [
        (str(c.step), size(c.bytes), _date(c.created), _cell(c.val_loss), "best" if c is best else "")
        for c in record.checkpoints
    ]
    return Table(rows, ("step", "size", "written", "validation loss", ""), left=1) if rows else Text("None.")


def _findings(record: RunRecord) -> list[Block]:
    count = len(record.findings)
    if not count:
        return [Text("No findings.")]
    shown = record.findings[-MAX_FINDINGS:]
    left_out = f", of which the last {len(shown)} are shown" if len(shown) < count else ""
    rows = [(_date(finding["time"]), str(finding["rule"]), str(finding["message"])) for finding in shown]
    return [
        Text(f"{count} {'finding' if count == 1 else 'findings'}{left_out}."),
        Table(rows, ("time", "rule", "message")),
    ]


def _draw(record: RunRecord) -> tuple[list[Block], dict[str, bytes]]:
    """Every picture as a chart of the page and as PNG; one that cannot be drawn goes to the problems."""
    unigram = record.summary["best_unigram_loss"]
    charts: list[Block] = []
    pictures = {}
    rows = (record.steps, record.evals, record.layers)
    for name, caption, make in run_figures(*rows, record.variant.pictures, unigram, record.resumed):
        try:
            vectors, pictures[name] = draw(make)
        except (ValueError, ArithmeticError) as error:  # values that no axis can hold
            record.problems.append(f"{name}.png cannot be drawn: {error}")
        else:
            charts.append(Chart(caption, vectors, name))
    return charts, pictures


def _summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    rows = [(label, text) for label, text in size_and_result_rows(record.summary) if text]
    shown = (
        "steps dtype seq_len batch_size accumulate layers parameters num_selected window tokens_per_s_mean "
        "tokens_per_s_std tokens_per_s_steps mfu peak_flops val_loss_start val_loss_end val_step_end "
        "best_unigram_loss processes strategy compress gradient_bytes first_all_reduce accuracy skipped_steps "
        "memory_bytes doubts matmul_rates flops_per_token"
    )
    others = [(name, value) for name, value in record.summary.items() if name not in shown.split()]
    if memory := [row.memory_bytes for row in record.steps if row.memory_bytes is not None]:
        rows.append(("peak memory", f"{max(memory) / 2**30:,.2f} GiB"))
    return rows + [(name.replace("_", " "), str(value)) for name, value in others if value is not None]


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _date(seconds: Any) -> str:
    """A time since the epoch as a date; anything else as it is."""
    if not isinstance(seconds, (int, float)):
        return str(seconds)
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"

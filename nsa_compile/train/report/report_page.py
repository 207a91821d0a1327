"""The report of a run as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nsa_compile.errors import UserError
from nsa_compile.files import make_directory, replace
from nsa_compile.page import embed, png, render
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
    pictures = _draw(record)
    folder = path.with_name(f"{path.stem}_plots")
    files = []
    try:
        make_directory(folder)
        for name, _, content in pictures:
            files.append(folder / f"{name}.png")
            replace(files[-1], content)
        replace(path, render_page(record, pictures).encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            f"the report cannot be written to '{path}': {error.strerror or error}; choose another place with --out FILE"
        ) from None
    return files


def render_page(record: RunRecord, pictures: list[tuple[str, str, bytes]]) -> str:
    """The page, with ``pictures`` as name, caption and PNG. Whatever comes from the run is escaped."""
    best = best_checkpoint(record.checkpoints)
    statistics_step, layers = latest_layers(record)
    return render(
        __package__,
        "report.html",
        name=record.directory.absolute().name,
        directory=record.directory,
        problems=record.problems,
        summary=[("status", record.status), *_summary_rows(record)],
        pictures=[(name, caption, embed(content)) for name, caption, content in pictures],
        statistics_step=statistics_step,
        layers=[{name: _cell(value) for name, value in layer.items()} for layer in layers],
        checkpoints=[
            {
                "step": checkpoint.step,
                "size": f"{checkpoint.bytes / 1e6:,.1f} MB",
                "created": _date(checkpoint.created),
                "val_loss": _cell(checkpoint.val_loss),
                "best": checkpoint is best,
            }
            for checkpoint in record.checkpoints
        ],
        finding_count=len(record.findings),
        findings=[finding | {"time": _date(finding["time"])} for finding in record.findings[-MAX_FINDINGS:]],
        environments={name: list(environment_rows(content)) for name, content in record.environments.items()},
        config_text=record.config_text,
    )


def _draw(record: RunRecord) -> list[tuple[str, str, bytes]]:
    """Name, caption and PNG of every picture; one that cannot be drawn goes to the problems."""
    unigram = record.summary["best_unigram_loss"]
    pictures = []
    for name, caption, make in run_figures(record.steps, record.evals, record.layers, unigram, record.resumed):
        try:
            content = png(make())
        except (ValueError, ArithmeticError) as error:  # values that no axis can hold
            record.problems.append(f"{name}.png cannot be drawn: {error}")
        else:
            pictures.append((name, caption, content))
    return pictures


def _summary_rows(record: RunRecord) -> list[tuple[str, str]]:
    rows = [(label, text) for label, text in size_and_result_rows(record.summary) if text]
    shown = (
        "steps dtype seq_len batch_size accumulate layers parameters num_selected window tokens_per_s_mean "
        "tokens_per_s_std tokens_per_s_steps mfu peak_flops val_loss_start val_loss_end best_unigram_loss "
        "processes strategy compress gradient_bytes first_all_reduce accuracy skipped_steps memory_bytes doubts "
        "matmul_rates flops_per_token"
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

"""A run read back from its files, for a report. Nothing in them is trusted, and nothing that is missing is fatal.

Imports torch only to count the parameters of a run that has left no summary.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from nsa_compile.config import RunConfig, load_config
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.files import open_regular
from nsa_compile.models.config import NSAConfig
from nsa_compile.models.variant import AttentionVariant, LayerRow, find
from nsa_compile.page import size
from nsa_compile.train.checkpoints.files import Checkpoint, checkpoint_paths, read_checkpoint
from nsa_compile.train.records.rows import EvalRow, Row, StepRow, finite_or_none, row_parser, throughput
from nsa_compile.train.records.run_directory import lock_run_directory

# What a summary must hold for the report, beside what its author adds.
_RESULTS = (
    "tokens_per_s_mean", "tokens_per_s_std", "tokens_per_s_steps", "mfu", "peak_flops", "val_loss_start",
    "val_loss_end", "val_step_end", "best_unigram_loss", "parameters",
)  # fmt: skip
# Beyond these a number is none that a run has counted or measured, and no axis can hold it.
_MAX_COUNT, _MAX_FLOAT = 2**53, 1e100
_RESUMED_ENVIRONMENT = re.compile(r"env\.from-step-(\d{1,15})\.json")


@dataclass
class RunRecord:
    """What the files of a run say.

    Attributes:
        summary: the keys of ``summary.json``, computed from the rows where it does not exist; ``None`` where unknown.
        config: the configuration, if it can still be read, and ``config_text``, the file.
        steps, evals, layers: the rows of ``training.csv``, ``val.csv`` and ``attention.jsonl``.
        checkpoints: those with a readable manifest.
        findings: objects of ``watchdog.jsonl``: time (in seconds since the epoch, or a text), rule, message.
        environments: content of ``env.json`` and its successors after each resumption, by file name.
        resumed: steps from which the run was resumed.
        problems: a line for each file that is missing or damaged.
    """

    directory: Path
    status: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    config: RunConfig | None = None
    config_text: str = ""
    steps: list[StepRow] = field(default_factory=list)
    evals: list[EvalRow] = field(default_factory=list)
    layers: list[tuple[int, LayerRow]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def variant(self) -> AttentionVariant:
        """The attention of the run; the one that a model has by default where the configuration cannot be read."""
        return find(NSAConfig.attention if self.config is None else self.config.model.attention)


def read_run(directory: Path) -> RunRecord:
    """Read everything that a run has left so far, over or not; a UserError if ``directory`` is not that of a run."""
    if not (directory / "training.csv").exists() and not (directory / "config.resolved.yaml").exists():
        raise UserError(
            f"'{directory}' must be the directory of a run, with 'training.csv' or 'config.resolved.yaml' in it; "
            "see ls runs"
        )
    record = RunRecord(directory)
    record.config_text = _text(record, "config.resolved.yaml") or ""
    if record.config_text:
        try:
            record.config = load_config(str(directory / "config.resolved.yaml"))
        except UserError as error:
            record.problems.append(f"config.resolved.yaml: {error}")
    record.steps = _rows(record, "training.csv", StepRow)
    record.evals = _rows(record, "val.csv", EvalRow)
    record.layers = _objects(record, "attention.jsonl", partial(_layer, record.variant.row))
    record.findings = _objects(record, "watchdog.jsonl", _finding)
    names = sorted(path.name for path in directory.glob("env.from-step-*.json"))
    record.resumed = sorted(int(match[1]) for name in names if (match := _RESUMED_ENVIRONMENT.fullmatch(name)))
    for name in ("env.json", *(f"env.from-step-{step}.json" for step in record.resumed)):
        if (environment := _object(record, name, required=True)) is not None:
            record.environments[name] = environment
    for path in checkpoint_paths(directory / "checkpoints"):
        try:
            record.checkpoints.append(read_checkpoint(path))
        except CheckpointError as error:
            record.problems.append(f"checkpoints/{path.name}: {error}")
    saved = _object(record, "summary.json", required=False)
    record.status = _status(record, saved)
    record.summary = _summary(record, saved)
    return record


def environment_rows(environment: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and value of everything in an ``env.json``."""
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from environment_rows(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _with_unit(name, value)


def _with_unit(name: str, value: Any) -> str:
    """A value of an environment as people read it, by what its name says it is."""
    if not _is_number(value):
        return str(value)
    if name.endswith("_flops"):
        return f"{value / 1e9:,.1f} GFLOP/s"
    if name.endswith("_bytes"):
        return size(value)
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _text(record: RunRecord, name: str, required: bool = True) -> str | None:
    """The text of a file of the run; what cannot be read goes to the problems."""
    try:
        with open_regular(record.directory / name) as file:
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        if required:
            record.problems.append(f"{name} is missing")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        record.problems.append(f"{name} cannot be read: {reason}")
    return None


def _rows(record: RunRecord, name: str, row_type: type[Row]) -> list[Row]:
    text = _text(record, name) or ""
    # The last line of a run that is going on may be half written.
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows, damaged = [], []
    try:
        parse = row_parser(row_type, reader.fieldnames or ())
        for cells in reader:
            try:
                if None in cells or None in cells.values():
                    raise ValueError
                row = parse(cells)
                _require_sane(row)
            except (ValueError, KeyError, TypeError):
                damaged.append(reader.line_num)
            else:
                rows.append(row)
    except csv.Error as error:
        record.problems.append(f"{name} cannot be read from line {reader.line_num} on: {error}")
    _tell_damaged(record, name, damaged)
    return rows


def _objects(record: RunRecord, name: str, parse: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """What `parse` makes of the objects in a file with one a line."""
    text = _text(record, name, required=False) or ""
    objects, damaged = [], []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            objects.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged.append(number)
    _tell_damaged(record, name, damaged)
    return objects


def _tell_damaged(record: RunRecord, name: str, lines: list[int]) -> None:
    if lines:
        others = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        record.problems.append(f"{name}: line {lines[0]}{others} cannot be read and is left out")


def _object(record: RunRecord, name: str, required: bool) -> dict[str, Any] | None:
    text = _text(record, name, required)
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=lambda name: None)  # NaN is no JSON
        if not isinstance(value, dict):
            raise ValueError("it must hold an object")
        dict(environment_rows(value))  # not nested deeper than can be shown
    except (ValueError, RecursionError) as error:
        record.problems.append(f"{name} cannot be read: {error}")
        return None
    return value


def _layer(kind: type[LayerRow], cells: dict[str, Any]) -> tuple[int, LayerRow]:
    values = {entry.name: cells[entry.name] for entry in fields(kind)}
    for name, value in values.items():
        optional = "None" in str(kind.__dataclass_fields__[name].type)
        if not (_is_number(value) or (optional and value is None)):
            raise TypeError(name)
    row = kind(**values)
    step = cells["step"]
    if type(step) is not int or type(row.layer) is not int or not 0 <= step <= _MAX_COUNT:
        raise TypeError("step and layer are counted")
    _require_sane(row)
    return step, row


def _finding(cells: dict[str, Any]) -> dict[str, Any]:
    return {name: cells[name] for name in ("time", "rule", "message")}


def _require_sane(row: StepRow | EvalRow | LayerRow) -> None:
    for name, value in vars(row).items():
        counted = name in ("step", "layer", "memory_bytes")
        if value is not None and not (0 <= value <= _MAX_COUNT if counted else _is_number(value)):
            raise ValueError(f"{name} = {value} cannot be")


def _is_number(value: Any) -> bool:
    """Whether a value is one that may have been measured, NaN and infinity included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value != value or abs(value) == math.inf or abs(value) <= _MAX_FLOAT


def _status(record: RunRecord, saved: dict[str, Any] | None) -> str:
    step = record.steps[-1].step if record.steps else 0
    total = "" if record.config is None else f" of {record.config.train.steps}"
    if _is_running(record.directory):
        status = f"running: step {step}{total}"
    elif saved is not None and saved.get("steps") == step:
        stopped_by = saved.get("stopped_by")
        status = f"interrupted by {stopped_by} at step {step}{total}" if saved.get("interrupted") else "finished"
    elif record.config is not None and step >= record.config.train.steps:
        status = "finished"
    else:
        status = f"stopped at step {step}{total} without a summary: it was killed, or ended by an error"
    if record.resumed:
        status += f"; resumed from step {', '.join(map(str, record.resumed))}"
    return status


def _is_running(directory: Path) -> bool:
    try:
        with lock_run_directory(directory):
            return False
    except UserError:
        return True


def _summary(record: RunRecord, saved: dict[str, Any] | None) -> dict[str, Any]:
    """The saved summary, if it is of the last step; what it lacks is computed from rows and configuration."""
    config, steps, evals = record.config, record.steps, record.evals
    step = steps[-1].step if steps else 0
    peak = record.environments.get("env.json", {}).get("matmul_peak_flops")
    # As the trainer does it: the throughput of the last part of the run.
    first = record.resumed[-1] if record.resumed else 0
    last_part = [
        row for row in steps if row.step > first and row.tokens_per_s > 0 and math.isfinite(row.tokens_per_s + row.mfu)
    ]
    summary: dict[str, Any] = dict.fromkeys(_RESULTS) | {
        "steps": step,
        **throughput(last_part),
        "peak_flops": peak if _is_number(peak) else None,
        "val_loss_start": evals[0].val_loss if evals else None,
        "val_loss_end": evals[-1].val_loss if evals else None,
        "val_step_end": evals[-1].step if evals else None,
        "accuracy": evals[-1].accuracy if evals else None,
    }
    sizes = {} if config is None else config.sizes()
    for name in ("seq_len", "batch_size", "accumulate", "dtype", "attention", "layers", "num_selected", "window"):
        summary[name] = sizes.get(name, "?")
    if saved is not None and saved.get("steps") == step:
        for name in _RESULTS:
            value = saved.get(name)
            if value is not None and not _is_number(value):
                record.problems.append(f"summary.json: {name} must be a number")
            elif name in saved:
                summary[name] = value
        known = {*summary, "run_dir", "interrupted", "stopped_by", "resumed_from", "notes"}
        summary |= {name: value for name, value in saved.items() if name not in known}
    if summary["parameters"] is None and config is not None:
        summary["parameters"] = _count_parameters(config)
    return {name: finite_or_none(value) for name, value in summary.items()}


def _count_parameters(config: RunConfig) -> int:
    import torch

    from nsa_compile.models import NSATransformer

    with torch.device("meta"):  # shapes alone
        return sum(parameter.numel() for parameter in NSATransformer(config.model).parameters())


def latest_layers(record: RunRecord) -> tuple[int, list[dict[str, Any]]]:
    """The step of the last statistics, and those of each layer; 0 and none before the first."""
    if not record.layers:
        return 0, []
    last = record.layers[-1][0]
    return last, [asdict(row) for step, row in record.layers if step == last]

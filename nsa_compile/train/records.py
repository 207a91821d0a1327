"""The rows of ``training.csv`` and ``val.csv``, in memory and on the disk."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from nsa_compile.errors import CheckpointError


@dataclass(frozen=True)
class StepRow:
    """One line of ``training.csv``: ``loss`` in nats per token, ``seconds`` of the step, ``mfu`` as a fraction."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float
    seconds: float


@dataclass(frozen=True)
class EvalRow:
    """One line of ``val.csv``: the held-out loss in nats per token after ``step`` optimizer steps."""

    step: int
    val_loss: float


Row = TypeVar("Row", StepRow, EvalRow)


class CsvLog(Generic[Row]):
    """Rows that are appended to a CSV file.

    Args:
        path: the file.
        row_type: its columns.
        resumed_at: keep the rows up to this step and cut the others off; without it the file starts empty.

    Raises:
        CheckpointError: the file of a resumed run cannot be read.
    """

    def __init__(self, path: Path, row_type: type[Row], resumed_at: int | None = None) -> None:
        self.rows: list[Row] = [] if resumed_at is None else _read(path, row_type, resumed_at)
        # Under another name first: a crash while cutting must not lose rows that a checkpoint stands on.
        unfinished = path.with_name(f".{path.name}")
        self._file = unfinished.open("w", newline="", encoding="utf-8")
        self._writer: csv.DictWriter[str] = csv.DictWriter(self._file, [field.name for field in fields(row_type)])
        self._writer.writeheader()
        self._writer.writerows(vars(row) for row in self.rows)
        self.sync()
        os.replace(unfinished, path)

    def append(self, row: Row) -> None:
        """Add a row; it may stay in memory until the next flush."""
        self.rows.append(row)
        self._writer.writerow(vars(row))

    def flush(self) -> None:
        """Let readers of the file see every row."""
        self._file.flush()

    def sync(self) -> None:
        """Wait until every row is on the disk, for a checkpoint that is to stand on them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> CsvLog[Row]:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _read(path: Path, row_type: type[Row], last_step: int) -> list[Row]:
    """The rows up to ``last_step``; what a killed process left behind them, half a row perhaps, is not looked at."""
    types: dict[str, Any] = {field.name: int if field.name == "step" else float for field in fields(row_type)}
    rows: list[Row] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if int(line["step"]) > last_step or None in line.values():
                    break
                rows.append(row_type(**{name: convert(line[name]) for name, convert in types.items()}))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"a row of it cannot be read ({error})"
        raise CheckpointError(
            f"'{path}' cannot be continued from step {last_step}: {reason}; restore it, or use --resume never"
        ) from None
    expected = list(range(1, last_step + 1))
    whole = rows[:1] != [] if row_type is EvalRow else [row.step for row in rows] == expected
    if not whole:
        raise CheckpointError(
            f"'{path}' cannot be continued from step {last_step}: earlier rows are missing; "
            "restore it, or use --resume never"
        )
    return rows

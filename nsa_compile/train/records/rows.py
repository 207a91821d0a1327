"""What a run writes down as it goes: ``training.csv``, ``val.csv`` and ``attention.jsonl``. Imports no torch.

The rows of ``attention.jsonl`` are those of the model's attention, see ``models/variant.py``.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Self, TextIO, TypeVar, get_type_hints

from nsa_compile.errors import CheckpointError
from nsa_compile.files import create, open_regular, what_became_of

# What a step's time is split into; what none of them covers is "other".
PHASES = ("data", "forward", "backward", "communication", "optimizer", "other")
# Throughput is reported over this many steps at the end of a run, well after compilation.
THROUGHPUT_STEPS = 50
# Steps of an idle machine are as long as one another: rates of this many differ by less than this share of their mean.
STEADY_STEPS, STEADY = 10, 0.25


@dataclass(frozen=True)
class StepRow:
    """One line of ``training.csv``; a cell of what was not measured is empty.

    Attributes:
        step: optimizer steps done.
        loss: in nats per token.
        lr: learning rate of the step.
        grad_norm: before clipping.
        tokens_per_s: all tokens of the step, by its seconds without those in which something was compiled.
        mfu: model FLOPs utilisation at that rate, as a fraction.
        seconds: wall time of the step.
        memory_bytes: peak so far, of the process on the CPU (resident) and of torch's allocations on CUDA.
        data_s, forward_s, backward_s, communication_s, optimizer_s, other_s: how ``seconds`` are spent.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float
    seconds: float
    memory_bytes: int | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    communication_s: float | None = None
    optimizer_s: float | None = None
    other_s: float | None = None


@dataclass(frozen=True)
class EvalRow:
    """One line of ``val.csv``: the held-out loss in nats per token after ``step`` optimizer steps, and the share of
    answers predicted right where the task has some."""

    step: int
    val_loss: float
    accuracy: float | None = None


Row = TypeVar("Row", StepRow, EvalRow)


class _Log:
    """A file that a run appends to; subclasses write within :meth:`_begun` what it is to begin with."""

    path: Path
    _file: TextIO

    @contextmanager
    def _begun(self, path: Path, newline: str | None = None) -> Iterator[None]:
        """Write under another name first: a crash while cutting must not lose rows that a checkpoint stands on."""
        self.path = path
        unfinished = path.with_name(f".{path.name}")
        self._file = io.TextIOWrapper(create(unfinished), encoding="utf-8", newline=newline)
        yield
        self.sync()
        os.replace(unfinished, path)

    def lost(self) -> str | None:
        """What has become of the file, if it no longer lies where it was made; ``None`` while it does."""
        return what_became_of(self.path, self._file.fileno())

    def flush(self) -> None:
        """Let readers of the file see every row."""
        self._file.flush()

    def sync(self) -> None:
        """Wait until every row is on the disk, for a checkpoint that is to stand on them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class CsvLog(_Log, Generic[Row]):
    """Rows of one type that are appended to a CSV file.

    Args:
        resumed_at: keep the rows up to this step and cut the others off; without it the file starts empty.

    Raises:
        CheckpointError: the file of a resumed run cannot be read.
    """

    def __init__(self, path: Path, row_type: type[Row], resumed_at: int | None = None) -> None:
        self.rows: list[Row] = [] if resumed_at is None else _read(path, row_type, resumed_at)
        with self._begun(path, newline=""):
            self._writer: csv.DictWriter[str] = csv.DictWriter(self._file, [field.name for field in fields(row_type)])
            self._writer.writeheader()
            self._writer.writerows(vars(row) for row in self.rows)

    def append(self, row: Row) -> None:
        """Add a row; it may stay in memory until the next flush."""
        self.rows.append(row)
        self._writer.writerow(vars(row))


class JsonLog(_Log):
    """Objects that are appended to a file, one a line; each has a ``step``, and steps ascend.

    `resumed_at` is as for :class:`CsvLog`, and so is what a file that cannot be read raises.
    """

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        kept = [] if resumed_at is None or not os.path.lexists(path) else _read_objects(path, resumed_at)
        with self._begun(path):
            for row in kept:
                self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add an object; it may stay in memory until the next flush."""
        self._file.write(json.dumps(row) + "\n")


def phase_columns(phases: Mapping[str, float] | None) -> dict[str, Any]:
    """The columns of :class:`StepRow` for seconds by phase; none where they were not measured."""
    return {f"{name}_s": seconds for name, seconds in (phases or {}).items()}


def finite_or_none(value: Any) -> Any:
    """A value as JSON can hold it, which has no numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def throughput(rows: Sequence[StepRow]) -> dict[str, Any]:
    """Tokens per second and MFU over the last steps; ``None`` where there is none."""
    # A short run has no 50 steps after compilation; its later half is what there is.
    last = rows[-min(THROUGHPUT_STEPS, max(1, len(rows) // 2)) :]
    rates = [row.tokens_per_s for row in last]
    mean, mfu = rate_of(last) if last else (None, None)
    return {
        "tokens_per_s_mean": mean,
        "tokens_per_s_std": statistics.stdev(rates) if len(rates) > 1 else None,
        "tokens_per_s_steps": len(rates),
        "mfu": mfu,
    }


def rate_of(rows: Sequence[StepRow]) -> tuple[float, float]:
    """Tokens per second and MFU of one or more steps of equally many tokens together: all tokens by all seconds.

    The mean of their rates would be more, since it counts a slow step no more than a fast one.
    """
    rate = len(rows) / sum(1 / row.tokens_per_s for row in rows)
    return rate, rate * rows[-1].mfu / rows[-1].tokens_per_s


def unsteady(found: Mapping[str, Any]) -> str | None:
    """Why the figure of steps that took unequal times is in doubt, on one line; None for steady ones.

    `found` is a :func:`throughput`. What slowed steps in the middle of a run shows in no measurement of the machine at
    its start and end.
    """
    mean, std, steps = found["tokens_per_s_mean"], found["tokens_per_s_std"], found["tokens_per_s_steps"]
    if steps < STEADY_STEPS or std <= STEADY * mean:
        return None
    return (
        f"tokens/s of the last {steps} steps differ by ± {std / mean:.0%} from step to step, as on a machine that "
        "other work slows for a time: tokens/s and MFU are those of all these steps together"
    )


def row_parser(row_type: type[Row], columns: Collection[str]) -> Callable[[Mapping[str, str]], Row]:
    """What makes a row of the cells of a CSV file with these columns.

    Those of what may be unmeasured may be absent, as in older files. At cells that are not those of such a row it
    raises ValueError, KeyError or TypeError.
    """
    types = get_type_hints(row_type)
    converters = {
        name: _CONVERTERS[types[name]]
        for name in (field.name for field in fields(row_type))
        if name in columns or types[name] in (int, float)
    }
    return lambda cells: row_type(**{name: convert(cells[name]) for name, convert in converters.items()})


_CONVERTERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    int | None: lambda text: int(text) if text else None,
    float | None: lambda text: float(text) if text else None,
}


def _read(path: Path, row_type: type[Row], last_step: int) -> list[Row]:
    """The rows up to ``last_step``; what a killed process left behind them, half a row perhaps, is not looked at."""
    rows: list[Row] = []
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            parse = row_parser(row_type, reader.fieldnames or ())
            for line in reader:
                if int(line["step"]) > last_step or None in line.values():
                    break
                rows.append(parse(line))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"a row of it cannot be read ({error})"
        raise CheckpointError(
            f"'{path}' cannot be continued from step {last_step}: {reason}; restore it, or use --resume never"
        ) from None
    whole = bool(rows)
    if row_type is StepRow:
        # The number comes from a checkpoint: no list of that length is made.
        whole = len(rows) == last_step and all(row.step == step for step, row in enumerate(rows, start=1))
    if not whole:
        raise CheckpointError(
            f"'{path}' cannot be continued from step {last_step}: earlier rows are missing; "
            "restore it, or use --resume never"
        )
    return rows


def _read_objects(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The objects up to ``last_step``; a killed process may have left half of one at the end."""
    rows: list[dict[str, Any]] = []
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="") as file:
            lines = file.read().split("\n")
        for line in lines[:-1]:  # what no line end closes is half written
            row = json.loads(line)
            if row["step"] > last_step:
                break
            rows.append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"line {len(rows) + 1} cannot be read"
        raise CheckpointError(
            f"'{path}' cannot be continued from step {last_step}: {reason}; restore or delete it, or use --resume never"
        ) from None
    return rows

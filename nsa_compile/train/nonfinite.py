"""What is done about an optimizer step whose loss or gradient is not finite, and about such a held-out loss."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nsa_compile.errors import CheckpointError, TrainingDiverged
from nsa_compile.train.records.jsonl import JsonlWriter

NONFINITE_FILE = "nonfinite.jsonl"
_REMEDY = "try a lower optim.lr, a longer optim.warmup or a smaller optim.clip"


class NonFinitePolicy:
    """Decides whether a step that is not finite is skipped or ends the run.

    Every rank has a policy, and all must agree beforehand that a step is not finite: then all count alike. The limit
    is on *consecutive* skipped steps: a bad batch now and then does no harm, while weights or an optimizer state that
    are broken make every further step fail. ``skipped`` counts all, for the summary.

    Args:
        mode: ``halt`` ends the run at the first such step, ``skip`` after more than ``limit`` in a row.
        limit: how many steps in a row may be skipped, at least 1; as many held-out losses may not be finite.
        run_directory: where ``nonfinite.jsonl`` tells of each such step and held-out loss, one row a rank.
    """

    def __init__(self, mode: Literal["halt", "skip"], limit: int, run_directory: Path) -> None:
        assert limit >= 1
        self._mode = mode
        self._limit = limit
        self._path = run_directory / NONFINITE_FILE
        self.consecutive = 0
        self.skipped = 0
        self.validations = 0

    def finite(self) -> None:
        """The step was finite."""
        self.consecutive = 0

    def nonfinite(
        self, step: int, rank: int, sequences: Sequence[int], losses: Sequence[float], grad_norm: float
    ) -> None:
        """The step was not finite on some rank; returns if it is to be skipped by all.

        Args:
            step, rank: its number, from 1, and that of this process.
            sequences: indices of the sequences that this rank trained on, to find them again.
            losses: of every rank on its own sequences, in nats per token.
            grad_norm: of all ranks together, before clipping.

        Raises:
            TrainingDiverged: the run must end here; the weights are those of the step before.
        """
        row = {"step": step, "rank": rank, "sequences": list(sequences), "loss": losses[rank], "grad_norm": grad_norm}
        self._record(row)
        # A gradient that is not finite is so in all ranks once they have shared it; the loss tells where it came from.
        what = f"loss = {statistics.fmean(losses)} and gradient norm = {grad_norm}{_of_ranks(losses)} at step {step}"
        if self._mode == "halt":
            raise TrainingDiverged(f"{what} must be finite; {_REMEDY}; its sequences are in '{self._path}'")
        if self.consecutive >= self._limit:
            raise TrainingDiverged(
                f"{what} must be finite, and the {self.consecutive} steps before were skipped, which is the limit; "
                f"{_REMEDY}; the sequences are in '{self._path}'"
            )
        self.consecutive += 1
        self.skipped += 1

    def finite_validation(self) -> None:
        """The held-out loss was finite."""
        self.validations = 0

    def nonfinite_validation(self, step: int, rank: int, losses: Sequence[float]) -> None:
        """The held-out loss was not finite on some rank; returns if the run is to go on.

        Held-out losses are counted apart from steps, by the same limit in a row. `losses` are those of every rank after
        the step, in nats per token.

        Raises:
            TrainingDiverged: the run must end here; no checkpoint of this step is written.
        """
        self._record({"step": step, "rank": rank, "val_loss": losses[rank]})
        what = f"validation loss = {statistics.fmean(losses)}{_of_ranks(losses)} at step {step}"
        if self._mode == "halt":
            raise TrainingDiverged(f"{what} must be finite; {_REMEDY}; an earlier checkpoint is whole")
        if self.validations >= self._limit:
            raise TrainingDiverged(
                f"{what} must be finite, and so were not the {self.validations} before, which is the limit; {_REMEDY}"
            )
        self.validations += 1

    def state_dict(self) -> dict[str, int]:
        """All counts, for a checkpoint."""
        return {"consecutive": self.consecutive, "skipped": self.skipped, "validations": self.validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the counts of a checkpoint; a CheckpointError where they are none."""
        counts = {"validations": 0, **state}  # which older checkpoints lack
        known = {"consecutive", "skipped", "validations"}
        if set(counts) != known or any(type(n) is not int or not 0 <= n < 2**53 for n in counts.values()):
            raise CheckpointError("the counts of skipped steps must be numbers from 0, consecutive and skipped")
        self.consecutive, self.skipped = counts["consecutive"], counts["skipped"]
        self.validations = counts["validations"]

    def _record(self, row: dict[str, Any]) -> None:
        with contextlib.closing(JsonlWriter(self._path)) as writer:
            writer.append(row)


def _of_ranks(losses: Sequence[float]) -> str:
    """Whose own loss is not finite, in words; nothing where everybody's is."""
    broken = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    return f" of rank{'s' if len(broken) > 1 else ''} {', '.join(broken)}" if broken else ""

"""What is done about an optimizer step whose loss or gradient is not finite."""

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


class NonFinitePolicy:
    """Decides whether a step that is not finite is skipped or ends the run.

    Every rank has a policy, and all must agree beforehand that a step is not finite: then all count alike. The limit
    is on *consecutive* skipped steps: a bad batch now and then does no harm, while weights or an optimizer state that
    are broken make every further step fail. ``skipped`` counts all, for the summary.

    Args:
        mode: ``halt`` ends the run at the first such step, ``skip`` after more than ``limit`` in a row.
        limit: how many steps in a row may be skipped, at least 1.
        run_directory: where ``nonfinite.jsonl`` tells of each such step, one row a rank.
    """

    def __init__(self, mode: Literal["halt", "skip"], limit: int, run_directory: Path) -> None:
        assert limit >= 1
        self._mode = mode
        self._limit = limit
        self._path = run_directory / NONFINITE_FILE
        self.consecutive = 0
        self.skipped = 0

    def finite(self) -> None:
        """The step was finite."""
        self.consecutive = 0

    def nonfinite(
        self, step: int, rank: int, sequences: Sequence[int], losses: Sequence[float], grad_norm: float
    ) -> None:
        """The step was not finite on some rank; returns if it is to be skipped by all.

        Args:
            step: its number, from 1.
            rank: of this process.
            sequences: indices of the sequences that this rank trained on, to find them again.
            losses: of every rank on its own sequences, in nats per token.
            grad_norm: of all ranks together, before clipping.

        Raises:
            TrainingDiverged: the run must end here; the weights are those of the step before.
        """
        row = {"step": step, "rank": rank, "sequences": list(sequences), "loss": losses[rank], "grad_norm": grad_norm}
        self._record(row)
        # A gradient that is not finite is so in all ranks once they have shared it; the loss tells where it came from.
        broken = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        where = f" of rank{'s' if len(broken) > 1 else ''} {', '.join(broken)}" if broken else ""
        what = f"loss = {statistics.fmean(losses)} and gradient norm = {grad_norm}{where} at step {step}"
        remedy = "try a lower optim.lr, a longer optim.warmup or a smaller optim.clip"
        if self._mode == "halt":
            raise TrainingDiverged(f"{what} must be finite; {remedy}; its sequences are in '{self._path}'")
        if self.consecutive >= self._limit:
            raise TrainingDiverged(
                f"{what} must be finite, and the {self.consecutive} steps before were skipped, which is the limit; "
                f"{remedy}; the sequences are in '{self._path}'"
            )
        self.consecutive += 1
        self.skipped += 1

    def state_dict(self) -> dict[str, int]:
        """Both counts, for a checkpoint."""
        return {"consecutive": self.consecutive, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the counts of a checkpoint.

        Raises:
            CheckpointError: they are none.
        """
        if set(state) != {"consecutive", "skipped"} or any(type(n) is not int or n < 0 for n in state.values()):
            raise CheckpointError("the counts of skipped steps must be two numbers from 0, consecutive and skipped")
        self.consecutive, self.skipped = state["consecutive"], state["skipped"]

    def _record(self, row: dict[str, Any]) -> None:
        with contextlib.closing(JsonlWriter(self._path)) as writer:
            writer.append(row)

"""The loss curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_compile.train.records import EvalRow, StepRow


def plot_losses(path: Path, steps: Sequence[StepRow], evals: Sequence[EvalRow], best_unigram_loss: float) -> bool:
    """Draw training and held-out loss over the steps; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # A Figure of its own, without pyplot: no global state and no display needed.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row.step for row in steps], [row.loss for row in steps], linewidth=0.8, label="training")
    axes.plot([row.step for row in evals], [row.val_loss for row in evals], marker="o", label="held out")
    axes.axhline(best_unigram_loss, linestyle="--", color="gray", label="best unigram model")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True

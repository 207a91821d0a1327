"""The records of a run as pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_compile import page
from nsa_compile.files import replace
from nsa_compile.models.variant import LayerRow, Picture
from nsa_compile.train.records.rows import PHASES, EvalRow, StepRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More than these are a line.
MOST_DOTS = 50

Layers = Sequence[tuple[int, LayerRow]]
"""Statistics with the step they were taken at, ascending."""


def plot_losses(path: Path, steps: Sequence[StepRow], evals: Sequence[EvalRow], best_unigram_loss: float) -> bool:
    """Draw training and held-out loss over the steps; False where matplotlib is not installed."""
    try:
        _, content = page.draw(lambda: loss_figure(steps, evals, best_unigram_loss))
    except ImportError:
        return False
    replace(path, content)
    return True


def loss_figure(
    steps: Sequence[StepRow], evals: Sequence[EvalRow], best_unigram_loss: float | None, resumed: Sequence[int] = ()
) -> Figure:
    """Training and held-out loss, the yardstick where it is known, and where the run was resumed."""
    figure, axes = _figure()
    axes.plot([row.step for row in steps], [row.loss for row in steps], linewidth=0.8, label="training")
    marker = "o" if len(evals) <= MOST_DOTS else ""
    axes.plot([row.step for row in evals], [row.val_loss for row in evals], marker=marker, label="held out")
    if best_unigram_loss is not None:
        axes.axhline(best_unigram_loss, linestyle="--", color="gray", label="best unigram model")
    for index, step in enumerate(resumed):
        axes.axvline(step, linestyle=":", color="gray", label=None if index else "resumed")
    axes.set_ylabel("loss, nats per token")
    axes.legend()
    return figure


def run_figures(
    steps: Sequence[StepRow],
    evals: Sequence[EvalRow],
    layers: Layers,
    pictures: Iterable[Picture],
    best_unigram_loss: float | None,
    resumed: Sequence[int],
) -> Iterator[tuple[str, str, Callable[[], Figure]]]:
    """Name, caption and maker of every picture for which there are rows; `pictures` are those of the attention."""
    if steps or evals:
        yield "loss", "Training and held-out loss.", lambda: loss_figure(steps, evals, best_unigram_loss, resumed)
    if any(row.accuracy is not None for row in evals):
        yield (
            "accuracy",
            "Share of the answers predicted right, held out.",
            partial(_curve, evals, "accuracy", "answers predicted right", share=True, marker="o"),
        )
    if steps:
        yield "optimizer", "Learning rate, and norm of the gradient before clipping.", lambda: _optimizer(steps)
        yield (
            "throughput",
            "Tokens per second of each step.",
            partial(_curve, steps, "tokens_per_s", "tokens/s", linewidth=0.8),
        )
    if any(row.other_s is not None for row in steps):
        yield "phases", "Seconds of a step by phase, stacked.", lambda: _phases(steps)
    if any(row.memory_bytes is not None for row in steps):
        yield "memory", "Peak memory so far.", partial(_curve, steps, "memory_bytes", "peak memory, GiB", unit=2**30)
    for picture in pictures:
        if any(getattr(row, picture.lines[0][0].column) is not None for _, row in layers):
            yield picture.name, picture.caption, partial(_by_panel, picture, layers)


def _figure(height: float = 2.8, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    figure, axes = page.axes(height, rows, columns, sharex=True)
    for lowest in [axes] if rows == columns == 1 else axes.reshape(rows, columns)[-1]:
        lowest.set_xlabel("optimizer step")
        lowest.xaxis.get_major_locator().set_params(integer=True, nbins=6 // columns)
    return figure, axes


def _curve(
    rows: Sequence[StepRow] | Sequence[EvalRow], name: str, label: str, share: bool = False, unit: int = 1, **style: Any
) -> Figure:
    """A column over the steps at which it was measured."""
    figure, axes = _figure()
    measured = [(row.step, value / unit) for row in rows if (value := getattr(row, name)) is not None]
    axes.plot(*zip(*measured, strict=True), **style)
    axes.set_ylabel(label)
    _limit(axes, share)
    return figure


def _optimizer(steps: Sequence[StepRow]) -> Figure:
    figure, (upper, lower) = _figure(4, rows=2)
    upper.plot([row.step for row in steps], [row.lr for row in steps])
    upper.set_ylabel("learning rate")
    lower.semilogy([row.step for row in steps], [row.grad_norm for row in steps], linewidth=0.8)
    lower.set_ylabel("gradient norm")
    return figure


def _phases(steps: Sequence[StepRow]) -> Figure:
    figure, axes = _figure()
    measured = [row for row in steps if row.other_s is not None]
    # As many columns as a picture has room for, each the mean of its steps.
    parts = [measured[i : i + -(-len(measured) // 400)] for i in range(0, len(measured), -(-len(measured) // 400))]
    seconds = [
        [statistics.fmean(getattr(row, f"{name}_s") or 0.0 for row in part) for part in parts] for name in PHASES
    ]
    at = [part[0].step for part in parts]
    layers = axes.stackplot(at, seconds, labels=PHASES, step="mid")
    for name, values in zip(PHASES, seconds, strict=True):
        axes.plot(at, values, linewidth=0, label=name)  # not seen: what a pointer reads
    axes.set_ylabel("seconds a step")
    # A first step that compiled would press all others onto the axis.
    totals = sorted(sum(values) for values in zip(*seconds, strict=True))
    axes.set_ylim(0, 1.5 * totals[round(0.95 * (len(totals) - 1))] or None)
    figure.legend(handles=layers, loc="outside lower center", ncols=3)
    return figure


def _by_panel(picture: Picture, layers: Layers) -> Figure:
    rows, columns = len(picture.lines), len(picture.lines[0])
    figure, grid = _figure(5 if rows > 1 else 2.8, rows=rows, columns=columns)
    all_axes = [grid] if rows == columns == 1 else list(grid.flat)
    for axes, panel in zip(all_axes, (panel for line in picture.lines for panel in line), strict=True):
        _by_layer(axes, layers, panel.column)
        _limit(axes, panel.share)
        axes.set_ylabel(panel.label)
        axes.set_title(panel.title)
    _layer_legend(figure, all_axes[0])
    return figure


def _limit(axes: Any, share: bool) -> None:
    """An axis from 0 on, to 1 for a share."""
    axes.set_ylim(*((-0.02, 1.02) if share else (0, 1.05 * axes.get_ylim()[1])))


def _by_layer(axes: Any, layers: Layers, name: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    # From the first layer to the last, readable on white and on black.
    colors = LinearSegmentedColormap.from_list("layers", ["#2f7fd1", "#b0559f", "#e0822a"])
    numbers = sorted({row.layer for _, row in layers})
    for index, layer in enumerate(numbers):
        measured = [
            (step, getattr(row, name)) for step, row in layers if row.layer == layer and getattr(row, name) is not None
        ]
        if measured:
            color = colors(index / max(1, len(numbers) - 1))
            marker = "." if len(measured) <= MOST_DOTS else ""
            axes.plot(*zip(*measured, strict=True), marker=marker, color=color, label=f"layer {layer}")


def _layer_legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 8:  # the colours are in order: the ends say it all
        handles, labels = [handles[0], handles[-1]], [labels[0], labels[-1]]
    figure.legend(handles, labels, loc="outside lower center", ncols=4)

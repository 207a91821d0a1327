"""What an evaluation found, as tables for a terminal and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from nsa_compile import page
from nsa_compile.evaluation.held_out import TextScore
from nsa_compile.evaluation.needle import Found, grid
from nsa_compile.page import Chart, Heading, Table, Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_HEADERS = ("context", "stride", "tokens", "bytes", "bits per byte", "nats per token", "perplexity")
# What of a needle is shown, and how.
MEASURES = {
    "accuracy": ("Share of the answers found", "{:.0%}"),
    "gain": ("Nats by which the needle makes its answer more probable", "{:+.2f}"),
}
# The strongest colour of a cell is this much of the theme's: its text is read on it in light and dark.
STRONGEST = 0.55


def text_rows(scores: Sequence[TextScore]) -> list[tuple[str, ...]]:
    """A line for each context."""
    return [
        (
            f"{score.length:,}", f"{score.stride:,}", f"{score.tokens:,}", f"{score.bytes:,}",
            f"{score.bits_per_byte:.4f}", f"{score.nats_per_token:.4f}", f"{score.perplexity:.3f}",
        )
        for score in scores
    ]  # fmt: skip


def measures(rows: Sequence[Found]) -> list[str]:
    """Those of `MEASURES` that were measured."""
    return [name for name in MEASURES if grid(rows, name)[2]]


def heat_rows(rows: Sequence[Found], name: str) -> tuple[list[str], list[list[str]]]:
    """A heat map as a table: headers, and a line for each depth."""
    depths, lengths, values = grid(rows, name)
    shown = MEASURES[name][1]
    lines = [
        [f"{depth:.0%}", *(shown.format(values[depth, n]) if (depth, n) in values else "" for n in lengths)]
        for depth in depths
    ]
    return ["depth", *(f"{length:,}" for length in lengths)], lines


def tables(scores: Sequence[TextScore], found: Sequence[Found]) -> list[str]:
    """All that was found, for a terminal."""
    texts = []
    if scores:
        texts.append(tabulate(text_rows(scores), TEXT_HEADERS, disable_numparse=True, stralign="right"))
    for name in measures(found):
        headers, lines = heat_rows(found, name)
        texts.append(f"{MEASURES[name][0]}:\n\n{tabulate(lines, headers, disable_numparse=True, stralign='right')}")
    return texts


def heat_map(rows: Sequence[Found], name: str) -> Figure:
    """A cell for each depth and length, in the colours of the theme."""
    depths, lengths, values = grid(rows, name)
    greatest = 1.0 if name == "accuracy" else max(*values.values(), 1e-9)
    figure, axes = page.axes(0.9 + 0.3 * len(depths))
    for (depth, length), value in values.items():
        row, column, text = depths.index(depth), lengths.index(length), MEASURES[name][1].format(value)
        share = min(max(value / greatest, 0.0), 1.0)
        bars = axes.barh(row, 1, height=1, left=column - 0.5, color="C0", alpha=STRONGEST * share, linewidth=0)
        page.tell_bars(bars, [f"length {length:,}, depth {depth:.0%}: {text}"])
        axes.text(column, row, text, ha="center", va="center")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("depth of the needle")
    return figure


def write_page(
    path: Path, about: Mapping[str, Any], scores: Sequence[TextScore], found: Sequence[Found], meaning: str
) -> None:
    """Write the page; without matplotlib it has tables for pictures, and says so.

    Args:
        about: what was evaluated, as ``--json`` has it.
        meaning: what was scored, or asked, and how.
    """
    problems: list[str] = []
    trained_on = "unknown" if about["seq_len"] is None else f"{about['seq_len']:,} tokens at a time"
    rows = [
        ("checkpoint", about["checkpoint"]),
        ("data", about["data"]),
        ("parameters", f"{about['parameters']:,}"),
        ("trained on", trained_on),
    ]
    blocks: list[page.Block] = [Table(rows), Text(meaning, "quiet")]
    if scores:
        blocks += [Heading("Held-out text"), Table(text_rows(scores), TEXT_HEADERS)]
    for name in measures(found):
        blocks.append(Heading(MEASURES[name][0]))
        try:
            caption = "By the depth at which the needle lies, and by the length of the text."
            blocks.append(Chart(caption, page.draw(partial(heat_map, found, name))[0]))
        except ImportError:
            problems = ["no pictures: matplotlib is not installed; pip install 'nsa-compile[plots]' brings it"]
            headers, lines = heat_rows(found, name)
            blocks.append(Table(lines, headers))
    page.write_page(path, "How good a model is", path.parent, blocks, problems)

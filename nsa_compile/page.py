"""Reports of one theme: a list of blocks as an HTML page or as Markdown, and charts as pictures.

A page is one file that needs no script and no network, readable in light and dark and on a phone. Over a chart a
pointer shows the values; a click shows it large.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from tabulate import tabulate

from nsa_compile.files import replace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

Tone = Literal["", "good", "bad", "quiet"]


@dataclass(frozen=True)
class Cell:
    """A text with a tone, or one that leads somewhere."""

    text: str
    tone: Tone = ""
    href: str = ""

    def __str__(self) -> str:
        return f"[{self.text}]({self.href})" if self.href else self.text


Texts = Sequence[str | Cell]


class Block:
    """A part of a report."""


@dataclass(frozen=True)
class Heading(Block):
    """A heading of the page's second or third level; ``name`` is what links to it end in."""

    text: str
    tone: Tone = ""
    name: str = ""
    level: int = 2


@dataclass(frozen=True)
class Text(Block):
    """A paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Items(Block):
    """A list."""

    items: Texts
    tone: Tone = ""


@dataclass(frozen=True)
class Table(Block):
    """Rows below ``headers``; without headers the first cell of a row names it.

    Where ``left`` is given, so many columns are of words, and the others of numbers, which stand to the right.
    """

    rows: Sequence[Texts]
    headers: Sequence[str] = ()
    left: int = 0


@dataclass(frozen=True)
class Chart(Block):
    """A picture that `draw` made, with its caption."""

    caption: str
    content: Markup
    name: str = ""


@dataclass(frozen=True)
class Code(Block):
    """A text as it is, folded behind ``summary`` if it has one."""

    text: str
    summary: str = ""
    name: str = ""


@dataclass(frozen=True)
class Columns(Block):
    """Two texts side by side, as `profiles.graph_diff` pairs their lines."""

    rows: Sequence[Any]


def write_page(path: Path, name: str, directory: Path, blocks: Sequence[Block], problems: Sequence[str] = ()) -> None:
    """Write a page whole; see `render`."""
    replace(path, render(name, directory, blocks, problems).encode("utf-8", errors="replace"))


def render(name: str, directory: Path, blocks: Sequence[Block], problems: Sequence[str] = ()) -> str:
    """The page that shows the blocks. Everything in them is escaped.

    Args:
        name: the headline.
        directory: what the page is about, shown below it.
        blocks: what it shows.
        problems: what is missing or damaged, shown first.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files("nsa_compile") / "page.html").read_text("utf-8"))
    return template.render(
        name=name,
        directory=str(directory),
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        problems=problems,
        blocks=[(type(block).__name__, block) for block in blocks],
    )


def markdown(name: str, blocks: Sequence[Block]) -> str:
    """The blocks as text that is also Markdown; of a chart, the caption."""
    return "\n\n".join([f"# {_plain(name)}", *filter(None, map(_markdown, blocks))]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {_plain(block.text)}"
        case Text():
            return _plain(block.text)
        case Items():
            return "\n".join(f"- {_plain(item)}" for item in block.items)
        case Table():
            rows = [[_plain(cell) for cell in row] for row in block.rows]
            return tabulate(rows, block.headers, tablefmt="github", disable_numparse=True)
        case Chart():
            return _plain(block.caption)
        case Code():
            return "\n".join(f"    {line}" for line in block.text.splitlines())
    raise TypeError(block)


def _plain(text: str | Cell) -> str:
    """On one line, and without what Markdown would take for a table or a tag."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def size(count: float) -> str:
    """Bytes in words: `3.00 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


# As wide as a phone shows it without making the letters smaller.
WIDTH = 4.8
# Readings of a chart that a pointer finds, at most.
BANDS = 150
# Stand-ins for the colours of the theme, which are settled when a page is shown; in a PNG they are those on white.
_TEXT, QUIET, _BACK = "#010101", "#cfcfd6", "#fefefe"
_CYCLE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_THEME = {_TEXT: "--text", QUIET: "--line", _BACK: "--back"} | {c: f"--c{i}" for i, c in enumerate(_CYCLE)}


def axes(height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    """A figure of ``height`` inches with its axes, without pyplot: no global state and no display needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **more)


@contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(
        {
            "axes.edgecolor": _TEXT,
            "axes.labelcolor": _TEXT,
            "text.color": _TEXT,
            "xtick.color": _TEXT,
            "ytick.color": _TEXT,
            "axes.facecolor": "none",
            "axes.spines.right": False,
            "axes.spines.top": False,
            "font.size": 9,
            "grid.color": QUIET,
            "legend.facecolor": _BACK,
            "legend.edgecolor": QUIET,
            "path.simplify_threshold": 0.5,
            "svg.fonttype": "none",
            "svg.hashsalt": "nsa",
        }
    ):
        yield


def draw(make: Callable[[], Figure]) -> tuple[Markup, bytes]:
    """What ``make`` draws with `axes`, in the theme: as SVG for a page, and as the content of a PNG file."""
    vectors, pixels = io.StringIO(), io.BytesIO()
    with _style():
        figure = make()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(vectors, format="svg", transparent=True, metadata=nothing)
        readings = _readings(figure)
        figure.savefig(pixels, format="png", dpi=200, facecolor="white")
    return _in_theme(vectors.getvalue(), readings), pixels.getvalue()


def tell_bars(bars: Iterable[Rectangle], texts: Iterable[str]) -> None:
    """Have a pointer over each bar of a chart show its text."""
    for bar, text in zip(bars, texts, strict=True):
        bar.set_gid(text)


def _readings(figure: Figure) -> Markup:
    """Invisible rectangles over the lines and bars of a drawn figure, each with its values, which a pointer shows."""
    by_place: dict[tuple[float, ...], list[Any]] = {}
    for ax in figure.axes:  # two that share a place have a scale each
        drawn = [line for line in ax.get_lines() if line.get_transform() is ax.transData]  # not across the axes
        by_place.setdefault(ax.bbox.bounds, []).extend(line for line in drawn if _has_numbers(line))
    bars = [(bar.get_window_extent().bounds, bar.get_gid()) for ax in figure.axes for bar in ax.patches]
    rects = [_rect(figure, place, text) for place, text in bars if text]
    for (left, bottom, width, tall), lines in by_place.items():
        values: dict[float, list[str]] = {}
        for line in lines:
            label = str(line.get_label())
            label = line.axes.get_ylabel() if label.startswith("_") else label
            for x, y in zip(*map(np.asarray, line.get_data()), strict=True):
                values.setdefault(float(x), []).append(f"{label} {y:.4g}")
        shown = sorted(values)[:: -(-len(values) // BANDS)] if values else []
        at = [float(lines[0].axes.transData.transform((x, 0))[0]) for x in shown]
        ends = [left, *((a + b) / 2 for a, b in pairwise(at)), left + width]
        name = lines[0].axes.get_xlabel() if lines else ""
        ticks = {} if name or not lines else _ticks(lines[0].axes)
        for x, begin, end in zip(shown, ends, ends[1:], strict=False):
            title = f"{name} {ticks.get(x, f'{x:g}')}: {', '.join(values[x])}".strip()
            rects.append(_rect(figure, (begin, bottom, max(0.0, end - begin), tall), title))
    return Markup("").join(rects)


def _rect(figure: Figure, bounds: tuple[float, float, float, float], text: str) -> Markup:
    unit, (left, bottom, width, height) = 72 / figure.dpi, bounds
    place = (left * unit, (figure.bbox.height - bottom - height) * unit, width * unit, height * unit)
    rect = '<rect class="reading" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    return Markup(rect).format(*place, text)


def _ticks(ax: Axes) -> dict[float, str]:
    """The texts along the x axis, by place."""
    texts = zip(ax.get_xticks(), ax.get_xticklabels(), strict=False)  # there are none where an axis below has them
    return {float(x): text.get_text() for x, text in texts}


def _has_numbers(line: Line2D) -> bool:
    """Whether a line is a series of numbers by numbers, and no mark or list of names."""
    return all(np.asarray(data).dtype.kind in "fiu" and np.size(data) > 1 for data in line.get_data())


def _in_theme(svg: str, readings: Markup) -> Markup:
    """A picture of matplotlib's as part of a page: its text is text, its colours are the theme's."""
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    inner = svg[svg.index("<defs>") : svg.rindex("</svg>")]
    inner = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", inner, flags=re.DOTALL)
    inner = re.sub(r'<g id="[^"]*"', "<g", inner).replace("xlink:href", "href")
    inner = re.sub(r"font-family: [^;\"]*; ", "", inner)
    # A long run has many points: a tenth of a unit of them is seen by nobody.
    inner = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), inner)
    for color, name in _THEME.items():
        inner = inner.replace(f": {color}", f": var({name})")
    return Markup(f"<svg {box[0]}>{inner}{readings}</svg>")  # matplotlib has escaped every text in it

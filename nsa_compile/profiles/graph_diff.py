"""Two graphs as text, side by side, with what they have in common folded away."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import click

from nsa_compile import page
from nsa_compile.page import Code, Columns, Items, Text

CONTEXT = 2


@dataclass(frozen=True)
class Row:
    """A line of each graph, with its number; None where that graph has no such line.

    `kind` is `same`, `changed` or `folded`, which stands for `left` lines that are equal in both graphs.
    """

    kind: str
    left: str
    right: str
    left_number: int | None = None
    right_number: int | None = None


def side_by_side(before: str, after: str) -> list[Row]:
    """Pair the lines of two graphs. Of a run of equal lines, `CONTEXT` at each end are kept; [] where all are equal."""
    left, right = before.splitlines(), after.splitlines()
    # Without the heuristic that ignores frequent lines: in a long graph those are the operators.
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    if left == right:
        return []
    rows: list[Row] = []
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        lefts, rights = list(enumerate(left[i:i_end], i + 1)), list(enumerate(right[j:j_end], j + 1))
        if tag != "equal":
            pairs = zip_longest(lefts, rights, fillvalue=(None, ""))
            rows += [Row("changed", a, b, n, m) for (n, a), (m, b) in pairs]
            continue
        same = [Row("same", a, b, n, m) for (n, a), (m, b) in zip(lefts, rights, strict=True)]
        head = CONTEXT if rows else 0
        tail = CONTEXT if i_end < len(left) or j_end < len(right) else 0
        if len(same) <= head + tail + 1:  # a line that says how many there are saves nothing
            rows += same
            continue
        folded, kept = same[head : len(same) - tail], same[len(same) - tail :]
        # The nodes below a line of source come from it: the last one above what changed stays in sight.
        source = [row for row in folded if row.left.lstrip().startswith("# File")][-1:] if tail else []
        rows += [*same[:head], Row("folded", f"{len(folded) - len(source)} equal lines", ""), *source, *kept]
    return rows


def render_side_by_side(rows: Sequence[Row], width: int) -> str:
    """The rows as text in two columns of together `width` characters; what is too long is cut, and ends in `…`."""
    column = (width - 3) // 2
    lines = []
    for row in rows:
        if row.kind == "folded":
            lines.append(click.style(f"… {row.left}".center(width).rstrip(), dim=True))
            continue
        left, right = _cut(row.left, column), _cut(row.right, column)
        if row.kind == "changed":
            # Padded before it is coloured: escape codes have no width.
            sign = "|" if row.left_number and row.right_number else "<" if row.left_number else ">"
            lines.append(
                f"{click.style(left.ljust(column), fg='red')} {sign} {click.style(right, fg='green')}".rstrip()
            )
        else:
            lines.append(f"{left.ljust(column)}   {right}".rstrip())
    return "\n".join(lines)


def _cut(line: str, width: int) -> str:
    line = line.expandtabs(4)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def count_changes(rows: Sequence[Row]) -> tuple[int, int]:
    """How many lines only the first and only the second graph has."""
    changed = [row for row in rows if row.kind == "changed"]
    return sum(r.left_number is not None for r in changed), sum(r.right_number is not None for r in changed)


def write_page(
    path: Path, name: str, what: str, graphs: Sequence[tuple[str, str]], rows: Sequence[Row], matches: Sequence[str]
) -> None:
    """Write the rows of `side_by_side` as one HTML page that needs nothing else.

    Args:
        what: one sentence about the two graphs.
        graphs: labels and the whole graphs, unfolded on demand.
        matches: what the pass recorded.
    """
    lines = [Text("Left before, right after. What both have in common is folded.", "quiet"), Columns(rows)]
    blocks = [
        Text(f"{what}."),
        Items(matches),
        *(lines if rows else []),
        *(Code(graph, f"The whole graph {when}") for when, graph in graphs),
    ]
    page.write_page(path, name, path, blocks)

"""Draw the README's picture: time of one attention layer against the length of the sequence.

    python benchmarks/draw_lengths.py

The loop over the tokens is that of `results/attention_loop.json` (by `benchmarks/attention_loop.py`, processor time of
one thread); NSA and dense attention are those of `results/attention.json` (by `nsa-compile bench attention`). Writes
`docs/images/lengths-light.svg` and `lengths-dark.svg`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "images"

# Each line: record, variant in its rows, color, label, and where the label stands beside the last point (dx, dy).
LINES = (
    ("attention_loop", "loop_processor", "loop", "the loop, as written", (12, 5, "start")),
    ("attention", "dense", "dense", "dense attention", (-12, 0, "end")),
    ("attention", "sparse", "nsa", "NSA, compiled", (0, 64, "end")),
)
THEMES = {
    "light": {"text": "#1f2328", "grid": "#d1d9e0", "loop": "#bc4c00", "dense": "#59636e", "nsa": "#0969da"},
    "dark": {"text": "#f0f6fc", "grid": "#3d444d", "loop": "#f0883e", "dense": "#9198a1", "nsa": "#58a6ff"},
}
WIDTH, HEIGHT = 720, 430
LEFT, RIGHT, TOP, BOTTOM = 92, 30, 60, 66  # margins around the axes


def draw(colors: Mapping[str, str]) -> str:
    """The picture as SVG text: medians of the records, both axes logarithmic."""
    lines = {color: _points(record, variant) for record, variant, color, _, _ in LINES}
    lengths = sorted({length for points in lines.values() for length, _ in points})
    seconds = [value for points in lines.values() for _, value in points]
    decades = range(math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds))) + 1)

    def x(length: float) -> float:
        share = math.log2(length / lengths[0]) / math.log2(lengths[-1] / lengths[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 28, "One attention layer, forward and backward", "start", colors["text"], size=20, weight=600)]
    for decade in decades:
        height = y(10.0**decade)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="{colors["grid"]}"/>')
        parts.append(_text(LEFT - 10, height + 5, _seconds(decade), "end", colors["text"]))
    for length in lengths:
        parts.append(_text(x(length), HEIGHT - BOTTOM + 26, _short(length), "middle", colors["text"]))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "tokens in the sequence", "middle", colors["text"]))
    for _, _, color, label, (dx, dy, anchor) in LINES:
        places = [(x(length), y(value)) for length, value in lines[color]]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[color]}" stroke-width="3"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{colors[color]}"/>' for px, py in places]
        px, py = places[-1]
        parts.append(_text(px + dx, py + dy, label, anchor, colors[color], weight=600))
    font = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{font}" role="img">'
    alone = "<title>Time of one attention layer against the length of the sequence</title>"
    return "\n".join([head, alone, *parts, "</svg>", ""])


def _points(record: str, variant: str) -> list[tuple[int, float]]:
    """Length and median seconds of what was measured forward and backward."""
    rows = json.loads((RECORDS / f"{record}.json").read_text(encoding="utf-8"))["results"]
    rows = [row for row in rows if row["direction"] == "forward+backward" and "median_s" in row[variant]]
    return [(row["seq_len"], row[variant]["median_s"]) for row in rows]


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def _seconds(decade: int) -> str:
    return f"{10**decade:,} s" if decade >= 0 else f"{10 ** (decade + 3):,} ms"


def _text(x: float, y: float, text: str, anchor: str, color: str, size: int = 18, weight: int = 400) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}" font-size="{size}" font-weight="{weight}">{text}</text>'


def main() -> None:
    """Draw the records once for each theme."""
    for theme, colors in THEMES.items():
        path = PICTURES / f"lengths-{theme}.svg"
        path.write_text(draw(colors), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()

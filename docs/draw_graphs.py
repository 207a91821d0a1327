"""Draw the graphs of the tutorial, as they are after each pass.

    python docs/draw_graphs.py

Compiles the tutorial's programs, reads the graphs that `dump_dir` writes, and leaves an SVG of each in `docs/images/`.
Operators that only rearrange a tensor (views, transposes, copies) are left out of the drawing and, where there is no
loop, those that no input reaches, such as indices.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

import nsa_compile

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
REARRANGING = {
    "unsqueeze", "transpose", "view", "squeeze", "permute", "expand", "slice", "clone", "getitem", "reshape",
    "detach", "alias", "to", "flatten", "unflatten", "select",
}  # fmt: skip
SYMBOLS = {"==": "eq", ">": "gt", "<=": "le", "@": "matmul", "/": "div", "*": "mul", "+": "add", "&": "and", "|": "or"}
HEIGHT, GAP, ROW = 34, 16, 66  # of a box, between two boxes, from row to row
STYLE = """<style>
text{font:15px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}.edge{stroke:#818b98;fill:none;stroke-width:1.5}
.in{fill:#eaeef2;stroke:#818b98}.op{fill:#fff;stroke:#0969da}.own{fill:#0969da;stroke:#0969da}
.own+text{fill:#fff}.loop{fill:none;stroke:#bc4c00;stroke-dasharray:7 5}.loop+text{fill:#bc4c00}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.in{fill:#21262d}.op{fill:#0d1117;stroke:#58a6ff}
.own{fill:#58a6ff;stroke:#58a6ff}.own+text{fill:#0d1117}.loop{stroke:#f0883e}.loop+text{fill:#f0883e}}
</style>"""


@dataclass
class Box:
    """An input, an operator or an output, and the boxes that it reads."""

    label: str
    kind: str  # in, op, own
    reads: list[str] = field(default_factory=list)
    rank: int = 0
    x: float = 0.0


@dataclass
class Drawing:
    boxes: dict[str, Box]
    steps: int | None  # the graph is the body of a loop of that many steps


def parse(text: str, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> Drawing:
    """A dumped graph, or the body of its scan if it has one, whose `inputs` and `outputs` are named."""
    classes = re.split(r"^\s*class ", text, flags=re.MULTILINE)[1:]
    loop = re.search(r"higher_order\.scan\((\w+)", classes[0])
    steps = re.search(r"arange\((\d+)", text)
    body = classes[0]
    if loop:
        name = re.search(rf"{loop[1]} = self\.(\w+)", body)
        assert name
        body = next(part for part in classes if part.startswith(f"{name[1]}("))
    lines = body.splitlines()
    parameters = re.findall(r"(\w+): \"", next(line for line in lines if "def forward" in line))
    names = inputs if loop else tuple(parameter.removeprefix("L_").rstrip("_") for parameter in parameters)
    boxes = {parameter: Box(name, "in") for parameter, name in zip(parameters, names, strict=True)}
    same = {parameter: parameter for parameter in parameters}  # of each variable, the box that it comes from
    for line in lines:
        assigned = re.match(r"\s+(\w+)(?:: \"[^\"]*\")? = (.+?)(?:;.*)?$", line)
        if assigned:
            _add(boxes, same, assigned[1], assigned[2])
    returned = re.search(r"return [\[(](.*?),?[\])]$", body.strip(), re.MULTILINE)
    assert returned
    for name, value in zip(outputs if loop else ("out",), returned[1].split(", "), strict=True):
        boxes[f"out {name}"] = Box(name, "in", [same[value]])
    if loop:
        assert steps
        return Drawing(_used(boxes), int(steps[1]))
    return Drawing(_used(_reached(boxes)), None)


def _add(boxes: dict[str, Box], same: dict[str, str], name: str, call: str) -> None:
    """The box of one line of a graph, or the box whose result the line rearranges."""
    read = list(dict.fromkeys(same[word] for word in re.findall(r"(?<![\w.])[a-zA-Z_]\w*", call) if word in same))
    operator = _operator(call)
    if operator == "new_zeros":
        read = []  # only the dtype of what it names
    copies = operator == "mul" and call.endswith(", 1)")
    if (operator in REARRANGING or copies) and read:
        same[name] = read[0]
        return
    same[name] = name
    written = re.match(r"(\w+)\.\w+_\(", call)
    if written and written[1] in same:  # in place: what is read of it from now on comes from here
        old = same[written[1]]
        same.update({variable: name for variable, box in same.items() if box == old})
    own = "ops.nsa_compile." in call
    boxes[name] = Box(operator, "own" if own else "op", read)


def _operator(call: str) -> str:
    if found := re.match(r"torch\.ops\.\w+\.(\w+)", call):
        return found[1].strip("_")
    if found := re.match(r"torch\.(\w+)\(", call):
        return found[1]
    if found := re.match(r"\w+ (==|>|<=|@|/|\*|\+|&|\|) ", call):
        return SYMBOLS[found[1]]
    if found := re.match(r"\w+\.(\w+)\(", call):
        return found[1].strip("_")
    return "getitem"


def _reached(boxes: dict[str, Box]) -> dict[str, Box]:
    """The boxes that depend on an input."""
    reached: dict[str, Box] = {}
    for name, box in boxes.items():
        box.reads = [source for source in box.reads if source in reached]
        if box.reads or box.kind == "in":
            reached[name] = box
    return reached


def _used(boxes: dict[str, Box]) -> dict[str, Box]:
    """The boxes that an output depends on."""
    wanted = {name for name in boxes if name.startswith("out ")}
    for name in reversed(list(boxes)):
        if name in wanted:
            wanted.update(boxes[name].reads)
    return {name: box for name, box in boxes.items() if name in wanted}


def svg(drawing: Drawing, title: str) -> str:
    """The drawing as SVG: rows of boxes, what is read above what reads it."""
    boxes = drawing.boxes
    wide = 24 + 9 * max(len(box.label) for box in boxes.values())
    rows = _place(boxes, wide + GAP)
    margin = 34 if drawing.steps else 8
    width = max(len(row) for row in rows) * (wide + GAP) - GAP + 2 * margin
    height = (len(rows) - 1) * ROW + HEIGHT + 2 * margin
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">']
    parts += [f"<title>{escape(title)}</title>", STYLE]
    if drawing.steps:
        parts.append(f'<rect class="loop" x="4" y="18" width="{width - 8}" height="{height - 22}" rx="10"/>')
        parts.append(f'<text x="14" y="13">in each of {drawing.steps} steps</text>')

    def top(box: Box) -> float:
        return margin + box.rank * ROW

    middle = width / 2
    for box in boxes.values():
        for source in (boxes[name] for name in box.reads):
            x0, y0, x1, y1 = middle + source.x, top(source) + HEIGHT, middle + box.x, top(box)
            bend = (y1 - y0) / 2
            parts.append(f'<path class="edge" d="M{x0:.0f} {y0}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} '
                         f'{x1:.0f} {y1}"/>')  # fmt: skip
    for box in boxes.values():
        x, y = middle + box.x, top(box)
        shape = f'x="{x - wide / 2:.0f}" y="{y}" width="{wide}" height="{HEIGHT}" rx="{17 if box.kind == "in" else 5}"'
        parts.append(f'<rect class="{box.kind}" {shape}/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 22}" text-anchor="middle">{escape(box.label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _place(boxes: dict[str, Box], pitch: int) -> list[list[Box]]:
    """Set rank and x of each box: below all it reads, near the middle of them; inputs just above their first reader."""
    readers: dict[str, list[Box]] = {name: [] for name in boxes}
    for box in boxes.values():
        box.rank = 1 + max((boxes[name].rank for name in box.reads), default=-1)
        for name in box.reads:
            readers[name].append(box)
    for name in reversed(list(boxes)):
        if not boxes[name].reads and readers[name]:
            boxes[name].rank = min(box.rank for box in readers[name]) - 1
    rows: list[list[Box]] = [[] for _ in range(1 + max(box.rank for box in boxes.values()))]
    for box in boxes.values():
        rows[box.rank].append(box)
    for row in rows:
        wishes = {id(box): _middle([boxes[name].x for name in box.reads]) for box in row}
        row.sort(key=lambda box: wishes[id(box)])
        for place, box in enumerate(row):
            box.x = (place - (len(row) - 1) / 2) * pitch
    return rows


def _middle(places: list[float]) -> float:
    return sum(places) / len(places) if places else 0.0


def dumps(program: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> dict[str, str]:
    """The graphs of a program as text: `captured`, and after each pass under its name."""
    with tempfile.TemporaryDirectory() as folder:
        torch._dynamo.reset()
        nsa_compile.compile(program, nested="eager", attention="sparse", dump_dir=folder)(*inputs)
        after = {re.sub(r"^\d+_|_after$", "", path.stem): path.read_text() for path in
                 sorted(Path(folder).glob("*_after.py"))}  # fmt: skip
        first = next(Path(folder).glob("00_*_before.py")).read_text()
    return {"captured": first, **after}


def stale_rows() -> str:
    """The example of the page on concepts: the cache that step 2 sees in the loop and compiled, and its weights."""
    cell, left = 38, 120
    columns = (
        ("in the loop", ["k0", "k1", "k2", "0", "0", "0"], 3),
        ("compiled", ["k0", "k1", "k2", "k3", "k4", "k5"], 6),
        ("its weight", [".2", ".5", ".3", "0", "0", "0"], 3),
    )
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 290" width="620" role="img">']
    parts += ["<title>Rows of the cache at step 2: in the loop, compiled, and the weight of each</title>", STYLE]
    for row in range(6):
        parts.append(f'<text x="{left - 20}" y="{70 + row * cell}" text-anchor="end">row {row}</text>')
    for column, (title, values, written) in enumerate(columns):
        x = left + column * 150
        parts.append(f'<text x="{x + 50}" y="30" text-anchor="middle">{title}</text>')
        for row, value in enumerate(values):
            stale = column == 1 and row > 2
            kind = "loop" if stale else "op" if row < written else "in"
            y = 46 + row * cell
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="100" height="{cell - 6}" rx="4"/>')
            parts.append(f'<text x="{x + 50}" y="{y + 22}" text-anchor="middle">{value}</text>')
    parts.append('<text x="570" y="230" text-anchor="middle">stale × 0</text></svg>')
    return "\n".join([*parts, ""])


def draw(defined: Mapping[str, Any]) -> dict[str, str]:
    """File name and text of each picture; `defined` is what the tutorial's code defines."""
    cache = ("K", "V")
    graphs = dumps(defined["attention"], *defined["qkv"])
    pictures = {}
    for name in ("captured", "resolve_carries", "raise_attention", "batch_prefill", "lower_attention"):
        drawing = parse(graphs[name], (*cache, "t", "q", "k", "v"), (*cache, "y"))
        pictures[f"attention-{name}.svg"] = svg(drawing, f"Causal attention: {name}")
    graphs = dumps(defined["layer"], *defined["inputs"])
    pictures["nsa-lower_attention.svg"] = svg(parse(graphs["lower_attention"]), "NSA after lower_attention")
    pictures["stale-rows.svg"] = stale_rows()
    return pictures


def main() -> None:
    """Write the pictures."""
    page = DOCS / "tutorial.md"
    defined: dict[str, Any] = {"__name__": "__docs__"}
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]  # at its lines, where `loop` reads it
        exec(compile(source, str(page), "exec"), defined)
    for name, text in draw(defined).items():
        (IMAGES / name).write_text(text, encoding="utf-8")
        print(IMAGES / name)


if __name__ == "__main__":
    main()

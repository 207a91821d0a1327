"""Write the tutorial as a notebook.

python docs/notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOK = DOCS.parent / "examples" / "tutorial.ipynb"


def notebook(page: str) -> str:
    """A page as notebook text: its Python blocks are code cells, what lies between is prose."""
    cells: list[dict[str, Any]] = []
    for place, part in enumerate(re.split(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)):
        text = part.strip("\n")
        if place % 2:
            cells.append({"cell_type": "code", "execution_count": None, "outputs": [], "source": _lines(text)})
        elif text:
            cells.append({"cell_type": "markdown", "source": _lines(_from_examples(text))})
    for number, cell in enumerate(cells):
        cell |= {"id": f"cell-{number}", "metadata": {}}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _from_examples(text: str) -> str:
    """Links to other pages and pictures, as seen from the folder of the notebook."""
    return re.sub(r"\]\((?!https?:|#)", "](../docs/", text)


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook((DOCS / "tutorial.md").read_text(encoding="utf-8")), encoding="utf-8")
    print(NOTEBOOK)

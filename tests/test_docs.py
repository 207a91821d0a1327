"""The code in the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nsa_compile.passes.pipeline import REGISTRY, pipeline

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _registry_as_before():
    """Whatever happens half way through a page, no pass of it stays registered."""
    pipeline()
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    torch._dynamo.reset()


@pytest.mark.parametrize("page", ["writing-a-pass.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks
    before = dict(REGISTRY)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    torch.manual_seed(0)
    for block in blocks:
        # Leading empty lines, so that a traceback names the line of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(path), "exec"), namespace)
    assert before == REGISTRY, "the page leaves its passes registered"

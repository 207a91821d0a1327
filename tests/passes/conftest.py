"""What the compiler hands over."""

from __future__ import annotations

import pytest
from torch import fx

from nsa_compile import backend


@pytest.fixture
def final_graphs(monkeypatch) -> list[fx.GraphModule]:
    """The rewritten graphs as the nested backend gets them, one a compilation."""
    graphs: list[fx.GraphModule] = []
    original = backend.compile_nested

    def keep(gm, *args, **options):
        graphs.append(gm)
        return original(gm, *args, **options)

    monkeypatch.setattr(backend, "compile_nested", keep)
    return graphs

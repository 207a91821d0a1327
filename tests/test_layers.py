"""Imports point one way: from a package to those below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From top to bottom. What is named here is a package or a module of nsa_compile with all that no longer name has.
LAYERS = [
    {"validation", "__main__"},
    {"experiments", "estimation", "evaluation"},
    {"profiles", "verification"},
    {"launch", "generation"},
    {"hf"},
    {"train"},
    {"train.report"},
    {"train.checkpoints", "train.watch"},
    {"train.records", "train.distributed", "train.lora"},
    {"data", "machine", "arguments", "config_cli"},
    {"config"},
    {"generation.imported", "generation.converted"},
    {"generation.generate", "generation.text", "generation.exported", "generation.exported_step"},
    {"generation.sampling"},
    {"models"},
    {"__init__"},
    {"loops"},
    {"backend"},
    {"cache"},
    {"program"},
    {"passes"},
    {"analyses"},
    {"ir"},
    {"ops"},
    {"inductor_files", "inductor_kernels"},
    {"compiler_cache", "cli", "page"},
    {"extras"},
    {"files", "errors", "scanning", "modes", "ranges", "streams", "branches"},
    {"capture"},
    {"workarounds", "trees", "memory"},
]
FLOOR = {name: floor for floor, names in enumerate(reversed(LAYERS)) for name in names}


def part_of(module: str) -> str:
    """The longest name in ``LAYERS`` that the module is, or lies in."""
    words = module.split(".")[1:] or ["__init__"]
    return next(name for n in range(len(words), 0, -1) if (name := ".".join(words[:n])) in FLOOR)


def imported(source: str, modules: set[str]) -> set[str]:
    """The modules of the package that a source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= submodules or {node.module}
    return found


def test_imports_point_down():
    paths = {}
    for path in (ROOT / "nsa_compile").rglob("*.py"):
        paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    arrows = {(part_of(a), part_of(b)) for a, path in paths.items() for b in imported(path.read_text(), set(paths))}
    assert ("launch", "train") in arrows
    assert ("profiles", "launch") in arrows  # an import within a function
    assert [(a, b) for a, b in sorted(arrows) if a != b and FLOOR[a] <= FLOOR[b]] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from nsa_compile.train import loop", {"nsa_compile.train.loop"}),
        ("def f():\n    from nsa_compile.train.loop import run", {"nsa_compile.train.loop"}),
        ("import nsa_compile.train.loop", {"nsa_compile.train.loop"}),
        ("import json", set()),
    ],
)
def test_every_form_of_import_is_seen(source, found):
    assert imported(source, {"nsa_compile", "nsa_compile.train", "nsa_compile.train.loop"}) == found

"""The three circles: the compiler without what the trainer and the laboratory import, and one line where that is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nsa_compile.cli import LAZY_COMMANDS
from nsa_compile.extras import HF, LAB, ONNX, PACKAGES, TRAIN, TRAIN_COMMANDS, missing_extra

ROOT = Path(__file__).parent.parent
# Finds none of the packages that its first argument names.
WITHOUT = """
import sys

MISSING = sys.argv.pop(1).split(",")

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
COMPILES = """
import torch
import nsa_compile
from nsa_compile.models import NSAConfig, NSATransformer

def step(buffer, x):
    value, slot = x
    buffer = torch.where(torch.arange(4)[:, None] == slot, value, buffer)
    return buffer, buffer.sum(0)

def run(init, values):
    return nsa_compile.scan(step, init, (values, torch.arange(4)))

fast = nsa_compile.compile(run, nested="eager")
for got, wanted in zip(fast(torch.zeros(4, 2), torch.ones(4, 2)), run(torch.zeros(4, 2), torch.ones(4, 2))):
    assert torch.equal(got, wanted)
assert "scan" in nsa_compile.last_report().scans[0].name
NSATransformer(NSAConfig(vocab_size=8, dim=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8))
print(sorted({name.partition(".")[0] for name in sys.modules} & set(MISSING)))
"""
# One process for all commands, since most of them import torch first.
COMMANDS = """
import contextlib, io
from nsa_compile.cli import LAZY_COMMANDS, main

for command, words in {
    **{name: [] for name in LAZY_COMMANDS},
    "ab": ["--set", "optim.lr=1"], "audit": ["attention"], "bench": ["step"], "chat": ["."], "ckpt": ["ls", "x"],
    "config": ["show"], "data": ["smoke"], "generate": [".", "--prompt", "x"],
    "launch": ["slurm", "--nodes", "1", "--nproc", "1"], "passes": ["list"],
    "profile": ["step"], "report": ["."], "sweep": ["optim.lr", "1", "2"], "validate": ["x"],
    "watch": ["x"],
}.items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main([command, *words])
        except SystemExit as left:
            print(left.code, command, said.getvalue().strip(), file=sys.__stdout__)
"""


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def test_the_extras_bring_what_the_code_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert names(project["dependencies"]) == {"torch", "numpy", "filelock", "platformdirs"}
    assert {PACKAGES.get(module, module) for module in TRAIN} | {"jinja2"} == names(extras["train"])
    assert {*LAB, "nsa-compile"} == names(extras["lab"] + extras["plots"])
    assert "nsa-compile[train,plots]" in extras["lab"]
    assert set(HF) | {"accelerate"} == names(extras["hf"])
    assert set(ONNX) == names(extras["onnx"])
    installs = re.findall(r"EXTRAS := (.+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert installs == ["train,plots", "dev"], "make train needs no linter, and make test all"


def without(modules, code, *arguments):
    command = [sys.executable, "-c", WITHOUT + code, ",".join(modules), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_compiler_and_the_models_need_no_extra():
    result = without([*TRAIN, *LAB, "jinja2", "scipy"], COMPILES)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.deep
def test_each_command_names_its_extra_in_one_line():
    result = without([*set(TRAIN) - {"click"}, *LAB], COMMANDS)
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines] == list(LAZY_COMMANDS), (result.stdout, result.stderr)
    for line in lines:
        code, command, said = line.split(" ", 2)
        extra = "plots" if "matplotlib" in said else "train" if command in TRAIN_COMMANDS else "lab"
        assert code == "2", line
        assert f"pip install 'nsa-compile[{extra}]'" in said, line


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--json"]])
def test_the_command_line_itself_is_an_extra(arguments):
    result = without(["click"], "from nsa_compile.__main__ import main\nmain()", *arguments)
    name, extra = ("nsa-compile verify", "lab") if "verify" in arguments else ("nsa-compile", "train")
    assert result.returncode == 2
    assert result.stderr == f"error: {name} needs click; install it with: pip install 'nsa-compile[{extra}]'\n"


@pytest.mark.parametrize(
    ("kind", "missing", "first", "extra"), [("hf", HF, "safetensors", "hf"), ("onnx-decode-step", ONNX, "onnx", "onnx")]
)
def test_export_names_the_extra_of_the_formats(tmp_path, kind, missing, first, extra):
    words = ["export", "runs/x", "--to", kind, "--out", str(tmp_path / "out")]
    result = without(missing, "from nsa_compile.__main__ import main\nmain()", *words)
    said = f"nsa-compile export needs {first}; install it with: pip install 'nsa-compile[{extra}]'"
    assert (result.returncode, result.stderr) == (2, f"error: {said}\n")


def test_other_modules_that_are_missing_are_nobodys_extra():
    assert missing_extra(ModuleNotFoundError("No module named 'nsa_compile.x'", name="nsa_compile.x"), "train") is None

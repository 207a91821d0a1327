"""The examples run, and print what they are to show."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nsa_compile

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("name.py", *arguments)`: what an example prints; its programs are compiled by the passes alone."""
    for name in ("compile", "compile_block", "compile_blocks"):
        quick = functools.partial(getattr(nsa_compile, name), nested="eager", cache=False)
        monkeypatch.setattr(nsa_compile, name, quick)

    def example(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        torch._dynamo.reset()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return example


def test_the_ten_lines_are_those_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert shown
    assert (EXAMPLES / "ten_lines.py").read_text(encoding="utf-8").endswith(f'"""\n\n{shown[1]}')


@pytest.mark.deep
def test_an_attention_from_scratch_is_batched_and_learns(run):
    output = run("own_attention.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.6 * losses[0]
    assert "batched: True" in output


@pytest.mark.deep
def test_nsa_as_a_layer_learns(run):
    output = run("nsa_layer.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < 0.3 * losses[0]
    assert {"compressed", "selected", "window"} <= set(re.findall(r"^(\w+): ", output, re.MULTILINE))


@pytest.mark.deep
@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning's own code under torch 2.13
def test_the_layer_learns_under_the_trainer_of_somebody_else(run, trainer):
    pytest.importorskip(trainer)
    if trainer == "accelerate":  # a process has one state; a test before this one may have made another
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run(f"with_{trainer}.py"))]
    assert losses[-1] < 0.5 * losses[0]
    assert nsa_compile.last_report().scans[0].batched


def test_a_report_tells_a_recurrence_from_a_cache(run):
    output = run("read_report.py")
    assert "causal_mean: 16 steps, 20 operators; carries: Rows" in output
    assert "saturating_sum: 16 steps, still a loop" in output
    assert re.search(r"aten.clamp.default at .*read_report.py:\d+: the recurrence has no parallel form", output)


@pytest.mark.deep
def test_training_on_a_text_of_ones_own(run, tmp_path, tiny_overrides):
    text = tmp_path / "my_text.txt"
    text.write_text("to be, or not to be: that is the question. " * 200, encoding="utf-8")
    sets = [word for override in tiny_overrides() for word in ("--set", override)]
    with pytest.raises(SystemExit) as left:
        run("own_text.py", str(text), *sets)
    assert left.value.code == 0
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert '"steps": 4' in summary.read_text(encoding="utf-8")


@pytest.mark.deep
def test_two_processes_end_with_the_same_weights():
    # Two processes of Python with gloo: what one process cannot show.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(EXAMPLES / "two_processes.py"), "eager"],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    # Two that print at once may share a line.
    assert sorted(re.findall(r"(rank \d): .*? as on rank 0: True", result.stdout)) == ["rank 0", "rank 1"]

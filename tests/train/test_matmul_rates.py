"""What a run says of the peak that its MFU is a fraction of."""

from __future__ import annotations

import csv
import json
import shlex

import pytest

from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.machine.matmul_rate import MatmulRate
from nsa_compile.page import markdown
from nsa_compile.train import loop
from nsa_compile.train.records.run_directory import create_run_directory
from nsa_compile.train.report.report_page import blocks
from nsa_compile.train.report.run_record import read_run
from nsa_compile.train.report.summary import render


@pytest.fixture
def train(tiny_overrides, monkeypatch):
    """A run of two steps on a machine of which each measurement of the peak finds the next of `rates`."""

    def run(*rates: MatmulRate):
        found = iter(rates)
        monkeypatch.setattr(loop, "measure_matmul", lambda *arguments, **others: next(found))
        config = load_config(None, tiny_overrides(**{"train.steps": 2, "train.save_every": 0}))
        directory = create_run_directory(config)
        return loop.run(config, load_corpus(config), directory), directory

    return run


@pytest.mark.deep
def test_the_better_of_two_measurements_counts(train):
    summary, directory = train(MatmulRate(1e11, 1e11, 8e10, 1), MatmulRate(2e11, 1.1e11, 9e10, 1))
    assert summary["peak_flops"] == 2e11
    assert summary["mfu"] == pytest.approx(summary["tokens_per_s_mean"] * summary["flops_per_token"] / 2e11)
    assert summary["doubts"] == []
    with (directory / "training.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    # A row was written before the second one.
    assert float(row["mfu"]) == pytest.approx(float(row["tokens_per_s"]) * summary["flops_per_token"] / 1e11)
    assert json.loads((directory / "env.json").read_text())["matmul_peak_flops"] == 1e11
    assert "doubt" not in render(summary)


def test_doubts_stand_beside_the_figures(train):
    slow = MatmulRate(1.0, 1.0, 0.8, 1)
    summary, directory = train(slow, MatmulRate(1.0, 1.0, 0.1, 1))
    busy, impossible = summary["doubts"]
    assert "busy with something else" in busy
    assert "is impossible" in impossible
    assert render(summary).count("\ndoubt ") == 2
    page = markdown("Run", blocks(read_run(directory), []))
    assert "busy with something else" in page
    assert "matmul rates" not in page


@pytest.mark.deep(but=["doubts3"])
@pytest.mark.parametrize("doubts", [None, 7, "text", [1, None]])
def test_doubts_that_are_none_are_no_crash(train, doubts):
    summary, _ = train(*[MatmulRate(1e11, 1e11, 8e10, 1)] * 2)
    assert render(summary | {"doubts": doubts}).count("\ndoubt ") == (2 if isinstance(doubts, list) else 0)


def test_an_interrupted_run_names_the_command_that_goes_on_with_it(train):
    summary, directory = train(*[MatmulRate(1e11, 1e11, 8e10, 1)] * 2)
    assert "go on with" not in render(summary)
    summary |= {"interrupted": True, "stopped_by": "SIGINT", "run_dir": f"{directory} 2", "processes": 2}
    (line,) = [line for line in render(summary | {"strategy": "ddp"}).splitlines() if line.startswith("go on with")]
    assert shlex.split(line)[3:] == [
        *("nsa-compile", "train", "--config", f"{directory} 2/config.resolved.yaml"),
        *("--resume", f"{directory} 2", "--nproc", "2"),
    ]

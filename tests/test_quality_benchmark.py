"""The comparison with dense attention: equal sizes, and what is made of runs that are finished. Nothing is trained."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import ALLOWED, ATTENTIONS, HELD_OUT, Cell
from nsa_compile.models import NSATransformer

TOKENS = 2048


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_both_have_the_same_number_of_weights_and_the_same_batches(tmp_path, seq_len):
    weights, configs = {}, {}
    for attention in ATTENTIONS:
        configs[attention] = Cell(attention, seq_len, 300, 1).config(TOKENS, tmp_path)
        with torch.device("meta"):
            weights[attention] = sum(weight.numel() for weight in NSATransformer(configs[attention].model).parameters())
    assert abs(weights["dense"] / weights["nsa"] - 1) < ALLOWED
    nsa, dense = configs["nsa"], configs["dense"]
    assert (nsa.train, nsa.optim, nsa.data, nsa.run.seed) == (dense.train, dense.optim, dense.data, dense.run.seed)
    assert nsa.train.batch_size * seq_len == TOKENS
    assert nsa.model.n_layers == dense.model.n_layers


def finish(runs, cell, bits, last=2.0, interrupted=False):
    """The files of a run that ended, as far as they are read."""
    run = runs / f"{cell.name}-20260101-120000"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(cell.config(TOKENS, runs).to_yaml())
    (run / "summary.json").write_text(json.dumps({"interrupted": interrupted, "parameters": 7}))
    (run / "val.csv").write_text(f"step,val_loss,accuracy\n0,5.5,\n150,{last - 0.1},\n{cell.steps},{last},\n")
    score = {"bits_per_byte": bits, "tokens": 10, "bytes": 10}
    (run / HELD_OUT).write_text(json.dumps({"results": [score]}))
    return run


@pytest.fixture
def runs(tmp_path):
    """Dense attention takes twice the time of a step, so NSA is trained for twice the steps, too."""
    costs = {"nsa": {"median_s": 0.1}, "dense": {"median_s": 0.2}}
    (tmp_path / f"step-costs-512-{TOKENS}.json").write_text(json.dumps(costs))
    for seed in (1, 2, 3):
        finish(tmp_path, Cell("nsa", 512, 300, seed), 3.0 + seed / 10)
        finish(tmp_path, Cell("dense", 512, 300, seed), 3.0 + seed / 10 + (-0.05, 0.01, 0.05)[seed - 1])
        finish(tmp_path, Cell("nsa", 512, 600, seed), 2.5 + seed / 10)
    return tmp_path


def test_runs_are_compared_at_equal_tokens_and_at_equal_time(runs):
    out = runs / "quality.json"
    finish(runs, Cell("nsa", 512, 300, 4), 1.0, interrupted=True)
    quality.record(out, runs, TOKENS)
    record = json.loads(out.read_text())
    tokens, time = record["comparisons"]
    assert (tokens["equal"], time["equal"]) == ("tokens", "time")
    assert tokens["pairs"] == pytest.approx([0.05, -0.01, -0.05])
    assert tokens["interval"][0] < 0 < tokens["interval"][1]
    assert time["difference"] == pytest.approx(-0.5 - 0.01 / 3)
    assert time["interval"][1] < 0
    rows = {(row["attention"], row["steps"]): row for row in record["results"]}
    assert {key: row["processor_s"] for key, row in rows.items()} == {
        ("nsa", 300): pytest.approx(30), ("nsa", 600): pytest.approx(60), ("dense", 300): pytest.approx(60)
    }  # fmt: skip
    row = rows["nsa", 300]
    assert (row["best"]["mean"], row["last"]["mean"]) == (pytest.approx(1.9), pytest.approx(2.0))
    assert row["bits_per_byte"] == {"mean": pytest.approx(3.2), "deviation": pytest.approx(0.1)}
    assert [point["step"] for point in row["curve"]] == [0, 150, 300]
    text = quality.table(record)
    assert "equal tokens, 300 and 300 steps: NSA less dense -0.0033 bits per byte" in text
    assert text.count("no difference seen") == text.count("NSA is better") == 1


def test_a_finished_run_is_not_made_again(runs, monkeypatch):
    made = []
    monkeypatch.setattr(quality, "command", lambda words, out: made.append(words[0]))
    quality.train(Cell("nsa", 512, 300, 1), TOKENS, runs)
    assert made == []


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    cell, made = Cell("nsa", 512, 300, 1), []
    place = finish(tmp_path, cell, 3.0, interrupted=True)

    def command(words, out):
        made.append(list(words[:3]))
        (place / "summary.json").write_text(json.dumps({"interrupted": False}))

    monkeypatch.setattr(quality, "command", command)
    assert quality.finished(cell, tmp_path) is None
    quality.train(cell, TOKENS, tmp_path)
    assert made == [["train", "--resume", "auto"]]

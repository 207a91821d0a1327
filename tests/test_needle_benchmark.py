"""The benchmark of needle retrieval, run for a moment: what it records, not how much is learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import processes

pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "needle.py"
TINY = (
    "compile.enabled=false", "train.seq_len=48", "train.batch_size=2", "train.eval_batches=1", "train.steps=2",
    "optim.warmup=0", "data.needles=3", "data.min_distance=8", "model.pattern.window=8", "model.dim=16",
    "model.head_dim=8",
)  # fmt: skip


@pytest.mark.deep
def test_both_models_are_trained_and_recorded(tmp_path):
    out = tmp_path / "needle.json"
    overrides = [word for override in TINY for word in ("--set", override)]
    done = processes.script(SCRIPT, *overrides, "--eval-seconds", "0", "--sequences", "4", "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["benchmark"] == "needle"
    assert record["config"]["train"]["steps"] == 2
    with_it, without_it = record["results"]
    assert with_it["branches"] == ["compressed", "selected", "window"]
    assert without_it["branches"] == ["compressed", "window"]
    assert without_it["parameters"] < with_it["parameters"], "a gate less"
    for row in record["results"]:
        assert [point["step"] for point in row["curve"]] == [0, 1, 2]
        assert row["answers"] == 4 * 3
        assert row["seconds_to_goal"] is None
        low, high = row["interval"]
        assert 0 <= low <= row["accuracy"] <= high <= 1
    assert out.with_suffix(".png").stat().st_size > 10_000

"""Records of a run: what is written is what a resumed run and a report read."""

from __future__ import annotations

import json

import pytest

from nsa_compile.errors import CheckpointError
from nsa_compile.train.records.rows import (
    CsvLog,
    EvalRow,
    JsonLog,
    StepRow,
    phase_columns,
    row_parser,
    throughput,
    unsteady,
)

PHASES = {"data": 0.1, "forward": 0.2, "backward": 0.3, "communication": 0.0, "optimizer": 0.05, "other": 0.35}


def step_row(step, **changes):
    return StepRow(step, 5.5, 1e-3, 1.0, 100.0 * step, 0.1, 1.0, **changes)


def test_a_resumed_run_reads_every_column_back(tmp_path):
    path = tmp_path / "training.csv"
    rows = [step_row(1), step_row(2, memory_bytes=2**33 + 1, **phase_columns(PHASES)), step_row(3)]
    with CsvLog(path, StepRow) as log:
        for row in rows:
            log.append(row)
    assert "other_s" in path.read_text().splitlines()[0]
    assert rows[1].forward_s == 0.2
    with CsvLog(path, StepRow, resumed_at=2) as log:
        assert log.rows == rows[:2]
    assert len(path.read_text().splitlines()) == 3


def test_files_without_the_later_columns_can_be_continued(tmp_path):
    path = tmp_path / "val.csv"
    path.write_text("step,val_loss\n0,5.5\n2,4.5\n4,3.5\n")
    with CsvLog(path, EvalRow, resumed_at=2) as log:
        assert log.rows == [EvalRow(0, 5.5), EvalRow(2, 4.5)]
        log.append(EvalRow(3, 4.0, 0.25))
    assert path.read_text().splitlines() == ["step,val_loss,accuracy", "0,5.5,", "2,4.5,", "3,4.0,0.25"]


def test_columns_that_are_always_measured_must_be_there():
    with pytest.raises(KeyError, match="val_loss"):
        row_parser(EvalRow, ("step", "accuracy"))({"step": "1", "accuracy": ""})


def test_throughput_is_that_of_the_later_half_or_the_last_fifty_steps():
    assert throughput([]) == {
        "tokens_per_s_mean": None, "tokens_per_s_std": None, "tokens_per_s_steps": 0, "mfu": None
    }  # fmt: skip
    assert throughput([step_row(1)])["tokens_per_s_std"] is None
    few = throughput([step_row(step) for step in range(1, 5)])
    # Tokens by seconds, not the mean of rates.
    assert few["tokens_per_s_mean"] == pytest.approx(2 / (1 / 300 + 1 / 400))
    rows = [step_row(step) for step in range(1, 201)]
    many = throughput(rows)
    assert (round(many["tokens_per_s_mean"]), many["tokens_per_s_steps"]) == (17431, 50)
    assert many["mfu"] == pytest.approx(many["tokens_per_s_mean"] * rows[-1].mfu / rows[-1].tokens_per_s)


def test_steps_that_other_work_slowed_are_in_doubt():
    half_slow = [step_row(1 if step > 30 else 3) for step in range(1, 41)]
    assert "tokens/s of the last 20 steps differ by ± 68% from step to step" in unsteady(throughput(half_slow))
    assert unsteady(throughput([step_row(3)] * 40)) is None
    assert unsteady(throughput(half_slow[29:33])) is None  # too few to tell


def test_objects_after_the_checkpoint_and_half_ones_are_cut_off(tmp_path):
    path = tmp_path / "attention.jsonl"
    with JsonLog(path) as log:
        for step in (2, 2, 4):
            log.append({"step": step, "layer": 0})
    with path.open("a") as file:
        file.write('{"step": 4, "la')
    with JsonLog(path, resumed_at=4) as log:
        log.append({"step": 6, "layer": 0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 2, 4, 6]
    JsonLog(path, resumed_at=2).__exit__()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 2]


def test_a_run_whose_statistics_were_off_may_switch_them_on(tmp_path):
    with JsonLog(tmp_path / "attention.jsonl", resumed_at=4):
        pass
    assert (tmp_path / "attention.jsonl").read_text() == ""


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"layer": 0}', '{"step": "one"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "attention.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match="line 2 cannot be read") as error:
        JsonLog(path, resumed_at=3)
    assert "\n" not in str(error.value)
    assert path.read_text().count("\n") == 3  # it is left as it was

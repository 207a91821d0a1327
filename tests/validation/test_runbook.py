"""What is kept of a validation, what decides about GO, and what becomes of phases that fail."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest

from nsa_compile.cli import main
from nsa_compile.config import load_config
from nsa_compile.errors import UserError
from nsa_compile.train.records.rows import StepRow
from nsa_compile.train.records.run_directory import lock_run_directory
from nsa_compile.train.report.run_record import RunRecord
from nsa_compile.train.signals import EXIT_CODES
from nsa_compile.validation import phases
from nsa_compile.validation.report import write_report
from nsa_compile.validation.runbook import (
    Phase,
    PhaseOutcome,
    PhaseRun,
    Runbook,
    begin,
    carry_out,
    load_plan,
    verdict,
)


@pytest.fixture
def plan(tmp_path, tiny_overrides):
    made = Runbook(tmp_path / "validation", load_config(None, tiny_overrides()), "quick", 1)
    begin(made)
    return made


def run(plan, *chosen):
    return carry_out(plan, chosen, lambda phase, outcome: None)


def good(work):
    work.figure("tokens/s", "12", "training.csv", "the last 6 steps", 6)


def bad(work):
    work.require("tokens/s ≥ 100", "12 tokens/s", False)


def broken(work):
    work.command("nonsense", "train", "--config", "/nowhere.yaml")


def test_a_phase_that_meets_its_criteria_passes(plan):
    outcomes = run(plan, Phase("one", "One", good))
    assert verdict(outcomes) == ("GO", [])


def test_a_criterion_that_is_not_met_is_a_reason(plan):
    outcomes = run(plan, Phase("one", "One", good), Phase("two", "Two", bad))
    assert [outcome.status for outcome in outcomes] == ["passed", "failed"]
    assert verdict(outcomes) == ("NO-GO", ["two: 12 tokens/s, and the criterion is tokens/s ≥ 100"])


def test_a_command_that_fails_is_named_with_its_last_words_and_the_others_go_on(plan):
    outcomes = run(plan, Phase("one", "One", broken), Phase("two", "Two", good))
    assert [outcome.status for outcome in outcomes] == ["failed", "passed"]
    (problem,) = outcomes[0].problems
    assert "exit code 2" in problem
    assert "/nowhere.yaml" in problem
    assert outcomes[0].commands == ["nsa-compile train --config /nowhere.yaml --json"]


def test_a_phase_that_does_not_apply_says_why(plan):
    outcomes = run(plan, Phase("buckets", "Buckets", bad, phases.needs_processes))
    assert outcomes[0].status == "not applicable"
    assert "--nproc 2" in outcomes[0].notes[0]
    assert verdict(outcomes)[0] == "GO"


def test_finished_phases_are_not_run_again(plan):
    runs = []

    def count(work):
        runs.append(1)
        good(work)

    def interrupted(work):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, Phase("one", "One", count), Phase("two", "Two", interrupted))
    outcomes = run(load_plan(plan.directory), Phase("one", "One", count), Phase("two", "Two", count))
    assert len(runs) == 2
    assert [outcome.figures[0].value for outcome in outcomes] == ["12", "12"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"figures": [{"of": "another version"}], "criteria": []}'])
def test_an_outcome_that_cannot_be_read_is_one_line(plan, content):
    run(plan, Phase("one", "One", good))
    (plan.directory / "one" / "outcome.json").write_text(content)
    with pytest.raises(UserError, match=r"one/outcome\.json' .*; delete its folder and resume again"):
        run(plan, Phase("one", "One", good))


def test_two_do_not_work_on_one_validation(plan):
    with lock_run_directory(plan.directory), pytest.raises(UserError, match="another process is working on"):
        run(plan, Phase("one", "One", good))


NAP = """
import sys
from pathlib import Path
from nsa_compile.validation.runbook import Phase, carry_out, load_plan

def nap(work):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    work.process("nap", [sys.executable, "-c", code], ".txt")

carry_out(load_plan(Path(sys.argv[1])), [Phase("one", "One", nap)], lambda phase, outcome: None)
"""


@pytest.mark.deep
def test_sigterm_leaves_no_process_and_no_outcome(plan):
    process = subprocess.Popen([sys.executable, "-c", NAP, str(plan.directory)])
    said = plan.directory / "one" / "nap.txt"
    end = time.monotonic() + 120
    while not (said.exists() and said.read_text().endswith("\n")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.terminate()
    assert process.wait(120) == EXIT_CODES["SIGTERM"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)
    assert not (plan.directory / "one" / "outcome.json").exists()


def test_every_figure_of_the_report_names_its_file_window_and_number(plan):
    outcomes = run(plan, Phase("one", "One <b>", good))
    for path in write_report(plan, outcomes, ["two"]):
        text = path.read_text()
        for part in ("12", "one/training.csv", "the last 6 steps", "NO-GO", "not carried out yet: two"):
            assert part in text, (path, part)
    assert "One &lt;b&gt;" in (plan.directory / "report.html").read_text()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "plan.json").unlink(), "holds no validation"),
        (lambda d: (d / "plan.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "plan.json").write_text("[1]"), "cannot be read: it must hold an object"),
        (lambda d: (d / "plan.json").write_text((d / "plan.json").read_text().replace('"processes"', '"p"')), "number"),
        (lambda d: (d / "plan.json").write_text('{"schema": 99, "preset": "quick"}'), "another version"),
        (lambda d: (d / "plan.json").write_text('{"schema": 1, "preset": "quick", "git": {}}'), "another revision"),
    ],
)
def test_what_is_no_validation_is_not_gone_on_with(plan, spoil, message):
    spoil(plan.directory)
    with pytest.raises(UserError, match=message):
        load_plan(plan.directory)


# ------------------------------------------------------------------------------------------- what phases read off runs


def record_of(plan, peaks, **fields):
    steps = [StepRow(i + 1, 2.0, 1e-3, 1.0, 100.0, 0.1, 1.0, peak) for i, peak in enumerate(peaks)]
    return RunRecord(plan.directory / "stability" / "runs" / "x", steps=steps, **fields)


@pytest.fixture
def work(plan):
    return PhaseRun(plan, PhaseOutcome("stability", "Stability", "passed"))


@pytest.mark.parametrize(
    ("peaks", "met"), [([100] * 4 + [101] * 4, True), ([100, 100, 100, 100, 110, 120, 130, 140], False)]
)
def test_memory_that_grows_to_the_end_is_found(plan, work, peaks, met):
    phases.judge_memory(work, record_of(plan, peaks), "runs/x")
    assert [criterion.met for criterion in work.outcome.criteria] == [met]


@pytest.mark.parametrize(("gates", "met"), [((0.5, 0.4, 0.6), True), ((0.5, 0.001, 0.6), False)])
def test_a_collapsed_gate_is_found(plan, work, gates, met, monkeypatch):
    layer = dict(zip(("gate_compressed", "gate_selected", "gate_window"), gates, strict=True)) | {"layer": 3}
    monkeypatch.setattr(phases, "latest_layers", lambda record: (8, [layer]))
    phases.judge_gates(work, record_of(plan, [1]), "runs/x")
    (criterion,) = work.outcome.criteria
    assert criterion.met is met
    assert met or "selected of layer 3" in criterion.measured


SUMMARY = {
    "flops_per_token": 1e6, "peak_flops": 2e8, "parameters": 1000, "run_dir": "",
    "matmul_rates": [{"peak": peak, "best": 1.6e8, "usual": 1.5e8, "threads": 2} for peak in (2e8, 1e8)],
}  # fmt: skip


def baseline_of(plan, monkeypatch, summary=SUMMARY, peaks=(1, 1)):
    """The baseline, its run made up: 100 tokens/s, which is half of the peak."""
    work = PhaseRun(plan, PhaseOutcome("baseline", "Baseline", "passed"))
    record = record_of(plan, peaks, summary={"best_unigram_loss": None})
    record.directory = work.folder / "runs" / "x"
    record.directory.mkdir(parents=True)
    (record.directory / "loss.png").write_bytes(b"a rising line")
    monkeypatch.setattr(work, "command", lambda *arguments: summary)
    monkeypatch.setattr(phases, "read_run", lambda directory: record)
    phases.baseline(work)
    return work.outcome


def test_a_share_of_the_peak_is_that_of_the_best_measurement(plan, monkeypatch):
    outcome = baseline_of(plan, monkeypatch)
    assert {f.name: f.value for f in outcome.figures}["MFU"] == "50.0% of 0 GFLOP/s"
    assert outcome.problems == []


@pytest.mark.parametrize("asked", [None, 0.4])
def test_nothing_is_concluded_from_an_impossible_share(plan, monkeypatch, asked):
    accept = plan.config.accept.model_copy(update={"mfu": asked})
    plan = dataclasses.replace(plan, config=plan.config.model_copy(update={"accept": accept}))
    outcome = baseline_of(plan, monkeypatch, {**SUMMARY, "peak_flops": 1e8 / 1.07})
    (problem,) = outcome.problems
    assert "MFU 107.0% is impossible" in problem
    assert [criterion.met for criterion in outcome.criteria] == [] if asked is None else [False]
    assert verdict([outcome])[0] == "NO-GO"
    assert "which is impossible" in {f.name: f.value for f in outcome.figures}["MFU"]


def test_a_busy_machine_is_noted(plan, monkeypatch):
    quick, _ = SUMMARY["matmul_rates"]
    outcome = baseline_of(plan, monkeypatch, {**SUMMARY, "matmul_rates": [quick, {**quick, "usual": 2e7}]})
    assert any("busy with something else" in note for note in outcome.notes)


def test_the_loss_on_random_bytes_is_shown_as_such(plan, monkeypatch):
    outcome = baseline_of(plan, monkeypatch)
    (note, *_) = outcome.notes
    assert "random bytes (data.name = uniform), not on data.name = shakespeare" in note
    assert "It is not judged here" in note
    # Not the run's own picture, which cannot say it: one with a title.
    (picture,) = [name for name in outcome.artifacts if name.endswith(".png")]
    assert picture == "baseline/loss_on_random_bytes.png"
    assert (plan.directory / picture).read_bytes() != b"a rising line"
    for path in write_report(plan, [outcome], []):
        assert path.read_text().count("the loss stays near ln 256 = 5.545 or rises") >= 2, path
    page = (plan.directory / "report.html").read_text()
    assert "<img" not in page
    assert "<title>optimizer step 2: training 2</title>" in page  # what a pointer shows


def test_the_loss_on_data_of_ones_own_is_judged(plan, work):
    fell, rose = ({"val_loss_start": 5.0, "val_loss_end": end} for end in (4.0, 5.1))
    phases.judge_loss(work, fell, "runs/x")
    phases.judge_loss(work, rose, "runs/x")
    assert [(c.rule, c.measured, c.met) for c in work.outcome.criteria] == [
        ("the held-out loss on data.name = shakespeare falls", "5.000 → 4.000", True),
        ("the held-out loss on data.name = shakespeare falls", "5.000 → 5.100", False),
    ]


def test_the_loss_on_noise_of_ones_own_is_not_judged(plan, work):
    config = plan.config.model_copy(
        update={
            "data": plan.config.data.model_copy(update={"name": "uniform"}),
            "accept": plan.config.accept.model_copy(update={"val_loss": 1.0}),
        }
    )
    work.plan = dataclasses.replace(plan, config=config)
    phases.judge_loss(work, {"val_loss_start": 5.55, "val_loss_end": 5.6}, "runs/x")
    assert work.outcome.criteria == []
    assert "accept.val_loss = 1.0 decides nothing" in work.outcome.notes[0]


@pytest.mark.parametrize(("efficiency", "met"), [(0.8, False), (0.95, True), (1.05, True), (1.5, False), (None, False)])
def test_more_than_all_of_the_throughput_alone_is_no_efficiency(plan, work, monkeypatch, efficiency, met):
    accept = plan.config.accept.model_copy(update={"scaling": 0.9})
    work.plan = dataclasses.replace(plan, config=plan.config.model_copy(update={"accept": accept}))
    monkeypatch.setattr(phases, "experiment", lambda *arguments: {"efficiency": {"nproc=2": efficiency}})
    phases.isolation(work)
    (criterion,) = work.outcome.criteria
    assert criterion.met is met
    assert ("which is impossible" in criterion.measured) == (efficiency == 1.5)


def test_only_buckets_that_differ_are_compared(plan):
    plan = dataclasses.replace(plan, processes=2, preset="full")
    assert "come to the same" in phases.needs_buckets(plan)
    model = dataclasses.replace(plan.config.model, dim=1024, n_layers=4)
    middle = dataclasses.replace(plan, config=plan.config.model_copy(update={"model": model}))
    assert phases.needs_buckets(middle) is None
    assert phases.different_buckets(middle) == [25, 50]


# ------------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "CONFIG is missing"),
        (["/nowhere.yaml"], "'/nowhere.yaml' does not exist"),
        (["--preset", "slow", "x.yaml"], "'slow' is not one of"),
        (["--resume", "/nowhere"], "holds no validation"),
        (["x.yaml", "--resume", "/nowhere"], "leave them out"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(["validate", *arguments])
    assert left.value.code == 2
    assert message in capsys.readouterr().err

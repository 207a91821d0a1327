"""Experiments as a user runs them: real runs, small ones, in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_compile.errors import UserError
from nsa_compile.experiments.experiment import (
    ab_plan,
    check_different,
    conclude,
    run_experiment,
    scaling_plan,
    sweep_plan,
)
from nsa_compile.experiments.runs import Failure, Results, RunResult, read_run, run_order
from nsa_compile.experiments.views import render_text, write_views
from nsa_compile.train.records.run_directory import lock_run_directory
from tests import processes

COMMAND = [sys.executable, "-m", "nsa_compile"]


def words(option: str, overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in (option, override)]


def results_of(plan, rates: dict[str, list[float]], failures=()) -> Results:
    """Results as runs would have left them."""
    summary = {"parameters": 1000, "mfu": 0.5}
    names = [arm.name for arm in plan.arms]
    runs = [
        RunResult(name, i, f"runs/{name}/{i}", rate, 1.0 + i, 26, 75, summary, 1)
        for name, values in rates.items()
        for i, rate in enumerate(values, start=1)
    ]
    return Results(runs, list(failures), run_order(names, max(map(len, rates.values())), 0))


# ---------------------------------------------------------------------------------------------------------- the plan


def test_every_round_has_every_arm_once_and_the_next_one_reverses_it():
    order = run_order(["A", "B", "C"], 4, seed=5)
    turns = [[arm for arm, repeat in order if repeat == i] for i in (1, 2, 3, 4)]
    assert all(sorted(turn) == ["A", "B", "C"] for turn in turns)
    assert turns[1] == turns[0][::-1]
    assert turns[3] == turns[2][::-1]
    assert order == run_order(["A", "B", "C"], 4, seed=5)
    assert len({tuple(run_order(["A", "B", "C"], 4, seed=i)) for i in range(10)}) > 1


def test_plans_differ_in_what_was_asked_for_and_nothing_else(tiny_overrides):
    base = tiny_overrides(**{"train.steps": 100, "optim.warmup": 90})
    plan = ab_plan(None, ["optim.fused=false", "train.dtype=bf16"], base, steps=20)
    a, b = (arm.config for arm in plan.arms)
    assert (a.train.steps, a.optim.warmup, a.train.save_every) == (20, 20, 2), "what the user sets stays"
    assert (a.optim.fused, a.train.dtype) == (True, "float32")
    assert b == a.model_copy(
        update={
            "optim": a.optim.model_copy(update={"fused": False}),
            "train": a.train.model_copy(update={"dtype": "bf16"}),
        }
    )
    sweep = sweep_plan(None, "ddp.bucket_mb", ["25", "50"], base)
    assert [(arm.nproc, arm.config.ddp.bucket_mb) for arm in sweep.arms] == [(2, 25), (2, 50)]
    for strong, batches in ((False, [2, 4]), (True, [2, 2])):
        scaling = scaling_plan(None, [2, 1], base, strong=strong)
        assert [(arm.nproc, arm.config.train.batch_size) for arm in scaling.arms] == list(
            zip([1, 2], batches, strict=True)
        )
        assert scaling.threads == int(os.environ["OMP_NUM_THREADS"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda base: ab_plan(None, [], base), "ab needs at least one --set KEY=VALUE"),
        (lambda base: ab_plan(None, ["optim.fused=true"], base), "--set optim.fused=true is what A has already"),
        (lambda base: ab_plan(None, ["optim.fuse=true"], base), "unknown configuration key 'optim.fuse'"),
        (lambda base: ab_plan(None, ["train.dtype=bf16"], base, steps=3), "train.steps = 3 must be at least 4"),
        (lambda base: sweep_plan(None, "ddp.bucket_mb", ["25"], base), "needs two or more different values"),
        (lambda base: sweep_plan(None, "ddp.bucket_mb", ["25", "25.0"], base), "needs two or more different values"),
        (lambda base: sweep_plan(None, "ddp.bucket_mb", ["25", "50"], base, nproc=1), "of no effect on one process"),
        (lambda base: sweep_plan(None, "ddp.bucket_mb", ["25", "0"], base), "ddp.bucket_mb = 0 is not allowed"),
        (lambda base: scaling_plan(None, [2, 2], base), "scaling needs two or more different numbers of processes"),
    ],
)
def test_a_wrong_plan_is_refused(make, message, tiny_overrides):
    with pytest.raises(UserError) as error:
        make(tiny_overrides())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda base: sweep_plan(None, "ddp.bucket_mb", ["25", "50"], base),
            "ddp.bucket_mb = 25 and ddp.bucket_mb = 50 are the same run here: the gradients of this model are sent in "
            "buckets of 1 MB with either",
        ),
        (
            lambda base: ab_plan(None, ["ddp.bucket_mb=50"], [*base, "ddp.strategy=fsdp"], nproc=2),
            "ddp.strategy = fsdp has no buckets",
        ),
        (lambda base: ab_plan(None, ["ddp.compress=none"], base), "of no effect on one process; use --nproc 2"),
        (
            lambda base: ab_plan(None, ["compile.nested=eager"], base),
            "compile.nested is of no effect with compile.enabled = false",
        ),
        (
            lambda base: sweep_plan(None, "optim.fused", ["true", "false"], [*base, "optim.name=adamw8bit"], nproc=1),
            "optim.name = adamw8bit has no fused form",
        ),
        (lambda base: ab_plan(None, ["run.name=other"], base), "run.name changes nothing of what is trained"),
    ],
)
def test_what_compares_a_setting_with_itself_is_refused(make, message, tiny_overrides):
    with pytest.raises(UserError) as error:
        check_different(make(tiny_overrides()).arms)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------------- conclusions


def test_verdicts_of_each_kind(tiny_overrides, tmp_path):
    slow, fast = [1000.0, 1010.0, 990.0, 1000.0, 1005.0], [1100.0, 1105.0, 1090.0, 1108.0, 1100.0]
    plan = ab_plan(None, ["train.dtype=bf16"], tiny_overrides())
    record = conclude(plan, results_of(plan, {"A": slow, "B": fast}), tmp_path, 5, 50, 0)
    assert "faster than A (95 % CI" in record["verdict"]
    assert record["notes"] == []

    plan = sweep_plan(None, "ddp.bucket_mb", ["25", "50", "100"], tiny_overrides())
    names = [arm.name for arm in plan.arms]
    record = conclude(plan, results_of(plan, dict(zip(names, (slow, fast, slow), strict=True))), tmp_path, 5, 50, 0)
    assert record["winner"] == record["leader"] == "ddp.bucket_mb=50"
    assert len(record["comparisons"]) == 2
    assert record["comparisons"][0]["significance"] == 0.025

    plan = scaling_plan(None, [1, 2], tiny_overrides())
    rates = {"nproc=1": slow, "nproc=2": [1.5 * rate for rate in slow]}
    record = conclude(plan, results_of(plan, rates), tmp_path, 5, 50, 0)
    assert record["efficiency"] == {"nproc=2": pytest.approx(0.75)}
    assert "nproc=2: efficiency 75.0% of nproc=1 per process" in record["verdict"]
    rates["nproc=2"] = [2.0 * rate * wobble for rate, wobble in zip(slow, (1.01, 0.99, 1, 0.98, 1.02), strict=True)]
    record = conclude(plan, results_of(plan, rates), tmp_path, 5, 50, 0)
    assert "no significant difference to linear scaling" in record["verdict"]


def test_a_sweep_of_buckets_records_what_they_come_to(tiny_overrides, tmp_path):
    plan = sweep_plan(None, "ddp.bucket_mb", ["1", "2", "100"], tiny_overrides(**{"model.dim": 512}))
    record = conclude(plan, Results(), tmp_path, 5, 50, 0)
    small, middle, large = (arm["sizes"]["bucket_mb"] for arm in record["arms"])
    assert (small, middle) == (1, 2)
    assert 2 < large < 100
    assert record["notes"] == [f"ddp.bucket_mb=100: gradients are sent in buckets of {large:.3g} MB, a quarter of them"]
    assert f"{large:.3g}" in render_text(record).splitlines()[4].split()
    alone = conclude(ab_plan(None, ["train.dtype=bf16"], tiny_overrides()), Results(), tmp_path, 5, 50, 0)
    assert alone["arms"][0]["sizes"]["bucket_mb"] is None


def test_the_table_fits_into_100_columns_and_says_what_b_is(tiny_overrides, tmp_path):
    plan = ab_plan(None, ["train.dtype=bf16", "optim.fused=false"], tiny_overrides())
    record = conclude(plan, results_of(plan, {"A": [1e9] * 4, "B": [9e8] * 4}), tmp_path, 4, 50, 0)
    table, same, _ = render_text(record).split("\n\n")
    assert max(map(len, table.splitlines())) <= 100
    assert max(map(len, same.splitlines())) <= 100
    assert "A: as configured" in table
    assert "B: train.dtype=bf16," in table
    assert "optim.fused=false" in table
    assert [name in table for name in ("dtype", "layers", "window")] == [True, False, False]
    assert "layers 1" in same


def test_doubts_of_runs_are_told(tiny_overrides, tmp_path):
    plan = ab_plan(None, ["train.dtype=bf16"], tiny_overrides())
    results = results_of(plan, {"A": [1000.0] * 4, "B": [900.0] * 4})
    results.runs[3] = dataclasses.replace(results.runs[3], summary={**results.runs[3].summary, "doubts": ["it rained"]})
    record = conclude(plan, results, tmp_path, 4, 50, 0)
    assert record["notes"] == ["1 of 8 runs are in doubt; the first: it rained"]


def test_only_rounds_that_all_arms_have_are_compared(tiny_overrides, tmp_path):
    plan = ab_plan(None, ["train.dtype=bf16"], tiny_overrides())
    failure = Failure("B", 3, 3, "log.txt", "error: <b>loss is not finite</b>")
    results = results_of(plan, {"A": [1000.0, 900.0, 950.0], "B": [1000.0, 900.0]}, [failure])
    record = conclude(plan, results, tmp_path, 3, 50, 0)
    assert record["comparisons"][0]["pairs"] == 2
    assert record["comparisons"][0]["ratio"] == pytest.approx(1)
    assert "too few" in record["verdict"]
    write_views(record, tmp_path)
    page = (tmp_path / "experiment.html").read_text()
    assert "&lt;b&gt;loss is not finite" in page
    empty = conclude(plan, Results(failures=[failure]), tmp_path, 3, 50, 0)
    assert empty["verdict"] == "no verdict: no finished run of A, B"
    assert "no verdict" in render_text(empty)
    assert [path.name for path in write_views(empty, tmp_path)] == ["experiment.html"]


# -------------------------------------------------------------------------------------------------------- real runs


def test_the_first_quarter_of_a_run_does_not_count(tmp_path):
    def write(steps: int) -> None:
        rows = [f"{i},5.0,0.001,1.0,{1.0 if i <= steps / 4 else 1000.0 + i % 2},0.5,0.1" for i in range(1, steps + 1)]
        header = "step,loss,lr,grad_norm,tokens_per_s,mfu,seconds"
        (tmp_path / "training.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")

    (tmp_path / "summary.json").write_text('{"parameters": 1000, "mfu": 0.5}')
    (tmp_path / "env.json").write_text('{"machine": {"torch_threads": 2}}')
    for steps, window in ((8, (3, 8)), (60, (16, 60)), (300, (251, 300))):
        write(steps)
        run = read_run("A", 1, tmp_path, 50)
        assert (run.first_step, run.last_step) == window
        assert run.tokens_per_s == pytest.approx(1000.5, abs=0.1)
        assert run.threads == 2
    (tmp_path / "training.csv").write_text("step\n")
    with pytest.raises(UserError, match="too few steps"):
        read_run("A", 1, tmp_path, 50)
    for name, content in (("env.json", '{"machine": 3}'), ("env.json", "[]"), ("summary.json", "{}")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=r"cannot be read: .*; delete it, and it is made again"):
            read_run("A", 1, tmp_path, 50)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An experiment of one round on the command line, from Python, and what was said."""
    from tests.conftest import TINY_RUN

    directory = tmp_path_factory.mktemp("experiment")
    base = [f"{key}={value}" for key, value in {**TINY_RUN, "run.dir": str(directory)}.items()]
    arguments = ["ab", *words("--base-set", base), "--set", "train.dtype=bf16", "--steps", "6", "--repeats", "1"]
    out = directory / "out"
    first = processes.run(*arguments, "--out", str(out), "--json")
    return base, arguments, out, first


@pytest.mark.deep
def test_an_experiment_leaves_a_record_a_picture_and_a_page(finished):
    *_, out, first = finished
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert record == json.loads((out / "experiment.json").read_text())
    assert record["schema"] == 1
    a, b = record["arms"]
    assert (a["sizes"]["dtype"], b["sizes"]["dtype"], b["overrides"]) == ("float32", "bf16", ["train.dtype=bf16"])
    assert a["sizes"] == b["sizes"] | {"dtype": "float32"}
    assert {
        "seq_len": 32,
        "batch_size": 2,
        "layers": 1,
        "num_selected": 3,
        "window": 8,
        "steps": 6,
        "threads": 1,
    }.items() <= a["sizes"].items()
    for arm in (a, b):
        (run,) = arm["runs"]
        assert Path(run["directory"], "training.csv").exists()
        assert (run["first_step"], run["last_step"]) == (3, 6)
        assert run["tokens_per_s"] == arm["tokens_per_s"] > 0
    assert "n = 1 is too few" in record["verdict"]
    assert any("the window is 4 steps, not 50" in note for note in record["notes"])
    assert (out / "experiment.png").read_bytes()[:4] == b"\x89PNG"
    page = (out / "experiment.html").read_text()
    assert record["verdict"] in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.deep
def test_what_is_finished_is_not_run_again_and_another_round_is_added(finished):
    _, arguments, out, first = finished
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/*/summary.json")}
    again = processes.run(*arguments[:-1], "2", "--out", str(out), "--json")
    assert again.returncode == 0, again.stderr
    record = json.loads(again.stdout)
    assert [len(arm["runs"]) for arm in record["arms"]] == [2, 2]
    after = {path: path.stat().st_mtime_ns for path in out.glob("*/*/*/summary.json")}
    assert len(before) == 2
    assert len(after) == 4
    assert before.items() <= after.items()
    assert record["arms"][0]["runs"][0] == json.loads(first.stdout)["arms"][0]["runs"][0]


@pytest.mark.deep
def test_a_directory_with_another_experiment_is_refused(finished):
    base, _, out, _ = finished
    other = processes.run("sweep", "optim.lr", "1e-3", "2e-3", "--nproc", "1", *words("--set", base), "--out", str(out))
    assert other.returncode == 2
    assert other.stderr.strip().count("\n") == 0
    assert "holds another experiment (ab: A, B); choose another place with --out DIR" in other.stderr


def test_two_do_not_work_on_one_experiment(tiny_overrides, tmp_path):
    plan = ab_plan(None, ["train.dtype=bf16"], tiny_overrides())
    with lock_run_directory(tmp_path), pytest.raises(UserError, match="another process is working on"):
        run_experiment(plan, tmp_path)


@pytest.mark.deep
def test_a_failing_run_is_named_with_what_it_said_last(tiny_overrides, tmp_path):
    """The loss of B is not finite from the start; A goes on."""
    base = words("--base-set", tiny_overrides(**{"optim.warmup": 0}))
    changes = words("--set", ["optim.lr=1e30", "optim.clip=null"])
    place = ("--out", str(tmp_path / "out"), "--json")
    result = processes.run("ab", *base, *changes, "--steps", "6", "--repeats", "2", *place)
    record, told = json.loads(result.stdout), result.stderr.splitlines()
    (failure,) = record["failures"]
    assert (failure["arm"], failure["exit_code"]) == ("B", 3)
    assert "loss = nan" in failure["last_line"]
    assert Path(failure["log"]).exists()
    assert any("B, repeat" in line and "failed with exit code 3" in line and "loss = nan" in line for line in told)
    assert [line for line in told if "left out" in line], "it is not tried again"
    assert [len(arm["runs"]) for arm in record["arms"]] == [2, 0]
    assert record["verdict"] == "no verdict: no finished run of B"


@pytest.mark.deep
def test_ctrl_c_leaves_what_is_finished_and_no_process(tiny_overrides, tmp_path):
    out = tmp_path / "out"
    base = tiny_overrides(**{"train.steps": 6, "train.log_every": 1})
    process = subprocess.Popen(
        [
            *COMMAND, "ab", *words("--base-set", base), "--set", "train.steps=100000", "--repeats", "1",
            "--out", str(out),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    # The long one is B; seed 0 has it second or first, so wait until it steps.
    log = out / "B" / "repeat-1" / "log.txt"
    while not (log.exists() and "step 2" in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert f"go on with the same command and --out {out}" in stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.deep
def test_several_processes_and_their_threads(tiny_overrides, tmp_path):
    result = processes.run(
        "scaling", "--nproc", "1", "2", *words("--set", tiny_overrides()), "--steps", "4", "--repeats", "1",
        "--out", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    sizes = [arm["sizes"] for arm in record["arms"]]
    assert [(size["processes"], size["batch_size"], size["threads"]) for size in sizes] == [(1, 2, 1), (2, 4, 1)]
    assert "weak scaling: 2 sequences a process, 1 threads each" in record["notes"]
    one, two = (arm["tokens_per_s"] for arm in record["arms"])
    assert record["efficiency"]["nproc=2"] == pytest.approx(two / one / 2)


@pytest.mark.deep(but=["arguments6---repeats"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ab"], "ab needs at least one --set KEY=VALUE"),
        (
            ["sweep", "buckets", "25", "50", "--nproc", "3"],
            "train.batch_size = 4 must be a multiple of the 3",
        ),
        (["sweep", "bucket", "25", "50"], "unknown configuration key 'bucket'"),
        (["sweep", "buckets", "25", "50", "100"], "ddp.bucket_mb = 25 and ddp.bucket_mb = 50 are the same run here"),
        (["scaling", "--nproc", "2"], "scaling needs two or more different numbers"),
        (["ab", "--set", "data.name=nowhere.txt"], "nowhere.txt"),
        (["ab", "--set", "optim.fused=false", "--repeats", "0"], "--repeats"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(arguments, message, tmp_path):
    result = processes.run(*arguments, "--out", str(tmp_path / "out"))
    assert result.returncode == 2
    assert result.stderr.strip().count("\n") == 0, result.stderr
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_result_is_plain_data(tiny_overrides, tmp_path):
    plan = ab_plan(None, ["train.dtype=bf16"], tiny_overrides())
    results = results_of(plan, {"A": [1000.0] * 4, "B": [1010.0, 1000.0, 1020.0, 1005.0]})
    record = conclude(plan, results, tmp_path, 4, 50, 0)
    assert json.loads(json.dumps(record)) == record
    assert dataclasses.is_dataclass(plan)

"""What a run must survive, or end by in a way that can be understood: faults planted in real processes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nsa_compile.config import load_config
from nsa_compile.launch import launcher
from tests import processes
from tests.conftest import TINY_RUN, cold_cache, with_fault

LONG = {"train.steps": 10, "train.save_every": 2, "train.eval_every": 5, "train.log_every": 1, "train.keep_last": 9}
# Stalls are found within seconds instead of minutes; a busy machine may hold up a healthy rank for some.
ALERT = {
    "watchdog.interval_s": 0.5,
    "watchdog.stall_s": 8.0,
    "watchdog.stall_factor": 3.0,
    "watchdog.pause_s": 60.0,
    "watchdog.silent_s": 20.0,
}


def start(overrides, *arguments, fault=None, once=None, **variables):
    """Start ``nsa-compile train --nproc 2`` with a fault planted in it, and variables in its environment."""
    environment = dict(os.environ) if fault is None else with_fault(fault, once)
    words = ("train", "--json", "--nproc", "2", *processes.sets(overrides), *arguments)
    return processes.Command(*words, env={**environment, **variables})


def finish(process, timeout=240):
    stdout, stderr = process.communicate(timeout=timeout)
    return process.returncode, stdout, stderr


def losses(directory):
    with (Path(directory) / "training.csv").open(encoding="utf-8") as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of a run on two processes that nothing happens to."""
    values = {**TINY_RUN, **LONG, "run.dir": str(tmp_path_factory.mktemp("undisturbed"))}
    code, stdout, stderr = finish(start([f"{key}={value}" for key, value in values.items()]))
    assert code == 0, stderr
    assert "watchdog" not in stderr
    return losses(json.loads(stdout)["run_dir"])


@pytest.mark.deep(but=["1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_replaced_and_the_losses_are_the_same(tiny_overrides, tmp_path, undisturbed, rank):
    process = start(tiny_overrides(**LONG), fault=f"kill@{rank}:8", once=tmp_path / "once")
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    assert not (tmp_path / "once").exists()
    assert f"rank {rank} was killed by SIGKILL" in stderr
    assert "(restart 1 of 3)" in stderr
    assert "Traceback" not in stderr
    summary = json.loads(stdout)
    assert summary["resumed_from"] is not None
    assert losses(summary["run_dir"]) == undisturbed


@pytest.mark.deep
def test_a_rank_that_hangs_is_named_and_the_run_goes_on(tiny_overrides, tmp_path, undisturbed):
    overrides = tiny_overrides(**LONG, **ALERT, **{"watchdog.on_stalled": "restart"})
    code, stdout, stderr = finish(start(overrides, fault="hook@1:8", once=tmp_path / "once"))
    assert code == 0, stderr
    (finding,) = [line for line in stderr.splitlines() if line.startswith("watchdog:")]
    assert "rank 1" in finding.split(";")[0]
    directory = Path(json.loads(stdout)["run_dir"])
    assert losses(directory) == undisturbed
    # Its stack names the line it hung in.
    assert "hang" in (directory / "stacks_rank1.txt").read_text(encoding="utf-8")


@pytest.mark.deep
def test_a_single_process_is_started_again_if_the_watchdog_is_to_restart_it(tiny_overrides, tmp_path):
    overrides = tiny_overrides(**LONG, **ALERT, **{"watchdog.on_stalled": "restart"})
    process = start(overrides, "--nproc", "1", fault="stall@0:8", once=tmp_path / "once")
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    assert "rank 0 was killed by SIGKILL; starting again (restart 1 of 3)" in stderr
    summary = json.loads(stdout)
    assert (summary["processes"], summary["steps"]) == (1, 10)
    assert summary["resumed_from"] in (4, 6)


@pytest.mark.deep
def test_a_loader_that_stalls_is_named_with_its_phase(tiny_overrides, tmp_path, undisturbed):
    overrides = tiny_overrides(**LONG, **ALERT, **{"watchdog.on_stalled": "restart"})
    code, stdout, stderr = finish(start(overrides, fault="stall@1:8", once=tmp_path / "once"))
    assert code == 0, stderr
    (finding,) = [line for line in stderr.splitlines() if line.startswith("watchdog:")]
    assert "rank 1" in finding
    assert "data" in finding
    assert losses(json.loads(stdout)["run_dir"]) == undisturbed


@pytest.mark.deep
def test_a_loss_that_is_not_finite_on_one_rank_ends_all(tiny_overrides, tmp_path):
    code, _, stderr = finish(start(tiny_overrides(**LONG), fault="nan@1:4", once=tmp_path / "once"))
    assert code == 3
    (error,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    # Rank 0 says it, and rank 1 is named.
    assert error.startswith("error: loss = nan and gradient norm = nan of rank 1 at step 4 must be finite")
    (directory,) = (tmp_path / "runs").iterdir()
    rows = sorted(map(json.loads, (directory / "nonfinite.jsonl").read_text().splitlines()), key=lambda r: r["rank"])
    assert [(row["step"], row["loss"] == "nan") for row in rows] == [(4, False), (4, True)]
    assert [len(row["sequences"]) for row in rows] == [1, 1]


@pytest.mark.deep
def test_who_is_slow_to_leave_still_says_why(tiny_overrides, tmp_path):
    """The first to be gone makes the agent end the others."""
    code, _, stderr = finish(start(tiny_overrides(**LONG), fault="nan@1:4", once=tmp_path / "once", LINGER="0"))
    assert code == 3
    assert len([line for line in stderr.splitlines() if line.startswith("error: loss = nan")]) == 1


def test_steps_that_are_not_finite_are_skipped_by_all(tiny_overrides, tmp_path, undisturbed):
    overrides = tiny_overrides(**LONG, **{"train.on_nonfinite": "skip"})
    code, stdout, stderr = finish(start(overrides, fault="nan@1:4", once=tmp_path / "once"))
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert summary["skipped_steps"] == 1
    found = losses(summary["run_dir"])
    assert found[:3] == undisturbed[:3]
    assert found[3] == ("4", "nan")
    assert all(loss != "nan" for _, loss in found[4:])


@pytest.mark.deep
@pytest.mark.parametrize("slow", ["0", "1"])
def test_a_mistake_in_the_code_is_not_tried_again(tiny_overrides, tmp_path, slow):
    """Whoever is slow to leave is ended by the agent with SIGTERM: the run was not asked to stop."""
    code, _, stderr = finish(start(tiny_overrides(**LONG), fault="crash@0:1", once=tmp_path / "once", LINGER=slow))
    assert code == 1, stderr
    assert "ValueError: a planted fault" in stderr
    assert "before the first step; it is not started again" in stderr


@pytest.mark.deep
def test_sigterm_saves_and_leaves_with_75(tiny_overrides, tmp_path):
    process = start(tiny_overrides(**{**LONG, "train.steps": 500, "train.save_every": 0}))
    for line in process.stderr:
        if line.startswith("step 3:"):
            break
    process.send_signal(signal.SIGTERM)
    code, stdout, stderr = finish(process)
    assert code == 75, stderr
    summary = json.loads(stdout)
    (checkpoint,) = (Path(summary["run_dir"]) / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{summary['steps']:08d}"


@pytest.mark.deep
def test_no_process_outlives_a_killed_launcher(tiny_overrides):
    """Of processes that Python really started."""
    words = ["train", "--nproc", "2", *processes.sets(tiny_overrides(**{**LONG, "train.steps": 500}))]
    process = subprocess.Popen(
        [sys.executable, "-m", "nsa_compile", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("step 2:"):
            break
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    process.stdout.close()
    process.stderr.close()


def test_a_file_halt_stops_all_and_not_the_next_run(tiny_overrides, tmp_path):
    overrides = tiny_overrides(**{**LONG, "train.steps": 500})
    process = start(overrides)
    for line in process.stderr:
        if line.startswith("step 2:"):
            break
    (directory,) = (tmp_path / "runs").iterdir()
    (directory / ".HALT").write_text("enough\n")
    code, _, stderr = finish(process)
    assert code == 4
    (error,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert "was halted after step" in error
    assert "enough" in error
    saved = sorted((directory / "checkpoints").iterdir())[-1]
    steps = int(saved.name.removeprefix("step-"))
    code, stdout, stderr = finish(start([*overrides, f"train.steps={steps + 1}"], "--resume", "auto"))
    assert code == 0, stderr
    assert json.loads(stdout)["resumed_from"] == steps


@pytest.mark.deep
@pytest.mark.parametrize(("size", "save_every"), [("700k", 1), ("48k", 0)], ids=["checkpoints", "rows"])
def test_a_full_disk_ends_all_with_5(tiny_overrides, tmp_path, size, save_every):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount a file system")
    try:
        changes = {**LONG, "train.save_every": save_every, "train.steps": 100, "run.dir": str(small)}
        overrides = tiny_overrides(**changes)
        code, _, stderr = finish(start(overrides))
        assert code == 5, stderr
        (error,) = [line for line in stderr.splitlines() if line.startswith("error:")]
        assert "No space left on device" in error
        assert "Traceback" not in stderr
    finally:
        time.sleep(0.2)
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.deep
def test_a_corrupt_compile_cache_is_not_trusted(tiny_overrides, tmp_path):
    cache = cold_cache(tmp_path / "cache")
    options = {"compile.enabled": "true", "compile.nested": "aot_eager", "train.steps": 2, "train.sample_tokens": 0}
    options |= {"model.branches": "[window]"}
    overrides = tiny_overrides(**options)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    first = processes.train(overrides, env=environment)
    assert first.returncode == 0, first.stderr
    files = {path for path in cache.rglob("*") if path.is_file()}
    windows = {*cache.rglob("window-*.so")}  # of other revisions, too, where tests have run before
    others = {path for window in windows for path in window.parent.iterdir()} - windows  # that take long to compile
    assert windows
    assert files > others
    for path in files - others:
        path.write_bytes(b"\0" * path.stat().st_size)
    second = processes.train(overrides, env=environment)
    assert second.returncode == 0, second.stderr
    assert losses(json.loads(first.stdout)["run_dir"]) == losses(json.loads(second.stdout)["run_dir"])


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: 75, 1: 75}, 75),  # one of them was asked, and they agreed
        ({0: 76, 1: 75}, 75),  # one of them was asked before the first step
        ({0: 1, 1: 75}, 1),  # the agent ended the other
        ({0: 75, 1: 3}, 3),
    ],
)
def test_what_the_agent_ended_is_not_why_the_run_ended(tiny_overrides, tmp_path, monkeypatch, codes, expected):
    overrides = [*tiny_overrides(**LONG), "watchdog.enabled=false"]
    monkeypatch.setattr(launcher, "run_processes", lambda config, nproc, command: codes)
    assert launcher.launch(load_config(None, overrides), tmp_path, 2, ()) == expected

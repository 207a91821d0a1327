"""Signals and readers that are lost: the run saves and leaves with the documented exit code, or goes on."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_compile.train.checkpoints.files import checkpoint_paths, verify_checkpoint
from tests.conftest import with_fault
from tests.processes import Command, run, sets

NOTHING_TO_SAVE = "stopped before the first step: there is nothing to save"
LONG = {"train.steps": 400, "train.save_every": 0, "train.eval_every": 400, "train.log_every": 1}


def begin(overrides, *arguments, **options):
    return Command("train", *sets(overrides), *arguments, **options)


@pytest.mark.deep
def test_a_terminal_that_is_closed_is_a_reason_to_save(tiny_overrides, tmp_path):
    environment = with_fault("hup@0:3", tmp_path / "once")
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where the tests are under nohup
    process = begin(tiny_overrides(**LONG), "--json", env=environment, first=heard)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 75, stderr
    summary = json.loads(stdout)
    assert (summary["stopped_by"], summary["steps"]) == ("SIGHUP", 3)
    verify_checkpoint(Path(summary["run_dir"]) / "checkpoints" / "step-00000003")


@pytest.mark.deep
def test_under_nohup_the_terminal_may_go(tiny_overrides, tmp_path):
    environment = with_fault("hup@0:1", tmp_path / "once")
    ignored = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = begin(tiny_overrides(**{"train.steps": 2}), env=environment, first=ignored)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert not (tmp_path / "once").exists()


def test_sigterm_before_the_first_step_leaves_with_75_and_nothing_half_done(tiny_overrides, tmp_path):
    command = [sys.executable, "-m", "nsa_compile", "train", *sets(tiny_overrides(**LONG))]
    environment = with_fault("early@0:1", tmp_path / "once")
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert result.returncode == 75, result.stderr
    assert result.stderr == f"{NOTHING_TO_SAVE}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.deep
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_run_that_compiles_leaves_at_once(tiny_overrides, tmp_path, signum, code, nproc):
    process = begin(tiny_overrides(**LONG, **{"compile.enabled": "true"}), "--nproc", nproc)
    for line in process.stderr:
        if line == "compiling; the first batches take longer\n":
            break
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=240)
    assert (process.returncode, stdout) == (code, ""), stderr
    assert [line for line in stderr.splitlines() if "[ddp]" not in line] == [NOTHING_TO_SAVE]
    (directory,) = (tmp_path / "runs").iterdir()
    for rank in range(int(nproc)):
        rows = [json.loads(row) for row in (directory / f"heartbeat_rank{rank}.jsonl").read_text().splitlines()]
        assert {row["kind"] for row in rows} <= {"start", "beat", "end"}
    if nproc == "1":  # several have met in a collective that the first to leave has ended
        assert rows[-1]["kind"] == "end"
    assert not checkpoint_paths(directory / "checkpoints")


def test_the_first_step_is_not_waited_for(tiny_overrides, tmp_path):
    result = run("train", *sets(tiny_overrides(**LONG)), env=with_fault("term@0:1", tmp_path / "once"))
    assert result.returncode == 75, result.stderr
    assert result.stderr.splitlines()[-1] == NOTHING_TO_SAVE
    assert "step 1:" not in result.stderr


def test_a_resumed_run_that_leaves_at_once_can_be_resumed_again(tiny_overrides, tmp_path):
    words = ["train", "--json", "--resume", "auto", *sets(tiny_overrides(**LONG))]
    ends = [run(*words, env=with_fault(f"term@0:{count}", tmp_path / "once")) for count in (3, 1, 2)]
    assert [end.returncode for end in ends] == [75, 75, 75]
    assert (ends[1].stdout, ends[1].stderr.splitlines()[-1]) == ("", NOTHING_TO_SAVE)
    last = json.loads(ends[2].stdout)
    assert (last["resumed_from"], last["steps"]) == (3, 5)


@pytest.mark.deep
def test_a_run_outlives_the_readers_of_its_output(tiny_overrides, tmp_path):
    process = begin(tiny_overrides(**{**LONG, "train.steps": 4}))
    process.stdout.close()
    assert process.stderr.readline()  # as head -1 does
    process.stderr.close()
    assert process.wait(240) == 0
    (directory,) = (tmp_path / "runs").iterdir()
    assert json.loads((directory / "summary.json").read_text())["steps"] == 4
    assert [path.name for path in checkpoint_paths(directory / "checkpoints")] == ["step-00000004"]


@pytest.mark.deep
def test_sigusr1_to_the_launcher_writes_the_stacks_of_all_and_the_run_goes_on(tiny_overrides, tmp_path):
    process = begin(tiny_overrides(**LONG), "--json", "--nproc", "2")
    asked, lines = 0, []
    for line in process.stderr:
        lines.append(line)
        if asked == 0:
            process.send_signal(signal.SIGUSR1)
            asked = 1
        if line.startswith("step 5:"):
            break
    (directory,) = (tmp_path / "runs").iterdir()
    stacks = [directory / f"stacks_rank{rank}.txt" for rank in range(2)]
    process.send_signal(signal.SIGUSR1)
    for line in process.stderr:
        lines.append(line)
        if all("Current thread" in path.read_text() for path in stacks):
            break
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 75, lines
    assert stderr.count("stopping after this step") == 1  # not by each process
    assert json.loads(stdout)["stopped_by"] == "SIGTERM"
    # What DDP really sends gradients in is on record: a quarter of a model this small is less than the 1 MB it takes.
    assert any("in buckets of 1 MB instead of ddp.bucket_mb = 25" in line for line in lines)
    assert json.loads((directory / "env.json").read_text())["ddp_bucket_mb"] == 1.0
    assert json.loads((directory / "summary.json").read_text())["bucket_mb"] == 1.0
    assert os.listdir(directory / "checkpoints")


INTERRUPTED = """
import io, os, signal, sys
from nsa_compile.train.signals import stop_on_signals

class Slow(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        os.kill(os.getpid(), signal.SIGTERM)  # while Python is within a write to the same stream
        return os.write(2, data)

with stop_on_signals() as stop:
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(Slow()), line_buffering=True)
    print("a line", file=sys.stderr)
    assert stop.signal == "SIGTERM"
"""


def test_a_signal_may_come_while_a_line_is_written():
    result = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[:2] == ["stopping after this step; Ctrl-C (again) to stop at once", "a line"]


LEAVING = """
import os, signal
from nsa_compile.train.signals import leave_on_signals, stop_on_signals

with leave_on_signals():
    with stop_on_signals() as stop:
        stop.leaving = True
    os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)  # while the interpreter is taken down
raise SystemExit(75)
"""


def test_a_process_that_leaves_is_not_killed_by_who_ends_the_others():
    result = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (75, "")

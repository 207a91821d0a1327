"""Runs on a stream of documents: interrupted, on other numbers of processes, and on streams that fail."""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from nsa_compile.train.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from nsa_compile.train.checkpoints.files import checkpoint_paths
from tests.conftest import TINY_RUN, with_fault
from tests.processes import train
from tests.train.checkpoints.test_resume import assert_equal_runs, column
from tests.train.faults import faulty_stream

pytest.importorskip("datasets")

LONG = {"train.steps": 10, "train.save_every": 3, "train.eval_every": 5, "train.log_every": 1, "train.keep_last": 9}
LONG |= {"ddp.compress": "none"}
PER_FILE = 700


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A directory of JSON lines: texts of very different lengths, some empty."""
    generator = random.Random(1)
    directory = tmp_path_factory.mktemp("documents")
    for number in range(3):
        lengths = [min(int(generator.expovariate(1 / 30)), 300) for _ in range(PER_FILE)]
        lines = [json.dumps({"text": "".join(generator.choices("etaoin shrdlu", k=length))}) for length in lengths]
        (directory / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


@pytest.fixture
def overrides(tiny_overrides, documents):
    def make(**changes):
        return tiny_overrides(**{**LONG, "data.name": documents, "data.stream": "true", **changes})

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, documents):
    """The directory of a finished run."""
    values = {**TINY_RUN, **LONG, "data.name": documents, "data.stream": "true"}
    values["run.dir"] = tmp_path_factory.mktemp("undisturbed")
    result = train([f"{key}={value}" for key, value in values.items()])
    assert result.returncode == 0, result.stderr
    return Path(json.loads(result.stdout)["run_dir"])


def interrupted(undisturbed, runs, step):
    """A copy of the run, as if it had been killed after the checkpoint of `step`."""
    copy = Path(shutil.copytree(undisturbed, runs / undisturbed.name))
    forget_after(copy, step)
    return copy


def forget_after(run, step):
    for path in checkpoint_paths(run / "checkpoints"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def faulty(fault, place, overrides, *arguments):
    program = functools.partial(faulty_stream.main, fault, place)
    return train(overrides, *arguments, program=program)


@pytest.mark.deep
def test_a_killed_run_goes_on_bit_for_bit_through_a_failure_of_the_stream(overrides, undisturbed, tmp_path):
    result = train(overrides(), env=with_fault("kill@0:7", tmp_path / "once"))
    assert result.returncode == -signal.SIGKILL
    forget_after(next((tmp_path / "runs").iterdir()), 3)
    result = faulty("fail", 400, overrides(), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert "failed (ConnectionError: a planted fault): trying again in 1 s" in result.stderr
    assert json.loads(result.stdout)["resumed_from"] == 3
    (directory,) = (tmp_path / "runs").iterdir()
    assert_equal_runs(directory, undisturbed)


@pytest.mark.deep
def test_a_run_goes_on_with_the_same_batches_on_two_processes_and_back_on_one(overrides, undisturbed, tmp_path):
    directory = interrupted(undisturbed, tmp_path / "runs", 3)
    expected = column(undisturbed / "training.csv", "loss")
    for step, processes in ((3, 2), (6, 1)):
        forget_after(directory, step)
        result = train(overrides(), "--resume", "auto", "--nproc", str(processes))
        assert result.returncode == 0, result.stderr
        summary = json.loads(result.stdout)
        assert (summary["resumed_from"], summary["processes"]) == (step, processes)
        found = column(directory / "training.csv", "loss")
        assert [row[0] for row in found] == [row[0] for row in expected]
        # Sums over two processes are rounded elsewhere; another sequence changes a loss by more than 0.01.
        np.testing.assert_allclose([float(row[1]) for row in found], [float(row[1]) for row in expected], atol=1e-4)


@pytest.mark.deep(but=["down-60.0-after 3 tries (document 690 of file 1"])
@pytest.mark.parametrize(
    ("fault", "timeout", "expected"),
    [
        ("stall", 8.0, "no document within data.timeout_s = 8 s"),
        # Importing the package counts as well, and takes seconds on a busy machine.
        ("down", 60.0, "after 3 tries (document 690 of file 1"),
    ],
)
def test_a_stream_that_breaks_off_ends_the_run_in_one_line(overrides, fault, timeout, expected):
    # Batches are larger, so that the second file is soon used up.
    result = faulty(fault, 690, overrides(**{"data.timeout_s": timeout, "train.batch_size": 32, "train.steps": 40}))
    assert result.returncode == 2
    assert result.stdout == ""
    assert expected in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.deep
def test_a_stream_that_ends_ends_the_run_in_one_line(overrides):
    result = train(overrides(**{"train.batch_size": 32, "train.steps": 60}))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: the stream of documents ended at sequence")


@pytest.mark.deep
def test_a_place_that_somebody_changed_is_refused(overrides, undisturbed, tmp_path):
    directory = interrupted(undisturbed, tmp_path / "runs", 3)
    path = directory / "checkpoints" / "step-00000003"
    states = load_checkpoint(path)
    states["rank-00000.pt"]["source"]["loads"][1] = -1
    shutil.rmtree(path)
    save_checkpoint(path.parent, 3, states)
    result = train(overrides(), "--resume", "auto")
    assert result.returncode == 5
    assert result.stderr.startswith(f"error: checkpoint '{path}' cannot be used: ")
    assert "loads.1: Input should be greater than or equal to 0" in result.stderr
    assert result.stderr.count("\n") == 1

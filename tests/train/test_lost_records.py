"""A run whose directory is deleted or moved, or comes from elsewhere with links in it, and held-out losses of NaN."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.errors import CheckpointError, TrainingDiverged
from nsa_compile.launch.start import open_run
from nsa_compile.train import loop
from nsa_compile.train.checkpoints.files import checkpoint_paths, read_checkpoint
from nsa_compile.train.checkpoints.resume import find_run
from nsa_compile.train.records.run_directory import create_run_directory

STEPS = {"train.steps": 6, "train.save_every": 2, "train.eval_every": 2, "train.keep_last": 9}


def started(config):
    directory = create_run_directory(config)
    return loop.run(config, load_corpus(config), directory), directory


def at_step(monkeypatch, step, act):
    """Call `act` within the step of this number."""
    whole, seen = loop.train_step, []

    def train_step(*arguments, **options):
        seen.append(None)
        if len(seen) == step:
            act()
        return whole(*arguments, **options)

    monkeypatch.setattr(loop, "train_step", train_step)


def the_run(config):
    (directory,) = Path(config.run.dir).iterdir()
    return directory


def delete(directory):
    # In one piece: a checkpoint may be written there at this moment.
    doomed = directory.parent.parent / "doomed"
    directory.rename(doomed)
    shutil.rmtree(doomed)


def move(directory):
    directory.rename(directory.with_name("moved"))


def replace_by_another(directory):
    delete(directory)
    directory.mkdir()


@pytest.mark.deep(but=["in the last step-replace_by_another-was deleted while the run was at work"])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (delete, "was deleted while the run was at work: its records and checkpoints are lost"),
        (move, "was moved to '.*moved' while the run was at work: what came after its last checkpoint is lost"),
        (replace_by_another, "was deleted while the run was at work"),
    ],
)
@pytest.mark.parametrize("step", [5, 6], ids=["on the way", "in the last step"])
def test_a_directory_that_is_lost_ends_the_run(tiny_overrides, monkeypatch, act, said, step):
    config = load_config(overrides=tiny_overrides(**STEPS))
    at_step(monkeypatch, step, lambda: act(the_run(config)))
    with pytest.raises(CheckpointError, match=f"run directory '.*' {said}") as error:
        started(config)
    assert "\n" not in str(error.value)
    left = {path.name: os.listdir(path) for path in Path(config.run.dir).iterdir()}
    if act is move:
        # Whole as far as it went, and nothing has grown under the old name.
        assert list(left) == ["moved"]
        assert checkpoint_paths(Path(config.run.dir, "moved", "checkpoints"))[0].name == "step-00000002"
    elif act is delete:
        assert not left


@pytest.mark.deep(but=["checkpoints"])
@pytest.mark.parametrize("name", ["training.csv", "val.csv", "attention.jsonl", "checkpoints"])
def test_a_part_of_the_directory_that_is_lost_is_named_and_the_weights_are_saved(tiny_overrides, monkeypatch, name):
    config = load_config(overrides=tiny_overrides(**STEPS))

    def remove():
        path = the_run(config) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    at_step(monkeypatch, 3, remove)
    with pytest.raises(CheckpointError, match=rf"'.*{name}' was deleted while the run was at work"):
        started(config)
    assert checkpoint_paths(the_run(config) / "checkpoints")[-1].name == "step-00000003"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two steps and its configuration."""
    from tests.conftest import TINY_RUN

    values = {**TINY_RUN, "train.steps": 2, "run.dir": str(tmp_path_factory.mktemp("whole"))}
    config = load_config(overrides=[f"{key}={value}" for key, value in values.items()])
    return config, started(config)[1]


# Everything a run leaves, the names it writes under first, and what it does not know.
NAMES = [
    *("training.csv", ".training.csv", "val.csv", ".val.csv", "attention.jsonl", ".attention.jsonl"),
    *("config.resolved.yaml", "env.json", "env.from-step-2.json", "git_sha.txt", "passes.json", "summary.json"),
    *("loss.png", "sample.txt", "heartbeat_rank0.jsonl", "stacks_rank0.txt", "watchdog.jsonl", "nonfinite.jsonl"),
    *(".HALT", "tensorboard", "checkpoints", "checkpoints/step-00000002", "checkpoints/step-00000099", "anything"),
]


@pytest.mark.deep(every=6)
@pytest.mark.parametrize("name", NAMES)
def test_a_directory_from_elsewhere_with_a_link_in_it_is_refused_by_name(whole, tmp_path, name):
    config, directory = whole
    copy = Path(shutil.copytree(directory, tmp_path / directory.name))
    victim = tmp_path / "victim"
    if (copy / name).is_dir():
        (copy / name).rename(victim)
    else:
        (copy / name).unlink(missing_ok=True)
        victim.write_text("of somebody else\n")
    (copy / name).symlink_to(victim)
    with pytest.raises(CheckpointError, match="it is a symbolic link, which is not followed") as error:
        find_run(config, str(copy))
    assert f"{name}'" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [".training.csv", ".val.csv", ".attention.jsonl", "stacks_rank0.txt", "loss.png"])
def test_a_pipe_in_a_directory_from_elsewhere_is_not_waited_for(whole, tmp_path, name):
    config, directory = whole
    copy = Path(shutil.copytree(directory, tmp_path / directory.name))
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    if name == "loss.png":  # which is drawn elsewhere and put in its place
        with open_run(config, find_run(config, str(copy))) as start:
            loop.run(config, load_corpus(config), copy, start.checkpoint)
        assert (copy / name).is_file()
        return
    with (
        pytest.raises(CheckpointError, match=f"{name}' cannot be written: it is not a regular file"),
        open_run(config, find_run(config, str(copy))) as start,
    ):
        loop.run(config, load_corpus(config), copy, start.checkpoint)


def nan_at(monkeypatch, steps):
    """Let the held-out loss be NaN at the evaluations of these numbers, the first being 1."""
    whole, seen = loop.evaluate_answers, []

    def evaluate(*arguments):
        seen.append(None)
        loss, accuracy = whole(*arguments)
        return (math.nan if len(seen) in steps else loss), accuracy

    monkeypatch.setattr(loop, "evaluate_answers", evaluate)


def test_a_held_out_loss_that_is_not_finite_ends_the_run_as_a_divergence(tiny_overrides, monkeypatch):
    config = load_config(overrides=tiny_overrides(**STEPS))
    nan_at(monkeypatch, {3})
    with pytest.raises(TrainingDiverged, match="validation loss = nan of rank 0 at step 4 must be finite") as error:
        started(config)
    assert error.value.exit_code == 3
    directory = the_run(config)
    assert [read_checkpoint(path).step for path in checkpoint_paths(directory / "checkpoints")] == [2]
    assert json.loads((directory / "nonfinite.jsonl").read_text()) == {"step": 4, "rank": 0, "val_loss": "nan"}


@pytest.mark.deep
def test_held_out_losses_that_are_not_finite_are_skipped_up_to_the_limit(tiny_overrides, monkeypatch):
    config = load_config(overrides=tiny_overrides(**STEPS, **{"train.on_nonfinite": "skip", "train.max_skipped": 2}))
    nan_at(monkeypatch, {2, 4})
    summary, directory = started(config)
    json.loads(json.dumps(summary), parse_constant=pytest.fail)
    assert (summary["val_loss_end"], summary["skipped_steps"]) == (None, 0)
    with (directory / "val.csv").open() as file:
        assert [row["val_loss"] == "nan" for row in csv.DictReader(file)] == [False, True, False, True]
    losses = [read_checkpoint(path).val_loss for path in checkpoint_paths(directory / "checkpoints")]
    assert [loss is None for loss in losses] == [True, False, True]
    shutil.rmtree(config.run.dir)
    nan_at(monkeypatch, {1, 2, 3})
    with pytest.raises(TrainingDiverged, match="at step 4 must be finite, and so were not the 2 before"):
        started(config)

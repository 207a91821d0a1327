"""Resuming: a run that was killed and went on equals one that was not, bit for bit."""

from __future__ import annotations

import copy
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_compile.config import flatten, load_config
from nsa_compile.data import BatchSampler
from nsa_compile.data.sampling import UniformBytes
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.models import NSATransformer
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from nsa_compile.train.checkpoints.files import checkpoint_paths, verify_checkpoint
from nsa_compile.train.checkpoints.resume import find_run, first_difference, newest_good_checkpoint
from nsa_compile.train.nonfinite import NonFinitePolicy
from nsa_compile.train.optim import make_optimizer
from nsa_compile.train.records.jsonl import JsonlReader
from nsa_compile.train.records.run_directory import lock_run_directory
from nsa_compile.train.state import TrainingState
from nsa_compile.train.watch.heartbeat import heartbeat_path
from tests import processes
from tests.conftest import TINY_RUN, with_fault
from tests.processes import train

LONG = {"train.steps": 14, "train.save_every": 3, "train.eval_every": 4, "train.log_every": 99, "train.keep_last": 9}


def column(path, name):
    with path.open(encoding="utf-8") as file:
        return [(row["step"], row[name]) for row in csv.DictReader(file)]


def assert_equal_runs(one: Path, other: Path):
    assert column(one / "training.csv", "loss") == column(other / "training.csv", "loss")
    assert column(one / "training.csv", "lr") == column(other / "training.csv", "lr")
    assert column(one / "val.csv", "val_loss") == column(other / "val.csv", "val_loss")
    states = [load_checkpoint(checkpoint_paths(run / "checkpoints")[-1])["state.pt"] for run in (one, other)]
    assert states[0]["sampler_position"] == states[1]["sampler_position"]
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name])
    moments = [dict(flatten(state["optimizer"])) for state in states]
    assert set(moments[0]) == set(moments[1])
    for name, tensor in moments[0].items():
        assert torch.equal(tensor, moments[1][name])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, request):
    """The directory of a finished run, and its overrides without run.dir."""
    values = {**TINY_RUN, **LONG, "run.dir": str(tmp_path_factory.mktemp("undisturbed"))}
    result = train([f"{key}={value}" for key, value in values.items()])
    assert result.returncode == 0, result.stderr
    return Path(json.loads(result.stdout)["run_dir"])


@pytest.fixture
def finished(undisturbed, tmp_path):
    """A copy of the finished run in the run.dir of `tiny_overrides`."""
    return Path(shutil.copytree(undisturbed, tmp_path / "runs" / undisturbed.name))


def test_killed_runs_that_go_on_equal_an_undisturbed_one(tiny_overrides, undisturbed, tmp_path):
    overrides = tiny_overrides(**LONG)
    result = train(overrides, env=with_fault("kill@0:8", tmp_path / "once"))
    assert result.returncode == -signal.SIGKILL
    # Killed once more while it goes on, by the signal of a scheduler this time.
    result = train(overrides, "--resume", "auto", env=with_fault("term@0:5", tmp_path / "once"))
    assert result.returncode == 75, result.stderr
    summary = json.loads(result.stdout)
    assert summary["steps"] == summary["resumed_from"] + 5
    assert summary["stopped_by"] == "SIGTERM"
    assert summary["resumed_from"] in (3, 6)
    verify_checkpoint(Path(summary["run_dir"]) / "checkpoints" / f"step-{summary['steps']:08d}")
    result = train(overrides, "--resume", "auto")
    assert result.returncode == 0, result.stderr
    (directory,) = (tmp_path / "runs").iterdir()  # one run, not three
    assert json.loads(result.stdout)["run_dir"] == str(directory)
    assert_equal_runs(directory, undisturbed)


@pytest.mark.deep
def test_a_compiled_run_goes_on_bit_for_bit(tiny_overrides, tmp_path):
    compiled = {"compile.enabled": "true", "train.steps": 6, "train.save_every": 3, "train.sample_tokens": 0}
    # One branch: Inductor takes a third of the time, and what resuming has to restore is the same.
    overrides = tiny_overrides(**compiled, **{"model.branches": "[window]"})
    whole = train(overrides)
    assert whole.returncode == 0, whole.stderr
    directory = Path(json.loads(whole.stdout)["run_dir"])
    undisturbed = Path(shutil.copytree(directory, tmp_path / "undisturbed"))
    shutil.rmtree(checkpoint_paths(directory / "checkpoints")[-1])
    result = train(overrides, "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["resumed_from"] == 3
    assert_equal_runs(directory, undisturbed)


@pytest.mark.deep
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tiny_overrides, finished, undisturbed):
    newest, before = reversed(checkpoint_paths(finished / "checkpoints")[-2:])
    os.truncate(newest / "state.pt", 1000)
    result = train(tiny_overrides(**LONG), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    assert f"warning: checkpoint '{newest}' is damaged" in result.stderr
    assert json.loads(result.stdout)["resumed_from"] == int(before.name[5:])
    assert (finished / "checkpoints" / "set-aside-1" / newest.name).is_dir()
    assert_equal_runs(finished, undisturbed)


@pytest.mark.deep
def test_a_named_checkpoint_is_where_the_run_goes_on(tiny_overrides, finished, undisturbed):
    result = train(tiny_overrides(**LONG), "--resume", str(finished / "checkpoints" / "step-00000009"))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["resumed_from"] == 9
    assert_equal_runs(finished, undisturbed)


def test_when_no_checkpoint_is_good_the_exit_code_is_5(tiny_overrides, finished):
    for path in checkpoint_paths(finished / "checkpoints"):
        (path / "rank-00000.pt").unlink()
    result = train(tiny_overrides(**LONG), "--resume", str(finished))
    assert result.returncode == 5
    assert result.stderr.startswith("error: no checkpoint of")
    assert result.stderr.count("\n") == 1


def test_another_configuration_is_refused_by_its_first_key(tiny_overrides, finished):
    config = load_config(overrides=tiny_overrides(**LONG, **{"optim.lr": 0.5}))
    with pytest.raises(UserError, match=r"optim\.lr = 0\.5 here and 0\.003 there") as error:
        find_run(config, str(finished))
    assert "\n" not in str(error.value)
    assert find_run(config, "auto").directory is None


def test_length_place_and_frequencies_may_change(tiny_overrides, finished):
    changed = {**LONG, "train.steps": 99, "train.save_every": 0, "train.keep_last": 1, "train.keep_best": "false"}
    changed |= {"train.log_every": 7, "train.eval_every": 7, "run.dir": "elsewhere", "watchdog.stall_s": 60.0}
    changed |= {"train.sample_tokens": 0}
    changed |= {"log.stats_every": 7, "log.tensorboard": "true"}
    assert find_run(load_config(overrides=tiny_overrides(**changed)), str(finished)).directory == finished


def test_auto_takes_the_newest_run_of_this_very_name(tiny_overrides, finished, tmp_path):
    config = load_config(overrides=tiny_overrides(**LONG))
    assert find_run(config, "never").directory is None
    runs = tmp_path / "runs"
    newest = runs / "tiny-20990101-000000-10"
    for name in ("tiny-20990101-000000-9", newest.name, "tiny-x-20990102-000000"):
        shutil.copytree(finished, runs / name)
    assert find_run(config, "auto").directory == newest
    # The newest has none yet: an older, perhaps finished, run is not what is meant.
    shutil.rmtree(newest / "checkpoints")
    found = find_run(config, "auto")
    assert found.directory is None
    assert "has no checkpoint yet" in found.notes[0]


@pytest.mark.parametrize("path", ["atuo", "missing/run", "."])
def test_a_path_that_is_no_run_is_a_mistake(tiny_overrides, path):
    with pytest.raises(UserError, match="must be auto, never, a run directory or one of its checkpoints"):
        find_run(load_config(overrides=tiny_overrides()), path)


def test_what_a_run_lacks_is_named_with_the_way_out(tiny_overrides, finished):
    config = load_config(overrides=tiny_overrides(**LONG))
    with pytest.raises(UserError, match="and that path does not exist; see ls 'runs', or use --resume never"):
        find_run(config.changed(run={"dir": "runs"}), "nowhere")
    newest = checkpoint_paths(finished / "checkpoints")[-1]
    (newest / "manifest.json").unlink()
    way_out = f"name another with --resume: nsa-compile ckpt verify '{finished}' tells which are good"
    with pytest.raises(CheckpointError, match=rf"manifest\.json: No such file or directory; {way_out}"):
        newest_good_checkpoint(find_run(config, str(newest)))
    shutil.rmtree(finished / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint; use --resume never"):
        find_run(config, str(finished))
    (finished / "checkpoints").mkdir()
    newest.mkdir()
    (finished / "config.resolved.yaml").unlink()
    with pytest.raises(
        CheckpointError, match=r"its config\.resolved\.yaml is missing; put it back, or name another run"
    ):
        find_run(config, str(finished))


def test_fewer_steps_than_the_checkpoint_has_is_a_mistake(tiny_overrides, finished):
    result = train(tiny_overrides(**{**LONG, "train.steps": 5}), "--resume", "auto")
    assert result.returncode == 2
    assert "train.steps = 5 must be at least 14" in result.stderr


def test_another_number_of_steps_is_told_of(tiny_overrides, finished):
    result = train(tiny_overrides(**{**LONG, "train.steps": 15}), "--resume", "auto")
    assert result.returncode == 0, result.stderr
    line = "train.steps was 14 and is 15: the learning rate now follows the schedule of 15 steps"
    assert line in result.stderr.splitlines()


def test_a_run_at_work_is_not_resumed(tiny_overrides, finished):
    with lock_run_directory(finished):
        result = train(tiny_overrides(**LONG), "--resume", "auto")
    assert result.returncode == 2
    assert "another process is working on run" in result.stderr


def test_a_checkpoint_with_code_in_it_ends_in_one_line_and_exit_code_5(tiny_overrides, finished, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    path = finished / "checkpoints" / "step-00000099"
    save_checkpoint(path.parent, 99, {"state.pt": Malicious(), "rank-00000.pt": {}})
    result = train(tiny_overrides(**{**LONG, "train.steps": 100}), "--resume", "auto")
    assert result.returncode == 5
    assert result.stderr.startswith(f"error: checkpoint '{path}' cannot be used: state.pt must hold tensors")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "executed").exists()


def test_rows_that_a_checkpoint_stands_on_must_be_there(tiny_overrides, finished):
    path = finished / "training.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]), encoding="utf-8")
    result = train(tiny_overrides(**LONG), "--resume", "auto")
    assert result.returncode == 5
    assert "earlier rows are missing" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _directory(path):
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.deep(but=["_pipe-config.resolved.yaml-5-is not a regular file"])
@pytest.mark.parametrize(
    ("damage", "name", "code", "expected"),
    [
        (_pipe, "val.csv", 5, "cannot be continued from step 14: it is not a regular file"),
        (_pipe, "config.resolved.yaml", 5, "is not a regular file"),
        (_directory, ".HALT", 2, "cannot be removed: Is a directory"),
        (_directory, "stacks_rank0.txt", 5, "cannot be written: Is a directory"),
        (_directory, "summary.json", 5, "cannot be written: Is a directory"),
    ],
)
def test_a_file_of_the_run_that_is_something_else_is_one_line(tiny_overrides, finished, damage, name, code, expected):
    damage(finished / name)
    result = train(tiny_overrides(**LONG), "--resume", str(finished), timeout=120)
    assert result.returncode == code
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert name in error
    assert expected in error
    assert "Traceback" not in result.stderr


def test_a_resumed_run_is_as_far_as_its_checkpoint(tiny_overrides, finished):
    result = train(
        tiny_overrides(**{**LONG, "watchdog.interval_s": 0.05, "train.steps": 15}), "--resume", str(finished)
    )
    assert result.returncode == 0, result.stderr
    rows = list(JsonlReader(heartbeat_path(finished, 0)).rows())
    attempt = rows[max(i for i, row in enumerate(rows) if row["kind"] == "start") :]
    before = [row["phase"] for row in attempt[: next(i for i, row in enumerate(attempt) if row["kind"] == "step")]]
    assert before
    assert attempt[len(before) - 1]["step"] == 14


def _training(overrides):
    config = load_config(overrides=overrides)
    torch.manual_seed(0)
    model = NSATransformer(config.model)
    sampler, policy = BatchSampler(UniformBytes(1), 2, 32), NonFinitePolicy("skip", 3, Path(config.run.dir))
    return TrainingState(config, model, make_optimizer(model, config.optim), sampler, policy)


def test_random_generators_go_on_where_they_were(tiny_overrides):
    training = _training(tiny_overrides())
    states = training.files(5)
    expected = torch.rand(4)
    torch.manual_seed(99)
    training.restore(states, 5)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model", {}, "must be a tensor"),
        ("model", [], "model in state.pt must be of type dict"),
        ("optimizer", {0: {"step": 1}}, "other parameters"),
        ("sampler_position", -1, "must not be negative"),
        ("nonfinite", {"skipped": 1}, "counts of skipped steps"),
        ("step", 4, "must be 5"),
        ("config", {}, "another configuration"),
    ],
)
def test_states_of_something_else_are_refused(tiny_overrides, key, value, expected):
    training = _training(tiny_overrides())
    states = training.files(5)
    states["state.pt"][key] = value
    with pytest.raises(CheckpointError, match=expected):
        training.restore(states, 5)


HUGE = 10**5000


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda state: state["model"].update({"head.weight": state["model"]["head.weight"].to_sparse()}), "dense"),
        (lambda state: state["model"].update({"head.weight": state["model"]["head.weight"].to("meta")}), "dense"),
        (lambda state: state["model"].update({"head.weight": HUGE}), "dense"),
        (lambda state: state.update(sampler_position=10**30), "sampler_position must be at most 10"),
        (lambda state: state.update(sampler_position=HUGE), "sampler_position must be at most 10"),
        (lambda state: state.update(step=HUGE), "step in state.pt must be 5"),
        (lambda state: state["nonfinite"].update(skipped=HUGE), "counts of skipped steps"),
        (lambda state: state["config"]["run"].update(seed=HUGE), "another configuration: run.seed"),
        (lambda state: state["config"]["run"].update(seed=torch.ones(2)), "another configuration: run.seed"),
        (lambda state: state["config"]["optim"].update(betas=[torch.ones(2), 0.95]), "configuration: optim.betas"),
        (lambda state: state.update(config=deep()), "its state cannot be put back, which ended in RecursionError"),
    ],
)
def test_absurd_values_with_a_valid_digest_are_one_line(tiny_overrides, spoil, expected):
    training = _training(tiny_overrides())
    states = copy.deepcopy(training.files(5))
    spoil(states["state.pt"])
    with pytest.raises(CheckpointError, match=expected) as error:
        training.restore(states, 5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "rng",
    [torch.zeros(5056, dtype=torch.uint8).to("meta"), torch.zeros(8).to_sparse(), HUGE],
    ids=["meta", "sparse", "number"],
)
def test_generators_that_are_none_are_one_line(tiny_overrides, rng):
    training = _training(tiny_overrides())
    states = copy.deepcopy(training.files(5))
    states["rank-00000.pt"]["rng"] = rng
    with pytest.raises(CheckpointError, match=r"rng must be a tensor of torch\.uint8"):
        training.restore(states, 5)


def deep():
    value = {}
    for _ in range(5000):
        value = {"x": value}
    return value


def test_states_of_several_processes_are_for_any_number(tiny_overrides):
    training = _training(tiny_overrides())
    states = training.files(5)
    torch.manual_seed(99)
    expected = torch.get_rng_state()
    states = copy.deepcopy(states)
    with torch.no_grad():
        training.model.head.weight.zero_()
    training.restore({**states, "rank-00001.pt": states["rank-00000.pt"]}, 5)
    assert torch.equal(training.model.head.weight, states["state.pt"]["model"]["head.weight"])
    assert torch.equal(torch.get_rng_state(), expected)  # whose state it should be, nobody can say


def test_every_key_but_the_free_ones_counts(tiny_overrides):
    config = load_config(overrides=tiny_overrides())
    saved = config.plain()
    assert first_difference(config, saved) is None
    del saved["model"]["pattern"]["num_initial"]  # as if written before there was that key, whose default is ours
    assert first_difference(config, saved) is None
    del saved["model"]["pattern"]["window"]
    assert first_difference(config, saved) == "model.pattern.window = 8 here and absent there"
    assert first_difference(config, {**saved, "model": config.plain()["model"], "zzz": {"x": 1}}) == (
        "zzz.x = absent here and 1 there"
    )


def test_the_named_checkpoint_is_not_exchanged_for_another(tiny_overrides, finished):
    path = checkpoint_paths(finished / "checkpoints")[-1]
    (path / "state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        newest_good_checkpoint(find_run(load_config(overrides=tiny_overrides(**LONG)), str(path)))


def ckpt(*arguments):
    return processes.run("ckpt", *arguments)


def test_ckpt_lists_verifies_and_prunes(finished):
    listed = json.loads(ckpt("ls", str(finished), "--json").stdout)["checkpoints"]
    assert [row["step"] for row in listed] == [3, 6, 9, 12, 14]
    assert [row["step"] for row in listed if row["last"]] == [14]
    best = [row for row in listed if row["best"]]
    assert [row["val_loss"] for row in best] == [min(row["val_loss"] for row in listed if row["val_loss"])]
    assert "val loss" in ckpt("ls", str(finished)).stdout
    assert ckpt("verify", str(finished)).returncode == 0
    assert [row["note"] for row in json.loads(ckpt("verify", str(finished), "--json").stdout)["checkpoints"]] == [
        None
    ] * 5

    # The newest is damaged, so that it does not count as one of those to keep.
    _, *others = reversed(checkpoint_paths(finished / "checkpoints"))
    os.truncate(finished / "checkpoints" / "step-00000014" / "state.pt", 100)
    result = ckpt("verify", str(finished))
    assert result.returncode == 5
    assert "step-00000014: state.pt has 100 bytes" in result.stdout
    assert result.stdout.count(": ok") == len(others)
    assert result.stderr == f"error: 1 of 5 checkpoints in '{finished}' are damaged; resuming skips them\n"

    result = ckpt("verify", str(finished), "--json")
    assert result.returncode == 5
    found = {row["name"]: row["problems"] for row in json.loads(result.stdout)["checkpoints"]}
    assert [name for name, problems in found.items() if problems] == ["step-00000014"]
    assert len(found) == 5

    with lock_run_directory(finished):  # looking is allowed beside a run at work
        would = ckpt("prune", str(finished), "--keep", "1", "--dry-run").stdout
        assert ckpt("prune", str(finished), "--keep", "1").returncode == 2
    assert "would delete" in would
    assert len(checkpoint_paths(finished / "checkpoints")) == 5
    assert ckpt("prune", str(finished), "--keep", "1").stdout == would.replace("would delete", "deleted")
    left = [path.name for path in checkpoint_paths(finished / "checkpoints")]
    assert left == ["step-00000012", "step-00000014"]


def test_ckpt_of_something_else_is_a_mistake(tmp_path):
    for command in (["ls"], ["verify"], ["prune", "--keep", "1"]):
        result = ckpt(*command, str(tmp_path))
        assert result.returncode == 2
        assert "must be the directory of a run" in result.stderr


def test_ckpt_does_not_import_torch(finished):
    code = (
        "import sys\nfrom nsa_compile.cli import main\n"
        f"try: main({['ckpt', 'ls', str(finished)]!r})\nexcept SystemExit: pass\n"
        f"try: main({['ckpt', 'prune', '--keep', '2', str(finished)]!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0

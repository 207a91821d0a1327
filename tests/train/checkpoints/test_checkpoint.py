"""Checkpoints: whole, or absent, or refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import sys
import time

import pytest
import torch

from nsa_compile.errors import CheckpointError
from nsa_compile.train.checkpoints import checkpoint, files
from nsa_compile.train.checkpoints.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
from nsa_compile.train.checkpoints.files import (
    Checkpoint,
    checkpoint_paths,
    delete_leftovers,
    set_aside,
    superfluous,
    verify_checkpoint,
)

STATES = {
    "state.pt": {"step": 3, "model": {"w": torch.arange(5000.0)}, "betas": [0.9, 0.95]},
    "rank-00000.pt": {"rng": torch.zeros(8, dtype=torch.uint8)},
}


def names(directory):
    return [path.name for path in checkpoint_paths(directory)]


def edit_manifest(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_what_is_saved_is_loaded(tmp_path):
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, STATES, 2.5).path)
    assert loaded["state.pt"]["step"] == 3
    assert loaded["state.pt"]["betas"] == [0.9, 0.95]
    assert torch.equal(loaded["state.pt"]["model"]["w"], STATES["state.pt"]["model"]["w"])
    assert torch.equal(loaded["rank-00000.pt"]["rng"], STATES["rank-00000.pt"]["rng"])
    saved = verify_checkpoint(tmp_path / "step-00000003")
    assert (saved.step, saved.val_loss) == (3, 2.5)
    assert saved.bytes == sum((saved.path / name).stat().st_size for name in STATES)


@pytest.mark.parametrize("moment", ["torch.save", "os.fsync", "os.rename"])
def test_a_full_disk_leaves_no_checkpoint_and_is_told_in_one_line(tmp_path, monkeypatch, moment):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module, name = moment.split(".")
    save_checkpoint(tmp_path, 1, STATES)
    monkeypatch.setattr(getattr(checkpoint, module), name, full)
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_best=False)
    writer.save(2, STATES, None)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*: No space left") as error:
        writer.wait()
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_file_system_without_room(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs '{place}' 2>/dev/null") != 0:
        pytest.skip("no right to mount a small tmpfs")
    try:
        writer = CheckpointWriter(place, keep_last=3, keep_best=True)
        writer.save(1, STATES, None)
        writer.save(2, {**STATES, "state.pt": {"w": torch.zeros(100_000)}}, None)
        with pytest.raises(CheckpointError, match="No space left"):
            writer.wait()
        assert os.listdir(place) == ["step-00000001"]
        verify_checkpoint(place / "step-00000001")
    finally:
        os.system(f"umount '{place}'")


def test_a_checkpoint_is_never_overwritten(tmp_path):
    save_checkpoint(tmp_path, 3, STATES)
    with pytest.raises(FileExistsError):
        save_checkpoint(tmp_path, 3, STATES)


def test_what_the_disk_got_wrong_is_noticed_before_it_counts(tmp_path, monkeypatch):
    whole = checkpoint._save_file

    def corrupting(path, state):
        entry = whole(path, state)
        content = bytearray(path.read_bytes())
        content[-30] ^= 1
        path.write_bytes(content)
        return entry

    monkeypatch.setattr(checkpoint, "_save_file", corrupting)
    with pytest.raises(CheckpointError, match="SHA-256"):
        save_checkpoint(tmp_path, 3, STATES)
    assert list(tmp_path.iterdir()) == []


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["state.pt", "rank-00000.pt", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [_flip, lambda path: os.truncate(path, 10), lambda path: path.unlink(), _link, _pipe]
)
def test_a_damaged_checkpoint_is_refused(tmp_path, name, damage):
    path = save_checkpoint(tmp_path, 3, STATES).path
    damage(path / name)
    if name == "manifest.json" and damage is _flip:
        (path / name).write_bytes((path / name).read_bytes()[::-1])  # a flipped byte may leave valid JSON
    for reader in (load_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError, match=r"is damaged|not a complete checkpoint") as error:
            reader(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"state.pt": {}, "../../rank-00000.pt": {}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}, "state.pt": {}}},
        {"files": {"state.pt": {"bytes": "1", "sha256": "0" * 64}, "rank-00000.pt": {}}},
        {"files": {"state.pt": {"bytes": -1, "sha256": "0" * 64}, "rank-00000.pt": {}}},
        {"files": {"state.pt": {"bytes": 1, "sha256": 7}, "rank-00000.pt": {}}},
        {"files": ["state.pt"]},
        {"files": {}},
        {"step": True},
        {"step": 4},
        {"step": "3\nerror: forged"},
        {"created": float("nan")},
        {"created": None},
        {"val_loss": "low"},
        {"val_loss": 10**400},
        {"format": 2},
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path, changes):
    path = save_checkpoint(tmp_path, 3, STATES).path
    edit_manifest(path, **changes)
    with pytest.raises(CheckpointError, match="not a complete checkpoint") as error:
        verify_checkpoint(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"val_loss": 0.5},
        {"val_loss": None},
        {"created": 1.0},
        {"note": "x"},
        {files.SEAL: "0" * 64},
        {files.SEAL: None},
    ],
)
def test_a_manifest_is_under_a_digest_of_its_own(tmp_path, changes):
    path = save_checkpoint(tmp_path, 3, STATES, 2.5).path
    edit_manifest(path)  # laid out in another way, it holds the same
    verify_checkpoint(path)
    edit_manifest(path, **changes)
    with pytest.raises(CheckpointError, match=r"is damaged: manifest\.json has changed since it was written"):
        verify_checkpoint(path)


def unseal(path, **changes):
    """Make the manifest one of an earlier version."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[files.SEAL]
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_an_earlier_manifest_without_digest_is_read_and_said_so(tmp_path):
    path = save_checkpoint(tmp_path, 3, STATES, 2.5).path
    assert verify_checkpoint(path).note is None
    unseal(path)
    found = verify_checkpoint(path)
    assert found.val_loss == 2.5
    assert found.note is not None
    assert "has no digest of itself" in found.note
    assert load_checkpoint(path)["state.pt"]["step"] == 3


def test_a_loss_that_nothing_checks_makes_no_other_checkpoint_superfluous(tmp_path):
    for step, loss in ((1, 2.0), (2, 3.0), (3, 4.0), (4, 5.0)):
        save_checkpoint(tmp_path, step, STATES, loss)
    unseal(tmp_path / "step-00000002", val_loss=-1.0)
    assert [c.step for c in superfluous(files.readable_checkpoints(tmp_path), 1, True)] == [3]


@pytest.mark.parametrize(
    "changes",
    [
        {"created": 10**300},
        {"val_loss": 10**300},
        {"val_loss": -1e300},
        {"files": {name: {"bytes": 10**4000, "sha256": "0" * 64} for name in STATES}},
    ],
)
def test_numbers_that_nobody_measured_are_refused(tmp_path, changes):
    path = save_checkpoint(tmp_path, 3, STATES).path
    unseal(path, **changes)
    with pytest.raises(CheckpointError, match="not a complete checkpoint") as error:
        verify_checkpoint(path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, "\xff", " " * 2_000_000 + "{}", '{"format": 1e999}'])
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path, text):
    path = save_checkpoint(tmp_path, 3, STATES).path
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        verify_checkpoint(path)


def test_a_checkpoint_with_code_in_it_is_not_executed(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (pytest.fail, ("code of a checkpoint was executed",))

    path = save_checkpoint(tmp_path, 1, {**STATES, "state.pt": {"model": Malicious()}}).path
    with pytest.raises(CheckpointError, match=r"state\.pt must hold tensors and plain values only") as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("error")
def test_a_bare_pickle_is_refused_without_torchs_warning(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, STATES).path
    (path / "state.pt").write_bytes(pickle.dumps({"step": 1}))
    monkeypatch.setattr(files, "file_problems", lambda checkpoint: [])
    with pytest.raises(CheckpointError, match=r"state\.pt must hold tensors and plain values only"):
        load_checkpoint(path)


def test_the_writer_copies_the_state_of_the_moment(tmp_path):
    weights = torch.zeros(3)
    with CheckpointWriter(tmp_path, 3, True) as writer:
        writer.save(1, {"state.pt": {"w": weights}, "rank-00000.pt": {}}, None)
        weights += 1
    assert torch.equal(load_checkpoint(tmp_path / "step-00000001")["state.pt"]["w"], torch.zeros(3))


def test_the_writer_keeps_the_newest_and_the_best(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 2.5, 6: 4.0}
    with CheckpointWriter(tmp_path, keep_last=2, keep_best=True) as writer:
        for step, loss in losses.items():
            writer.save(step, STATES, loss)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]


def test_nothing_is_pruned_before_the_new_checkpoint_is_good(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, STATES)

    def unreadable(path):
        raise CheckpointError("it reads back otherwise")

    monkeypatch.setattr(checkpoint, "verify_checkpoint", unreadable)
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_best=False)
    writer.save(2, STATES, None)
    with pytest.raises(CheckpointError, match="otherwise"):
        writer.wait()
    assert names(tmp_path) == ["step-00000001"]


def test_the_best_is_the_earliest_of_equals(tmp_path):
    found = [Checkpoint(tmp_path, step, 0.0, loss, {}) for step, loss in [(1, 2.0), (2, 2.0), (3, None)]]
    assert [c.step for c in superfluous(found, 1, True)] == [2]
    assert [c.step for c in superfluous(found, 1, False)] == [1, 2]


def test_later_checkpoints_are_moved_and_never_lost(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, STATES)
    moved = set_aside(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert moved is not None
    assert names(moved) == ["step-00000002", "step-00000003"]
    assert set_aside(tmp_path, 1) is None


def _write_until_killed(directory):
    with CheckpointWriter(directory, keep_last=2, keep_best=True) as writer:
        for step in range(1, 100_000):
            writer.save(step, STATES, float(step % 7))


def _in_a_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_9_at_random_moments_leaves_whole_checkpoints(tmp_path):
    listed = 0
    for attempt in range(10):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        child = _in_a_child(lambda directory=directory: _write_until_killed(directory))
        end = time.monotonic() + 30
        while attempt and not names(directory) and time.monotonic() < end:  # but for one that is killed at its start
            time.sleep(0.005)
        time.sleep(random.uniform(0.0, 0.35))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        for path in checkpoint_paths(directory):
            load_checkpoint(path)
            listed += 1
        delete_leftovers(directory)
        assert sorted(os.listdir(directory)) == names(directory)
    assert listed > 0


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_9_at_every_step_of_saving_and_pruning_leaves_whole_checkpoints(tmp_path):
    """The child kills itself before the n-th operation on a file, for every n until it gets through."""
    for moment in range(1, 200):
        directory = tmp_path / str(moment)
        save_checkpoint(directory, 1, STATES)

        def work(moment=moment, directory=directory):
            count = 0

            def hook(event, arguments):
                nonlocal count
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
                    count += 1
                    if count == moment:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            save_checkpoint(directory, 2, STATES)
            files.delete_checkpoint(verify_checkpoint(directory / "step-00000001"))

        status = os.waitpid(_in_a_child(work), 0)[1]
        for path in checkpoint_paths(directory):
            load_checkpoint(path)
        assert names(directory)
        if not os.WIFSIGNALED(status):
            assert names(directory) == ["step-00000002"]
            assert moment > 10
            return
    pytest.fail("the child never got through")

"""Checkpoints: whole, or absent, or refused."""

from __future__ import annotations

import pytest
import torch

from nsa_compile.train import checkpoint
from nsa_compile.train.checkpoint import load_checkpoint, save_checkpoint

STATE = {"step": 3, "model": {"w": torch.arange(5.0)}, "betas": [0.9, 0.95]}


def test_what_is_saved_is_loaded(tmp_path):
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, STATE))
    assert loaded["step"] == 3
    assert loaded["betas"] == [0.9, 0.95]
    torch.testing.assert_close(loaded["model"]["w"], STATE["model"]["w"], rtol=0, atol=0)


@pytest.mark.parametrize("moment", ["torch.save", "os.rename"])
def test_a_crash_while_saving_leaves_no_checkpoint(tmp_path, monkeypatch, moment):
    def crash(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(getattr(checkpoint, moment.split(".")[0]), moment.split(".")[1], crash)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, 3, STATE)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_never_overwritten(tmp_path):
    save_checkpoint(tmp_path, 3, STATE)
    with pytest.raises(FileExistsError):
        save_checkpoint(tmp_path, 3, STATE)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = save_checkpoint(tmp_path, 3, STATE)
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("missing", ["state.pt", "manifest.json"])
def test_half_a_checkpoint_is_refused(tmp_path, missing):
    path = save_checkpoint(tmp_path, 3, STATE)
    (path / missing).unlink()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        load_checkpoint(path)


def test_a_checkpoint_with_code_in_it_is_not_executed(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (pytest.fail, ("code of a checkpoint was executed",))

    path = save_checkpoint(tmp_path, 1, {"model": Malicious()})
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load_checkpoint(path)

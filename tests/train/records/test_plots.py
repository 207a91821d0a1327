"""The loss curve is optional."""

from __future__ import annotations

import sys

import pytest

from nsa_compile.train.records.plots import plot_losses


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot_losses(tmp_path / "loss.png", [], [], 3.0)
    assert not (tmp_path / "loss.png").exists()


def test_with_matplotlib_there_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot_losses(tmp_path / "loss.png", [], [], 3.0)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

"""`nsa-compile profile step`: a healthy step adds up and is left in peace, and each planted fault is named."""

from __future__ import annotations

import errno
import json
import os
import time

import pytest
import torch
from click.testing import CliRunner

from nsa_compile.branches import RANGES
from nsa_compile.cli import cli
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.errors import UserError
from nsa_compile.models.transformer import SwiGLU
from nsa_compile.profiles.step_profile import profile_step
from nsa_compile.profiles.step_views import check_rows, render_step
from tests import processes

COMMAND = ["profile", "step"]
# Large enough that operators take most of the time without a compiler.
DENSE = {
    "model.attention": "dense",
    "model.dim": 128,
    "model.head_dim": 64,
    "model.n_layers": 2,
    "train.seq_len": 512,
    "train.batch_size": 4,
    "data.name": "uniform",
}


@pytest.fixture
def profiled(tiny_overrides, tmp_path):
    def run(steps=3, **changes):
        config = load_config(None, tiny_overrides(**DENSE | changes))
        return profile_step(config, load_corpus(config), tmp_path, steps, 1)

    return run


def failures(profile):
    return [text for ok, text in check_rows(profile) if not ok]


def plant(monkeypatch, fault):
    forward = SwiGLU.forward

    def faulty(self, x):
        return forward(self, fault(x))

    monkeypatch.setattr(SwiGLU, "forward", faulty)


@pytest.mark.deep
def test_a_healthy_step_adds_up_and_has_no_culprit(profiled):
    profile = profiled()
    assert failures(profile) == []
    wall = profile["wall"]
    mean = sum(wall["profiled"]["samples_s"]) / 3
    assert sum(row["mean_s"] for row in profile["ranges"]) == pytest.approx(mean, rel=0.05)
    assert sum(figures["share"] for figures in profile["phases"].values()) == pytest.approx(1)
    assert profile["phases"]["forward"]["mean_s"] > profile["phases"]["data"]["mean_s"] > 0
    assert len(wall["plain"]["samples_s"]) == len(wall["profiled"]["samples_s"]) == profile["steps"] == 3
    assert any(row["name"] == "aten::_scaled_dot_product_flash_attention_for_cpu" for row in profile["operators"])


@pytest.mark.deep
def test_a_python_hot_loop_is_named_with_its_line(profiled, monkeypatch):
    def loop(x):
        count = 0
        for number in range(2_000_000):  # about half of a step
            count += number  # the hot line
        return x + 0 * count

    plant(monkeypatch, loop)
    (failure,) = failures(profiled())
    first = loop.__code__.co_firstlineno
    assert failure.startswith("Python hot spot: ")
    assert "loop (" in failure
    assert any(f"{__file__}:{line})" in failure for line in (first + 2, first + 3))


def test_a_host_sync_is_named_with_its_line(profiled, monkeypatch):
    def sync(x):
        return x + 0 * x.sum().item()

    plant(monkeypatch, sync)
    profile = profiled()
    (failure,) = failures(profile)
    assert failure.startswith("host sync: aten::_local_scalar_dense in forward, 2 a step")
    assert f"sync ({__file__}:{sync.__code__.co_firstlineno + 1})" in failure


def test_a_slow_operator_comes_first(profiled, monkeypatch):
    with torch.library._scoped_library("step_profile_test", "DEF") as library:
        library.define("slow(Tensor x) -> Tensor")

        def slow(x):
            time.sleep(0.15)
            return x.clone()

        library.impl("slow", slow, "CompositeExplicitAutograd")
        plant(monkeypatch, lambda x: x + 0 * torch.ops.step_profile_test.slow(x.detach()))
        profile = profiled(2, **{"train.seq_len": 64, "train.batch_size": 1})  # the others are quick on a busy machine
    assert profile["operators"][0]["name"] == "step_profile_test::slow"
    assert profile["operators"][0]["calls"] == 2
    assert profile["operators"][0]["phase"] == "forward"
    assert failures(profile) == []
    assert "step_profile_test::slow" in render_step(profile)


@pytest.mark.deep
def test_compiled_blocks_show_their_branches_in_both_directions(tiny_overrides, tmp_path):
    sets = tiny_overrides(**{"compile.enabled": "true", "compile.nested": "aot_eager", "data.name": "uniform"})
    options = [word for override in sets for word in ("--set", override)]
    out = tmp_path / "profile"
    result = processes.run(*COMMAND, *options, "--steps", "3", "--out", str(out), "--json")
    # So small a model is mostly Python, and that may be found; it must run and add up.
    assert result.returncode in (0, 1), result.stderr
    profile = json.loads(result.stdout)
    assert profile["schema"] == 1
    assert profile["checks"]["sum"]["ok"]
    assert profile["checks"]["compiled_before"]["ok"]
    assert profile["checks"]["host_syncs"]["ok"]
    ranges = {(row["phase"], row["branch"]) for row in profile["ranges"]}
    for branch in RANGES:
        if branch not in ("nsa.attention", "nsa.loop", "nsa.sel"):  # nsa.sel has nothing of its own here
            assert {("forward", branch), ("backward", branch)} <= ranges
    assert json.loads((out / "profile.json").read_text())["ranges"] == profile["ranges"]
    page = (out / "profile.html").read_text()
    assert "<title>forward, nsa.cmp: " in page  # what a pointer over its bar shows
    assert "http" not in page.replace("http-equiv", "")
    assert (out / "trace.json.gz").stat().st_size > 1000


@pytest.mark.deep
def test_of_two_processes_the_first_tells_what_was_sent(tiny_overrides, tmp_path):
    overrides = [word for override in tiny_overrides(**DENSE) for word in ("--set", override)]
    arguments = [*overrides, "--nproc", "2", "--steps", "2", "--warmup", "1", "--out", str(tmp_path / "out"), "--json"]
    result = processes.run(*COMMAND, *arguments)
    assert result.returncode in (0, 1), result.stderr  # two processes on one core may keep each other's Python waiting
    profile = json.loads(result.stdout)
    assert profile["settings"]["processes"] == 2
    assert profile["communication"]["total_s"] > 0
    assert 0 <= profile["communication"]["overlapped_s"] <= profile["communication"]["total_s"]
    assert any(row["name"].startswith("c10d::") for row in profile["operators"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"profile.html", "profile.json", "trace.json.gz", "trace_rank1.json.gz"} <= names


def test_a_page_that_cannot_be_written_takes_no_figures_with_it(tiny_overrides, tmp_path, monkeypatch):
    def fail(result, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nsa_compile.profiles.step_views.write_page", fail)
    words = [word for override in tiny_overrides(**DENSE) for word in ("--set", override)]
    arguments = [*COMMAND, *words, "--steps", "1", "--warmup", "1", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, UserError)
    assert f"nothing can be written to '{tmp_path / 'out'}': No space left on device" in str(result.exception)
    assert json.loads(result.stdout)["directory"] == str(tmp_path / "out")


def test_mistakes_are_found_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    result = processes.run(*COMMAND, "--out", str(tmp_path / "file" / "x"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "--out" in result.stderr

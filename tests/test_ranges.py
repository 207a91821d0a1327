"""Ranges as a real NVTX client sees them, in processes of their own, and as torch's profiler does."""

from __future__ import annotations

import csv
import functools
import os
import statistics
import threading
from pathlib import Path

import pytest
import torch

from nsa_compile import ranges
from nsa_compile.cli import main
from tests import processes
from tests.conftest import TINY_RUN, cold_cache
from tests.nvtx_client import Event, build_client, coverage, ranges_of, read_events

BLOCK = {"nsa.proj", "nsa.cmp", "nsa.sel", "nsa.sel.ranges_v2", "nsa.win", "nsa.gate", "nsa.mlp"}
PHASES = {"data", "forward", "backward", "optimizer", "communication"}
# Long enough for attention to be sparse, and for work rather than Python to fill a step.
RUN = {
    "train.seq_len": 512,
    "train.steps": 3,
    "train.eval_every": 3,
    "train.save_every": 0,
    "train.sample_tokens": 0,
    "compile.enabled": "true",
    "compile.check": "false",  # 512 tokens one by one
    "model.n_layers": 2,
    "model.pattern.num_selected": 4,
    "log.stats_every": 0,
    "watchdog.enabled": "false",
}


@pytest.fixture(scope="session")
def client(tmp_path_factory):
    return build_client(tmp_path_factory.mktemp("nvtx"))


@pytest.fixture(scope="session")
def under_client(client, tmp_path_factory):
    """`under_client(words, NAME=value)`: `nsa-compile words` with the client in it, or another program; the process and
    what the client saw."""

    def run(*words, program=main, **variables):
        log = tmp_path_factory.mktemp("client") / "nvtx.log"
        log.touch()
        env = {**os.environ, "NVTX_INJECTION64_PATH": str(client), "NVTX_LOG": str(log), **variables}
        process = processes.run(*words, program=program, env=env)
        return process, read_events(log)

    return run


@pytest.fixture(scope="session")
def trained(under_client, tmp_path_factory):
    """`trained(nested, ranges)`: what the client saw of a training run, and loss and gradient norm of its steps."""

    @functools.cache
    def train(nested, asked):
        changes = {
            "profile.nvtx": asked,
            "compile.nested": nested,
            "train.activation_checkpointing": "0" if nested == "aot_eager" else "none",
            "run.dir": str(tmp_path_factory.mktemp("runs")),
        }
        if nested == "inductor":
            changes |= {"model.phi": "mean", "model.shared_kv": "true"}  # fewer kernels
        # A cache of its own, where that costs no compilation of C++: passes whose result is kept have no ranges.
        own = nested == "aot_eager"
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(cold_cache(tmp_path_factory.mktemp("cache")))} if own else {}
        sets = processes.sets(f"{key}={value}" for key, value in {**TINY_RUN, **RUN, **changes}.items())
        process, events = under_client("train", "--json", *sets, **cache)
        assert process.returncode == 0, process.stderr
        (table,) = Path(changes["run.dir"]).glob("*/training.csv")
        with table.open(encoding="utf-8") as file:
            return events, [(row["loss"], row["grad_norm"]) for row in csv.DictReader(file)]

    return train


@pytest.fixture
def enabled():
    ranges.enable()
    yield
    ranges.enable(False)


@pytest.mark.deep(but=["aot_eager"])
@pytest.mark.parametrize("nested", ["aot_eager", "inductor"])
def test_a_training_run_shows_every_range_balanced_nested_and_covering_its_steps(trained, nested):
    events, _ = trained(nested, "true")
    found = ranges_of(events)
    steps = [r for r in found if r.name == "step"]
    assert [r.payload for r in steps] == [1, 2, 3]
    # Not each of them: between two ranges another process may have had the processor.
    assert statistics.median(coverage(step, found) for step in steps) >= 0.9, [coverage(s, found) for s in steps]

    for step in steps:
        inside = [r for r in found if step.start < r.start and r.end < step.end]
        assert {r.payload for r in inside} == {step.payload}
        assert {r.name for r in inside if r.category != "pass"} == BLOCK | PHASES
        for direction in ("forward", "backward"):
            assert {r.name for r in inside if r.name in BLOCK and r.category == direction} == BLOCK
        assert all("nsa.sel" in r.around for r in inside if r.name == "nsa.sel.ranges_v2")
        assert all("backward" in r.around for r in inside if r.name in BLOCK and r.category == "backward")
        again = [r for r in inside if r.category == "forward" and "backward" in r.around]
        assert bool(again) == (nested == "aot_eager"), "recomputation shows as forward ranges in the backward pass"
    if nested == "aot_eager":
        passes = {r.name for r in found if r.category == "pass"}
        assert passes >= {"batch_prefill", "lower_attention", "annotate_ranges"}
    assert {"evaluation", "checkpoint"} <= {r.category for r in found}


@pytest.mark.deep
def test_without_being_asked_for_there_are_no_ranges_and_with_them_losses_are_the_same_bits(trained):
    events, losses = trained("aot_eager", "false")
    assert not events
    assert len(losses) == 3
    assert losses == trained("aot_eager", "true")[1]


def test_an_exception_in_the_backward_pass_leaves_nothing_open(under_client):
    program = """
import torch
from nsa_compile import ranges

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        ranges.push("nsa.mlp", "backward")
        raise ValueError("planted")

ranges.enable()
for number in (1, 2):
    try:
        with ranges.step(number), ranges.span("backward", "backward"):
            Raises.apply(torch.ones(1, requires_grad=True)).sum().backward()
    except ValueError:
        pass
"""
    process, events = under_client(program, program=processes.run_code)
    assert process.returncode == 0, process.stderr
    found = ranges_of(events)
    assert [(r.name, r.payload) for r in found] == [
        (name, number) for number in (1, 2) for name in ("step", "backward", "nsa.mlp")
    ]


def test_another_thread_closes_what_a_failed_step_left_open_there(under_client):
    program = """
import threading
from nsa_compile import ranges

ranges.enable()
go, done = threading.Event(), threading.Event()

def autograd():
    ranges.push("nsa.win", "backward")  # and fails
    done.set(); go.wait()
    ranges.push("nsa.mlp", "backward"); ranges.pop("nsa.mlp")

thread = threading.Thread(target=autograd)
with ranges.step(1):
    thread.start(); done.wait()
with ranges.step(2):
    go.set(); thread.join()
"""
    process, events = under_client(program, program=processes.run_code)
    assert process.returncode == 0, process.stderr
    assert {(r.name, r.payload, r.around) for r in ranges_of(events)} == {
        ("step", 1, ()), ("step", 2, ()), ("nsa.win", 1, ()), ("nsa.mlp", 2, ()),
    }  # fmt: skip


def test_the_checks_find_planted_faults():
    def event(begins, name, ns):
        return Event(begins, "nsa", name, "forward", 1, 1, ns)

    whole = [event(True, "step", 0), event(True, "forward", 5), event(False, "-", 55), event(False, "-", 100)]
    found = ranges_of(whole)
    assert coverage(found[0], found) == 0.5
    with pytest.raises(AssertionError, match="left open: \\['step'\\]"):
        ranges_of(whole[:-1])
    with pytest.raises(AssertionError, match="without a push"):
        ranges_of(whole[2:])


def regions(profile):
    return [e.name for e in sorted(profile.events(), key=lambda e: (e.time_range.start, -e.time_range.end))]


def test_the_profiler_of_torch_sees_the_same_ranges(enabled):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, ranges.step(1):
        with ranges.span("forward", "forward"):
            ranges.push("nsa.cmp", "forward")
        ranges.pop("nsa.cmp")  # closed with the range around it
    assert regions(profile) == ["step", "forward", "nsa.cmp"]


def test_ranges_are_off_unless_enabled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, ranges.step(1):
        ranges.push("nsa.cmp", "forward")
        ranges.pop("nsa.cmp")
    assert regions(profile) == []


def test_the_rest_of_a_range_ends_with_it_and_belongs_to_the_thread_that_has_one(enabled):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with ranges.span("backward", "backward"):
            ranges.rest("communication", "communication")
            other = threading.Thread(target=ranges.rest, args=("communication", "communication"))
            other.start()
            other.join()
        with ranges.span("optimizer", "optimizer"):
            pass
    assert regions(profile) == ["backward", "communication", "optimizer"]

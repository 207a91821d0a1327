"""The time of a step by phase."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from nsa_compile.train import phases as phases_module
from nsa_compile.train.phases import CompileClock, PhaseTimer
from nsa_compile.train.records.rows import PHASES, StepRow, phase_columns

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.sleep` moves, so that seconds are exact on a busy machine."""
    state = SimpleNamespace(now=100.0)

    def sleep(seconds):
        state.now += seconds

    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: state.now)
    return SimpleNamespace(sleep=sleep, now=lambda: state.now)


def test_phases_add_up_to_the_wall_time_of_the_step(clock):
    timer = PhaseTimer(CPU)
    for _ in range(2):  # the second one starts anew
        start = clock.now()
        with timer.phase("data"):
            clock.sleep(1)
        with timer.phase("forward"):
            clock.sleep(2)
        clock.sleep(8)
        with timer.phase("backward"):
            clock.sleep(4)
        clock.sleep(8)
        phases = timer.step_done()
        assert list(phases) == list(PHASES)
        assert sum(phases.values()) == clock.now() - start
        assert phases == {**dict.fromkeys(PHASES, 0.0), "data": 1, "forward": 2, "backward": 4, "other": 16}
        clock.sleep(50)  # an evaluation, say: it belongs to no step


def test_the_clock_is_the_wall_clock():
    timer = PhaseTimer(CPU)
    start = time.perf_counter()
    with timer.phase("forward"):
        time.sleep(0.05)
    phases = timer.step_done()
    assert 0.05 <= phases["forward"] <= sum(phases.values()) <= time.perf_counter() - start


def test_a_phase_that_comes_again_is_added_up(clock):
    timer = PhaseTimer(CPU)
    for _ in range(3):
        with timer.phase("forward"):
            clock.sleep(1)
    assert timer.step_done()["forward"] == 3


def test_an_inner_phase_is_taken_out_of_the_outer_one(clock):
    timer = PhaseTimer(CPU)
    with timer.phase("backward"):
        clock.sleep(1)
        with timer.phase("communication"):
            clock.sleep(10)
        clock.sleep(2)
    phases = timer.step_done()
    assert (phases["communication"], phases["backward"], phases["other"]) == (10, 3, 0)


def test_the_rest_of_the_backward_pass_is_communication(clock):
    timer = PhaseTimer(CPU)
    for _ in range(2):
        with timer.phase("backward"):
            clock.sleep(10)
            timer.rest_is("communication")
            clock.sleep(3)
        clock.sleep(1)
        phases = timer.step_done()
        assert (phases["communication"], phases["backward"], phases["other"]) == (3, 10, 1)


def test_every_change_of_phase_is_told():
    told = []
    timer = PhaseTimer(CPU, told.append)
    with timer.phase("backward"), timer.phase("communication"):
        pass
    assert told == ["backward", "communication", "backward", "other"]


def test_an_error_ends_its_phase():
    told = []
    timer = PhaseTimer(CPU, told.append)
    with pytest.raises(RuntimeError), timer.phase("forward"):
        raise RuntimeError
    assert told[-1] == "other"


def test_a_step_without_phases_has_none():
    assert PhaseTimer(CPU).step_done() is None


def test_phases_are_columns_of_the_records(clock):
    timer = PhaseTimer(CPU)
    with timer.phase("backward"):
        clock.sleep(3)
    row = StepRow(1, 5.5, 1e-3, 1.0, 100.0, 0.1, 3.0, **phase_columns(timer.step_done()))
    assert (row.backward_s, row.forward_s) == (3, 0)


def test_a_phase_nobody_knows_is_refused():
    timer = PhaseTimer(CPU)
    with pytest.raises(ValueError, match="phase 'forwards' must be one of data, forward"), timer.phase("forwards"):
        pass
    with pytest.raises(ValueError, match="'allreduce'"):
        timer.rest_is("allreduce")


class DeviceClock:
    """Stands in for CUDA events: the device is done with those before `waited_for`."""

    def __init__(self, clock):
        self.clock = clock
        self.waited_for = -1.0

    def Event(self, enable_timing):
        clock, recorded = self, []

        class Event:
            def record(self):
                recorded.append(clock.clock.now())

            def query(self):
                return recorded[0] <= clock.waited_for

            def elapsed_time(self, end):
                return 1000 * (end.recorded_at() - recorded[0])

            def recorded_at(self):
                return recorded[0]

        return Event()


def test_on_the_gpu_a_step_is_read_only_once_it_is_done(clock, monkeypatch):
    device_clock = DeviceClock(clock)
    monkeypatch.setattr(torch.cuda, "Event", device_clock.Event)
    timer = PhaseTimer(torch.device("cuda"))
    for waits in (False, True):
        with timer.phase("forward"):
            clock.sleep(1)
        clock.sleep(2)
        with timer.phase("backward"):
            clock.sleep(3)
            timer.rest_is("communication")
            clock.sleep(1)
        if waits:
            device_clock.waited_for = clock.now()
        phases = timer.step_done()
        assert (phases is not None) == waits
    assert phases == {**dict.fromkeys(PHASES, 0.0), "forward": 1, "backward": 3, "communication": 1, "other": 2}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu_the_devices_time_is_counted_and_nothing_waits():
    device = torch.device("cuda")
    timer, x = PhaseTimer(device), torch.randn(8192, 8192, device=device)
    x @ x  # the first product loads its kernels
    torch.cuda.synchronize()
    for waits in (False, True):
        start = time.perf_counter()
        with timer.phase("forward"):
            for _ in range(50):
                x @ x
        queued = time.perf_counter() - start
        if waits:
            torch.cuda.synchronize()
        phases = timer.step_done()
        assert (phases is not None) == waits
        torch.cuda.synchronize()
    assert phases["forward"] > 2 * queued
    assert sum(phases.values()) < time.perf_counter() - start


def test_the_clock_of_compilations_counts_nothing_else():
    def slow(gm, inputs):
        time.sleep(0.05)
        return gm.forward

    compiled = torch.compile(lambda x: x + 1, backend=slow)
    with CompileClock() as clock:
        compiled(torch.ones(2))
        after_first = clock.seconds
        compiled(torch.ones(2))
        time.sleep(0.05)
    assert after_first >= 0.05
    assert clock.seconds == after_first
    torch._dynamo.reset()
    torch.compile(lambda x: x + 2, backend=slow)(torch.ones(2))
    assert clock.seconds == after_first, "it was left"

"""The peak that MFU is a fraction of, and what is said of a peak that cannot be right."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from nsa_compile.machine import matmul_rate
from nsa_compile.machine.matmul_rate import (
    MatmulRate,
    best_of,
    busy,
    impossible,
    measure_matmul,
    multiplied_dtypes,
    total,
)

CPU = torch.device("cpu")


def test_matmul_rate_is_a_plausible_number():
    rate = measure_matmul(CPU, seconds=0.05).peak
    assert 1e8 < rate < 1e14


@pytest.fixture
def clock(monkeypatch):
    """A machine whose products take what `seconds(side, threads)` says; returns a setter for that."""
    state = {"now": 0.0, "threads": 4, "seconds": None}
    monkeypatch.setattr(matmul_rate.time, "perf_counter", lambda: state["now"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)

    def product(side, device, dtype):
        return lambda: state.update(now=state["now"] + state["seconds"](side, state["threads"]))

    monkeypatch.setattr(matmul_rate, "_product", product)
    return state


def at_rate(rate):
    """Seconds of products that all have a rate by side and threads."""
    return lambda side, threads: 2 * side**3 / rate(side, threads)


@pytest.mark.parametrize("fastest", [256, 512, 1024])
def test_the_best_of_several_sizes_counts(clock, fastest):
    clock["seconds"] = at_rate(lambda side, threads: threads * (2e11 if side == fastest else 1e11))
    assert measure_matmul(CPU, seconds=0.5).peak == pytest.approx(8e11)


def test_a_busy_machine_has_the_peak_of_its_threads_all_the_same(clock):
    """Neighbours take the cores whenever threads wait for each other; one thread has its time slice to itself."""
    clock["seconds"] = at_rate(lambda side, threads: 1e11 if threads == 1 else 5e9)
    rate = measure_matmul(CPU, seconds=0.5)
    assert rate == MatmulRate(pytest.approx(4e11), pytest.approx(5e9), pytest.approx(5e9), 4)
    assert clock["threads"] == 4
    assert "busy with something else" in busy([rate, rate])


@pytest.mark.parametrize("threads", [1, 4])
def test_a_neighbour_that_takes_turns_shows(clock, threads):
    """Most products are as fast as ever, and some wait for somebody else's time slice."""
    clock["threads"], turn = threads, itertools.count()

    def seconds(side, threads):
        return 2 * side**3 / (threads * 1e11) * (12 if next(turn) % 5 == 4 else 1)

    clock["seconds"] = seconds
    rate = measure_matmul(CPU, seconds=0.5)
    assert rate.peak == pytest.approx(threads * 1e11)
    assert rate.usual < 0.55 * rate.best
    clock["seconds"] = at_rate(lambda side, threads: threads * 1e11)
    idle = measure_matmul(CPU, seconds=0.5)
    assert idle.usual == pytest.approx(idle.peak)
    assert busy([idle, idle]) is None
    assert busy([idle, rate]) is not None


def test_the_fastest_of_the_dtypes_counts_and_threads_beyond_the_cores_do_not(clock):
    clock["seconds"] = at_rate(lambda side, threads: threads * 1e11)
    alone = measure_matmul(CPU, (torch.float32, torch.bfloat16), seconds=0.5)
    assert alone.peak == pytest.approx(4e11)
    sharing = [measure_matmul(CPU, seconds=0.5, processes=2)] * 2  # eight threads on four cores
    assert total(sharing).peak == pytest.approx(alone.peak)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_low_precision_is_measured_as_it_is_multiplied(dtype):
    assert measure_matmul(CPU, (dtype,), seconds=0.01).peak > 1e8


def test_a_run_multiplies_in_more_than_one_dtype():
    assert multiplied_dtypes("float32") == (torch.float32,)
    assert multiplied_dtypes("bf16", "int8") == (torch.float32, torch.bfloat16, torch.int8)


@pytest.mark.parametrize(
    ("usual", "found"), [((1.0, 0.9), False), ((1.0, 0.5), True), ((0.5, 1.0), True), ((0.3, 0.31), True)]
)
def test_measurements_that_disagree_mean_a_busy_machine(usual, found):
    rates = [MatmulRate(1e11 * peak, 1e11, 1e11 * rate, 2) for peak, rate in zip((1.0, 1.1), usual, strict=True)]
    assert best_of(rates) == pytest.approx(1.1e11)
    assert (busy(rates) is not None) == found


def test_more_than_the_peak_is_impossible():
    assert impossible(None) is None
    assert impossible(1.0) is None
    assert "MFU 107.0% is impossible" in impossible(1.07)

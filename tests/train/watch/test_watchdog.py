"""The rules of the watchdog: each finds its planted fault and is silent on healthy runs."""

from __future__ import annotations

import math
import random
import socket

import pytest

from nsa_compile.config import WatchdogSection, load_config
from nsa_compile.errors import UserError
from nsa_compile.train.watch.run_state import RankState, present_attempt
from nsa_compile.train.watch.watchdog import Watchdog, action_for

BEGAN = 1_000_000.0
TOKENS_PER_S = 1000.0
RSS = 2_000_000_000


class Simulation:
    """Ranks that beat every 5 s on a clock of their own, and a watchdog that looks as often."""

    def __init__(self, world_size=1, since=0.0, **limits):
        self.now = BEGAN
        self.world_size = world_size
        self.since = since
        self.ranks = [RankState(rank) for rank in range(world_size)]
        self.phases = [("idle", BEGAN)] * world_size
        self.steps = [0] * world_size
        self.silent = set()
        self.watchdog = Watchdog(WatchdogSection(**limits), clock=lambda: self.now)
        self.found = []
        for rank in range(world_size):
            self.start(rank)

    def start(self, rank, attempt=1):
        host = socket.gethostname()
        self._row(rank, "start", started=1, host=host, attempt=attempt, world_size=self.world_size)

    def _row(self, rank, kind, **columns):
        phase, since = self.phases[rank]
        common = {"kind": kind, "time": self.now, "pid": 100 + rank, "step": self.steps[rank], "phase": phase}
        self.ranks[rank].add(common | {"phase_s": self.now - since, "rss": RSS} | columns)

    def enter(self, phase, *ranks):
        for rank in ranks or range(self.world_size):
            self.phases[rank] = (phase, self.now)

    def step(self, *ranks, **columns):
        values = {"loss": 2.0, "grad_norm": 1.0, "tokens_per_s": TOKENS_PER_S} | columns
        for rank in ranks or range(self.world_size):
            self.steps[rank] += 1
            self._row(rank, "step", **values)

    def wait(self, seconds):
        for _ in range(round(seconds / 5)):
            self.now += 5
            for rank in range(self.world_size):
                if rank not in self.silent:
                    self._row(rank, "beat")
            self.look()

    def look(self):
        self.found += self.watchdog.observe(present_attempt(self.ranks, self.since))

    def end(self, *ranks, error=None):
        for rank in ranks or range(self.world_size):
            self._row(rank, "end", error=error)
            self.silent.add(rank)

    def train(self, steps, seconds=5.0, **columns):
        """Healthy steps, `columns` functions of the step."""
        for _ in range(steps):
            for phase in ("data", "forward", "backward", "communication", "optimizer"):
                self.enter(phase)
                self.now += seconds / 5
            self.step(**{name: value(self.steps[0] + 1) for name, value in columns.items()})
            self.look()

    def only(self):
        (finding,) = self.found
        return finding


# Healthy runs: nobody says anything.


def test_a_long_healthy_run_with_pauses_and_noise():
    noise = random.Random(1)
    run = Simulation(world_size=2)
    run.enter("compile")
    run.wait(1500)  # slow compilation of the first step
    run.enter("backward")
    run.wait(200)  # and of its backward pass
    healthy = {
        "tokens_per_s": lambda step: 10.0 if step == 1 else TOKENS_PER_S * noise.uniform(0.3, 1.3),
        "loss": lambda step: 1.2 + 4.3 * math.exp(-step / 60) + noise.gauss(0, 0.3),
        "grad_norm": lambda step: noise.lognormvariate(0, 1),
        # Caches fill during the first steps, then there is noise and one jump.
        "rss": lambda step: int(RSS * (2 - math.exp(-step / 15) + noise.gauss(0, 0.03) + (step > 500) * 0.3)),
        "gates": lambda step: {"0": [noise.uniform(0.0, 0.4), 0.3, 0.5], "1": [0.3, noise.uniform(0.0, 0.4), 0.5]},
    }
    for _ in range(8):
        run.train(100, seconds=1.0, **healthy)
        run.enter("evaluate")
        run.wait(300)
        run.enter("checkpoint")
        run.wait(300)
    run.end()
    run.wait(2000)
    assert run.found == []


@pytest.mark.parametrize("pause", ["evaluate", "checkpoint"])
def test_ranks_may_wait_for_one_that_evaluates_or_saves(pause):
    run = Simulation(world_size=3)
    run.train(30)
    run.enter("communication")
    run.enter(pause, 0)
    run.wait(1500)
    run.enter("data", 0)  # the others have waited for long, but it is under way
    run.wait(10)
    run.train(30)
    assert run.found == []


def test_slow_steps_are_not_stalls():
    run = Simulation(world_size=2)
    for _ in range(8):
        run.enter("forward")
        run.wait(400)
        run.step()
    assert run.found == []


def test_a_restarted_run_is_not_measured_by_the_one_before():
    run = Simulation(world_size=2)
    run.train(60, loss=lambda step: 0.1)
    run.now += 100
    run.steps = [30, 30]
    for rank in (0, 1):
        run.start(rank, attempt=2)
        run.enter("idle", rank)
        run.now += 60  # while rank 1, of which only old rows are known, starts
        run.look()
    run.enter("compile")
    run.wait(1000)
    run.train(60, loss=lambda step: 5.0, tokens_per_s=lambda step: 100.0)
    assert run.found == []


# Stalls: who is to blame is named.


@pytest.mark.parametrize(
    ("phase", "rule"),
    [
        ("data", "stalled-data"),
        ("forward", "stalled-compute"),
        ("backward", "stalled-compute"),
        ("optimizer", "stalled-compute"),
        ("communication", "stalled-collective"),
    ],
)
def test_one_rank_that_hangs(phase, rule):
    run = Simulation()
    run.train(30)
    run.enter(phase)
    run.wait(175)
    assert run.found == []
    run.wait(500)
    assert (run.only().rule, run.only().severity, run.only().ranks) == (rule, "stalled", (0,))
    assert f"in {phase} for 18" in run.only().message
    # It was not dead after all, and hangs again.
    run.train(30)
    run.enter(phase)
    run.wait(500)
    assert [finding.rule for finding in run.found] == [rule, rule]


@pytest.mark.parametrize("phase", ["evaluate", "checkpoint", "compile", "idle"])
def test_a_pause_without_end(phase):
    run = Simulation()
    run.train(30)
    run.enter(phase)
    run.wait(1790)
    assert run.found == []
    run.wait(50)
    assert run.only().rule == "stalled-compute"


def test_a_first_step_without_end():
    run = Simulation(startup_s=600.0)
    run.enter("forward")
    run.wait(595)
    assert run.found == []
    run.wait(50)
    assert run.only().rule == "stalled-compute"


@pytest.mark.parametrize(
    ("waiting", "phase", "rule"),
    [
        ("communication", "data", "stalled-data"),
        ("backward", "data", "stalled-data"),
        ("communication", "optimizer", "stalled-compute"),
        ("communication", "backward", "stalled-compute"),
    ],
)
def test_who_does_not_arrive_at_a_collective_is_named(waiting, phase, rule):
    run = Simulation(world_size=4)
    run.train(30)
    run.enter(waiting)
    run.enter(phase, 2)
    run.wait(400)
    assert (run.only().rule, run.only().ranks) == (rule, (2,))
    assert run.only().message.startswith(f"rank 2 has been in {phase} for 18")
    assert run.only().message.endswith("; ranks 0, 1, 3 wait in a collective")


@pytest.mark.parametrize("phase", ["communication", "backward"])
def test_all_in_the_collective(phase):
    run = Simulation(world_size=3)
    run.train(30)
    run.enter(phase)
    run.wait(400)
    assert (run.only().rule, run.only().ranks) == ("stalled-collective", (0, 1, 2))
    assert "every one has arrived" in run.only().message


def test_ranks_in_different_collectives():
    run = Simulation(world_size=3)
    run.train(30)
    run.step(0, 2)
    run.enter("communication")
    run.wait(400)
    assert (run.only().rule, run.only().ranks) == ("stalled-collective", (1,))
    assert "rank 1 after step 30, others after step 31" in run.only().message


def test_a_rank_that_left_while_others_wait():
    run = Simulation(world_size=3)
    run.train(30)
    run.enter("communication")
    run.end(1)
    run.wait(400)
    assert (run.only().rule, run.only().ranks) == ("stalled-collective", (1,))
    assert run.only().message.startswith("rank 1 left while ranks 0, 2 wait in communication for 18")


def test_a_dead_rank_is_named_and_not_those_who_wait_for_it():
    run = Simulation(world_size=3)
    run.train(30)
    run.enter("communication")
    run.enter("forward", 1)
    run.ranks[1].process = "dead"
    run.silent = {1}
    run.wait(1000)
    assert (run.only().rule, run.only().ranks) == ("dead", (1,))
    assert run.only().message == (
        "rank 1 is dead: process 101 is gone, in optimizer after step 30; ranks 0, 2 wait in a collective"
    )


def test_several_dead_ranks_are_one_finding_and_a_further_one_another():
    run = Simulation(world_size=4)
    run.train(30)
    for rank in (1, 2):
        run.ranks[rank].process = "dead"
    run.wait(10)
    assert (run.only().rule, run.only().ranks) == ("dead", (1, 2))
    assert run.only().message.endswith("rank 2 likewise")
    run.ranks[3].process = "dead"
    run.wait(10)
    assert [finding.ranks for finding in run.found] == [(1, 2), (1, 2, 3)]


def test_a_silent_rank_is_named():
    run = Simulation(world_size=2)
    run.train(30)
    run.enter("communication", 0)
    run.silent = {1}
    run.ranks[1].process = "stopped"
    run.wait(60)
    assert run.found == []
    run.wait(1000)
    assert (run.only().rule, run.only().ranks) == ("silent", (1,))
    assert "process 101 is stopped by a signal; rank 0 waits in a collective" in run.only().message


def test_neither_a_dead_nor_a_silent_rank_waits():
    run = Simulation(world_size=4)
    run.train(30)
    run.enter("communication")
    run.wait(10)
    run.ranks[1].process = "dead"
    run.silent = {1, 2}
    run.wait(100)
    assert [(finding.rule, finding.ranks) for finding in run.found] == [("dead", (1,)), ("silent", (2,))]
    assert run.found[1].message.endswith("; ranks 0, 3 wait in a collective")


def test_a_rank_that_never_started_is_named():
    run = Simulation(world_size=2, startup_s=600.0)
    run.ranks.pop()
    run.phases[0] = ("communication", run.now)
    run.world_size = 1  # rank 1 writes nothing
    run.wait(590)
    assert run.found == []
    run.wait(100)
    assert (run.only().rule, run.only().ranks) == ("missing", (1,))


def test_a_rank_that_left_by_an_error():
    run = Simulation(world_size=2)
    run.train(5)
    run.end(1, error="OutOfMemoryError")
    run.look()
    assert (run.only().rule, run.only().ranks) == ("failed", (1,))
    assert "OutOfMemoryError" in run.only().message


def test_a_rank_that_left_because_it_diverged_or_was_asked_to():
    run = Simulation(world_size=3)
    run.train(5)
    run.end(0, error="Halted")
    run.end(2, error="SystemExit")
    run.look()
    assert run.found == []
    run.end(1, error="TrainingDiverged")
    run.look()
    assert (run.only().rule, run.only().severity, run.only().ranks) == ("failed", "diverged", (1,))


def test_ranks_of_a_larger_earlier_attempt_are_not_missed():
    run = Simulation(world_size=3)
    run.train(5)
    run.now += 1000
    run.world_size = 2
    run.ranks[2].process = "dead"
    for rank in (0, 1):
        run.start(rank, attempt=2)
    run._row(2, "beat")  # its last, and it was late
    run.train(30)
    assert run.found == []


def test_attempts_before_the_launch_are_not_looked_at():
    run = Simulation(world_size=2, since=BEGAN + 1)
    run.ranks[0].process = run.ranks[1].process = "dead"
    run.wait(2000)
    assert run.found == []


# Divergence.


@pytest.mark.parametrize("column", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite(column, value):
    run = Simulation(world_size=2)
    run.train(10)
    run.step(**{column: value})
    run.step()  # skipped, before anybody looked
    run.look()
    assert (run.only().rule, run.only().severity, run.only().ranks) == ("nonfinite", "diverged", (0, 1))
    assert f"{column.replace('grad_norm', 'gradient norm')} = {value}" in run.only().message
    assert "at step 11 must be finite; rank 1 likewise" in run.only().message


def test_what_was_skipped_before_the_first_look_is_history():
    run = Simulation()
    run.step(loss=math.nan)
    run.step()
    run.look()
    assert run.found == []


def test_a_loss_that_rises_and_stays():
    run = Simulation(world_size=2)
    run.train(60, loss=lambda step: 1.5)
    run.train(19, loss=lambda step: 2.6)
    assert run.found == []
    run.train(41, loss=lambda step: 2.6)
    assert (run.only().rule, run.only().severity, run.only().ranks) == ("diverging", "diverged", (0, 1))
    assert "at least 2.600 for 20 steps, and its best was 1.500" in run.only().message


def test_spikes_are_not_a_divergence():
    run = Simulation()
    run.train(300, loss=lambda step: 9.0 if step % 20 < 18 and 100 < step < 118 else 1.5)
    assert run.found == []


# Degradation.


def test_throughput_that_falls_and_stays():
    run = Simulation(world_size=2)
    run.train(60)
    run.train(19, tokens_per_s=lambda step: 400.0)
    assert run.found == []
    run.train(30, tokens_per_s=lambda step: 400.0)
    assert (run.only().rule, run.only().severity, run.only().ranks) == ("throughput", "degraded", (0, 1))
    assert "at most 400 tokens/s for 20 steps, and 1,000 before" in run.only().message


def test_a_fast_beginning_is_no_measure():
    run = Simulation()
    run.train(20, tokens_per_s=lambda step: 9000.0)
    run.train(60)
    assert run.found == []


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_branch_that_collapses(branch):
    gates = [0.4, 0.4, 0.4]
    gates[branch] = 0.001
    run = Simulation()
    run.train(10, gates=lambda step: {"0": [0.4, 0.4, 0.4], "7": [0.4, 0.4, 0.4]})
    run.train(4, gates=lambda step: {"0": [0.4, 0.4, 0.4], "7": gates})
    run.train(1)  # a step without a report counts for nothing
    assert run.found == []
    run.train(10, gates=lambda step: {"0": [0.4, 0.4, 0.4], "7": gates})
    assert (run.only().rule, run.only().severity) == ("gates", "degraded")
    assert f"{('compressed', 'selected', 'window')[branch]} branch in the gates of layer 7" in run.only().message


def test_gates_that_are_all_closed_or_not_a_number():
    run = Simulation()
    run.train(10, gates=lambda step: {"0": [math.nan, 0.0, 0.0]})
    assert run.found == []
    run.train(10, gates=lambda step: {"0": [0.0, 0.0, 0.0]})
    assert run.only().rule == "gates"


@pytest.mark.parametrize("column", ["rss", "device_bytes"])
def test_memory_that_grows_without_end(column):
    noise = random.Random(2)
    run = Simulation()
    run.train(900, **{column: lambda step: int(RSS * (1 + step * 3e-4 + noise.gauss(0, 0.02)))})
    assert (run.only().rule, run.only().severity) == ("memory", "degraded")
    assert "grows by 0.6" in run.only().message


@pytest.mark.deep(but=["<lambda>1"])
@pytest.mark.parametrize(
    "shape",
    [
        lambda step: 1 + (step > 200),  # a jump
        lambda step: 1 - math.exp(-step / 60) / 2,  # flattens
        lambda step: 1 + (step % 7) / 10,  # a saw
        lambda step: 2 - step / 1000,  # shrinks
    ],
)
def test_memory_that_does_not(shape):
    run = Simulation()
    run.train(900, rss=lambda step: int(RSS * shape(step)))
    assert run.found == []


# Configuration.


def test_each_severity_has_its_action():
    config = WatchdogSection(on_stalled="restart", on_diverged="halt", on_degraded="dump")
    run = Simulation()
    run.step(loss=math.nan)
    run.look()
    assert action_for(run.only(), config) == "halt"


def test_a_silence_shorter_than_the_beat_is_a_mistake():
    with pytest.raises(UserError, match=r"watchdog\.silent_s = 10\.0 must be at least three times") as error:
        load_config(overrides=["watchdog.silent_s=10"])
    assert "\n" not in str(error.value)


def test_an_action_that_does_not_exist_is_a_mistake():
    with pytest.raises(UserError, match=r"watchdog\.on_stalled = 'explode' is not allowed"):
        load_config(overrides=["watchdog.on_stalled=explode"])

"""Watching real processes: who hangs, was stopped or was killed is named, and what was ordered is done."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from nsa_compile.config import load_config
from nsa_compile.train.records.jsonl import JsonlReader
from nsa_compile.train.watch.halt import halt_reason
from nsa_compile.train.watch.heartbeat import heartbeat_path, stacks_path
from nsa_compile.train.watch.run_state import HeartbeatFiles, RankState, RunState, present_attempt
from nsa_compile.train.watch.watch_cli import _progress, duration
from nsa_compile.train.watch.watchdog import WATCHDOG_FILE, Actions, run_watchdog

COMMAND = [sys.executable, "-c", "from nsa_compile.cli import main; main()", "watch"]
# A rank that beats and steps every few milliseconds may have to wait for a busy machine, but not for so long.
LIMITS = {"interval_s": 0.1, "silent_s": 30.0, "stall_s": 30.0, "pause_s": 60.0, "startup_s": 60.0}
# For ranks that all hang, or wait for one that does.
HANGING = ("--set", "watchdog.stall_s=1")

RANK = """
import itertools, sys, time
from pathlib import Path
from nsa_compile.train.watch.halt import halt_reason
from nsa_compile.train.watch.heartbeat import Heartbeat, heartbeat_path, install_stack_dump
directory, rank, world_size, fate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def hang_here():
    time.sleep(600)

def starts(rank):
    path = heartbeat_path(directory, rank)
    return path.read_bytes().count(b'"start"') if path.exists() else 0

install_stack_dump(directory, rank)
with Heartbeat(directory, rank, 0.1, world_size=world_size) as heartbeat:
    # As a process group has it: none goes on, let alone ends, before all are there, in this attempt.
    while not all(starts(other) >= starts(rank) for other in range(world_size)):
        time.sleep(0.01)
    for step in itertools.count(1):
        for phase in ("data", "forward", "backward", "communication"):
            heartbeat.phase(phase)
            if fate == phase and step == 20:
                hang_here()
        loss = float("nan") if fate == "nan" and step > 20 else 1.5
        heartbeat.step(step, loss, 1.0, 1000.0, gates={0: [0.2, 0.3, 0.5]})
        time.sleep(0.005)
        if (fate == "ends" and step == 20) or halt_reason(directory):
            break
"""


@pytest.fixture
def directory(tmp_path, tiny_overrides):
    """A run's directory with its configuration."""
    config = load_config(overrides=tiny_overrides(**{f"watchdog.{key}": value for key, value in LIMITS.items()}))
    (tmp_path / "config.resolved.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return tmp_path


@pytest.fixture
def start(directory):
    """`start("data", "communication")`: a process for each fate, past its 19th step."""
    with contextlib.ExitStack() as stack:

        def make(*fates):
            processes = []
            for rank, fate in enumerate(fates):
                arguments = [sys.executable, "-c", RANK, str(directory), str(rank), str(len(fates)), fate]
                processes.append(stack.enter_context(subprocess.Popen(arguments)))
                stack.callback(processes[-1].kill)
            wait_until(lambda: [state.last.step >= 19 for state in read(directory).ranks] == [True] * len(fates))
            return processes

        yield make


def read(directory):
    return present_attempt(HeartbeatFiles(directory).read())


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)
    return result


def watch(directory, *arguments):
    return subprocess.run(
        [*COMMAND, str(directory), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def only_finding(result):
    (finding,) = json.loads(result.stdout)["findings"]
    return finding["rule"], finding["ranks"]


@pytest.mark.deep
def test_a_rank_that_hangs_in_its_data_is_named_and_all_write_their_stacks(directory, start):
    start("communication", "data")
    result = watch(directory, "--json", "--action", "dump", *HANGING)
    assert result.returncode == 4, result.stderr
    assert only_finding(result) == ("stalled-data", [1])
    assert re.match(r"watchdog: rank 1 has been in data for \d+ s after step 19; rank 0 waits", result.stderr)
    assert result.stderr.count("\n") == 1
    (row,) = JsonlReader(directory / WATCHDOG_FILE).rows()
    assert (row["rule"], row["ranks"], row["action"], row["dumped"]) == ("stalled-data", [1], "dump", [0, 1])
    for rank in (0, 1):
        text = wait_until(lambda rank=rank: "hang_here" in (t := stacks_path(directory, rank).read_text()) and t)
        assert text.index("rank 1 has been in data for ") < text.index("hang_here")
    assert [state.process for state in read(directory).ranks] == ["running", "running"]


@pytest.mark.deep
def test_ranks_that_all_hang_in_the_collective(directory, start):
    start("communication", "communication")
    time.sleep(1.2)
    result = watch(directory, "--once", "--json", *HANGING)
    assert result.returncode == 4, result.stderr
    assert only_finding(result) == ("stalled-collective", [0, 1])
    assert not (directory / WATCHDOG_FILE).exists()  # without --action it only looks


def test_a_rank_that_is_stopped_and_one_that_is_killed(directory, start):
    waiting, other = start("communication", "never")
    other.send_signal(signal.SIGSTOP)
    result = watch(directory, "--json", "--set", "watchdog.silent_s=3")
    assert result.returncode == 4, result.stderr
    assert only_finding(result) == ("silent", [1])
    assert f"process {other.pid} is stopped by a signal; rank 0 waits" in result.stderr
    other.send_signal(signal.SIGCONT)
    wait_until(lambda: read(directory).ranks[1].process == "running")
    other.kill()
    other.wait()
    result = watch(directory, "--json")
    assert result.returncode == 4, result.stderr
    assert only_finding(result) == ("dead", [1])
    assert f"rank 1 is dead: process {other.pid} is gone" in result.stderr
    assert waiting.poll() is None


@pytest.mark.deep
def test_a_healthy_run_ends_well(directory, start):
    start("ends", "ends")
    result = watch(directory, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["status"], report["findings"]) == ("ended", [])
    assert [row["step"] for row in report["ranks"]] == [20, 20]
    assert report["ranks"][1]["gates"] == {"c": 0.2, "s": 0.3, "w": 0.5}
    assert watch(directory, "--once").returncode == 0


@pytest.mark.deep
def test_a_table_has_a_line_for_each_rank(directory, start):
    start("never", "never")
    result = watch(directory, "--once")
    assert (result.returncode, result.stderr) == (0, "")
    progress, _, header, _, *lines = result.stdout.splitlines()
    assert re.fullmatch(r"\d+ of 4 steps, 0 s left", progress), "it does more than it was to do"
    assert " ".join(header.split()) == "rank step phase, since loss tokens/s memory gates c s w"
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert "1.5000" in lines[1]
    assert "0.20 0.30 0.50" in lines[1]
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12_010, "3 h 20 min"), (42.4, "42 s"), (307, "5 min 7 s"), (90_000, "1 d 1 h"), (3600, "1 h"), (0, "0 s")],
)
def test_a_time_is_told_in_two_units(seconds, text):
    assert duration(seconds) == text


def test_what_is_left_goes_by_the_slowest_rank():
    states = []
    for rank, pace in ((0, 1.0), (1, 30.0)):
        state = RankState(rank, step_count=73, last=SimpleNamespace(step=473))
        state.steps.extend(SimpleNamespace(time=pace * step) for step in range(1, 74))
        states.append(state)
    assert _progress(RunState(states), 40_000) == "473 of 40,000 steps, 13 d 17 h left"
    assert _progress(RunState(states[:1], [1]), 40_000) == "0 of 40,000 steps, 11 h 6 min left"


def test_nothing_is_left_to_a_dead_run():
    state = RankState(0, step_count=20, last=SimpleNamespace(step=20), process="dead")
    state.steps.extend(SimpleNamespace(time=float(step)) for step in range(20))
    assert _progress(RunState([state]), 2_000) == "20 of 2,000 steps"


@pytest.mark.deep
def test_in_a_terminal_a_table_is_drawn_over_the_one_before(directory, start):
    start("never")
    screen, terminal = pty.openpty()
    # A shell starts its background jobs deaf to Ctrl-C, and the tests may be one.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([*COMMAND, str(directory)], stdout=terminal, preexec_fn=listen) as process:
        os.close(terminal)
        text = b""
        while text.count(b"\x1b[5A\x1b[J") < 2:
            text += os.read(screen, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    os.close(screen)


@pytest.mark.deep
def test_halt_stops_a_run_that_diverged(directory, start):
    processes = start("nan", "never")
    result = watch(directory, "--action", "halt")
    assert result.returncode == 4, result.stderr
    assert halt_reason(directory).startswith("watchdog: rank 0: loss = nan and gradient norm = 1.0 at step ")
    assert [process.wait(20) for process in processes] == [0, 0]
    assert all("Traceback" not in line for line in result.stderr.splitlines())


@contextlib.contextmanager
def watching(directory, actions, **options):
    limits = {f"watchdog.{key}": value for key, value in options.pop("limits", {}).items()}
    config = load_config(str(directory / "config.resolved.yaml"), [f"{key}={value}" for key, value in limits.items()])
    stop = threading.Event()
    thread = threading.Thread(target=run_watchdog, args=(directory, config.watchdog, actions, stop), kwargs=options)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.deep
def test_restart_kills_the_ranks_once_and_watches_the_next_attempt(directory, start):
    processes = start("communication", "data")
    with watching(directory, Actions(directory), limits={"on_stalled": "restart", "stall_s": 2.0, "silent_s": 2.0}):
        assert [process.wait(20) for process in processes] == [-signal.SIGKILL] * 2
        time.sleep(2.5)  # the killed ranks are dead and silent, which is as it should be
        again = start("ends", "data")
        assert again[1].wait(20) == -signal.SIGKILL
    rows = list(JsonlReader(directory / WATCHDOG_FILE).rows())
    assert [(row["rule"], row["ranks"], row["action"]) for row in rows] == [("stalled-data", [1], "restart")] * 2
    assert "hang_here" in stacks_path(directory, 0).read_text()
    assert read(directory).ranks[1].start.attempt == 2


@pytest.mark.deep
def test_a_healthy_run_and_what_was_before_it_are_left_alone(directory, start, capfd):
    for process in start("data", "data"):
        process.kill()
        process.wait()
    since = time.time()
    actions = Actions(directory)
    limits = {"on_stalled": "restart", "on_degraded": "halt", "stall_s": 3.0, "silent_s": 3.0}
    with watching(directory, actions, since=since, limits=limits):
        processes = start("never", "never")
        time.sleep(4)
        assert [process.poll() for process in processes] == [None, None]
    assert capfd.readouterr().err == ""
    assert not (directory / WATCHDOG_FILE).exists()


def test_a_full_disk_does_not_end_the_watchdog(directory, start, capfd):
    start("data")
    (directory / WATCHDOG_FILE).symlink_to("/dev/full")
    with watching(directory, Actions(directory), limits={"stall_s": 1.0}):
        wait_until(lambda: "cannot be written" in capfd.readouterr().err)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.deep(but=[""])
@pytest.mark.parametrize("content", [b"", b"garbage\n\xff\n", b'{"kind": "start"}\n'])
def test_heartbeats_without_a_row_are_a_mistake(directory, content):
    heartbeat_path(directory, 0).write_bytes(content)
    result = watch(directory, "--once")
    assert result.returncode == 2
    assert "hold no whole row yet" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.deep
def test_what_is_no_run_is_a_mistake(directory, tmp_path_factory):
    for path, expected in (
        (directory / "missing", "must be the directory of a run, with 'config.resolved.yaml' in it"),
        (tmp_path_factory.mktemp("empty"), "must be the directory of a run"),
        (directory, "has no heartbeat_rank0.jsonl yet"),
    ):
        result = watch(path)
        assert (result.returncode, result.stdout) == (2, "")
        assert expected in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.deep(but=["arguments0---set 'train.steps=5' must begin with 'watchdog.'"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "train.steps=5"], "--set 'train.steps=5' must begin with 'watchdog.'"),
        (["--set", "watchdog.stall=5"], "did you mean 'watchdog.stall_s'?"),
        (["--set", "watchdog.stall_s=-1"], "watchdog.stall_s = -1 is not allowed"),
        (["--action", "restart"], "'restart' is not one of 'warn', 'dump', 'halt'"),
    ],
)
def test_mistyped_options_end_in_one_line(directory, arguments, expected):
    result = watch(directory, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.deep
def test_watching_imports_no_torch(directory, start):
    start("ends")
    code = (
        "import sys\nfrom nsa_compile.cli import main\n"
        f"try: main({['watch', str(directory)]!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0

"""Heartbeats: what is written is what is read, by whatever the process ends; what others write does no harm."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.train.records.jsonl import MAX_ROW_BYTES, JsonlReader, JsonlWriter
from nsa_compile.train.watch.halt import clear_halt, halt_reason, request_halt
from nsa_compile.train.watch.heartbeat import PHASES, Heartbeat, heartbeat_path, heartbeat_ranks, parse_row, stacks_path
from nsa_compile.train.watch.processes import send_signal, start_ticks
from nsa_compile.train.watch.run_state import HeartbeatFiles


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_of_a_run(tmp_path):
    with Heartbeat(tmp_path, 3, 0.02, world_size=4) as heartbeat:
        heartbeat.phase("backward")
        heartbeat.step(1, 5.5, 0.25, 1000.0, gates={0: [0.1, 0.2, 0.7]}, device_bytes=123)
        heartbeat.phase("communication")
        wait_until(lambda: rows(heartbeat.path)[-1]["phase_s"] > 0.04)
    start, step, *beats, end = rows(tmp_path / "heartbeat_rank3.jsonl")
    assert (start["kind"], start["attempt"], start["world_size"]) == ("start", 1, 4)
    assert (start["pid"], start["started"]) == (os.getpid(), start_ticks(os.getpid()))
    assert (step["step"], step["loss"], step["phase"], step["gates"]) == (1, 5.5, "backward", {"0": [0.1, 0.2, 0.7]})
    assert [beat["kind"] for beat in beats] == ["beat"] * len(beats) != []
    assert (beats[-1]["phase"], beats[-1]["step"]) == ("communication", 1)
    assert 0.04 < beats[-1]["phase_s"] < 25
    assert 1e6 < beats[-1]["rss"] < 1e11
    assert (end["kind"], end["error"]) == ("end", None)


def test_a_second_attempt_is_appended_and_an_exception_is_named(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyError), Heartbeat(tmp_path, 0):
            raise KeyError
    assert [(row["kind"], row.get("attempt"), row.get("error")) for row in rows(heartbeat_path(tmp_path, 0))] == [
        ("start", 1, None),
        ("end", None, "KeyError"),
        ("start", 2, None),
        ("end", None, "KeyError"),
    ]
    (state,) = HeartbeatFiles(tmp_path).read()
    assert (state.start.attempt, state.end.error, state.process) == (2, "KeyError", "running")


def test_losses_that_are_not_finite_are_json_and_come_back(tmp_path):
    with Heartbeat(tmp_path, 0) as heartbeat:
        heartbeat.step(1, math.nan, math.inf, -math.inf, gates={0: [math.nan, 0.0, 0.0]})
    strict = [json.loads(line, parse_constant=pytest.fail) for line in heartbeat_path(tmp_path, 0).open()]
    assert strict[1]["loss"] == "nan"
    (state,) = HeartbeatFiles(tmp_path).read()
    assert math.isnan(state.steps[0].loss)
    assert (state.steps[0].grad_norm, state.steps[0].tokens_per_s) == (math.inf, -math.inf)


def test_what_the_reader_would_pass_over_is_not_written(tmp_path):
    with Heartbeat(tmp_path, 0) as heartbeat:
        with pytest.raises(ValueError, match="cannot hold"):
            heartbeat.step(1, 1.0, 1.0, 1.0, gates={0: [0.5, 0.5]})
        with pytest.raises(ValueError, match="phase = 'thinking' must be one of"):
            heartbeat.phase("thinking")
    assert [row["kind"] for row in rows(heartbeat_path(tmp_path, 0))] == ["start", "end"]


def test_a_phase_costs_next_to_nothing(tmp_path):
    with Heartbeat(tmp_path, 0) as heartbeat:
        start = time.thread_time()  # of this thread alone: others may be busy
        for _ in range(10_000):
            heartbeat.phase("forward")
        assert time.thread_time() - start < 0.2  # 20 µs each; here it is 0.2 µs


FULL = """
import resource, sys
from pathlib import Path
from nsa_compile.train.watch.heartbeat import Heartbeat
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
with Heartbeat(Path(sys.argv[1]), 0) as heartbeat:
    for step in range(1, 20):
        heartbeat.step(step, 1.0, 1.0, 1.0)
"""


def test_a_full_disk_is_said_once_and_the_training_goes_on(tmp_path):
    result = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stderr.count("\n") == 1
    assert "heartbeat_rank0.jsonl' cannot be written: File too large; training goes on" in result.stderr
    whole = list(JsonlReader(heartbeat_path(tmp_path, 0)).rows())
    assert [row["kind"] for row in whole[:2]] == ["start", "step"]


def test_a_heartbeat_does_not_follow_links(tmp_path, capsys):
    heartbeat_path(tmp_path, 0).symlink_to(tmp_path / "elsewhere")
    with Heartbeat(tmp_path, 0) as heartbeat:
        heartbeat.step(1, 1.0, 1.0, 1.0)
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


KILLED = """
import itertools, sys
from pathlib import Path
from nsa_compile.train.watch.heartbeat import Heartbeat
with Heartbeat(Path(sys.argv[1]), 0) as heartbeat:
    for step in itertools.count(1):
        heartbeat.step(step, 1.0, 1.0, 1.0)
        if step == 50: print("going", flush=True)
"""


def test_a_killed_writer_leaves_whole_rows(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.kill()
    process.wait()
    process.stdout.close()
    path = heartbeat_path(tmp_path, 0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "st')  # had it been killed within a write
    with Heartbeat(tmp_path, 0):
        pass
    found = list(JsonlReader(path).rows())
    steps = [row["step"] for row in found if row["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 50
    assert [row["attempt"] for row in found if row["kind"] == "start"] == [1, 2]


def test_the_reader_reads_what_was_added(tmp_path):
    path = tmp_path / "x.jsonl"
    reader = JsonlReader(path)
    assert list(reader.rows()) == []
    path.write_bytes(b'{"a": 1}\n{"a":')
    assert list(reader.rows()) == [{"a": 1}]
    assert list(reader.rows()) == []
    with path.open("ab") as file:
        file.write(b" 2}\n")
    assert list(reader.rows()) == [{"a": 2}]
    path.write_bytes(b'{"a": 3}\n')  # another file, a shorter one
    assert list(reader.rows()) == [{"a": 3}]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1]",
        b"null",
        b"[" * 60_000,
        b"1" * 5000,
        b'{"a": "' + b"x" * MAX_ROW_BYTES + b'"}',
        b"x" * 5_000_000,  # more than is read at once
    ],
)
def test_lines_that_are_no_rows_are_passed_over(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(line + b'\n{"a": 1}\n')
    assert list(JsonlReader(path).rows()) == [{"a": 1}]


def test_links_and_pipes_are_not_read(tmp_path):
    (tmp_path / "secret").write_text('{"a": 1}\n')
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing"):
        assert list(JsonlReader(tmp_path / name).rows()) == []


def test_a_row_has_a_limited_length(tmp_path):
    with pytest.raises(ValueError, match="must not exceed 65536"):
        JsonlWriter(tmp_path / "x.jsonl").append({"a": "x" * MAX_ROW_BYTES})


GOOD = {"kind": "beat", "time": 1e9, "pid": 5, "step": 3, "phase": "data", "phase_s": 1.5, "rss": 10}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"time": "now"},
        {"time": math.nan},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**40},
        {"step": True},
        {"phase": "\x1b[2J"},
        {"phase_s": -1.0},
        {"rss": 1.5},
        {"kind": "step", "loss": "nine", "grad_norm": 1.0, "tokens_per_s": 1.0},
        {"kind": "step", "loss": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0, "gates": {"\x1b": [1.0, 0.0, 0.0]}},
        {"kind": "end", "error": "two\nlines"},
        {"kind": "start", "started": 1, "host": "h", "attempt": 1, "world_size": 10**9},
    ],
)
def test_rows_of_the_wrong_kind_are_passed_over(change):
    assert parse_row(GOOD) is not None
    assert parse_row(GOOD | change) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from([*GOOD, "loss", "gates", "started"]), json_values))
def test_no_row_raises(values):
    parse_row(values)
    parse_row(GOOD | values)


def test_only_heartbeat_files_have_ranks(tmp_path):
    for name in ("heartbeat_rank10.jsonl", "heartbeat_rank2.jsonl", "heartbeat_rank.jsonl", "heartbeat_rank1.json"):
        (tmp_path / name).touch()
    (tmp_path / "heartbeat_rank7.jsonl").mkdir()
    assert heartbeat_ranks(tmp_path) == [2, 10]
    assert heartbeat_ranks(tmp_path / "missing") == []


STUCK = """
import re, sys, threading
from pathlib import Path
from nsa_compile.train.watch.heartbeat import Heartbeat, install_stack_dump
def stuck_in_c():
    print("stuck", flush=True)
    re.match("(a+)+b", "a" * 40)  # holds the interpreter's lock for hours
install_stack_dump(Path(sys.argv[1]), 0)
with Heartbeat(Path(sys.argv[1]), 0):
    stuck_in_c()
"""


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return result


def test_a_process_stuck_in_c_code_writes_its_stacks_twice(tmp_path):
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stuck\n"
            time.sleep(0.1)
            path = stacks_path(tmp_path, 0)
            for count in (1, 2):
                process.send_signal(signal.SIGUSR1)
                wait_until(lambda count=count: path.read_text().count("in stuck_in_c") == count)
            assert process.poll() is None
        finally:
            process.kill()
    text = path.read_text()
    assert f"rank 0, pid {process.pid} from here on" in text
    assert text.count("=== 20") == 1
    assert text.count("_beat") >= 2  # of all threads


def test_a_signal_goes_only_to_the_process_that_is_meant(tmp_path):
    """One that got the number later, did not open the file or does not handle SIGUSR1 would die of it."""
    held = tmp_path / "held"
    code = "import sys, time, signal; f = open(sys.argv[1], 'w'); print('x', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(held)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            started = start_ticks(process.pid)
            assert started is not None
            other = tmp_path / "other"
            other.touch()
            assert not send_signal(process.pid, started, signal.SIGUSR1, holds=held)
            assert not send_signal(process.pid, started - 1, signal.SIGKILL, holds=held)
            assert not send_signal(process.pid, started, signal.SIGKILL, holds=other)
            time.sleep(0.1)
            assert process.poll() is None
            assert send_signal(process.pid, started, signal.SIGKILL, holds=held)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()
    assert start_ticks(process.pid) is None
    assert not send_signal(process.pid, started, signal.SIGKILL, holds=held)


def test_halt_is_asked_for_read_and_consumed(tmp_path):
    assert halt_reason(tmp_path) is None
    request_halt(tmp_path, "watchdog: rank 1 is dead")
    assert [path.name for path in tmp_path.iterdir()] == [".HALT"]
    assert halt_reason(tmp_path) == "watchdog: rank 1 is dead"
    clear_halt(tmp_path)
    clear_halt(tmp_path)
    assert halt_reason(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "there is a file .HALT"), (b"a\x1b[2Jb\nsecond", "a[2Jb"), (b"x" * 9999, "x" * 500)]
)
def test_a_halt_of_any_content_halts(tmp_path, content, expected):
    (tmp_path / ".HALT").write_bytes(content)
    assert halt_reason(tmp_path) == expected


def test_a_link_halts_and_is_not_followed(tmp_path):
    (tmp_path / ".HALT").symlink_to("/etc/hostname")
    assert halt_reason(tmp_path) == "there is a file .HALT"


def test_the_phases_are_those_of_a_training_step():
    assert {"data", "forward", "backward", "communication", "optimizer"} < PHASES

"""Processes whose standard output or error loses its reader go on, and leave with the exit code they would have had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from nsa_compile.cli import main; main()"]

TALKER = """
import subprocess, sys
from nsa_compile.streams import outlive_readers
outlive_readers()
print("first", flush=True)
print("first", file=sys.stderr, flush=True)
sys.stdin.readline()
for stream in (sys.stdout, sys.stderr):
    for _ in range(10_000):
        print("to nobody", file=stream)
subprocess.run([sys.executable, "-c", "print('a child, too')"], check=True)
print("é", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize("lost", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_process_goes_on_when_a_reader_is_gone(lost):
    process = subprocess.Popen(
        [sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for name in ("stdout", "stderr"):
        assert getattr(process, name).readline() == "first\n"
        if name in lost:
            getattr(process, name).close()
    rest = dict.fromkeys(lost, "")
    process.stdin.write("go on\n")
    process.stdin.close()
    for name in {"stdout", "stderr"} - set(lost):
        rest[name] = getattr(process, name).read()
        getattr(process, name).close()
    assert process.wait(60) == 75
    for name in {"stdout", "stderr"} - set(lost):
        assert rest[name].count("to nobody\n") == 10_000


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_readers_see_each_line_of_stderr_at_once(unbuffered):
    code = (
        "import sys\nfrom nsa_compile.streams import outlive_readers\noutlive_readers()\n"
        "sys.stderr.write('line\\n')\nsys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:  # fmt: skip
        assert process.stderr.readline() == "line\n"  # or both wait for ever
        process.stdin.write("go on\n")


def test_a_terminal_that_is_gone_is_a_reader_that_is_gone():
    leader, follower = os.openpty()
    process = subprocess.Popen(
        # A session of its own: what is asked here is what writing does, not the signal.
        [sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=follower, stderr=follower, start_new_session=True
    )  # fmt: skip
    os.close(follower)
    assert b"first" in os.read(leader, 100)
    os.close(leader)
    process.communicate(b"go on\n", timeout=60)
    assert process.returncode == 75


def test_the_output_of_a_command_may_be_cut_off():
    process = subprocess.Popen([*COMMAND, "config", "keys"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # before it has said anything
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 0


@pytest.mark.deep
def test_a_mistake_with_control_characters_in_it_is_one_line_without():
    result = subprocess.run(
        [*COMMAND, "train", "--config", "no\nsuch \x1b[31mfile"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(r"error: configuration file 'no\nsuch \x1b[31mfile' does not exist")
    assert result.stderr.removesuffix("\n").isprintable()


@pytest.mark.deep(but=["arguments2"])
@pytest.mark.parametrize(
    "arguments", [["--config", "p" * 10_000], ["--resume", "p" * 10_000], ["--set", "data.name=" + "p" * 300]]
)
def test_a_path_that_no_system_takes_is_one_short_line(arguments):
    result = subprocess.run([*COMMAND, "train", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1000

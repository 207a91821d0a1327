"""Who a process is among others, as launchers tell it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from nsa_compile.errors import UserError
from nsa_compile.train.distributed.world import World, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
}


def test_alone_there_is_no_world():
    assert World.from_environment({"HOME": "/root"}) is None
    assert World().main


def test_torchrun():
    world = World.from_environment(TORCHRUN)
    assert world == World(3, 8, 1, 2, attempt=2)
    assert not world.main


def test_slurm_needs_no_torchrun():
    world = World.from_environment(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 0, 2)
    assert world.rendezvous == {"MASTER_ADDR": "gpu03", "MASTER_PORT": "23456", "RANK": "2", "WORLD_SIZE": "4"}
    given = World.from_environment({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (given.rendezvous["MASTER_ADDR"], given.rendezvous["MASTER_PORT"]) == ("head", "1234")


def test_a_batch_script_of_slurm_is_not_a_task_of_it():
    # It runs once, whatever it has been given for its steps.
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    assert World.from_environment(script) is None
    assert World.from_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK = 'x' in the environment must be a whole number"),
        ({key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE")}, "WORLD_SIZE = 8 needs MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "must be a list of hosts; set MASTER_ADDR instead"),
    ],
)
def test_a_broken_environment_is_one_line(environment, expected):
    with pytest.raises(UserError) as error:
        World.from_environment(environment)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-07,12],big1", "gpu03"),
        ("n-1-[9,11]", "n-1-9"),
        ("rack1node[001]", "rack1node001"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
def test_a_worker_dies_with_its_launcher():
    worker = (
        "import sys, time; from nsa_compile.launch.worker import die_with; die_with(int(sys.argv[1])); "
        "print('ready', flush=True); time.sleep(60)"
    )
    launcher = (
        "import os, subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {worker!r}, str(os.getpid())], stdout=subprocess.PIPE); "
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    # Orphans come to this process, so that their end can be seen.
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    ctypes.CDLL(None).prctl(36, 0)
    assert ended == pid
    assert os.WTERMSIG(status) == signal.SIGKILL

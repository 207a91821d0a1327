"""The processes that train together: who they are, and whether the configuration suits them. Imports no torch early."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError

# NCCL over PCIe: trees and low-latency protocols are for NVLink and many nodes.
NCCL_PRESETS = {"none": {}, "pcie": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}}
SLURM_PORTS = range(20_000, 40_000)


@dataclass(frozen=True)
class World:
    """The place of this process among those that train together.

    Attributes:
        rank: number of this process, from 0; rank 0 writes the files of the run.
        size: how many there are.
        local_rank: number of this process among those of its machine, which is also that of its GPU.
        local_size: how many this machine has.
        attempt: how often they have been started again.
        rendezvous: variables of the environment by which torch finds the others.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    rendezvous: Mapping[str, str] = field(default_factory=dict)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and logs."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World | None:
        """What torchrun, another elastic agent or Slurm's srun says of this process; ``None`` if none of them does.

        Raises:
            UserError: a variable is missing or wrong.
        """
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls._from_agent(environment)
        # A batch script has SLURM_PROCID as well; only the tasks of a step have these.
        if "SLURM_STEP_ID" in environment and _integer(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
            return cls._from_slurm(environment)
        return None

    @classmethod
    def _from_agent(cls, environment: Mapping[str, str]) -> World:
        rank, size = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
        for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 else ():
            if not environment.get(name):
                raise UserError(f"WORLD_SIZE = {size} needs {name} in the environment too; start with torchrun")
        return cls(
            rank,
            size,
            _integer(environment, "LOCAL_RANK", rank),
            _integer(environment, "LOCAL_WORLD_SIZE", size),
            _integer(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        )

    @classmethod
    def _from_slurm(cls, environment: Mapping[str, str]) -> World:
        size, nodes = _integer(environment, "SLURM_STEP_NUM_TASKS"), environment.get("SLURM_STEP_NODELIST", "")
        job = _integer(environment, "SLURM_JOB_ID")
        address = environment.get("MASTER_ADDR") or first_host(nodes)
        port = environment.get("MASTER_PORT") or str(SLURM_PORTS[job % len(SLURM_PORTS)])
        rank = _integer(environment, "SLURM_PROCID")
        return cls(
            rank,
            size,
            _integer(environment, "SLURM_LOCALID"),
            _integer(environment, "SLURM_NTASKS_PER_NODE", size // max(1, _integer(environment, "SLURM_NNODES", 1))),
            _integer(environment, "SLURM_RESTART_COUNT", 0),
            {"MASTER_ADDR": address, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)},
        )


def first_host(nodes: str) -> str:
    """The first of Slurm's host list, ``gpu03`` of ``gpu[03-07,12],big1``; a UserError where it is none."""
    match = re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\])?", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST = '{nodes}' must be a list of hosts; set MASTER_ADDR instead")
    return match[1] + (match[2] or "")


def check_world(config: RunConfig, size: int, local_size: int) -> None:
    """Raise a UserError unless `size` processes, `local_size` of them here, can train as configured."""
    batch = config.train.batch_size
    if batch % size:
        raise UserError(
            f"train.batch_size = {batch} must be a multiple of the {size} processes, which share each micro batch; "
            f"use --set train.batch_size={-(-batch // size) * size}, or another --nproc"
        )
    if config.ddp.strategy == "fsdp" and size == 1:
        raise UserError("ddp.strategy = 'fsdp' shares a model among processes and there is 1; use --nproc N, or ddp")
    if config.train.device == "cuda" or config.ddp.backend == "nccl":
        _check_gpus(config, local_size)


def check_device(config: RunConfig) -> None:
    """Raise a UserError if the configuration asks for a GPU and there is none."""
    if config.train.device == "cuda":
        _check_gpus(config, 1)


def check_port(port: int | None) -> None:
    """Raise a UserError unless the processes can meet at this port of this machine."""
    if port is None:
        return
    with socket.socket() as probe:
        # As the store will bind it: the remains of a closed connection do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"ddp.port = {port} cannot be used: {error.strerror}; choose another, or null for a free one"
            ) from None


def _check_gpus(config: RunConfig, local_size: int) -> None:
    import torch  # only who asks for a GPU waits for this

    key, value = ("train.device", "cuda") if config.train.device == "cuda" else ("ddp.backend", "nccl")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < local_size:
        gpus = "no GPU" if not found else f"{found} GPU{'s' * (found > 1)}"
        needed, fewer = ("a GPU", "")
        if local_size > 1:
            needed, fewer = f"a GPU for each of {local_size} processes", ", or fewer processes"
        raise UserError(f"{key} = '{value}' needs {needed} and torch finds {gpus} here; use --set {key}=auto{fewer}")


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if text == "" and default is not None:
        return default
    # Slurm writes SLURM_NTASKS_PER_NODE as 4, and lists of counts as 4(x2).
    match = re.match(r"\d+", text)
    if match is None:
        raise UserError(f"{name} = '{text}' in the environment must be a whole number; start with torchrun or srun")
    return int(match[0])

"""Job files that train on several nodes: the templates beside this file, filled in. Imports no torch.

Whatever starts it, every node runs the same ``torchrun``, which starts a process for each GPU (or for each share of the
cores) and meets the other nodes at the first one. The run goes on from its newest checkpoint, if there is one, so a job
that was pre-empted only has to be started again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from nsa_compile.config import RunConfig, options_of
from nsa_compile.errors import UserError

WORKER = "nsa_compile.launch.worker"
PORT = 29500
# Between SIGTERM and SIGKILL a process saves its checkpoint. torchrun would give it 30 seconds; torch 2.11 still does.
GRACE_SECONDS = 120


@dataclass(frozen=True)
class Job:
    """What a job file is to start.

    Attributes:
        config: what is trained, checked.
        config_path: the file it came from, as the nodes see it; ``None`` for the packaged run.
        overrides: ``"section.key=value"`` strings.
        nproc: processes on each, one for each GPU.

    Raises:
        UserError: the processes cannot share a micro batch evenly.
    """

    name: str
    config: RunConfig
    config_path: str | None
    overrides: Sequence[str]
    nodes: int
    nproc: int
    gpus: bool = True

    def __post_init__(self) -> None:
        processes, batch = self.nodes * self.nproc, self.config.train.batch_size
        if batch % processes:
            raise UserError(
                f"train.batch_size = {batch} must be a multiple of --nodes × --nproc = {processes}, so that each "
                f"process takes as many sequences; change one of them, for example with "
                f"--set train.batch_size={-(-batch // processes) * processes}"
            )

    def worker(self) -> list[str]:
        """The arguments of each process."""
        return [*options_of(self.config_path, self.overrides), "--resume", "auto"]


def slurm(job: Job, *, time: str | None = None, partition: str | None = None, account: str | None = None) -> str:
    """A script for ``sbatch``, which starts again by itself when it is pre-empted or its time is over.

    The nodes share the directory it is submitted from, where ``nsa-compile`` must be on the PATH.
    """
    return _fill("slurm.sh", job=job, limits={"time": time, "partition": partition, "account": account})


def torchx(job: Job, *, image: str) -> str:
    """A component file for ``torchx run``, whatever scheduler that is told to use."""
    return _fill("torchx.py.txt", job=job, image=image)


def k8s(job: Job, *, image: str, claim: str) -> str:
    """Manifests for ``kubectl apply``: the configuration, a name for each pod, and an Indexed Job with a pod a node.

    Args:
        job: what to start. Its configuration travels along, resolved: pods need no file of the user's.
        image: of the container; ``nsa-compile`` is installed in it.
        claim: PersistentVolumeClaim that all pods can write to. It is the working directory, so that runs, texts and
            whatever else a relative path names lie there.

    Raises:
        UserError: the name is none that Kubernetes takes.
    """
    # Pods are called NAME-INDEX, and that has to be a host name.
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", job.name):
        raise UserError(
            f"'{job.name}' is no name for Kubernetes: it must be at most 52 lower-case letters, digits and hyphens, "
            "beginning with a letter; give another with --name"
        )
    return _fill("k8s.yaml", job=job, image=image, claim=claim)


def _fill(template: str, **values: Any) -> str:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"repr": repr, "shell": shlex.join}
    text = (resources.files(__package__) / "templates" / template).read_text("utf-8")
    return environment.from_string(text).render(module=WORKER, port=PORT, grace=GRACE_SECONDS, **values)

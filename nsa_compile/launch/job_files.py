"""Job files that train on several nodes: the templates beside this file, filled in. Imports no torch.

Whatever starts it, every node runs the same ``torchrun``, which starts a process for each GPU (or for each share of the
cores) and meets the other nodes at the first one. The run goes on from its newest checkpoint, if there is one, so a job
that was pre-empted only has to be started again. A script for ``sbatch`` starts again by itself: the nodes share the
directory it is submitted from, and ``nsa-compile`` is on the PATH there. To Kubernetes the configuration travels along,
resolved, and what relative paths name lies on the volume of the claim.
"""

from __future__ import annotations

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


def fill(template: str, job: Job, **values: Any) -> str:
    """The template of this name for a job."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"repr": repr, "shell": shlex.join}
    text = (resources.files("nsa_compile.launch") / "templates" / template).read_text("utf-8")
    return environment.from_string(text).render(job=job, module=WORKER, port=PORT, grace=GRACE_SECONDS, **values)

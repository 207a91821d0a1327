"""Job files that train on several nodes: the text of each, as a function of what is to run. Imports no torch.

Whatever starts it, every node runs the same ``torchrun``, which starts a process for each GPU (or for each share of the
cores) and meets the other nodes at the first one. The run goes on from its newest checkpoint, if there is one, so a job
that was pre-empted only has to be started again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError

WORKER = "nsa_compile.launch.worker"
PORT = 29500
# Between SIGTERM and SIGKILL a process saves its checkpoint. torchrun would give it 30 seconds; torch 2.11 still does.
GRACE_SECONDS = 120
TORCHRUN_GRACE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS - 10)}
WORKSPACE = "/workspace"


@dataclass(frozen=True)
class Job:
    """What a job file is to start.

    Attributes:
        name: of the job.
        config: what is trained, checked.
        config_path: the file it came from, as the nodes see it; ``None`` for the packaged run.
        overrides: ``"section.key=value"`` strings.
        nodes: machines.
        nproc: processes on each, one for each GPU.
        gpus: whether processes have a GPU each.

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
        config = ["--config", self.config_path] if self.config_path else []
        sets = [word for override in self.overrides for word in ("--set", override)]
        return [*config, *sets, "--resume", "auto"]

    def torchrun(self, host: str, job_id: str) -> list[str]:
        """The command of each node, up to the arguments of the worker; ``host`` is the node where they meet."""
        return [
            "torchrun",
            *("--nnodes", str(self.nodes)),
            *("--nproc-per-node", str(self.nproc)),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{host}:{PORT}"),
            *("--rdzv-id", job_id),
            *("-m", WORKER),
        ]


def slurm(job: Job, *, time: str | None = None, partition: str | None = None, account: str | None = None) -> str:
    """A script for ``sbatch``, which starts again by itself when it is pre-empted or its time is over.

    The nodes share the directory it is submitted from, where ``nsa-compile`` must be on the PATH.
    """
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.nproc if job.gpus else None,
        "exclusive": "",  # or a task would have a single core
        "time": time,
        "partition": partition,
        "account": account,
        # To the batch shell alone, which passes it on: it has to know that it was not the run that ended.
        "signal": f"B:TERM@{GRACE_SECONDS}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [
        f"#SBATCH --{key}{f'={value}' if value != '' else ''}" for key, value in options.items() if value is not None
    ]
    # In double quotes what the shell fills in, in single ones what comes from the user.
    torchrun = (f'"{word}"' if "$" in word else word for word in job.torchrun("$host", "$SLURM_JOB_ID"))
    command = f"{' '.join(torchrun)} {shlex.join(job.worker())}"
    return _SLURM.format(
        options="\n".join(lines), command=command, grace=" ".join(map("=".join, TORCHRUN_GRACE.items()))
    )


_SLURM = """\
#!/bin/bash
{options}

cd "$SLURM_SUBMIT_DIR" || exit
export {grace}
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

stopped=
trap 'stopped=yes; kill -TERM "$!"' TERM
srun --kill-on-bad-exit=1 --cpu-bind=none {command} &
step=$!
wait "$step"
code=$?
# A signal ends `wait`, not the step, which saves a checkpoint first.
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

# 75 says pre-empted, and so does a run that ended after the signal without being finished.
if [ "$code" -eq 75 ] || {{ [ "$stopped" ] && [ "$code" -ne 0 ]; }}; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def torchx(job: Job, *, image: str) -> str:
    """A component file for ``torchx run``, whatever scheduler that is told to use."""
    arguments = "".join(f"        {argument!r},\n" for argument in job.worker())
    gpus = f"        gpu={job.nproc},\n" if job.gpus else ""
    return _TORCHX.format(
        name=job.name, module=WORKER, image=image, nodes=job.nodes, nproc=job.nproc,
        arguments=arguments, gpus=gpus, port=PORT, env=TORCHRUN_GRACE,
    )  # fmt: skip


_TORCHX = '''\
"""torchx run -s SCHEDULER THIS_FILE:train"""

from torchx import specs
from torchx.components.dist import ddp


def train() -> specs.AppDef:
    """Train on {nodes} nodes with {nproc} processes each; a job that is started again goes on where it was."""
    return ddp(
{arguments}        m={module!r},
        name={name!r},
        image={image!r},
        j="{nodes}x{nproc}",
{gpus}        rdzv_backend="c10d",
        rdzv_port={port},
        env={env!r},
    )
'''


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
    mounted = f"/etc/nsa-compile/{job.name}.yaml"
    labels = {"app.kubernetes.io/name": "nsa-compile", "app.kubernetes.io/instance": job.name}
    within = Job(job.name, job.config, mounted, (), job.nodes, job.nproc, job.gpus)
    mounts = {"workspace": WORKSPACE, "config": "/etc/nsa-compile", "shared-memory": "/dev/shm"}
    container = {
        "name": "trainer",
        "image": image,
        "workingDir": WORKSPACE,
        "command": [*within.torchrun(f"{job.name}-0.{job.name}", job.name), *within.worker()],
        "env": [{"name": name, "value": value} for name, value in TORCHRUN_GRACE.items()],
        "ports": [{"containerPort": PORT}],
        **({"resources": {"limits": {"nvidia.com/gpu": job.nproc}}} if job.gpus else {}),
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "config", "configMap": {"name": job.name}},
            # NCCL's processes talk through it, and the default of 64 MB is too small for eight of them.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    disruption = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": job.name, "labels": labels},
            "data": {f"{job.name}.yaml": job.config.to_yaml()},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": job.name, "labels": labels},
            # Pods look for each other before any of them is ready.
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name, "labels": labels},
            "spec": {
                "completions": job.nodes,
                "parallelism": job.nodes,
                "completionMode": "Indexed",
                # A node that fails takes the others with it; pre-emption and drained nodes do not count.
                "backoffLimit": 3 * job.nodes,
                "podFailurePolicy": {"rules": [disruption]},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML as people write it: no references, and texts of several lines as such."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)

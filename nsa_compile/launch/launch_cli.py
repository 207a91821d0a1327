"""``nsa-compile launch``: job files for several nodes, on stdout. Imports no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from nsa_compile.cli import SuggestingGroup, config_options, stacked
from nsa_compile.errors import UserError

if TYPE_CHECKING:
    from nsa_compile.launch.job_files import Job

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@click.group(cls=SuggestingGroup)
def launch() -> None:
    """Print a job file that trains on several nodes and, when started again, resumes from its newest checkpoint.

    \b
    nsa-compile launch slurm --nodes 4 --nproc 8 --config my_run.yaml --time 12:00:00 | sbatch
    nsa-compile launch k8s --nodes 4 --nproc 8 --image registry/nsa:1 --claim runs | kubectl apply -f -
    nsa-compile launch torchx --nodes 4 --nproc 8 --image registry/nsa:1 > job.py
    """


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every kind of job has; `command` is called with the job that they describe."""

    @functools.wraps(command)
    def with_job(
        config_path: str | None,
        overrides: tuple[str, ...],
        nodes: int,
        nproc: int,
        name: str | None,
        cpu: bool,
        **others: str | None,
    ) -> None:
        from nsa_compile.config import load_config
        from nsa_compile.launch.job_files import Job

        config = load_config(config_path, overrides)
        _require_match("--name", name, NAME, "a name of letters, digits, '.', '_' and '-'")
        job = Job(name or config.run.name, config, config_path, overrides, nodes, nproc, gpus=not cpu)
        command(job, **others)

    options = stacked(
        config_options,
        click.option("--nodes", required=True, type=click.IntRange(min=1), help="Machines."),
        click.option("--nproc", required=True, type=click.IntRange(min=1), help="Processes a node, one for each GPU."),
        click.option("--name", metavar="NAME", help="Name of the job; without it, run.name."),
        click.option("--cpu", is_flag=True, help="Train on processors: ask for no GPUs."),
    )
    return options(with_job)


@launch.command(short_help="A script for sbatch.")
@_job_options
@click.option("--time", metavar="LIMIT", help="Time limit, as in 12:00:00 or 2-00:00:00.")
@click.option("--partition", metavar="NAME", help="Partition to run in.")
@click.option("--account", metavar="NAME", help="Account to charge.")
def slurm(job: Job, time: str | None, partition: str | None, account: str | None) -> None:
    """Print a script for sbatch. Two minutes before its time is over, or when it is pre-empted, the run saves a
    checkpoint and the job queues again.

    Submit it from a directory that the nodes share; relative paths start there.

    \b
    nsa-compile launch slurm --nodes 4 --nproc 8 --config my_run.yaml --time 12:00:00 > job.sh
    """
    from nsa_compile.launch.job_files import fill

    for option, value in (("--partition", partition), ("--account", account)):
        _require_match(option, value, NAME, "a name of letters, digits, '.', '_' and '-'")
    days_and_clock = r"(\d+-)?\d{1,3}(:\d{2}){0,2}"
    _require_match("--time", time, days_and_clock, "minutes, H:MM:SS or D-HH:MM:SS")
    limits = {"time": time, "partition": partition, "account": account}
    click.echo(fill("slurm.sh", job, limits=limits), nl=False)


@launch.command(short_help="A component file for torchx.")
@_job_options
@click.option("--image", required=True, metavar="IMAGE", help="Container image with nsa-compile in it.")
def torchx(job: Job, image: str) -> None:
    """Print a component file for torchx. The file given to --config must be in the image, at the same path.

    \b
    nsa-compile launch torchx --nodes 4 --nproc 8 --image registry/nsa:1 > job.py
    torchx run -s kubernetes job.py:train
    """
    from nsa_compile.launch.job_files import fill

    _require_image(image)
    click.echo(fill("torchx.py.txt", job, image=image), nl=False)


@launch.command(short_help="Manifests for Kubernetes.")
@_job_options
@click.option("--image", required=True, metavar="IMAGE", help="Container image with nsa-compile in it.")
@click.option("--claim", required=True, metavar="NAME", help="PersistentVolumeClaim that every pod can write to.")
def k8s(job: Job, image: str, claim: str) -> None:
    """Print manifests for Kubernetes: a ConfigMap with the resolved configuration, a headless Service, an Indexed Job.

    The claim is the working directory of every pod: relative paths, run.dir among them, lie on it.

    \b
    nsa-compile launch k8s --nodes 4 --nproc 8 --image registry/nsa:1 --claim runs | kubectl apply -f -
    """
    from nsa_compile.launch.job_files import fill

    _require_image(image)
    _require_match("--claim", claim, r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", "lower-case letters, digits, '-' and '.'")
    # Pods are called NAME-INDEX, and that has to be a host name.
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", job.name):
        raise UserError(
            f"'{job.name}' is no name for Kubernetes: it must be at most 52 lower-case letters, digits and hyphens, "
            "beginning with a letter; give another with --name"
        )
    click.echo(fill("k8s.yaml", job, image=image, claim=claim), nl=False)


def _require_image(image: str) -> None:
    _require_match("--image", image, r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a reference such as registry/name:tag")


def _require_match(option: str, value: str | None, pattern: str, rule: str) -> None:
    if value is not None and not re.fullmatch(pattern, value):
        raise UserError(f"{option} {value!a} must be {rule}; correct it")

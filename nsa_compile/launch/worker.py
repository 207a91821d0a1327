"""One of the processes of a run, as torchrun, srun or ``nsa-compile train --nproc`` start it.

``torchrun … -m nsa_compile.launch.worker`` takes the options of ``nsa-compile train``, which does the same itself where
the environment says that it is one of several.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from nsa_compile.config import RunConfig, load_config
from nsa_compile.errors import USER_FACING, UserError, user_facing
from nsa_compile.streams import outlive_readers
from nsa_compile.train.distributed.world import World, check_port, check_world
from nsa_compile.train.signals import EXIT_CODES, leave_on_signals

# Another process died; its own ending says why. EX_PROTOCOL of sysexits.h.
LOST_CONTACT = 76

_PR_SET_PDEATHSIG = 1


@click.command()
@click.option("--config", "config_path")
@click.option("--set", "overrides", multiple=True)
@click.option("--resume", default="never")
@click.option("--run-dir", type=click.Path(path_type=Path), help="A run that the launcher has opened.")
@click.option("--launcher", type=int, help="Process that this one must not outlive.")
def main(
    config_path: str | None, overrides: Sequence[str], resume: str, run_dir: Path | None, launcher: int | None
) -> None:
    """Train as one of several processes."""
    outlive_readers()
    if launcher is not None:
        die_with(launcher)
    try:
        world = World.from_environment(os.environ) or World()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    # The launcher speaks for those that it has started, and rank 0 for the others.
    with leave_on_signals(quiet=launcher is not None or not world.main):
        code = _exit_code(world, config_path, overrides, resume, run_dir)
    sys.exit(code)


def _exit_code(
    world: World, config_path: str | None, overrides: Sequence[str], resume: str, run_dir: Path | None
) -> int:
    try:
        summary = run_worker(world, load_config(config_path, overrides), resume, run_dir)
    except KeyboardInterrupt:
        return EXIT_CODES["SIGINT"]
    except Exception as error:
        if (known := user_facing(error)) is not None:
            rank = "" if world.main else f"[rank {world.rank}] "
            print(f"{rank}error: {known}", file=sys.stderr)
            return known.exit_code
        if not isinstance(error, RuntimeError) or not _is_lost_contact(error):
            raise
        reason = textwrap.shorten(str(error).splitlines()[0], 200, placeholder=" ...")
        print(f"[rank {world.rank}] lost contact with another process: {reason}", file=sys.stderr)
        return LOST_CONTACT
    return EXIT_CODES[summary["stopped_by"]] if summary["interrupted"] else 0


def _is_lost_contact(error: RuntimeError) -> bool:
    """Whether a collective operation failed, because a process died or the network did."""
    import torch.distributed as dist

    # gloo raises plain RuntimeErrors that begin with the place in its source.
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def run_worker(world: World, config: RunConfig, resume: str, run_dir: Path | None = None) -> dict[str, Any]:
    """Train as one of the processes of `world` and return the summary, whole in rank 0 only.

    `resume` is as for ``nsa-compile train``, and does not count where `run_dir` is a run that somebody else has opened.
    """
    from nsa_compile.data import load_corpus
    from nsa_compile.machine.preflight import check_run, wait_passively

    check_run(config)
    check_world(config, world.size, world.local_size)
    if world.main and world.rendezvous:
        check_port(int(world.rendezvous["MASTER_PORT"]))
    corpus = load_corpus(config, world.rank, world.size)
    wait_passively()

    from nsa_compile.train.distributed.group import broadcast, choose_device, process_group
    from nsa_compile.train.loop import run

    device = choose_device(config, world)
    with contextlib.ExitStack() as opened, process_group(config.ddp, world, device):
        start = _settle(opened, world, config, resume, run_dir) if world.main else None
        start = broadcast(start)
        if isinstance(start, USER_FACING):
            if world.main:
                raise start
            raise SystemExit(start.exit_code)  # rank 0 says why
        return run(config, corpus, start.directory, start.checkpoint, world)


def _settle(opened: contextlib.ExitStack, world: World, config: RunConfig, resume: str, run_dir: Path | None) -> Any:
    """What rank 0 settles: a start, or the error that prevents it."""
    from nsa_compile.launch.start import open_run, restart_run
    from nsa_compile.train.checkpoints.resume import find_run

    try:
        if run_dir is not None:
            return restart_run(config, run_dir)
        # An agent that starts processes again means the run they were working on.
        found = find_run(config, "auto" if world.attempt else resume)
        for note in found.notes:
            print(note, file=sys.stderr)
        return opened.enter_context(open_run(config, found))
    except USER_FACING as error:
        return error


def die_with(parent: int) -> None:
    """Make the kernel kill this process when `parent` dies, however that happens. Linux only; elsewhere no effect."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        raise SystemExit(1)


if __name__ == "__main__":
    main()

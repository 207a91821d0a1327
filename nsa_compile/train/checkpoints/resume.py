"""Where a run resumes: settled without torch, from names, manifests and configurations."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_compile.config import (
    AcceptSection,
    DDPSection,
    LogSection,
    ProfileSection,
    RunConfig,
    WatchdogSection,
    flatten,
    load_config,
)
from nsa_compile.errors import CheckpointError, UserError, shortened
from nsa_compile.train.checkpoints.files import Checkpoint, checkpoint_paths, verify_checkpoint
from nsa_compile.train.records.run_directory import check_run_directory

CONFIG = "config.resolved.yaml"
# What may differ between the parts of a run: its length, where it lies, how often it tells of itself, who watches it
# and looks into it, what is asked of it, and on what it runs; the numbers that gradients are sent as are another run.
_FREE_TRAIN_KEYS = (
    "steps", "save_every", "keep_last", "keep_best", "log_every", "eval_every", "sample_tokens", "device",
)  # fmt: skip
FREE_KEYS = frozenset(
    ["run.dir", "data.timeout_s", "compile.check"]
    + [f"train.{name}" for name in _FREE_TRAIN_KEYS]
    + [f"ddp.{name}" for name in DDPSection.model_fields if name != "compress"]
    + [f"log.{name}" for name in LogSection.model_fields]
    + [f"watchdog.{name}" for name in WatchdogSection.model_fields]
    + [f"accept.{name}" for name in AcceptSection.model_fields]
    + [f"profile.{name}" for name in ProfileSection.model_fields]
)


@dataclass(frozen=True)
class FoundRun:
    """What ``--resume`` refers to.

    Attributes:
        directory: the run to go on with; ``None`` starts a new one.
        checkpoint: the one that was named; ``None`` takes the newest good one.
    """

    directory: Path | None = None
    checkpoint: Path | None = None
    notes: list[str] = field(default_factory=list)


def find_run(config: RunConfig, request: str) -> FoundRun:
    """Find the run that ``--resume`` names: ``never``, ``auto``, or the path of a run or of one of its checkpoints.

    Raises:
        UserError: the path is neither, or its run has another configuration.
        CheckpointError: the run has no checkpoint.
    """
    if request == "never":
        return FoundRun()
    if request == "auto":
        return _newest_run(config)
    path = Path(request)
    if path.is_dir() and path.absolute().parent.name == "checkpoints":
        directory, checkpoint = path.absolute().parent.parent, path
    elif (path / "checkpoints").is_dir() or (path / CONFIG).exists():
        directory, checkpoint = path, None
        if not checkpoint_paths(path / "checkpoints"):
            raise CheckpointError(f"run '{path}' has no checkpoint; use --resume never")
    else:
        reason = "is neither" if os.path.lexists(path) else "does not exist"
        raise UserError(
            f"--resume '{request}' must be auto, never, a run directory or one of its checkpoints, and that path "
            f"{reason}; see ls '{config.run.dir}', or use --resume never"
        )
    difference = _difference_of_run(config, directory)
    if difference is not None:
        raise UserError(
            f"run '{directory}' has another configuration: {difference}; "
            f"give the same with --config '{directory / CONFIG}', or use --resume never"
        )
    return FoundRun(directory, checkpoint)


def newest_good_checkpoint(found: FoundRun) -> tuple[Checkpoint, list[str]]:
    """The checkpoint to resume from, read whole, and a warning for each newer one that is damaged.

    Raises:
        CheckpointError: the one that was named, or every one of the run, is damaged.
    """
    assert found.directory is not None
    if found.checkpoint is not None:
        try:
            return verify_checkpoint(found.checkpoint), []
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; name another with --resume: nsa-compile ckpt verify '{found.directory}' tells which are good"
            ) from None
    checkpoint, damages = newest_good(found.directory)
    if checkpoint is None:
        raise CheckpointError(f"no checkpoint of '{found.directory}' is good: {damages[0]}; use --resume never")
    return checkpoint, [f"warning: {damage}; the one before is used" for damage in damages]


def newest_good(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a run that is not damaged, if there is one, and what is wrong with each newer one."""
    damages: list[str] = []
    for path in reversed(checkpoint_paths(run / "checkpoints")):
        try:
            return verify_checkpoint(path), damages
        except CheckpointError as error:
            damages.append(str(error))
    return None, damages


def first_difference(config: RunConfig, saved: Any) -> str | None:
    """The first key whose value differs between a configuration and a saved one, said in words; free keys aside.

    A key that the saved one lacks had its default: it was written before there was such a key.
    """
    ours, theirs = dict(flatten(config.plain())), dict(flatten(saved))
    for key, value in _with_defaults(saved).items():
        if key in ours and key not in theirs and _equal(ours[key], value):
            theirs[key] = value
    for key in [*ours, *theirs]:
        if key not in FREE_KEYS and (key not in ours or key not in theirs or not _equal(ours[key], theirs[key])):
            here, there = (_shown(values[key]) if key in values else "absent" for values in (ours, theirs))
            return f"{shortened(key)} = {here} here and {there} there"
    return None


def _with_defaults(saved: Any) -> dict[str, Any]:
    """The keys of a saved configuration with what it lacks filled in; none if it is no configuration."""
    try:
        return dict(flatten(RunConfig.model_validate(saved).plain()))
    except Exception:  # whatever a configuration that anybody may have made up ends in
        return {}


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal; the saved one may be anything, even a value whose comparison is no boolean."""
    if isinstance(ours, list):
        return isinstance(theirs, list) and len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    return (theirs is None or isinstance(theirs, str | int | float)) and bool(ours == theirs)


def _shown(value: Any) -> str:
    try:
        return ascii(value)[:80]
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__}"


def _newest_run(config: RunConfig) -> FoundRun:
    """The newest run of the same name and configuration, as its directory's name tells."""
    pattern = re.compile(re.escape(config.run.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    root = Path(config.run.dir)
    runs = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            runs.append((match[1], int(match[2] or 1), path))
    notes = []
    for *_, path in sorted(runs, reverse=True):
        try:
            difference = _difference_of_run(config, path)
        except CheckpointError as error:
            notes.append(f"warning: {error}")
            continue
        if difference is None and checkpoint_paths(path / "checkpoints"):
            return FoundRun(path, notes=notes)
        if difference is None:
            return FoundRun(notes=[*notes, f"run '{path}' has no checkpoint yet; a new run starts"])
        notes.append(f"run '{path}' has another configuration: {difference}")
    return FoundRun(notes=[*notes[:1], f"no run in '{root}' to go on with; a new one starts"])


def config_of_run(directory: Path) -> RunConfig:
    """The configuration that a run has left in its directory.

    Raises:
        CheckpointError: there is none, or it is not valid.
    """
    path = directory / CONFIG
    if not path.exists():
        raise CheckpointError(
            f"run '{directory}' cannot be used: its {CONFIG} is missing; put it back, or name another run"
        )
    try:
        return load_config(str(path))
    except UserError as error:
        raise CheckpointError(f"run '{directory}' cannot be used: {error}") from None


def _difference_of_run(config: RunConfig, directory: Path) -> str | None:
    check_run_directory(directory)
    return first_difference(config, config_of_run(directory).plain())

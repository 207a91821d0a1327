"""Errors that end a command with one line for its user instead of a traceback."""


class UserError(Exception):
    """Something the user can put right: the message names the value, the rule and the way out. Exit code 2."""

    exit_code = 2


class TrainingDiverged(Exception):
    """The loss or the gradient stopped being a finite number. Exit code 3."""

    exit_code = 3


class CheckpointError(Exception):
    """A checkpoint cannot be used, or could not be written. Exit code 5."""

    exit_code = 5


class Halted(Exception):
    """A watchdog, or a file ``.HALT`` in the directory of the run, stopped the training. Exit code 4."""

    exit_code = 4


class Miscompiled(Exception):
    """A compiled program computes something else than its loop: a defect of the compiler. Exit code 1."""

    exit_code = 1


# What ends a command with its message and its exit code, and no traceback.
USER_FACING = (UserError, TrainingDiverged, CheckpointError, Halted, Miscompiled)


def user_facing(error: Exception) -> UserError | TrainingDiverged | CheckpointError | Halted | Miscompiled | None:
    """The error for the user in another one: torch wraps what is raised while it compiles. None where there is none."""
    inner = getattr(error, "inner_exception", error)
    return inner if isinstance(inner, USER_FACING) else None

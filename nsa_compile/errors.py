"""Errors that end a command with one line for its user instead of a traceback."""

# A line that is longer says no more; what made it long was somebody's value.
_LONGEST, _TAIL = 2000, 500


def printable(text: str) -> str:
    """A text on one line of a terminal: line ends, and what moves its cursor or changes its colours, spelled out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(text: str, length: int = 200) -> str:
    """A text of at most `length` characters, its end left out."""
    return text if len(text) <= length else text[: length - 3] + "..."


def one_line(text: str) -> str:
    """A message whose values anybody may have made up, as one line that a terminal can show; its end is kept."""
    line = printable(text)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _TAIL]} ... {line[-_TAIL:]}"


class OneLineError(Exception):
    """Base of the errors whose message a user is to read."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class UserError(OneLineError):
    """Something the user can put right: the message names the value, the rule and the way out. Exit code 2."""

    exit_code = 2


class TrainingDiverged(OneLineError):
    """The loss or the gradient stopped being a finite number. Exit code 3."""

    exit_code = 3


class CheckpointError(OneLineError):
    """A checkpoint cannot be used, or could not be written. Exit code 5."""

    exit_code = 5


class Halted(OneLineError):
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

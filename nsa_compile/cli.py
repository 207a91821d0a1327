"""The ``nsa-compile`` command. Thin: a command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import difflib
import errno
import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from nsa_compile.errors import one_line, printable, shortened, user_facing
from nsa_compile.extras import missing_extra
from nsa_compile.files import NO_ROOM
from nsa_compile.streams import STDOUT, outlive_readers

# Where each command is, with the line that --help shows for it; imported only when it is called.
LAZY_COMMANDS = {
    "ab": ("nsa_compile.experiments.experiments_cli:ab", "Is a run with some keys changed faster?"),
    "audit": ("nsa_compile.profiles.audit_cli:audit", "Show which operators and backends really ran."),
    "bench": ("nsa_compile.profiles.bench_cli:bench", "Measure NSA, compiled, against dense attention."),
    "chat": ("nsa_compile.generation.generate_cli:chat", "Write with a trained model, line by line."),
    "ckpt": ("nsa_compile.train.checkpoints.ckpt_cli:ckpt", "List, verify and prune the checkpoints of a run."),
    "config": ("nsa_compile.config_cli:config", "Show, check, compare and explain configurations."),
    "convert": ("nsa_compile.generation.convert_cli:convert", "Make an NSA model of a dense one, to train on."),
    "data": ("nsa_compile.data.data_cli:data", "Look at a data set, tokenize it, check what was kept."),
    "doctor": ("nsa_compile.machine.doctor_cli:doctor", "What this machine can run, and what is missing."),
    "estimate": ("nsa_compile.estimation.estimate_cli:estimate", "Memory, time and disk of a run before it starts."),
    "eval": ("nsa_compile.evaluation.eval_cli:evaluate", "How good a trained model is."),
    "export": ("nsa_compile.generation.export_cli:export", "Write a trained model for other programs."),
    "generate": ("nsa_compile.generation.generate_cli:generate", "Go on with prompts by a trained model."),
    "import": ("nsa_compile.generation.import_cli:import_model", "Read a model of flash-linear-attention or Llama."),
    "launch": ("nsa_compile.launch.launch_cli:launch", "Print a job file for several nodes."),
    "passes": ("nsa_compile.profiles.passes_cli:passes", "Show the compiler's passes and what they did."),
    "profile": ("nsa_compile.profiles.profile_cli:profile", "Where time goes: in a training step, and pass by pass."),
    "report": ("nsa_compile.train.report.report_cli:report", "Write what a run did as one HTML page."),
    "scaling": ("nsa_compile.experiments.experiments_cli:scaling", "Throughput per process on several processes."),
    "sweep": ("nsa_compile.experiments.experiments_cli:sweep", "Which value of a key is fastest?"),
    "train": ("nsa_compile.launch.train_cli:train", "Train a model."),
    "validate": ("nsa_compile.validation.validate_cli:validate", "The validation runbook: GO or NO-GO, and a report."),
    "verify": ("nsa_compile.verification.verify_cli:verify", "Check the compiler on this machine."),
    "watch": ("nsa_compile.train.watch.watch_cli:watch", "Show what a run is doing, until it ends or stalls."),
}


class SuggestingGroup(click.Group):
    """A group that suggests the nearest command for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            close = difflib.get_close_matches(args[0], known, n=1)
            advice = f"did you mean '{close[0]}'?" if close else f"the commands are {', '.join(known)}"
            raise click.UsageError(f"unknown command '{args[0]}'; {advice}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """The group of ``LAZY_COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(LAZY_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY_COMMANDS:
            return None
        module, _, attribute = LAZY_COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, LAZY_COMMANDS[name][1]) for name in self.list_commands(ctx)])


class FiniteRange(click.FloatRange):
    """Numbers of a range, without infinity and without NaN, which is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number", param, ctx)
        return number


def stacked(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator; ``--help`` shows them in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@add_completion_class
class BashWords(BashComplete):
    """Completion for bash, which takes ``KEY=VALUE`` for three words and completes the last one."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        if incomplete == "=":
            args, incomplete = [*args, "="], ""
        self._key = "".join(args[-2:]) if args[-1:] == ["="] else ""
        return (args[:-2] if self._key else args), self._key + incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value.removeprefix(self._key)}"


def _complete_setting(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys and values of the configuration, for a shell that completes words."""
    found: list[str] = importlib.import_module("nsa_compile.config_cli").completions(incomplete)
    return found


def set_option(help: str, *names: str) -> Callable[[Any], Any]:
    """An option for keys of the configuration, ``--set`` unless it has another name."""
    return click.option(
        *(names or ("--set", "overrides")), metavar="KEY=VALUE", multiple=True, help=help,
        shell_complete=_complete_setting,
    )  # fmt: skip


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; logs go to stderr."
)
# What names a run's configuration.
config_options = stacked(
    click.option(
        "--config", "config_path", metavar="FILE", type=click.Path(),
        help="Run configuration; without it, the packaged run.",
    ),
    set_option("Override one key, e.g. --set optim.lr=3e-4."),
)  # fmt: skip
run_options = stacked(json_option, config_options)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nsa-compile", message="%(prog)s %(version)s")
def cli() -> None:
    """Train Native Sparse Attention models from one definition: the decode step of a single token.

    \b
    nsa-compile passes explain my_step.py              what the compiler made of a program of yours, and why
    nsa-compile train                                  the packaged run: Shakespeare on a CPU
    nsa-compile train --set train.steps=50             the same, shorter
    nsa-compile train --config my_run.yaml --dry-run   check a configuration and print it

    To have commands, options, files and configuration keys completed, put this into ~/.bashrc (or, for zsh, the same
    with zsh_source into ~/.zshrc):

    \b
    eval "$(_NSA_COMPILE_COMPLETE=bash_source nsa-compile)"
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code; `docs/reference/exit-codes.md` lists them."""
    outlive_readers()
    code = _run(args)
    try:
        if sys.stdout is not None:  # it may have been closed before
            sys.stdout.flush()
    except OSError as error:
        code = code or _fail(_not_written(error), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails on the rest once more
    sys.exit(code)


def _not_written(error: OSError) -> str:
    return f"stdout cannot be written ({error.strerror}); the output is not complete"


def _run(args: list[str] | None) -> int:
    try:
        code: Any = cli.main(args=args, prog_name="nsa-compile", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.NoSuchOption as error:
        close = difflib.get_close_matches(error.option_name, error.possibilities or _options(error.ctx), n=1)
        path = error.ctx.command_path if error.ctx else "nsa-compile"
        advice = f"did you mean '{close[0]}'?" if close else f"see {path} --help"
        return _fail(f"unknown option '{error.option_name}'; {advice}", 2)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "nsa-compile"
        message = error.format_message().rstrip(".")
        if isinstance(error, click.MissingParameter):  # click lists choices one below the other
            message = " ".join(message.split())
        return _fail(message if ";" in message else f"{message}; see {path} --help", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except OSError as error:
        if error.filename == STDOUT:
            return _fail(_not_written(error), 2)
        name = f"'{shortened(printable(str(error.filename)))}'" if error.filename else "a file"
        if error.errno in (*NO_ROOM, errno.EFBIG, errno.EROFS):
            return _fail(f"{name} cannot be written: {error.strerror}; make room for it, or choose another place", 2)
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _fail(f"{name} is too long for the name of a file; give a shorter path", 2)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except Exception as error:
        known = user_facing(error)
        if isinstance(error, ModuleNotFoundError):
            words = sys.argv[1:] if args is None else args
            known = missing_extra(error, next((word for word in words if word in LAZY_COMMANDS), ""))
        if known is None:
            raise
        return _fail(str(known), known.exit_code)


def _options(ctx: click.Context | None) -> list[str]:
    return [option for parameter in ctx.command.params for option in parameter.opts] if ctx else []


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {one_line(message)}", err=True)
    return code

"""This module is `tc3`, the only command of this repository.

Commands are imported only when they are called, so that `tc3 --help` is instant. Standard output fails as shells
expect: if the reader of the output has left, `tc3` ends without a message; if the disk is full, it ends with one line.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO, cast

import click

from plugins.errors import TC3Error, did_you_mean
from tools.process.waiting import saying

SIGPIPE_EXIT = 141  # what a shell reports of a program that SIGPIPE ended


class OutputFailed(BaseException):
    """This exception means that the output of the command can no longer be written. This class is not an `Exception`,
    so that no caller handles it as an error of the command.
    """

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Output:
    """An `Output` passes all writes on to a stream, and raises `OutputFailed` if a write fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return partial(self._try, found) if name in ("write", "writelines", "flush") else found

    @staticmethod
    def _try(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as reason:
            raise OutputFailed(reason) from None


def exit_code_of(failed: OutputFailed) -> int:
    """Return the exit code of a command whose output could not be written; print one line about it, unless the reader
    of the output has closed the pipe.

    Output in the buffer is discarded, because the interpreter would otherwise try to write it again at its end, and
    fail.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if failed.reason.errno == errno.EPIPE:
        return SIGPIPE_EXIT
    print(f"tc3: standard output cannot be written: {failed.reason.strerror}", file=sys.stderr)
    return 2


LOADING = 5.0  # seconds until it is said that a command is being loaded
# command -> (module:attribute, one-line help); the help stands here so that listing imports nothing
COMMANDS = {
    "accuracy": ("tools.accuracy.cli:accuracy", "Verify the arithmetic: operators, dumps, a reference, strategies."),
    "agent": ("launch.agent.cli:agent", "Train on several nodes and continue after failures: one agent on each node."),
    "affinity": ("tools.affinity.cli:affinity", "Plan which cores each worker of this host gets."),
    "check": ("tools.check.cli:check", "Validate recipes without a device; print parameters, layers, tokens per step."),
    "data": ("tools.data.cli:data", "Prepare corpora as Megatron .bin/.idx files, and instructions for fine-tuning."),
    "doctor": ("tools.doctor.cli:doctor", "Check whether this host is fit to train, and say what would mend it."),
    "dryrun": ("tools.dryrun.cli:dryrun", "Compile a recipe for thousands of devices on this CPU."),
    "ep-report": (
        "tools.experts.cost:ep_report",
        "Compare what expert parallelism costs a recipe, by dispatch mode and overlap.",
    ),
    "experts": ("tools.experts.cli:experts", "Report how unevenly experts load devices; restore moved experts."),
    "firsthour": (
        "launch.firsthour.cli:firsthour",
        "Check and measure a new cluster; say whether to train.",
    ),
    "fusion": ("tools.fusion.cli:fusion", "Predict which operators DVM fuses into one kernel, and what that saves."),
    "generate": (
        "launch.generate.command:generate",
        "Generate text with a small trained model, to see what it has learnt.",
    ),
    "memory": ("tools.memory:memory", "Predict a device's memory without compiling, and what would free some."),
    "prove": ("tools.prove.cli:prove", "Prove on the compiled graphs that each gradient is summed exactly once."),
    "recipe": ("tools.recipe.cli:recipe", "Show a recipe flat, or compare two."),
    "runs": ("tools.runs.cli:runs", "Report how runs spent their time and why they failed; watch a live run."),
    "search": ("tools.search.cli:search", "Find parallel strategies without a device."),
    "train": ("launch.run.command:train", "Train a recipe under msrun."),
    "weights": ("tools.weights.cli:weights", "Inspect, average, reshard and convert checkpoints (Hugging Face too)."),
}
# when one uses it -> commands, in the order of use
STAGES = {
    "Before a run: is the recipe right, does it fit, what is fastest": (
        *("check", "recipe", "data", "search", "memory", "dryrun", "prove", "ep-report", "fusion", "doctor"),
        *("affinity", "firsthour"),
    ),
    "Run": ("train", "agent"),
    "During and after a run": ("runs", "experts", "weights", "generate"),
    "Are the numbers right": ("accuracy",),
}
# group -> command -> module:attribute, for commands whose room lies above their group's
NESTED = {"data": {"imbalance": "tools.data.imbalance.cli:imbalance_command"}}
# name -> distribution; msprobe is the import name of the last (the README says which project not to install)
STACK = {"MindSpore": "mindspore", "MindFormers": "mindformers", "mindstudio-probe": "mindstudio-probe"}


class LazyGroup(click.Group):
    """A `LazyGroup` is the click group of the commands that `COMMANDS` lists."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the sorted names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; return None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        with saying(f"tc3 {cmd_name} is being loaded", after=LOADING):
            command = _command(COMMANDS[cmd_name][0])
            for name, place in NESTED.get(cmd_name, {}).items():
                cast(click.Group, command).add_command(_command(place), name)
            return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an interrupt prints one line and gives exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(_say("interrupted", 130)) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does; for a misspelt command the message names the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}{did_you_mean(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their help texts, in the order in which a user needs them."""
        for stage, names in STAGES.items():
            with formatter.section(stage):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names], col_max=12)


def _command(place: str) -> click.Command:
    """Return the click command that a text such as "module:attribute" names."""
    module, attribute = place.split(":")
    return getattr(importlib.import_module(module), attribute)


def version_text() -> str:
    """Return the installed versions, one part of the software on each line, and the versions of MindSpore and
    MindFormers with which recipes and tools were verified.
    """
    import platform

    from tools.schema.versions import installed, verified  # imported only here, so that --help stays instant

    names = {"tc3": "telechat3-moe-recipes", **STACK}
    lines = [f"{name} {installed(distribution) or 'not installed'}" for name, distribution in names.items()]
    wanted = verified()
    pair = f"MindSpore {wanted['mindspore']} with MindFormers {wanted['mindformers']}"
    same = all(installed(distribution) == version for distribution, version in wanted.items())
    return "\n".join(
        [*lines, f"Python {platform.python_version()}", f"verified: {pair}{'' if same else ' (not what is here)'}"]
    )


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(version_text())
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the versions of this package, MindSpore and MindFormers.",
)
def tc3() -> None:
    """Check, plan, train and examine recipes for TeleChat3-MoE on MindSpore."""


def main() -> None:
    """Run `tc3`: a user error prints one line and gives exit code 2, an interrupt gives 130, and output whose reader
    has closed the pipe gives 141.
    """
    if sys.stdout is not None:
        sys.stdout = cast(TextIO, Output(sys.stdout))
    try:
        code = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputFailed as failed:
        code = exit_code_of(failed)
    sys.exit(code)


def _run() -> int:
    """Return the exit code of the command; errors are printed on stderr."""
    for place, word in enumerate(sys.argv[1:], 1):
        if any("\udc80" <= letter <= "\udcff" for letter in word):  # how Python hands on bytes that it cannot decode
            shown = os.fsencode(word).decode("utf-8", "backslashreplace")
            return _say(f"argument {place}, {shown}, is not UTF-8; give texts and names of files in UTF-8", 2)
    try:
        # not click's standalone mode, in which an interrupt is exit code 1
        done = tc3(prog_name="tc3", standalone_mode=False, color=False if os.environ.get("NO_COLOR") else None)
    except SystemExit as end:
        done = 0 if end.code is None else end.code
    except click.ClickException as error:
        error.show()
        done = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        done = _say("interrupted", 130)
    except TC3Error as error:
        done = _say(str(error), 2)
    except OSError as error:
        done = _say(_reason(error), 2)
    return done if isinstance(done, int) else 0


def _say(line: str, code: int) -> int:
    click.echo(f"tc3: {line}", err=True)
    return code


def _reason(error: OSError) -> str:
    """Return in words what an operating-system error is about, and its reason."""
    try:
        os.getcwd()
    except OSError:
        return "the working folder has been deleted, or may not be read: change to another one"
    if error.strerror is None:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror

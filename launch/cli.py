"""`tc3`: the one command line. Commands are imported only when called, so that `tc3 --help` is instant."""

from __future__ import annotations

import importlib
import sys

import click

from plugins.errors import TC3Error, did_you_mean

# command -> (module:attribute, one-line help); the help stands here so that listing imports nothing
COMMANDS = {
    "accuracy": ("tools.accuracy.cli:accuracy", "Prove numbers right: operators, dumps, a reference, strategies."),
    "check": ("tools.check.cli:check", "Validate recipes without a device; parameters, layers, tokens a step."),
    "data": ("tools.data.cli:data", "Turn a corpus into a Megatron .bin/.idx and check it."),
    "dryrun": ("tools.dryrun.cli:dryrun", "Compile a recipe for thousands of devices on this CPU."),
    "ep-report": (
        "tools.ep_report.cli:ep_report",
        "What expert parallelism costs a recipe, by dispatch mode and overlap.",
    ),
    "recipe": ("tools.recipe.cli:recipe", "Show a recipe flat, or what sets two apart."),
    "search": ("tools.search.cli:search", "Find parallel strategies without a device."),
    "train": ("launch.train_command:train", "Train a recipe under msrun."),
}


class LazyGroup(click.Group):
    """A click group whose commands live in `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None when there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command in the message for a misspelt one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}{did_you_mean(args[0], list(COMMANDS))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the help kept in the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def tc3() -> None:
    """Training recipes, plugins and pre-flight tools for TeleChat3-MoE on MindSpore."""


def main() -> None:
    """Run `tc3`; a user error becomes one line and exit code 2."""
    try:
        tc3(prog_name="tc3")
    except TC3Error as error:
        click.echo(f"tc3: {error}", err=True)
        sys.exit(2)

"""Which MindSpore and MindFormers were verified, which are installed here, and whether a command goes on with others.

What this repository says of a recipe was read from the sources of one pair of versions (`versions` of schema.json) and
tried with it, private hooks and compiled graphs included. A command that speaks for the MindFormers of this machine, or
runs it, asks `require_verified` first. The packages' metadata is read; nothing of them is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click

from plugins.errors import VersionError

VARIABLE = "TC3_UNVERIFIED"  # what `--unverified` sets, so that workers and other processes go on, too
_NAMES = {"mindspore": "MindSpore", "mindformers": "MindFormers"}  # by distribution
_SCHEMA = Path(__file__).with_name("schema.json")
Command = TypeVar("Command", bound=Callable[..., Any])


@lru_cache(maxsize=1)
def verified() -> dict[str, str]:
    """Distribution -> the version that was verified."""
    versions = json.loads(_SCHEMA.read_text(encoding="utf-8"))["versions"]
    return {distribution: versions[distribution] for distribution in _NAMES}


def installed(distribution: str) -> str | None:
    """Return the version on this machine; None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def others() -> dict[str, str]:
    """Distribution -> its version, of what is installed in another version than the verified one."""
    found = {distribution: installed(distribution) for distribution in _NAMES}
    return {name: version for name, version in found.items() if version and version != verified()[name]}


def words(versions: dict[str, str]) -> str:
    """``MindSpore 2.9.0 and MindFormers 1.9.0``."""
    return " and ".join(f"{_NAMES[distribution]} {version}" for distribution, version in versions.items())


def going_on() -> bool:
    """Return whether the user asked to go on with whatever is installed."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def unverified_words() -> list[str]:
    """Return what a command line needs to go on as this one does."""
    return ["--unverified"] * going_on()


def require_verified() -> None:
    """Hold that MindSpore and MindFormers, where they are installed, are the verified ones, or say so and go on.

    A package that is not installed is not an error here: who needs it says what is missing.

    Raises:
        VersionError: another version is installed, and nobody said `--unverified`.
    """
    if not (found := others()):
        return
    line = f"{words(found)} {'is' if len(found) == 1 else 'are'} installed, verified is {words(verified())}"
    if not going_on():
        raise VersionError(f"{line}: install the versions in constraints.txt, or go on with --unverified")
    click.echo(f"--unverified: {line}: what follows may be wrong for it", err=True)


def unverified_option(command: Command) -> Command:
    """The option `--unverified` of a command that asks `require_verified`; it holds for all that the command starts."""
    text = f"Continue although MindSpore or MindFormers is not the verified version (as {VARIABLE}=1 does)."
    return click.option("--unverified", is_flag=True, expose_value=False, callback=_remember, help=text)(command)


def _remember(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    ctx.call_on_close(lambda: os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before}))

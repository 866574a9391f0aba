"""This module finds which versions of MindSpore and MindFormers were verified and which are installed, and decides
whether a command may run with other versions.

The facts about MindSpore and MindFormers that this repository uses were read from the sources of one pair of versions
(`versions` of schema.json) and tested with this pair, including private hooks and compiled graphs. A command that
describes or runs the installed MindFormers calls `require_verified` first. The versions are read from the metadata of
the packages, which are not imported.
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
    """Return a mapping from each distribution (package name on PyPI) to its verified version."""
    versions = json.loads(_SCHEMA.read_text(encoding="utf-8"))["versions"]
    return {distribution: versions[distribution] for distribution in _NAMES}


def installed(distribution: str) -> str | None:
    """Return the version of a distribution on this machine; return None if the distribution is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def others() -> dict[str, str]:
    """Return the distributions (packages) whose installed version is not the verified version, as a dictionary
    distribution -> installed version.
    """
    found = {distribution: installed(distribution) for distribution in _NAMES}
    return {name: version for name, version in found.items() if version and version != verified()[name]}


def words(versions: dict[str, str]) -> str:
    """Return versions of distributions in words, such as ``MindSpore 2.9.0 and MindFormers 1.9.0``."""
    return " and ".join(f"{_NAMES[distribution]} {version}" for distribution, version in versions.items())


def going_on() -> bool:
    """Return whether the user allows versions that are not verified (`--unverified`)."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def unverified_words() -> list[str]:
    """Return the arguments that pass the option `--unverified` on to another command; return [] if the user did not
    give it.
    """
    return ["--unverified"] * going_on()


def require_verified() -> None:
    """Raise an error if the installed version of MindSpore or MindFormers is not the verified version. If the user gave
    `--unverified`, print a warning instead of raising an error.

    A package that is not installed is not an error of this function: the code that needs the package reports that it is
    missing.

    Raises:
        VersionError: another version is installed, and `--unverified` was not given.
    """
    if not (found := others()):
        return
    line = f"{words(found)} {'is' if len(found) == 1 else 'are'} installed, but {words(verified())} were verified"
    if not going_on():
        raise VersionError(f"{line}; install the versions in constraints.txt, or go on with --unverified")
    click.echo(f"--unverified: {line}: what follows may be wrong for it", err=True)


def unverified_option(command: Command) -> Command:
    """Add `--unverified` to a command. The option also applies to every process that the command starts."""
    text = f"Continue although MindSpore or MindFormers is not the verified version (as {VARIABLE}=1 does)."
    return click.option("--unverified", is_flag=True, expose_value=False, callback=_remember, help=text)(command)


def _remember(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    ctx.call_on_close(lambda: os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before}))

"""This module defines the option --html, and checks that outputs can be written and replace nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from plugins.errors import DataError, RecipeError
from tools.files.atomic import check_writable, real_path
from tools.files.locks import LOCK, only_process_in
from tools.files.page import BEGINS

page_option = click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the results as one HTML page to this file.",
)


def check_page(page: Path | None) -> None:
    """Raise DataError if no page can be written to this path, or if it would replace another file."""
    if page is None:
        return
    check_writable(page)
    if not (page.exists() or page.is_symlink()):
        return
    if not page.is_file():
        raise DataError(f"--html {page}: this path exists, but is not a file; choose another name")
    with page.open("rb") as file:
        if file.read(len(BEGINS)) not in (BEGINS.encode(), b""):
            raise DataError(
                f"--html {page}: this file is not an HTML page and would be overwritten; choose another name"
            )


def check_out(out: Path | None, *dumps: Path) -> None:
    """Raise DataError if results cannot be written into `out`, or if it lies inside a dump."""
    if out is None:
        return
    for dump in dumps:
        if real_path(dump) in (real_path(out), *real_path(out).parents):
            raise DataError(
                f"--out {out}: this folder lies in the dump {dump}, which must not change; choose another folder"
            )
    check_writable(out / "compare.json")


@contextmanager
def keeping(keep: Path | None, command: str) -> Iterator[None]:
    """Hold the lock of the folder that --keep names, so that `command` cannot be started a second time in it.

    Raises:
        RecipeError: the folder is not empty.
        DataError: another command is at work in the folder.
    """
    if keep is None:
        yield
        return
    with only_process_in(keep, command, "--keep"):
        if any(path.name != LOCK for path in keep.iterdir()):
            raise RecipeError(f"--keep {keep}: the folder is not empty; name an empty or a new folder")
        yield

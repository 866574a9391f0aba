"""This module defines the option --html, and checks before a comparison that its files can be written and would replace
nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from plugins.errors import DataError
from tools.files.atomic import real_path
from tools.files.page import BEGINS

page_option = click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the results as one HTML page to this file.",
)


def check_page(page: Path | None, option: str = "--html") -> None:
    """Raise DataError if no HTML page can be written to this path, or it would replace another kind of file."""
    if page is None or not (page.exists() or page.is_symlink()):
        _check_folder(page, option)
        return
    if not page.is_file():
        raise DataError(f"{option} {page}: this path exists, but is not a file; choose another name")
    with page.open("rb") as file:
        if file.read(len(BEGINS)) not in (BEGINS.encode(), b""):
            raise DataError(
                f"{option} {page}: this file is not an HTML page and would be overwritten; choose another name"
            )


def check_out(out: Path | None, *dumps: Path) -> None:
    """Raise DataError if results cannot be written into the folder `out`, or if it lies in a dump."""
    if out is None:
        return
    for dump in dumps:
        if real_path(dump) in (real_path(out), *real_path(out).parents):
            raise DataError(
                f"--out {out}: this folder lies in the dump {dump}, which must not change; choose another folder"
            )
    _check_folder(out / "compare.json", "--out")


def _check_folder(file: Path | None, option: str) -> None:
    """Raise DataError unless the folder of a new file, or the existing part of its path, can be written to."""
    place = file.absolute().parent if file else Path.cwd()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK) or os.statvfs(place).f_blocks == 0:
        raise DataError(f"{option} {file}: {place} is not a folder that one can write to")

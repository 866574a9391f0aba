"""Every bad input of the tables is refused: exit code, words, no traceback, no file, no process, within its time."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path

import pytest

from tests.inputs.rows import BUSY, ROOT, Row, read_tables
from tests.inputs.runner import have_tools, run_apart, run_here

ROWS = read_tables()
GOES_ON = re.compile(r"( s so far\)| \.\.\.|: (\d+%, )?\d+ s)$")  # what tools/process/waiting.py prints
_KEPT = ("recipes", "tests/golden")  # of the checkout: what a command could write beside its input


def _param(row: Row):
    marks = [pytest.mark.timeout(int(row.limit) + 60)]
    if row.apart:
        marks.append(pytest.mark.slow)
    return pytest.param(row, id=f"{row.table}: {row.name}".replace(" ", "_"), marks=marks)


def test_the_tables_cover_every_command_with_at_least_two_hundred_rows():
    assert len(ROWS) >= 200
    assert len({(row.table, row.name) for row in ROWS}) == len(ROWS)
    commands = {word for row in ROWS for word in (row.run or row.shell).split()[:2]}
    assert commands >= set(_leaves())


def _leaves():
    import click

    from launch.cli import tc3

    context = click.Context(tc3)
    for name in tc3.list_commands(context):
        command = tc3.get_command(context, name)
        yield name
        if isinstance(command, click.Group):
            yield from command.list_commands(context)


@pytest.mark.parametrize("row", [_param(row) for row in ROWS])
def test_a_bad_input(row: Row, tmp_path: Path, capfd, monkeypatch):
    row.furnish(tmp_path)
    before = _snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    if row.apart:
        if not have_tools():
            pytest.skip("util-linux is not here")
        ended = run_apart(row, tmp_path)
    else:
        ended = run_here(row, tmp_path, capfd, monkeypatch)
    after = _snapshot(tmp_path)
    text = " ".join(ended.text.split())
    print(f"exit code {ended.code} after {ended.seconds:.1f} s:\n{ended.text}")

    assert "Traceback" not in text
    assert ended.code in row.codes
    missing = [words for words in row.says if row.place(words, tmp_path).lower() not in text.lower()]
    assert not missing
    # how long a busy machine takes decides how often a command says that it goes on
    assert len([line for line in ended.text.splitlines() if not GOES_ON.search(line)]) <= row.lines
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    assert [path for path in changed if not any(fnmatch.fnmatch(path, pattern) for pattern in row.writes)] == []
    assert ended.left == []
    assert ended.seconds < row.limit and ended.after < BUSY * row.after


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below `folder`, and what a command could have written into the checkout: size and time."""
    found = {}
    for top in (folder, *(ROOT / name for name in _KEPT)):
        for where, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in (*names, *folders):
                path = Path(where, name)
                state = path.lstat()
                key = str(path.relative_to(folder)) if top == folder else str(path)
                found[key] = (state.st_size, state.st_mtime_ns) if name in names else (0, 0)
    return found

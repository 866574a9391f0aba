"""The tree of the tests mirrors that of the sources, so that whoever knows one finds his way in the other."""

from pathlib import Path

import pytest

from tests.conftest import HERE, LONG

ROOT = HERE.parent
# whole runs, and what a command says of bad input, belong to no folder of sources
WHOLE = {"inputs", "training"}
LINES = {"benchmarks": 300, "tests": 500}  # those of the sources: test_rooms.py
MODULES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in LINES}


def folders_of_tests() -> list[Path]:
    """Folders, relative to tests/, that hold tests of something."""
    found = {path.parent.relative_to(HERE) for path in MODULES["tests"] if path.name.startswith("test_")}
    return sorted(folder for folder in found if folder.parts and folder.parts[0] not in WHOLE)


@pytest.mark.parametrize("folder", folders_of_tests(), ids=str)
def test_each_folder_of_tests_has_its_folder_of_sources(folder):
    assert (ROOT / folder).is_dir(), f"tests/{folder} tests no folder: name it as the sources that it is about"


@pytest.mark.parametrize("folder", LINES)
def test_files_are_short(folder):
    counts = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in MODULES[folder]}
    long = {name: count for name, count in counts.items() if count > LINES[folder]}
    assert long == {}, f"more than {LINES[folder]} lines: split by subject"


def test_the_list_of_long_files_names_files():
    assert [name for name in LONG if not (HERE / name).is_file()] == []

"""The tree of the tests mirrors that of the sources, so that whoever knows one finds his way in the other."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
# whole runs, and what a command says of bad input, belong to no folder of sources
WHOLE = {"inputs", "training"}
LINES = 500  # a file tells one story; those of the sources: test_rooms.py
MODULES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("benchmarks", "tests")}


def folders_of_tests() -> list[Path]:
    """Folders, relative to tests/, that hold tests of something."""
    found = {path.parent.relative_to(HERE) for path in MODULES["tests"] if path.name.startswith("test_")}
    return sorted(folder for folder in found if folder.parts and folder.parts[0] not in WHOLE)


@pytest.mark.parametrize("folder", folders_of_tests(), ids=str)
def test_each_folder_of_tests_has_its_folder_of_sources(folder):
    assert (ROOT / folder).is_dir(), f"tests/{folder} tests no folder: name it as the sources that it is about"


@pytest.mark.parametrize("folder", MODULES)
def test_files_are_short(folder):
    counts = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in MODULES[folder]}
    long = {name: count for name, count in counts.items() if count > LINES}
    assert long == {}, f"more than {LINES} lines: split by subject"


# what ends in a traceback for a user's input, and what to write instead
UNSAFE = {
    r"(?<!__file__\))\.resolve\(": "tools.files.atomic.real_path: Path.resolve fails where links go in a circle",
    r"click\.(FLOAT|FloatRange)|type=float\b(?!\))": "tools.ranges.Number: click's own floats take nan and inf",
    r"safetensors\.numpy import.*save_file": "tools.checkpoint.tensor_files: safetensors' own error is not an OSError",
}


@pytest.mark.parametrize(("pattern", "instead"), UNSAFE.items())
def test_commands_leave_out_what_ends_in_a_traceback(pattern, instead):
    files = [path for folder in ("launch", "tools", "plugins") for path in (ROOT / folder).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if re.search(pattern, path.read_text("utf-8"))]
    assert found == [], instead

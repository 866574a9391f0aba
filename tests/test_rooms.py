"""The import graph of the repository: rooms (folders) import what lies below them, and nothing goes round in circles.

docs/architecture.md explains the rooms.
"""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# from the ground up: a room imports from rows above its own; part of a room may have a row of its own
ROWS = [
    ["plugins"],
    ["tools.ranges", "tools.files", "tools.process"],
    ["tools.hardware", "tools.pipeline", "tools.data", "tools.checkpoint"],
    ["tools.recipe"],
    ["tools.schema"],
    ["tools.model", "tools.recipe.diff"],
    ["tools.estimate"],
    ["tools.layout", "tools.measured"],
    ["tools.check"],
    ["tools.dryrun", "tools.profile"],
    ["tools.search", "tools.fusion", "tools.prove"],
    ["tools.recipe.cli", "tools.dryrun.cli", "tools.affinity", "tools.weights", "tools.runs", "tools.memory"],
    ["tools.data.imbalance", "tools.doctor", "tools.experts"],
    ["tools.accuracy"],
    ["launch"],
]
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
MODULES = 20  # stories in one folder, beside __init__
LINES = 500  # a file tells one story


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for top in ("launch", "plugins", "tools"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULE_PATHS = modules()


def imports(path: Path) -> set[str]:
    """The modules of this repository that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULE_PATHS.keys()
            found |= inner or {node.module}
    return found & MODULE_PATHS.keys()


@functools.cache  # not read while tests are collected, which each process does
def graph() -> dict[str, set[str]]:
    """Module -> what it imports."""
    return {name: imports(path) for name, path in MODULE_PATHS.items()}


def room(module: str) -> str:
    """Where a module lives: `launch`, `plugins`, a folder (or lone module) of `tools`, or its part with a row."""
    parts = module.split(".")
    named = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in named if name in ROW), ".".join(parts[:2]) if parts[0] == "tools" else parts[0])


def test_every_room_has_its_row():
    rooms = {room(module) for module in graph()} - {"tools"}
    assert rooms == ROW.keys()


def test_rooms_import_from_below_only():
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if room(module) != room(other) and "tools" not in (module, other) and ROW[room(module)] <= ROW[room(other)]
    ]
    assert sorted(wrong) == []


def test_no_import_goes_round_in_a_circle():
    try:
        TopologicalSorter({module: others - {module} for module, others in graph().items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_tools_import_of_plugins_what_needs_no_framework():
    """Adapters import MindFormers; what a tool takes of a plugin is planning code."""
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        if module.startswith("tools.")
        for other in others
        if other.startswith("plugins.") and "adapter" in other.split(".")[-1]
    ]
    assert sorted(wrong) == []


def test_folders_can_be_overlooked():
    folders = {path.parent for path in MODULE_PATHS.values()}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("[!_]*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MODULES} == {}


def test_no_module_repeats_its_folder():
    repeated = [
        str(path.relative_to(ROOT)) for path in MODULE_PATHS.values() if path.stem.startswith(f"{path.parent.name}_")
    ]
    assert sorted(repeated) == []


def test_files_are_small():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in MODULE_PATHS.values()}
    assert {name: size for name, size in sizes.items() if size > LINES} == {}

"""`import msprobe` must come from mindstudio-probe: the PyPI project named msprobe is an unrelated tool."""

import re
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WRONG = "msprobe"


def test_the_wrong_msprobe_is_not_installed_and_nothing_installed_asks_for_it():
    asks = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        assert name != WRONG, f"the unrelated tool is installed: {distribution.locate_file('')}"
        requirements = map(Requirement, distribution.requires or [])
        asks[name] = {canonicalize_name(requirement.name) for requirement in requirements}
    assert asks["telechat3-moe-recipes"] >= {"mindstudio-probe"}
    assert [name for name, wanted in asks.items() if WRONG in wanted] == []


def test_import_msprobe_is_provided_by_mindstudio_probe():
    found = util.find_spec("msprobe")
    assert found is not None and found.origin is not None
    owned = {str(file.locate()) for file in metadata.distribution("mindstudio-probe").files or []}
    assert found.origin in owned, f"{found.origin} is not a file of mindstudio-probe"


def test_no_file_that_pip_or_a_reader_obeys_names_it():
    pinned = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert WRONG not in {canonicalize_name(name) for name in pinned}
    obeyed = [
        ROOT / "setup.cfg",
        ROOT / "pyproject.toml",
        ROOT / "README.md",
        *ROOT.glob("launch/*"),
        ROOT / "tests/run",
    ]
    for path in filter(Path.is_file, obeyed):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"(pip|uv)\s.*install.*[\s\"']msprobe\b", line), f"{path.name}: {line}"
            assert not re.fullmatch(r"\s*msprobe\s*([=<>~!\[;].*)?", line), f"{path.name}: {line}"


def test_everything_installed_by_us_is_pinned():
    pinned = {
        canonicalize_name(line.split("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = {canonicalize_name(Requirement(text).name) for text in metadata.requires("telechat3-moe-recipes") or []}
    assert wanted <= pinned, f"not in constraints.txt: {sorted(wanted - pinned)}"

"""These tests check that what the pages name exists: links, folders, and every `tc3` command line with its options."""

import ast
import re
import runpy
import shlex
from functools import lru_cache
from pathlib import Path

import click
import pytest

from launch.cli import tc3

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# a path of this repository, `file::test` too, and a dotted name; NAME and STAGE stand for what a reader puts in
FOLDERS = "launch|tools|plugins|tests|recipes|docs|benchmarks"
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*\w)(?:::(\w+))?")
DOTTED = re.compile(r"`((?:launch|tools|plugins)(?:\.\w+)+)`")
PUT_IN = re.compile(r"\b(NAME|STAGE)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _links():
    return [(page, link) for page in PAGES for link in LINK.findall(page.read_text()) if "://" not in link]


def _commands():
    """Each `tc3 ...` line of the pages' bash blocks."""
    lines = [(page, line) for page in PAGES for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    return [(page, line) for page, line in lines if line.startswith("tc3 ")]


def _words(line):
    line = re.sub(r'"\$\{\w+\[@\]\}"', "", line)  # a list of options set up above
    words = shlex.split(line, comments=True)
    return words[1 : words.index(">")] if ">" in words else words[1:]


@pytest.mark.parametrize(("page", "link"), _links(), ids=lambda value: getattr(value, "name", value))
def test_links_lead_somewhere(page, link):
    target, _, anchor = link.partition("#")
    path = (page.parent / target) if target else page
    assert path.exists(), f"{page.name} links to {link}"
    if anchor:
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(("page", "line"), _commands(), ids=lambda value: getattr(value, "name", value))
def test_commands_are_what_tc3_takes(page, line):
    """Sub-commands, options and the number of arguments; nothing is run."""
    command: click.Command = tc3
    words, context = _words(line), click.Context(tc3, info_name="tc3")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, line
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_parser(context).parse_args(words)


@pytest.mark.parametrize(("page", "line"), _commands(), ids=lambda value: getattr(value, "name", value))
def test_recipes_named_in_commands_exist(page, line):
    for word in _words(line):
        if word.startswith("recipes/"):
            assert list(ROOT.glob(word)), line


def _said(pattern):
    return sorted({(page, found) for page in PAGES for found in pattern.findall(page.read_text())})


@pytest.mark.parametrize(
    ("page", "found"), _said(PATH), ids=lambda value: getattr(value, "name", None) or "::".join(value)
)
def test_paths_that_pages_name_exist(page, found):
    path, test = found
    places = list(ROOT.glob(PUT_IN.sub("*", path)))
    assert places, f"{page.name} names {path}"
    assert not test or test in _names(places[0]), f"{page.name} names {path}::{test}"


@pytest.mark.parametrize(("page", "dotted"), _said(DOTTED), ids=lambda value: getattr(value, "name", value))
def test_names_of_python_that_pages_name_exist(page, dotted):
    """`package.module`, or a name that it defines, without importing it."""
    *parents, last = dotted.split(".")
    whole, parent = ROOT.joinpath(*parents, last), ROOT.joinpath(*parents)
    if whole.is_dir() or whole.with_suffix(".py").is_file():
        return
    module = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    assert module.is_file() and last in _names(module), f"{page.name} names {dotted}"


@lru_cache
def _names(file):
    """Return the names that a module defines at its top level."""
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def test_the_picture_of_the_rooms_is_current():
    """The file is what the script draws: the rows that tests/test_repository.py holds the import graph to."""
    made: dict = runpy.run_path(str(ROOT / "docs" / "pictures" / "rooms.py"))
    assert made["FILE"].read_text("utf-8") == made["picture"](), "stale: python docs/pictures/rooms.py"


def test_the_ladder_of_the_report_is_what_the_estimator_says():
    made: dict = runpy.run_path(str(ROOT / "docs" / "pictures" / "ladder.py"))
    table = made["table"]({name: made["ladder"](path) for name, path in made["RECIPES"].items()})
    assert table in (ROOT / "docs" / "report.md").read_text("utf-8"), "stale: python docs/pictures/ladder.py"


@pytest.mark.parametrize("room", [path.name for path in (ROOT / "tools").iterdir() if path.name[0] != "_"])
def test_every_room_stands_in_the_architecture(room):
    assert f"`tools/{room}`" in (ROOT / "docs" / "architecture.md").read_text()


def test_readme_is_a_front_door():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200


def test_every_page_is_reached_from_the_readme():
    """By links, some by way of another page: the README is a front door, no index."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = {(page.parent / link.partition("#")[0]).resolve() for page, link in _links() if page in new} - reached
    assert set(PAGES) <= reached


def test_every_private_hook_is_listed():
    """Files that patch or rely on what others keep private, as docs/upgrade-mindformers.md names them."""
    page = (ROOT / "docs" / "upgrade-mindformers.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE))
    uses = [path for folder in ("plugins", "tools", "launch") for path in (ROOT / folder).rglob("*.py")]
    import_line = re.compile(r"^\s*from plugins\.private_hooks import", re.MULTILINE)
    found = {str(path.relative_to(ROOT)) for path in uses if import_line.search(path.read_text())}
    found -= {"launch/workers/accuracy_callback.py"}  # it replaces what pynative.py names
    # and these rely on what others keep private without replacing it
    found |= {"tools/dryrun/virtual_cluster.py", "launch/workers/cores.py"}
    assert found == listed

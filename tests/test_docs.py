"""What the pages say exists: links, folders, and every `tc3` command line with its options."""

import re
import shlex
from pathlib import Path

import click
import pytest

from launch.cli import tc3

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
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


def test_readme_is_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_linked_from_the_readme():
    linked = {link for page, link in _links() if page.name == "README.md"}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


def test_every_private_hook_is_listed():
    """Files that patch or rely on what others keep private, as docs/upgrade-mindformers.md names them."""
    page = (ROOT / "docs" / "upgrade-mindformers.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE))
    uses = [path for folder in ("plugins", "tools", "launch") for path in (ROOT / folder).rglob("*.py")]
    import_line = re.compile(r"^\s*from plugins\.private_hooks import", re.MULTILINE)
    found = {str(path.relative_to(ROOT)) for path in uses if import_line.search(path.read_text())}
    # these two hold what pynative.py names
    found -= {"launch/workers/accuracy_pynative.py", "tools/accuracy/align/recorder.py"}
    assert found | {"plugins/cpu_backend/pynative.py", "tools/dryrun/compile/virtual_cluster.py"} == listed

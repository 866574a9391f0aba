"""These tests check the base class of plugins' settings, the docs that follow from it, and the messages about unknown
keys and broken JSON; the other messages of a plugin have their own tests.
"""

import json
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import pytest

from plugins import ADAPTERS
from plugins.errors import DataError, RecipeError, not_json, refuse_unknown
from plugins.settings import Section, setting, settings_of
from tools.ranges import recipe_range
from tools.recipe.load import number_problem

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mine(Section):
    KEY = "plugins.mine"
    RIGHT = "write right"
    CHANGE = ("numbers", "another model")

    right: int = setting(MISSING, "what is needed", "write one", least=0)
    left: float = setting(7.0, "what is not", "write a share", above=0, below=1)


@pytest.mark.parametrize("settings", [None, True, 3, [], {"left": 1}])
def test_what_is_no_section_or_lacks_what_it_needs(settings):
    with pytest.raises(RecipeError, match=r"^plugins\.mine: write right$") as raised:
        Mine.read(settings)
    assert raised.value.key == "plugins.mine"


def test_an_unknown_name():
    with pytest.raises(RecipeError, match=r"^plugins\.mine\.lef: no such setting \(did you mean 'left'\?\)$") as raised:
        Mine.read({"right": 1, "lef": 1})
    assert raised.value.key == "plugins.mine.lef" and raised.value.wrong.startswith("no such setting")


def test_numbers():
    assert Mine.read({"right": 0}) == Mine(0, 7.0)
    assert Mine.read({"right": 3, "left": 0.5}).left == 0.5
    for wrong in (-1, 1.0, True, "1", None):
        with pytest.raises(
            RecipeError, match=rf"^plugins\.mine\.right: {re.escape(repr(wrong))} is not allowed; write one$"
        ):
            Mine.read({"right": wrong})
    for wrong in (0, 1, float("nan"), float("inf"), "0.5", None):
        with pytest.raises(
            RecipeError, match=rf"^plugins\.mine\.left: {re.escape(repr(wrong))} is not allowed; write a share$"
        ):
            Mine.read({"right": 1, "left": wrong})


def test_an_integer_that_is_too_large_for_a_float():
    too_large = r"^plugins\.spike_guard\.threshold: 10{11}\.\.\. \(401 digits\) is too large; write less than 1e\+30$"
    with pytest.raises(RecipeError, match=too_large):
        settings_of("spike_guard").read({"threshold": 10**400})


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("value", [-1, 0, 0.5, 1, 3, 17, 101, 10**6, 10**9, 1e30, 10**400])
def test_every_command_refuses_the_numbers_that_a_plugin_refuses(name, value):
    section = settings_of(name)
    for each in fields(section):
        if {int, float} & set(section.kinds(each.name)):
            said = section.look({each.name: value})[1]
            refusals = [error.key for error in said if re.search("is not allowed|is too large", error.wrong)]
            path = ("plugins", name, each.name)
            assert (number_problem(path, value) is not None) == (".".join(path) in refusals)
            assert recipe_range(path) is None, "the section of a plugin has the only range"


def test_all_that_is_wrong_is_found():
    ours, refusals = Mine.look({"right": -1, "left": 2, "lef": 3})
    assert ours is None and [each.key for each in refusals] == [
        f"plugins.mine.{name}" for name in ("right", "left", "lef")
    ]


def table(name):
    """A plugin's settings as a page has them."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for each in fields(settings_of(name)):
        written = {MISSING: "needed", None: "none", (): "none"}.get(each.default, f"`{each.default}`")
        rows.append(f"| `{each.name}` | {written} | {each.metadata['meaning']} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if fields(settings_of(name))])
def test_a_page_has_the_settings_as_they_are(name):
    pages = [path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert any(table(name) in page for page in pages), f"put this table for plugins.{name} on its page:\n{table(name)}"


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_plugin_has_one_class_with_words_for_each_key(name):
    section = settings_of(name)
    assert f"plugins.{name}" == section.KEY and section.RIGHT and section.CHANGE[0] in ("numbers", "layout", "nothing")
    assert all(each.metadata["meaning"] for each in fields(section))


def test_no_plugin_has_a_reader_of_its_own():
    """An unknown setting is refused in one place."""
    readers = [path for path in (ROOT / "plugins").rglob("*.py") if 'what="setting"' in path.read_text()]
    assert readers == [ROOT / "plugins" / "settings.py"]


def test_an_unknown_key_is_named_with_the_nearest_or_with_all():
    refuse_unknown("f: ", {"rows": 1}, ("rows", "about"))
    with pytest.raises(DataError, match=r"^f: rwos: no such key \(did you mean 'rows'\?\)$"):
        refuse_unknown("f: ", {"rwos": 1}, ("rows", "about"), DataError)
    with pytest.raises(DataError, match=r"^f: a\.z: no such setting; known are rows, about$"):
        refuse_unknown("f: a.", ["z"], ("rows", "about"), DataError, "setting")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty: JSON was expected"), (b" \n", "is empty: JSON was expected"),
        (b'{\n"a": ,}', "is not JSON: line 2, column 6: expecting value"),
        (b'{"a": "\xff"}', "is not JSON: byte 8 is not UTF-8"),
        (b"[" * 100_000, "is not JSON that can be read: its brackets are nested too deep"),
        (b"9" * 5000, "is not JSON: Exceeds the limit (4300"),
    ],
)  # fmt: skip
def test_why_a_text_is_not_json(text, words):
    with pytest.raises((ValueError, RecursionError)) as raised:
        json.loads(text)
    assert not_json(raised.value).startswith(words)

"""What the readers of all plugins share; each plugin's own tests hold its messages."""

import re
from pathlib import Path

import pytest

from plugins.errors import RecipeError
from plugins.settings import section_of, whole_number

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


@pytest.mark.parametrize("settings", [None, True, 3, [], {"left": 1}])
def test_what_is_no_section_or_lacks_what_it_needs(settings):
    with pytest.raises(RecipeError, match=r"^plugins\.mine: write right$"):
        section_of("plugins.mine", settings, ["left", "right"], "write right", needs=["right"])


def test_an_unknown_name():
    assert section_of("plugins.mine", {}, ["left"], "") == {}
    with pytest.raises(RecipeError, match=r"^plugins\.mine\.lef: no such setting \(did you mean 'left'\?\)$"):
        section_of("plugins.mine", {"lef": 1}, ["left"], "")


def test_whole_numbers():
    assert whole_number("k", {"n": 3}, "n", "") == 3
    assert whole_number("k", {}, "n", "", default=7) == 7
    assert whole_number("k", {"n": 0}, "n", "", least=0) == 0
    for wrong in (0, 1.0, True, "1", None):
        with pytest.raises(RecipeError, match=rf"^k\.n: {re.escape(repr(wrong))}; write one$"):
            whole_number("k", {"n": wrong}, "n", "write one")


def test_no_plugin_has_a_reader_of_its_own():
    """An unknown setting is refused in one place."""
    readers = [path for path in PLUGINS.rglob("*.py") if 'what="setting"' in path.read_text()]
    assert readers == [PLUGINS / "settings.py"]

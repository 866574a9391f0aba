"""`tests/sentences`: what it draws is there, at its file and line, and the same for the same seed."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests/sentences"


@pytest.fixture(scope="module")
def program():
    loader = SourceFileLoader("sentences", str(PROGRAM))
    module = module_from_spec(spec_from_loader("sentences", loader))
    loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_same_seed_draws_the_same_sentences(program, tmp_path, monkeypatch):
    # without examples of single files, whose words are not in the sources
    monkeypatch.setattr(program, "VALUES", tmp_path / "tests/sentences.json")
    for part in ("docs", "tools/runs", "tools/schema", "launch/resume", "plugins/lora"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / "tests").mkdir()
    copied = shutil.copy(PROGRAM, tmp_path / "tests/sentences")
    command = [sys.executable, "-B", copied, "--seed", "7", "--count", "12"]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    again = [f"{path.relative_to(tmp_path)}:{line}: {words}" for path, line, words in program.draw(tmp_path, 7, 12)]
    assert first == again and len(set(first)) == 12
    assert len(program.draw(tmp_path, 8, 40)) == 40 and program.draw(tmp_path, 8, 12) != program.draw(tmp_path, 7, 12)
    elsewhere = []
    for row in first:
        place, line, sentence = row.split(":", 2)
        text = " ".join((ROOT / place).read_text().splitlines()[max(0, int(line) - 12) : int(line) + 20])
        examples = r"^ tc3: |recipe.yaml\S*|runs/a\S*|\(did you mean 'x'\?\)|Permission denied|<[^>]*>"
        words = re.findall(r"[A-Za-z]{3,}", re.sub(examples, "", sentence))
        elsewhere += [row] * (sum(word in text for word in words) <= len(words) / 2)
    # one sentence of a hundred has its words from constants, such as keys, that stand elsewhere
    assert len(elsewhere) <= 2, elsewhere


def test_each_kind_of_sentence_is_found(program, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    page = "# A heading is left out\n\nThe first is\nlong. The second is short.\n\n```bash\nno code at all\n```\n"
    (tmp_path / "docs/page.md").write_text(page + "| no | table |\n\n* An item is a sentence.\n")
    source = '''"""A module has one.

It is the first paragraph that counts.
"""
SEED_HELP = "The seed of all draws."
KEY = "plugins.size"
option("--jobs", "-j", metavar="N", help=f"How many at {KEY}.")
option("--seed", help=SEED_HELP)


def public(size):
    """Return what was asked. Or nothing at all."""
    if size:
        raise RecipeError(f"{size} of {source.file} is not a whole number. Write {round(size)}", f"{KEY}.x")
    raise DataError(f"{size.kind}: is not a whole number" + ", so mend it")


def _private():
    """Nobody draws this one."""
'''
    (tmp_path / "tools/module.py").write_text(source)
    found = {kind: [(line, words) for _, line, words in rows] for kind, rows in program.collect(tmp_path).items()}
    assert found["pages"] == [(3, "The first is long."), (4, "The second is short."), (11, "An item is a sentence.")]
    assert found["docstrings"] == [
        (1, "A module has one."), (12, "public: Return what was asked."), (12, "public: Or nothing at all."),
    ]  # fmt: skip
    assert sorted(found["help"]) == [(5, "--seed: The seed of all draws."), (7, "--jobs N: How many at plugins.size.")]
    shown = "tc3: recipe.yaml: plugins.size.x: 3 of runs/a/file is not a whole number. Write 8"
    assert found["errors"] == [(14, shown), (15, "tc3: <kind>: is not a whole number, so mend it")]
    drawn = program.draw(tmp_path, 0, 40)
    assert len(drawn) == 8 and len({path for path, _, _ in drawn}) == 2, "one of each kind, as long as all have one"


def test_examples_of_single_files(program):
    own = {"size": 4, "name": {"unknown": "lorra", "": "lora"}, "function": "=<function f>", "listed": [1]}
    shown = program.with_examples("{name!r} is unknown: {size} of {count}, {function!r}, {listed!r}", own)
    assert shown == "'lorra' is unknown: 4 of 3, <function f>, [1]"
    assert program.with_examples("{name} is there", own) == "lora is there"


def unused(values, rows):
    """Return each expression, and each condition on the words of a message, whose example no message in `rows` shows.

    Args:
        values: the examples of one file of tests/sentences.json.
    """
    found = {}
    for words in rows:
        for expression in [*(each.removesuffix("!r") for each in re.findall(r"{([^}]*)}", words)), "^"]:
            conditions = values.get(expression)
            conditional = isinstance(conditions, dict)
            shown = next((part for part in conditions if part in words), None) if conditional else ""
            found.setdefault(expression, set()).add(shown)
    stale = [expression for expression in values if expression not in found]
    return stale + [
        f"{expression}: {part!r}"
        for expression, conditions in values.items()
        for part in (conditions if isinstance(conditions, dict) and expression in found else ())
        if part not in found[expression]
    ]


@pytest.mark.slow
def test_every_example_belongs_to_a_message(program):
    stale = []
    for file, values in program.read_examples(program.VALUES).items():
        rows = [words for kind in ("help", "errors") for _, words in program.of_source(ROOT / file, ROOT, kind)]
        stale += [(file, each) for each in unused(values, rows)]
    assert stale == []


def test_an_example_that_no_message_shows_is_found():
    rows = ["tc3: {path!r} is no file", "tc3: {path} is a folder of {size}"]
    assert unused({"path": {"no file": "a", "": "b"}, "size": "3"}, rows) == []
    wrong = {"path": {"no file": "a", "compressed": "c", "folder": "b", "is": "d"}, "sizes": "3"}
    assert unused(wrong, rows) == ["sizes", "path: 'compressed'", "path: 'is'"]


def test_a_list_of_texts_is_shown_with_its_texts(program, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/module.py").write_text(
        'MODES = ("fast", "slow")\nSPEEDS: dict = {"low": 1, "high": 2}\n\n\ndef choose():\n'
        "    raise DataError(\n"
        "        f\"the mode must be one of {', '.join(MODES)}, {' or '.join(SPEEDS)}, {', '.join(others)}\"\n    )\n"
    )
    ((_, _, words),) = program.collect(tmp_path)["errors"]
    assert words == "tc3: the mode must be one of fast, slow, low or high, <others>"


def test_messages_and_docstrings_keep_their_subjects_and_their_word():
    """Readers stumbled over `3, should be 4`, `; may be repeated`, and a docstring that promised a value of main()."""
    for file in (file for folder in ("plugins", "launch", "tools") for file in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        assert not re.search(", should be |; may be repeated", text), file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "None":
                assert not re.search("(^Return|and return) (the|a|an|whether) ", ast.get_docstring(node) or ""), (
                    file,
                    node.name,
                )

"""Instructions of Python sources: what becomes one, what is held out, and that a file is the same on every machine."""

import errno
import json
import os
import shutil
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from plugins.sealed_checkpoint.plan import checksum
from tests.crashes import deaths
from tools.data.cli import data
from tools.data.instructions import INSTRUCTION, Options, instructions_of, write
from tools.data.sources import Corpus, Skips, held_out

SOURCE = '''
"""A module's own docstring is no answer."""

def join(parts, *, by=","):
    """Join the parts
    to one text.

    More about it.
    """

async def wait(seconds: float = 1.0) -> None:
    "Wait for so many seconds."

def _private():
    """Nobody asks for this one."""

def silent(): pass

def short():
    """Too short"""

class Box:
    """Holds things."""
    def put(self, thing, /):
        """Put a thing into the box."""
    class Inner:
        def size(self): "Tell how large it is."

class _Hidden:
    def shown(self):
        """Nobody asks for this one either."""
'''


def test_public_functions_with_a_sentence_become_instructions():
    rows = list(instructions_of(SOURCE, "parcel"))
    assert {row["instruction"] for row in rows} == {INSTRUCTION}
    assert [(row["input"], row["output"]) for row in rows] == [
        ("parcel.join(parts, *, by=',')", "Join the parts to one text."),
        ("parcel.wait(seconds: float=1.0)", "Wait for so many seconds."),
        ("parcel.Box.put(self, thing, /)", "Put a thing into the box."),
        ("parcel.Box.Inner.size(self)", "Tell how large it is."),
    ]


@pytest.fixture
def library(tmp_path):
    """Forty modules of one function each; two pairs of them answer alike."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(40):
        text = f'def f{number}(x):\n    """Return the number {number % 38} of the list."""\n'
        (folder / f"m{number:02d}.py").write_text(text)
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "deep.py").write_text(f"x = {'not ' * 20_000}1\n")  # the parser runs out of its own memory
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_whole_modules_are_held_out_those_that_prepare_holds_out(library, tmp_path):
    options = Options(Corpus((str(library),)), tmp_path / "out", held_out=0.3)
    summary = write(options, Skips())
    assert summary["documents"] == 42 and summary["no_python"] == 2
    train, heldout = rows(tmp_path / "out.jsonl"), rows(tmp_path / "out_heldout.jsonl")
    files = sorted(library.glob("*.py"))
    wanted = {path.stem for index, path in enumerate(files) if held_out(1234, index, 0.3)} - {"broken", "deep"}
    assert {row["input"].split(".")[0] for row in heldout} <= wanted
    assert {row["input"].split(".")[0] for row in train} == {path.stem for path in files} - wanted - {"broken", "deep"}
    known = {row["output"] for row in train}
    assert heldout and not known & {row["output"] for row in heldout}
    assert len(train) + len(heldout) < 40, "an answer that training has, too, is not held out"


def test_the_same_input_gives_the_same_bytes_in_an_order_of_the_seed(library, tmp_path):
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(Options(Corpus((str(library),)), tmp_path / name, seed=seed), Skips())
        texts.append((tmp_path / f"{name}.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]
    assert sorted(texts[0].splitlines()) == sorted(texts[2].splitlines())
    assert [row["input"] for row in rows(tmp_path / "a.jsonl")] != sorted(
        row["input"] for row in rows(tmp_path / "a.jsonl")
    )


def test_existing_files_stay_unless_forced(library, tmp_path):
    options = Options(Corpus((str(library),)), tmp_path / "out", held_out=0.3)
    (tmp_path / "out_heldout.jsonl").write_text("mine")
    with pytest.raises(DataError, match=r"out_heldout\.jsonl: the file exists"):
        write(options, Skips())
    assert not (tmp_path / "out.jsonl").exists() and (tmp_path / "out_heldout.jsonl").read_text() == "mine"
    write(Options(options.corpus, options.output, 0.3, force=True), Skips())
    assert (tmp_path / "out.jsonl").exists()


def test_held_out_rows_of_an_earlier_run_do_not_stay_beside_data_that_trains_them(library, tmp_path):
    corpus, output, left = Corpus((str(library),)), tmp_path / "out", tmp_path / "out_heldout.jsonl"
    write(Options(corpus, output, held_out=0.3), Skips())
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(DataError, match=r"out_heldout\.jsonl: the file exists"):
        write(Options(corpus, output), Skips())
    assert left.exists() and not (tmp_path / "out.jsonl").exists()
    write(Options(corpus, output, force=True), Skips())
    assert not left.exists() and len(rows(tmp_path / "out.jsonl")) == 40
    left.write_text('{"instruction": "mine"}\n')
    write(Options(corpus, output, force=True), Skips())
    assert left.exists(), "somebody else's file stays"


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_training_data_never_stand_beside_what_another_start_held_out(library, tmp_path, error):
    """Killed, or on a full disk, a second start left its held-out rows beside training data that hold these rows."""
    pairs, number = {}, count()
    for seed in (1, 2):
        write(Options(Corpus((str(library),)), tmp_path / str(seed) / "out", 0.3, seed), Skips())
        pairs[seed] = {path.name: path.read_text() for path in (tmp_path / str(seed)).iterdir()}

    def fresh():
        return Path(shutil.copytree(tmp_path / "1", tmp_path / f"try{next(number)}"))

    def again(folder):
        try:
            write(Options(Corpus((str(library),)), folder / "out", 0.3, 2, force=True), Skips())
        except DataError:
            assert error

    for folder, where in deaths(again, fresh, error):
        found = {path.name: path.read_text() for path in folder.iterdir() if path.name[0] != "."}
        assert found in pairs.values() or "out.jsonl" not in found, where
        assert not error or len(found) == len(os.listdir(folder)), where
        if error and "write" in where:
            assert found in pairs.values(), where


def test_sources_without_functions_are_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="1 documents were read, but the train split has no function with a docstring"):
        write(Options(Corpus((str(tmp_path),)), tmp_path / "out"), Skips())
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_says_what_it_wrote(library, tmp_path):
    prefix = tmp_path / "out"
    arguments = ["instructions", "--input", str(library), "--output", str(prefix), "--held-out", "0.3"]
    told = CliRunner().invoke(data, arguments)
    assert told.exit_code == 0, told.output
    counts = [len(rows(Path(f"{prefix}{end}.jsonl"))) for end in ("", "_heldout")]
    assert (
        told.stdout == f"{prefix}.jsonl: {counts[0]} instructions\n{prefix}_heldout.jsonl: {counts[1]} instructions\n"
    )
    as_json = CliRunner().invoke(data, [*arguments, "--force", "--json"])
    summary = json.loads(as_json.stdout)
    assert [summary[split]["instructions"] for split in ("train", "heldout")] == counts
    assert summary["train"]["sha256"] == checksum(Path(f"{prefix}.jsonl"))

"""Keys that one line of one rank lacks: a gap says so, and nothing is called equal."""

import json
import shutil

import pytest

from plugins.errors import DataError
from tests.corrupted import places, without
from tests.tools.accuracy.diagnose.simulated import Run
from tests.tools.accuracy.diagnose.test_forms import Whole
from tools.accuracy.diagnose import evidence
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side

UNREAD = {("software",), ("held_bytes",)}  # below them: what is not installed is left out, and bytes are not compared


@pytest.mark.parametrize(
    ("kind", "name", "steps"),
    [
        (Run, "metrics/rank_1.jsonl", 1),
        (Run, "metrics/state_rank_1.jsonl", 2),
        (Whole, "metrics/state_rank_0.jsonl", 1),
    ],
)
def test_no_run_with_a_line_that_lacks_a_key_is_called_equal(tmp_path, monkeypatch, kind, name, steps):
    whole = kind(tmp_path / "whole", steps=steps, ranks=2 if kind is Run else 1).write()
    recipe = evidence.load_recipe(whole / "recipe.yaml")
    monkeypatch.setattr(evidence, "load_recipe", lambda _: recipe)
    run = shutil.copytree(whole, tmp_path / "run")
    assert diagnose(read_side(whole), read_side(run)).word == "equal"
    file, told = run / name, 0
    lines = file.read_text().splitlines(keepends=True)
    for place, line in enumerate(lines):
        for path in places(json.loads(line)):
            text = None if path[:-1] in UNREAD else without(line, path)
            if text is None:
                continue
            file.write_text("".join([*lines[:place], text, *lines[place + 1 :]]))
            try:
                verdict = diagnose(read_side(whole), read_side(run))
            except DataError as error:
                assert f"{file}: line {place + 1}" in str(error)
                continue
            told += 1
            assert verdict.word != "equal", (place, path)
            assert verdict.gaps and all(gap.startswith(str(run)) for gap in verdict.gaps), (place, path)
    assert told > 5


WEIGHT = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    "path",
    [
        ("biases",),
        ("parts",),
        ("biases", "decoder.layers.1.mlp.router"),
        ("weights", WEIGHT),
        ("weights", WEIGHT, "gradient"),
        ("weights", WEIGHT, "rate"),
        ("state", f"adam_m.{WEIGHT}"),
        ("parts", WEIGHT),
    ],
)
def test_one_run_by_itself(tmp_path, path):
    """A state with a gap is not judged by the laws either: what it lacks would break them."""
    run = Run(tmp_path / "run", steps=1, ranks=2).write()
    file = run / "metrics" / "state_rank_1.jsonl"
    start, step = file.read_text().splitlines(keepends=True)
    file.write_text(start + without(step, path))
    verdict = diagnose(read_side(run))
    assert verdict.word == "nothing differs in what was recorded"
    assert [gap.partition(": ")[2] for gap in verdict.gaps] == [
        f"the state after step 1 lacks `{'.'.join(path)}` on rank 1"
    ]

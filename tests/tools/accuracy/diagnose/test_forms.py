"""Records with values of a wrong type: one line names file, line and key, and says what would be right."""

import itertools
import json
import shutil

import pytest

from plugins.errors import DataError
from plugins.step_record.plan import record_file
from tests.corrupted import WRONG, corrupted, kind_of, places
from tests.tools.accuracy.diagnose.simulated import ROUTER, SHAPES, Run
from tools.accuracy.diagnose import evidence
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side

OUTPUT = ["0" * 16, 1.0, [1.0, 2.0, 3.0, 4.0]]


class Whole(Run):
    """A run in one CPU process, which also records the outputs of its modules."""

    def line(self, rank, kind, line):
        if kind == "start":
            line = {**line, "effective": {"optimizer.eps": 1e-8, "model.type": "moe", "model.depth": None}}
        elif line["step"] == 1:
            line = {**line, "modules": {"layers.0.mlp": OUTPUT}}
        super().line(rank, kind, line)

    def parts(self, rank):
        names = {prefix + name: shape for name, shape in SHAPES.items() for prefix in ("", "adam_m.", "adam_v.")}
        return {name: [list(shape), [0] * len(shape)] for name, shape in names.items()}

    def write(self):
        super().write()
        super().line(0, "end", {"step": self.last, "end": True, "state": {}, "modules": {"layers.0.mlp": OUTPUT}})
        return self.folder


@pytest.mark.parametrize("name", ["metrics/rank_0.jsonl", "metrics/state_rank_0.jsonl"])
def test_no_value_of_a_wrong_type_is_computed_with(tmp_path, monkeypatch, name):
    """Each key of each kind of line, with each wrong type; what a run may write as well is not called equal."""
    whole = Whole(tmp_path / "whole", steps=1).write()
    recipe = evidence.load_recipe(whole / "recipe.yaml")
    monkeypatch.setattr(evidence, "load_recipe", lambda _: recipe)
    run = shutil.copytree(whole, tmp_path / "run")
    assert diagnose(read_side(whole), read_side(run)).word == "equal"
    file, refused = run / name, 0
    lines = file.read_text().splitlines(keepends=True)
    for place, line in enumerate(lines):
        for path, wrong in itertools.product(places(json.loads(line)), WRONG):
            text, right = corrupted(line, path, wrong)
            if type(right) is type(wrong) and type(wrong) in (float, str, bool):
                continue
            file.write_text("".join([*lines[:place], text, *lines[place + 1 :]]))
            at = f"{file}: line {place + 1}: {'.'.join(map(str, path))}"
            try:
                side = read_side(run)
            except DataError as error:
                refused += 1
                assert at in str(error) and "should be" in str(error) and "\n" not in str(error)
                continue
            alike = right is None or kind_of(right) == kind_of(wrong) or path[0] == "effective"
            assert alike or wrong is None or wrong == {}, at
            word = diagnose(read_side(whole), side).word
            assert alike or word != "equal", at
    assert refused > 100


@pytest.mark.parametrize("key", ["loads", "biases"])
def test_a_router_with_another_number_of_experts_on_one_line(tmp_path, key):
    run = Run(tmp_path / "run").write()
    file = record_file(run, 0)
    lines = file.read_text().splitlines(keepends=True)
    lines[2], _ = corrupted(lines[2], (key, ROUTER), [0.5])
    file.write_text("".join(lines))
    with pytest.raises(DataError, match=f"line 3: {key}.{ROUTER} has 1 numbers, should have 4"):
        read_side(run)

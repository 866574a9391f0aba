"""Folders that cannot be compared, or only in part: one line says what to record."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from plugins.errors import DataError
from plugins.step_record.plan import record_file
from tests.tools.accuracy.diagnose.simulated import Run, but
from tools.accuracy.cli import accuracy
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side

EMBEDDING = "embedding.word_embeddings.weight"


def said(*arguments):
    done = CliRunner().invoke(accuracy, ["diagnose", *map(str, arguments)])
    refused = done.exception is not None and not isinstance(done.exception, SystemExit)
    return done.exit_code, str(done.exception) if refused else done.output


def test_two_equal_runs(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b").write()
    code, text = said(a, b)
    assert code == 0 and text.splitlines()[-1] == "equal"


def test_a_difference_has_its_place_and_its_usual_cause(tmp_path):
    a, b = Run(tmp_path / "a").write(), but(decay=lambda *_: 0.1)(tmp_path / "b").write()
    code, text = said(a, b)
    assert code == 1 and "-> step 2, update, layers.0.norms" in text and "usually: the optimizer" in text
    code, text = said(a, b, "--json")
    told = json.loads(text)
    assert code == 1 and told["findings"][0]["stage"] == "update" and told["verdict"] == "differs: update, step 2"
    assert len(said(a, b, "--all")[1].splitlines()) > len(said(a, b)[1].splitlines())


def test_a_rank_that_has_recorded_nothing(tmp_path):
    run = Run(tmp_path / "run", ranks=2).write()
    (run / "metrics" / "rank_1.jsonl").unlink()
    assert "rank 1 of 2 has not recorded a step" in said(run)[1]


@pytest.mark.parametrize("damage", ["{]\n", "[1]\n", '{"step": 1}\n', '{"step": 1, "state": {}}\n'])
def test_a_damaged_line(tmp_path, damage):
    run = Run(tmp_path / "run").write()
    file = record_file(run, 0)
    file.write_text(damage + file.read_text())
    assert f"{file}: line 1 is" in said(run)[1]


def test_runs_without_a_step_in_common_are_not_called_equal(tmp_path):
    a, b = Run(tmp_path / "a", steps=2).write(), Run(tmp_path / "b", steps=6, resumed_from=4).write()
    code, text = said(a, b)
    assert code == 2 and "no step is in both runs: A has 1 to 2, B 5 to 6" in text
    assert "compared: versions, configuration\n" in text and text.splitlines()[-1] == "unknown: no step is in both runs"
    code, text = said(a, Run(tmp_path / "c", steps=3, resumed_from=2).write())
    assert code == 0 and "compared: versions, configuration, resume\n" in text, "the state that step 2 left is compared"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_steps_of_another_number_of_ranks_are_left_out_and_said(tmp_path, before, after):
    run = Run(tmp_path / "run", steps=2, ranks=before).write()
    later = Run(tmp_path / "later", steps=4, ranks=after, resumed_from=2).write()
    shutil.copy(later / "recipe.yaml", run)
    with pytest.raises(DataError, match="has not recorded a step since a resume changed the number of ranks"):
        read_side(run)
    for file in (later / "metrics").iterdir():
        with (run / "metrics" / file.name).open("a") as lines:
            lines.write(file.read_text())
    side = read_side(run)
    assert sorted(side.steps) == sorted(side.states) == sorted(side.samples) == [3, 4]
    assert [start.step for start in side.starts] == [2]
    for verdict in (diagnose(side), diagnose(read_side(Run(tmp_path / "a", steps=4).write()), read_side(run))):
        assert not verdict.findings and verdict.word == "nothing differs in what was recorded"
        assert [gap.partition(": ")[2] for gap in verdict.gaps] == [
            "a resume changed the number of ranks from step 3 on; all steps before it are left out"
        ]


@pytest.mark.parametrize("before", [1, 2])
def test_a_run_that_went_back_again_is_read_from_where_it_went_back(tmp_path, before):
    class Skipping(Run):
        def gradient(self, step, name):
            return super().gradient(step + 10 * (step > 1), name)

    run = Run(tmp_path / "run", steps=3, ranks=before).write()
    parts = [Run(tmp_path / "later", steps=4, resumed_from=3), Skipping(tmp_path / "again", steps=3, resumed_from=1)]
    for part in parts:
        for file in (part.write() / "metrics").iterdir():
            with (run / "metrics" / file.name).open("a") as lines:
                lines.write(file.read_text())
    shutil.copy(tmp_path / "again" / "recipe.yaml", run)
    side = read_side(run)
    assert sorted(side.steps) == sorted(side.states) == ([2, 3] if before > 1 else [1, 2, 3])
    assert [start.step for start in side.starts] == ([1] if before > 1 else [0, 1])
    assert not diagnose(side).findings


@pytest.mark.parametrize(("begin", "stage"), [(0, "start"), (2, "resume")])
def test_what_is_not_finite_in_the_state_of_both_runs_is_found_there(tmp_path, begin, stage):
    broken = but(
        restored=lambda state, _: state | {f"adam_v.{EMBEDDING}": np.full((8, 6), np.inf, np.float32)},
        start=lambda made: made if begin else {**made, EMBEDDING: np.full((8, 6), np.nan, np.float32)},
    )
    sides = [read_side(broken(tmp_path / name, resumed_from=begin).write()) for name in "ab"]
    (first, *_) = diagnose(*sides).first
    assert (first.step, first.stage, first.module) == (begin, stage, "embedding")
    assert first.detail.endswith("is not finite when the training begins")


def test_another_model(tmp_path):
    a = Run(tmp_path / "a").write()
    b = Run(tmp_path / "b", keys={"model.model_config.num_hidden_layers": 3}).write()
    assert "another model than" in said(a, b)[1]


def test_a_run_that_goes_on_is_compared_as_far_as_it_is(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b", steps=2).write()
    for name in ("rank_0.jsonl", "state_rank_0.jsonl"):
        file = b / "metrics" / name
        file.write_text(file.read_text().replace('"total_steps": 2', '"total_steps": 3') + '{"step": 3, "lo')
    assert sorted(read_side(b).states) == [1, 2]
    code, text = said(a, b)
    assert code == 0 and "step 2 of 3 is its last: it is still training, or ended early" in text


def test_a_run_without_a_record_says_how_to_make_one(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b").write()
    record_file(b, 0).unlink()
    code, text = said(a, b)
    assert code == 0 and "plugins.step_record.steps=3" in text and "unknown, because it was not recorded" in text
    assert text.splitlines()[-1] == "nothing differs in what was recorded"


def test_samples_that_no_process_saw_are_unknown(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b").write()
    file = b / "metrics" / "rank_0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.pop("samples", None)
    file.write_text(
        "".join(json.dumps({key: value for key, value in line.items() if key != "samples"}) + "\n" for line in lines)
    )
    assert "sink_mode=False" in said(a, b)[1]


def test_a_key_that_only_one_recipe_has(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b", keys={"plugins.hyper_connections": {"streams": 4}}).write()
    assert "changed key: plugins.hyper_connections.streams absent -> 4: another model" in said(a, b)[1]
    assert json.loads(said(b, a, "--json")[1])["changed"][0]["after"] == "absent"

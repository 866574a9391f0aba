"""Records that are not whole: nothing is called equal, and a line says what is missing."""

import json

import pytest

from tests.tools.accuracy.diagnose.simulated import SHAPES, Run
from tools.accuracy.diagnose.differences import diagnose
from tools.accuracy.diagnose.evidence import read_side
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

METRICS, STATES = "metrics/rank_{}.jsonl", "metrics/state_rank_{}.jsonl"


def edited(folder, name, edit, rank=0):
    """The folder, with the lines of one of its files edited."""
    file = folder / name.format(rank)
    file.write_text("".join(edit(file.read_text().splitlines(keepends=True))))
    return folder


def without(place):
    return lambda lines: lines[:place] + lines[place + 1 :]


def first(count):
    return lambda lines: lines[:count]


@pytest.mark.parametrize(
    ("name", "edit", "rank", "told"),
    [
        (STATES, first(3), 0, "of step 3 are not recorded by all ranks"),
        (STATES, first(2), 1, "of steps 2, 3 are not recorded by all ranks"),
        (STATES, without(2), 1, "of step 2 are not recorded by all ranks"),
        (STATES, without(0), 1, "the state after step 0, from which it started, is not recorded by all ranks"),
        (METRICS, without(2), 0, "step 2 is missing from its metrics"),
        (METRICS, first(2), 1, "steps 2, 3 are missing from the metrics of rank 1"),
        (METRICS, first(3), 1, "step 3 is missing from the metrics of rank 1"),
    ],
)
def test_a_rank_that_recorded_less_than_the_others(tmp_path, name, edit, rank, told):
    a, b = Run(tmp_path / "a", ranks=2).write(), edited(Run(tmp_path / "b", ranks=2).write(), name, edit, rank)
    for verdict in (diagnose(read_side(a), read_side(b)), diagnose(read_side(b), read_side(a)), diagnose(read_side(b))):
        assert not verdict.findings and verdict.word == "nothing differs in what was recorded"
        assert any(told in gap and gap.startswith(str(b)) for gap in verdict.gaps)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (first(3), "of step 3 are not recorded, although plugins.step_record asks for them"),
        (without(2), "of step 2 are not recorded"),
        (without(0), "the state from which it started is not recorded"),
    ],
)
def test_a_record_that_is_cut(tmp_path, edit, told):
    a, b = Run(tmp_path / "a").write(), edited(Run(tmp_path / "b").write(), STATES, edit)
    verdict = diagnose(read_side(a), read_side(b))
    assert verdict.word == "nothing differs in what was recorded" and any(told in gap for gap in verdict.gaps)


def test_a_run_that_ended_early_is_not_called_equal(tmp_path):
    a, b = Run(tmp_path / "a").write(), Run(tmp_path / "b").write()
    edited(edited(b, METRICS, first(3)), STATES, first(3))
    verdict = diagnose(read_side(a), read_side(b))
    assert verdict.word == "nothing differs in what was recorded"
    assert [gap.partition(": ")[2] for gap in verdict.gaps] == [
        "step 2 of 3 is its last: it is still training, or ended early"
    ]


def test_steps_that_are_not_printed_are_no_gap_and_have_no_gradients_to_compare(tmp_path):
    """Metrics of every second step: by how much the others' gradients were clipped is not known."""

    class Seldom(Run):
        def metrics(self, rank, line):
            if line.get("step", 2) % 2 == 0:
                super().metrics(rank, line)

    callbacks = [{"type": "MFLossMonitor", "per_print_times": 2}]
    a, b = Run(tmp_path / "a").write(), Seldom(tmp_path / "b", keys={"callbacks": callbacks}).write()
    side = read_side(b)
    verdict = diagnose(read_side(a), side)
    assert not side.gaps and sorted(side.steps) == [2] and not verdict.findings


def test_what_a_resumed_run_had_recorded_before_it_went_back_is_not_its_own(tmp_path):
    """It is resumed from step 1 with another rate, and records only one step of that part."""

    class Faster(Run):
        def rate(self, step):
            return 2 * super().rate(step)

    folder, later = Run(tmp_path / "run").write(), Faster(tmp_path / "later", resumed_from=1).write()
    edited(later, STATES, first(2))
    for file in (folder / "metrics").iterdir():
        with file.open("a") as whole:
            whole.write((later / "metrics" / file.name).read_text())
    recipe = load_recipe(folder / "recipe.yaml")
    recipe["plugins"]["step_record"]["steps"] = 1
    dump_recipe(recipe, folder / "recipe.yaml")
    side = read_side(folder)
    assert sorted(side.states) == [1, 2] and not diagnose(side).findings and not side.gaps


def changed(place, change):
    """An edit of one line, as JSON."""

    def edit(lines):
        record = json.loads(lines[place])
        change(record)
        return [*lines[:place], json.dumps(record) + "\n", *lines[place + 1 :]]

    return edit


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (METRICS, lambda line: line.pop("samples"), "the metrics of rank 0 lack `samples` of step 2"),
        (METRICS, lambda line: line.update(lm_loss=None), "the lm_loss of step 2 is missing"),
        (
            METRICS,
            lambda line: line.update(step=10**12),
            "999,999,999,997 of the steps up to 1000000000000 are missing",
        ),
        (METRICS, lambda line: line.pop("global_norm"), "lack `global_norm` of step 2"),
        (STATES, lambda line: line["state"].pop(f"adam_v.{next(iter(SHAPES))}"), "after step 2 lacks `state.adam_v."),
    ],
)
def test_what_only_some_steps_or_ranks_have(tmp_path, name, change, told):
    ranks = 2 if name == STATES else 1
    a, b = (Run(tmp_path / side, ranks=ranks).write() for side in "ab")
    edited(b, name, changed(2, change))
    for sides in ((a, b), (b, a)):
        verdict = diagnose(*map(read_side, sides))
        assert not verdict.findings and verdict.word == "nothing differs in what was recorded"
        assert any(gap.startswith(str(b)) and told in gap for gap in verdict.gaps)

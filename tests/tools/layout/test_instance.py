"""Instance files: what is read, what is refused with which words, and judgements against known numbers."""

import json

import numpy as np
import pytest

from benchmarks.pipeline_search import judge, plan_of
from plugins.errors import DataError
from tests.tools.layout.pipeline_instances import CASE_438B, all_plans, content, instance
from tools.layout.instance import read_instance

# layers of the 438B case by chunk and stage, and how many of them recompute the selected operators
LAYERS_438B = [[2, 3, 3, 3, 4, 4, 4, 4], [4, 4, 4, 4, 3, 3, 3, 2]]
SELECT_438B = [[2, 3, 3, 3, 3, 1, 0, 0], [2, 3, 2, 1, 0, 0, 0, 0]]


def test_438b_case_has_the_time_and_memory_that_others_found():
    known = json.loads(CASE_438B.read_text("utf-8"))["best_known"]
    layers, select = np.array(LAYERS_438B), np.array(SELECT_438B)
    solution = [np.stack([layers - select, select, 0 * layers], axis=-1).tolist()]
    judged = judge(read_instance(CASE_438B), solution)
    assert judged.time == known["neutral_time"]
    assert judged.peak.tolist() == known["peak_mem"]
    assert judged.over == {}


def test_two_stages_by_hand(tmp_path):
    """Forward 2, backward 4 a layer, one layer and the head on stage 0, two and the tail on stage 1; 2 micro-batches.

    Stage 1 works without a break: 2.5 until its first forward, 2 x (6 + 12), then 5 for the last backward of stage 0.
    """
    small = instance(tmp_path, counts=(3,), micro_batches=2, cap=30.0)
    judged = judge(small, [[[[1, 0], [1, 1]]]])
    assert judged.time == 2.5 + 2 * (6 + 13) + 5
    # static + parameters + in flight x activations
    assert judged.peak.tolist() == [6 + 3 + 2 * 8, 5 + 6 + 1 * (8 + 8 / 3)]
    assert judge(small, [[[[2, 0], [1, 0]]]]).over == {0: 6 + 6 + 2 * 16 - 30.0}


def test_solutions_go_to_plans_and_back(tmp_path):
    small = instance(tmp_path, stages=2, chunks=2, counts=(2, 3))
    plans = all_plans(small)
    assert len(plans) > 100
    assert small.well_formed(plans).all()
    for plan in plans[::17]:
        assert (plan_of(small, small.to_solution(plan)) == plan).all()


def test_broken_plans_are_not_well_formed(tmp_path):
    small = instance(tmp_path, stages=2, chunks=2, counts=(2, 3), options=1)
    good = np.array([[1, 1, 0, 0], [0, 0, 1, 2]])
    bad = {
        "a layer too many": [[1, 1, 0, 0], [0, 0, 1, 3]],
        "a negative count": [[1, 1, 0, 0], [0, 0, -1, 4]],
        "types out of order": [[1, 0, 1, 0], [0, 1, 0, 2]],
        "an empty inner chunk": [[1, 1, 0, 0], [0, 0, 0, 3]],
    }
    assert small.well_formed(good[None])[0]
    for why, plan in bad.items():
        assert not small.well_formed(np.array([plan]))[0], why


def set_key(*keys):
    *path, last, value = keys

    def change(mapping):
        for key in path:
            mapping = mapping[key]
        mapping[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_key("schema", "pp-balance/2"), r'schema: "pp-balance/2": the schema must be \'pp-balance/1\''),
        (set_key("P", 0), "P: 0: the value must be 1, 2, 3"),
        (set_key("M", 4.0), "M: 4.0: the value must be 1, 2, 3"),
        (set_key("V", True), "V: true: the value must be 1, 2, 3"),
        (set_key("static_mem", [1]), r"static_mem: \[1\]: the list has 1 entries, but P is 2"),
        (set_key("static_mem", 1, "5"), r'static_mem\[1\]: "5": the value must be a number'),
        (set_key("memory_cap", float("nan")), "memory_cap: NaN: the value must be a number"),
        (
            set_key("schedule", "interleaved"),
            "must be one of 1f1b, interleaved_1f1b, .*did you mean 'interleaved_1f1b'",
        ),
        (set_key("body", []), r"body: \[\]: the value must be a list that is not empty"),
        (
            set_key("body", 0, "options", 1, "act_mem", -1),
            r"body\[0\]\.options\[1\]\.act_mem: -1: the value must be a number, 0 or",
        ),
        (set_key("tail", 3), "tail: 3: the value must be a mapping"),
        (lambda m: m["body"][0].update(fwdd=m["body"][0].pop("fwd")), r"body\[0\]\.fwdd: no such key .*mean 'fwd'"),
        (lambda m: m.update(V=2, schedule="1f1b"), "one chunk a stage"),
        (
            lambda m: m.update(V=2, schedule="interleaved_1f1b", M=5),
            "M must be a multiple of P, but 5 is not a multiple of 2",
        ),
    ],
)
def test_wrong_values_are_named(tmp_path, change, words):
    mapping = content()
    change(mapping)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(mapping), "utf-8")
    with pytest.raises(DataError, match=f"mine.json: .*{words}"):
        read_instance(path)


def test_answers_of_others_in_an_instance_are_not_read(tmp_path):
    own = content()
    answers = {
        "published_optimum": {"objective": 1.0},
        "fast_tuner": {},
        "sapp": {},
        "best_known": {"neutral_time": 1.0},
    }
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps({**own, **answers}), "utf-8")
    assert read_instance(path).cap == own["memory_cap"]


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_instance(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("P: 8", "utf-8")
    with pytest.raises(DataError, match="is not JSON"):
        read_instance(tmp_path / "text.json")

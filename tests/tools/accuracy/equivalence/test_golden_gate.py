"""Golden numbers: kept, checked, told apart."""

import json
import threading

import pytest

from plugins.errors import DataError
from tests.tools.accuracy.equivalence import recorded
from tests.tools.accuracy.equivalence.recorded import record
from tests.training.runs import ROOT
from tools.accuracy.equivalence import golden_gate

MINI = str(ROOT / "recipes/mini/pretrain.yaml")


@pytest.fixture
def one(tmp_path):
    return record(tmp_path / "one")


def test_golden_numbers_are_kept_and_checked(one, tmp_path):
    file = golden_gate.golden_file(tmp_path, MINI)
    assert file.name == "mini-pretrain.json"
    numbers = {"baseline": golden_gate.numbers_of(one)}
    golden_gate.write_golden(file, MINI, numbers)
    golden = golden_gate.read_golden(file)
    assert golden_gate.differences(golden, numbers) == []
    golden_gate.write_golden(file, MINI, {"other": numbers["baseline"]})
    assert sorted(golden_gate.read_golden(file)) == ["baseline", "other"]
    assert golden_gate.differences(golden, {"other": numbers["baseline"]}) == [], "nothing to be held to is no failure"


def test_two_updates_at_once_keep_the_numbers_of_both(one, tmp_path, monkeypatch):
    file, numbers, threads = golden_gate.golden_file(tmp_path, MINI), golden_gate.numbers_of(one), []

    def second(path, text):
        monkeypatch.undo()
        threads.append(threading.Thread(target=golden_gate.write_golden, args=(file, MINI, {"second": numbers})))
        threads[0].start()
        threads[0].join(0.5)
        golden_gate.write_atomically(path, text)

    monkeypatch.setattr(golden_gate, "write_atomically", second)
    golden_gate.write_golden(file, MINI, {"first": numbers})
    threads[0].join()
    assert sorted(golden_gate.read_golden(file)) == ["first", "second"]


def test_a_golden_file_is_that_of_one_recipe(one, tmp_path):
    theirs = tmp_path / "mini" / "pretrain.yaml"
    folder = tmp_path / "golden"
    ours = golden_gate.golden_file(golden_gate.GOLDEN, MINI)
    assert golden_gate.golden_file(golden_gate.GOLDEN, str(theirs)) == ours
    assert golden_gate.owner(ours, MINI) == "" and golden_gate.owner(ours, str(theirs)) == "recipes/mini/pretrain.yaml"
    file = golden_gate.golden_file(folder, str(theirs))
    golden_gate.write_golden(file, str(theirs), {"baseline": golden_gate.numbers_of(one)})
    assert json.loads(file.read_text())["recipe"] == "../mini/pretrain.yaml", "no path of this machine"
    assert golden_gate.owner(file, str(theirs)) == "" and golden_gate.owner(file, MINI) == "../mini/pretrain.yaml"


@pytest.mark.parametrize(
    ("spoil", "lines"),
    [
        (recorded.spoil_loss_slightly, []),
        (
            recorded.spoil_forward,
            [
                "step 1 loss: 3.01, golden 3 (off by 0.0033, allowed 0.0001)",
                "step 2 loss: 2.01, golden 2 (off by 0.005, allowed 0.0001)",
            ],
        ),
        (
            recorded.spoil_backward,
            [
                f"step {step} gradient norm of layers.1.experts: {now}, golden {then} (off by 0.0005, allowed 0.0001)"
                for step, now, then in ((1, "1.0005", "1"), (2, "1.41492", "1.414214"))
            ],
        ),
        (recorded.spoil_data, ["samples "]),
    ],
)
def test_what_moved_is_told(one, tmp_path, spoil, lines):
    golden = {"baseline": golden_gate.numbers_of(one)}
    found = golden_gate.differences(golden, {"baseline": golden_gate.numbers_of(record(tmp_path / "b", 1, spoil))})
    assert len(found) == len(lines)
    for got, line in zip(found, lines, strict=True):
        assert got.startswith(f"baseline: {line}")


@pytest.mark.parametrize("name", ["loss", "global_norm"])
def test_a_number_that_is_not_finite_is_told_and_never_kept(one, tmp_path, name):
    golden = {"baseline": golden_gate.numbers_of(one)}
    broken = {"baseline": golden_gate.numbers_of(record(tmp_path / "b", 1, recorded.spoil_number(name)))}
    for want, got in ((golden, broken), (broken, golden), (broken, broken)):
        (line,) = golden_gate.differences(want, got)
        assert line.startswith(f"baseline: step 2 {name}: ") and "nan" in line
    with pytest.raises(DataError, match=f"baseline: step 2 {name} is nan"):
        golden_gate.write_golden(tmp_path / "x.json", MINI, broken)
    assert not (tmp_path / "x.json").exists()


def test_another_number_of_steps_is_told(one, tmp_path):
    golden = {"baseline": golden_gate.numbers_of(one)}
    three = {"baseline": golden_gate.numbers_of(record(tmp_path / "b", steps=3))}
    assert golden_gate.differences(golden, three)[-1] == "baseline: 3 steps, golden 2; give --steps 2"


def text_of(change):
    step = {"tokens": 64, "loss": 3.0, "norms": {"head": 1.0}}
    run = {"samples": "0", "steps": [step]}
    change(run, step)
    return json.dumps({"recipe": "x", "runs": {"baseline": run}})


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        text_of(lambda run, step: run.pop("steps")),
        text_of(lambda run, step: run.update(steps=[1])),
        text_of(lambda run, step: step.pop("tokens")),
        text_of(lambda run, step: step.update(loss="3.0")),
        text_of(lambda run, step: step.update(norms=[1.0])),
        text_of(lambda run, step: step["norms"].update(head=None)),
    ],
)
def test_a_broken_golden_file_is_refused(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text_of(lambda run, step: None))
    assert golden_gate.read_golden(file)
    file.write_text(text)
    with pytest.raises(DataError, match=r"not a file of golden numbers .*; remove it, and write a new one with"):
        golden_gate.read_golden(file)


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "golden").glob("*.json")), ids=lambda path: path.stem)
def test_committed_golden_files_are_of_recipes_that_exist(file):
    content = json.loads(file.read_text())
    assert (ROOT / content["recipe"]).exists()
    assert golden_gate.golden_file(file.parent, str(ROOT / content["recipe"])) == file
    assert golden_gate.read_golden(file)

"""`tc3 accuracy collectives`, training and compiles replaced; tests/training/test_sharded.py has real ones."""

import json
import re

import click.testing
import pytest

from plugins.errors import DataError, RecipeError
from plugins.semi_auto_cpu.ranks import made_up_name
from tests.corrupted import WRONG, corrupted, places
from tests.training.runs import ROOT
from tools.accuracy import collectives
from tools.accuracy.cli import collectives_command
from tools.accuracy.equivalence import runs as equivalence_runs
from tools.dryrun.executed import calls_file
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.view import View

TP2, PP2 = (ROOT / "recipes" / "mini" / f"pretrain_{name}.yaml" for name in ("tp2", "pp2"))
SUM = {"op": "AllReduce", "group": 0, "shape": [4], "dtype": "Float32"}
GATHER = {"op": "AllGather", "group": 0, "shape": [8, 2], "dtype": "Float32", "after": [0]}
CALLS = [
    ["AllReduce", [0, 1], 16, [4], "float32", None, None],
    ["AllGather", [0, 1], 64, [8, 2], "float32", None, None],
]


@pytest.fixture
def compiled(monkeypatch):
    """The compiles that were asked for; each rank reports a sum and a gather behind it."""
    plans = []

    def compile_all(plan, at_once, use_cache):
        plans.append(plan)
        graph = {"groups": [[0, 1]], "collectives": [SUM, GATHER]}
        return [{"rank": job.rank, "graph": graph} for job in plan.jobs]

    monkeypatch.setattr(collectives, "compile_all", compile_all)
    return plans


def left(run_dir, recipe=TP2):
    """A run's folder as a training of two ranks leaves it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    dump_recipe(load_recipe(recipe), run_dir / "recipe.yaml")
    for rank in range(2):
        recorded(run_dir, rank)
    return run_dir


def recorded(run_dir, rank, calls=CALLS, places=None):
    """Write what a rank of a run recorded."""
    file = calls_file(run_dir, rank)
    file.parent.mkdir(exist_ok=True)
    places = {made_up_name((0, 1)): rank} if places is None else places
    file.write_text(json.dumps({"step": 1, "calls": calls, "places": places}))


def invoke(*words):
    result = click.testing.CliRunner().invoke(collectives_command, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, (SystemExit, RecipeError, DataError)), result
    return result


def test_equal_calls_of_all_ranks_end_with_0(tmp_path, compiled):
    result = invoke(left(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        *(f"rank {rank}: 2 collectives, 0.00 MiB: 1 AllGather, 1 AllReduce" for rank in range(2)),
        "equal",
    ]


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        (CALLS[:1], "reported, not executed: AllGather of 8x2 float32 between ranks 0, 1"),
        ([*CALLS, CALLS[0]], "executed, not reported: AllReduce of 4 float32 between ranks 0, 1"),
        (CALLS[::-1], "executed before what it needs: AllGather"),
        ([CALLS[0], [*CALLS[1][:4], "bfloat16", None, None]], "executed, not reported: AllGather of 8x2 bfloat16"),
    ],
)
def test_a_rank_whose_calls_differ_is_named_and_ends_with_1(calls, line, tmp_path, compiled):
    folder = left(tmp_path / "run")
    recorded(folder, 1, calls)
    result = invoke(folder, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    one, other = report["ranks"]
    assert report["verdict"] == "differs" and one["differences"] == []
    assert any(each.startswith(line) for each in other["differences"])
    told = invoke(folder).stdout.splitlines()
    assert told[-1] == "differs" and told[2].startswith("  ")


def test_a_rank_that_cut_another_slice_of_the_weights_is_named(tmp_path, compiled):
    """All its collectives are as reported: with the optimizer sharded it gathers what it should not have."""
    folder = left(tmp_path / "run")
    recorded(folder, 1, places={made_up_name((0, 1)): 0, "2-77": 1})
    result = invoke(folder)
    assert result.exit_code == 1
    line = "  cuts weights as place 0 of ranks 0, 1, of which it is place 1"
    assert result.stdout.splitlines()[2:] == [line, "differs"]


def test_a_refused_compile_leaves_it_unknown(tmp_path, monkeypatch):
    refused = {"rank": 1, "error": {"type": "ValueError", "message": "no such strategy"}}
    monkeypatch.setattr(collectives, "compile_all", lambda plan, at_once, use_cache: [refused])
    result = invoke(left(tmp_path / "run"))
    assert result.exit_code == 2
    assert result.stdout.startswith("unknown: the dry run of rank 1 was refused:")
    assert "no such strategy" in result.stdout


def test_a_training_that_fails_leaves_it_unknown(compiled, monkeypatch):
    def launch(recipe, run_dir):
        raise equivalence_runs.RunFailedError("worker 1 died")

    monkeypatch.setattr(collectives, "launch", launch)
    result = invoke(TP2)
    assert (result.exit_code, result.stdout) == (2, "unknown: the training failed: worker 1 died\n")
    assert not compiled


@pytest.mark.parametrize("recipe", [PP2, ROOT / "recipes" / "telechat3_105b" / "pretrain_4k.yaml"])
def test_a_recipe_is_trained_and_every_rank_of_it_compiled_with_all_micro_batches(
    recipe, tmp_path, compiled, monkeypatch
):
    """A recipe for Ascend as the mini that keeps its parallel strategy."""
    trained = []

    def launch(flat, run_dir):
        trained.append(flat)
        left(run_dir)
        dump_recipe(flat, run_dir / "recipe.yaml")
        for rank in range(View(flat).devices):
            recorded(run_dir, rank, places={})

    monkeypatch.setattr(collectives, "launch", launch)
    result = invoke(recipe, "--keep", tmp_path / "kept", "--set", "runner_config.epochs=1")
    assert result.exit_code == 0, result.output
    view = View(trained[0])
    (plan,) = compiled
    assert view.sharded_on_cpu and view.pp > 1
    assert [job.rank for job in plan.jobs] == list(range(view.devices))
    assert plan.micro_batches == view.micro_batches
    assert (tmp_path / "kept" / "corpus" / "random.idx").exists()
    assert trained[0]["train_dataset"]["data_loader"]["sizes"][0] == collectives.STEPS * view.global_batch
    assert all(each["type"] != "CheckpointMonitor" for each in trained[0]["callbacks"])


def test_runs_of_one_recipe_share_their_compiles(tmp_path):
    first, second = (collectives.recipe_of_run(left(tmp_path / name)) for name in ("one", "two"))
    assert dict(first) == dict(second)
    assert str(tmp_path) not in json.dumps(first)


def test_a_mistyped_folder_is_said_to_be_missing(tmp_path, compiled):
    folder = left(tmp_path / "mini_tp2")
    text = str(invoke(tmp_path / "mini_tp").exception)
    assert text.startswith(f"{tmp_path / 'mini_tp'}: there is neither a recipe nor the folder of a run at this path")
    assert f"did you mean '{folder}'?" in text
    assert "neither a recipe nor" in str(invoke(tmp_path / "none" / "run").exception)


def test_records_of_two_trainings_are_not_compared(tmp_path, compiled):
    folder = left(tmp_path / "run")
    file = calls_file(folder, 1)
    file.write_text(file.read_text().replace('"step": 1', '"step": 5'))
    result = invoke(folder)
    assert (result.exit_code, compiled) == (2, [])
    assert result.stdout.startswith("unknown: rank 0 recorded step 1, but rank 1 step 5")


@pytest.mark.parametrize(("step", "code", "word"), [(1, 2, "unknown: step 1 had 4 samples"), (3, 0, "equal")])
def test_a_step_of_fewer_samples_is_not_compared_with_the_full_batch(step, code, word, tmp_path, compiled):
    folder = left(tmp_path / "run")
    recipe = load_recipe(folder / "recipe.yaml")
    recipe["plugins"]["batch_ramp"] = {"stages": [[2, 4]]}
    dump_recipe(recipe, folder / "recipe.yaml")
    for rank in range(2):
        file = calls_file(folder, rank)
        file.write_text(file.read_text().replace('"step": 1', f'"step": {step}'))
    result = invoke(folder)
    assert result.exit_code == code and result.stdout.splitlines()[-1].startswith(word)
    assert len(compiled) == (code == 0)


@pytest.fixture
def trained(monkeypatch):
    """The recipes that would be trained."""
    flat = []
    monkeypatch.setattr(collectives, "launch", lambda recipe, run_dir: flat.append(recipe))
    return flat


def test_a_ramp_is_left_out_of_the_training(tmp_path, trained):
    recipe = load_recipe(TP2)
    recipe["plugins"]["batch_ramp"] = {"stages": [[2, 4]]}
    collectives.train(recipe, tmp_path)
    assert trained[0]["plugins"]["batch_ramp"] is False and recipe["plugins"]["batch_ramp"]


def test_a_run_whose_task_has_no_data_of_its_own_is_compared(tmp_path, compiled):
    run_dir = left(tmp_path / "run")
    recipe = load_recipe(TP2)
    del recipe["train_dataset_task"]["dataset_config"]
    dump_recipe(recipe, run_dir / "recipe.yaml")
    assert invoke(run_dir).exit_code == 0


def test_a_recipe_need_not_name_callbacks(tmp_path, trained):
    recipe = load_recipe(TP2)
    del recipe["callbacks"]
    recipe["train_dataset"]["data_loader"]["config"].update(pad=1, split="969, 30, 1", valid_data_path=["a"])
    collectives.train(recipe, tmp_path)
    assert trained[0]["callbacks"] == [{"type": "MFLossMonitor"}]
    config = trained[0]["train_dataset"]["data_loader"]["config"]
    assert (config["pad"], config["split"]) == (-1, "1, 0, 0") and "valid_data_path" not in config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "missing"),
        ('{"calls": [], "places": {}}', "train again"),
        ("{", "train again"),
        ('{"calls": [], "places": 1}', "train again"),
        ('{"calls": []}', "train again"),
    ],
)
def test_a_rank_without_a_record_is_named(text, words, tmp_path, compiled):
    folder = left(tmp_path / "run")
    file = calls_file(folder, 1)
    file.unlink() if text is None else file.write_text(text)
    result = invoke(folder)
    assert isinstance(result.exception, DataError) and not compiled
    assert file.name in str(result.exception) and words in str(result.exception)


SEND = ["Send", [0, 1], 16, [4], "float32", 1, 0]


@pytest.mark.parametrize("path", [*places({"step": 1, "calls": [SEND, *CALLS], "places": {"2-7": 1}})])
def test_a_record_with_a_value_of_a_wrong_type_is_refused(path, tmp_path):
    file = calls_file(tmp_path, 1)
    file.parent.mkdir()
    line = json.dumps({"step": 1, "calls": [SEND, *CALLS], "places": {"2-7": 1}})
    file.write_text(line)
    assert collectives.read_record(tmp_path, 1).step == 1
    for wrong in WRONG:
        text, right = corrupted(line, path, wrong)
        if type(right) is type(wrong) and wrong not in (-1, 10**400):
            continue
        file.write_text(text)
        if (wrong is None and path[-1] in (5, 6)) or (wrong == {} and path == ("places",)):
            collectives.read_record(tmp_path, 1)  # as a call without a peer or a tag, and a rank without groups
            continue
        with pytest.raises(DataError, match=re.escape(f"{file}: this is not a record of collectives: {path[0]}")):
            collectives.read_record(tmp_path, 1)


def test_a_place_that_only_one_rank_recorded_is_not_called_equal(tmp_path, compiled):
    folder = left(tmp_path / "run")
    recorded(folder, 1, places={})
    result = invoke(folder)
    assert result.exit_code == 2
    assert result.stdout.startswith("unknown: the record of rank 1 lacks its place in the group of ranks 0, 1")

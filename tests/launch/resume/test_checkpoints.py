"""These tests check which checkpoints a run continues from, puts aside or removes (`tc3 train --resume` and --force);
a stand-in replaces msrun.
"""

import fcntl
import json
import os
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch.agent import planning
from launch.resume import checkpoints, model
from launch.resume.model import check_load_path, check_model, weights_in, weights_of
from plugins.errors import CheckpointError
from plugins.sealed_checkpoint.plan import TRACKER, seal_file, write_refusal, write_seal
from tests.launch.resume.conftest import TOY
from tests.tools.checkpoint.saved import Saved, numbered, of_two_ranks
from tests.tools.checkpoint.test_stored import saved
from tests.training.runs import ROOT, TINY_DP2
from tools.checkpoint.scan import CheckpointInfo, is_sealed
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides

SHAPES = {
    "decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "decoder.layers.1.mlp.experts.weight1": [4, 8, 16],
    "decoder.layers.0.self_attention.linear_q.bias": [64],
}
OTHERS = {  # moments, a pipeline's sums of gradients, a counter, a router's balance
    "adam_m.decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "adam_v.decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "accu_grads.decoder.layers.0.mlp.linear_fc1.weight": [64, 8],
    "accu_grads.decoder.layers.1.mlp.experts.weight1": [4, 8, 16],
    "global_step": [1],
    "decoder.layers.1.mlp.router.expert_bias": [4],
}
WEIGHTS = 64 * 8 + 4 * 8 * 16 + 64
EXPERTS = "decoder.layers.1.mlp.experts.weight1"
MODEL, SECOND = "mini-model-0000000-0000002.safetensors", "mini-model-0000001-0000002.safetensors"


def of_ranks(folder, shapes):
    """Write the file in which several ranks record the shapes of their tensors."""
    shapes = {name: {"global_shape": shape} for name, shape in shapes.items()}
    (folder / "metadata.json").write_text(json.dumps({"state_dict_metadata": shapes}))


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(TINY_DP2)


@pytest.fixture
def whole(tmp_path, recipe):
    """Return a complete checkpoint of the recipe's model that two ranks saved."""
    return of_two_ranks(tmp_path / "iteration_00000004", recipe)


def without(file, *names):
    """Take tensors out of a file."""
    save_file({name: array for name, array in load_file(file).items() if name not in names}, file)


def test_weights_alone_are_counted(tmp_path):
    of_ranks(tmp_path, {**SHAPES, **OTHERS})
    assert weights_in(tmp_path) == WEIGHTS


def test_one_process_has_its_shapes_in_its_file(tmp_path):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in {**SHAPES, **OTHERS}.items()}
    save_file(arrays, tmp_path / "x-model-0000000-0000001.safetensors")
    assert weights_in(tmp_path) == WEIGHTS


def test_the_same_model_passes_on_any_layout(whole, recipe):
    check_model(recipe, whole)
    check_model(load_recipe(TINY_DP2.with_name("tiny.yaml")), whole)


FAULTS = {
    "a file of experts is gone": (
        lambda folder: (folder / SECOND).unlink(),
        [SECOND, "the file is not there", "copy the checkpoint again"],
    ),
    "experts are gone from a file": (
        lambda folder: without(folder / SECOND, EXPERTS),
        [SECOND, f"does not hold {EXPERTS}"],
    ),
    "a file is cut short": (
        lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-9]),
        [SECOND, "not a complete safetensors file", "bytes instead of"],
    ),
    "nobody says how it lies": (lambda folder: (folder / "metadata.json").unlink(), ["metadata.json", "is missing"]),
    "what says it is damaged": (
        lambda folder: (folder / "metadata.json").write_text("{"),
        ["metadata.json", "not MindFormers' metadata"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_is_not_whole_is_refused_by_its_file(whole, recipe, fault):
    damage, words = FAULTS[fault]
    damage(whole)
    with pytest.raises(CheckpointError) as error:
        check_model(recipe, whole)
    assert all(word in str(error.value) for word in words), error.value


OTHER_MODELS = {
    "model.model_config.kv_lora_rank=16": ["linear_kv_down_proj.weight has the shape [48, 128]", "but [32, 128] in"],
    "model.model_config.n_routed_experts=32": [EXPERTS, "[2048, 128], but [4096, 128] in the recipe's model"],
    "model.model_config.hidden_size=64": ["word_embeddings.weight has the shape [512, 128], but [512, 64] in", "more"],
    "model.model_config.num_hidden_layers=3": ["no decoder.layers.2.input_layernorm.weight, which the recipe's model"],
    "model.model_config.num_hidden_layers=1": ["the recipe's model has no decoder.layers.1.input_layernorm.weight;"],
    "model.model_config.num_nextn_predict_layers=0": ["the recipe's model has no mtp.layers.0."],
}


@pytest.mark.parametrize("change", OTHER_MODELS)
def test_the_checkpoint_of_another_recipe_is_refused_by_a_tensor(whole, recipe, change):
    with pytest.raises(CheckpointError) as error:
        check_model(apply_overrides(recipe, [change]), whole)
    words = ["a checkpoint of another model", *OTHER_MODELS[change]]
    assert all(word in str(error.value) for word in words), error.value
    assert len(str(error.value).splitlines()) == 1


def test_moments_that_are_not_there_are_refused_not_begun_anew(whole, recipe):
    metadata = json.loads((whole / "metadata.json").read_text())
    for name in [name for name in metadata["state_dict_metadata"] if name.startswith("adam_v")]:
        del metadata["state_dict_metadata"][name]
        for file in whole.glob("*-opt-*"):
            without(file, name)
    (whole / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(
        CheckpointError, match=r"are missing or have another shape: no adam_v\.embedding.*more tensors.*no_save_"
    ):
        check_model(recipe, whole)
    check_model(apply_overrides(recipe, ["optimizer.type=Came"]), whole)


STATES = {  # as MindFormers' classes of optimizers name their parameters
    "AdamW": ({"type": "AdamW"}, ["adam_m", "adam_v"]),
    "fused": ({"type": "AdamW", "use_fused": True}, ["exp_avg", "exp_avg_sq"]),
    "amsgrad": ({"type": "AdamW", "use_fused": True, "amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    "PMA": ({"type": "PmaAdamW"}, ["adam_m", "adam_v", "pma_weight_ema"]),
    "PMA, sma": ({"type": "PmaAdamW", "fused_algo": "sma"}, ["adam_m", "adam_v", "pma_weight_sma"]),
    "PMA, fused": ({"type": "PmaAdamW", "use_fused": True}, ["exp_avg", "exp_avg_sq", "pma_weight_ema"]),
}


@pytest.mark.parametrize("kind", STATES)
def test_each_optimizer_goes_on_with_its_own_state_only(tmp_path, recipe, kind):
    """The fused AdamW was refused as one without moments, PMA's averages as weights of another model."""
    optimizer, states = STATES[kind]
    folder = of_two_ranks(tmp_path / "iteration_00000004", recipe, states)
    check_model({**recipe, "optimizer": optimizer}, folder)
    assert weights_in(folder) == weights_of(recipe)
    for other, names in STATES.values():
        if lost := [name for name in names if name not in states]:
            with pytest.raises(CheckpointError, match=rf"moments .* are missing .*: no {lost[0]}\.embedding"):
                check_model({**recipe, "optimizer": other}, folder)


def test_the_states_are_those_of_mindformers():
    from mindformers.core.optim import AdamW, PmaAdamW
    from mindspore import Parameter, Tensor

    classes = {"AdamW": AdamW, "PmaAdamW": PmaAdamW}
    for optimizer, states in STATES.values():
        options = {key: value for key, value in optimizer.items() if key != "type"}
        made = classes[optimizer["type"]]([Parameter(Tensor(np.zeros(3, np.float32)), name="a.weight")], **options)
        held = {item.name for item in made.get_parameters() if item.name.endswith(".a.weight")}
        assert held == {f"{state}.a.weight" for state in states}


def averaging(batch, fused_num, interleave, algo="sma", fused=False):
    recipe = {"optimizer": {"type": "PmaAdamW", "fused_num": fused_num, "interleave_step": interleave}}
    recipe["optimizer"] |= {"fused_algo": algo, "use_fused": fused}
    return Recipe({**recipe, "runner_config": {"batch_size": batch}})


def replaced_by(recipe, step, average, until):
    """The average at `until`, and what takes the place of weights of 1 after `step`: pma_adamw.py of MindFormers."""
    fused_num, interleave, algo = list(recipe["optimizer"].values())[1:4]
    taken = []
    for number in range(step + 1, until + 1):
        if number % interleave == 0:
            average = average + 1 if algo == "sma" else 0.8 * average + 0.2
        if number % (fused_num * interleave) == 0:
            taken.append(average / fused_num if algo == "sma" else average)
            average = 0
    return average, taken


@pytest.mark.parametrize("fused", [0, 1])
def test_an_average_of_weights_that_a_resume_would_cut_short_is_refused(fused):
    """With another global batch MindFormers counts the steps anew: half a sum became the weights. The fused optimizer
    begins to count at -1, and multiplies this count.
    """
    settings = [(batch, *each) for batch in (2, 4) for each in ((2, 2, "sma"), (3, 2, "sma"), (3, 2, "ema"))]
    outcomes = set()
    for old, new in product(settings, repeat=2):
        before, after = averaging(*old, bool(fused)), averaging(*new, bool(fused))
        whole = replaced_by(after, 0, 0, 12)[1][0]
        for step in range(2, 26, 2):
            average, _ = replaced_by(before, 0, 0, step)
            begun = (step - fused) * old[0] // new[0] + fused
            right = set(replaced_by(after, begun, average, 60)[1]) == {whole}
            try:
                checkpoints._refuse_cut_averages(before, after, CheckpointInfo(Path("c"), step))
                refused = False
            except CheckpointError:
                refused = True
            assert refused or right, (old, new, step)
            assert not (refused and right and old[1:] == new[1:]), (old, new, step)
            outcomes.add((refused, right))
    assert outcomes >= {(True, False), (False, True)}


def test_biases_that_mindformers_will_not_load_are_said(whole, recipe, capsys):
    check_model(recipe, whole)
    assert capsys.readouterr().err == ""
    metadata = json.loads((whole / "metadata.json").read_text())
    for name in [name for name in metadata["state_dict_metadata"] if name.endswith("expert_bias")]:
        del metadata["state_dict_metadata"][name]
    (whole / "metadata.json").write_text(json.dumps(metadata))
    check_model(recipe, whole)
    said = capsys.readouterr().err
    assert "does not list decoder.layers.1.mlp.router.expert_bias, and of 1 more routers" in said and "at zero" in said


def dense(tmp_path):
    """A model whose tensors are not known by name, and a checkpoint that two ranks made of another one."""
    checkpoint = Saved(tmp_path / "iteration_00000004", 2)
    for name, shape in SHAPES.items():
        checkpoint.put(name, numbered(*shape), (2, *(1,) * (len(shape) - 1)), [[0], [1]])
    recipe = load_recipe(ROOT / "recipes/telechat3_36b/pretrain_8k.yaml")
    return recipe, checkpoint.write()


def test_a_model_of_unknown_names_is_told_by_its_number_of_weights(tmp_path, monkeypatch):
    recipe, folder = dense(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"of another model: decoder\.layers\.0\.mlp\.linear_fc1\.weight has the shape \[64, 8\]"
    ):
        check_model(recipe, folder)
    monkeypatch.setattr(model, "_shapes_of", lambda recipe: None)
    with pytest.raises(CheckpointError, match=r"holds 1,088 weights, but the recipe's model has [\d,]+: this is"):
        check_model(recipe, folder)


def test_a_model_of_unknown_names_must_be_whole_too(tmp_path):
    recipe, folder = dense(tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(
        CheckpointError, match=f"{SECOND}: the file does not hold decoder.layers.0.mlp.linear_fc1.weight"
    ):
        check_model(recipe, folder)


def test_experts_that_have_moved_are_refused_where_the_recipe_has_no_plugin(tmp_path):
    folder, recipe = saved(tmp_path, [1, 0, 2, 3]), load_recipe(ROOT / "recipes" / "mini" / "pretrain.yaml")
    with pytest.raises(CheckpointError, match="restore-order"):
        check_model(recipe, folder)
    recipe["checkpoint"]["load_path"] = str(folder)
    with pytest.raises(CheckpointError, match="restore-order"):
        check_load_path(recipe)


def test_adapters_are_not_trained_beside_weights_of_another_model(whole, recipe):
    """MindFormers would leave a weight random that it does not find, and a frozen one stays so."""
    metadata = json.loads((whole / "metadata.json").read_text())
    shapes = metadata["state_dict_metadata"]
    lora = apply_overrides({**recipe, "plugins": {"lora": {"rank": 4}}}, [f"checkpoint.load_path={whole}"])
    check_load_path(lora)
    (whole.parent / "latest_checkpointed_iteration.txt").write_text("4")
    lora["checkpoint"]["load_path"] = str(whole.parent)
    check_load_path(lora)
    removed = "decoder.layers.0.self_attention.linear_proj.weight"
    del shapes[removed]
    (whole / "metadata.json").write_text(json.dumps(metadata))
    for file in whole.glob("*model*.safetensors"):
        without(file, removed)
    with pytest.raises(CheckpointError, match=rf"load_path: \S+_00000004: these are not the weights .*: no {removed};"):
        check_load_path(lora)
    lora["model"]["model_config"]["hidden_size"] *= 2
    with pytest.raises(
        CheckpointError, match=r"embeddings\.weight has the shape \[512, 128\], but \[512, 256\] in the recipe's model"
    ):
        check_load_path(lora)
    with pytest.raises(CheckpointError, match=r"weights of the recipe's model: embedding\.\S+ has the shape \[512, "):
        check_load_path(apply_overrides({**lora, "plugins": {}}, []))


def test_a_new_run_says_which_weights_begin_anew_and_begins_with_no_other_models(whole, recipe, capsys):
    begun = apply_overrides(recipe, [f"checkpoint.load_path={whole}"])
    check_load_path(begun)
    assert capsys.readouterr().err == ""
    check_load_path(apply_overrides(begun, ["model.model_config.num_hidden_layers=3"]))
    said = capsys.readouterr().err
    assert f"{whole}: no decoder.layers.2.input_layernorm.weight; no" in said and "; and 11 more tensors, which" in said
    check_load_path(apply_overrides(begun, ["model.model_config.num_hidden_layers=1"]))
    assert "does not have decoder.layers.1.input_layernorm.weight; " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"has the shape \[2048, 128\], but \[4096, 128\] in the recipe's model"):
        check_load_path(apply_overrides(begun, ["model.model_config.n_routed_experts=32"]))
    for rank in range(2):
        write_seal(whole, rank, 2, 4)
    check_load_path(begun)
    for file in whole.glob("*-opt-*"):
        file.unlink()  # to save disk: a new run begins with an optimizer of its own
    check_load_path(begun)
    write_refusal(whole, 1, "a weight is NaN")
    with pytest.raises(CheckpointError, match=r"load_path: .*: this is not a complete checkpoint: a weight is NaN"):
        check_load_path(begun)
    (whole / SECOND).unlink()
    (whole / "seal_rank_0.json").unlink(), (whole / "seal_rank_1.json").unlink()
    with pytest.raises(CheckpointError, match=f"{SECOND}: the file does not hold .*; the file is not there"):
        check_load_path(begun)


def test_a_new_run_does_not_save_beside_a_save_of_another_run_that_is_not_in_its_place_yet(tmp_path, whole):
    """`--resume auto` of the new run would have put the other run's checkpoint in its place, and gone on from it."""
    root = tmp_path / "saves"
    (root / "saving_0000-a").mkdir(parents=True)
    checkpoints.check_save_path(root, resume=False, force=False)
    whole.rename(root / "saving_0000-a" / whole.name)
    for rank in range(2):
        write_seal(root / "saving_0000-a" / whole.name, rank, 2, 4)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another run \(iteration_00000004\)"):
        checkpoints.check_save_path(root, resume=False, force=False)
    checkpoints.check_save_path(root, resume=True, force=False)
    seal_file(root / "saving_0000-a" / whole.name, 1).unlink()  # --resume auto takes no unfinished save
    checkpoints.check_save_path(root, resume=False, force=False)
    checkpoints.clear_save_path(root)
    assert list(root.iterdir()) == []


def test_a_new_run_does_not_save_beside_a_checkpoint_that_another_launch_was_setting_aside(tmp_path, whole):
    """The launch was killed; the next attempt would have given the checkpoint its name back, and gone on from it."""
    root = tmp_path / "saves"
    (root / "moving_abc").mkdir(parents=True)
    moved = whole.rename(root / "moving_abc" / whole.name)
    checkpoints.check_save_path(root, resume=False, force=False)
    for rank in range(2):
        write_seal(moved, rank, 2, 4)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another run \(iteration_00000004\)"):
        checkpoints.check_save_path(root, resume=False, force=False)
    checkpoints.check_save_path(root, resume=True, force=False)
    checkpoints.check_save_path(root, resume=False, force=True)


def test_what_force_removes_is_not_named_by_the_tracker(tmp_path, whole):
    for rank in range(2):
        write_seal(whole, rank, 2, 4)
    (whole.parent / TRACKER).write_text("4")
    moved = whole.rename(tmp_path / "on another disk")
    whole.symlink_to(moved)  # which ended the launch after it had removed the rest of the run
    checkpoints.clear_save_path(whole.parent)
    assert not whole.is_symlink() and is_sealed(moved) and not (whole.parent / TRACKER).exists()


def test_a_named_iteration_puts_the_later_ones_aside(train, runs, trained, save):
    root = trained / "checkpoint"
    first, later = save(root, 20), save(root, 60)
    assert train(TOY, "--resume", str(first), "--steps", "100", "--dry-run")[0] == 0 and later.exists()
    code, _, err = train(TOY, "--resume", str(first), "--steps", "100")
    assert code == 0 and "iteration_00000060 is of the run that is left behind here: renamed set_aside_iter" in err
    assert sorted(path.name for path in root.glob("*iteration*")) == [
        "iteration_00000020",
        "set_aside_iteration_00000050",
        "set_aside_iteration_00000060",
    ]
    save(root, 30)
    train(TOY, "--resume", "auto", "--steps", "100")
    assert runs[-1][-1] == str(root / "iteration_00000030"), "not step 60 of the abandoned branch"


@pytest.mark.parametrize("sealed", [True, False])
def test_the_step_of_a_checkpoint_that_was_renamed_is_that_of_its_files(train, runs, trained, sealed):
    """A name without a number counted as step -1, from which any run had steps left to train."""
    renamed = trained / "checkpoint" / "iteration_00000050"
    renamed = renamed.rename(renamed.with_name("set_aside_iteration_00000050"))
    if not sealed:
        (renamed / "seal_rank_0.json").unlink()
        (renamed / "common.json").write_text('{"step_num": 50}')
    assert checkpoints.find_checkpoint(str(renamed), renamed.parent).step == 50
    code, _, err = train(TOY, "--resume", str(renamed), "--steps", "50")
    said = f"{renamed} holds step 50 of 50; nothing is started (a larger --steps trains on)"
    assert code == 0 and said in err and len(runs) == 1


def test_a_checkpoint_of_another_run_puts_all_aside(train, runs, trained, save, workplace):
    own = workplace / "here" / "checkpoint"
    assert train(TOY, "--run-dir", "here")[0] == 0
    save(own, 10), save(own, 90)
    resume = ("--resume", str(trained / "checkpoint" / "iteration_00000050"), "--steps", "100")
    code, _, err = train(TOY, "--run-dir", "here", *resume)
    assert code == 0, err
    assert not list(own.glob("iteration_*")) and len(list(own.glob("set_aside_*"))) == 2
    assert (trained / "checkpoint" / "iteration_00000050").exists()


def test_an_end_before_they_are_put_aside_leaves_them_their_recipe(train, runs, trained, save, workplace, monkeypatch):
    """Else --resume auto would go on from them in the order of the other run's data, and refuse their own order."""
    own, more = workplace / "here" / "checkpoint", ("--run-dir", "here", "--steps", "100")
    other = ("--set", "train_dataset.data_loader.config.seed=5")
    assert train(TOY, *more, *other)[0] == 0
    save(own, 90)
    with monkeypatch.context() as killed:
        killed.setattr(planning, "make_plan", mock.Mock(side_effect=KeyboardInterrupt))
        assert train(TOY, *more, "--resume", str(trained / "checkpoint" / "iteration_00000050"))[0] == 130
    code, _, err = train(TOY, *more, "--resume", "auto")
    assert code == 2 and "would repeat some samples" in err and "config.seed" in err
    assert train(TOY, *more, *other, "--resume", "auto")[0] == 0
    assert runs[-1][-1] == str(own / "iteration_00000090")


def test_the_recipe_of_another_run_is_compared_too(train, trained, save):
    checkpoint = str(trained / "checkpoint" / "iteration_00000050")
    changed = ("--run-dir", "here", "--resume", checkpoint, "--set", "train_dataset.data_loader.config.seed=5")
    code, _, err = train(TOY, *changed)
    assert code == 2 and f"that of {trained / 'recipe.yaml'}: train_dataset.data_loader.config.seed was 1" in err


def test_a_named_checkpoint_that_is_not_whole_is_refused(train, runs, trained, save):
    folder = trained / "checkpoint" / "iteration_00000050"
    weights = folder / "mini-model-0000000-0000001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, _, err = train(TOY, "--resume", str(folder))
    assert code == 2 and "not a complete checkpoint: mini-model-0000000-0000001.safetensors does not match" in err
    killed = save(trained / "checkpoint", 70, sealed=False)
    code, _, err = train(TOY, "--resume", str(killed))
    assert code == 2 and "the save did not finish" in err
    code, _, err = train(TOY, "--resume", str(trained))
    assert code == 2 and "the folder holds checkpoints; name one of them, such as" in err and len(runs) == 1


def test_a_checkpoint_that_nobody_seals_is_taken_and_said(train, runs, save, workplace):
    stock = save(workplace / "stock", 5, sealed=False)
    code, _, err = train(TOY, "--resume", str(stock))
    assert code == 0 and "has no seals" in err and "unknown whether the order of the data stays the same" in err
    assert runs[-1][-1] == str(stock)


def elsewhere(root):
    return ("--set", f"checkpoint.save_path={root}")


def test_a_new_run_does_not_save_among_the_checkpoints_of_another(train, runs, save, workplace):
    save(workplace / "shared", 40)
    code, _, err = train(TOY, *elsewhere("shared"))
    assert code == 2 and not runs
    assert "holds checkpoints of another run (iteration_00000040)" in err and "--force" in err


def test_force_removes_the_sealed_checkpoints_wherever_they_are_and_nothing_else(train, runs, save, workplace):
    sealed, stock = save(workplace / "shared", 40), save(workplace / "shared", 7, sealed=False)
    (workplace / "shared" / "notes.txt").touch()
    assert train(TOY, "--force", *elsewhere("shared"))[0] == 0
    assert not sealed.exists() and stock.exists() and (workplace / "shared" / "notes.txt").exists()
    train(TOY, "--resume", "auto", *elsewhere("shared"))
    assert "--resume" not in runs[-1]


@pytest.mark.parametrize("steps", [[], [40]])
def test_two_runs_do_not_share_a_folder_of_checkpoints(train, runs, save, workplace, steps):
    """Once the first has saved, --force or --resume auto, which would also be refused, is not advised."""
    (workplace / "shared").mkdir()
    for step in steps:
        save(workplace / "shared", step)
    with (workplace / "shared" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = train(TOY, *elsewhere("shared"))
    assert code == 2 and f"{workplace / 'shared'}: a run is in progress in this folder" in err and not runs
    assert "--force" not in err
    assert train(TOY, "--run-dir", "here", *elsewhere("here"))[0] == 0, "one folder for both is locked once"


def test_force_keeps_the_lock_that_it_holds(train, trained):
    assert train(TOY, "--force")[0] == 0
    assert os.listdir(trained / "checkpoint") == [".lock"]


def test_the_seals_of_two_workers_count_as_one_checkpoint(trained, save, train):
    folder = trained / "checkpoint" / "iteration_00000050"
    for name in ("mini-model-0000001-0000002.safetensors", "mini-opt-0000001-0000002.safetensors"):
        (folder / name).touch()
    write_seal(folder, 1, world_size=2, step=50)
    (folder / "seal_rank_0.json").unlink()
    code, _, err = train(TOY, "--resume", str(folder))
    assert code == 2 and "seal_rank_0.json is missing" in err

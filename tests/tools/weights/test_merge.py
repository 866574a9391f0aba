"""Adapters merged into the weights of a checkpoint, and what is no checkpoint with the recipe's adapters.

The average of checkpoints: against fractions, and refused where there is none.
"""

import math
import re
import shutil
from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from launch.cli import tc3
from plugins.errors import CheckpointError, DataError, RecipeError
from plugins.lora.plan import Settings, adapters_of
from plugins.sealed_checkpoint.plan import fault, step_of, write_seal
from tests.tools.checkpoint.saved import Saved, numbered
from tests.tools.experts.test_restore import write
from tests.tools.weights.test_yarn import converted, public, recipe_of
from tools.accuracy.reference.start import initial_weights
from tools.checkpoint.stored import read_whole
from tools.recipe.load import load_recipe
from tools.weights import average as module
from tools.weights.average import average
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_names import to_mindformers
from tools.weights.merge import merge, plan_merge
from tools.weights.reshard_target import target_of
from tools.weights.source import open_source

LORA = {"rank": 2, "alpha": 6, "targets": ["self_attention.*"]}
SCALE = 3.0


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path / "recipe", {"plugins": {"lora": LORA}})


def adapted(folder, recipe, seed=5):
    """A checkpoint of a run with adapters, which two ranks made with tensor parallelism; and its weights as whole
    tensors.
    """
    flat = load_recipe(recipe)
    weights = to_mindformers(initial_weights(model_of(flat), 3), model_of(flat))
    rng = np.random.default_rng(seed)
    shapes = adapters_of({name: array.shape for name, array in weights.items()}, Settings.read(LORA))
    whole = weights | {name: 0.1 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    checkpoint = Saved(folder / "iteration_00000004", 2)
    for name, array in whole.items():
        if "linear_qkv" in name and "lora_A" not in name:
            cuts = (2, 1)
        elif "linear_proj" in name and "lora_B" not in name:
            cuts = (1, 2)
        else:
            cuts = (1,) * array.ndim
        checkpoint.put(name, array, cuts, [[0], [1]] if 2 in cuts else [[0, 1]])
        if name in shapes:
            checkpoint.put(f"adam_m.{name}", array, cuts, [[0], [1]] if 2 in cuts else [[0, 1]], "opt")
    path = checkpoint.write()
    for rank in (0, 1):
        write_seal(path, rank, 2, 4)
    return path, whole


def test_slices_of_two_ranks_are_merged_into_whole_weights(tmp_path, recipe):
    checkpoint, whole = adapted(tmp_path, recipe)
    command = ["weights", "merge", str(checkpoint), str(tmp_path / "merged"), "--recipe", str(recipe)]
    done = CliRunner().invoke(tc3, [*command, "--file-size", "0.001"])
    assert done.exit_code == 0, done.output
    assert "4 of them with their adapters, times 3" in done.output and fault(tmp_path / "merged") is None
    found = read_whole(tmp_path / "merged").arrays
    assert found.keys() == {name for name in whole if "lora" not in name}
    for name, array in found.items():
        layer = name.removesuffix(".weight")
        right = whole[name].astype(np.float64)
        if f"{layer}.lora_A.weight" in whole:
            a, b = (whole[f"{layer}.lora_{matrix}.weight"].astype(np.float64) for matrix in "AB")
            right += SCALE * (b @ a)
        np.testing.assert_array_equal(array, right.astype(np.float32), err_msg=name)
    back = converted(tmp_path / "merged", tmp_path / "hf", recipe)
    assert (back / "model.safetensors").exists(), "it can be converted as any weights"


def test_what_is_refused(tmp_path, recipe, capsys):
    checkpoint, _ = adapted(tmp_path / "run" / "checkpoint", recipe)
    source = open_source(checkpoint)
    with pytest.raises(
        CheckpointError,
        match="holds adapters beside the weights; first merge the adapters into the weights: tc3 weights merge",
    ):
        converted(checkpoint, tmp_path / "hf", recipe)
    plain = recipe_of(tmp_path / "plain")
    with pytest.raises(RecipeError, match=r"plugins\.lora: the recipe trains no adapters"):
        plan_merge(source, plain, 10**9)
    wider = recipe_of(tmp_path / "wider", {"plugins": {"lora": LORA | {"rank": 3}}})
    with pytest.raises(
        CheckpointError, match=r"not the adapters that .*lora_A\.weight has the shape \[2, .* instead of"
    ):
        plan_merge(source, wider, 10**9)
    more = recipe_of(tmp_path / "more", {"plugins": {"lora": LORA | {"targets": ["*"]}}})
    with pytest.raises(CheckpointError, match=r"no decoder\.layers\.0\.mlp\.linear_fc1\.lora_A\.weight"):
        plan_merge(source, more, 10**9)
    stronger = recipe_of(tmp_path / "stronger", {"plugins": {"lora": LORA | {"alpha": 8}}})
    (checkpoint.parents[1] / "recipe.yaml").write_text(f"base_config: {recipe}\n")
    with pytest.raises(
        CheckpointError,
        match=r"stronger\S+: plugins\.lora\.alpha: .* = 3, .* by 4; write alpha: 6, or leave --recipe out",
    ):
        plan_merge(source, stronger, 10**9)
    (checkpoint.parents[1] / "recipe.yaml").write_text("base_config: gone.yaml\n")
    plan_merge(source, recipe, 10**9)
    assert capsys.readouterr().err.count("are not compared") == 1
    with pytest.raises(CheckpointError, match=r"only checkpoints of runs .* have adapters"):
        plan_merge(open_source(public(tmp_path / "theirs", recipe)), recipe, 10**9)


def test_adapters_are_averaged_only_after_they_are_merged(tmp_path, recipe):
    """The mean of products B A is not the product of the means."""
    sources, wholes, weights = [], [], []
    for seed in (5, 6):
        checkpoint, whole = adapted(tmp_path / str(seed), recipe, seed)
        sources.append(open_source(checkpoint))
        wholes.append(whole)
        merge(sources[-1], tmp_path / f"merged_{seed}", plan_merge(sources[-1], recipe, 10**9))
        weights.append(open_source(tmp_path / f"merged_{seed}"))
    with pytest.raises(CheckpointError, match=r"5/\S+: the checkpoint holds LoRA adapters .* merge \S+0004 TO\), and"):
        average(sources, tmp_path / "mean")
    average(weights, tmp_path / "mean")
    layer = "decoder.layers.0.self_attention.linear_proj"
    products = [whole[f"{layer}.lora_B.weight"] @ whole[f"{layer}.lora_A.weight"] for whole in wholes]
    right = wholes[0][f"{layer}.weight"] + SCALE * np.mean(products, axis=0)
    np.testing.assert_allclose(read_whole(tmp_path / "mean").arrays[f"{layer}.weight"], right, atol=1e-6)


def test_the_weights_of_a_layer_norm_are_merged_and_averaged_as_all_others(tmp_path):
    """They are called gamma and beta; a merge left them out, and an average had those of the last checkpoint."""
    layers = {"model": {"model_config": {"normalization": "LayerNorm"}}, "plugins": {"lora": LORA}}
    recipe, wholes = recipe_of(tmp_path / "recipe", layers), []
    for seed in (5, 6):
        rng, checkpoint = np.random.default_rng(seed), Saved(tmp_path / str(seed) / "iteration_00000004", 1)
        shapes = {name: placed.shape for name, placed in target_of(load_recipe(recipe)).weights.items()}
        wholes.append({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
        for name, array in wholes[-1].items():
            checkpoint.put(name, array, (1,) * array.ndim, [[0]])
        source = open_source(checkpoint.write())
        merge(source, tmp_path / f"merged_{seed}", plan_merge(source, recipe, 10**9))
    average([open_source(tmp_path / f"merged_{seed}") for seed in (5, 6)], tmp_path / "mean")
    found = read_whole(tmp_path / "mean").arrays
    assert found.keys() == {name for name in wholes[0] if "lora" not in name}
    norms = [name for name in found if name.endswith((".gamma", ".beta"))]
    assert len(norms) == 10
    for name in norms:
        right = np.mean([whole[name].astype(np.float64) for whole in wholes], axis=0)
        np.testing.assert_array_equal(found[name], right.astype(np.float32))


def test_merged_and_averaged_weights_know_the_recipe_that_trained_them(tmp_path, recipe):
    """A conversion of them took settings that no shape shows, such as the base of RoPE, from any recipe."""
    for name in "ab":
        checkpoint, _ = adapted(tmp_path / name / "checkpoint", recipe)
        (tmp_path / name / "recipe.yaml").write_text(f"base_config: {recipe}\n")
        source = open_source(checkpoint)
        plan = plan_merge(source, None, 10**9)
        (tmp_path / name / "recipe.yaml").write_text("base_config: gone.yaml\n")  # edited while the tensors are written
        merge(source, tmp_path / f"merged_{name}", plan)
    average([open_source(tmp_path / f"merged_{name}") for name in "ab"], tmp_path / "mean")
    other = recipe_of(tmp_path / "other", {"model": {"model_config": {"rope_theta": 5e4}}})
    for name in ("merged_a", "mean"):
        with pytest.raises(RecipeError, match=r"recipe_of_weights\.yaml\): rope_theta was 10000.0 and is 50000.0 now"):
            converted(tmp_path / name, tmp_path / f"hf_{name}", other)
        converted(tmp_path / name, tmp_path / f"hf_{name}", None)


BIAS, LOAD = "decoder.layers.0.mlp.router.expert_bias", "decoder.layers.0.mlp.router.expert_load"


def saved(folder, weight, ranks=2, bias=0.0, load=0.0):
    checkpoint = Saved(folder / "iteration_00000002", ranks)
    checkpoint.put("linear.weight", np.asarray(weight, np.float32), (ranks,), [[rank] for rank in range(ranks)])
    checkpoint.put("adam_m.linear.weight", np.asarray(weight, np.float32), (1,), [list(range(ranks))], "opt")
    for rank in range(ranks):
        held = checkpoint.held[checkpoint.file("model", rank)]
        held[BIAS], held[LOAD] = np.float32([bias]), np.float32([load])
    path = checkpoint.write()
    (path / "common.json").write_text('{"step_num": 2}')
    for rank in range(ranks):
        write_seal(path, rank, ranks, 2)
    return open_source(path)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4), min_size=2, max_size=5))
def test_it_is_the_mean_to_half_a_unit_in_the_last_place(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("runs")
    average([saved(folder / str(number), row) for number, row in enumerate(rows)], folder / "mean")
    found = read_whole(folder / "mean").arrays["linear.weight"]
    for value, column in zip(found, zip(*rows, strict=True), strict=True):
        exact = sum(map(Fraction, column), Fraction()) / len(rows)
        size = max(abs(Fraction(each)) for each in column)
        assert (
            abs(Fraction(float(value)) - exact)
            <= Fraction(float(np.spacing(abs(value)))) / 2 + size * Fraction(2) ** -50
        )


def test_shares_weigh_and_the_result_is_a_sealed_checkpoint_without_moments(tmp_path):
    sources = [saved(tmp_path / "a", [0, 0, 4, 4], bias=1, load=5), saved(tmp_path / "b", [1, 2, 3, 4], bias=3, load=7)]
    assert average(sources, tmp_path / "mean", [0.25, 0.75]) == 2
    whole = read_whole(tmp_path / "mean")
    np.testing.assert_array_equal(whole.arrays["linear.weight"], np.float32([0.75, 1.5, 3.25, 4]))
    assert whole.arrays.keys() == {"linear.weight"} and fault(tmp_path / "mean") is None
    assert whole.unlisted[BIAS][1] == 2.5 and whole.unlisted[LOAD][0] == 7, "counters are the last one's"


@pytest.mark.parametrize(
    ("shares", "words"),
    [([1.0], "1 shares are given for 2"), ([0.5, 0.6], "add up to 1.1"), ([math.nan, 1.0], "from 0 to 1")],
)
def test_shares_that_are_none(tmp_path, shares, words):
    sources = [saved(tmp_path / name, [1, 2]) for name in "ab"]
    with pytest.raises(CheckpointError, match=words):
        average(sources, tmp_path / "mean", shares)


def test_what_has_no_average_is_refused_and_nothing_is_written(tmp_path):
    good = saved(tmp_path / "a", [1, 2, 3, 4])
    other = saved(tmp_path / "b", [1, 2, 3, 4], ranks=4)
    broken = saved(tmp_path / "c", [1, math.nan, 3, 4])
    poor = saved(tmp_path / "f", [1, 2, 3, 4]).path
    for rank, file in enumerate(sorted(poor.glob("*-model-*"))):
        save_file({name: array for name, array in load_file(file).items() if name != BIAS}, file)
        write_seal(poor, rank, 2, 2)
    moved = open_source(write(tmp_path / "d", np.array([1, 0, 2, 3]), 2)[0])
    still = open_source(write(tmp_path / "e", np.array([0, 1, 2, 3]), 2)[0])
    for sources, words in (
        ([good], "two checkpoints"),
        ([good, other], "saved in another layout"),
        ([good, open_source(poor)], f"{re.escape(BIAS)} is not there"),
        ([open_source(poor), good], f"{re.escape(BIAS)} is .*, and not there"),
        ([good, broken], "not finite"),
        ([moved, still], r"in other slots than .*; write a copy of each .*restore-order\), and average the copies"),
    ):
        with pytest.raises(CheckpointError, match=words):
            average(sources, tmp_path / "mean")
        assert not (tmp_path / "mean").exists() and not list(tmp_path.glob(".*"))
    (tmp_path / "mean").mkdir()
    with pytest.raises(CheckpointError, match="the folder exists"):
        average([good, good], tmp_path / "mean")


def test_weights_of_models_with_other_settings_have_no_average(tmp_path):
    sources = []
    for name, changed in (("a", {}), ("b", {"rope_theta": 5e4}), ("c", {}), ("d", {})):
        recipe_of(tmp_path / name, {"model": {"model_config": changed}} if changed else {})
        sources.append(saved(tmp_path / name / "checkpoint", [1, 2]))
    with pytest.raises(
        CheckpointError, match=r"b/check\S+: .* no meaning: rope_theta is 50000\.0, but 10000\.0 in \S+a/recipe\.yaml; "
    ):
        average(sources, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    recipe_of(tmp_path / "c", {"seed": 3, "optimizer": {"weight_decay": 0.2}})
    (tmp_path / "d" / "recipe.yaml").unlink()
    average([sources[0], *sources[2:]], tmp_path / "mean")


def test_slices_that_other_ranks_hold_are_not_added_up(tmp_path):
    """Each file of one has a slice of the same shape as that of the other, of other rows."""
    sources = []
    for name, ranks in (("a", [[0, 2], [1, 3]]), ("b", [[0, 1], [2, 3]])):
        checkpoint = Saved(tmp_path / name, 4)
        checkpoint.put("linear.weight", numbered(8, 2), (2, 1), ranks)
        sources.append(open_source(checkpoint.write()))
    with pytest.raises(
        CheckpointError, match=r"slice [01] of 2 x 1.*; \S+ holds another model, or was saved in another"
    ):
        average(sources, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_arrays", full)
    with pytest.raises(DataError, match="No space left"):
        average([saved(tmp_path / name, [1, 2]) for name in "ab"], tmp_path / "mean")
    assert not list(tmp_path.glob("*mean*"))


def test_moments_are_left_out_whatever_the_prefix_of_their_files(tmp_path):
    sources = []
    for name in "ab":
        checkpoint = Saved(tmp_path / name, 1, "small-model-2")
        checkpoint.put("linear.weight", numbered(2), (1,), [[0]])
        checkpoint.put("adam_m.linear.weight", numbered(2), (1,), [[0]], "opt")
        sources.append(open_source(checkpoint.write()))
    average(sources, tmp_path / "mean")
    assert read_whole(tmp_path / "mean").arrays.keys() == {"linear.weight"}


def test_low_precision_is_rounded_once(tmp_path):
    sources = []
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0078125)):
        checkpoint = Saved(tmp_path / name / "iteration_00000002", 1)
        checkpoint.put("linear.weight", (numbered(2) * 0 + value).astype("bfloat16"), (1,), [[0]])
        sources.append(open_source(checkpoint.write()))
    average(sources, tmp_path / "mean")
    assert read_whole(tmp_path / "mean").arrays["linear.weight"].astype(np.float32).tolist() == [1.0, 1.0]


@settings(max_examples=300)
@given(
    st.floats(-(2.0**126), 2.0**126, width=32),
    st.sampled_from([0, 0.5, 1, 1.5]),
    st.integers(-1, 1),
    st.integers(24, 52),
)
def test_rounding_to_bfloat16_goes_through_no_other_type(near, units, sign, depth):
    """Halfway between two numbers, and a little beside: a merge and a mean rounded to float32 first."""
    dtype = np.dtype("bfloat16")
    below = np.float32(near).view(np.uint32) & 0xFFFF0000
    numbers = [float(np.uint32(int(below) + (step << 16)).view(np.float32)) for step in range(4)]
    numbers = [number for number in numbers if math.isfinite(number)]
    exact = numbers[0] + units * (numbers[1] - numbers[0])
    exact += sign * math.ldexp(exact, -depth)
    found = float(module.rounded(np.array([exact]), dtype)[0])
    errors = [abs(Fraction(number) - Fraction(exact)) for number in numbers]
    best = [number for number, error in zip(numbers, errors, strict=True) if error == min(errors)]
    assert found in best
    if len(best) > 1:
        assert int(np.array(found, np.float32).view(np.uint32)) >> 16 & 1 == 0, "ties go to the even one"


def test_shares_that_are_written_with_few_digits_change_no_size(tmp_path):
    sources = [saved(tmp_path / name, [3e-5, 1, 2, 3]) for name in "abc"]
    average(sources, tmp_path / "mean", [0.3333333] * 3)
    assert (read_whole(tmp_path / "mean").arrays["linear.weight"] == np.float32([3e-5, 1, 2, 3])).all()


def test_a_mean_just_above_the_middle_is_rounded_up(tmp_path):
    sources = []
    for name, value in zip("abcd", (4, 2**-6, 2**-38, 0), strict=True):
        checkpoint = Saved(tmp_path / name / "iteration_00000002", 1)
        checkpoint.put("linear.weight", np.full(2, value, "bfloat16"), (1,), [[0]])
        sources.append(open_source(checkpoint.write()))
    average(sources, tmp_path / "mean")
    assert read_whole(tmp_path / "mean").arrays["linear.weight"].astype(np.float32).tolist() == [1 + 2**-7] * 2


def test_a_checkpoint_that_a_run_removes_at_the_end_is_averaged_completely(tmp_path, monkeypatch):
    """As a run that trains does with its oldest one, here when all weights of it are read."""
    sources = [saved(tmp_path / "a", [0, 0, 4, 4]), saved(tmp_path / "b", [1, 2, 3, 4])]
    average(sources, tmp_path / "known")
    save, written = module.save_arrays, []

    def save_and_remove(arrays, path):
        written.append(save(arrays, path))
        if len(written) == 2:
            shutil.rmtree(tmp_path / "b")

    monkeypatch.setattr(module, "save_arrays", save_and_remove)
    average(list(map(open_source, [tmp_path / "a" / "iteration_00000002", sources[1].path])), tmp_path / "mean")
    known, found = ({each.name for each in (tmp_path / name).iterdir()} for name in ("known", "mean"))
    assert known == found and {"common.json", "metadata.json"} <= found
    assert (step_of(tmp_path / "mean"), fault(tmp_path / "mean")) == (2, None)


def test_a_checkpoint_that_a_run_removes_in_the_meantime_is_named(tmp_path):
    sources = [saved(tmp_path / "a", [0, 0, 4, 4]), saved(tmp_path / "b", [1, 2, 3, 4])]
    with pytest.raises(CheckpointError, match=r"b/iteration_00000002/.*: the file cannot be .*checkpoint.save_max"):
        average(sources, tmp_path / "mean", progress=lambda file: shutil.rmtree(tmp_path / "b", ignore_errors=True))
    assert not (tmp_path / "mean").exists()

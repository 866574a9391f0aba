"""`tc3 weights` as a user calls it: what is printed, exit codes."""

import json
import math
import shlex
import signal

import pytest
from click.testing import CliRunner

from launch.resume.model import check_load_path
from plugins.errors import TC3Error
from tests.inputs.builders import checkpoints
from tests.tools.weights.drawn import LAYOUTS, ONE, draw
from tests.training.runs import ROOT
from tools.accuracy.reference.start import initial_weights
from tools.process.children import handled
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.weights import average
from tools.weights.cli import weights
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_config import config_of
from tools.weights.hugging_face_names import hugging_face_shapes
from tools.weights.source import INDEX, open_source


@pytest.fixture
def run(tmp_path, monkeypatch):
    checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(weights, words)


A, B, NAN = (f"{name}/iteration_00000002" for name in ("a", "b", "nan"))


def test_inspect_says_what_there_is(run):
    result = run("inspect", A)
    assert result.exit_code == 0 and "MindFormers, step 2, files of 2 ranks" in result.output
    assert "weights: 8 numbers" in result.output and "4 x 2" in result.output and "2 x 1" in result.output


def test_inspect_as_json(run):
    result = json.loads(run("inspect", A, "--values", "--json").output)
    (group,) = result["groups"]
    assert (result["step"], result["fault"], group["pattern"], group["elements"]) == (2, None, "linear.weight", 8)
    assert group["values"]["norm"] == pytest.approx(sum(i * i for i in range(8)) ** 0.5)


def test_equal_and_different_checkpoints_have_their_exit_codes(run):
    equal, different = run("inspect", A, "--diff", B), run("inspect", A, "--diff", NAN)
    assert (equal.exit_code, different.exit_code) == (0, 1)
    assert "equal, bit by bit: 1 tensors" in equal.output and "linear.weight: |B - A| / |A| = nan" in different.output
    assert json.loads(run("inspect", A, "--diff", B, "--json").output)["equal"] is True
    (change,) = json.loads(run("inspect", A, "--diff", NAN, "--json").output)["changes"]
    assert change == {"name": "linear.weight", "relative": None, "largest": None}


def test_a_broken_seal_is_exit_code_one(run, tmp_path):
    (tmp_path / A / "seal_rank_1.json").unlink()
    result = run("inspect", A)
    assert result.exit_code == 1 and "the save did not finish" in result.output


def test_average_writes_what_can_be_inspected(run):
    assert "1 tensors, each the average of 2" in run("average", A, B, "--to", "mean").output
    assert run("inspect", A, "--diff", "mean").exit_code == 0


def test_sigterm_leaves_nothing_behind_as_ctrl_c_does(run, tmp_path, monkeypatch):
    """As a cluster's manager ends a job: a hidden folder of the files so far stayed for ever."""
    before, arrived = sorted(tmp_path.iterdir()), []
    monkeypatch.setattr(average, "save_arrays", lambda *_: signal.raise_signal(signal.SIGTERM))
    with handled(signal.SIGTERM, lambda number, frame: arrived.append(number)):
        result = run("average", A, B, "--to", "mean")
    assert (result.exit_code, arrived) == (1, []) and sorted(tmp_path.iterdir()) == before


RECIPES = ROOT / "recipes"
MINI = RECIPES / "mini" / "pretrain.yaml"


def on_disk(folder, shapes, config, files=2, kind="BF16"):
    """A Hugging Face folder of these shapes whose files are holes behind their headers: no disk is taken."""
    folder.mkdir()
    where = {
        name: f"model-{i * files // len(shapes) + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(shapes)
    }
    for file in sorted(set(where.values())):
        header, end = {}, 0
        for name in (name for name in shapes if where[name] == file):
            size = 2 * math.prod(shapes[name])
            header[name] = {"dtype": kind, "shape": list(shapes[name]), "data_offsets": [end, end + size]}
            end += size
        words = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(words).to_bytes(8, "little") + words)
            out.truncate(8 + len(words) + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def call(*words):
    result = CliRunner().invoke(weights, ["convert", *map(str, words)])
    if isinstance(result.exception, TC3Error):
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layers", "terabytes"),
    [("telechat3_105b/finetune_4k.yaml", 45, 0.22), ("telechat3_1119b/pretrain_4k.yaml", 61, 2.3)],
)
def test_a_full_size_is_compared_by_its_headers(tmp_path, recipe, layers, terabytes):
    """A layer has 9 tensors of norms and attention, and 2 of a dense part or 6 of experts; MTP has 4 more."""
    tensors = 3 + (9 + 2) + (layers - 1) * (9 + 6) + (9 + 6 + 4)
    model = model_of(load_recipe(RECIPES / recipe))
    source = on_disk(tmp_path / "hf", hugging_face_shapes(model), config_of(model, "bfloat16"), files=7)
    said = json.loads(call(source, tmp_path / "ms", "--recipe", RECIPES / recipe, "--dry-run", "--json"))
    assert (said["form"], said["tensors"], said["config_compared"]) == ("MindFormers", tensors, True)
    assert said["bytes"] == pytest.approx(terabytes * 1e12, rel=0.05) and len(said["files"]) > 20
    assert not (tmp_path / "ms").exists()


@pytest.fixture
def mini(tmp_path):
    """The mini's model in bfloat16's shapes."""
    model = model_of(load_recipe(MINI))
    return on_disk(tmp_path / "hf", hugging_face_shapes(model), config_of(model, "bfloat16"))


def test_what_is_written_and_how_to_begin_with_it(mini, tmp_path):
    said = call(mini, tmp_path / "ms", "--recipe", MINI, "--dtype", "fp32")
    assert f"begin with it: tc3 train {MINI} --set checkpoint.load_path={tmp_path / 'ms'}" in said
    assert open_source(tmp_path / "ms").headers["output_layer.weight"].dtype == "F32"
    kept = tmp_path / "run" / "recipe.yaml"  # of a run, whose folder holds checkpoints of its own
    (kept.parent / "attempts").mkdir(parents=True)
    dump_recipe(load_recipe(MINI), kept)
    said = call(mini, tmp_path / "other", "--recipe", kept, "--dry-run")
    assert f"--set checkpoint.load_path={tmp_path / 'other'} --run-dir {kept.parent}-next\n" in said
    back = call(tmp_path / "ms", tmp_path / "back", "--recipe", MINI, "--dtype", "bf16")
    assert "transformers leaves the MTP layer out" in back and "the folder has no tokenizer" in back
    assert "transformers normalises latents with an epsilon of 1e-06" in back
    both = [open_source(folder) for folder in (mini, tmp_path / "back")]
    assert {name: header.shape for name, header in both[0].headers.items()} == {
        name: header.shape for name, header in both[1].headers.items()
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_theta": 5000.0}, "rope_theta is 5000.0, but the recipe has 10000.0"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor is 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling is {'type': 'yarn', 'factor': 4}"),
    ],
)
def test_a_configuration_of_another_model_is_refused(mini, tmp_path, change, said):
    config = json.loads((mini / "config.json").read_text())
    (mini / "config.json").write_text(json.dumps({**config, **change}))
    answer = call(mini, tmp_path / "ms", "--recipe", MINI)
    assert "another model than the recipe" in answer and said in answer


def test_without_a_configuration_it_is_said_that_nobody_compared(mini, tmp_path):
    (mini / "config.json").unlink()
    assert "unknown: " in call(mini, tmp_path / "ms", "--recipe", MINI, "--dry-run")


def test_a_tokenizer_for_mindformers_is_refused(mini, tmp_path):
    result = CliRunner().invoke(
        weights, ["convert", str(mini), str(tmp_path / "ms"), "--recipe", str(MINI), "--tokenizer", str(tmp_path)]
    )
    assert result.exit_code == 2 and "--tokenizer copies a tokenizer beside weights for Hugging Face" in result.output
    assert not (tmp_path / "ms").exists()


DENSE = RECIPES / "telechat3_36b" / "pretrain_8k.yaml"


def test_the_dense_36b_is_llama(tmp_path):
    """64 layers of nine tensors (six of MindFormers', which merges three and two), and three more; 36.24 billion."""
    model = model_of(load_recipe(DENSE))
    shapes = hugging_face_shapes(model)
    assert len(shapes) == 64 * 9 + 3 and sum(map(math.prod, shapes.values())) == 36_239_579_136
    config = config_of(model, "bfloat16")
    assert (config["model_type"], config["num_key_value_heads"], config["head_dim"]) == ("llama", 8, 128)
    source = on_disk(tmp_path / "hf", shapes, config, files=3)
    said = json.loads(call(source, tmp_path / "ms", "--recipe", DENSE, "--dry-run", "--json"))
    assert (said["tensors"], said["config_compared"]) == (64 * 6 + 3, True)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("telechat3_36b/context_32k.yaml", "missing: model.layers.0.self_attn.q_proj.weight"),
        ("telechat3_36b/pretrain_8k.yaml", "missing: model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_what_is_no_llama_is_refused(mini, tmp_path, recipe, said):
    (mini / "config.json").unlink()
    assert said in call(mini, tmp_path / "ms", "--recipe", RECIPES / recipe)


def test_the_recipe_of_the_run_is_taken_and_otherwise_asked_for(mini, tmp_path):
    assert "is not in the folder of a run, so name the recipe" in call(mini, tmp_path / "ms")
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"base_config: {MINI}\n")
    call(mini, run / "checkpoint" / "iteration_00000001", "--recipe", MINI)
    saved = run / "checkpoint" / "iteration_00000001"
    assert f"holds {len(initial_weights(model_of(load_recipe(MINI)), 0))} tensors" in call(saved, tmp_path / "back")


def test_another_recipe_than_that_of_a_conversion_must_compute_the_same(mini, tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(f"base_config: {MINI}\nmodel: {{model_config: {{rope_theta: 5.e+4}}}}\n")
    call(mini, tmp_path / "ms", "--recipe", MINI)
    assert "rope_theta was 10000.0 and is 50000.0 now" in call(tmp_path / "ms", tmp_path / "back", "--recipe", other)
    check_load_path(apply_overrides(load_recipe(other), [f"checkpoint.load_path={tmp_path / 'ms'}"]))
    assert "rope_theta was 10000.0 and is 50000.0 now" in capsys.readouterr().err
    assert "holds" in call(tmp_path / "ms", tmp_path / "back")


def test_another_recipe_than_that_of_the_run_must_compute_the_same(mini, tmp_path):
    """The wrong base of RoPE, or number of experts of a token, was written into config.json."""
    run = tmp_path / "run"
    (run / "attempts").mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"base_config: {MINI}\n")
    call(mini, run / "checkpoint" / "iteration_00000001", "--recipe", MINI)
    other = tmp_path / "other.yaml"
    other.write_text(f"base_config: {MINI}\nmodel: {{model_config: {{rope_theta: 5.e+4, num_experts_per_tok: 2}}}}\n")
    said = call(run / "checkpoint" / "iteration_00000001", tmp_path / "back", "--recipe", other)
    assert f"--recipe {other}: the weights in" in said and "leave --recipe out" in said
    assert "num_experts_per_tok was 4 and is 2 now; rope_theta was 10000.0 and is 50000.0 now" in said
    assert not (tmp_path / "back").exists()
    other.write_text(f"base_config: {MINI}\noptimizer: {{weight_decay: 0.2}}\n")
    assert "holds" in call(run / "checkpoint" / "iteration_00000001", tmp_path / "back", "--recipe", other)


def called(*words):
    done = CliRunner().invoke(weights, ["reshard", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def one(tmp_path):
    draw(tmp_path / "run" / "checkpoint" / "iteration_00000003")
    return tmp_path / "run" / "checkpoint" / "iteration_00000003"


def test_a_plan_then_the_files(one, tmp_path):
    recipe = LAYOUTS["zero"]
    assert "would hold" in called(one, tmp_path / "to", "--recipe", recipe, "--dry-run")
    assert not (tmp_path / "to").exists()
    text = called(one, tmp_path / "to", "--recipe", recipe)
    folder = tmp_path / "to" / "checkpoint" / "iteration_00000003"
    assert f"{folder} holds 87 tensors of {one}, laid out for 2 ranks instead of 1" in text
    assert f"go on with it: tc3 train {recipe} --resume {folder}\n" in text
    assert len(list(folder.glob("*.safetensors"))) == len(list(folder.glob("seal_*"))) * 2 == 4


def test_values_of_the_recipe_are_changed(one, tmp_path):
    words = ["--recipe", ONE, "--set", "parallel_config.model_parallel=4", "--dry-run", "--json"]
    assert json.loads(called(one, tmp_path / "to", *words))["ranks"] == {"from": 1, "to": 4}


def test_the_command_to_go_on_with_names_the_same_layout_and_can_be_pasted(one, tmp_path):
    """Values of --set were left out, and a path with a blank was two words."""
    change = "parallel_config.model_parallel=2"
    text = called(one, tmp_path / "to there", "--recipe", ONE, "--set", change)
    (line,) = [line for line in text.splitlines() if line.startswith("go on with it: ")]
    written = tmp_path / "to there" / "checkpoint" / "iteration_00000003"
    words = ["tc3", "train", str(ONE), "--resume", str(written), "--set", change]
    assert shlex.split(line.removeprefix("go on with it: ")) == words


@pytest.mark.parametrize(("model", "devices", "size"), [("438b", 4096, 12 * 438e9), ("1119b", 8192, 12 * 1119e9)])
def test_full_sizes_are_planned_by_their_recipes(model, devices, size):
    folder = RECIPES / f"telechat3_{model}"
    words = [folder / "pretrain_4k.yaml", "to", "--recipe", folder / "pretrain_4k_searched.yaml", "--dry-run", "--json"]
    found = json.loads(called(*words))
    assert found["ranks"] == {"from": devices, "to": devices} and found["files"] == 2 * devices
    assert found["bytes"] == pytest.approx(size, rel=0.01), "weights and two moments in fp32"
    assert 0 < found["changing"] <= found["bytes"] <= found["loading"] <= found["online"]
    assert found["largest_rank"] >= found["bytes"] / devices

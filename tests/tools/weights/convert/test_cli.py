"""`tc3 weights convert` as a user calls it: recipes, configurations that disagree, full sizes by their headers."""

import json
import math

import pytest
from click.testing import CliRunner

from tests.training.runs import ROOT
from plugins.errors import TC3Error
from tools.accuracy.reference.start import initial_weights
from tools.recipe.load import load_recipe
from tools.weights.cli import weights
from tools.weights.convert.plan import model_of
from tools.weights.hugging_face.names import hugging_face_shapes
from tools.weights.hugging_face.sizes import config_of
from tools.weights.source import INDEX, open_source

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
    back = call(tmp_path / "ms", tmp_path / "back", "--recipe", MINI, "--dtype", "bf16")
    assert "transformers leaves the MTP layer out" in back and "no tokenizer beside it" in back
    assert "transformers normalises latents with an epsilon of 1e-06" in back
    both = [open_source(folder) for folder in (mini, tmp_path / "back")]
    assert {name: header.shape for name, header in both[0].headers.items()} == {
        name: header.shape for name, header in both[1].headers.items()
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_theta": 5000.0}, "rope_theta is 5000.0, the recipe's 10000.0"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor is 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling is {'type': 'yarn', 'factor': 4}"),
    ],
)
def test_a_configuration_of_another_model_is_refused(mini, tmp_path, change, said):
    config = json.loads((mini / "config.json").read_text())
    (mini / "config.json").write_text(json.dumps({**config, **change}))
    answer = call(mini, tmp_path / "ms", "--recipe", MINI)
    assert "another model than the recipe's" in answer and said in answer


def test_without_a_configuration_it_is_said_that_nobody_compared(mini, tmp_path):
    (mini / "config.json").unlink()
    assert "unknown: " in call(mini, tmp_path / "ms", "--recipe", MINI, "--dry-run")


def test_a_tokenizer_for_mindformers_is_refused(mini, tmp_path):
    result = CliRunner().invoke(
        weights, ["convert", str(mini), str(tmp_path / "ms"), "--recipe", str(MINI), "--tokenizer", str(tmp_path)]
    )
    assert result.exit_code == 2 and "--tokenizer is copied beside weights for Hugging Face" in result.output
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
        ("telechat3_36b/context_32k.yaml", "MindFormers cannot build these models with YaRN"),
        ("telechat3_36b/pretrain_8k.yaml", "missing: model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_what_is_no_llama_is_refused(mini, tmp_path, recipe, said):
    (mini / "config.json").unlink()
    assert said in call(mini, tmp_path / "ms", "--recipe", RECIPES / recipe)


def test_the_recipe_of_the_run_is_taken_and_otherwise_asked_for(mini, tmp_path):
    assert "is in no run's folder: name the recipe" in call(mini, tmp_path / "ms")
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"base_config: {MINI}\n")
    call(mini, run / "checkpoint" / "iteration_00000001", "--recipe", MINI)
    assert f"holds {len(initial_weights(model_of(load_recipe(MINI)), 0))} tensors" in call(
        run / "checkpoint" / "iteration_00000001", tmp_path / "back"
    )

"""A model that transformers wrote, converted: MindFormers computes its logits, and the way back gives its file."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tools.weights import renew as frozen
from tools.accuracy.align import sides
from tools.accuracy.align.sides import alone, load
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import hyper_of
from tools.data.index import write_learnable
from tools.weights.convert import convert
from tools.weights.convert_plan import prepare
from tools.weights.source import INDEX, open_source

LIMIT = 200_000  # bytes of a file: several files for MindFormers
LOGITS = 1e-5


def converted(source, target, limit):
    opened = open_source(source)
    conversion = prepare(opened, frozen.RECIPE, None, limit)
    convert(opened, target, conversion.plan, conversion.sizes)
    return target


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The frozen model in MindFormers' form."""
    return converted(frozen.FOLDER, tmp_path_factory.mktemp("frozen") / "ms", LIMIT)


def test_it_is_small():
    assert sum(path.stat().st_size for path in Path(frozen.HERE).rglob("*") if path.is_file()) < 2 * 2**20


def test_there_and_back_to_the_file(ours, tmp_path):
    assert len(list(ours.glob("*.safetensors"))) > 2
    back = converted(ours, tmp_path / "back", int(5e9))
    names = [path.name for path in back.glob("*.safetensors")]
    assert names == ["model.safetensors"] and not (back / INDEX).exists(), "as transformers names a single file"
    assert (back / names[0]).read_bytes() == (frozen.FOLDER / names[0]).read_bytes()


def test_the_configuration_that_is_written_is_the_same_to_transformers(ours, tmp_path):
    from transformers import DeepseekV3Config

    back = converted(ours, tmp_path / "back", int(5e9))
    given, written = (DeepseekV3Config.from_pretrained(folder).to_dict() for folder in (frozen.FOLDER, back))
    apart = {key for key in given | written if given.get(key) != written.get(key)}
    # its class has no MTP layer, and no word for how many there are; vLLM and SGLang have
    assert apart <= {"transformers_version", "_name_or_path", "num_nextn_predict_layers"}


def test_the_forward_pass_in_numpy_computes_its_logits():
    sizes = prepare(open_source(frozen.FOLDER), frozen.RECIPE, None, LIMIT).sizes
    logits = Forward(sizes, load_file(frozen.FOLDER / "model.safetensors")).run(frozen.tokens())["logits"]
    assert np.abs(frozen.sample(logits) - np.load(frozen.LOGITS)).max() < LOGITS


@pytest.mark.slow
def test_mindformers_computes_its_logits(ours, tmp_path):
    write_learnable(tmp_path / "corpus", 512)
    recipe = alone(load(frozen.RECIPE, (), str(tmp_path / "corpus"), 1), 1)
    recipe["checkpoint"] = {"save_path": "", "load_path": str(ours), "no_load_optim": True}
    record = sides.run_mindformers(recipe, tmp_path / "run", hyper_of(recipe, 1), None)
    assert np.array_equal(record.batch["input_ids"][0], frozen.tokens())
    assert np.abs(frozen.sample(record.trace["logits"]) - np.load(frozen.LOGITS)).max() < LOGITS


@pytest.mark.slow
def test_transformers_loads_what_is_written(ours, tmp_path):
    pytest.importorskip("torch", reason="transformers' model needs torch: pip install -e '.[align]'")
    back = converted(ours, tmp_path / "back", LIMIT)  # in several files, with an index
    assert (back / INDEX).exists()
    assert np.array_equal(frozen.sample(frozen.compute(back)), np.load(frozen.LOGITS))


def test_another_value_in_the_file_is_noticed(ours, tmp_path):
    """The comparison of bytes above can fail."""
    arrays = load_file(frozen.FOLDER / "model.safetensors")
    arrays["model.norm.weight"] = np.nextafter(arrays["model.norm.weight"], np.float32(9))
    changed = tmp_path / "changed"
    changed.mkdir()
    save_file(arrays, changed / "model.safetensors", {"format": "pt"})
    (changed / "config.json").write_text(json.dumps(json.loads((frozen.FOLDER / "config.json").read_text())))
    back = converted(converted(changed, tmp_path / "ms", LIMIT), tmp_path / "back", int(5e9))
    assert (back / "model.safetensors").read_bytes() != (frozen.FOLDER / "model.safetensors").read_bytes()

"""Fine-tuning trains the answers of packed conversations, from own weights and Hugging Face's, and survives a kill."""

import json
import math
import subprocess

import pytest

from tests.training import runs
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.runs.readings import read_held_out

pytestmark = pytest.mark.slow
VERBS, NOUNS = ["send", "gather", "reduce", "drop", "keep"], ["tensor", "token", "expert", "rank", "stage", "pipeline"]
PLACES = ["buffer", "queue", "stream", "group", "mesh", "layer"]


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """A folder with instructions of 180 made-up functions, some of them held out, and a tokenizer of their words."""
    folder = tmp_path_factory.mktemp("talk")
    sources = folder / "sources"
    sources.mkdir()
    for place in PLACES:
        for noun in NOUNS:
            functions = (
                f'def {verb}_{noun}(self):\n    """{verb.title()} the {noun} of this {place}."""\n' for verb in VERBS
            )
            (sources / f"{place}_{noun}.py").write_text("\n".join(functions))
    make = [runs.TC3, "data", "instructions", "--input", str(sources), "--held-out", "0.2"]
    subprocess.run([*make, "--output", str(folder / "talk")], check=True, capture_output=True)
    from mindformers.dataset.handler import AlpacaInstructDataHandler as Alpaca

    rows = [json.loads(line) for line in (folder / "talk.jsonl").read_text().splitlines()]
    said = [
        f"{Alpaca.system} USER: {Alpaca.prompt_with_input.format_map(row)} ASSISTANT: {row['output']}</s>"
        for row in rows
    ]
    (folder / "said.txt").write_text("\n".join(said))
    prepare = [runs.TC3, "data", "prepare", "--input", str(folder / "said.txt"), "--vocab-size", "512"]
    subprocess.run([*prepare, "--output", str(folder / "said")], check=True, capture_output=True)
    return folder


@pytest.fixture
def recipe(talk, tmp_path):
    """A function: tiny_finetune.yaml on that data, beginning with these weights, as a file."""

    def make(weights):
        flat = load_recipe(runs.HERE / "tiny_finetune.yaml")
        loader = flat["train_dataset"]["data_loader"]
        loader["data_files"] = str(talk / "talk.jsonl")
        loader["handler"][0]["tokenizer"]["pretrained_model_dir"] = str(talk / "said_tokenizer")
        flat["plugins"]["held_out_loss"]["data_path"] = str(talk / "talk_heldout.jsonl")
        flat["checkpoint"]["load_path"] = str(weights)
        dump_recipe(flat, tmp_path / "finetune.yaml")
        return tmp_path / "finetune.yaml"

    return make


def test_answers_are_learnt_alike_from_converted_weights_and_after_a_kill(whole, recipe, tmp_path):
    weights, graph = whole / "checkpoint" / "iteration_00000012", runs.compiled_once(tmp_path / "graph")
    runs.train(recipe(weights), tmp_path / "own", None, **graph)
    expected, held_out = runs.steps(tmp_path / "own"), read_held_out(tmp_path / "own")
    assert sorted(expected) == list(range(1, 9)) and sorted(held_out) == [0, 8]
    assert held_out[8] < held_out[0] - 0.5, "the answers of functions that are never trained on"
    assert expected[1]["lm_loss"] > math.log(512) + 0.5, "worse than new weights: these know another corpus"

    for source, target, more in (
        (weights, tmp_path / "hf", ()),
        (tmp_path / "hf", tmp_path / "ms", ("--recipe", str(whole / "recipe.yaml"), "--file-size", "0.001")),
    ):
        subprocess.run([runs.TC3, "weights", "convert", str(source), str(target), *more], check=True)
    assert len(list((tmp_path / "ms").glob("*.safetensors"))) > 1, "they are read from several files"
    run_dir = tmp_path / "converted"
    # in the save of step 8, whatever the load: two files a checkpoint
    runs.train(recipe(tmp_path / "ms"), run_dir, None, expect=1, **graph | runs.dying(TC3_TEST_KILL="0:4"))
    assert sorted(read_held_out(run_dir)) == [0], "it died before the evaluation of its last step"
    text = runs.train(recipe(tmp_path / "ms"), run_dir, None, "--resume", "auto", **graph)
    assert "going on from step 4" in text and "compile cache: loads" in text
    got = runs.steps(run_dir)
    assert sorted(got) == list(range(1, 9))
    for step, record in got.items():
        runs.same(record, expected[step])
    again = read_held_out(run_dir)
    assert sorted(again) == [0, 4, 8], "a resume evaluates what it goes on from"
    assert {step: again[step] for step in held_out} == held_out

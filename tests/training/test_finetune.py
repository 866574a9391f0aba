"""Fine-tuning trains the answers of packed conversations, from weights that were Hugging Face's, and survives a kill.

What it computed of steps 5 to 7 before the kill is what it must compute after it, from the checkpoint of step 4. That
converted weights begin a run as own ones do: test_converted.py.
"""

import json
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


def test_answers_are_learnt_from_converted_weights_and_alike_after_a_kill(whole, recipe, tmp_path):
    weights = whole / "checkpoint" / "iteration_00000012"
    for source, target, more in (
        (weights, tmp_path / "hf", ()),
        (tmp_path / "hf", tmp_path / "ms", ("--recipe", str(whole / "recipe.yaml"))),
    ):
        subprocess.run([runs.TC3, "weights", "convert", str(source), str(target), *more], check=True)
    run_dir, tuned = tmp_path / "run", recipe(tmp_path / "ms")
    runs.train_and_kill(tuned, run_dir, None, step=5)
    before = runs.steps(run_dir)
    assert 5 <= max(before) < 8
    text = runs.train(tuned, run_dir, None, "--resume", "auto")
    assert "going on from step 4" in text
    after = runs.steps(run_dir)
    assert sorted(after) == list(range(1, 9))
    for step, record in before.items():
        runs.same(after[step], record)
    assert after[5]["seconds"] != before[5]["seconds"], "it is of the resume"
    held_out = read_held_out(run_dir)
    assert sorted(held_out) == [0, 4, 8], "a resume evaluates what it goes on from"
    assert held_out[8] < held_out[0] - 0.5, "the answers of functions that are never trained on"

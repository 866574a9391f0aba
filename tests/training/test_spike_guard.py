"""A batch of nonsense in the middle of training: the guarded run ends as one that never saw it.

Its data is its own, so the graph is compiled here, once, of one layer with experts, and loaded by the two starts that
follow.
"""

import shutil

import numpy as np
import pytest

from plugins.attention_balance.samples import build_gpt_index
from plugins.spike_guard.ledger import read_ledger
from tests.training import forked, runs
from tools.data.index import map_lengths
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
BAD, BATCH = 10, 4  # the step whose tokens are replaced, samples of a step
GUARD = {"window": 8, "rollbacks": 1}


@pytest.fixture(scope="module")
def poisoned(corpus, tmp_path_factory):
    """A copy of the corpus, with random tokens in the samples of step `BAD`."""
    prefix = tmp_path_factory.mktemp("poisoned") / "tiny"
    for end in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus}{end}", f"{prefix}{end}")
    loader = load_recipe(runs.TINY)["train_dataset"]["data_loader"]
    lengths, samples = map_lengths(str(prefix)), -(-loader["sizes"][0] * 1005 // 1000)
    index = build_gpt_index(lengths, loader["config"]["seq_length"], samples, loader["config"]["seed"])
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    stream = np.concatenate([np.arange(lengths[d]) + lengths[:d].sum() for d in index.document_index])
    random = np.random.default_rng(0)
    for item in range((BAD - 1) * BATCH, BAD * BATCH):
        start = int(index.shuffle_index[item]) * index.sequence_length
        tokens[stream[start : start + index.sequence_length]] = random.integers(1, 500, index.sequence_length)
    tokens.flush()
    return prefix


def guarded(folder, **settings):
    """The recipe with the plugin on."""
    flat = load_recipe(runs.TINY)
    flat["model"]["model_config"] |= ONE_LAYER
    flat["plugins"]["spike_guard"] = {**GUARD, **settings}
    dump_recipe(flat, folder / "guarded.yaml")
    return folder / "guarded.yaml"


def test_a_guarded_run_equals_one_that_never_saw_the_bad_batch(poisoned, workers, tmp_path):
    run_dir, other = tmp_path / "run", tmp_path / "never"
    text = runs.train(guarded(tmp_path), run_dir, poisoned, **runs.compiled_once(tmp_path / "graph"))
    (entry,) = read_ledger(run_dir)
    assert (entry.step, entry.first, entry.samples) == (BAD, BAD, (((BAD - 1) * BATCH, BAD * BATCH),)), text
    assert f"spike: {entry.why}; going back to before step {BAD}, without the samples of step {BAD}" in text
    assert runs.checkpoints(run_dir) == [4, 8, 12]

    forked.train(workers, guarded(tmp_path, skipped=[[36, 40]]), other, poisoned)
    assert read_ledger(other) == [] and sorted(runs.steps(other)) == sorted(runs.steps(run_dir)) == [*range(1, 13)]
    for step, record in runs.steps(other).items():
        runs.same(record, runs.steps(run_dir)[step])

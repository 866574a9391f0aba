"""The held-out losses of two corpora: their mean, and each against a run that evaluates on one of them alone."""

import json
import math

import numpy as np
import pytest

from plugins.held_out_loss.plan import held_out_file
from tests.training import runs
from tools.data.index import write_corpus
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe

pytestmark = pytest.mark.slow
COUNTED = {"long": 2 / 3, "short": 1 / 3}  # every second token of `short` ends a document, and no loss counts it


def evaluated(data_path, folder, corpus, graph):
    """The lines of a run of two steps, and what it printed."""
    flat = load_recipe(runs.TINY)
    flat["train_dataset"]["data_loader"]["config"]["eod_mask_loss"] = True
    flat["plugins"]["held_out_loss"] = {"data_path": data_path, "every": 2}
    folder.mkdir()
    dump_recipe(flat, folder / "evaluating.yaml")
    said = runs.train(folder / "evaluating.yaml", folder / "run", corpus, "--steps", "2", **graph)
    return [json.loads(line) for line in held_out_file(folder / "run").read_text().splitlines()], said


def test_corpora_have_losses_of_their_own_and_the_mean_counts_their_tokens(corpus, graph, tmp_path):
    paths = {"long": np.array([5000], np.int32), "short": np.full(2500, 2, np.int32)}
    for name, lengths in paths.items():
        write_corpus(tmp_path / name, lengths, vocab_size=512, end_of_document=0, seed=1)
    both, said = evaluated([str(tmp_path / name) for name in paths], tmp_path / "both", corpus, graph)
    alone, _ = evaluated(str(tmp_path / "short"), tmp_path / "alone", corpus, graph)
    assert [line["step"] for line in both] == [line["step"] for line in alone] == [0, 2]
    for line, other in zip(both, alone, strict=True):
        assert line["corpora"]["short"] == other["held_out_loss"] and "corpora" not in other
        mean = sum(share * line["corpora"][name] for name, share in COUNTED.items())
        assert line["held_out_loss"] == pytest.approx(mean, rel=1e-12)
    for name, loss in both[-1]["corpora"].items():
        assert f"{loss:.4f}, perplexity {math.exp(loss):.1f}" in said.replace(",", "") or name in said, said
    assert both[-1]["corpora"]["long"] != both[-1]["corpora"]["short"]

"""The example of a `data_path` with weights: check takes it, and imbalance says what each corpus gives."""

import numpy as np
import pytest
from click.testing import CliRunner

from tests.recipes.oracles import RECIPES, load
from tests.tools.check.test_data_files import write
from tools.check.check import check_recipe
from tools.data.imbalance.cli import imbalance_command
from tools.data.index import read_blend

BLENDED = RECIPES / "mini" / "pretrain_blended.yaml"


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """Both corpora where the recipe looks for them: documents of code, and fewer, shorter ones of prose."""
    monkeypatch.chdir(tmp_path)
    prefixes, _ = read_blend(load("mini/pretrain_blended.yaml")["train_dataset"]["data_loader"]["config"]["data_path"])
    (tmp_path / prefixes[0]).parent.mkdir(parents=True)
    random = np.random.default_rng(1)
    for prefix, documents, longest in zip(prefixes, (400, 16), (600, 3000), strict=True):
        write(tmp_path / prefix, random.integers(2, longest, documents))
    return prefixes


def test_check_takes_the_blend(corpora):
    report = check_recipe(BLENDED)
    assert report.clean and not report.warnings, report.findings


def test_another_tokenizer_for_one_of_them_is_refused(corpora, tmp_path):
    write(tmp_path / corpora[1], [400] * 40, eod=3)
    (found,) = check_recipe(BLENDED).errors
    assert f"{corpora[1]} ends its documents with id 3" in found.wrong


def test_imbalance_says_what_each_corpus_gives(corpora):
    for prefix in corpora:
        result = CliRunner().invoke(imbalance_command, [prefix, "--recipe", str(BLENDED), "--steps", "2"])
        assert result.exit_code == 0, result.output
        for share, corpus in zip((80, 20), corpora, strict=True):
            assert f"{share} % of the samples from {corpus}" in result.stdout

"""MindFormers' own trainer on CPU against the golden file of Hugging Face: forward, every gradient, 20 losses."""

import json
import sys

import numpy as np
import pytest

from tests.tools.accuracy.align import cases
from tests.tools.accuracy.reference import renew as golden
from tools.accuracy.align import sides as align_sides
from tools.accuracy.align.comparison import Wanted, compare_stages
from tools.accuracy.align.sides import in_hugging_face_names, load, on_one_worker, reference_sizes
from tools.accuracy.align.stages import GRADIENT, LOGITS, LOSS, first_difference, moved
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import hyper_of, initial_weights
from tools.data.index import write_learnable
from tools.weights.hugging_face_names import to_mindformers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(record, sizes) of one run in MindFormers, from the golden weights on the golden corpus."""
    folder = tmp_path_factory.mktemp("aligned")
    recipe = load(golden.RECIPE, (), str(folder / "corpus"), golden.STEPS)
    write_learnable(folder / "corpus", golden.vocabulary_of(recipe))
    plain = on_one_worker(recipe, golden.STEPS)
    sizes, hyper = reference_sizes(plain), hyper_of(plain, golden.STEPS)
    weights = to_mindformers(initial_weights(sizes, golden.SEED), sizes)
    record = align_sides.run_mindformers(plain, folder / "ours", hyper, weights)
    return in_hugging_face_names(record, sizes), sizes


@pytest.fixture(scope="module")
def kept():
    return golden.load()


def test_both_sides_were_given_the_same(trained, kept):
    record, sizes = trained
    assert json.dumps(sizes.as_json(), sort_keys=True) == str(kept["sizes"])
    assert golden.checksum(record.initial) == int(kept["checksum/weights"])
    assert golden.checksum(record.batch) == int(kept["checksum/batches"])


def test_logits(trained, kept):
    record, _ = trained
    assert np.abs(record.trace["logits"][:, ::8, ::16] - kept["logits"]).max() < LOGITS


def test_every_module_is_the_forward_pass_in_numpy(trained):
    record, sizes = trained
    want = Forward(sizes, record.initial).run(record.batch["input_ids"][0])
    rows = first_difference(record.trace, want, list(want))
    assert len(rows) == len(record.trace) == len(want)
    assert max(row.error for row in rows) < 1e-5


def test_every_gradient(trained, kept):
    record, sizes = trained
    got = golden.summary(record, sizes)
    assert list(got["gradient/names"]) == list(kept["gradient/names"])
    np.testing.assert_allclose(got["gradient/norms"], kept["gradient/norms"], rtol=GRADIENT)
    elements = [record.gradient[name].size for name in got["gradient/names"]]
    assert cases.samples_apart("gradient", got, kept, elements) < 10 * GRADIENT


def test_the_first_update(trained, kept):
    record, sizes = trained
    got = golden.summary(record, sizes)
    assert list(got["update/names"]) == list(kept["update/names"]) == sorted(moved(record))
    np.testing.assert_allclose(got["update/norms"], kept["update/norms"], rtol=1e-3, atol=1e-9)
    elements = [record.initial[name].size for name in got["update/names"]]
    assert cases.samples_apart("update", got, kept, elements) < cases.UPDATE_SAMPLE


def test_twenty_losses(trained, kept):
    record, _ = trained
    assert np.abs(record.curve["loss"] - kept["curve/loss"]).max() < LOSS
    np.testing.assert_allclose(record.curve["global_norm"], kept["curve/global_norm"], rtol=1e-3)
    assert kept["curve/loss"][-1] < kept["curve/loss"][0] - 0.5, "20 steps must move far enough to mean something"


def test_the_experts_loads_are_those_of_each_step(trained):
    record, sizes = trained
    layers = range(sizes.hf["first_k_dense_replace"], sizes.hf["num_hidden_layers"] + sizes.mtp_layers)
    assert len(record.loads) == 20
    for loads in record.loads:
        assert sorted(loads) == [str(layer) for layer in layers]
        for share in loads.values():
            assert share.sum() == pytest.approx(1) and share.max() < 1


def test_the_whole_comparison_live(tmp_path):
    pytest.importorskip("torch", reason="the live reference needs torch: pip install -e '.[align]'")
    data = str(tmp_path / "corpus")
    write_learnable(tmp_path / "corpus", 512)
    comparison = compare_stages(
        Wanted(golden.RECIPE, "hf", 20, (), data, tmp_path / "runs", sys.executable, seed=1),
        lambda text: None,
    )
    assert [stage.status for stage in comparison.stages] == ["passed"] * 5 + ["not run"]

"""The forward pass in NumPy against what Hugging Face computed, kept in the golden file: no torch is needed."""

import json

import numpy as np
import pytest

from tests.tools.accuracy.align.cases import YARN, sizes, tokens
from tools.accuracy.reference import golden
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.weights import checksum, initial_weights
from tools.weights.hugging_face.sizes import Sizes


def test_it_computes_the_golden_logits():
    stored = golden.load()
    model = Sizes(**json.loads(str(stored["sizes"])))
    weights = initial_weights(model, golden.SEED)
    assert checksum(weights) == int(stored["checksum/weights"]), "the golden file is of other starting weights"
    logits = Forward(model, weights).run(stored["first_ids"])["logits"]
    assert np.abs(logits[:, ::8, ::16] - stored["logits"]).max() < 1e-5


def test_golden_file_is_small():
    assert golden.FILE.stat().st_size < 300_000


@pytest.mark.parametrize("model", [sizes(), sizes(rope_scaling=YARN), sizes(q_lora_rank=None, n_group=4, topk_group=2)])
def test_it_is_causal(model):
    weights, ids = initial_weights(model, 0), tokens(model)[0]
    before = Forward(model, weights).run(ids)["logits"]
    changed = ids.copy()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    after = Forward(model, weights).run(changed)["logits"]
    assert np.array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before[:, 9:] - after[:, 9:]).max(-1) > 1e-6).all()


def test_yarn_changes_angles_and_scale():
    plain, yarn = Forward(sizes(), {}), Forward(sizes(rope_scaling=YARN), {})
    ratio = yarn.frequencies() / plain.frequencies()
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(1 / 4) and (np.diff(ratio) <= 0).all()
    assert yarn.scale() / plain.scale() == pytest.approx((0.1 * np.log(4) + 1) ** 2)

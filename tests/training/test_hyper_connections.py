"""Models with several residual streams: weights under the public names, and a layout against one process."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from launch.generate.command import forward_recipe
from tests.training import forked, runs
from tools.accuracy.equivalence.executed import ExecutedRuns
from tools.accuracy.equivalence.strategies import CASES, one_worker
from tools.accuracy.reference.forward import Forward
from tools.accuracy.reference.start import initial_weights
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import model_of
from tools.weights.hugging_face_config import config_of
from tools.weights.hugging_face_names import to_mindformers

pytestmark = pytest.mark.slow
RECIPE = runs.HERE / "tiny_mhc.yaml"
LOGITS = """
import sys, numpy as np
from pathlib import Path
from launch.generate import worker
folder, ids, places = Path(sys.argv[1]), np.load(sys.argv[2]), eval(sys.argv[3])
model = worker.Model(folder / "forward.yaml", folder / "weights")
np.save(folder / "logits.npy", np.array([model.logits(ids[:place].tolist()) for place in places]))
"""
PLACES = [1, 9, 40, 64]
ROW = "executed_mhc_tp2_sp"


def test_weights_under_the_public_names_compute_the_logits_of_the_reference(workers, tmp_path):
    sizes = model_of(load_recipe(RECIPE))
    weights = initial_weights(sizes, 3)
    rng = np.random.default_rng(5)
    for name in weights:  # gates that differ by stream and token
        if name.endswith(("hc_base", "hc_scale")):
            weights[name] = rng.uniform(-1, 2, weights[name].shape).astype(np.float32)
    assert "model.layers.1.ffn_hc.hc_scale" in weights and "model.layers.2.ffn_hc.hc_scale" not in weights
    config = config_of(sizes, "float32")
    assert (config["model_type"], config["hc_mult"], config["hc_sinkhorn_iters"]) == ("xing4_0", 4, 4)
    (tmp_path / "weights").mkdir()
    save_file(to_mindformers(weights, sizes), tmp_path / "weights" / "weights-model-0000000-0000001.safetensors")
    ids = rng.integers(0, 512, 64)
    np.save(tmp_path / "ids.npy", ids)
    dump_recipe({**forward_recipe(load_recipe(RECIPE)), "output_dir": str(tmp_path)}, tmp_path / "forward.yaml")
    done = workers.python("-c", LOGITS, tmp_path, tmp_path / "ids.npy", PLACES)
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(tmp_path / "logits.npy")
    right = Forward(sizes, weights).run(ids[None])["logits"][0][np.array(PLACES) - 1]
    assert np.abs(found - right).max() < 1e-5 * max(1, np.abs(right).max())
    weights["model.layers.1.attn_hc.hc_base"][8:] = 0  # another mixing of the streams would be seen
    other = Forward(sizes, weights).run(ids[None])["logits"][0][np.array(PLACES) - 1]
    assert np.abs(other - right).max() > 1e-4


def test_a_layout_equals_one_process(workers, tmp_path):
    """One dense layer, whose feed-forward part has the streams that its attention has mixed. Ranks whose vocabulary
    begins at 0 have other graphs than the rest: each then gathered weights and tokens in another order, for ever.
    """
    more = {"layers": 1, "sp": False, "dp": 2, "zero": True, "held_out": True}
    (sharding,) = (replace(case.sharding, **more) for case in CASES if case.name == ROW)
    with forked.launches(workers):
        found = ExecutedRuns(one_worker(str(runs.TINY)), 3, tmp_path, print).compare(ROW, sharding)
    assert not found.findings and 0 < found.used < 1 and found.tensors > 50, found

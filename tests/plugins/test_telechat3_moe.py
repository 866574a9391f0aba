"""Layers that MindSpore recomputes one by one, in the sharded graph of a step without a pipeline."""

import json
import re

import pytest

from tests.tools.dryrun.compile_worker import RECIPE


def sub_graphs(text):
    """Decoder layer -> the sets of connected operators that MindSpore recomputes together, which hold its operators."""
    found = {}
    for line, scope in zip(text, text[2:], strict=False):
        layer = re.search(r"layers-CellList/(\d+)-", scope)
        number = re.search(r"recompute_sub_graph: U64\((\d+)\)", line)
        if layer and number and "duplicated" in line:
            found.setdefault(int(layer[1]), set()).add(int(number[1]))
    return found


@pytest.mark.slow
def test_each_layer_is_recomputed_by_itself(forks, tmp_path):
    """Latent attention with adapters, two layers without experts, as MindFormers' trainer sets them up."""
    model = {"disable_lazy_inline": True, "first_k_dense_replace": 2}
    recipe = {"base_config": str(RECIPE), "model": {"model_config": model}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    worker = ("-m", "tests.tools.dryrun.compile_worker", tmp_path / "out.json", "--recipe", tmp_path / "recipe.yaml")
    plugins = ("--plugins", json.dumps({"lora": {"rank": 2}}), "--keep-graph", tmp_path / "graph.ir")
    done = forks.python(*worker, *plugins, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = sub_graphs((tmp_path / "graph.ir").read_text().splitlines())
    assert sorted(found) == [0, 1] and found[0].isdisjoint(found[1])

"""The models of the recipes, built by MindFormers without memory for their parameters."""

import json
import subprocess
import sys

import pytest

from tests.recipes.oracles import RECIPES, ROOT, all_recipes
from tests.recipes.test_numbers import CARDS, ENTRIES

# of the 36B, MindFormers cannot build the context stages: see below
MODELS = [name for name in all_recipes() if ENTRIES[name].kind != "mini" and "telechat3_36b/context" not in name]

COUNT = """
import json, math, sys
import mindspore as ms
from mindformers import MindFormerConfig, build_context
from mindformers.core.parallel_config import build_parallel_config
from mindformers.models import build_network
from mindspore.nn.utils import no_init_parameters

for name in sys.argv[1:]:
    config = MindFormerConfig(name)
    # the mesh does not change a parameter's full shape: one process, one device
    config.use_parallel, config.parallel.parallel_mode = False, 0
    config.context = MindFormerConfig(mode=0, device_target="CPU")
    config.recompute_config = MindFormerConfig(recompute=False)
    config.parallel_config = MindFormerConfig(data_parallel=1, pipeline_stage=1)
    config.model.model_config.update(dict(offset=0, pp_interleave_num=1, moe_token_dispatcher_type="alltoall"))
    build_context(config)
    build_parallel_config(config)
    with no_init_parameters():
        network = build_network(config.model, default_args={"parallel_config": config.parallel_config})
    print(json.dumps([name, sum(math.prod(parameter.shape) for parameter in network.trainable_params())]))
"""


def build(names):
    """Build the models of some recipes in one process."""
    paths = [str(RECIPES / name) for name in names]
    return subprocess.run([sys.executable, "-c", COUNT, *paths], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({name.split("/")[0] for name in MODELS}))
def test_mindformers_builds_a_model_of_the_named_size_for_every_stage(folder):
    names = [name for name in MODELS if name.startswith(f"{folder}/")]
    done = build(names)
    assert done.returncode == 0, done.stderr[-2000:]
    counted = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert counted == {str(RECIPES / name): CARDS[folder].parameters for name in names}


@pytest.mark.slow
def test_the_modelled_36b_contexts_cannot_be_built():
    """When this fails, MindFormers can do YaRN for grouped-query models and the card's `modelled` can go."""
    done = build(["telechat3_36b/context_32k.yaml"])
    assert done.returncode != 0
    assert "qk_pos_emb_head_dim" in done.stderr


def test_no_layer_of_the_training_graph_reads_pangus_sandwich_norm():
    """When this fails, Pangu's card may claim more."""
    import mindformers.parallel_core.training_graph as graph

    folder = next(iter(graph.__path__))
    done = subprocess.run(["grep", "-rlE", "--include=*.py", "sandwich", folder], capture_output=True, check=False)
    assert done.stdout == b""

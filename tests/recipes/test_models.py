"""The models of the recipes, built by MindFormers without memory for their parameters."""

import json
import subprocess
import sys

import pytest

from tests.recipes.oracles import RECIPES, ROOT, all_recipes
from tests.recipes.test_numbers import CARDS, ENTRIES
from tools.recipe.load import load_recipe

# of the 36B, MindFormers cannot build the context stages: see below
MODELS = [name for name in all_recipes() if ENTRIES[name].kind != "mini" and "telechat3_36b/context" not in name]

COUNT = """
import json, math, os, sys
import mindspore as ms
from mindformers import MindFormerConfig, build_context
from mindformers.core.parallel_config import build_parallel_config
from mindformers.models import build_network
from mindspore.nn.utils import no_init_parameters

def count(name):
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
    return sum(math.prod(parameter.shape) for parameter in network.trainable_params())

for name in sys.argv[1:]:
    if os.fork():  # a process for each model, whose memory is never given back; what takes long is the import
        os.wait()
        continue
    try:
        outcome = count(name)
    except Exception as error:
        outcome = repr(error)
    print(json.dumps([name, outcome]), flush=True)
    os._exit(0)
"""
IMPOSSIBLE = "telechat3_36b/context_32k.yaml"
# keys of a model that no parameter's shape depends on: of recipes that differ in these alone one is built
SHAPELESS = {
    *("seq_length", "max_position_embeddings", "rope_theta", "rotary_scaling_factor", "offset"),
    *("use_attn_mask_compression", "use_eod_attn_mask_compression", "moe_token_dispatcher_type"),
}


def shape_of(name):
    model = load_recipe(RECIPES / name)["model"]["model_config"]
    return json.dumps({key: value for key, value in model.items() if key not in SHAPELESS}, sort_keys=True)


@pytest.fixture(scope="module")
def built():
    """recipe -> number of parameters or an error's text."""
    shapes = {name: shape_of(name) for name in [*MODELS, IMPOSSIBLE]}
    one_each = {shape: str(RECIPES / name) for name, shape in shapes.items()}
    command = [sys.executable, "-c", COUNT, *one_each.values()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    return {name: counts[one_each[shape]] for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mindformers_builds_a_model_of_the_named_size(name, built):
    assert built[name] == CARDS[name.split("/")[0]].parameters


@pytest.mark.slow
def test_the_modelled_36b_contexts_cannot_be_built(built):
    """When this fails, MindFormers can do YaRN for grouped-query models and the card's `modelled` can go."""
    assert "qk_pos_emb_head_dim" in built[IMPOSSIBLE]


def test_no_layer_of_the_training_graph_reads_pangus_sandwich_norm():
    """When this fails, Pangu's card may claim more."""
    import mindformers.parallel_core.training_graph as graph

    folder = next(iter(graph.__path__))
    done = subprocess.run(["grep", "-rlE", "--include=*.py", "sandwich", folder], capture_output=True, check=False)
    assert done.stdout == b""

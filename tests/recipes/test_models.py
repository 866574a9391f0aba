"""The models of the recipes, built by MindFormers without memory for their parameters."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.recipes.counted import counted
from tests.recipes.oracles import RECIPES, all_recipes
from tests.recipes.test_numbers import ENTRIES
from tools.recipe.load import load_recipe

# of the 36B, MindFormers cannot build the context stages: see below
MODELS = [name for name in all_recipes() if ENTRIES[name].kind != "mini" and "telechat3_36b/context" not in name]

IMPOSSIBLE = "telechat3_36b/context_32k.yaml"
# keys of a model that no parameter's shape depends on: of recipes that differ in these alone one is built
SHAPELESS = {
    *("seq_length", "max_position_embeddings", "rope_theta", "rotary_scaling_factor", "offset"),
    *("use_attn_mask_compression", "use_eod_attn_mask_compression", "moe_token_dispatcher_type"),
    "moe_router_bias_update_rate",
}


def shape_of(name):
    model = load_recipe(RECIPES / name)["model"]["model_config"]
    return json.dumps({key: value for key, value in model.items() if key not in SHAPELESS}, sort_keys=True)


@pytest.fixture(scope="module")
def built():
    """recipe -> number of parameters or an error's text."""
    shapes = {name: shape_of(name) for name in [*MODELS, IMPOSSIBLE]}
    one_each = {shape: str(RECIPES / name) for name, shape in shapes.items()}
    counts = counted(one_each.values())
    return {name: counts[one_each[shape]] for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_mindformers_builds_a_model_of_the_named_size(name, built):
    assert built[name] == ENTRIES[name].parameters


@pytest.mark.slow
def test_the_modelled_36b_contexts_cannot_be_built(built):
    """When this fails, MindFormers can do YaRN for grouped-query models and the card's `modelled` can go."""
    assert "qk_pos_emb_head_dim" in built[IMPOSSIBLE]


def test_no_layer_of_the_training_graph_reads_pangus_sandwich_norm():
    """When this fails, Pangu's card may claim more."""
    (package,) = find_spec("mindformers").submodule_search_locations  # importing it takes longer
    folder = Path(package) / "parallel_core" / "training_graph"
    assert list(folder.rglob("*.py"))
    done = subprocess.run(["grep", "-rlE", "--include=*.py", "sandwich", folder], capture_output=True, check=False)
    assert done.stdout == b""

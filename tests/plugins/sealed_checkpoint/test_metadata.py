"""The metadata of a sharded checkpoint lists the routers' biases, the optimizer's states and what all stages save;
tests/training shows that a resume finds them.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
from mindspore import Layout

from plugins.sealed_checkpoint.router_state import add_router_state, beside_weights, keeps_muon, with_muon
from plugins.sealed_checkpoint.stage_metadata import of_all_stages

ROUTER = "decoder.layers.{}.mlp.router"


def parameter(layer, name):
    return SimpleNamespace(name=f"{ROUTER.format(layer)}.{name}", dtype="float32", shape=(16,))


def test_biases_are_copies_where_their_router_is():
    """Rank of stage 1 of two, which has layer 3 and not layer 2; four ranks of it split the router's weight."""
    layout = Layout((2, 2), ("dp", "tp"), [4, 5, 6, 7])("tp", "None")
    weight = f"{ROUTER.format(3)}.weight"
    entries = {weight: [layout, "float32", (16, 128)]}
    parameters = [parameter(layer, name) for layer in (2, 3) for name in ("expert_bias", "expert_load", "weight")]
    found = add_router_state(entries, parameters)
    assert set(found) == {weight, f"{ROUTER.format(3)}.expert_bias", f"{ROUTER.format(3)}.expert_load"}
    assert found[weight] is entries[weight]
    copied, kind, shape = found[f"{ROUTER.format(3)}.expert_bias"]
    known = copied.to_dict()
    assert (kind, shape) == ("float32", (16,))
    assert known["rank_list"] == [4, 5, 6, 7] and tuple(known["device_matrix"]) == (2, 2)
    assert tuple(known["tensor_map"]) == (-1,)


def test_where_experts_live_is_a_copy_beside_their_weights():
    layout = Layout((2, 4), ("dp_ex_ep", "ep"), list(range(8)))("ep", "None")
    entries = {"decoder.layers.3.mlp.experts.weight1": [layout, "float32", (2048, 64)]}
    placements = [
        SimpleNamespace(name=f"decoder.layers.{layer}.mlp.experts.placement", dtype="int32", shape=(16,))
        for layer in (2, 3)
    ]
    copied, kind, shape = add_router_state(entries, placements)["decoder.layers.3.mlp.experts.placement"]
    assert (kind, shape, tuple(copied.to_dict()["tensor_map"])) == ("int32", (16,), (-1,))
    assert len(add_router_state(entries, placements)) == 2, "layer 2 is another stage's"


def test_of_muons_moments_a_stage_lists_its_own():
    """MindSpore lists them for a stage that does not have them. Of vectors and the embedding AdamW has moments."""
    weight, other = "decoder.layers.3.mlp.linear_fc2.weight", "decoder.layers.2.mlp.linear_fc2.weight"
    norm, embedding = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"
    own = {weight: ["layout", "float32", (8, 4)], f"accu_grads.{weight}": ["layout", "float32", (8, 4)]}
    for name, shape in ((norm, (4,)), (embedding, (8, 4))):
        own |= {f"{prefix}{name}": ["layout", "float32", shape] for prefix in ("", "adam_m.", "adam_v.")}
    wrong = {f"muon_m.{other}": ["other stage's", "float32", (8, 4)]}
    assert keeps_muon([own, own | wrong]) and not keeps_muon([own])
    assert with_muon(own | wrong) == with_muon(own) == own | {f"muon_m.{weight}": ["layout", "float32", (8, 4)]}


@pytest.mark.parametrize("state", ["pma_weight_sma", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_states_that_mindspore_lists_for_another_stage_are_listed_beside_their_weights(state):
    """MindSpore listed the averages of PMA of a pipeline's first stage for its last one. A frozen weight has none."""
    weights = {"a.weight": 0, "b.weight": 1, "frozen.weight": 1}
    right, wrong = {0: {}, 1: {}}, {0: {}, 1: {}}
    for name, stage in weights.items():
        for found in (right, wrong):
            found[stage] |= {each: [f"of {name}", "bfloat16", (8,)] for each in (name, f"adam_m.{name}")}
        if name != "frozen.weight":
            right[stage][f"{state}.{name}"] = [f"of {name}", "float32", (8,)]
    wrong[1][f"{state}.a.weight"] = ["of another stage", "float32", (8,)]
    parameters = [SimpleNamespace(name=f"{state}.{name}", dtype="float32") for name in ("a.weight", "b.weight")]
    assert beside_weights(wrong, parameters) == beside_weights(right, []) == beside_weights(right, parameters) == right
    assert beside_weights({0: right[0]}, parameters) == {0: right[0]}


def test_what_is_listed_stays():
    layout = Layout((2,), ("dp",))("None")
    names = [f"{ROUTER.format(0)}.{name}" for name in ("weight", "expert_bias", "expert_load")]
    entries = {name: [layout, "float32", (16,)] for name in names}
    parameters = [parameter(0, "expert_bias"), parameter(0, "expert_load")]
    assert add_router_state(entries, parameters) == entries


def test_rank_0_gets_the_list_of_every_rank_from_its_own_stage(tmp_path):
    """Three stages of two ranks. What a rank is told of other stages is wrong, and of its own it is right."""
    meeting = Barrier(6)

    def view(rank):
        return {one: {"tensor": one} if one // 2 == rank // 2 else None for one in range(6)}

    def save(rank):
        return of_all_stages(tmp_path, view(rank), rank, 6, 3, meeting.wait)

    with ThreadPoolExecutor(6) as ranks:
        found = list(ranks.map(save, range(6)))
    assert found[0] == {one: {"tensor": one} for one in range(6)}
    assert found[3] == {2: {"tensor": 2}, 3: {"tensor": 3}}
    assert list(tmp_path.iterdir()) == []

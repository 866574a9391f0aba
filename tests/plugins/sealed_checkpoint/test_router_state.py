"""Routers' biases in a sharded checkpoint's metadata; that a resume keeps them is shown in tests/training."""

from types import SimpleNamespace

from mindspore import Layout

from plugins.sealed_checkpoint.router_state import add_router_state, keeps_muon, with_muon

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


def test_what_is_listed_stays():
    layout = Layout((2,), ("dp",))("None")
    names = [f"{ROUTER.format(0)}.{name}" for name in ("weight", "expert_bias", "expert_load")]
    entries = {name: [layout, "float32", (16,)] for name in names}
    parameters = [parameter(0, "expert_bias"), parameter(0, "expert_load")]
    assert add_router_state(entries, parameters) == entries

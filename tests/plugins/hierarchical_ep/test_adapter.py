"""What the adapters refuse; what they do is shown by training (tests/training) and by compiling (test_ascend.py)."""

import pytest
from mindformers import MindFormerConfig
from mindformers.parallel_core.transformer_config import TransformerConfig

from plugins import telechat3_moe
from plugins.cpu_backend import transport
from plugins.cpu_backend.expert_parallel import Rows
from plugins.ep_overlap import adapter as overlap
from plugins.errors import RecipeError
from plugins.hierarchical_ep import adapter
from plugins.hierarchical_ep.experts import RoutedExperts
from plugins.hierarchical_ep.topology import Topology


def config(target="CPU", **changes):
    model = {
        "architectures": ["TeleChat3MoeForCausalLM"],
        "moe_token_dispatcher_type": "alltoall",
        "npu_nums_per_device": 2,
        "n_routed_experts": 16,
        **changes,
    }
    return MindFormerConfig(
        use_parallel=False,
        context={"device_target": target},
        parallel_config={"expert_parallel": 4},
        runner_config={"batch_size": 2},
        model={"model_config": model},
        plugins={"hierarchical_ep": {"mode": "global"}},
    )


@pytest.fixture
def enable(monkeypatch):
    """`adapter.enable` without workers to connect to; no trace of it for other tests."""
    monkeypatch.setattr(transport, "connect", lambda: None)
    monkeypatch.setattr(telechat3_moe, "_experts", [])
    monkeypatch.setattr(adapter, "_current", [])
    return adapter.enable


@pytest.mark.parametrize(("written", "nodes"), [({"npu_nums_per_device": 2}, 2), ({"npu_nums_per_device": None}, 1)])
def test_a_node_that_no_key_describes_has_eight_devices(enable, written, nodes):
    enable(config(**written), {"mode": "global"})
    assert adapter.current().topology == Topology(nodes, 4 // nodes, 16)
    without = config()
    del without.model.model_config["npu_nums_per_device"]
    enable(without, {"mode": "global"})
    assert adapter.current().topology == Topology(1, 4, 16)


def test_more_tokens_than_can_be_sorted_are_refused_when_the_model_is_built(enable):
    enable(config(), {"mode": "deduplicated"})
    ours = adapter.current()
    model = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=16,
        moe_ffn_hidden_size=8,
        moe_router_topk=4,
        seq_length=2**24,
        add_bias_linear=False,
        gated_linear_unit=True,
    )
    assert len(ours.slices(model)[0]) == 2 * 2**24
    with pytest.raises(RecipeError, match=r"33,554,432 tokens on each rank and 4 experts per token"):
        RoutedExperts(model, ours, None, Rows(), streams=1)


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"moe_token_dispatcher_type": "alltoall_deredundency"}, {"mode": "global"}, "sets this key itself"),
        ({"n_routed_experts": 18}, {"mode": "global"}, "does not divide the 18"),
        ({}, {"mode": "auto"}, "auto has not been replaced by a value yet"),
        (
            {"target": "Ascend", "architectures": ["DeepseekV3ForCausalLM"]},
            {"mode": "global"},
            "'DeepseekV3ForCausalLM'",
        ),
    ],
)
def test_what_cannot_be_is_refused(changed, settings, message):
    with pytest.raises(RecipeError, match=message):
        adapter.enable(config(**changed), settings)


def test_overlap_needs_a_dispatch_and_resolved_chunks():
    alone = config()
    alone.plugins = {"ep_overlap": {"chunks": [1, 2]}}
    with pytest.raises(RecipeError, match=r"switch on plugins.hierarchical_ep, too"):
        overlap.enable(alone, {"chunks": [1, 2]})
    with pytest.raises(RecipeError, match=r"auto has not been replaced by a value yet"):
        overlap.enable(config(), {"chunks": "auto"})

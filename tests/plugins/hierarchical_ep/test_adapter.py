"""What the adapters refuse; what they do is shown by training (tests/training) and by compiling (test_compiled.py)."""

import pytest
from mindformers import MindFormerConfig

from plugins.ep_overlap import adapter as overlap
from plugins.errors import RecipeError
from plugins.hierarchical_ep import adapter


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


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"moe_token_dispatcher_type": "alltoall_deredundency"}, {"mode": "global"}, "takes this place"),
        ({"n_routed_experts": 18}, {"mode": "global"}, "does not divide the 18"),
        ({}, {"mode": "auto"}, "launch/train.py settles"),
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


def test_overlap_needs_a_dispatch_and_settled_chunks():
    alone = config()
    alone.plugins = {"ep_overlap": {"chunks": [1, 2]}}
    with pytest.raises(RecipeError, match=r"switch that on too"):
        overlap.enable(alone, {"chunks": [1, 2]})
    with pytest.raises(RecipeError, match=r"launch/train.py settles"):
        overlap.enable(config(), {"chunks": "auto"})

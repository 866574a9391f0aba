from pathlib import Path

import pytest
from mindformers import MindFormerConfig

from plugins.cpu_backend import adapter
from plugins.errors import RecipeError
from tools.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config():
    return MindFormerConfig(str(ROOT / "recipes/mini/pretrain.yaml"))


def test_points_the_recipe_at_the_cpu_classes(config):
    adapter.enable(config)
    assert config.model.model_config.architectures == ["CpuTeleChat3MoeForCausalLM"]
    assert config.runner_wrapper.type == "CpuTrainOneStepCell"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context.mode", 1),
        ("runner_config.sink_mode", True),
        ("runner_wrapper.type", "MFPipelineWithLossScaleCell"),
        ("runner_wrapper.use_clip_grad", False),
        ("model.model_config.compute_dtype", "bfloat16"),
        ("model.model_config.fused_norm", True),
        ("model.model_config.hidden_act", "fusedswiglu"),
        ("model.model_config.architectures", ["LlamaForCausalLM"]),
        ("parallel.parallel_mode", 1),
        ("parallel_config.model_parallel", 2),
        ("parallel_config.expert_parallel", 4),
    ],
)
def test_names_the_key_that_cpu_cannot_execute(config, key, value):
    config.set_value(key, value)
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")):
        adapter.enable(config)


INERT = """
import sys
import mindformers
from launch import train
reached = []
mindformers.build_context = lambda config: None
mindformers.Trainer = lambda config: type("T", (), {"train": lambda self: reached.append(config)})()
recipe = train.load_recipe("recipes/mini/pretrain.yaml")
recipe["context"]["device_target"] = TARGET
recipe["plugins"] = {}  # its held-out corpus is not here in a clean checkout
train.train(recipe)
loaded = [name for name in sys.modules if name.startswith("plugins.cpu_backend.adapter")]
print(len(reached), bool(loaded), reached[0].model.model_config.architectures[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "expected"),
    [("Ascend", "1 False TeleChat3MoeForCausalLM"), ("CPU", "1 True CpuTeleChat3MoeForCausalLM")],
)
def test_the_device_target_alone_switches_it(forks, target, expected):
    code = INERT.replace("TARGET", repr(target))
    done = forks.python("-c", code)
    assert done.stdout.strip().splitlines()[-1] == expected, done.stderr[-2000:]


def test_the_recipe_file_itself_stays_stock():
    recipe = load_recipe(ROOT / "recipes/mini/pretrain.yaml")
    assert recipe["model"]["model_config"]["architectures"] == ["TeleChat3MoeForCausalLM"]
    assert recipe["runner_wrapper"]["type"] == "MFTrainOneStepCell"


@pytest.mark.parametrize(
    ("loader", "apart"),
    [
        ({"config": {"reset_attention_mask": True, "create_attention_mask": True}}, True),
        ({"config": {"reset_attention_mask": False}}, False),
        ({"type": "HFDataLoader", "handler": [{"type": "PackingHandler"}]}, True),
        ({"type": "HFDataLoader", "handler": [{"type": "AlpacaInstructDataHandler"}]}, False),
        ({"type": "HFDataLoader"}, False),
    ],
)
def test_documents_and_packed_conversations_are_kept_apart(loader, apart):
    assert adapter.documents_apart(loader) is apart


def test_the_installed_versions_still_hold_every_patched_line():
    from mindspore.communication import comm_func

    adapter.after_context()
    from mindformers.checkpoint import sharded_tensor
    from mindformers.core.callback import callback

    for patched in (callback._get_separate_loss, sharded_tensor.get_strategy_metadata):
        assert patched.tc3_patch
    before = comm_func.barrier
    adapter.before_mindformers(distributed=False)
    assert comm_func.barrier is before, "one process keeps MindSpore's own barrier"

import pytest

from tools.dryrun.diagnose import diagnose
from tools.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("kind", "message", "key"),
    [
        ("ValueError", "The sum of offset 6 is not equal to 5", "model.model_config.offset"),
        ("ValueError", "It is not supported that pipeline_scheduler is seqvpp", "parallel.pipeline_config"),
        ("ValueError", "num_attention_heads must be divisible by tp", "parallel_config.model_parallel"),
        (
            "AttributeError",
            "'TransformerConfig' object has no attribute 'qk_pos_emb_head_dim'",
            "model.model_config.position_embedding_type",
        ),
        ("RuntimeError", "the expert num 6 cannot be divided", "parallel_config.expert_parallel"),
        (
            "RuntimeError",
            'at File "mindformers/moe/token_dispatcher.py:3"',
            "model.model_config.moe_token_dispatcher_type",
        ),
    ],
)
def test_messages_lead_to_keys(kind, message, key):
    line = diagnose(kind, message)
    assert line.startswith(key) and f"{kind}: " in line


def test_call_stacks_of_the_framework_are_left_out():
    message = (
        "The strategy is wrong\n\n----------------------------------------------------\n- C++ Call Stack: (x)\nfoo.cc:1"
    )
    line = diagnose("RuntimeError", message)
    assert line == "RuntimeError: The strategy is wrong (no key of the recipe is known for this message)"


def test_an_empty_message():
    assert "(no message)" in diagnose("KeyError", "")


NULL = (
    "The pointer[context] is null.\n\n----------------------------------------------------\n"
    '- C++ Call Stack: (x)\nat File "mindformers/attention.py:3"'
)
LEVEL = "parallel.parallel_optimizer_config.optimizer_level"


@pytest.mark.parametrize(
    ("level", "stages", "named"), [("level3", 2, True), ("level3", 1, False), ("level2", 2, False)]
)
@pytest.mark.parametrize("message", [NULL, "Illegal AnfNode for evaluating, node: @embedding"])
def test_an_error_inside_mindspore_leads_to_level3_in_a_pipeline_and_else_to_no_key(level, stages, named, message):
    recipe = load_recipe("recipes/mini/pretrain_3d.yaml")
    recipe["parallel"]["parallel_optimizer_config"]["optimizer_level"] = level
    recipe["parallel_config"]["pipeline_stage"] = stages
    line = diagnose("RuntimeError", message, recipe)
    assert line.startswith(f"{LEVEL}: level3" if named else "RuntimeError: ") and "inside MindSpore" in line
    assert diagnose("RuntimeError", message).startswith("RuntimeError: ")

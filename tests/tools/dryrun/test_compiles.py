"""A refusal names the key of the recipe.

Texts of final graphs are kept where somebody asks for them, and compiled once.
"""

import pytest

from plugins.errors import ClusterError
from tests.tools.fusion.small_graphs import node, text_of
from tools.dryrun import compiles
from tools.dryrun.compiles import diagnose
from tools.dryrun.graph_text import read_graph
from tools.dryrun.plan import plan_jobs
from tools.dryrun.rank import keep_text
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


TENSOR = ("Float32", (2, 2))
TEXT = text_of([node("Exp", ["x"], [TENSOR], TENSOR)])


def test_what_is_kept_is_read_again(tmp_path):
    plain, kept = tmp_path / "a.ir", tmp_path / "deep" / "a.ir.gz"
    plain.write_text(TEXT, encoding="utf-8")
    keep_text(plain, kept)
    assert read_graph(kept) == read_graph(plain)
    assert [each.op for each in read_graph(kept).graphs["main"]] == ["Exp"]
    kept.write_bytes(kept.read_bytes()[:-20])
    with pytest.raises(ClusterError, match="cannot be read"):
        read_graph(kept)


def test_a_result_without_its_text_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = plan_jobs(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"), (0, 512))
    asked = []

    def run_jobs(jobs, told, at_once, texts=()):
        asked.append([job.rank for job in jobs])
        for file in texts:
            file.write_bytes(b"")
        return [{"rank": job.rank} for job in jobs]

    monkeypatch.setattr(compiles, "run_jobs", run_jobs)
    for job in plan.jobs:
        compiles.keep_result(job, {"rank": job.rank})
    compiles.compile_all(plan, 1, True)
    assert asked == []
    compiles.compile_all(plan, 1, True, texts=True)
    compiles.compile_all(plan, 1, True, texts=True)
    assert asked == [[0, 512]]
    compiles.text_of(plan.jobs[1]).unlink()
    compiles.compile_all(plan, 1, True, texts=True)
    assert asked == [[0, 512], [512]]

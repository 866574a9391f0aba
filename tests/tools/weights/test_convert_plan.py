"""What a conversion is about to do, only by headers: every tensor once or named, and files of a bounded size."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import CheckpointError
from plugins.hugging_face_weights.plan import EMBEDDING, HEAD
from tests.tools.accuracy.align.cases import sizes
from tools.checkpoint.tensor_files import Header
from tools.weights.convert_plan import plan_conversion
from tools.weights.hugging_face_names import hugging_face_shapes, table

MODEL = sizes()
FIRST_EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"


def headers(shapes, dtype="F32"):
    return {name: Header(dtype, tuple(shape), 4 * math.prod(shape)) for name, shape in shapes.items()}


def theirs():
    return headers(hugging_face_shapes(MODEL))


def ours():
    return headers({entry.mindformers: entry.shape for entry in table(MODEL)})


@settings(max_examples=30)
@given(st.integers(1, 200_000), st.sampled_from(["Hugging Face", "MindFormers"]))
def test_every_weight_is_in_one_file_and_files_keep_their_limit_where_they_can(limit, to):
    plan = plan_conversion(theirs() if to == "MindFormers" else ours(), MODEL, to, None, limit)
    assert [entry.mindformers for shard in plan.shards for entry in shard.entries] == list(ours())
    assert plan.bytes == sum(4 * math.prod(entry.shape) for entry in table(MODEL))
    assert all(shard.bytes <= limit or len(shard.entries) == 1 for shard in plan.shards)
    assert len({shard.file for shard in plan.shards}) == len(plan.shards)
    assert plan.tensors == len(theirs() if to == "Hugging Face" else ours())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.pop(FIRST_EXPERT), f"1 missing: {FIRST_EXPERT}"),
        (lambda found: found.update({"a.weight": Header("F32", (1,), 4)}), "1 not of this model: a.weight"),
        (
            lambda found: found.update({"model.norm.weight": Header("F32", (31,), 4)}),
            "1 of another shape: model.norm.weight [31] instead of [32]",
        ),
        (
            lambda found: found.update({"model.norm.weight": Header("F8_E4M3", (32,), 32)}),
            "1 of a type that is not converted: model.norm.weight (F8_E4M3)",
        ),
        (
            lambda found: [found.pop(name) for name in list(found) if ".experts." in name],
            f"48 missing: {FIRST_EXPERT.replace('down', 'gate')}",
        ),
    ],
)
def test_what_does_not_fit_is_listed(change, said):
    found = theirs()
    change(found)
    with pytest.raises(CheckpointError) as error:
        plan_conversion(found, MODEL, "MindFormers", None, 1000)
    assert said in str(error.value)


def test_all_that_is_wrong_is_said_at_once():
    found = theirs()
    del found[HEAD]
    found["b.weight"] = Header("F32", (1,), 4)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight; 1 not of this model: b.weight"):
        plan_conversion(found, MODEL, "MindFormers", None, 1000)


def test_the_state_of_a_run_is_left_out_and_counted():
    found = {
        **ours(),
        "adam_m.output_layer.weight": Header("F32", (64, 32), 8192),
        "global_step": Header("I32", (1,), 4),
    }
    found["decoder.layers.1.mlp.router.expert_load"] = Header("F32", (8,), 32)
    plan = plan_conversion(found, MODEL, "Hugging Face", None, 1000)
    assert plan.left_out == {"of the optimizer's state": 1, "counters of the run": 2}


def test_a_weight_that_the_model_lacks_is_never_left_out():
    with pytest.raises(CheckpointError, match=r"1 not of this model: decoder.layers.9.mlp.linear_fc1.weight"):
        plan_conversion(
            {**ours(), "decoder.layers.9.mlp.linear_fc1.weight": Header("F32", (2, 2), 16)},
            MODEL,
            "Hugging Face",
            None,
            1000,
        )


def test_copies_in_the_mtp_layer_are_known_and_buffers_left_out():
    found = theirs()
    found["model.layers.2.embed_tokens.weight"] = found[EMBEDDING]
    found["model.layers.2.shared_head.head.weight"] = found[HEAD]
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = Header("F32", (4,), 16)
    plan = plan_conversion(found, MODEL, "MindFormers", None, 1000)
    assert plan.copies == {
        "model.layers.2.embed_tokens.weight": EMBEDDING,
        "model.layers.2.shared_head.head.weight": HEAD,
    }
    assert plan.left_out == {"rotary frequencies, which are computed": 1}


def test_a_head_that_is_tied_to_the_embedding():
    found = theirs()
    del found[HEAD]
    assert plan_conversion(found, MODEL, "MindFormers", None, 1000, tied=True).stands_for == {HEAD: EMBEDDING}
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight"):
        plan_conversion(found, MODEL, "MindFormers", None, 1000, tied=False)


def test_parts_of_several_types_want_one_to_be_chosen():
    found = theirs()
    found[FIRST_EXPERT] = replace(found[FIRST_EXPERT], dtype="BF16")
    with pytest.raises(CheckpointError, match=r"several types .BF16, F32.; choose one type with --dtype"):
        plan_conversion(found, MODEL, "MindFormers", None, 1000)
    assert plan_conversion(found, MODEL, "MindFormers", "BF16", 1 << 30).dtype == "BF16"

"""Recipes of public models and of this repository in drawn layouts, as a newcomer writes them: what `tc3 check` passes,
the commands behind it take, and so do the recipe's minis.

The sizes of the public models are assumed (written from memory); no test depends on their truth.
"""

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tests.tools.check.mutations import MODEL, PARALLEL
from tests.tools.check.test_rules import SEMI, change
from tools.check.check import check_recipe
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.model import all_stages
from tools.layout.resolve import resolve
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import derive_mini
from tools.recipe.mini_ascend import ascend_minis

ROOT = Path(__file__).resolve().parents[3]
BASES = ("run", "ascend", "telechat3_moe", "megatron_data", "adamw")
HEADS = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_head_dim": 128, "qk_rope_head_dim": 64,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
SOFTMAX = {"scoring_func": "softmax", "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}


def sizes(layers, hidden, heads, groups, experts, top, width, shared, ffn, dense, vocab, **more):
    """A `model_config` of experts; `groups`: heads of keys and values, or None for multi-latent attention."""
    attention = HEADS if groups is None else {"multi_latent_attention": False, "head_dim": 128}
    return {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab},
        **{"num_key_value_heads": groups or heads, "n_routed_experts": experts, "num_experts_per_tok": top},
        **{"moe_intermediate_size": width, "n_shared_experts": shared, "intermediate_size": ffn},
        **({"moe_shared_expert_intermediate_size": width * shared} if shared else {}),
        **{"first_k_dense_replace": dense, **attention, **more},
    }


PUBLIC = {
    "moonlight_16b": sizes(27, 2048, 16, None, 64, 6, 1408, 2, 11264, 1, 163840, q_lora_rank=None),
    "deepseek_v2_lite": sizes(27, 2048, 16, None, 64, 6, 1408, 2, 10944, 1, 102400, q_lora_rank=None, **SOFTMAX),
    "deepseek_v3": sizes(61, 7168, 128, None, 256, 8, 2048, 1, 18432, 3, 129280, n_group=8, topk_group=4),
    "kimi_k2": sizes(61, 7168, 64, None, 384, 8, 2048, 1, 18432, 1, 163840, q_lora_rank=1536),
    "qwen3_30b": sizes(48, 2048, 32, 4, 128, 8, 768, 0, 6144, 0, 151936, **SOFTMAX),
    "mixtral_8x7b": sizes(32, 4096, 32, 8, 8, 2, 14336, 0, 14336, 0, 32000, **SOFTMAX),
    "glm_4_5_air": sizes(46, 4096, 128, 8, 128, 8, 1408, 1, 10944, 1, 151552, attention_bias=True),
    "olmoe_1b_7b": sizes(16, 2048, 16, 16, 64, 8, 1024, 0, 1024, 0, 50304, **SOFTMAX),
}
OWN = {
    "telechat3_105b/pretrain_4k": (45, 192), "telechat3_105b/pretrain_4k_report": (45, 192),
    "telechat3_105b/pretrain_4k_muon": (45, 192), "telechat3_1119b/pretrain_4k_ep_overlap": (61, 256),
    "telechat3_36b/pretrain_8k": (64, 0), "telechat2_35b/pretrain_8k": (64, 0), "xing4_29b/pretrain_4k": (40, 64),
}  # fmt: skip
OPTIMIZER_SHARDS = [
    {},
    {"optimizer_level": "level1"},
    {"optimizer_level": "level2"},
    {"optimizer_weight_shard_size": 2},
]


@st.composite
def recipes(draw):
    """(name, a recipe as its file's content): a model on drawn degrees, with a schedule and plugins."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    name = one_of(*PUBLIC, *OWN)
    model = dict(PUBLIC.get(name, {}))
    layers, experts = (model["num_hidden_layers"], model["n_routed_experts"]) if model else OWN[name]
    dp, tp, pp, cp = one_of(1, 2, 4, 8, 16), one_of(1, 2, 4, 8), one_of(1, 2, 3, 4, 8), one_of(1, 1, 2)
    chunks = one_of(1, 1, 2, 3) if pp > 1 else 1
    offset = [[int(stage + pp * chunk < layers % (pp * chunks)) for stage in range(pp)] for chunk in range(chunks)]
    model.update(offset=0 if pp == 1 else offset if chunks > 1 else offset[0], pp_interleave_num=chunks)
    ep = one_of(*(ep for ep in (1, 2, 4, 8, 16, 32) if experts and experts % ep == dp * tp % ep == ep % tp == 0), tp)
    schedule = "1f1b" if pp == 1 else one_of("1f1b", *(("zero_bubble_v", "seqsmartvpp") if chunks > 1 else ("1f1b",)))
    plugins = {}
    if experts:
        model["num_nextn_predict_layers"] = one_of(0, 1)
        for plugin, values in (
            ("hierarchical_ep", {"mode": one_of("auto", "global", "deduplicated")}),
            ("ep_overlap", {"chunks": one_of("auto", [1, 2], [2, 1])}),
            *(("expert_balance", {}), ("grouped_gradient", {}), ("hyper_connections", {"streams": 2})),
        ):
            if one_of(True, False, False, False):
                plugins[plugin] = values
    shards = one_of(*OPTIMIZER_SHARDS)
    recipe = {
        "base_config": [str(ROOT / "recipes" / f"{each}.yaml") for each in _bases(name, model)],
        "output_dir": "./output/drawn",
        "lr_schedule": {"learning_rate": 2e-4} if name in OWN else _SCHEDULE,
        "model": {"model_config": model},
        "runner_config": {"batch_size": one_of(1, 2)},
        "parallel_config": {
            **{"data_parallel": dp, "model_parallel": tp, "pipeline_stage": pp, "context_parallel": cp},
            **{"expert_parallel": ep if experts else 1, "use_seq_parallel": tp > 1},
            "micro_batch_num": 1 if pp == 1 else pp * one_of(1, 2, 3),
        },
        "parallel": {
            "enable_parallel_optimizer": one_of(True, True, False),
            "dataset_strategy": [[dp, 1]] * 4,
            "pipeline_config": {"pipeline_interleave": chunks > 1, "pipeline_scheduler": schedule},
            **({"parallel_optimizer_config": shards} if shards else {}),
        },
        "plugins": plugins,
    }
    if name in PUBLIC:
        recipe["model"]["model_config"].update(seq_length=4096)
        recipe["train_dataset"] = {"data_loader": {"sizes": [1 << 20, 0, 0], "config": _DATA}}
    return name, recipe


_SCHEDULE = {"type": "ConstantWarmUpLR", "learning_rate": 2e-4, "warmup_steps": 2000, "total_steps": 75000}
_DATA = {"seq_length": 4096, "data_path": ["1", "./data/pretrain"]}


def _bases(name, model):
    callbacks = "moe" if model.get("moe_router_enable_expert_bias", True) else "dense"
    return [name] if name in OWN else [f"base/{each}" for each in (*BASES, f"callbacks_{callbacks}")]


def errors_of(flat, folder):
    """Return the errors that `tc3 check` finds in a recipe that is given as a mapping."""
    file = Path(folder) / "flat.yaml"
    dump_recipe(flat, file)
    return [str(error) for error in check_recipe(load_recipe(file)).errors]


@pytest.mark.slow
@given(recipes())
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])  # an example is small as it is drawn
def test_what_check_passes_is_predicted_and_has_sound_minis(named):
    """A refusal by `tc3 check` names a key; after none of them nothing else refuses the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(named[1]), encoding="utf-8")
        report = check_recipe(file)
        if report.errors:
            assert all(error.key and error.wrong for error in report.errors)
            return
        recipe = load_recipe(file)
        assert all(memory.peak > 0 for memory in all_stages(from_recipe(resolve(recipe))))
        minis = {"one": derive_mini(recipe, "corpus"), **ascend_minis(recipe, "corpus", 10, (2, 8))}
        for workers in (2, 4):
            try:
                minis[f"{workers} workers"] = derive_mini(recipe, "corpus", workers=workers)
            except RecipeError as error:
                assert "needs a parallel degree above 1" in str(error)  # no degree of it can be halved
        assert {size: found for size, flat in minis.items() if (found := errors_of(flat, folder))} == {}


GROUPED = [((*MODEL, "multi_latent_attention"), False)]  # the sizes of latent attention stay in the configuration
YARN = [((*MODEL, "position_embedding_type"), "yarn"), ((*MODEL, "rotary_scaling_factor"), 2)]
SMART = {"pipeline_interleave": True, "pipeline_scheduler": "seqsmartvpp"}
THREE_STAGES = [((*PARALLEL, "pipeline_stage"), 3), ((*MODEL, "pp_interleave_num"), 2)]
THREE_STAGES.append(((*MODEL, "offset"), [[2, 1, 1], [0, 0, 0]]))


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([*THREE_STAGES, (("parallel", "pipeline_config"), SMART)], "pipeline_scheduler", "even number of stages, not"),
        ([*GROUPED, ((*MODEL, "num_key_value_heads"), 1)], "model_parallel", "1 key-value heads"),
        ([*GROUPED, ((*MODEL, "num_key_value_heads"), 3)], "num_key_value_heads", "divided into 3 groups"),
        (
            [*GROUPED, ((*MODEL, "head_dim"), 48), *YARN],
            "position_embedding_type",
            "rotate 16 of the 48 numbers of a head",
        ),
    ],
)
def test_what_such_layouts_showed_is_refused_by_its_key(changes, key, words):
    found = [each for each in check_recipe(change(SEMI, *changes)).errors if each.key.endswith(f".{key}")]
    assert any(words in each.wrong for each in found)

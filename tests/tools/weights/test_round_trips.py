"""Drawn models in drawn layouts: public weights become a run's, go through other layouts, are merged, and come back."""

import copy
import json
import tempfile
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from plugins.lora.plan import Settings, adapters_of, is_adapter
from plugins.sealed_checkpoint.plan import fault
from tests.tools.weights.drawn import ONE
from tests.tools.weights.test_reshard import slices_of
from tools.accuracy.reference.start import initial_weights
from tools.checkpoint.stored import moments_of, read_whole
from tools.recipe.dump import dump_recipe
from tools.recipe.load import load_recipe
from tools.recipe.mini import load_mini
from tools.weights.average import average
from tools.weights.convert import convert
from tools.weights.convert_plan import model_of, prepare
from tools.weights.hugging_face_names import to_hugging_face, to_mindformers
from tools.weights.merge import merge, plan_merge
from tools.weights.reshard import folder_in, reshard
from tools.weights.reshard_plan import plan_recipes, plan_stored
from tools.weights.reshard_target import target_of
from tools.weights.source import open_source

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
LATENT = {
    "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_head_dim": 8, "qk_rope_head_dim": 4, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
BASES = {
    "moe": load_recipe(ONE),
    "dense": load_mini("recipes/telechat3_36b/pretrain_8k.yaml"),
    "telechat2": load_mini("recipes/telechat2_35b/pretrain_8k.yaml"),
}
MUON = dict(load_recipe("recipes/mini/pretrain_muon.yaml")["optimizer"])
SHOWN = ("num_hidden_layers", "n_routed_experts", "n_shared_experts", "q_lora_rank", "first_k_dense_replace", "offset",
         "num_nextn_predict_layers", "num_key_value_heads", "pp_interleave_num", "model_type")  # fmt: skip
STATE = ("adam_", "muon_", "global_step")  # how names in the optimizer's file begin


class Drawn(dict):
    """A recipe, of which Hypothesis prints only what was drawn."""

    def __repr__(self):
        model = {key: value for key, value in self["model"]["model_config"].items() if key in SHOWN}
        kind = self["optimizer"]["type"]
        return repr((model, kind, self["parallel_config"], self["parallel"], self["plugins"]))


@st.composite
def models(draw, more):
    """A recipe of a small model on one device, with `more` than weights that AdamW trains."""
    family = draw(
        st.sampled_from(["moe"] if more in ("streams", "moved", "muon") else ["moe", "moe", "dense", "telechat2"])
    )
    recipe = Drawn(copy.deepcopy(dict(BASES[family])))
    recipe["plugins"] = plugins = dict(recipe.get("plugins") or {})
    model = recipe["model"]["model_config"]
    layers = draw(st.integers(1, 5))
    model.update(SIZES, num_hidden_layers=layers)
    if family == "moe":
        shared = draw(st.integers(1, 2))
        model.update(LATENT, n_routed_experts=draw(st.sampled_from([4, 8])), num_experts_per_tok=2)
        model.update(n_shared_experts=shared, moe_shared_expert_intermediate_size=16 * shared, moe_intermediate_size=16)
        model.update(q_lora_rank=draw(st.sampled_from([None, 16])), num_nextn_predict_layers=draw(st.integers(0, 1)))
        model.update(first_k_dense_replace=draw(st.integers(0, layers - 1)))
        plugins.update({"hyper_connections": {"streams": draw(st.integers(2, 4))}} if more == "streams" else {})
        plugins.update({"expert_balance": {"every": 2}} if more == "moved" else {})
    else:
        model.update(num_key_value_heads=draw(st.sampled_from([1, 2, 4])), head_dim=8)
    if more == "muon":
        recipe["optimizer"] = dict(MUON)
    if more == "lora":
        targets = draw(st.sampled_from([["self_attention.*"], ["self_attention.linear_proj"], ["*"]]))
        plugins["lora"] = {"rank": 4, "alpha": 6, "targets": targets}
    return recipe


@st.composite
def layouts(draw, recipe):
    """The same model in another layout."""
    recipe = Drawn(copy.deepcopy(dict(recipe)))
    model = recipe["model"]["model_config"]
    layers = model["num_hidden_layers"]
    pp = draw(st.sampled_from([count for count in (1, 2, 3) if count <= layers]))
    chunks = draw(st.integers(1, 1 + (pp > 1 and layers >= 2 * pp)))
    tp = draw(st.sampled_from([count for count in (1, 2) if model.get("num_key_value_heads", 4) % count == 0]))
    dp, cp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if dp * tp * cp % n == 0])) if "n_routed_experts" in model else 1
    recipe["parallel_config"] |= {
        "data_parallel": dp, "model_parallel": tp, "context_parallel": cp, "expert_parallel": ep, "pipeline_stage": pp,
        "micro_batch_num": 2 * pp,
    }  # fmt: skip
    recipe["use_parallel"] = True
    recipe["parallel"] |= {
        "parallel_mode": 1,
        "enable_parallel_optimizer": draw(st.booleans()),
        "parallel_optimizer_config": {
            "parallel_optimizer_threshold": draw(st.sampled_from([0, 4])),  # KB
            "optimizer_weight_shard_size": draw(st.sampled_from([-1, 2])),
        },
        "pipeline_config": {"pipeline_interleave": chunks > 1},
    }
    counts = np.ones((chunks, pp), int)
    for place in draw(st.lists(st.integers(0, counts.size - 1), min_size=layers - counts.size, max_size=layers)):
        counts.flat[place] += counts.sum() < layers
    offset = (counts - layers // counts.size).tolist()
    model |= {"pp_interleave_num": chunks, "offset": 0 if pp == 1 else offset if chunks > 1 else offset[0]}
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "lora", "streams", "muon", "moved"])
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])  # to shrink what has failed would take minutes
@given(data=st.data())
def test_public_weights_come_back_from_any_layout(more, data):
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):  # no test of the disk
        round_trip(data, more, Path(folder))


def round_trip(data, more, folder):
    recipe = written(data.draw(models(more)), folder / "recipe.yaml")
    sizes, limit = model_of(recipe), data.draw(st.sampled_from([10_000, 10**9]))
    kind = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16]))
    theirs = {name: array.astype(kind) for name, array in initial_weights(sizes, 3).items()}
    (folder / "hf").mkdir()
    save_file(theirs, folder / "hf" / "model.safetensors", {"format": "pt"})
    weights = to_mindformers(theirs, sizes)
    same(read_whole(converted(folder / "hf", folder / "ms", recipe, limit)).arrays, weights)
    run, whole = folder / "run" / "checkpoint" / "iteration_00000003", as_trained(recipe, weights, sizes)
    save(run, whole)
    for number in range(data.draw(st.integers(1, 3))):
        new = written(data.draw(layouts(recipe)), folder / f"{number}.yaml")
        source, target = open_source(run), folder / f"to_{number}"
        plan = plan_stored(source, new).plan
        reshard(source, target, plan)
        run = folder_in(target, source)
        assert fault(run) is None
        each_number_is_in_one_file(run, new, whole)
        same(read_whole(run).arrays, whole)
        planned = {move.name: move.new for move in plan_recipes(recipe, new).plan.moves}
        found = {move.name: move.new for move in plan.moves if move.name != "global_step"}
        assert {name: lying for name, lying in found.items() if not name.endswith("placement")} == planned
    held = {name: array for name, array in whole.items() if not name.startswith(STATE)}
    lora = recipe["plugins"].get("lora")
    if not lora:  # adapters have no average
        average([open_source(run)] * 2, folder / "mean")
        same(read_whole(folder / "mean").arrays, held)
    else:
        source = open_source(run)
        merge(source, folder / "merged", plan_merge(source, Path(recipe.source), limit))
        run, weights = folder / "merged", merged(held, Settings.read(lora))
        same(read_whole(run).arrays, weights)
    back = converted(run, folder / "back", recipe, limit)
    same(read_files(back), to_hugging_face(weights, sizes))


def written(recipe, path):
    dump_recipe(dict(recipe), path)
    return load_recipe(path)


def converted(source, target, recipe, limit):
    opened = open_source(source)
    conversion = prepare(opened, Path(recipe.source), None, limit)
    convert(opened, target, conversion.plan, conversion.sizes)
    return target


def as_trained(recipe, weights, sizes):
    """Return what a run with these weights would save: adapters, moments and a counter; experts are in the order of
    slots.
    """
    rng = np.random.default_rng(5)
    trained = {name: array.shape for name, array in weights.items() if not name.endswith("expert_bias")}
    adapters = {}
    if lora := recipe["plugins"].get("lora"):
        trained = adapters_of(trained, Settings.read(lora))
        adapters = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in trained.items()}
    optimizer = recipe["optimizer"]
    moments = {each: shape for name, shape in trained.items() for each in moments_of(optimizer, name, len(shape))}
    found = weights | adapters | {name: rng.random(shape, np.float32) for name, shape in moments.items()}
    if recipe["plugins"].get("expert_balance"):
        slots = {name.rpartition(".")[0]: rng.permutation(sizes.hf["n_routed_experts"]).astype(np.int32)
                 for name in weights if ".experts.weight1" in name}  # fmt: skip
        found = {name: in_slots(name, array, slots) for name, array in found.items()}
        found |= {f"{module}.placement": order for module, order in slots.items()}
    return found | {"global_step": np.array([3], np.int32)}


def in_slots(name, array, slots):
    for module, order in slots.items():
        if f".{module}.weight" in f".{name}":
            logical, moved = array.reshape(len(order), -1), np.empty_like(array).reshape(len(order), -1)
            for expert, slot in enumerate(order):
                moved[slot] = logical[expert]
            return moved.reshape(array.shape)
    return array


def save(folder, whole):
    """The files of one process."""
    folder.mkdir(parents=True)
    for kind in ("model", "opt"):
        own = {name: array for name, array in whole.items() if name.startswith(STATE) == (kind == "opt")}
        save_file(own, folder / f"mini-{kind}-0000000-0000001.safetensors", {"format": "ms"})
    (folder / "common.json").write_text(json.dumps({"step_num": 3, "global_step": 3, "global_batch_size": 4}))


def each_number_is_in_one_file(folder, recipe, whole):
    """Each slice, as NumPy cuts it, is in one file."""
    target, found = target_of(recipe), {}
    for file in folder.glob("*.safetensors"):
        for name, array in load_file(file).items():
            found.setdefault(name, []).append(array.tobytes())
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        cuts = target.place(name, array.shape).lying.cuts
        assert sorted(found[name]) == sorted(part.tobytes() for part in slices_of(array, cuts)), name


def merged(weights, lora):
    """W + scale B A of each weight that has adapters; the others as they are."""
    found = {name: array for name, array in weights.items() if not is_adapter(name)}
    for name in [name for name in weights if name.endswith("lora_A.weight")]:
        base = name.replace("lora_A.", "")
        product = weights[name.replace("_A.", "_B.")].astype(np.float64) @ weights[name].astype(np.float64)
        array = found[base]
        found[base] = rounded_once(array.astype(np.float64) + lora.alpha / lora.rank * product, array.dtype)
    return found


def rounded_once(numbers, dtype):
    """NumPy goes from float64 to bfloat16, which has eight bits, through float32, and so rounds twice."""
    if dtype == ml_dtypes.bfloat16:
        fraction, exponent = np.frexp(numbers)
        numbers = np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8)
    return numbers.astype(dtype)


def read_files(folder):
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def same(found, expected):
    """Assert that both have the same names, types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # by its name: a process that has MindSpore imported knows two types bfloat16
        assert (found[name].dtype.name, found[name].shape) == (array.dtype.name, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name

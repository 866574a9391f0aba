"""A checkpoint of one drawn layout, written in another one: every number is where a loop over ranks puts it.

The model, both layouts and the optimizer are drawn; no number of the checkpoint is like any other. The oracle places
every slice rank by rank from Megatron's rules, and knows nothing of `tools.estimate` and of MindSpore's matrices.
"""

import copy
import json
import re
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from launch.resume.model import check_model
from plugins.errors import RecipeError
from plugins.lora.plan import Settings, adapters_of
from plugins.sealed_checkpoint.plan import fault, made, write_seal
from tests.tools.checkpoint.saved import Saved
from tests.training.runs import HERE
from tools.checkpoint.stored import open_stored
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.hugging_face_names import table
from tools.weights.hugging_face_sizes import sizes_of
from tools.weights.reshard import folder_in, reshard
from tools.weights.reshard_plan import plan_recipes, plan_stored
from tools.weights.reshard_target import target_of
from tools.weights.source import open_source

BASE = load_recipe(HERE / "sharded.yaml")
_ROWS = re.compile(r"word_embeddings|output_layer|linear_(q|q_up|kv_up|fc1)(_proj)?\.weight")
# Muon has these whole on each rank of data parallelism
_WHOLE = re.compile(r"linear_(q|q_up|q_down|kv_up|kv_down)_proj|eh_proj")
_COLUMNS = re.compile(r"linear_(proj|fc2)\.weight")
MUON = dict(load_recipe("recipes/mini/pretrain_muon.yaml")["optimizer"])
OPTIMIZERS = {  # settings, and what is kept of each weight
    "AdamW": (BASE["optimizer"], ["adam_m", "adam_v"]),
    "fused": (
        BASE["optimizer"] | {"use_fused": True, "amsgrad": True},
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    ),
    "PMA": (
        BASE["optimizer"] | {"type": "PmaAdamW", "fused_algo": "sma"},
        ["adam_m", "adam_v", "pma_weight_sma"],
    ),
    "Muon": (MUON, ["adam_m", "adam_v"]),
}


@st.composite
def models(draw):
    """A recipe of a small model on one process, and the kind of its optimizer."""
    recipe = Recipe(copy.deepcopy(dict(BASE)))
    kind = draw(st.sampled_from(sorted(OPTIMIZERS)))
    recipe["optimizer"] = dict(OPTIMIZERS[kind][0])
    layers = draw(st.integers(2, 5))
    dense = draw(st.integers(0, layers - 1))
    recipe["model"]["model_config"] |= {
        "num_hidden_layers": layers, "first_k_dense_replace": dense,
        "num_nextn_predict_layers": draw(st.integers(0, 1)),
        "hidden_size": 12, "vocab_size": 24, "intermediate_size": 20, "num_attention_heads": 4, "offset": 0,
        "q_lora_rank": draw(st.sampled_from([None, 10])), "kv_lora_rank": 6,
        "n_routed_experts": draw(st.sampled_from([4, 12])), "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
    }  # fmt: skip
    if draw(st.booleans()) and kind != "PMA":
        recipe["plugins"]["expert_balance"] = {"every": 2}
    if kind in ("AdamW", "fused"):
        targets = draw(st.sampled_from([["self_attention.*"], ["mlp.*"] if dense else ["*"], ["*"]]))
        more = [{}, {"lora": {"rank": 4, "alpha": 6, "targets": targets}}, {"hyper_connections": {"streams": 2}}]
        recipe["plugins"] |= draw(st.sampled_from(more))
    return recipe, kind


@st.composite
def layouts(draw, layers):
    """(degrees, layers of each chunk and stage, whether the second chunk runs back)."""
    degree = {name: draw(st.sampled_from([1, 2, 3])) for name in ("dp", "pp")}
    degree |= {name: draw(st.sampled_from([1, 1, 2])) for name in ("tp", "cp")}
    ranks = degree["dp"] * degree["tp"] * degree["cp"]
    degree["ep"] = draw(st.sampled_from([each for each in range(1, ranks + 1) if ranks % each == 0]))
    schedule = draw(st.sampled_from(["1f1b", "interleaved_1f1b", "zero_bubble_v"])) if degree["pp"] == 2 else "1f1b"
    chunks = 1 if schedule == "1f1b" else 2
    # MindFormers divides evenly, and an offset says by how many layers a chunk differs; none is empty here
    places = chunks * degree["pp"]
    assume(places <= layers)
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=places - 1, max_size=places - 1)))
    counts = np.diff([0, *cuts, layers])
    rows = [counts[degree["pp"] * i : degree["pp"] * (i + 1)].tolist() for i in range(chunks)]
    if schedule == "zero_bubble_v":
        rows[1].reverse()  # the model goes through its second chunk from the last stage to the first
    shard = {"shard": draw(st.booleans()), "size": draw(st.sampled_from([-1, 2])), "least": draw(st.integers(0, 2))}
    return degree | shard | {"schedule": schedule}, rows


def laid_out(recipe, degree, rows):
    """The recipe in a layout."""
    recipe = Recipe(copy.deepcopy(dict(recipe)))
    base = recipe["model"]["model_config"]["num_hidden_layers"] // (len(rows) * degree["pp"])
    offset = [[count - base for count in row] for row in rows]
    recipe["model"]["model_config"] |= {
        "offset": offset if len(rows) > 1 else offset[0],
        "pp_interleave_num": len(rows),
    }
    names = {"dp": "data_parallel", "tp": "model_parallel", "pp": "pipeline_stage", "cp": "context_parallel"}
    names |= {"ep": "expert_parallel"}
    recipe["parallel_config"] |= {name: degree[key] for key, name in names.items()}
    recipe["parallel_config"]["micro_batch_num"] = 4
    recipe["parallel"] |= {
        "enable_parallel_optimizer": degree["shard"],
        "parallel_optimizer_config": {
            "parallel_optimizer_threshold": degree["least"],
            "optimizer_weight_shard_size": degree["size"],
        },
        "pipeline_config": {
            "pipeline_interleave": len(rows) > 1,
            "pipeline_scheduler": degree["schedule"].replace("interleaved_", ""),
        },
    }
    return recipe


def stage_of(name, degree, rows):
    """Which stage has a tensor, counted layer by layer."""
    back, last = degree["schedule"] == "zero_bubble_v", degree["pp"] - 1
    if name.startswith("embedding"):
        return 0
    if not name.startswith("decoder.layers."):
        return 0 if back else last
    number, layer = int(name.split(".")[2]), 0
    for chunk, row in enumerate(rows):
        stages = range(degree["pp"])
        for stage in reversed(stages) if back and chunk else stages:
            for _ in range(row[stage]):
                if layer == number:
                    return stage
                layer += 1
    raise AssertionError(name)


def part_of(name, shape, rank, degree, muon):
    """(rows from, to, columns from, to) that a rank of a stage has of a weight, and so of each of its states."""
    tp, cp, dp, ep = (degree[key] for key in ("tp", "cp", "dp", "ep"))
    copy_of, own = rank // tp, rank % tp  # tensor-parallel ranks are neighbours
    copies, parts = dp * cp, tp
    base = name.replace(".lora_A", "").replace(".lora_B", "")
    by = "rows" if _ROWS.search(base) else "columns" if _COLUMNS.search(base) else ""
    if ".shared_experts." in name or by == {".lora_A": "rows", ".lora_B": "columns"}.get(name[len(name) - 14 : -7]):
        by = ""  # MindFormers keeps shared experts whole; A has the inputs of a layer, and B its outputs
    if ".experts." in name:
        by, copy_of, own, copies, parts = "rows", rank // ep, rank % ep, dp * cp * tp // ep, ep
    if not by:
        copy_of, own, copies, parts = rank, 0, dp * cp * tp, 1
    length, width = shape[0], shape[1] if len(shape) > 1 else 1
    low, high, left, right = 0, length, 0, width
    if by == "rows":
        low, high = own * length // parts, (own + 1) * length // parts
    elif by == "columns":
        left, right = own * width // parts, (own + 1) * width // parts
    together = copies if degree["size"] < 0 else degree["size"] if copies % degree["size"] == 0 else 1
    if name.endswith(("hc_base", "hc_scale")) or (muon and _WHOLE.search(name)):
        together = 1
    if 4 * (high - low) * (right - left) < 1024 * degree["least"] or (high - low) % together:
        together = 1
    if degree["shard"]:
        size, place = (high - low) // together, copy_of % together
        low, high = low + place * size, low + (place + 1) * size
    return low, high, left, right


def numbers_of(recipe, kind):
    """Name -> (array, kind of file, the weight like which it lies); no two numbers are alike."""
    count, found = 1, {}

    def add(name, shape, file, like):
        nonlocal count
        size = int(np.prod(shape))
        found[name] = (np.arange(count, count + size, dtype=np.uint32).view(np.float32).reshape(shape), file, like)
        count += size

    built = convert(View(recipe), load_schema()).fields
    shapes = {each.mindformers: each.shape for each in table(sizes_of(built, bias_updated=False))}
    adapters = adapters_of(shapes, Settings.read(recipe["plugins"].get("lora"))) if "lora" in recipe["plugins"] else {}
    for name, shape in {**shapes, **adapters}.items():
        trained = name in adapters if adapters else not name.endswith("expert_bias")
        add(name, shape, "model", None if name.endswith("expert_bias") else name)
        matrix = len(shape) > 1 and not name.startswith(("embedding", "output_layer"))
        for state in (["muon_m"] if kind == "Muon" and matrix else OPTIMIZERS[kind][1]) if trained else ():
            add(f"{state}.{name}", shape, "opt", name)
        if name.endswith(".experts.weight1") and recipe["plugins"].get("expert_balance"):
            slots = np.random.default_rng(count).permutation(recipe["model"]["model_config"]["n_routed_experts"])
            found[name.replace("weight1", "placement")] = slots.astype(np.int32), "model", None
    return found


def holders(name, shape, like, degree, rows, muon):
    """(rows from, to, columns from, to) -> the ranks that have this part."""
    each, stage = degree["dp"] * degree["tp"] * degree["cp"], stage_of(name, degree, rows)
    found = {}
    for rank in range(each):
        whole = (0, shape[0], 0, shape[1] if len(shape) > 1 else 1)
        part = part_of(like, shape, rank, degree, muon) if like else whole
        found.setdefault(part, []).append(stage * each + rank)
    return found


def save(folder, numbers, degree, rows, muon):
    """What a run of this layout saves: the counter is listed by one process only."""
    ranks = degree["dp"] * degree["tp"] * degree["cp"] * degree["pp"]
    checkpoint = Saved(folder, ranks)
    for name, (array, kind, like) in numbers.items():
        parts = holders(like or name, array.shape, like, degree, rows, muon)
        cuts = [len({part[0] for part in parts}), len({part[2] for part in parts})][: array.ndim]
        checkpoint.put(name, array, cuts, [parts[part] for part in sorted(parts)], kind)
    for rank in range(ranks):
        checkpoint.held.setdefault(checkpoint.file("model", rank), {"nothing.of_its_own": np.zeros(1, np.float32)})
        checkpoint.held.setdefault(checkpoint.file("opt", rank), {})["global_step"] = np.array([3], np.int32)
    checkpoint.write()
    (folder / "common.json").write_text(json.dumps({"step_num": 3, "global_step": 3, "global_batch_size": 4}))
    for rank in range(ranks):
        write_seal(folder, rank, ranks, 3, made={"attempt": "0001-x", "skipped": [[4, 8]]})


def compare(folder, numbers, degree, rows, muon):
    """Hold the files of a written checkpoint against the oracle, slice by slice."""
    stored = open_stored(folder)
    listed = json.loads((folder / "metadata.json").read_text())
    assert stored.tensors.keys() == numbers.keys() and "global_step" in stored.unlisted
    for name, (array, _, like) in numbers.items():
        parts = holders(like or name, array.shape, like, degree, rows, muon)
        for place, part in enumerate(sorted(parts)):
            (entry,) = listed["storage_data"][str((name, (place,)))]
            assert sorted(entry["rank_group"]) == parts[part], (name, place)
            spans = (slice(*part[:2]), slice(*part[2:]))[: array.ndim]
            found = stored.read_from(entry["file_name"], name)
            assert found.tobytes() == np.ascontiguousarray(array[spans]).tobytes(), (name, place)
        assert len(listed["state_dict_metadata"][name]["chunk"]) == len(parts), name
    files = stored.unlisted["global_step"]
    assert len(files) == degree["dp"] * degree["tp"] * degree["cp"] * degree["pp"]
    assert all(stored.read_from(file, "global_step").tolist() == [3] for file in files.values())


@st.composite
def transitions(draw):
    recipe, kind = draw(models())
    layers = recipe["model"]["model_config"]["num_hidden_layers"]
    return recipe, kind, draw(layouts(layers)), draw(layouts(layers))


def transition(case):
    recipe, kind, old, new = case
    before, after = laid_out(recipe, *old), laid_out(recipe, *new)
    numbers = numbers_of(recipe, kind)
    assume(recipe["model"]["model_config"]["n_routed_experts"] % old[0]["ep"] == 0)
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):
        folder = Path(name) / "run" / "checkpoint" / "iteration_00000003"
        save(folder, numbers, *old, kind == "Muon")
        try:
            check_model(after, folder)
            planned = plan_stored(open_source(folder), after)
        except RecipeError:
            assert recipe["model"]["model_config"]["n_routed_experts"] % new[0]["ep"]
            assert sorted(path.name for path in Path(name).iterdir()) == ["run"]
            return False
        target = Path(name) / "to"
        source = open_source(folder)
        reshard(source, target, planned.plan)
        written = folder_in(target, source)
        assert fault(written) is None and made(written) == {"skipped": [[4, 8]]}
        assert (written / "common.json").read_bytes() == (folder / "common.json").read_bytes()
        compare(written, numbers, *new, kind == "Muon")
        check_model(after, written)
        # a plan by recipes says the same of every weight and state
        by_name = {move.name: move for move in planned.plan.moves}
        for move in plan_recipes(before, after).plan.moves:
            other = by_name[move.name]
            assert (move.old, move.new) == (other.old, other.new), move.name
        shutil.rmtree(target)
    return True


@pytest.mark.parametrize(("dp", "cp", "tp"), [(2, 3, 1), (4, 1, 3), (2, 3, 2), (3, 2, 1)])
@pytest.mark.parametrize("size", [2, 3, 4, -1])
def test_neighbours_share_a_weight_that_no_axis_of_the_ranks_divides(dp, cp, tp, size):
    """Of three ranks of context or tensor parallelism no two are apart from the third; such weights were whole."""
    model = dict(BASE["model"]["model_config"]) | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    model |= {"hidden_size": 12, "vocab_size": 24, "num_attention_heads": 12, "n_routed_experts": 6}
    recipe = Recipe(copy.deepcopy(dict(BASE)) | {"model": {"model_config": model}})
    shard = {"shard": True, "size": size, "least": 0, "schedule": "1f1b"}
    degree, rows = {"dp": dp, "cp": cp, "tp": tp, "pp": 1, "ep": 2, **shard}, [[2]]
    target = target_of(laid_out(recipe, degree, rows))
    for name, placed in target.weights.items():
        parts = holders(name, placed.shape, name, degree, rows, False)
        assert list(map(list, placed.lying.holders)) == [parts[part] for part in sorted(parts)], name


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(transitions())
def test_each_number_is_where_a_loop_over_ranks_puts_it(case):
    transition(case)

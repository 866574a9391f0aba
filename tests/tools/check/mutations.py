"""Random ways to spoil a recipe, drawn by hypothesis. None of them looks at the checker's own schema."""

import copy
import re

import yaml
from hypothesis import strategies as st

from tools.recipe.load import load_recipe

MODEL = ("model", "model_config")
PARALLEL = ("parallel_config",)
LOADER = ("train_dataset", "data_loader")
KINDS = ("misspelt", "misplaced", "duplicated", "wrong_type", "impossible_choice", "structural")
CHOICES = [  # keys whose values come from a fixed set
    *(("run_mode",), ("load_ckpt_format",), ("trainer", "type"), ("optimizer", "type"), ("lr_schedule", "type")),
    *(("runner_wrapper", "type"), ("train_dataset_task", "type"), ("context", "mode"), ("context", "device_target")),
    *((*LOADER, "type"), (*LOADER, "datasets_type"), ("context", "jit_config", "jit_level"), ("callbacks", 0, "type")),
    *(("parallel", "parallel_mode"), ("parallel", "search_mode"), (*MODEL, "model_type"), (*MODEL, "architectures", 0)),
    *(("parallel", "pipeline_config", "pipeline_scheduler"), ("context", "memory_optimize_level")),
    *((*MODEL, key) for key in ("hidden_act", "params_dtype", "compute_dtype", "layernorm_compute_dtype")),
    *((*MODEL, key) for key in ("softmax_compute_dtype", "rotary_dtype", "router_dense_type")),
    *((*MODEL, key) for key in ("position_embedding_type", "moe_token_dispatcher_type", "scoring_func")),
    *((*MODEL, "moe_router_load_balancing_type"), (*PARALLEL, "context_parallel_algo")),
]
FLAG_LISTS = ("recompute", "select_recompute", "select_comm_recompute")  # MindFormers takes a flag for each stage
REAL = ("mscale", "mscale_all_dim")  # real numbers that recipes write as whole ones
SIZES = [  # numbers that must be positive
    *((*MODEL, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")),
    *((*MODEL, key) for key in ("vocab_size", "seq_length", "v_head_dim", "kv_lora_rank", "moe_intermediate_size")),
    *((*MODEL, key) for key in ("n_routed_experts", "num_experts_per_tok", "qk_head_dim", "max_position_embeddings")),
    *((*PARALLEL, key) for key in ("data_parallel", "model_parallel", "pipeline_stage", "expert_parallel")),
    *((*PARALLEL, "micro_batch_num"), ("runner_config", "batch_size"), ("runner_config", "epochs")),
]


def plain(path):
    """A recipe as ordinary dicts and lists, no value shared."""
    return _unshared(load_recipe(path))


def _unshared(value):
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


class _NoAliases(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data):
        return True


def text_of(recipe):
    return yaml.dump(recipe, Dumper=_NoAliases, sort_keys=False)


def at(recipe, path):
    for key in path:
        recipe = recipe[key]
    return recipe


def has(recipe, path):
    try:
        at(recipe, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def put(recipe, path, value):
    changed = copy.deepcopy(recipe)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def leaves(node, path=()):
    """Key paths of all mapping keys."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(node, dict):
            yield (*path, key)
        yield from leaves(value, (*path, key))


@st.composite
def mutations(draw, recipe):
    """(description, one spoilt recipe): a dict, or the YAML text of what no dict can be."""
    kind = draw(st.sampled_from(KINDS))
    return globals()[kind](draw, recipe)


def misspelt(draw, recipe):
    path = draw(st.sampled_from(list(leaves(recipe))))
    word = str(path[-1])
    position = draw(st.integers(0, len(word) - 1))
    how = draw(st.sampled_from(["drop", "double", "swap", "replace"]))
    wrong = {
        "drop": word[:position] + word[position + 1 :],
        "double": word[:position] + word[position] + word[position:],
        "swap": word[:position] + word[position : position + 2][::-1] + word[position + 2 :],
        "replace": word[:position] + draw(st.sampled_from("qxzj")) + word[position + 1 :],
    }[how]
    if wrong in (word, "") or wrong in at(recipe, path[:-1]):
        wrong = word + "x"
    changed = copy.deepcopy(recipe)
    parent = at(changed, path[:-1])
    parent[wrong] = parent.pop(path[-1])
    return f"misspelt {path} as {wrong}", changed


def misplaced(draw, recipe):
    path = draw(st.sampled_from(list(leaves(recipe))))
    sections = [other for other in [(), *leaves(recipe)] if isinstance(at(recipe, other), dict)]
    target = draw(st.sampled_from([s for s in sections if s != path[:-1] and s[: len(path)] != path]))
    if path[-1] in at(recipe, target):
        return misspelt(draw, recipe)
    changed = copy.deepcopy(recipe)
    value = at(changed, path[:-1]).pop(path[-1])
    at(changed, target)[path[-1]] = value
    return f"moved {path} to {target}", changed


def duplicated(draw, recipe):
    lines = text_of(recipe).splitlines()
    keyed = [index for index, line in enumerate(lines) if re.match(r"\s*[a-z_]+: \S", line)]
    index = draw(st.sampled_from(keyed))
    return f"line {lines[index]!r} twice", "\n".join([*lines[: index + 1], lines[index], *lines[index + 1 :]])


def wrong_type(draw, recipe):
    path = draw(st.sampled_from(list(leaves(recipe))))
    value = at(recipe, path)
    wrong = {
        bool: ["perhaps", 7, [True]],
        int: ["a few", [value], {"a": 1}, 2.5],
        float: ["much", [value], {"a": 1}],
        str: [[value], {"a": 1}, 17],
        list: [{"a": 1}, 3],
        dict: ["text", 5, [1]],
        type(None): [{"a": [1]}],
    }[type(value)]
    allowed = [*([[True]] if path[-1] in FLAG_LISTS else []), *([2.5] if path[-1] in REAL else [])]
    wrong = [other for other in wrong if other not in allowed]
    new = draw(st.sampled_from(wrong))
    return f"{path}: {value!r} -> {new!r}", put(recipe, path, new)


def impossible_choice(draw, recipe):
    path = draw(st.sampled_from([path for path in CHOICES if has(recipe, path)]))
    value = at(recipe, path)
    new = 9 if isinstance(value, int) else draw(st.sampled_from([f"{value}x", "nonsense", value[:-1]]))
    return f"{path}: {value!r} -> {new!r}", put(recipe, path, new)


def structural(draw, recipe):
    """A number that no longer fits the others."""
    path, value = draw(st.sampled_from(list(_structural(recipe))))
    return f"{path} -> {value!r}", put(recipe, path, value)


def _structural(recipe):
    """(path, value) pairs, each impossible in this recipe."""
    for path in SIZES:
        if has(recipe, path):
            yield from ((path, 0), (path, -at(recipe, path)))
    model, parallel = at(recipe, MODEL), recipe["parallel_config"]
    semi = recipe["use_parallel"] and recipe["parallel"]["parallel_mode"] == 1
    yield (*MODEL, "first_k_dense_replace"), model["num_hidden_layers"] + 1
    yield (*MODEL, "batch_size"), recipe["runner_config"]["batch_size"] + 1
    yield (*MODEL, "seq_length"), model["seq_length"] // 2
    for path in ((*LOADER, "config", "seq_length"),):
        if has(recipe, path):
            yield path, at(recipe, path) + 1
            yield (*LOADER, "sizes"), [1, 0]
            yield (*LOADER, "sizes"), [-1, 0, 0]
            yield ("train_dataset", "input_columns"), ["input_ids"]
    if model.get("n_routed_experts"):
        yield (*MODEL, "num_experts_per_tok"), model["n_routed_experts"] + 1
        yield (*MODEL, "v_head_dim"), model["qk_head_dim"] + model["qk_pos_emb_head_dim"] + 1
        yield (*MODEL, "qk_rope_head_dim"), model["qk_rope_head_dim"] * 2
        yield (*MODEL, "qk_nope_head_dim"), model["qk_nope_head_dim"] // 2
        yield (*MODEL, "num_nextn_predict_layers"), 2
        for index, item in enumerate(recipe["callbacks"]):
            if item["type"] == "TopkBiasBalanceCallback":
                yield ("callbacks", index, "expert_num"), model["n_routed_experts"] + 8
                yield ("callbacks", index, "micro_batch_num"), parallel["micro_batch_num"] + 1
    if semi:
        yield from _layout(recipe, model, parallel)
    else:
        yield (*PARALLEL, "pipeline_stage"), 2
        yield (*PARALLEL, "model_parallel"), 2


def _layout(recipe, model, parallel):
    """Yield changes that break a pipelined, tensor-parallel layout."""
    dp, tp, pp = (parallel[key] for key in ("data_parallel", "model_parallel", "pipeline_stage"))
    yield ("parallel", "dataset_strategy"), [[dp + 1, 1]] * len(recipe["parallel"]["dataset_strategy"])
    yield ("parallel", "dataset_strategy"), recipe["parallel"]["dataset_strategy"][:-1]
    yield (*PARALLEL, "data_parallel"), dp * 2
    yield (*PARALLEL, "data_parallel"), dp + 1
    yield (*PARALLEL, "model_parallel"), tp * 3
    yield (*MODEL, "num_attention_heads"), model["num_attention_heads"] + 1
    yield (*MODEL, "vocab_size"), model["vocab_size"] + 1
    if tp > 1:
        yield (*MODEL, "hidden_size"), model["hidden_size"] + 1
    yield (*PARALLEL, "context_parallel"), 7
    if pp > 1:
        yield (*MODEL, "num_hidden_layers"), model["num_hidden_layers"] + 1
        yield (*MODEL, "num_hidden_layers"), model["num_hidden_layers"] - 1
        yield (*PARALLEL, "pipeline_stage"), pp + 1
        yield (*MODEL, "offset"), [0] * (pp + 1)
        yield (*MODEL, "offset"), 1
        yield (*PARALLEL, "micro_batch_num"), pp - 1
        yield ("recompute_config", "recompute"), [1] * (pp + 1)
        yield (*MODEL, "pp_interleave_num"), model["pp_interleave_num"] + 1
    if model.get("n_routed_experts"):
        yield (*PARALLEL, "expert_parallel"), 7
        yield (*PARALLEL, "expert_parallel"), model["n_routed_experts"] * 2
        yield (*MODEL, "n_routed_experts"), model["n_routed_experts"] + 1

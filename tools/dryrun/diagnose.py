"""From MindSpore's or MindFormers' own message to the key of the recipe that caused it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tools.estimate.from_recipe import LEVEL
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.view import View

_M = "model.model_config"
_P = "parallel_config"

# what stands in the message -> the key; the first that matches counts
_KEYS: tuple[tuple[str, str], ...] = (
    (r"no attribute 'qk_pos_emb_head_dim'", f"{_M}.position_embedding_type"),  # YaRN without multi-latent attention
    (r"offset", f"{_M}.offset"),
    (r"pipeline_scheduler|seqvpp|zero_bubble", "parallel.pipeline_config.pipeline_scheduler"),
    (r"pp_interleave_num|pipeline_interleave|interleave", f"{_M}.pp_interleave_num"),
    (r"micro_batch|micro size|micro_size", f"{_P}.micro_batch_num"),
    (r"num_attention_heads|attention head|num_heads", f"{_P}.model_parallel"),
    (r"expert_parallel|expert_model_parallel|num_experts|expert num", f"{_P}.expert_parallel"),
    (r"dispatcher", f"{_M}.moe_token_dispatcher_type"),
    (r"dataset_strategy", "parallel.dataset_strategy"),
    (r"context_parallel|ulysses|ring attention", f"{_P}.context_parallel"),
    (r"vocab", f"{_M}.vocab_size"),
    (r"pipeline_stage|stage_num|stage num", f"{_P}.pipeline_stage"),
    (r"data_parallel", f"{_P}.data_parallel"),
    (r"model_parallel|tensor_model_parallel", f"{_P}.model_parallel"),
    (r"device_num|device num|devices", f"{_P}.data_parallel"),
    (r"seq_length|sequence length|seq_len", f"{_M}.seq_length"),
)
# where in the Python sources a collective or an error stands -> the key
_SOURCES: tuple[tuple[str, str], ...] = (
    (r"hierarchical_ep/", "plugins.hierarchical_ep"),
    (r"ep_overlap/", "plugins.ep_overlap"),
    (r"token_dispatcher|moe/", f"{_M}.moe_token_dispatcher_type"),
    (r"attention", f"{_P}.context_parallel"),
    (r"tensor_parallel/", f"{_P}.model_parallel"),
)
_NOISE = re.compile(r"\n-{3,}.*", re.DOTALL)  # MindSpore appends framework call stacks below ruled lines


# what MindSpore says of its own graph, not of a recipe; the Python lines below it are where it was, not the cause
_INTERNAL = re.compile(r"pointer\[\w+\] is null|Illegal AnfNode for evaluating")


def diagnose(kind: str, message: str, recipe: Recipe | None = None) -> str:
    """One line: the key, and the message without the framework's call stacks.

    Args:
        kind: class of the exception.
        recipe: that was compiled; some causes show in its keys alone.
    """
    said = " ".join(_NOISE.sub("", message).split()) or "(no message)"
    if _INTERNAL.search(said):
        return f"{_internal(recipe)}{kind}: {said} (an error inside MindSpore, which names no key)"
    key = _first(_KEYS, said) or source_key(message)
    place = f"{key}: " if key else ""
    return f"{place}{kind}: {said}" + ("" if key else " (no key of the recipe is known for this message)")


def refusal_of(result: Mapping[str, Any], recipe: Recipe) -> str:
    """Why a rank did not compile, in one line."""
    again = " (cached; --no-cache)" if result.get("cached") else ""
    error = result["error"]
    return f"rank {result['rank']}: {diagnose(error['type'], error['message'], recipe)}{again}"


def _internal(recipe: Recipe | None) -> str:
    """The key that is known to end in an error of MindSpore's own."""
    if recipe is None or View(recipe).pp == 1 or View(recipe).get(LEVEL) != "level3":
        return ""
    return (
        f"{dotted(LEVEL)}: level3: MindSpore 2.9.0 compiled no pipeline with it that was tried, and did with level1: "
    )


def source_key(source: str) -> str:
    """The key that put a line of Python into the graph, or an empty string."""
    return _first(_SOURCES, source)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((key for pattern, key in table if re.search(pattern, text, re.IGNORECASE)), "")

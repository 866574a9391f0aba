"""This module lists every strategy that `tc3 accuracy equivalence` compares, and the way in which a CPU can run it
(report, Table 3).

A *trained* strategy runs MindFormers' data-parallel graph with this repository's classes for CPU. An *executed*
strategy runs MindSpore's sharded graph with MindFormers' own operators on CPU processes (`sharding.py`). Layouts that
no row lists can be drawn at random. A drawn layout is legal by the rules of MindFormers for the recipe's toy model, so
it is a fault if `tc3 train` refuses it, or if it differs from one process.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from plugins import of_the_model
from plugins.errors import RecipeError
from plugins.semi_auto_cpu.chosen import chosen
from tools.accuracy.equivalence.runs import MONITORS, MUON, PASSES, refuse_other_data
from tools.accuracy.equivalence.sharding import CLIP, EXECUTED_ROWS, TWO_STAGES, Sharding, shard_size
from tools.check.arithmetic import without_copies
from tools.check.check import require_sound
from tools.check.groups import refused_group, splits_over
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.mini_strategy import GROUPED, shares_keys
from tools.recipe.view import View

TRAINED, EXECUTED, NOT_EXECUTABLE = "trained", "executed", "not executable here"
BASELINE, APART = "baseline", "documents_apart"
_PER_RANK = "MindFormers takes it per rank and micro-batch: another loss than one process's, but sample by sample"
_NEITHER = (
    ("seqvpp", "pipelines whose sequences are cut into chunks", "MindFormers' trainer refuses them in graph mode"),
    ("auxiliary_loss_per_rank", "the router's auxiliary loss over several samples of a rank", _PER_RANK),
    ("bfloat16", "the data type of the full-size recipes", "its rounding would hide what these rows are to show"),
)
ONLY_SHARDED = "Muon asks for groups of ranks and computes in bfloat16, so on CPU it needs the sharded graph"
NO_EXPERTS = "the recipe's model has no experts"
NO_MTP = "MindFormers' TeleChat3 without latent attention takes no MTP layer from num_nextn_predict_layers"
SCHEDULES = ("1f1b", "gpipe", "seqpipe", "zero_bubble_v")
TRIES = 100_000
Shared = TypeVar("Shared", bound=dict[str, Any])


@dataclass(frozen=True)
class Variant:
    """A `Variant` is a training with MindFormers on CPU workers, with the features that its fields switch on."""

    workers: int = 1
    # mode, chunks: the mode of hierarchical_ep and the chunks of ep_overlap, with experts split over all workers
    mode: str = ""
    chunks: tuple[int, int] | None = None
    apart: bool = False  # whether tokens attend only to their own document
    balance: bool = False  # whether the attention_balance plugin is on
    recompute: bool = False  # whether activations are recomputed
    held_out: bool = False  # whether the held_out_loss plugin is on
    against: str = BASELINE  # the name of the training whose results this training must equal


@dataclass(frozen=True)
class Case:
    """A `Case` is one strategy to compare: with a training by MindFormers, with a training as a sharded graph, or with
    the reason why a CPU can run neither of these two trainings.
    """

    name: str
    what: str
    variant: Variant | None = None
    reason: str = ""
    sharding: Sharding | None = None

    def lacks(self, model: Mapping[str, Any], optimizer: str = "AdamW") -> str:
        """Return a text that says what this strategy needs and a recipe lacks: a part of the model, or an optimizer
        that the strategy's graph can compute; return "" if nothing is missing.
        """
        if self.variant and optimizer == MUON:
            return ONLY_SHARDED
        experts = bool((self.variant and self.variant.mode) or (self.sharding and self.sharding.moe))
        if experts and not model.get("n_routed_experts"):
            return NO_EXPERTS
        if self.sharding and self.sharding.mtp and model.get("model_type") == GROUPED:
            return NO_MTP
        return ""

    @property
    def how(self) -> str:
        """Return how the strategy is tested: TRAINED, EXECUTED or NOT_EXECUTABLE."""
        if self.variant:
            return TRAINED
        return EXECUTED if self.sharding else NOT_EXECUTABLE


TRAINED_ROWS = (
    ("data_parallel_2", "two workers, gradients averaged", Variant(workers=2)),
    ("expert_parallel_4_global", "experts over four workers, one All-to-All", Variant(workers=4, mode="global")),
    ("expert_parallel_4_hierarchical", "two nodes of two, AllGather first", Variant(workers=4, mode="hierarchical")),
    ("expert_parallel_4_deduplicated", "rows once to a node", Variant(workers=4, mode="deduplicated")),
    ("expert_parallel_4_overlap", "tokens in two chunks (ep_overlap)", Variant(4, "hierarchical", (1, 2))),
    ("recompute", "activations computed again in backward", Variant(recompute=True)),
    ("held_out_loss", "the plugin evaluates between steps", Variant(held_out=True)),
    ("attention_balance", "samples dealt by cost to two workers, documents apart",
     Variant(workers=2, apart=True, balance=True, against=APART)),
)  # fmt: skip


def cases() -> list[Case]:
    """Return every strategy: first the strategies that MindFormers trains, then those that are executed as sharded
    graphs, then those that a CPU cannot run. Trainings that only serve as baselines are left out.
    """
    trained = [Case(name, what, variant=variant) for name, what, variant in TRAINED_ROWS]
    executed = [Case(name, what, sharding=sharding) for name, what, sharding in EXECUTED_ROWS]
    return [*trained, *executed, *(Case(name, what, reason=reason) for name, what, reason in _NEITHER)]


def cases_of(recipe: Mapping[str, Any]) -> list[Case]:
    """Return every strategy for a recipe of one worker; a strategy is marked as not executable, with the reason, if it
    needs a part of the model or an optimizer that the recipe does not have.
    """
    model = recipe["model"]["model_config"]
    optimizer = (recipe.get("optimizer") or {}).get("type", "AdamW")
    lacking = ((case, case.lacks(model, optimizer)) for case in cases())
    return [Case(case.name, case.what, reason=reason) if reason else case for case, reason in lacking]


def baseline_variant(name: str) -> Variant:
    """Return the training on one worker that serves as a baseline under this name."""
    return Variant(apart=name == APART)


def one_worker(path: str) -> Recipe:
    """Return the recipe in `path`, or its mini recipe if it is for Ascend. The returned recipe trains on one CPU worker
    with the whole global batch, and only with the plugins that belong to its model.

    Raises:
        RecipeError: the file is wrong, or cannot be shrunk, or lacks something without which no training starts.
    """
    recipe = load_recipe(path)
    if not View(recipe).on_cpu:
        recipe = load_mini(path)
    refuse_other_data(recipe)
    recipe = resolve(recipe)
    require_sound(recipe, own_data=False)
    batch = batch_of(recipe)
    named = recipe.get("callbacks") or MONITORS
    recipe["callbacks"] = [dict(entry) for entry in named if entry["type"] != "CheckpointMonitor"]
    if chosen(recipe):
        unsplit(recipe)
    recipe["plugins"] = of_the_model(recipe)
    return on_workers(recipe, batch, 1)


def batch_of(recipe: Mapping[str, Any]) -> int:
    """Return the number of samples that all data-parallel workers of a CPU recipe train in a step."""
    samples = recipe["runner_config"].get("batch_size", 1)
    if not recipe.get("use_parallel"):
        return samples
    degrees = recipe["parallel_config"]
    micro = degrees.get("micro_batch_num", 1) if degrees.get("pipeline_stage", 1) > 1 else 1
    return samples * degrees.get("data_parallel", 1) * micro * View(Recipe(recipe)).accumulation


def unsplit(recipe: dict[str, Any]) -> None:
    """Change a sharded recipe for CPU, in place, into a recipe that runs MindFormers' data-parallel graph."""
    ones = ("model_parallel", "pipeline_stage", "context_parallel", "micro_batch_num")
    recipe["parallel_config"].update(dict.fromkeys(ones, 1), use_seq_parallel=False, vocab_emb_dp=False)
    recipe["parallel_config"].pop("context_parallel_algo", None)
    recipe["parallel"].update(parallel_mode=0, gradients_mean=True, enable_parallel_optimizer=False)
    for name in ("pipeline_config", "parallel_optimizer_config"):
        recipe["parallel"].pop(name, None)
    recipe["context"].pop("dataset_broadcast_opt_level", None)
    recipe["runner_config"]["gradient_accumulation_steps"] = 1
    recipe["model"]["model_config"].update(offset=0, pp_interleave_num=1)
    for callback in recipe["callbacks"]:
        callback.update({key: 1 for key in PASSES if key in callback})


def derive(base: Recipe, variant: Variant, steps: int, corpus: str) -> Recipe:
    """Return a recipe of the first `steps` steps of a variant of `base` (from `one_worker`) on a Megatron corpus."""
    batch = batch_of(base)
    recipe = on_workers(copy.deepcopy(base), batch, variant.workers)
    model, loader = recipe["model"]["model_config"], recipe["train_dataset"]["data_loader"]
    recipe["runner_wrapper"].update(use_clip_grad=True, max_grad_norm=CLIP)
    loader["sizes"] = [steps * batch, 0, 0]
    loader["config"]["data_path"] = ["1", corpus]
    if variant.apart:
        loader["config"].update(reset_attention_mask=True, reset_position_ids=True, create_attention_mask=True)
    recipe["train_dataset_task"]["dataset_config"] = recipe["train_dataset"]
    recipe["recompute_config"] = {**recipe.get("recompute_config", {}), "recompute": variant.recompute}
    if variant.mode:
        recipe["parallel_config"]["expert_parallel"] = variant.workers
        recipe["plugins"]["hierarchical_ep"] = {"mode": variant.mode}
        model["npu_nums_per_device"] = variant.workers // 2
    if variant.chunks:
        recipe["plugins"]["ep_overlap"] = {"chunks": list(variant.chunks)}
    if variant.balance:
        recipe["plugins"]["attention_balance"] = {"window": 1}
    if variant.held_out:
        recipe["plugins"]["held_out_loss"] = {"data_path": corpus, "samples": 2 * batch, "every": 1}
    return recipe


def on_workers(recipe: Shared, batch: int, workers: int) -> Shared:
    """Set (in place) every key that says how many workers share a global batch."""
    recipe["use_parallel"] = workers > 1
    recipe["runner_config"]["batch_size"] = recipe["model"]["model_config"]["batch_size"] = batch // workers
    recipe["parallel_config"].update(data_parallel=workers, expert_parallel=1)
    recipe["parallel"]["dataset_strategy"] = [[workers, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    return recipe


def draw_cases(recipe: Mapping[str, Any], count: int, seed: int, most: int) -> list[Case]:
    """Return different parallel layouts of a recipe (from `one_worker`), drawn at random; equal arguments give equal
    layouts.

    Args:
        most: the largest number of processes of a layout.

    Raises:
        RecipeError: there are fewer than `count` legal layouts.
    """
    numbers = random.Random(seed)
    found: dict[Sharding, None] = {}
    for _ in range(TRIES):
        if len(found) == count:
            break
        sharding = _draw(numbers)
        if 2 <= sharding.workers <= most and not misfit(sharding, recipe):
            found[sharding] = None
    if len(found) < count:
        raise RecipeError(
            f"--draws {count}: only {len(found)} different layouts on at most {most} processes were found for this "
            "recipe; draw fewer, or raise --most"
        )
    return [
        Case(f"draw_{seed}_{number}", sharding.words, sharding=sharding) for number, sharding in enumerate(found, 1)
    ]


def _draw(numbers: random.Random) -> Sharding:
    """Return any combination; what one part has no use for is drawn away."""
    choose = numbers.choice
    tp, dp = choose((1, 1, 2, 2, 3, 4)), choose((1, 1, 2, 2, 3, 4))
    cp, pp = choose((1, 1, 1, 2, 3)), choose((1, 1, 1, 2, 2, 3, 4))
    vpp = choose((1, 1, 2)) if pp > 1 else 1
    micro, accumulate = (choose((2, 3, 4, 6)), 1) if pp > 1 else (1, choose((1, 1, 2, 3, 0)))
    schedule = choose(SCHEDULES) if (pp, vpp, micro) == (2, 2, 4) else "1f1b"
    moe, mtp = choose((False, True)), choose((False, False, True))
    zero = dp > 1 and choose((True, True, False))
    layers, ep = max(pp * vpp, 2) * choose((1, 1, 2)), choose((1, 2, 3, 4, 6)) if moe else 1
    mode = choose(("", "", "global", "hierarchical", "deduplicated")) if ep > 1 else ""
    return Sharding(
        tp, dp, cp, pp, vpp=vpp, micro=micro, schedule=schedule, accumulate=accumulate, moe=moe, mtp=mtp,
        ep=ep,
        sp=tp > 1 and (moe or choose((True, False))),
        zero=zero,
        recompute=choose((False, False, True)),
        layers=layers,
        sparse=choose((1, 1, layers)) if moe else 1,
        aux=moe and cp == 1 and (not accumulate or max(dp, micro, accumulate) == 1) and choose((False, True)),
        groups=choose((0, 0, 4)) if moe else 0,
        shared=choose((0, 0, 2)) if moe else 0,
        length=choose((0, 0, 48, 96)),
        held_out=choose((False, True)),
        moves=ep > 1 and choose((False, True)),
        mode=mode,
        chunks=choose((1, 2)) if mode else 1,
        streams=choose((1, 1, 1, 4)),
        uneven=pp > 1 and choose((False, True)),
        known=TWO_STAGES if mtp and pp > 1 and not zero and schedule != "zero_bubble_v" else "",
    )  # fmt: skip


def misfit(sharding: Sharding, recipe: Mapping[str, Any]) -> str:
    """Return the reason why a parallel layout is not legal for a model, or cannot be compared; return "" if the layout
    can be compared.
    """
    model = recipe["model"]["model_config"]
    length = sharding.length or model["seq_length"]
    heads, experts = model["num_attention_heads"], model.get("n_routed_experts") or 0
    shared = model["num_key_value_heads"] if shares_keys(model) else heads
    rules = {
        NO_EXPERTS: sharding.moe and not experts,
        NO_MTP: sharding.mtp and model.get("model_type") == GROUPED,
        "attention heads cannot be cut": heads % (sharding.tp * sharding.cp),
        "heads of keys and values cannot be cut": shared % sharding.tp,
        "the sequence cannot be cut": length % (sharding.tp * sharding.cp),
        "experts cannot be dealt": (sharding.dp * sharding.tp) % sharding.ep or experts % sharding.ep,
        "experts need sequence parallelism": sharding.moe and sharding.tp > 1 and not sharding.sp,
        "groups of experts cannot be cut": sharding.groups and experts % sharding.groups,
        "groups of experts cannot give as many each": sharding.groups
        and model.get("num_experts_per_tok", 2) % (sharding.groups // 2),
        "layers cannot be cut": sharding.layers % (sharding.pp * sharding.vpp),
        "the last stage would have no layer": sharding.uneven and sharding.layers < 2 * sharding.pp * sharding.vpp,
        "MindSpore does not split a model over so many devices": not splits_over(sharding.workers),
        "MindSpore refuses a group of ranks": refused_group(
            sharding.dp, sharding.cp, sharding.tp, sharding.ep, shard_size(sharding, recipe)
        ),
        "too few micro-batches": sharding.micro < sharding.pp,
        "a schedule of chunks needs two stages and four micro-batches": sharding.schedule != "1f1b"
        and (sharding.pp, sharding.vpp, sharding.micro) != (2, 2, 4),
        "the auxiliary loss is taken per rank and micro-batch": sharding.aux and _other_tokens(sharding),
        "accumulated gradients of weights without a copy are lost": sharding.zero
        and sharding.micro_steps(batch_of(recipe)) > 1
        and any(without_copies(sharding.dp, sharding.tp, sharding.cp, sharding.ep, experts * sharding.moe)),
    }
    return next((words for words, wrong in rules.items() if wrong), "") or sharding.misfit(batch_of(recipe))


def _other_tokens(sharding: Sharding) -> bool:
    """Return whether a rank's micro-batch has other tokens than one of the run of one process."""
    if not sharding.accumulate:  # a sample each, in both
        return max(sharding.cp, sharding.micro) > 1
    return max(sharding.dp, sharding.cp, sharding.micro, sharding.accumulate) > 1

"""This module lists every strategy that `tc3 accuracy equivalence` compares (Table 3 of the TeleChat3-MoE report;
strategies.yaml), and how a CPU can run it.

A *trained* strategy runs MindFormers' data-parallel graph with this repository's classes for CPU. An *executed*
strategy runs MindSpore's sharded graph with MindFormers' own operators on CPU processes (`sharding.py`). Layouts that
no row lists can be drawn at random; a drawn layout is legal for the recipe's toy model, so it is a fault if `tc3 train`
refuses it, or if it differs from one process.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from plugins import of_the_model
from plugins.batch_ramp.plan import fewest_micro_batches
from plugins.errors import RecipeError
from plugins.semi_auto_cpu.chosen import chosen
from tools.accuracy.equivalence.runs import MUON, PASSES, callbacks_of, refuse_other_data
from tools.accuracy.equivalence.sharding import CLIP, RAMP_PARTS, Sharding, shard_size
from tools.check.arithmetic import without_copies
from tools.check.check import require_sound
from tools.check.groups import refused_group, splits_over
from tools.data.index import read_whole
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.mini_strategy import GROUPED, shares_keys
from tools.recipe.view import View

TRAINED, EXECUTED, NOT_EXECUTABLE = "trained", "executed", "not executable here"
BASELINE, APART = "baseline", "documents_apart"
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
    mode: str = ""  # the mode of hierarchical_ep, with experts split over all workers
    chunks: int = 1  # the chunks of ep_overlap
    apart: bool = False  # whether tokens attend only to their own document
    balance: bool = False  # whether the attention_balance plugin is on
    recompute: bool = False  # whether activations are recomputed
    held_out: bool = False  # whether the held_out_loss plugin is on
    against: str = BASELINE  # the name of the training whose results this training must equal


@dataclass(frozen=True)
class Case:
    """A `Case` is one strategy: it is trained (`variant`), executed (`sharding`), or neither for a `reason`."""

    name: str
    what: str
    variant: Variant | None = None
    reason: str = ""
    sharding: Sharding | None = None

    def lacks(self, model: Mapping[str, Any], optimizer: str = "AdamW") -> str:
        """Return what this strategy needs and the recipe lacks, as a reason; return "" if nothing is missing."""
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


def _read() -> Iterator[Case]:
    rows = yaml.safe_load(Path(__file__).with_name("strategies.yaml").read_text("utf-8"))
    for name, row in rows["trained"].items():
        yield Case(name, row.pop("what"), variant=Variant(**row))
    for name, row in rows["executed"].items():
        yield Case(name, row.pop("what"), sharding=Sharding(**row))
    for name, row in rows["neither"].items():
        yield Case(name, **row)


CASES = tuple(_read())


def cases_of(recipe: Mapping[str, Any]) -> list[Case]:
    """Return all strategies; a strategy that needs something that the recipe on one worker lacks is marked as not
    executable.
    """
    model = recipe["model"]["model_config"]
    optimizer = (recipe.get("optimizer") or {}).get("type", "AdamW")
    lacking = ((case, case.lacks(model, optimizer)) for case in CASES)
    return [Case(case.name, case.what, reason=reason) if reason else case for case, reason in lacking]


def baseline_variant(name: str) -> Variant:
    """Return the training on one worker that is the baseline with this name."""
    return Variant(apart=name == APART)


def one_worker(path: str) -> Recipe:
    """Return the recipe in the file `path` for one CPU worker with the whole global batch, and only with those plugins
    that change the model; for a recipe for Ascend, return its mini recipe in this form. Raise RecipeError if the recipe
    cannot be trained.
    """
    recipe = load_recipe(path)
    if not View(recipe).on_cpu:
        recipe = load_mini(path)
    refuse_other_data(recipe)
    recipe = resolve(recipe)
    require_sound(recipe, own_data=False)
    batch = batch_of(recipe)
    recipe["callbacks"] = [entry for entry in callbacks_of(recipe) if entry["type"] != "CheckpointMonitor"]
    if chosen(recipe):
        unsplit(recipe)
    recipe["plugins"] = of_the_model(recipe)
    return on_workers(recipe, batch, 1)


def batch_of(recipe: Mapping[str, Any]) -> int:
    """Return the number of samples on which all data-parallel workers of a CPU recipe train in a step."""
    return View(Recipe(recipe)).global_batch


def unsplit(recipe: dict[str, Any]) -> None:
    """Change a sharded recipe for CPU, in place, to MindFormers' data-parallel graph."""
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
    """Return a recipe that trains `steps` steps of a variant of `base` (from `one_worker`) on a Megatron corpus."""
    batch = batch_of(base)
    recipe = on_workers(copy.deepcopy(base), batch, variant.workers)
    model, loader = recipe["model"]["model_config"], recipe["train_dataset"]["data_loader"]
    recipe["runner_wrapper"].update(use_clip_grad=True, max_grad_norm=CLIP)
    loader["sizes"] = [steps * batch, 0, 0]
    read_whole(loader["config"], corpus)
    if variant.apart:
        loader["config"].update(reset_attention_mask=True, reset_position_ids=True, create_attention_mask=True)
    recipe["train_dataset_task"]["dataset_config"] = recipe["train_dataset"]
    recipe["recompute_config"] = {**recipe.get("recompute_config", {}), "recompute": variant.recompute}
    if variant.mode:
        recipe["parallel_config"]["expert_parallel"] = variant.workers
        recipe["plugins"]["hierarchical_ep"] = {"mode": variant.mode}
        model["npu_nums_per_device"] = variant.workers // 2
    if variant.chunks > 1:
        recipe["plugins"]["ep_overlap"] = {"chunks": [1, variant.chunks]}
    if variant.balance:
        recipe["plugins"]["attention_balance"] = {"window": 1}
    if variant.held_out:
        recipe["plugins"]["held_out_loss"] = {"data_path": corpus, "samples": 2 * batch, "every": 1}
    return recipe


def on_workers(recipe: Shared, batch: int, workers: int) -> Shared:
    """Set in place how the global batch is divided among `workers` workers."""
    recipe["use_parallel"] = workers > 1
    recipe["runner_config"]["batch_size"] = recipe["model"]["model_config"]["batch_size"] = batch // workers
    recipe["parallel_config"].update(data_parallel=workers, expert_parallel=1)
    recipe["parallel"]["dataset_strategy"] = [[workers, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    return recipe


def draw_cases(recipe: Mapping[str, Any], count: int, seed: int, most: int) -> list[Case]:
    """Draw `count` different legal layouts of at most `most` processes; raise RecipeError if fewer are found."""
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
    together = moe and (dp, 1) == (ep // tp, cp) and max(micro, accumulate) == 1 and choose((False, True))
    trains = choose(("", "", "", "", "adapters", "averages"))
    ramp = micro * accumulate != 1 and choose((False, False, True))
    mode = choose(("", "", "global", "hierarchical", "deduplicated")) if ep > 1 else ""
    return Sharding(
        tp, dp, cp, pp, vpp=vpp, micro=micro, schedule=schedule, accumulate=accumulate, moe=moe, mtp=mtp,
        ep=ep,
        sp=tp > 1 and (moe or choose((True, False))),
        zero=zero,
        recompute=choose((False, False, True)),
        layers=layers,
        sparse=choose((1, 1, layers)) if moe else 1,
        aux=together
        or (moe and cp == 1 and (not accumulate or max(dp, micro, accumulate) == 1) and choose((False, True))),
        together=together,
        groups=choose((0, 0, 4)) if moe else 0,
        shared=choose((0, 0, 2)) if moe else 0,
        length=choose((0, 0, 48, 96)),
        lora=trains == "adapters",
        averages=trains == "averages",
        ramp=ramp,
        held_out=not ramp and choose((False, True)),
        moves=ep > 1 and not trains and choose((False, True)),
        mode=mode,
        chunks=choose((1, 2)) if mode else 1,
        streams=choose((1, 1, 1, 4)),
        uneven=pp > 1 and choose((False, True)),
        known=mtp and pp > 1 and not (zero or trains == "adapters") and schedule != "zero_bubble_v",
    )  # fmt: skip


def misfit(sharding: Sharding, recipe: Mapping[str, Any]) -> str:
    """Return why a layout is not legal for the recipe's model, or cannot be compared; return "" if it is legal and can
    be compared.
    """
    model = recipe["model"]["model_config"]
    if lacking := Case("", "", sharding=sharding).lacks(model):
        return lacking
    length = sharding.length or model["seq_length"]
    heads, experts = model["num_attention_heads"], model.get("n_routed_experts") or 0
    shared = model["num_key_value_heads"] if shares_keys(model) else heads
    rules = {
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
        "only AdamW trains adapters, and only its weights are averaged": (sharding.lora or sharding.averages)
        and recipe["optimizer"]["type"] != "AdamW",
        "adapters and averages do not go with each other, nor with experts that move": (
            sharding.lora + sharding.averages + sharding.moves > 1
        ),
        "a growing batch does not go with the held-out loss": sharding.ramp and sharding.held_out,
        "half a growing batch makes too few micro-batches": sharding.ramp and _too_few(sharding, batch_of(recipe)),
        "accumulated gradients of weights without a copy are lost": sharding.zero
        and sharding.micro_steps(batch_of(recipe)) > 1
        and any(without_copies(sharding.dp, sharding.tp, sharding.cp, sharding.ep, experts * sharding.moe)),
    }
    return next((words for words, wrong in rules.items() if wrong), "") or sharding.misfit(batch_of(recipe))


def _too_few(sharding: Sharding, batch: int) -> bool:
    """Return whether half of a step's samples cannot be cut into micro-batches, here or in one process."""
    parts = sharding.micro * sharding.micro_steps(batch)
    least = fewest_micro_batches(sharding.pp, sharding.schedule)
    return bool(parts % 2 or parts // 2 < least or sharding.alone.misfit(batch) or batch < RAMP_PARTS)


def _other_tokens(sharding: Sharding) -> bool:
    """Return whether the samples over which the auxiliary loss is taken are others than in one process."""
    if sharding.together:
        others = sharding.ep != sharding.dp * sharding.tp * sharding.cp
        return others or sharding.cp * sharding.micro * sharding.accumulate != 1
    if not sharding.accumulate:  # a sample each, in both
        return max(sharding.cp, sharding.micro) > 1
    return max(sharding.dp, sharding.cp, sharding.micro, sharding.accumulate) > 1

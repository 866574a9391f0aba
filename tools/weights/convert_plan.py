"""This module plans which tensors a conversion of weights reads, and which files it writes. Planning reads only the
headers of files. The plan uses each tensor of the source once, or lists the tensor as unused.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from plugins import of_the_model
from plugins.errors import CheckpointError, RecipeError
from plugins.hugging_face_weights.plan import HEAD, copies
from plugins.lora import plan as lora
from plugins.yarn.plan import read as read_yarn
from tools.checkpoint.stored import kind_of
from tools.checkpoint.tensor_files import TYPES, Header
from tools.layout.resolve import resolve
from tools.recipe.dump import dump_recipe, is_of_run
from tools.recipe.findings import in_file, refusal
from tools.recipe.load import Recipe, load_recipe, look
from tools.recipe.view import LOADER, MODEL, View
from tools.schema.converter import convert
from tools.schema.keys import refuse_keys
from tools.schema.schema import load_schema
from tools.weights.hugging_face_config import BASE, check_config, differences, stretched_as_telechat3
from tools.weights.hugging_face_names import STATE, Entry, hugging_face_shapes, names_of, table
from tools.weights.hugging_face_sizes import LATENT_EPS, Sizes, dense_sizes_of, sizes_of
from tools.weights.source import SINGLE, Source

Target = Literal["Hugging Face", "MindFormers"]
CONVERTED = ("F32", "BF16", "F16")  # types that weights have
LISTED = 8  # names in a message
KEPT = "recipe_of_weights.yaml"  # in a folder of merged, averaged or converted weights in MindFormers' form
_BIASED = "moe_router_enable_expert_bias"
_BUFFER = ".rotary_emb.inv_freq"  # of old exports: computed, not trained


@dataclass(frozen=True)
class Shard:
    """A `Shard` is one file that a conversion writes: its tensors (`entries`) in the order of the forward pass, and its
    size in bytes.
    """

    file: str
    entries: tuple[Entry, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """A `Plan` says which files a conversion writes, and from which tensors of the source.

    Args:
        dtype: the type to which trained weights are converted, as safetensors writes it; None: each weight keeps its
            type. The routers' biases always keep their type.
        copies: for each Hugging Face tensor that repeats another tensor, the name of the repeated tensor; both must
            have the same bits (DeepSeek's MTP layer repeats the embedding and the output layer).
        stands_for: for each Hugging Face tensor that is not read, the name of the tensor to which it is tied.
        left_out: the number of tensors of the source that have no place in the target, by a description of these
            tensors.
    """

    to: Target
    dtype: str | None
    shards: tuple[Shard, ...]
    copies: Mapping[str, str]
    stands_for: Mapping[str, str]
    left_out: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Return the number of bytes of all tensors that the conversion writes."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def tensors(self) -> int:
        """Return the number of tensors that the conversion writes."""
        entries = [entry for shard in self.shards for entry in shard.entries]
        return sum(len(entry.parts) for entry in entries) if self.to == "Hugging Face" else len(entries)


def plan_conversion(
    headers: Mapping[str, Header], sizes: Sizes, to: Target, dtype: str | None, limit: int, tied: bool = False
) -> Plan:
    """Return the plan for converting the weights of a model with given sizes.

    Args:
        headers: the headers of the source's tensors.
        dtype: the type of the written weights, see `Plan`.
        limit: the largest size of a file in bytes; a file with a single tensor may be larger.
        tied: whether the output layer of a Hugging Face source is tied to its embedding, whatever tensors its files
            hold.

    Raises:
        CheckpointError: tensors are missing or unknown, or have another shape, or a type that weights cannot have.
    """
    entries = table(sizes)
    repeated: dict[str, str] = {}
    stands_for: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    if to == "Hugging Face":
        wanted = {entry.mindformers: entry.shape for entry in entries}
        given = {}
        for name, header in headers.items():
            if name in wanted or (kind_of(name) == "weights" and not name.endswith(STATE)):
                given[name] = header
            else:
                optimizer = kind_of(name) == "optimizer"
                left_out["of the optimizer's state" if optimizer else "counters of the run"] += 1
    else:
        wanted = hugging_face_shapes(sizes)
        given = {name: header for name, header in headers.items() if not name.endswith(_BUFFER)}
        left_out["rotary frequencies, which are computed"] = len(headers) - len(given)
        repeated = {name: original for name, original in copies(names_of(sizes)).items() if name in given}
        given = {name: header for name, header in given.items() if name not in repeated}
        embedding = names_of(sizes).embedding
        if tied and embedding in given:
            stands_for = {HEAD: embedding}
            if HEAD in given:  # the class would not read it
                repeated[HEAD] = embedding
            given[HEAD] = given[embedding]
    _check(given, wanted)
    types = {entry.mindformers: _type(entry, to, given, dtype) for entry in entries}
    return Plan(to, dtype, _shards(entries, types, to, limit), repeated, stands_for, +left_out)


def _check(given: Mapping[str, Header], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError with all that does not fit."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    shapes = [
        f"{name} {list(given[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in given and tuple(given[name].shape) != tuple(shape)
    ]
    types = [f"{name} ({header.dtype})" for name, header in given.items() if header.dtype not in CONVERTED]
    found = [
        f"{len(names)} {what}: {', '.join(names[:LISTED])}{', ...' * (len(names) > LISTED)}"
        for what, names in (
            ("missing", missing),
            ("not of this model", unknown),
            ("of another shape", shapes),
            ("of a type that is not converted", types),
        )
        if names
    ]
    if found:
        raise CheckpointError(
            f"these are not the weights of the recipe's model ({'; '.join(found)}); name the recipe of these weights "
            "with --recipe"
        )


def _type(entry: Entry, to: Target, given: Mapping[str, Header], dtype: str | None) -> str:
    """Return the type that an entry is written in."""
    names = (entry.mindformers,) if to == "Hugging Face" else entry.parts
    types = sorted({given[name].dtype for name in names})
    if dtype and entry.trained:
        return dtype
    if len(types) > 1:
        raise CheckpointError(
            f"{entry.mindformers}: the parts of this weight have several types ({', '.join(types)}); choose one type "
            "with --dtype"
        )
    return types[0]


def _shards(entries: list[Entry], types: Mapping[str, str], to: Target, limit: int) -> tuple[Shard, ...]:
    """Return entries in order, as many in a file as its limit allows."""
    sizes = {entry.mindformers: math.prod(entry.shape) * TYPES[types[entry.mindformers]].itemsize for entry in entries}
    by_name = {entry.mindformers: entry for entry in entries}
    groups = in_files(sizes, limit)
    found = []
    for number, names in enumerate(groups):
        size = sum(sizes[name] for name in names)
        found.append(Shard(file_of(to, number, len(groups)), tuple(by_name[name] for name in names), size))
    return tuple(found)


def in_files(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Distribute tensors over files in order, and return the names of the tensors in each file. A file has as many
    tensors as the limit in bytes allows, and at least one.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return tuple(map(tuple, groups))


def file_of(to: Target, number: int, count: int) -> str:
    """Return the name of the file with a given number that a conversion writes. In MindFormers' form, the number of a
    file is the rank to which the file belongs, out of `count` ranks.
    """
    if to == "MindFormers":
        return f"weights-model-{number:07d}-{count:07d}.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE


# From what a user gives to a plan: which way, of which model, and what is to be said of it.

DTYPES = {"bf16": "BF16", "fp32": "F32"}


@dataclass(frozen=True)
class Conversion:
    """A `Conversion` holds the plan of a conversion, the sizes of the model, and the path of the recipe. A `Conversion`
    also says whether a config.json was compared with the recipe, and which token id ends a document in the recipe's
    data.
    """

    plan: Plan
    sizes: Sizes
    recipe: Path
    compared: bool
    ends: int | None

    def lines(self, source: Path, target: Path, dry_run: bool, tokenizer: bool) -> list[str]:
        """Return lines of text that say what the conversion did, or would do if it is only planned."""
        plan = self.plan
        files = f"{len(plan.shards)} file{'s' * (len(plan.shards) > 1)}"
        verb = "would hold" if dry_run else "holds"
        found = [f"{target} {verb} {plan.tensors:,} tensors for {plan.to}, {plan.bytes / 1e9:,.3f} GB in {files}"]
        found += [f"left out: {count:,} tensors {what}" for what, count in plan.left_out.items()]
        if plan.stands_for:
            found.append("the output layer is the embedding (tie_word_embeddings): MindFormers trains two from here on")
        if plan.to == "MindFormers":
            if not self.compared:
                found.append(f"unknown: {source} has no config.json, so rates, scales and norms were not compared")
            begin = ["tc3", "train", str(self.recipe), "--set", f"checkpoint.load_path={target}"]
            if is_of_run(self.recipe):  # whose own folder holds its checkpoints
                begin += ["--run-dir", f"{self.recipe.absolute().parent}-next"]
            found.append(f"begin with it: {shlex.join(begin)}")
            return found
        if self.sizes.telechat2:
            found.append("TeleChat2 to vLLM and to Tele-AI's own class; transformers has none")
            if self.sizes.hf["rope_theta"] != BASE:
                found.append(f"Tele-AI's own class ignores rope_theta and turns by {BASE:,.0f}; vLLM reads it")
        elif self.sizes.is_dense:
            found.append(
                "telechat3, a class of vLLM; transformers has no such class, and its Llama another attention factor"
                if stretched_as_telechat3(self.sizes)
                else "Llama to transformers, vLLM and SGLang: the public 36B names a class of its own for the same"
            )
        elif self.sizes.latent_eps != LATENT_EPS:
            found.append(
                f"transformers normalises latents with an epsilon of {LATENT_EPS:g}, whatever config.json says; the "
                f"recipe trains with {self.sizes.latent_eps:g}: logits differ in their last places"
            )
        if self.sizes.mtp_layers:
            found.append("transformers leaves the MTP layer out; vLLM and SGLang draft with it")
        if not tokenizer:
            found.append("the folder has no tokenizer; --tokenizer FOLDER copies one")
        return found

    def as_dict(self, source: Path, target: Path) -> dict[str, Any]:
        """Return the facts about the conversion as values fit for JSON."""
        plan = self.plan
        return {
            "from": str(source),
            "to": str(target),
            "form": plan.to,
            "recipe": str(self.recipe),
            "tensors": plan.tensors,
            "bytes": plan.bytes,
            "files": [shard.file for shard in plan.shards],
            "left_out": dict(plan.left_out),
            "config_compared": self.compared,
        }


def prepare(source: Source, recipe: Path | None, dtype: str | None, limit: int) -> Conversion:
    """Compare the headers of the weights in `source` with the recipe's model, and return a plan for their conversion.

    Args:
        recipe: the path of the recipe; None for the recipe of the run that saved `source`.
        dtype, limit: the arguments of `plan_conversion` with these names.

    Raises:
        CheckpointError: the checkpoint is incomplete, or belongs to another model.
        RecipeError: there is no recipe, or Hugging Face's DeepseekV3 cannot express its model.
    """
    to: Target = "MindFormers" if source.form == "Hugging Face" else "Hugging Face"
    if source.form == "one file":
        raise CheckpointError(f"{source.path}: this is a single file; give the folder that holds the whole checkpoint")
    source.require_whole()
    if any(map(lora.is_adapter, source.headers)):
        raise CheckpointError(
            f"{source.path}: the checkpoint holds adapters beside the weights; first merge the adapters into the "
            f"weights: tc3 weights merge {shlex.quote(str(source.path))} TO"
        )
    file = recipe or recipe_beside(source.path)
    loaded = load_recipe(file)
    sizes = model_of(loaded)
    if to == "MindFormers":
        refuse_lost_biases(source, loaded)
    config = check_config(source.path, sizes) if to == "MindFormers" else None
    tied = bool(config and config.get("tie_word_embeddings"))
    plan = plan_conversion(source.headers, sizes, to, dtype, limit, tied)
    refuse_other_settings(source, file, loaded)
    ends = View(loaded).get((*LOADER, "config", "eod"))
    return Conversion(plan, sizes, file, config is not None, ends if type(ends) is int else None)


def refuse_lost_biases(source: Source, recipe: Recipe) -> None:
    """Raise RecipeError if the weights in `source` have routers' biases that are not 0, and the routers of the recipe's
    model have none.
    """
    given = [name for name in source.headers if name.endswith((".e_score_correction_bias", ".expert_bias"))]
    fields = convert(View(resolve(recipe)), load_schema()).fields if given else {}
    left_out = fields.get("num_moe_experts") and not fields.get(_BIASED)
    if left_out and any(source.read(name)[0].any() for name in given):
        raise refusal(
            recipe,
            (*MODEL, _BIASED),
            f"the routers in {source.path} have biases, by which they choose experts, and the recipe's model would "
            "leave the biases out; write True",
        )


def recipe_beside(weights: Path) -> Path:
    """Return the path RUN/recipe.yaml for the checkpoint RUN/checkpoint/iteration_*, or that of the recipe that
    `keep_recipe` has written; raise RecipeError if the file does not exist.
    """
    file = _beside(weights)
    if not file.is_file():
        raise RecipeError(
            f"--recipe: {weights} is not in the folder of a run, so name the recipe of its model with this option"
        )
    return file


def _beside(folder: Path) -> Path:
    kept = folder / KEPT
    return kept if kept.exists() else folder.absolute().parent.parent / "recipe.yaml"


def keep_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe of the run that trained weights into the folder of new weights that are made from the trained
    weights, so that no later command takes the new weights for those of another model.
    """
    dump_recipe(recipe, folder / KEPT)


_INTERPOLATION = "rotary_seq_len_interpolation_factor"
# MindFormers' settings that change the results of a model, and no shape of its weights
_OF_RESULTS = (
    *("rotary_base", "rotary_scaling_factor", "position_embedding_type", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "layernorm_epsilon", "normalization", "hidden_act", "gated_linear_unit", "qk_layernorm"),
    *("num_attention_heads", "num_query_groups", "window_size", "use_interleaved_weight_layout_mlp", "norm_topk_prob"),
    *("moe_router_topk", "moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_pre_softmax", "use_shared_expert_gating", "rotary_interleaved"),
    *("use_contiguous_weight_layout_attention", "nope_layer_interval", "use_alibi_mask", "rotary_cos_format"),
    "apply_residual_connection_post_layernorm",
    _INTERPOLATION,
)
_OF_GROUPS = ("num_query_groups", "use_contiguous_weight_layout_attention")  # latent attention reads neither


def changed_settings(trained: Recipe, asked: Recipe) -> list[str]:
    """Return in words the settings that `settings_apart` finds, as changes from the recipe `trained` to the recipe
    `asked`.
    """
    return [f"{name} was {old!r} and is {new!r} now" for name, old, new in settings_apart(trained, asked)]


def settings_apart(trained: Recipe, asked: Recipe) -> list[tuple[str, Any, Any]]:
    """Return the settings with which `asked` would compute other results from the weights that `trained` has trained,
    each as (name, value in `trained`, value in `asked`); no shape of a weight shows these settings.

    Models that Hugging Face's classes can express are compared by their config.json, others by MindFormers' settings.
    """
    with suppress(RecipeError, TypeError, KeyError, ValueError):
        return differences(model_of(trained), model_of(asked))
    with suppress(RecipeError, TypeError, KeyError, ValueError):
        schema = load_schema()
        old, new = ({**convert(View(resolve(each)), schema).fields} for each in (trained, asked))
        for fields in (old, new):  # the fused operator computes the same
            fields["hidden_act"] = str(fields.get("hidden_act")).removeprefix("fused")
            fields[_INTERPOLATION] = None if fields.get(_INTERPOLATION) == 1 else fields.get(_INTERPOLATION)
        latent = old.get("multi_latent_attention") and new.get("multi_latent_attention")
        return [
            (name, old.get(name), new.get(name))
            for name in _OF_RESULTS
            if (old.get(name) or None) != (new.get(name) or None) and not (latent and name in _OF_GROUPS)
        ]
    return []


def recipe_of_run(checkpoint: Path, say: bool = False) -> Recipe | None:
    """Return the recipe of the run that saved `checkpoint`, or the recipe that `keep_recipe` has written beside it.
    Return None if there is no recipe or if it cannot be read; in the second case print the reason on stderr if `say` is
    true.
    """
    file = _beside(checkpoint)
    if not file.exists() or (file.name != KEPT and not checkpoint.absolute().name.startswith("iteration_")):
        return None
    try:
        return load_recipe(file)
    except RecipeError as error:
        if say:
            click.echo(f"{error}; so the settings with which {checkpoint} was trained are not compared", err=True)
        return None


def settings_of_run(checkpoint: Path, asked: Recipe) -> tuple[Path, list[str]]:
    """Return the path of the recipe of the run that saved `checkpoint`, and texts that say how the settings of the
    recipe `asked` differ from this recipe; return no texts if no recipe of the run was found.
    """
    before = recipe_of_run(checkpoint, say=True)
    return _beside(checkpoint), changed_settings(before, asked) if before else []


def refuse_other_settings(source: Source, recipe: Path, asked: Recipe) -> None:
    """Raise RecipeError if `recipe`, which holds `asked`, would compute other results from the weights in `source` than
    the run that trained them.
    """
    file, changed = settings_of_run(source.path, asked)
    if changed:
        raise RecipeError(
            f"--recipe {recipe}: the weights in {source.path} have a recipe with other settings ({file}): "
            f"{'; '.join(changed)}; leave --recipe out, so that their own recipe is taken"
        )


def model_of(recipe: Recipe) -> Sizes:
    """Return the sizes of the Hugging Face model that corresponds to the model of a recipe.

    Raises:
        RecipeError: MindFormers does not train the recipe's model, or neither DeepseekV3 nor Llama can express it.
    """
    resolved = resolve(recipe)
    schema = load_schema()
    fields, kind = convert(View(resolved), schema).fields, schema.model_type(resolved)
    if schema.models[kind]["fixed"].get("qk_layernorm"):  # no value of another key makes it a Llama
        raise RecipeError(
            f"{recipe.source}: {'.'.join(MODEL)}.model_type: tc3 does not convert {kind}, whose queries and keys "
            "always have norms; it converts models of telechat3 (Llama), telechat3_moe and deepseek_v3 (DeepSeek-V3)"
        )
    refuse_keys(recipe)
    latent, experts = bool(fields.get("multi_latent_attention")), bool(fields.get("num_moe_experts"))
    if latent != experts:
        raise RecipeError(
            f"{recipe.source}: the model has latent attention without experts, or experts without latent attention; "
            "tc3 converts models that have both (TeleChat3-MoE, DeepSeek-V3) and models that have neither (TeleChat3 "
            "36B, Llama)"
        )
    chosen = of_the_model(resolved).get("yarn", False)
    try:
        if experts:
            return sizes_of(fields, bias_updated=False)
        model = look(resolved, MODEL, {})
        return dense_sizes_of(fields, None if chosen is False else read_yarn(chosen, model))
    except RecipeError as error:
        raise in_file(recipe, error) from None

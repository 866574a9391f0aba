"""From what a user gives to a plan: which way, of which model, and what is to be said of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError, RecipeError
from tools.auto.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import LOADER, View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.convert.plan import Plan, Target, plan_conversion
from tools.weights.hugging_face.config import check_config, tied
from tools.weights.hugging_face.dense import dense_sizes_of
from tools.weights.hugging_face.sizes import LATENT_EPS, Sizes, sizes_of
from tools.weights.source import Source

DTYPES = {"bf16": "BF16", "fp32": "F32"}


@dataclass(frozen=True)
class Conversion:
    """A plan, the model and recipe that it is for, whether a config.json was there to compare, and the id that ends a
    document in the recipe's data.
    """

    plan: Plan
    sizes: Sizes
    recipe: Path
    compared: bool
    ends: int | None

    def lines(self, source: Path, target: Path, dry_run: bool, tokenizer: bool) -> list[str]:
        """What was done or would be, for a reader."""
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
            found.append(f"begin with it: tc3 train {self.recipe} --set checkpoint.load_path={target}")
            return found
        if self.sizes.is_dense:
            found.append("Llama to transformers, vLLM and SGLang: the public 36B names a class of its own for the same")
        elif self.sizes.latent_eps != LATENT_EPS:
            found.append(
                f"transformers normalises latents with an epsilon of {LATENT_EPS:g}, whatever config.json says; the "
                f"recipe trains with {self.sizes.latent_eps:g}: logits differ in their last places"
            )
        if self.sizes.mtp_layers:
            found.append("transformers leaves the MTP layer out; vLLM and SGLang draft with it")
        if not tokenizer:
            found.append("no tokenizer beside it: --tokenizer FOLDER copies one")
        return found

    def as_dict(self, source: Path, target: Path) -> dict[str, Any]:
        """The same for a program."""
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
    """Compare `source` with the recipe's model, by headers, and plan its conversion.

    Args:
        recipe: None for that of the run that saved `source`; dtype, limit: see `plan_conversion`.

    Raises:
        CheckpointError: not of this model, or not whole. RecipeError: no recipe, or of a model that Hugging Face's
            DeepseekV3 is not.
    """
    to: Target = "MindFormers" if source.form == "Hugging Face" else "Hugging Face"
    if source.form == "one file":
        raise CheckpointError(f"{source.path}: one file; give the folder that it is in")
    if reason := source.seal_fault(checksums=False):
        raise CheckpointError(f"{source.path}: not a whole checkpoint: {reason}")
    file = recipe or _recipe_beside(source)
    loaded = load_recipe(file)
    sizes = model_of(loaded)
    compared = to == "MindFormers" and check_config(source.path, sizes)
    plan = plan_conversion(source.headers, sizes, to, dtype, limit, compared and tied(source.path))
    ends = View(loaded).get((*LOADER, "config", "eod"))
    return Conversion(plan, sizes, file, compared, ends if type(ends) is int else None)


def _recipe_beside(source: Source) -> Path:
    """RUN/recipe.yaml of RUN/checkpoint/iteration_*."""
    file = source.path.absolute().parent.parent / "recipe.yaml"
    if not file.exists():
        raise RecipeError(f"--recipe: {source.path} is in no run's folder: name the recipe of its model")
    return file


def model_of(recipe: Recipe) -> Sizes:
    """The model of a recipe in Hugging Face's words.

    Raises:
        RecipeError: DeepseekV3, and Llama, have no such thing.
    """
    resolved = resolve(recipe)
    fields = convert(View(resolved), load_schema()).fields
    latent, experts = bool(fields.get("multi_latent_attention")), bool(fields.get("num_moe_experts"))
    if latent != experts:
        raise RecipeError(
            f"{recipe.source}: a model of latent attention or of experts alone; converted are those of both "
            "(TeleChat3-MoE, DeepSeek-V3) and of neither (TeleChat3 36B, Llama)"
        )
    return sizes_of(fields, bias_updated=False) if experts else dense_sizes_of(fields)

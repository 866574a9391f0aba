"""This module keeps a small model that transformers built, wrote and ran in a folder, so that tests compare conversions
with it without torch.

`python -m tests.tools.weights.renew --update` renews it (needs torch). The weights' names, their shapes, the file
and config.json are transformers' own; of this repository are the sizes (of a recipe) and the seeded numbers. Beside it
stand the names and shapes of full-size models, which transformers builds without memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from tests.tools.accuracy.reference import renew as golden
from tools.accuracy.reference.start import draw

ROOT = Path(__file__).resolve().parents[3]
HERE, RECIPES = ROOT / "tests" / "tools" / "weights" / "frozen", ROOT / "recipes"
RECIPE, FOLDER, LOGITS = HERE / "deepseek_v3.yaml", HERE / "deepseek_v3", HERE / "logits.npy"
NAMES = HERE / "names.json"
FULL = ("telechat3_105b/pretrain_4k.yaml", "telechat3_36b/pretrain_8k.yaml")
SEED = 5


def tokens() -> np.ndarray:
    """Return the first batch of the golden corpus, [B, S], with which a run in MindFormers begins."""
    return golden.load()["first_ids"]


def compute(folder: Path) -> np.ndarray:
    """Return the logits [B, S, v] of `tokens` by transformers' model of a folder, loaded by transformers, in
    float32.
    """
    import torch
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens().astype(np.int64)), use_cache=False).logits
    return np.asarray(logits.numpy())


def sample(logits: np.ndarray) -> np.ndarray:
    """Return the part of logits [B, S, v] that is kept: the first sample whole, and every fourth position and token of
    the other samples.
    """
    return np.concatenate([logits[0].ravel(), logits[1:, ::4, ::4].ravel()]).astype(np.float32)


def summary(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return a summary of names and shapes: one line for names that differ only in numbers, and a checksum of all names
    and shapes.
    """
    groups: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = f"{re.sub(r'[.][0-9]+[.]', '.*.', name)} {list(shape)}"
        groups[kind] = groups.get(kind, 0) + 1
    lines = "".join(f"{name} {list(shape)}\n" for name, shape in sorted(shapes.items()))
    return {"groups": dict(sorted(groups.items())), "sha256": hashlib.sha256(lines.encode()).hexdigest()}


def full_size(recipe: str) -> dict[str, Any]:
    """Return the `summary` of the model that transformers builds for a recipe, without values (on the meta device)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.recipe.load import load_recipe
    from tools.weights.convert_plan import model_of
    from tools.weights.hugging_face_config import config_of

    content = config_of(model_of(load_recipe(RECIPES / recipe)), "bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(content.pop("model_type"), **content))
    return summary({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})


@click.command()
@click.option(
    "--update",
    is_flag=True,
    required=True,
    help="Have transformers build the small test model again and overwrite the stored one.",
)
def main(update: bool) -> None:
    """Build the frozen model again and overwrite the stored files."""
    import torch
    import transformers
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from tools.recipe.load import load_recipe
    from tools.weights.convert_plan import model_of

    model = DeepseekV3ForCausalLM(DeepseekV3Config(**model_of(load_recipe(RECIPE)).hf)).float()
    values = {name: torch.from_numpy(draw(name, tuple(old.shape), SEED)) for name, old in model.state_dict().items()}
    model.load_state_dict(values, strict=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    model.save_pretrained(FOLDER)
    np.save(LOGITS, sample(compute(FOLDER)))
    about = f"state_dict of transformers {transformers.__version__} on the meta device, of the recipes' config.json"
    content = {"source": about, **{recipe: full_size(recipe) for recipe in FULL}}
    NAMES.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    kept = [*FOLDER.iterdir(), LOGITS, NAMES]
    click.echo(f"written: {FOLDER} and {LOGITS.name} ({sum(path.stat().st_size for path in kept):,} bytes)")


if __name__ == "__main__":
    main()

"""A checkpoint of the tiny model of tests/training, as one process saves it, with numbers drawn at random."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from plugins.sealed_checkpoint.router_state import ADAM
from tests.training.runs import HERE, ROOT
from tools.recipe.load import load_recipe
from tools.weights.reshard import folder_in, reshard
from tools.weights.reshard_plan import plan_stored
from tools.weights.reshard_target import target_of
from tools.weights.source import open_source

ONE = HERE / "sharded.yaml"
LAYOUTS = {name: HERE / f"sharded_{name}.yaml" for name in ("tp2", "pp2", "zero", "ep2")}
SMALL = {"one": ONE, **LAYOUTS}
MINI_3D = ROOT / "recipes" / "mini" / "pretrain_3d.yaml"  # of another model: never of the drawn numbers


def draw(folder, seed=0, recipe=ONE):
    """Weights (one of them bfloat16), moments, state of the routers and a counter; returns the arrays by name."""
    rng = np.random.default_rng(seed)
    target = target_of(load_recipe(recipe))
    model = {name: rng.standard_normal(item.shape).astype(np.float32) for name, item in target.weights.items()}
    model["output_layer.weight"] = model["output_layer.weight"].astype(ml_dtypes.bfloat16)
    opt = {f"{prefix}{name}": rng.random(model[name].shape, np.float32) for name in model for prefix in ADAM}
    states = {name: rng.random(item.shape, np.float32) for name, item in target.states.items() if "router" in name}
    opt["global_step"] = np.array([3], np.int32)
    folder.mkdir(parents=True)
    save_file({**model, **states}, folder / "mini-model-0000000-0000001.safetensors", {"format": "ms"})
    save_file(opt, folder / "mini-opt-0000000-0000001.safetensors", {"format": "ms"})
    (folder / "common.json").write_text(json.dumps({"step_num": 3, "global_step": 3, "global_batch_size": 4}))
    return {**model, **states, **opt}


def laid_out(folder, recipe, target, **options):
    """The iteration that `folder` becomes in the layout of `recipe`, below `target`."""
    source = open_source(folder)
    planned = plan_stored(source, load_recipe(recipe))
    reshard(source, target, planned.plan, **options)
    return folder_in(target, source)

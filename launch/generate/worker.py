"""This module is the process that computes logits: MindFormers' model as it trains on CPU, with only its forward pass.

    python launch/generate/worker.py RECIPE WEIGHTS FD

RECIPE is a recipe that `launch.generate.command.forward_recipe` returned, WEIGHTS is a checkpoint or a Hugging Face
folder, and FD is one end of a pipe. The worker first sends `Ready` or `Refused`; then, for each list of ids that it
receives, the logits of the next token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started by path; the repository may not be installed
    sys.path.insert(0, str(ROOT))

from launch.generate.session import Ready, Refused
from launch.workers.lifetime import die_with_parent, run_then_hard_exit
from plugins.errors import CheckpointError, TC3Error
from tools.process.children import import_mindformers, temporary_folder
from tools.recipe.load import Recipe, load_recipe
from tools.schema.versions import require_verified
from tools.weights.convert_plan import model_of, plan_conversion
from tools.weights.hugging_face_config import check_config
from tools.weights.hugging_face_names import STATE
from tools.weights.source import Source, open_source

Reader = Callable[[str], np.ndarray]  # a parameter's name -> its whole value


class Model:
    """A `Model` is MindFormers' training model with the weights of a checkpoint."""

    def __init__(self, recipe: Path, weights: Path):
        from mindspore import Tensor

        self.network = build(recipe)
        self.length = int(load_recipe(recipe)["model"]["model_config"]["seq_length"])
        fill(self.network, recipe, weights)
        self.network.set_train(False)  # it then returns logits
        # 1 where attention is forbidden, as the dataset has it
        self.mask = Tensor(np.triu(np.ones((1, 1, self.length, self.length), np.uint8), k=1))
        self.logits([0])  # compile

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of the token after `ids`, float32 [V]; `ids` holds at most as many ids as a training
        sample.

        Tokens to the right of a position do not affect it, so the graph has a single shape: the ids are padded with
        zeros.
        """
        from mindspore import Tensor

        sample = np.zeros((1, self.length), np.int32)
        sample[0, : len(ids)] = ids
        out: np.ndarray = self.network(Tensor(sample), None, self.mask).asnumpy()
        return out[len(ids) - 1].copy()


def build(recipe: Path) -> Any:
    """Return the network of a recipe, built by the steps of launch/train.py and of MindFormers' trainer."""
    import_mindformers()
    from mindformers import MindFormerConfig, build_context
    from mindformers.models import build_network

    config = MindFormerConfig(str(recipe))
    with temporary_folder():
        build_context(config)
    from plugins import enable_model
    from plugins.cpu_backend import adapter

    adapter.enable(config)
    enable_model(config)
    sections = {"parallel_config": config.parallel_config, "dataset_config": config.train_dataset}
    return build_network(config.model, default_args=sections)


def fill(network: Any, recipe: Path, weights: Path) -> None:
    """Load every parameter of `network` from the folder `weights`.

    Raises:
        CheckpointError: `weights` lack one, or have it in another shape.
    """
    from mindspore import Tensor

    read = reader(weights, load_recipe(recipe))
    for parameter in network.get_parameters():
        if parameter.name.endswith(STATE):
            continue  # counters of training
        array = read(parameter.name)
        if array.shape != tuple(parameter.shape):
            shapes = f"has shape {list(array.shape)}, but {list(parameter.shape)} in the recipe's model"
            raise CheckpointError(
                f"{weights}: {parameter.name} {shapes}; with --recipe name the recipe of this checkpoint's model"
            )
        parameter.set_data(Tensor(array))


def reader(weights: Path, recipe: Recipe) -> Reader:
    """Return a function that returns the whole value of a parameter, given its name; expert weights are in logical
    order.

    Args:
        weights: an iteration of a run in any layout, or a Hugging Face folder.
        recipe: the recipe of the weights' model.

    Raises:
        CheckpointError: not whole, or not of this model; the function raises it for what is missing.
    """
    source = open_source(weights)
    return _from_hugging_face(source, recipe) if source.form == "Hugging Face" else _from_mindformers(source)


def _from_mindformers(source: Source) -> Reader:
    def read(name: str) -> np.ndarray:
        if name not in source.headers:
            wrong = (
                f"the weight {name} of the recipe's model is missing; name the recipe of this checkpoint's model with "
                "--recipe"
            )
            raise CheckpointError(f"{source.path}: {wrong}")
        array, differing = source.read(name)
        if differing:
            ranks = ", ".join(map(str, differing))
            raise CheckpointError(
                f"{source.path}: {name}: ranks {ranks} hold values of this weight that differ from those of the first "
                "rank; use another checkpoint"
            )
        return array.astype(np.float32)

    return read


def _from_hugging_face(source: Source, recipe: Recipe) -> Reader:
    # the recipe's model has no MTP layers here (`forward_recipe`); the folder may have some, which are not read
    mtp_layers = sum(name.endswith(".eh_proj.weight") for name in source.headers)
    sizes = replace(model_of(recipe), mtp_layers=mtp_layers)
    config = check_config(source.path, sizes)
    tied = bool(config and config.get("tie_word_embeddings"))
    one_file = sum(header.bytes for header in source.headers.values())
    plan = plan_conversion(source.headers, sizes, "MindFormers", "F32", one_file, tied)
    entries = {entry.mindformers: entry for shard in plan.shards for entry in shard.entries}

    def read(name: str) -> np.ndarray:
        parts = [source.read(plan.stands_for.get(part, part))[0] for part in entries[name].parts]
        return entries[name].join([part.astype(np.float32) for part in parts])  # the parts may differ in type

    return read


def serve(recipe: Path, weights: Path, pipe: Connection) -> None:
    """Answer requests until the other end of the connection is closed."""
    try:
        require_verified()
        model = Model(recipe, weights)
    except TC3Error as error:
        pipe.send(Refused(str(error)))
        return
    pipe.send(Ready())
    while True:
        try:
            ids = pipe.recv()
        except EOFError:
            return
        pipe.send(model.logits(ids))


def main() -> None:
    """Load the model that the command-line arguments of this process name, and answer requests for its logits."""
    die_with_parent()
    recipe, weights, number = sys.argv[1:]
    with Connection(int(number)) as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(Path(recipe), Path(weights), pipe)


if __name__ == "__main__":
    run_then_hard_exit(main)

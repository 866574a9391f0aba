"""Build a recipe's model on CPU and load folders into it, each from zeros: what its parameters are then.

`python -m tests.plugins.hugging_face_weights.load_worker RECIPE OUT FOLDER...` writes OUT/0.npz, OUT/1.npz, ...; where
MindFormers refuses a folder, OUT/N.txt.
"""

import sys
from pathlib import Path

import numpy as np


def build(recipe, folder):
    """The network that a run with `checkpoint.load_path: folder` trains."""
    from mindformers import MindFormerConfig, build_context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models import build_network

    from plugins import enable_plugins
    from plugins.cpu_backend import adapter
    from tools.recipe.dump import dump_recipe
    from tools.recipe.load import load_recipe

    flat = Path(sys.argv[2]) / "flat.yaml"
    dump_recipe({**load_recipe(Path(recipe)), "plugins": {}}, flat)
    config = MindFormerConfig(str(flat))
    config.checkpoint.load_path, config.checkpoint.no_load_optim = folder, True
    build_context(config)
    adapter.enable(config)
    enable_plugins(config)
    build_parallel_config(config)
    return build_network(config.model, default_args={"parallel_config": config.parallel_config})


def main(recipe, out, *folders):
    from mindformers.checkpoint.checkpoint import load_checkpoint, load_hf_checkpoint
    from mindformers.checkpoint.utils import is_hf_checkpoint
    from mindspore import Tensor

    for number, folder in enumerate(folders):
        try:
            network = build(recipe, folder)
            for parameter in network.get_parameters():
                parameter.set_data(Tensor(np.full(parameter.shape, np.nan, np.float32)))
            load = load_hf_checkpoint if is_hf_checkpoint(folder) else load_checkpoint
            load(folder, network)
        except Exception as error:
            (Path(out) / f"{number}.txt").write_text(f"{type(error).__name__}: {error}")
            continue
        np.savez(Path(out) / f"{number}.npz", **{item.name: item.asnumpy() for item in network.get_parameters()})


if __name__ == "__main__":
    main(*sys.argv[1:])

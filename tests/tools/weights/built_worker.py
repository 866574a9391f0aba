"""The weights of recipes' models as MindFormers builds them, without memory: name -> shape, a JSON line a recipe.

`python -m tests.tools.weights.built_worker LAYERS RECIPE...`; the models have LAYERS layers.
"""

import json
import sys
from pathlib import Path

from mindspore import ops


def build(recipe, layers, folder):
    from mindformers import MindFormerConfig, build_context
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models import build_network
    from mindspore.nn.utils import no_init_parameters

    from tools.recipe.dump import dump_recipe
    from tools.recipe.load import load_recipe

    ops.Primitive.add_attr = lambda operator, name, value: None  # see tests/recipes/counted.py
    flat = Path(folder) / "flat.yaml"
    dump_recipe(dict(load_recipe(Path(recipe))), flat)
    config = MindFormerConfig(str(flat))
    # the mesh does not change a parameter's full shape: one process, one device
    config.use_parallel, config.parallel.parallel_mode = False, 0
    config.context = MindFormerConfig(mode=0, device_target="CPU")
    config.recompute_config = MindFormerConfig(recompute=False)
    config.parallel_config = MindFormerConfig(data_parallel=1, pipeline_stage=1)
    changes = {"offset": 0, "pp_interleave_num": 1, "moe_token_dispatcher_type": "alltoall"}
    config.model.model_config.update({**changes, "num_hidden_layers": layers})
    build_context(config)
    build_parallel_config(config)
    with no_init_parameters():
        network = build_network(config.model, default_args={"parallel_config": config.parallel_config})
    return {parameter.name: list(parameter.shape) for parameter in network.get_parameters()}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print("built:", json.dumps(build(name, int(sys.argv[1]), Path.cwd())), flush=True)

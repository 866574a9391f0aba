"""This module counts the parameters that MindFormers builds for a recipe's model, without memory for them."""

import json
import subprocess
import sys

from tests.recipes.oracles import ROOT

COUNT = """
import json, math, os, sys
import mindspore as ms
from mindspore import ops
from mindformers import MindFormerConfig, build_context
from mindformers.core.parallel_config import build_parallel_config
from mindformers.models import build_network
from mindspore.nn.utils import no_init_parameters

# what operators are told matters only to a graph, and takes most of the time: functions among it are parsed each time
ops.Primitive.add_attr = lambda operator, name, value: None

def count(name):
    config = MindFormerConfig(name)
    if "output_biases" in (config.plugins or {}):  # which decides what there is; on CPU it edits another class
        from plugins import enable_model
        config.context = MindFormerConfig(device_target="Ascend")
        enable_model(config)
    # the mesh does not change a parameter's full shape: one process, one device
    config.use_parallel, config.parallel.parallel_mode = False, 0
    config.context = MindFormerConfig(mode=0, device_target="CPU")
    config.recompute_config = MindFormerConfig(recompute=False)
    config.parallel_config = MindFormerConfig(data_parallel=1, pipeline_stage=1)
    config.model.model_config.update(dict(offset=0, pp_interleave_num=1, moe_token_dispatcher_type="alltoall"))
    build_context(config)
    build_parallel_config(config)
    with no_init_parameters():
        network = build_network(config.model, default_args={"parallel_config": config.parallel_config})
    return sum(math.prod(parameter.shape) for parameter in network.trainable_params())

for name in sys.argv[1:]:
    if os.fork():  # a process for each model, whose memory is never given back; what takes long is the import
        os.wait()
        continue
    try:
        outcome = count(name)
    except Exception as error:
        outcome = repr(error)
    print(json.dumps([name, outcome]), flush=True)
    os._exit(0)
"""


def counted(paths):
    """path -> number of parameters, or an error's text."""
    command = [sys.executable, "-c", COUNT, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))

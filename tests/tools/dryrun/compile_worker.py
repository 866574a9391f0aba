"""Compile a recipe's training step for one rank of a virtual Ascend cluster, in a process of its own.

    python -m tests.tools.dryrun.compile_worker OUT.json --rank 5
        [--set model.model_config.moe_token_dispatcher_type=...]
        [--plugins '{"hierarchical_ep": {"mode": "hierarchical"}}']

OUT.json: {"rank", "groups": [[name, ranks], ...] as created, "seconds", "collectives": [...], "peak_mib"}.
"""

import argparse
import dataclasses
import importlib
import json
import os
import resource
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).with_name("ascend.yaml")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="semi-auto, without pipeline stages")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--plugins", type=json.loads, default={}, help="JSON: the recipe's `plugins:` section")
    parser.add_argument(
        "--experts", help="without a plugin: module:Class for MoESubmodules.experts instead of FFNGroupedGEMM"
    )
    parser.add_argument("--experts-arguments", type=json.loads, default={}, help="JSON: keyword arguments of the class")
    parser.add_argument("--build-only", action="store_true", help="groups without collectives, in a third of the time")
    parser.add_argument("--keep-graph", type=Path, help="copy the final graph's text here")
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(compile_rank(arguments), indent=1))


def compile_rank(arguments):
    from tools.dryrun.collectives import read_collectives
    from tools.dryrun.graph_text import read_graph
    from tools.dryrun.virtual_cluster import final_graph, virtual_cluster
    from tools.recipe.load import load_recipe
    from tools.recipe.override import apply_overrides

    recipe = apply_overrides(load_recipe(arguments.recipe), arguments.overrides)
    recipe["plugins"] = arguments.plugins
    sizes = recipe["parallel_config"]
    devices = sizes["data_parallel"] * sizes["model_parallel"]
    report = {"rank": arguments.rank}
    with tempfile.TemporaryDirectory() as folder:
        graphs = Path(folder)
        with virtual_cluster(devices, arguments.rank, graphs) as cluster:
            set_parallel_context(recipe, devices, arguments.rank)
            if arguments.experts:
                replace_experts(arguments.experts, arguments.experts_arguments)
            step = build_step(recipe)
            if not arguments.build_only:
                report["seconds"] = compile_step(cluster, step, inputs_of(recipe))
        report["groups"] = list(cluster.groups.items())
        if arguments.build_only:
            return report
        graph = final_graph(graphs)
        if arguments.keep_graph:
            arguments.keep_graph.write_bytes(graph.read_bytes())
        report["collectives"] = [
            dataclasses.asdict(item) for item in read_collectives(read_graph(graph), cluster.ranks_of)
        ]
    report["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    check_restored()
    return report


def set_parallel_context(recipe, devices, rank):
    import mindspore as ms

    parallel = recipe["parallel"]
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        device_num=devices,
        global_rank=rank,
        dataset_strategy=tuple(map(tuple, parallel["dataset_strategy"])),
        **{name: parallel[name] for name in ("full_batch", "gradients_mean", "enable_alltoall")},
        enable_parallel_optimizer=parallel["enable_parallel_optimizer"],
    )


def build_step(recipe):
    """The training step as MindFormers' trainer wraps it, parameters not materialised."""
    from mindformers import MindFormerConfig
    from mindformers.core.context.build_context import MFContextOperator
    from mindformers.core.lr import ConstantWarmUpLR
    from mindformers.core.optim import AdamW
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models import build_network
    from mindformers.wrapper.wrapper import DataOrderWrapperCell, MFTrainOneStepCell
    from mindspore.nn.utils import no_init_parameters
    from mindspore.nn.wrap.cell_wrapper import _VirtualDatasetCell

    from plugins import enable_plugins

    config = MindFormerConfig(**recipe)
    os.environ["RUN_MODE"] = config.run_mode  # what build_context would tell the model
    MFContextOperator(config).set_context(use_legacy=False)
    enable_plugins(config)
    build_parallel_config(config)
    config.model.model_config.parallel_config = config.parallel_config
    with no_init_parameters():
        model = build_network(config.model, default_args={"parallel_config": config.parallel_config})
        model.set_train()
        names = config.train_dataset.construct_args_key
        network = _VirtualDatasetCell(DataOrderWrapperCell(names, model))
        schedule = ConstantWarmUpLR(learning_rate=1e-4, warmup_steps=10, total_steps=100)
        optimizer = AdamW(model.trainable_params(), learning_rate=schedule)
        step = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=1.0)
    return step.set_train()


def replace_experts(experts, experts_arguments):
    """Point the MoE layers' spec at another experts class: `config` is passed to it, and `experts_arguments`."""
    from mindformers.models.telechat3_moe import modeling_telechat3_moe_train as modeling
    from mindformers.parallel_core.training_graph.transformer.moe.moe_layer import MoELayer
    from mindformers.parallel_core.utils.spec_utils import ModuleSpec

    module, name = experts.split(":")
    spec = ModuleSpec(module=getattr(importlib.import_module(module), name), params=experts_arguments)
    stock = modeling.get_gpt_decoder_block_spec

    def block_spec(config):
        block = stock(config)
        for layer in block.layer_specs:
            if layer.submodules.mlp.module is MoELayer:
                layer.submodules.mlp.submodules.experts = spec
        return block

    modeling.get_gpt_decoder_block_spec = block_spec


def inputs_of(recipe):
    """Return the batch of one data-parallel rank: input_ids, labels, loss_mask, position_ids, attention_mask."""
    import numpy as np
    from mindspore import Tensor

    batch, length = recipe["runner_config"]["batch_size"], recipe["model"]["model_config"]["seq_length"]
    tokens = Tensor(np.zeros((batch, length), np.int32))
    mask = Tensor(np.ones((batch, length), np.float32))
    return tokens, tokens, mask, tokens, Tensor(np.zeros((batch, 1, length, length), np.uint8))


def compile_step(cluster, step, inputs):
    """Seconds that it took."""
    from mindspore.common.api import _cell_graph_executor

    cluster.target_ascend()
    started = time.monotonic()
    _cell_graph_executor.compile(step, *inputs, phase="train")
    return round(time.monotonic() - started, 1)


def check_restored():
    """After the cluster this process is an ordinary CPU one again."""
    import mindspore as ms
    from mindspore.communication import get_group_size, get_rank

    assert (ms.get_context("device_target"), ms.get_context("precompile_only")) == ("CPU", False)
    assert (get_rank(), get_group_size()) == (0, 1)
    assert float(ms.ops.ReduceSum()(ms.Tensor([1.0, 2.0]) * 2)) == 6.0


if __name__ == "__main__":
    main()

"""This program reads from MindSpore's compiled graph which rows of the global batch a rank computes in each
micro-batch.

    python -m tests.plugins.attention_balance.micro_batches_worker pipeline|accumulation RANK

A toy network, 2 data-parallel ranks, 4 micro-batches of one row, compiled for a virtual Ascend cluster. Prints JSON,
[[rows], ...] by micro-batch. Rank r's loader holds the rows 4 r to 4 r + 3.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

RANKS, MICRO_BATCHES, WIDTH = 2, 4, 8


def main():
    kind, rank = sys.argv[1], int(sys.argv[2])
    print(json.dumps(rows_of(compiled(2 if kind == "pipeline" else 1, rank), rank)))


def compiled(stages, rank):
    """Text of the final graph."""
    from tools.dryrun.virtual_cluster import final_graph, virtual_cluster

    with tempfile.TemporaryDirectory() as folder:
        with virtual_cluster(RANKS * stages, rank, Path(folder)) as cluster:
            import numpy as np
            from mindspore import Tensor
            from mindspore.common.api import _cell_graph_executor

            step = build_step(stages, rank)
            cluster.target_ascend()
            _cell_graph_executor.compile(step, Tensor(np.zeros((MICRO_BATCHES, WIDTH), np.float32)), phase="train")
        return final_graph(Path(folder)).read_text()


def build_step(stages, rank):
    import mindspore as ms
    import numpy as np
    from mindformers.wrapper.wrapper import GradAccumulationCellWithMultiOutputs, PipelineCellWithMultiOutputs
    from mindspore import nn, ops
    from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell, _VirtualDatasetCell

    class Layer(nn.Cell):
        def __init__(self, stage):
            super().__init__()
            self.weight = ms.Parameter(ms.Tensor(np.ones((WIDTH, WIDTH), np.float32)), name="weight")
            self.multiply = ops.MatMul().shard(((RANKS, 1), (1, 1)))
            self.pipeline_stage = stage

        def construct(self, x):
            return self.multiply(x, self.weight)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.last = Layer(0), Layer(stages - 1)
            self.sum = ops.ReduceSum().shard(((RANKS, 1),))

        def construct(self, x):
            return self.sum(self.last(self.first(x)))

    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=RANKS * stages, global_rank=rank,
        dataset_strategy=((RANKS, 1),), full_batch=False,
    )  # fmt: skip
    if stages > 1:
        ms.set_auto_parallel_context(pipeline_stages=stages)
    cut = PipelineCellWithMultiOutputs if stages > 1 else GradAccumulationCellWithMultiOutputs
    network = _VirtualDatasetCell(cut(Net(), MICRO_BATCHES))
    return _TrainGradAccuStepCell(network, nn.SGD(network.trainable_params(), 0.1)).set_train()


def rows_of(graph, rank):
    """Follow the input through AllGather and slices to the last slice of each micro-batch."""
    values = {"%para1_inputs0": list(range(MICRO_BATCHES * rank, MICRO_BATCHES * (rank + 1)))}
    used, ends = set(), []
    for name, operator, arguments in re.findall(r"(%\d+)\(\w+\) = (\w+)\((.*?)\) [{pc]", graph):
        source = arguments.split(",")[0]
        if source not in values:
            continue
        value = values[source]
        if operator == "AllGather":
            values[name] = list(range(RANKS * MICRO_BATCHES))
        elif operator == "PrimFunc_StridedSlice":
            first, stop = (int(number) for number in re.findall(r"\(I64\((\d+)\), I64\(\d+\)\)", arguments)[:2])
            values[name] = value[first:stop]
            used.add(source)
            ends.append(name)
        elif operator == "Depend":
            values[name] = value
    return [values[name] for name in ends if name not in used]


if __name__ == "__main__":
    main()

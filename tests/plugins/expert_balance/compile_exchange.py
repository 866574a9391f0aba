"""Compile the exchange of expert rows for one rank of 16 virtual Ascend devices: python -m ... OUT.json."""

import json
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from plugins.expert_balance.graph import CollectiveRanks
from tools.dryrun.collectives import read_collectives
from tools.dryrun.graph_text import read_graph
from tools.dryrun.virtual_cluster import final_graph, virtual_cluster

RANK, RANKS = 13, 16


def main(out):
    """Write operator, group and shapes of every collective in the compiled graph."""
    with tempfile.TemporaryDirectory() as folder, virtual_cluster(RANKS, RANK, Path(folder)) as cluster:
        ms.set_context(mode=ms.GRAPH_MODE)
        ms.set_auto_parallel_context(parallel_mode="stand_alone")
        cell = CollectiveRanks(range(RANKS), RANK).exchange
        counts = Tensor(np.ones(RANKS, np.int64))
        words = Tensor(np.zeros(RANKS, np.int32))
        cluster.target_ascend()
        cell.compile(words, counts, counts)
        graph = read_graph(final_graph(Path(folder)))
        found = read_collectives(graph, cluster.ranks_of)
        Path(out).write_text(json.dumps([[item.op, item.ranks, item.attributes] for item in found]))


if __name__ == "__main__":
    main(sys.argv[1])

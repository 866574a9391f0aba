"""Which part of each parameter a data-parallel rank holds, in the form MindFormers' checkpoints expect.

MindSpore derives this from a sharded graph; in data-parallel mode there is none, and MindFormers 1.9.0 can
neither write metadata.json nor load the files of several ranks without it.
"""

from __future__ import annotations

from mindspore import Layout
from mindspore.communication import get_group_size

from plugins.cpu_backend import world


def of_all_ranks(network, rank_id=None) -> dict[int, dict[str, list]]:
    """rank -> parameter name -> [layout, dtype, full shape], as `mindspore.parallel.get_strategy_metadata`.

    The parameters come from the train step, because `network` may lack the optimizer's. Parameters marked
    `layerwise_parallel` (expert weights) are split along axis 0, all others are whole.
    """
    ranks = get_group_size()
    step = world.train_step()
    params = {**step.network.parameters_dict(), **step.optimizer.parameters_dict()}
    entries = {name: _entry(param, ranks) for name, param in params.items()}
    return dict.fromkeys(range(ranks) if rank_id is None else [rank_id], entries)


def of_this_rank(network) -> dict[int, dict[str, list]]:
    """As `mindspore.parallel.get_current_strategy_metadata`: the key is always 0."""
    return {0: of_all_ranks(network, 0)[0]}


def _entry(param, ranks: int) -> list:
    layout = Layout((ranks,), ("dp",))
    shape = tuple(param.shape)
    if param.layerwise_parallel:
        return [layout("dp", *["None"] * (len(shape) - 1)), param.dtype, (shape[0] * ranks,) + shape[1:]]
    return [layout(*["None"] * len(shape)), param.dtype, shape]

"""This module sends the names of the tensors that each pipeline stage saves to rank 0, which writes the metadata of
checkpoints; each rank has only the tensors of its own stage.

Rank 0 writes a checkpoint's metadata.json from MindSpore's layouts of all ranks. With AdamW each rank's optimizer holds
the weights of all stages before MindSpore cuts the pipeline, so MindSpore knows the layouts of all stages. With Muon
and PmaAdamW, MindFormers 1.9.0 leaves the weights of other stages out of the optimizer
(`filter_current_stage_parameters`), and MindSpore then returns only the layouts of the rank's own stage: metadata.json
would list only the tensors of stage 0, and a resume would not find the other tensors.

The first rank of each stage therefore writes its stage's list into the folder where the checkpoint is being saved, and
rank 0 reads and removes all of them. Every rank saves into this folder, so all ranks share the folder.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugins.private_hooks import replace
from plugins.sealed_checkpoint.router_state import AVERAGES, MUON_MOMENT

Metas = dict[int, dict[str, Any] | None]  # rank -> name -> MindFormers' `ShardedTensor`
_saving: list[Path] = []  # the folder in which a checkpoint is being saved, once there was one


def saves_in(folder: Path) -> None:
    """Record the folder of the next checkpoint, in which pipeline stages will exchange their metadata."""
    _saving[:] = [folder]


def of_all_stages(
    folder: Path, found: Metas, rank: int, ranks: int, stages: int, wait: Callable[[], None]
) -> dict[int, dict[str, Any] | None]:
    """Return the tensors that each rank saves; ranks other than 0, which write no metadata, get only the tensors of
    their own stage.

    Args:
        folder: a folder that all ranks share.
        found: the metadata of the ranks of this rank's stage.
        ranks: the ranks of the run.
        wait: a function that returns when all ranks have called it.
    """
    each = ranks // stages
    stage = rank // each
    own = {one: found[one] for one in range(stage * each, (stage + 1) * each)}
    files = [folder / f"stage_{number}.pickle" for number in range(stages)]
    if rank % each == 0:
        files[stage].write_bytes(pickle.dumps(own))
    wait()
    if rank:
        return own
    whole: Metas = {}
    for file in files:
        whole |= pickle.loads(file.read_bytes())
        file.unlink()
    return whole


def enable() -> None:
    """Make the checkpoints of a pipeline with Muon or PmaAdamW list the tensors of all stages."""
    import mindspore as ms
    from mindformers.core.callback import callback
    from mindformers.tools.utils import get_real_group_size, get_real_rank
    from mindformers.utils.parallel_utils import barrier_world

    of_own_view = callback.get_all_sharded_tensor

    def get_all_sharded_tensor(network: Any, filter_func: Any = None) -> Metas:
        found = of_own_view(network=network, filter_func=filter_func)
        stages = ms.get_auto_parallel_context("pipeline_stages")
        if stages == 1 or not any(item.name.startswith((MUON_MOMENT, AVERAGES)) for item in network.get_parameters()):
            return found

        def wait() -> None:
            barrier_world("All stages to list their tensors.")

        return of_all_stages(_saving[0], found, get_real_rank(), get_real_group_size(), stages, wait)

    line = "global_strategy_info = get_strategy_metadata(network)"
    replace(callback, "get_all_sharded_tensor", line, get_all_sharded_tensor)

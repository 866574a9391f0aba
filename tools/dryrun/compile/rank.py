"""One rank's training step, compiled by MindSpore's own front end in this process: a process compiles once.

`python -m launch.workers.dryrun_rank` runs it; what it reports is plain data (see `Compiled` in `report.py`).
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugins.semi_auto_cpu.ranks import WORLD
from tools.dryrun.compile.job import Job
from tools.dryrun.compile.training_step import inputs_of, training_step
from tools.dryrun.compile.virtual_cluster import VirtualCluster, final_graph, virtual_cluster
from tools.dryrun.graph.report import report_graph
from tools.dryrun.graph.text import read_graph
from tools.dryrun.layout import Held, kinds_of
from tools.files.atomic import atomic_file
from tools.recipe.view import View
from tools.schema.defaults import model_default, model_number

_HOST = re.compile(r"can't start new thread|No space left on device|Cannot allocate memory|bad_alloc")  # from C++, too


def compile_job(
    job: Job, folder: Path, enable_plugins: Callable[[Any], None], text: Path | None = None
) -> dict[str, Any]:
    """Compile one rank; a refusal by MindSpore or MindFormers is a result as well.

    Args:
        folder: where temporary files go.
        enable_plugins: see `training_step`.
        text: where the text of the final graph is kept, compressed.

    Returns:
        {"rank", "stage"} with {"error"} (and "of_the_host", where another try may end otherwise), or with {"seconds",
        "held"} for a recipe of the CPU, or with {"seconds", "peak_mib", "groups", "held", "graph"}.
    """
    report: dict[str, Any] = {"rank": job.rank, "stage": job.stage}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        graphs = Path(temporary) / "graphs"
        graphs.mkdir()
        view = View(job.recipe)
        with virtual_cluster(view.devices, job.rank, graphs) as cluster:
            try:
                started = time.monotonic()
                step = training_step(job.recipe, Path(temporary), enable_plugins)
                built = time.monotonic()
                if view.cpu_classes:  # data parallel: each rank has what it builds, MindSpore shards nothing
                    report["held"] = [dataclasses.asdict(item) for item in _built(step, view)]
                    return report | {"seconds": {"build": round(time.monotonic() - started, 1)}}
                parameters = parameters_of(step)
                _compile(cluster, step, job)
            except Exception as error:  # whatever MindSpore or MindFormers raises is the finding
                refused = {"error": {"type": type(error).__name__, "message": str(error)}}
                return report | refused | ({"of_the_host": True} if of_the_host(error) else {})
        report["seconds"] = {"build": round(built - started, 1), "compile": round(time.monotonic() - built, 1)}
        report["groups"] = list(cluster.groups.items())
        report["held"] = [dataclasses.asdict(item) for item in _held(step, parameters, cluster, view)]
        graph = read_graph(final_graph(graphs))
        if text:
            keep_text(final_graph(graphs), text)
        report["graph"] = report_graph(graph, job.rank, cluster.ranks_of, even_rows(view))
    report["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return report


def keep_text(graph: Path, text: Path) -> None:
    """Compress the text of a graph to where it is kept."""
    with atomic_file(text) as part, graph.open("rb") as plain, gzip.open(part, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(plain, packed)


def of_the_host(error: Exception) -> bool:
    """Whether an error may be one of this machine at this moment: a full disk, too little memory, a broken package."""
    return isinstance(error, (OSError, MemoryError, ImportError)) or _HOST.search(str(error)) is not None


def parameters_of(cell: Any) -> dict[str, tuple[str, str, bool]]:
    """Kind and type of each parameter, and whether the optimizer updates it; compiling cuts shapes, not types."""
    trained = {item.name for item in cell.optimizer.parameters}
    kinds = kinds_of(cell)
    return {item.name: (kinds[item.name], str(item.dtype), item.name in trained) for item in cell.get_parameters()}


def _compile(cluster: VirtualCluster, cell: Any, job: Job) -> None:
    """The front end, for Ascend."""
    from mindspore.common.api import _cell_graph_executor

    inputs = inputs_of(job.recipe)
    cluster.target_ascend()
    _cell_graph_executor.compile(cell, *inputs, phase="train")


def _held(cell: Any, parameters: dict[str, tuple[str, str, bool]], cluster: VirtualCluster, view: View) -> list[Held]:
    """What the rank keeps, by MindSpore's layouts: [2] is the slice, [5] the optimizer's group, [6] the whole."""
    held = []
    for name, layout in cell.parameter_layout_dict.items():
        if name not in parameters:
            continue  # an input
        kind, dtype, trainable = parameters[name]
        shards = _shards(layout[5], cluster, view) if layout[5] else 1
        held.append(Held(name, kind, dtype, tuple(layout[6]), tuple(layout[2]), shards, trainable))
    return held


def _built(cell: Any, view: View) -> list[Held]:
    """What a data-parallel rank keeps: all of it, but of the experts its own (`layerwise_parallel`)."""
    held, parameters = [], parameters_of(cell)
    for item in cell.get_parameters():
        part = tuple(item.shape)
        whole = (part[0] * view.devices, *part[1:]) if item.layerwise_parallel else part
        kind, dtype, trained = parameters[item.name]
        held.append(Held(item.name, kind, dtype, whole, part, 1, trained))
    return held


def _shards(group: str, cluster: VirtualCluster, view: View) -> int:
    """Ranks over which the optimizer shards; the world's name means the stage's devices here."""
    if group == WORLD:
        return view.devices // view.pp
    return cluster.size_of(group)


def even_rows(view: View) -> int:
    """Tokens of a rank and micro-batch x experts that each goes to."""
    tokens = view.batch * model_number(view, "seq_length") // (view.tp * view.cp)
    return tokens * (model_number(view, "num_experts_per_tok") if model_default(view, "num_experts_per_tok") else 1)

"""This module compiles one rank's training step with MindSpore's own front end in this process, and returns a report on
the graph.

`python -m launch.workers.dryrun_rank` runs it; a process compiles only once. MindFormers' Trainer runs as in a real
training, from `build_context` to the call of `Model.train`, where this module takes over the Trainer's training step:
model, loss, wrappers, recompute, clipping, learning-rate groups and optimizer are those of the Trainer. Data loading,
callbacks and checkpoints are left out, because they need data or a file system and add nothing to the graph. Parameters
have shapes but no memory, and the columns of the recipe's loader have the shapes that one rank reads for a step. The
report is plain data.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import importlib
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from plugins.private_hooks import replaced
from plugins.semi_auto_cpu.ranks import WORLD
from tools.check.arithmetic import columns_of
from tools.dryrun.activations import activations_of, kept_bytes, routed_rows, tensor_bytes
from tools.dryrun.collectives import Collective, flops_of, read_collectives
from tools.dryrun.gradients import copies_of, judge_gradients, seeds_of
from tools.dryrun.graph_text import GraphText, passes_of, read_graph
from tools.dryrun.memory import WEIGHT, Held, kinds_of, on_host
from tools.dryrun.plan import Job
from tools.dryrun.virtual_cluster import VirtualCluster, final_graph, virtual_cluster
from tools.files.atomic import atomic_file
from tools.process.children import import_mindformers, temporary_folder
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import model_default, model_number

_HOST = re.compile(r"can't start new thread|No space left on device|Cannot allocate memory|bad_alloc")  # from C++, too


def compile_job(
    job: Job, folder: Path, enable_plugins: Callable[[Any], None], text: Path | None = None
) -> dict[str, Any]:
    """Compile the training step of one rank, and return a report on the graph. If MindSpore or MindFormers refuses the
    recipe, the report holds the reason.

    Args:
        folder: the folder for temporary files.
        enable_plugins: see `training_step`.
        text: the file for the compressed text of the final graph.

    Returns:
        {"rank", "stage"} with {"error"} (and "of_the_host" if a second try may succeed), or with {"seconds", "held"}
            for a recipe of the CPU, or with {"seconds", "peak_mib", "groups", "held", "gradients", "layouts",
        "seeds", "graph"}.
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
        layouts = ((name, layout) for name, layout in step.parameter_layout_dict.items() if _updates(parameters, name))
        copies = {name: copies_of(layout, job.rank) for name, layout in layouts}
        report["layouts"] = {name: _layout(layout) for name, layout in step.parameter_layout_dict.items()}
        report["gradients"] = judge_gradients(graph, cluster.ranks_of, copies, job.rank)
        report["seeds"] = seeds_of(graph, cluster.ranks_of)
        report["graph"] = report_graph(graph, job.rank, cluster.ranks_of, even_rows(view))
    report["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return report


def keep_text(graph: Path, text: Path) -> None:
    """Write the text of a graph, compressed, into the file `text`."""
    with atomic_file(text) as part, graph.open("rb") as plain, gzip.open(part, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(plain, packed)


def of_the_host(error: Exception) -> bool:
    """Return whether the machine may have caused an error, for example by a full disk, too little memory or a broken
    package.
    """
    return isinstance(error, (OSError, MemoryError, ImportError)) or _HOST.search(str(error)) is not None


def parameters_of(cell: Any) -> dict[str, tuple[str, str, bool]]:
    """Return for each parameter its kind, its type, and whether the optimizer updates the parameter. This function may
    be called before or after the compile, which changes neither kinds nor types.
    """
    trained = {item.name for item in cell.optimizer.parameters}
    kinds = kinds_of(cell)
    return {item.name: (kinds[item.name], str(item.dtype), item.name in trained) for item in cell.get_parameters()}


def _updates(parameters: Mapping[str, tuple[str, str, bool]], name: str) -> bool:
    """Return whether a layout is that of a weight that the optimizer updates, and not of an input or a moment."""
    kind, _, trained = parameters.get(name, ("", "", False))
    return kind == WEIGHT and trained


def _compile(cluster: VirtualCluster, cell: Any, job: Job) -> None:
    """Run the front end, for Ascend; it is given zeros for what one rank reads for a step."""
    from mindspore import Tensor
    from mindspore.common.api import _cell_graph_executor

    inputs = [Tensor(np.zeros(shape, dtype)) for shape, dtype in shapes_of(View(job.recipe)).values()]
    cluster.target_ascend()
    _cell_graph_executor.compile(cell, *inputs, phase="train")


def _held(cell: Any, parameters: dict[str, tuple[str, str, bool]], cluster: VirtualCluster, view: View) -> list[Held]:
    """Return what the rank keeps, by MindSpore's layouts: [2] the slice, [5] the optimizer's group, [6] the whole."""
    held, away = [], on_host(cell)
    for name, layout in cell.parameter_layout_dict.items():
        if name in parameters:  # and no input
            kind, dtype, trainable = parameters[name]
            shards = _shards(layout[5], cluster, view) if layout[5] else 1
            held.append(Held(name, kind, dtype, tuple(layout[6]), tuple(layout[2]), shards, trainable, name in away))
    return held


def _built(cell: Any, view: View) -> list[Held]:
    """Return the parameters that a data-parallel rank keeps: all parameters, but of the experts only its own
    (`layerwise_parallel`).
    """
    held, parameters, away = [], parameters_of(cell), on_host(cell)
    for item in cell.get_parameters():
        part = tuple(item.shape)
        whole = (part[0] * view.devices, *part[1:]) if item.layerwise_parallel else part
        kind, dtype, trained = parameters[item.name]
        held.append(Held(item.name, kind, dtype, whole, part, 1, trained, item.name in away))
    return held


def _layout(layout: Sequence[Any]) -> dict[str, Any]:
    """Return how MindSpore lays a parameter or input on the devices of a stage, as `tools.prove` reads it."""
    names = {"mesh": layout[0], "map": layout[1], "slice": layout[2], "group": layout[5], "whole": layout[6]}
    return {name: value if isinstance(value, str) else list(value) for name, value in names.items()}


def _shards(group: str, cluster: VirtualCluster, view: View) -> int:
    """Return ranks over which the optimizer shards; the world's name means the stage's devices here."""
    if group == WORLD:
        return view.devices // view.pp
    return cluster.size_of(group)


def even_rows(view: View) -> int:
    """Return the number of token copies that a rank dispatches to experts in a micro-batch: its number of tokens x
    top-k.
    """
    tokens = view.batch * model_number(view, "seq_length") // (view.tp * view.cp)
    return tokens * (model_number(view, "num_experts_per_tok") if model_default(view, "num_experts_per_tok") else 1)


# they choose and read samples: nothing of them is in the graph, which is that of the largest batch
_DATA_PLUGINS = ("attention_balance", "batch_ramp", "held_out_loss", "packed_labels", "spike_guard")


class _Reached(Exception):
    """This exception means that the Trainer has called `Model.train`."""


class _NoData:
    """A `_NoData` is a dataset of the right length whose samples nobody reads."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("this dataset has no samples to read, because a dry run only compiles")


def training_step(recipe: Recipe, folder: Path, enable_plugins: Callable[[Any], None]) -> Any:
    """Return the training step (a MindSpore cell) that MindFormers' Trainer builds for a recipe; call this function
    inside an open `virtual_cluster`.

    Args:
        recipe: a flat recipe for Ascend or for CPU, which is not changed.
        folder: an empty folder for the files that MindFormers always writes.
        enable_plugins: a function that enables the recipe's plugins, given the MindFormerConfig (tools never import
            adapters).
    """
    os.environ["LOCAL_DEFAULT_PATH"] = str(folder)
    plain = _without_files(recipe, folder)
    import_mindformers()
    from mindformers import MindFormerConfig, Trainer, build_context
    from mindformers.core.context import parallel
    from mindspore._c_expression import AutoParallelContext
    from mindspore.communication import get_rank
    from mindspore.dataset import GeneratorDataset
    from mindspore.nn.utils import no_init_parameters
    from mindspore.parallel import strategy

    flat = folder / "recipe.yaml"
    dump_recipe(plain, flat)  # MindFormers applies its defaults only to a file
    config = MindFormerConfig(str(flat))
    context = importlib.import_module("mindformers.core.context.build_context")  # its package hides it
    no_affinity = replaced(context, "_setup_affinity", '"affinity_cpu_list" in context_config', lambda _: None)
    with replaced(parallel, "init", "def init(backend_name=None)", lambda: None), no_affinity, temporary_folder():
        build_context(config)  # the virtual cluster is up already, and this host's CPUs are left alone
    # which C++ would ask of the library that is not there; Python's own setter stops at 4,095
    AutoParallelContext.get_instance().set_global_rank(get_rank())
    config.context.device_target = recipe["context"]["device_target"]  # what plugins and model are to build for
    enable_plugins(config)
    _set_data_strategy(config, View(recipe).packs)
    columns = list(shapes_of(View(recipe)))
    samples = max(int((recipe["train_dataset"]["data_loader"].get("sizes") or [1])[0]), 1)
    data = GeneratorDataset(_NoData(samples), column_names=columns, shuffle=False)
    # asked to, MindSpore also writes every rank's strategy for checkpoints: 14 of 16 GB and 40 % of the time at 8,192
    # devices, and nothing of it is in the graph
    online = "enable_save_strategy_online"
    keep_no_strategy = replaced(strategy, online, f"strategy_layout_handle.{online}()", lambda: None)
    with no_init_parameters(), keep_no_strategy, _stop_at_training() as taken:
        trainer = Trainer(config, train_dataset=data.batch(1))
        with suppress(_Reached):
            trainer.train()
    cell = taken[0]
    return cell.set_train()


def _set_data_strategy(config: Any, packs: bool) -> None:
    """Set how inputs lie on the ranks: the step of the Trainer that it leaves out where it is handed its data."""
    from mindformers.trainer.base_trainer import BaseTrainer

    loader = config.train_dataset.data_loader
    if packs:
        loader.create_attention_mask = True
    described = loader.config if loader.type == "BlendedMegatronDatasetDataLoader" else loader
    _, strategy, *_ = BaseTrainer._get_columns_with_strategy(config, described, loader.type)
    BaseTrainer._set_full_batch_with_strategy(config, strategy)


def _without_files(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe without what reads or writes files and without callbacks; eager operators run on this CPU."""
    plain = copy.deepcopy(recipe)
    plain["output_dir"] = str(folder / "output")
    plain["callbacks"] = []
    plain["load_checkpoint"] = ""
    plain.setdefault("checkpoint", {}).update(load_path="", save_path=str(folder / "checkpoint"))
    plain["context"]["device_target"] = "CPU"
    for name in _DATA_PLUGINS:
        (plain.get("plugins") or {}).pop(name, None)
    return plain


@contextmanager
def _stop_at_training() -> Iterator[list[Any]]:
    """Let `Model.train` hand over its network instead of training."""
    from mindspore.train import Model

    taken: list[Any] = []

    def train(model: Any, *_: Any, **__: Any) -> None:
        taken.append(model._network)
        raise _Reached

    with replaced(Model, "train", "_init_auto_parallel_context(self._network)", train):
        yield taken


def shapes_of(view: View) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return a dictionary column -> (shape, NumPy type) of the data that one rank reads for one step, in the order of
    the model's arguments.

    The data of all micro-batches of the step come at once: the first dimension is batch size x micro-batches x
    accumulated steps, and with full_batch also x data-parallel ranks. MindFormers gives every column as int32, masks as
    well (gpt_dataset.py and causal_language_model_dataset.py of 1.9.0).

    Raises:
        RecipeError: the shape of a column is unknown to this module.
    """
    batch = view.batch * view.micro_batches * view.accumulation * (view.dp if view.full_batch else 1)
    length = model_number(view, "seq_length")
    known = dict.fromkeys(("input_ids", "labels", "position_ids", "loss_mask"), ((batch, length), "int32")) | {
        "attention_mask": ((batch, 1, length, length), "int32"),
        "actual_seq_len": ((batch, view.mask_documents), "int32"),
    }
    columns = view.get(("train_dataset", "input_columns")) or columns_of(view)
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise RecipeError(
            f"train_dataset.input_columns: the shapes of {unknown} are not known; a dry run knows only the columns "
            f"{sorted(known)}"
        )
    return {name: known[name] for name in columns}


_LARGER_SIDE = {"AllGather": "outputs", "AllGatherV": "outputs", "Receive": "outputs", "Broadcast": "outputs"}


def report_graph(
    graph: GraphText, rank: int, ranks_of: Callable[[str], tuple[int, ...] | None], even_rows: int
) -> dict[str, Any]:
    """Return the report on a compiled graph: the collectives in program order, the order of the passes, the activations
    and FLOPs of each chunk, and the bytes of the weights that all passes share.

    "groups" are lists of ranks, and a collective names its group by index. "routed" marks bytes that depend on routing,
    and that were computed for even routing. "after" holds the indices of the collectives of the same subgraph whose
    results a collective needs, so that no backend can swap them with it.

    Args:
        even_rows: tokens x top-k of a rank.
    """
    rows = routed_rows(graph, even_rows)
    groups: dict[tuple[int, ...], int] = {}
    found = read_collectives(graph, ranks_of)
    collectives = [_plain(item, rank, groups, rows) | {"after": _direct(item, found)} for item in found]
    return {
        "groups": [list(ranks) for ranks in groups],
        "collectives": collectives,
        "passes": [list(item) for item in passes_of(graph)],
        "kept": kept_bytes(graph, rows),
        "activations": activations_of(graph, rows),
        "flops": flops_of(graph, rows),
    }


def _direct(item: Collective, every: Sequence[Collective]) -> list[int]:
    """Return places of the collectives whose results this one needs, without those that these need themselves."""
    implied = {before for place in item.after for before in every[place].after}
    return [place for place in reversed(item.after) if place not in implied]


def _plain(item: Collective, rank: int, groups: dict[tuple[int, ...], int], rows: int) -> dict[str, Any]:
    """Return one collective as plain values; `bytes` is the size of one rank's tensor on the larger of the two
    sides.
    """
    side = getattr(item, _LARGER_SIDE.get(item.op, "inputs"))[:1]
    block = item.attributes.get("block_size", 1)
    plain = {
        "op": item.op,
        "group": groups.setdefault(item.ranks, len(groups)),
        "role": item.role,
        "bytes": sum(tensor_bytes(tensor, rows * (block if isinstance(block, int) else 1)) for tensor in side),
        "shape": list(side[0].shape) if side else [],
        "dtype": side[0].dtype if side else "",
        "source": item.source,
    }
    if any(size < 0 for tensor in side for size in tensor.shape):
        plain["routed"] = True
    for name in ("dst_global_rank", "src_global_rank"):
        if name in item.attributes:
            plain |= {"me": rank, "peer": item.attributes[name], "tag": item.attributes.get("sr_tag")}
            plain |= {key: item.attributes.get(key) for key in ("micro", "chunk")}
    return plain

"""This module stores, in a file beside a cached sharded graph, the information that MindSpore's compile cache leaves
out, and restores this information when the graph is loaded.

A process that loads a graph runs no front end, so it lacks five things: the layouts of its weights' slices, by which
checkpoints are cut; which parameters are its own; its index in each group; the entries that MindFormers writes into a
checkpoint's metadata; and which kernels the compiler pass needs. MindSpore's cache file contains only the shapes of the
slices. In the same folder, `sharding.json` has one entry for each compilation of the process, in order, because
MindSpore identifies its files only by their number:

    {"cell": what was compiled, "layouts": ..., "names": ..., "strategies": ..., "groups": ..., "places": ...,
     "weights": ..., "sliced": ..., "shared": ..., "kernels": ...}

A graph is loaded only for the same compile: the same cell, inputs, and parameters with their shapes. If any information
is missing or differs, the file of the graph is removed, and the graph is compiled again. The slices after a load are
compared with the slices after the compilation: another shape or group ends the run, because no other check would notice
it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from plugins.errors import ClusterError
from plugins.private_hooks import replace
from plugins.semi_auto_cpu import library
from plugins.semi_auto_cpu.ranks import Ranks

ON, FOLDER = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH"
FILE = "sharding.json"
REMEDY = "remove the folder of the compile cache, or train without a compile cache"
STRATEGY = (
    "dev_matrix", "tensor_map", "tensor_shape", "tensor_type", "opt_weight_shard_step", "opt_weight_shard_size",
    "rank_list",
)  # fmt: skip
Entry = dict[str, Any]


class KeptGraphs:
    """A `KeptGraphs` handles the sharded graphs that this process loads from the compile cache, or writes there.

    Args:
        ranks: this rank, and the groups that Python created.
        environ: the environment, which names the cache folder if there is one.
    """

    def __init__(self, ranks: Ranks, environ: Mapping[str, str] = os.environ):
        self.ranks = ranks
        on = environ.get(ON) == "1" and environ.get(FOLDER)
        self.folder = Path(environ[FOLDER]) / f"rank_{ranks.rank}" if on else None
        self._entries: list[Entry] = []  # that were compiled or loaded so far
        self._there: list[Entry] = []  # of the start that kept them
        self._strategies: dict[str, Entry] = {}  # compile phase -> what MindSpore would know of it
        if self.folder is not None:
            self._there = self._read(self.folder / FILE)
            if not self._there:
                self._forget(0)
        self._loads = bool(self._there)

    def to_load(self, what: Entry) -> Entry | None:
        """Return the stored information about the next graph, so that MindSpore can load it instead of compiling.
        Return None if no graph is stored, or if the description of the stored graph (see `described`) differs from
        `what`.
        """
        number = len(self._entries)
        there = self._there[number]["cell"] if number < len(self._there) else {}
        if there == what and self._has_file(number):
            register(self._there[number]["kernels"])
            return self._there[number]
        if self._loads:
            other = ", ".join(key for key in what if what[key] != there.get(key)) or "file"
            _say(f"rank {self.ranks.rank} compiles {what['class']}: an earlier start has kept another {other}")
            self._forget(number)
        return None

    def restore(self, cell: Any, entry: Entry) -> None:
        """Give `cell`, whose graph was loaded, the information that a compilation would have given it.

        Raises:
            ClusterError: the slices or groups of the loaded graph are not those of the compile.
        """
        for group, members in entry["groups"].items():
            if group not in self.ranks.groups:  # a compile creates some, beside those of the model's cells
                self.ranks.create(group, members)
        self.ranks.places.update(entry["places"])  # by which the compile cut weights; MindSpore does not ask again
        _cut_zeros(cell, entry["weights"])
        groups, slices = _groups(self.ranks), weights(cell)
        for found, wanted, kind in ((groups, entry["groups"], "groups"), (slices, entry["weights"], "slices")):
            if found != wanted:
                other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
                raise ClusterError(
                    f"the graph of {type(cell).__name__} was loaded from the compile cache, but its {kind} differ "
                    f"from those with which it was compiled: {', '.join(other[:3])}; {REMEDY}"
                )
        cell.parameter_layout_dict = {name: tuple(layout) for name, layout in entry["layouts"].items()}
        cell.parallel_parameter_name_list = entry["names"]
        for item in cell.get_parameters():  # a load marks those that have a layout only, a save takes the marked ones
            item.sliced = item.name in entry["sliced"]
            # a copy of another stage's weight, such as MTP's of the embedding: a save leaves it out
            item.param_info.is_pipeline_shared_param = item.name in entry["shared"]
        self._know_strategies(cell, entry["strategies"])
        self._entries.append(entry)
        _say(f"rank {self.ranks.rank} has loaded {type(cell).__name__}")

    def keep(self, cell: Any, what: Entry) -> None:
        """Write to the file beside the graph the information that a later process needs to load the graph of `cell`,
        which was just compiled.

        Nothing is written if MindSpore could not write the graph (its file format does not support every kind of
        attribute).
        """
        if self.folder is None:
            return
        written = self._has_file(len(self._entries))
        entry = {
            "cell": what,
            "layouts": {name: list(layout) for name, layout in cell.parameter_layout_dict.items()},
            "names": list(cell.parallel_parameter_name_list),
            "strategies": strategies(cell.compile_phase),
            "groups": _groups(self.ranks),
            "places": dict(self.ranks.places),
            "weights": weights(cell),
            "sliced": [item.name for item in cell.get_parameters() if item.sliced],
            "shared": [item.name for item in cell.get_parameters() if item.param_info.is_pipeline_shared_param],
            "kernels": registered(),
        }
        self._entries.append(entry)
        text = json.dumps(self._entries)
        back = json.loads(text)[-1]
        other = [key for key in entry if back[key] != entry[key]]  # which would come back as something else
        if not written or other:
            why = f"{', '.join(other)}: nothing that JSON holds" if written else "MindSpore has written no graph"
            _say(f"rank {self.ranks.rank} cannot keep {what['class']} ({why}): the next start compiles it, too")
            for file in [path for path in self.folder.rglob("*") if path.is_file()]:
                file.unlink()
            return
        (self.folder / FILE).write_text(text, encoding="utf-8")

    def _know_strategies(self, cell: Any, told: Entry) -> None:
        """Let MindSpore's code that asks for the strategies of `cell` get those of its compile."""
        from mindspore.parallel import strategy

        original, known = strategy._NetStrategyInfo.__init__, self._strategies
        known[cell.compile_phase] = told

        def with_loaded(info: Any, network: Any, global_layout: Any = None, local_layout: Any = None) -> None:
            original(info, network, global_layout, local_layout)
            phase = network.compile_phase
            if phase in known:
                info._raw_global_layout = {phase: _as_told(known[phase]["global"])}
                info._raw_local_layout = {phase: _as_told(known[phase]["local"])}

        replace(strategy._NetStrategyInfo, "__init__", "self._raw_global_layout = global_layout", with_loaded)

    def _read(self, file: Path) -> list[Entry]:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return found if isinstance(found, list) else []

    def _has_file(self, number: int) -> bool:
        return self.folder is not None and any(self.folder.rglob(f"*_{number}.mindir"))

    def _forget(self, first: int) -> None:
        """Remove MindSpore's files of the compiles from number `first` on, because MindSpore compiles these, and what
        was kept for them: a process that is killed before it has kept its own must not leave an old entry beside a new
        graph.
        """
        assert self.folder is not None
        del self._there[first:]
        if (self.folder / FILE).exists():
            (self.folder / FILE).write_text(json.dumps(self._there), encoding="utf-8")
        for file in self.folder.rglob("*.mindir"):
            number = file.stem.rsplit("_", 1)[-1]
            if not number.isdecimal() or int(number) >= first:
                file.unlink()


def _cut_zeros(cell: Any, wanted: Mapping[str, list[Any]]) -> None:
    """Give parameters whose elements are all zero the shapes of their slices.

    A compile cuts the gradients that accumulate over micro-batches as the weights that they are of. They have no layout
    of their own by which a load could cut them; between steps they are zero.
    """
    from mindspore import Tensor

    for item in cell.get_parameters():
        of_slice = wanted.get(item.name)
        if of_slice and of_slice != _tensor(item) and of_slice[0] == str(item.dtype) and not item.asnumpy().any():
            item.set_data(Tensor(np.zeros(of_slice[1]), item.dtype), slice_shape=True)


def described(cell: Any, inputs: tuple[Any, ...], phase: str) -> Entry:
    """Return a description of a compile: the class of the cell, the phase, the types and shapes of its inputs, and the
    types and shapes of its parameters before they are sliced.
    """
    return {
        "class": type(cell).__name__,
        "phase": phase,
        "inputs": [_tensor(each) for each in inputs],
        "parameters": weights(cell),
    }


def weights(cell: Any) -> Entry:
    """Return the type and shape of a cell's parameters; after a compile, the type and shape of their slices."""
    return {item.name: _tensor(item) for item in cell.get_parameters()}


def registered() -> list[str]:
    """Return the names of the operators that Python computes in this process, also of those that a compiler pass
    added.
    """
    return library.load().registered()


def register(names: Iterable[str]) -> None:
    """Make Python compute these operators in addition to the operators that it already computes."""
    for name in sorted(set(names) - set(registered())):
        library.load().register(name)


def _say(words: str) -> None:
    print(f"compile cache: {words}", file=sys.stderr, flush=True)


def _groups(ranks: Ranks) -> dict[str, list[int]]:
    return {name: list(members) for name, members in ranks.groups.items()}


def strategies(phase: str) -> Entry:
    """Return MindSpore's layouts of the parameters of all ranks and of this rank, after the compilation of `phase`."""
    from mindspore.parallel.strategy import StrategyLayout

    known = StrategyLayout.get_instance()
    told = {"global": known.global_network_layout(), "local": known.local_network_layout()}
    return {
        which: {
            str(rank): {name: {key: getattr(info, key) for key in STRATEGY} for name, info in of_rank.items()}
            for rank, of_rank in layout.get(phase, {}).items()
        }
        for which, layout in told.items()
    }


def _as_told(kept: Entry) -> dict[int, Entry]:
    """Return `strategies` in the form in which MindSpore returns them: rank -> parameter name -> an object."""
    return {
        int(rank): {name: SimpleNamespace(**info) for name, info in of_rank.items()} for rank, of_rank in kept.items()
    }


def _tensor(value: Any) -> list[Any]:
    """Return the type and shape of a tensor; for any other value, return its text."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return [str(value.dtype), list(value.shape)]
    return [type(value).__name__, repr(value)]

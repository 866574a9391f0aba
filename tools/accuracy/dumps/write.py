"""This module writes a dump of tensors. The module writes the file tc3_dump.json, in which `complete` is false until
all files of the dump are on disk. The module lets msprobe (Python package mindstudio-probe) write in each step the
inputs and outputs of the calls that msprobe's level selects. The module itself writes the weights after the last step,
and at msprobe's levels L1 and L2 also the weights before each step.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError
from plugins.private_hooks import replace
from tools.files.atomic import write_atomically

MARKER = "tc3_dump.json"


@dataclass(frozen=True)
class Job:
    """A `Job` holds the settings of one dump, as values fit for JSON."""

    recipe: str
    out: str
    mini: bool
    steps: int
    level: str
    task: str
    overrides: list[str]


def mark(folder: Path, complete: bool, **facts: Any) -> None:
    """Write `tc3_dump.json` atomically, which marks a folder as a dump."""
    write_atomically(folder / MARKER, json.dumps({"complete": complete, **facts}, indent=1))


def claim(folder: Path) -> None:
    """Make an empty `tc3_dump.json`; raise DataError if another dump has made it first."""
    try:
        (folder / MARKER).open("x").close()
    except FileExistsError:
        raise DataError(f"--out {folder}: another dump is being written into this folder; choose another one") from None


def stated(folder: Path) -> dict[str, Any] | None:
    """Return the content of `tc3_dump.json`; return None if this file does not exist, and raise DataError if it is
    damaged.
    """
    file = folder / MARKER
    if not file.exists():
        return None
    try:
        stated = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict) or not isinstance(stated.get("complete"), bool):
        raise DataError(
            f"{file}: the file is damaged and does not say whether the dump is complete; make the dump again"
        )
    return stated


def refuse_parts(
    folder: Path, folders: dict[int, dict[int, Path]], weights: dict[int, dict[int, Path]], stated: dict[str, Any]
) -> None:
    """Raise DataError if a dump lacks steps or ranks, because two dumps that lack the same steps or ranks would seem
    equal.
    """
    steps, workers, level = (stated.get(name) for name in ("steps", "workers", "level"))
    if not (isinstance(steps, int) and isinstance(workers, int)):
        return
    again = "copy the whole dump again, or make it again"
    if ranks := sorted(set(range(workers)) - next(iter(folders.values())).keys()):
        listed = ", ".join(map(str, ranks))
        raise DataError(f"{folder}: {workers} ranks made the dump, but rank {listed} is missing; {again}")
    # at level L2 MindSpore numbers the steps of each graph
    if level != "L2" and (missing := sorted(set(range(steps)) - folders.keys())):
        raise DataError(f"{folder}: the dump was made of {steps} steps, but step {missing[0]} is missing; {again}")
    if steps not in (weights if level in ("L1", "L2") else folders):  # those before the first may not exist
        raise DataError(f"{folder}: the weights after the last step (step {steps}) are missing; {again}")


def debugger(folder: Path, level: str, task: str, rank: int) -> Any:
    """Return msprobe's debugger for one rank, with its own configuration; it writes into `folder/stepN/rankM/`."""
    everything = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    content = {"task": task, "level": level, "dump_path": str(folder), "rank": [], "step": [], "extra_info": True}
    config = folder / f"msprobe_rank{rank}.json"
    config.write_text(json.dumps({**content, "statistics": everything, "tensor": everything}), "utf-8")
    config.chmod(0o640)  # msprobe refuses a file that others may write
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    from msprobe.mindspore import PrecisionDebugger

    use_numpy_statistics()
    return PrecisionDebugger(config_path=str(config))


def use_numpy_statistics() -> None:
    """Make msprobe (mindstudio-probe 26.2.0) compute statistics with NumPy, because `mint.norm` has no CPU kernel."""
    import mindspore as ms
    from msprobe.core.dump.data_dump.data_processor.base import TensorStatInfo
    from msprobe.core.dump.data_dump.data_processor.mindspore_processor import MindsporeDataProcessor

    def get_stat_info(self: Any, data: Any) -> Any:
        self.api_register.restore_inner_used_api()
        values = (data.astype(ms.float32) if data.dtype == ms.bfloat16 else data).asnumpy()
        self.api_register.register_inner_used_api()
        return TensorStatInfo(*statistics(values))

    replace(
        MindsporeDataProcessor, "get_stat_info", 'get_norm_value = mint.norm if hasattr(mint, "norm")', get_stat_info
    )


def statistics(values: np.ndarray) -> tuple[Any, ...]:
    """Return the maximum, minimum, mean and L2 norm of an array; return only maximum and minimum for booleans, and an
    empty tuple for an empty array.
    """
    if not values.size:
        return ()
    if values.dtype == np.bool_:
        return bool(values.max()), bool(values.min())
    wide = np.abs(values).astype(np.float64) if np.iscomplexobj(values) else values.astype(np.float64)
    return float(wide.max()), float(wide.min()), float(wide.mean()), float(np.sqrt(np.square(wide).sum()))


def dump_weights(network: Any, folder: Path, level: str, task: str) -> None:
    """Write the parameters of every cell of `network` into `folder` (`stepN/rankM`) in msprobe's layout, and record
    whether each parameter is trained; bfloat16 values are written as float32. Weights that MindSpore makes only when it
    compiles are left out.
    """
    import mindspore as ms

    values = folder / "dump_tensor_data"
    data: dict[str, Any] = {}
    for path, cell in network.cells_and_names():
        own = cell.parameters_dict(recurse=False) if path else {}
        for full, parameter in ((full, each) for full, each in own.items() if not each.has_init):
            values.mkdir(parents=True, exist_ok=True)
            key, label = f"Cell.{path}.{type(cell).__name__}.forward.0", full.rpartition(".")[2]
            array = (parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter).asnumpy()
            found = dict(zip(("Max", "Min", "Mean", "Norm"), statistics(array), strict=False))
            node = {"type": "mindspore.Tensor", "dtype": str(parameter.dtype), "shape": list(array.shape), **found}
            node["requires_grad"] = bool(parameter.requires_grad)
            if task == "tensor":
                node["data_name"] = f"{key}.parameters.{label}.npy"
                np.save(values / node["data_name"], array)
            data.setdefault(key, {"parameters": {}})["parameters"][label] = node
    if not data:
        return
    head = {"task": task, "level": level, "framework": "mindspore", "dump_data_dir": str(values)}
    (folder / "dump.json").write_text(json.dumps({**head, "data": data}, indent=1), "utf-8")

"""Weights that msprobe does not show, in its own layout: those after the last step, and at L1 and L2 all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.accuracy.dumps.debugger import statistics


def dump_weights(network: Any, folder: Path, level: str, task: str) -> None:
    """Write the parameters of every cell of `network` into `folder` (`stepN/rankM`).

    A cell's key is the one under which msprobe keeps its parameters at L0. bfloat16 is written as float32. Weights that
    do not exist yet (they are made when the graph of several devices is compiled) are left out. Each says whether a
    gradient trains it: counters, biases and caches are parameters too.
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

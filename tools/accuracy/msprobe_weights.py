"""The weights after the last step, which msprobe never shows: in its own layout, as one step more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.accuracy.msprobe_debugger import statistics


def dump_weights(network: Any, folder: Path, level: str, task: str) -> None:
    """Write the parameters of every cell of `network` into `folder` (`stepN/rankM`).

    A cell's key is the one under which msprobe keeps its parameters in other steps. bfloat16 is written as float32.
    """
    import mindspore as ms

    values = folder / "dump_tensor_data"
    values.mkdir(parents=True)
    data: dict[str, Any] = {}
    for path, cell in network.cells_and_names():
        for full, parameter in cell.parameters_dict(recurse=False).items() if path else ():
            key, label = f"Cell.{path}.{type(cell).__name__}.forward.0", full.rpartition(".")[2]
            array = (parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter).asnumpy()
            found = dict(zip(("Max", "Min", "Mean", "Norm"), statistics(array), strict=False))
            node = {"type": "mindspore.Tensor", "dtype": str(parameter.dtype), "shape": list(array.shape), **found}
            if task == "tensor":
                node["data_name"] = f"{key}.parameters.{label}.npy"
                np.save(values / node["data_name"], array)
            data.setdefault(key, {"parameters": {}})["parameters"][label] = node
    head = {"task": task, "level": level, "framework": "mindspore", "dump_data_dir": str(values)}
    (folder / "dump.json").write_text(json.dumps({**head, "data": data}, indent=1), "utf-8")

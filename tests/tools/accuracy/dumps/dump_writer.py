"""Dumps in msprobe's layout, written without msprobe. `test_compare_faults.py` holds them against a real one."""

import json
from pathlib import Path

import numpy as np

from tools.accuracy.dumps import read, write
from tools.accuracy.dumps.read import open_dump
from tools.accuracy.dumps.write import statistics

DTYPES = {"float32": "Float32", "float16": "Float16", "int32": "Int32", "bool": "Bool", "float64": "Float64"}
H = 8


def tensor(name, values, folder, task):
    """The node of one tensor; writes its file."""
    stats = dict(zip(("Max", "Min", "Mean", "Norm"), [*statistics(values), None, None, None, None], strict=False))
    node = {"type": "mindspore.Tensor", "dtype": DTYPES[str(values.dtype)], "shape": list(values.shape), **stats}
    if task == "tensor":
        node["data_name"] = f"{name}.npy"
        np.save(folder / "dump_tensor_data" / node["data_name"], values)
    return node


def write_rank(folder, calls, level="L0", task="tensor"):
    """Write one folder `stepN/rankM`; `calls` is {key: {group: arrays or plain values}}, as in `model`."""
    folder = Path(folder)
    (folder / "dump_tensor_data").mkdir(parents=True)
    data = {}
    for key, groups in calls.items():
        entry = data[key] = {}
        for group, content in groups.items():
            role = {"input_args": "input", "input_kwargs": "kwargs"}.get(group, group)
            named = content if isinstance(content, dict) else dict(enumerate(content))
            nodes = {}
            for place, value in named.items():
                if isinstance(value, np.ndarray):
                    name = f"{key}.{group}" if ".parameters_grad." in key else f"{key}.{role}.{place}"
                    nodes[place] = tensor(name, value, folder, task)
                else:
                    nodes[place] = {"type": type(value).__name__, "value": value}
            entry[group] = nodes if isinstance(content, dict) else list(nodes.values())
    head = {"task": task, "level": level, "framework": "mindspore", "dump_data_dir": str(folder)}
    (folder / "dump.json").write_text(json.dumps({**head, "data": data}))


def write_dump(folder, steps, level="L0", task="tensor", ranks=1, complete=True, weights=None):
    """A whole dump of the same calls on every rank; steps: a list of calls, weights: step -> calls that stand apart."""
    for step, calls in enumerate(steps):
        for rank in range(ranks):
            write_rank(Path(folder) / f"step{step}" / f"rank{rank}", calls, level, task)
    for step, calls in (weights or {}).items():
        for rank in range(ranks):
            write_rank(Path(folder) / "weights" / f"step{step}" / f"rank{rank}", calls, level, task)
    write.mark(Path(folder), complete)
    return Path(folder)


KERNELS = [("MatMul", 10), ("Add", 20), ("MatMul", 40), ("Mul", 50), ("Sub", 60)]


def write_kernels(folder, values=None):
    """A dump of level L2: forward, backward and optimizer, one name too long for a file, one kernel run twice."""
    values = dict.fromkeys(KERNELS, np.ones((2, 3), np.float32)) | (values or {})
    folder.mkdir()
    write.mark(folder, True)
    (folder / read.CONFIGURATION).write_text("{}")
    graph = folder / "rank_0" / "Net" / "0" / "0"
    graph.mkdir(parents=True)
    where = {
        "MatMul.Default_layers-CellList_0_MatMul-op0.0.0.{}.output.0.DefaultFormat.Float32.npy": (10, 40),
        "Mul.Gradients_Default_Mul-op1.0.0.{}.output.0.DefaultFormat.Float32.npy": (50,),
        "Sub.Default_optimizer-AdamW_Sub-op2.0.0.{}.output.0.DefaultFormat.Float32.npy": (60,),
        "Add.Default_" + "long_" * 60 + "Add-op3.0.0.{}.output.0.DefaultFormat.Float32.npy": (20,),
    }
    for name, times in where.items():
        for time in times:
            full = name.format(time)
            short = full if len(full) < 200 else "123.npy"
            np.save(graph / short, values[full.split(".")[0], time])
            if short != full:
                (graph / "mapping.csv").write_text(f"{short},{full}\n")
    return open_dump(folder)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.1, (H, H)).astype(np.float32) for name in ("a", "b")}


def step(held, seed):
    """Return the calls of one step of a model of two layers; `layers.0` holds `linear` and `act`, and so does
    `layers.1`.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4, H)).astype(np.float32)
    tokens = rng.integers(0, 9, 4).astype(np.int32)
    calls = {"Cell.embed.Embedding.forward.0": {"input_args": [tokens], "output": [x], "parameters": {}}}
    for number, weight in enumerate(held.values()):
        linear, act, layer = (f"Cell.layers.{number}.{each}" for each in ("linear.Dense", "act.Relu", ""))
        y = x @ weight.T
        z = np.maximum(y, 0)
        calls[f"{linear}.forward.0"] = {"input_args": [x], "output": [y], "parameters": {"weight": weight}}
        calls[f"{act}.forward.0"] = {"input_args": [y, 1.5, None], "output": [z], "parameters": {}}
        calls[f"{layer}Layer.forward.0"] = {"input_args": [x], "input_kwargs": {"scale": 2}, "output": [z]}
        x = z
    for number in (1, 0):
        linear, act, layer = (f"Cell.layers.{number}.{each}" for each in ("linear.Dense", "act.Relu", ""))
        g, h, w = (rng.normal(size=shape).astype(np.float32) for shape in ((4, H), (4, H), (H, H)))
        calls[f"{act}.backward.0"] = {"input": [g], "output": [h]}
        calls[f"{linear}.parameters_grad.0"] = {"weight": [w]}
        calls[f"{linear}.backward.0"] = {"input": [h], "output": [g]}
        calls[f"{layer}Layer.backward.0"] = {"input": [g], "output": [g]}
    return calls


def run(steps=2, rate=1e-4):
    """Calls of `steps` steps; each moves the weights a little."""
    held, found = weights(), []
    for number in range(steps):
        found.append(step(held, number + 1))
        rng = np.random.default_rng(100 + number)
        held = {name: (w + rate * rng.choice([-1, 1], w.shape)).astype(np.float32) for name, w in held.items()}
    return found

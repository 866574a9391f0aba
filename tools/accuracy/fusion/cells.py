"""Kernels as cells of MindSpore, so that its own CPU graph kernels (AKG) or its plain operators compute them.

    python -m tools.accuracy.fusion.cells FOLDER       runs its cells.py on its inputs.npz, into results.npz

A cell is Python text, for MindSpore compiles the source of what it runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import ClusterError
from plugins.operator_fusion.plan import VARIABLE
from tools.accuracy.fusion.kernel import Argument, Kernel, Step
from tools.process import child

ON, OFF = "--opt_level=2", "--opt_level=0"
MODULE = "tools.accuracy.fusion.cells"
ROOT = Path(__file__).resolve().parents[3]
_HEAD = """import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops import operations as P
"""


def source(kernels: Sequence[Kernel], every_step: bool = False) -> str:
    """A module with a cell `Kernel0`, `Kernel1`, ... for each kernel; it gives all steps' results where asked."""
    return _HEAD + "".join(_cell(number, kernel, every_step) for number, kernel in enumerate(kernels))


def _cell(number: int, kernel: Kernel, every_step: bool) -> str:
    names = ", ".join(f"x{place}" for place in range(len(kernel.inputs)))
    lines = [f"v{place} = {_call(step)}" for place, step in enumerate(kernel.steps)]
    results = range(len(kernel.steps)) if every_step else kernel.outputs
    lines.append(f"return ({', '.join(f'v{place}' for place in results)},)")
    body = "".join(f"        {line}\n" for line in lines)
    return f"\n\nclass Kernel{number}(ms.nn.Cell):\n    def construct(self, {names}):\n{body}"


def _call(step: Step) -> str:
    taken = [_text(argument, axes=step.op in ("ReduceSum", "Transpose")) for argument in step.arguments]
    if step.op == "Assign":
        return taken[1]  # what is written; a cell has no parameter to write it into
    if step.op == "Cast":
        return f"P.Cast()({taken[0]}, ms.{step.output.dtype.lower().replace('bool', 'bool_')})"
    if step.op == "BroadcastTo":
        return f"P.BroadcastTo({step.output.shape})({taken[0]})"
    if step.op == "Reshape":
        return f"P.Reshape()({taken[0]}, {step.output.shape})"
    if step.op == "ReduceSum":
        return f"P.ReduceSum({step.keep_dims})({', '.join(taken)})"
    return f"P.{step.op}()({', '.join(taken)})"


def _text(argument: Argument, axes: bool = False) -> str:
    kind, what = argument
    if kind != "constant":
        return f"{'x' if kind == 'input' else 'v'}{what}"
    if isinstance(what, np.ndarray):
        if axes:
            return repr(tuple(what.ravel().tolist()))  # an operator wants them as a tuple
        dtype = what.dtype.name.replace("bool", "bool_")
        return f"Tensor(np.array({what.tolist()!r}, np.{dtype}).reshape({what.shape}))"
    return repr(what)


def results_of(
    kernels: Sequence[Kernel],
    inputs: Sequence[Sequence[np.ndarray]],
    flags: str,
    folder: Path,
    every_step: bool = False,
) -> list[list[np.ndarray] | str]:
    """What MindSpore computes with these flags, in a process of its own; a text where a kernel cannot be compiled.

    Args:
        inputs: of each kernel. folder: an empty one.

    Raises:
        ClusterError: the process died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cells.py").write_text(source(kernels, every_step), encoding="utf-8")
    np.savez(folder / "inputs.npz", **{f"{n}.{i}": x for n, some in enumerate(inputs) for i, x in enumerate(some)})
    (folder / "types").write_text("\n".join(" ".join(kind.dtype for kind in kernel.inputs) for kernel in kernels))
    environment = environment_of(flags) | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with (folder / "log").open("w") as log:
        done = child.run(
            [sys.executable, "-m", MODULE, str(folder)], cwd=folder, env=environment, stdout=log, stderr=log
        )
    if not (folder / "results.npz").exists():
        last = (folder / "log").read_text(errors="replace").strip()[-300:]
        raise ClusterError(f"the process that runs kernels with {flags} ended with {done.returncode}: {last}")
    with np.load(folder / "results.npz") as found:
        return [_found(found, number) for number in range(len(kernels))]


def environment_of(flags: str) -> dict[str, str]:
    """What a process needs that compiles with these flags."""
    return {**os.environ, VARIABLE: flags, "GLOG_v": "4"}


def _found(results: Mapping[str, np.ndarray], number: int) -> list[np.ndarray] | str:
    if f"{number}.error" in results:
        return str(results[f"{number}.error"])
    count = sum(name.startswith(f"{number}.") for name in results)
    return [results[f"{number}.{place}"] for place in range(count)]


def main(folder: Path) -> None:
    """Run all cells of a folder and write their results."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    spec = importlib.util.spec_from_file_location("cells", folder / "cells.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cells"] = module
    spec.loader.exec_module(module)
    types = [line.split() for line in (folder / "types").read_text().split("\n")]
    results: dict[str, Any] = {}
    with np.load(folder / "inputs.npz") as inputs:
        for number, kinds in enumerate(types):
            taken = [
                ms.Tensor(inputs[f"{number}.{place}"], getattr(ms, kind.lower().replace("bool", "bool_")))
                for place, kind in enumerate(kinds)
            ]
            try:
                given = getattr(module, f"Kernel{number}")()(*taken)
                results |= {f"{number}.{place}": _array(each) for place, each in enumerate(given)}
            except (RuntimeError, TypeError, ValueError) as error:  # whatever MindSpore refuses is told, not hidden
                results[f"{number}.error"] = np.array(str(error).strip().splitlines()[0][:200])
    np.savez(folder / "part.npz", **results)
    (folder / "part.npz").rename(folder / "results.npz")
    sys.stdout.flush()
    os._exit(0)  # threads of kernels that failed to build stay behind


def _array(tensor: Any) -> np.ndarray:
    import mindspore as ms

    return (tensor.astype(ms.float32) if tensor.dtype == ms.bfloat16 else tensor).asnumpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

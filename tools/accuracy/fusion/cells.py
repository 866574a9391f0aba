"""MindSpore's own CPU graph kernels (AKG): a recipe trained with them and without, and single kernels run as cells.

    python -m tools.accuracy.fusion.cells FOLDER       runs its cells.py on its inputs.npz, into results.npz

A cell is Python text, because MindSpore compiles the source of what it runs.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import ClusterError, RecipeError
from plugins.operator_fusion.plan import VARIABLE
from tools.accuracy.equivalence.runs import launch, make_corpus, read_steps
from tools.accuracy.fusion.kernels import Argument, Kernel, Step
from tools.dryrun.graph_text import GraphText
from tools.fusion.oracle import read_text
from tools.layout.resolve import resolve
from tools.process import children
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import CORPUS, load_mini
from tools.recipe.override import apply_overrides
from tools.recipe.view import LOADER, View, look

STEPS = 2
PACKAGE = "decorator"  # AKG imports it, and no requirement of MindSpore's wheel brings it
_BEFORE, _AFTER = "cluster_3_graph_kernel_expander", "split_4_graph_kernel_splitter"
ON, OFF = "--opt_level=2", "--opt_level=0"
MODULE = "tools.accuracy.fusion.cells"
_HEAD = """import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops import operations as P
"""


@dataclass(frozen=True)
class Steps:
    """Losses of the steps with graph kernels and without, and the graphs before and after MindSpore's passes."""

    on: list[float]
    off: list[float]
    before: list[GraphText]
    after: list[GraphText]


def recipe_of(path: Path, overrides: tuple[str, ...]) -> Recipe:
    """Return the recipe, or of one for Ascend its mini, as one process that trains `STEPS` steps.

    Raises:
        RecipeError: the file or an override is wrong, or it wants several processes.
    """
    recipe = load_recipe(path)
    if not View(recipe).on_cpu:
        recipe = load_mini(path, CORPUS)
    recipe = resolve(apply_overrides(recipe, overrides))
    if View(recipe).devices > 1:
        raise RecipeError(f"{path}: it trains on {View(recipe).devices} processes; want a recipe of one, or its --mini")
    if "operator_fusion" in (recipe.get("plugins") or {}):
        del recipe["plugins"]["operator_fusion"]
    return recipe


def require_akg() -> None:
    """Raise ClusterError where MindSpore could not build CPU graph kernels."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ClusterError(
            f"no package {PACKAGE!r}, without which MindSpore builds no CPU graph kernels: "
            f"pip install -c constraints.txt {PACKAGE}"
        )


def train_both(recipe: Recipe, folder: Path) -> Steps:
    """Train the same steps twice, on a made-up corpus.

    Raises:
        RunFailedError: a training failed. ClusterError: it left no text of its kernels.
    """
    off = _train(recipe, folder / "off", {VARIABLE: OFF})
    saved = {
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "graphs"),
        "MS_DEV_DUMP_IR_PASSES": "stage1_cluster,stage3_split",
    }
    on = _train(recipe, folder / "on", {VARIABLE: ON, **saved})
    return Steps(on, off, _texts(folder / "graphs", _BEFORE), _texts(folder / "graphs", _AFTER))


def _train(recipe: Recipe, folder: Path, variables: dict[str, str]) -> list[float]:
    short = copy.deepcopy(recipe)
    loader = look(short, LOADER)
    loader["config"]["data_path"] = ["1", make_corpus((folder / "corpus").absolute(), recipe, STEPS)]
    loader["sizes"] = [STEPS * View(recipe).global_batch, 0, 0]
    short["train_dataset_task"]["dataset_config"] = short["train_dataset"]
    short["callbacks"] = [each for each in short["callbacks"] if each["type"] != "CheckpointMonitor"]
    short["checkpoint"] = {"save_path": "", "load_path": ""}
    (short.get("plugins") or {}).pop("held_out_loss", None)
    launch(short, folder / "run", variables, folder)  # AKG writes its objects where it runs
    return [step["loss"] for step in read_steps(folder / "run" / "metrics" / "rank_0.jsonl")]


def _texts(folder: Path, stage: str) -> list[GraphText]:
    files = sorted(folder.rglob(f"*_{stage}*.ir"))
    if not files:
        raise ClusterError(f"{folder}: no text of {stage}: MindSpore's graph kernels did not run")
    with tempfile.TemporaryDirectory() as scratch:
        return [read_text(file, Path(scratch)) for file in files]


ROOT = Path(__file__).resolve().parents[3]


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
        done = children.run_child(
            [sys.executable, "-m", MODULE, str(folder)], cwd=folder, env=environment, stdout=log, stderr=log
        )
    if not (folder / "results.npz").exists():
        last = (folder / "log").read_text(errors="replace").strip()[-300:]
        raise ClusterError(f"the process that runs kernels with {flags} ended with {done.returncode}: {last}")
    with np.load(folder / "results.npz") as found:
        return [_found(found, number) for number in range(len(kernels))]


def environment_of(flags: str) -> dict[str, str]:
    """Return what a process needs that compiles with these flags."""
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

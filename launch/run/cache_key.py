"""This module computes the key of everything on which a compiled graph depends: runs with the same key may load each
other's graphs.

MindSpore's compile cache compares only source files that it finds from the started script: if `routed_scaling_factor`
changes, it silently trains the old graph. So every value belongs into the key unless it is known not to affect the
graph: an unnecessary part costs a compilation, a missing part gives a wrong model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.resume import data
from launch.run.msrun import ROOT, on_ascend
from plugins.sealed_checkpoint.plan import checksum
from plugins.settings import value_at
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.versions import installed

# of the recipe: folders of this run, and what only callbacks between steps read
NOT_IN_THE_GRAPH = (
    "output_dir",
    "checkpoint.save_path",
    "checkpoint.load_path",
    "checkpoint.save_interleaved_steps",
    "checkpoint.save_max",
    "checkpoint.prefix",
    "checkpoint.async_save",
    "plugins.finite_loss",
    "plugins.spike_guard",
    "plugins.step_record",
)
SOURCES = ("launch", "plugins", "tools")
PACKAGES = ("mindspore", "mindformers")  # whose Python sources count, too: people edit them in place
VERSIONS = (
    "mindspore", "mindformers", "numpy", "PyYAML", "safetensors", "transformers", "tokenizers", "datasets", "te",
    "hccl",
)  # fmt: skip
WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth")  # lie beside a tokenizer, and say nothing of tokens
VARIABLES = (
    "MS_", "MSDEV", "MINDSPORE_", "MF_", "ASCEND_", "HCCL_", "LCCL_", "GE_", "TE_", "ATB_", "AKG_", "DVM_", "GRAPH_",
    "PIPELINE_", "PARALLEL_", "ENABLE_", "DISABLE_", "EXPERIMENTAL_", "GROUP_", "RUN_MODE", "CUSTOM_", "SYMBOLIC_",
    "VLLM_", "RUNTIME_MODE",
)  # fmt: skip
OF_ONE_LAUNCH = {  # differ from start to start, or between nodes: addresses, logs, patience
    "MS_ROLE", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_WORKER_IP", "MS_NODE_TIMEOUT",
    "MS_TOPO_TIMEOUT", "MS_RECEIVE_MSG_TIMEOUT", "MS_DIAGNOSTIC_DATA_PATH", "MS_COMPILER_CACHE_ENABLE",
    "MS_COMPILER_CACHE_PATH", "ASCEND_PROCESS_LOG_PATH", "ASCEND_WORK_PATH", "ASCEND_RT_VISIBLE_DEVICES",
    "HCCL_CONNECT_TIMEOUT",
}  # fmt: skip


def parts(recipe: Recipe, world: int, on_this_node: int, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return all values on which a compiled graph depends, grouped by subject; runs with equal values load the same
    cached graph.

    Args:
        recipe: flat and effective, `auto` resolved; `checkpoint.load_path` is what this start loads.
        world: the number of workers of all nodes; `on_this_node`: the number on this node. Ranks have folders of their
            own in the cache.

    Raises:
        DataError: a corpus cannot be read.
        OSError: a source file cannot.
    """
    return {
        "recipe": dict(_settings(recipe)),
        "first": _compiled_first(recipe),
        "files": {value: checksum(Path(value)) for value in _files_named(recipe)},
        "data": data.digests(recipe),
        "tokenizers": {str(file): checksum(file) for file in _files_of_tokenizers(recipe)},
        "workers": [world, on_this_node],
        "sources": _digest((path for top in SOURCES for path in sorted((ROOT / top).rglob("*"))), ROOT),
        "packages": {name: _package(name) for name in PACKAGES},
        "versions": {name: installed(name) for name in VERSIONS},
        "python": [platform.python_version(), platform.machine()],
        "environment": {
            name: _value(environ[name])
            for name in sorted(environ)
            if name.startswith(VARIABLES) and name not in OF_ONE_LAUNCH
        },
    }


def key_of(found: Mapping[str, Any]) -> str:
    """Return the cache key of the values that the function `parts` returned, as 32 hexadecimal digits."""
    return hashlib.sha256(_text(found).encode()).hexdigest()[:32]


def differences(found: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the parts in which two keys differ, with the names of the recipe's keys and of the environment
    variables.
    """
    said = []
    for name in found:
        mine, yours = found[name], other.get(name)
        if _text(mine) == _text(yours):
            continue
        if isinstance(mine, dict) and isinstance(yours, dict):
            said += [key for key in sorted({*mine, *yours}) if mine.get(key) != yours.get(key)]
        else:
            said.append(name)
    return said


def _text(found: Any) -> str:
    return json.dumps(found, sort_keys=True, default=str)


def _settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf of the recipe that may affect the graph; empty mappings are leaves."""
    if path in NOT_IN_THE_GRAPH:
        return
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _settings(value[key], f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _compiled_first(recipe: Recipe) -> str:
    """Return which graph the workers compile first, "" if they compile no other graph than the train step's.

    MindSpore identifies the files of its cache only by their number. `plugins.held_out_loss` evaluates before the first
    step, but a sharded run that loads a checkpoint compiles its train step before it loads slices: with the other order
    it would run the graph of an evaluation as its train step, and train nothing. On CPU `plugins.semi_auto_cpu.kept`
    compares what was compiled.
    """
    evaluates = value_at(recipe, "plugins.held_out_loss", False) not in (None, False)
    if not (evaluates and View(recipe).parallel and on_ascend(recipe)):
        return ""
    return "train step" if value_at(recipe, "checkpoint.load_path") else "evaluation"


def _files_of_tokenizers(recipe: Recipe) -> list[Path]:
    """Return all files of the tokenizer folders except weights, because the number of packed samples depends on these
    files.
    """
    files = [file for folder in data.tokenizer_folders(recipe) for file in sorted(Path(folder).rglob("*"))]
    return [file for file in files if file.is_file() and file.suffix not in WEIGHTS]


def _files_named(value: Any) -> Iterator[str]:
    """Yield the files that the recipe names, such as a table or a placement that may change the computation."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _files_named(each)
    elif isinstance(value, str) and 0 < len(value) < 1024 and os.path.isfile(value):  # corpora are named by prefix
        yield value


def _digest(files: Iterable[Path], above: Path) -> str:
    """Return one digest of the names and contents of files, without compiled files."""
    digest = hashlib.sha256()
    for path in files:
        if path.suffix not in (".pyc", ".so", ".o") and "__pycache__" not in path.parts and path.is_file():
            digest.update(f"{path.relative_to(above)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _package(name: str) -> str | None:
    """Return one digest of an installed package's Python sources; it is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return _digest(sorted(folder.rglob("*.py")), folder)


def _value(value: str) -> str:
    """Return a variable's value; for a folder, return its real path, because a link such as `latest` may point
    elsewhere tomorrow.
    """
    return os.path.realpath(value) if value.startswith("/") and os.path.isdir(value) else value

"""This module prepares and runs the two trainings of `tc3 accuracy align`, one with MindFormers and one with the
reference, in separate processes that exchange .npz files.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from plugins import of_the_model
from plugins.errors import ClusterError, RecipeError
from tools.accuracy.equivalence.runs import callbacks_of, read_steps, refuse_other_data
from tools.accuracy.equivalence.strategies import on_workers, unsplit
from tools.accuracy.reference.run import KINDS, MISSING, below, read, states_of
from tools.accuracy.reference.start import Hyper
from tools.check.check import require_sections
from tools.layout.resolve import resolve
from tools.process import children
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import CORPUS, load_mini
from tools.recipe.override import apply_overrides
from tools.recipe.view import LOADER, MODEL, View, look
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.hugging_face_names import table, to_hugging_face
from tools.weights.hugging_face_sizes import Sizes, one_stream, sizes_of

Arrays = dict[str, np.ndarray]
CURVES = ("loss", "lm_loss", "mtp_loss", "global_norm", "learning_rate")
BIAS = "TopkBiasBalanceCallback"
WATCHERS = ("CheckpointMonitor",)
_DATA = "train_dataset.data_loader.config.data_path"
REFUSED = 2  # exit code of what has printed `tc3: message` because it was given something wrong
_FIND = "import importlib.util as u, sys; sys.exit(0 if all(map(u.find_spec, ('torch', 'transformers'))) else 3)"


@dataclass
class Record:
    """A `Record` holds the named arrays that one of the two compared trainings computed.

    In the reference's record, `single` holds the results of `reference.train.single_steps`, which computes every
    training step separately, each from the weights and Adam moments that the MindFormers training had before this step.
    """

    trace: Arrays
    gradient: Arrays
    initial: Arrays
    updated: Arrays
    curve: Arrays
    batch: Arrays
    states: list[dict[str, Arrays]] = field(default_factory=list)
    loads: list[Arrays] = field(default_factory=list)
    single: Arrays = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)


def of_reference(stored: Mapping[str, np.ndarray], weights: Arrays, batch: Arrays) -> Record:
    """Return the record of the reference training from its stored arrays, its first weights and its batches."""
    parts: dict[str, Any] = {
        kind: below(stored, f"{kind}/") for kind in ("trace", "gradient", "updated", "curve", "single")
    }
    parts["gradient"] = {name: parts["gradient"][name] for name in weights if name in parts["gradient"]}
    about = json.loads(str(stored["about"])) if "about" in stored else {}
    return Record(initial=weights, batch=batch, about=about, **parts)


def of_mindformers(stored: Mapping[str, np.ndarray], metrics: Iterable[Mapping], hyper: Hyper) -> Record:
    """Return the record of a MindFormers training, under MindFormers' names. Gradients, before clipping, follow from
    Adam's first moments, which after one step are (1 - beta1) times the clipped gradients.
    """
    steps = list(metrics)
    # a model without MTP layers, or of grouped-query attention, has no parts of the loss; without clipping no norm
    told = [name for name in CURVES if any(step[name] is not None for step in steps)]
    curve = {name: np.array([step[name] for step in steps], np.float64) for name in told}
    scale = float(max(curve["global_norm"][0], hyper.clip) / hyper.clip) if hyper.clip else 1.0
    share = float(np.float32(1) - np.float32(hyper.betas[0]))
    states, loads = states_of(stored, len(steps))
    gradient = {name: moment * np.float32(scale / share) for name, moment in states[1]["moment"].items()}
    trace = below(stored, "trace/")
    trace["logits"] = stored["logits/graph"].reshape(trace["logits"].shape)
    for name in [name for name in trace if name.endswith(".router")]:
        trace[name] = trace[name].reshape(*trace["logits"].shape[:2], -1)
    return Record(
        trace=trace,
        gradient=gradient,
        initial=states[0]["weight"],
        updated=states[hyper.first_update]["weight"],
        curve=curve,
        batch=below(stored, "batch/"),
        states=states,
        loads=loads,
    )


def in_hugging_face_names(record: Record, sizes: Sizes) -> Record:
    """Return a training's record in which every weight of MindFormers is split and named as in Hugging Face's model."""
    untrained = {entry.mindformers: entry.shape for entry in table(sizes) if not entry.trained}
    biases = [part for entry in table(sizes) if not entry.trained for part in entry.parts]

    def named(arrays: Arrays) -> Arrays:
        """Return arrays of trained weights under Hugging Face's names, without the routers' biases."""
        full = to_hugging_face({**{name: np.zeros(shape) for name, shape in untrained.items()}, **arrays}, sizes)
        return {name: array for name, array in full.items() if name not in biases}

    return replace(
        record,
        gradient=named(record.gradient),
        initial=to_hugging_face(record.initial, sizes),
        updated=to_hugging_face(record.updated, sizes),
        states=[
            {"weight": to_hugging_face(state["weight"], sizes), **{kind: named(state[kind]) for kind in KINDS[1:]}}
            for state in record.states
        ],
        loads=[{_layer(name, sizes): load for name, load in loads.items()} for loads in record.loads],
    )


def _layer(router: str, sizes: Sizes) -> str:
    """Return the number of the layer of a MindFormers router; MTP layers come after all decoder layers."""
    words = router.split(".")
    return str(int(words[2]) + sizes.layers * (words[0] == "mtp"))


def load(path: Path, overrides: tuple[str, ...], data: str | None, steps: int, workers: int | None = None) -> Recipe:
    """Return the recipe in the file `path`, with the overrides and the corpus `data`. If the recipe
    is for Ascend, return its mini recipe instead (a small version of the model and training, for CPU): for one process,
    or, if `workers` is given, with the Ascend recipe's kinds of parallelism.
    """
    recipe = load_mini(path, data or CORPUS, steps, workers) if is_mini(path) else load_recipe(path)
    recipe = changed(recipe, overrides, data)
    require_sections(recipe)
    return recipe


def changed(recipe: Recipe, overrides: tuple[str, ...], data: str | None) -> Recipe:
    """Return the recipe with the overrides, and with the corpus `data`, if given, in place of its own corpora."""
    recipe = apply_overrides(recipe, overrides)
    if data:
        one = len(look(recipe, (*LOADER, "config", "data_path"), [])) == 2
        recipe = apply_overrides(recipe, [f"{_DATA}.1={data}" if one else f"{_DATA}={json.dumps(['1', data])}"])
    return resolve(recipe)


def is_mini(path: Path) -> bool:
    """Return whether `load` replaces the recipe by a mini recipe."""
    return not View(load_recipe(path)).on_cpu


def on_one_worker(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return a copy of the recipe that trains `steps` steps with the same global batch on one worker; raise RecipeError
    if `plugins.group_aux_loss` is on, or if the recipe does not read a Megatron corpus.
    """
    view = View(recipe)
    refuse_other_data(recipe)
    if (recipe.get("plugins") or {}).get("group_aux_loss"):
        raise RecipeError(
            "plugins.group_aux_loss: Hugging Face's DeepseekV3 computes the load-balancing loss for each sample, not "
            "over an EP group; write False"
        )
    plain = copy.deepcopy(dict(recipe))
    plain["callbacks"] = [each for each in callbacks_of(plain) if each["type"] not in WATCHERS]
    unsplit(plain)
    on_workers(plain, view.global_batch, 1)
    if view.pp > 1:
        plain["recompute_config"] = {"recompute": False, "select_recompute": False}  # what it has is by stage
    look(plain, LOADER)["sizes"] = [steps * view.global_batch, 0, 0]
    plain["train_dataset_task"]["dataset_config"] = plain["train_dataset"]
    within = (recipe.get("plugins") or {}).get("mtp_documents", False)  # it changes what is computed, too
    plain["plugins"] = of_the_model(plain) | ({} if within is False else {"mtp_documents": within})
    plain["checkpoint"] = {"save_path": "", "load_path": ""}
    return plain


def shortened(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return a copy of the recipe that trains only `steps` steps, with unchanged workers and learning-rate schedule."""
    short = copy.deepcopy(dict(recipe))
    look(short, LOADER)["sizes"] = [steps * View(recipe).global_batch, 0, 0]
    short["train_dataset_task"]["dataset_config"] = short["train_dataset"]
    short["callbacks"] = callbacks_of(short)
    short["plugins"] = {**(short.get("plugins") or {}), "held_out_loss": False, "batch_ramp": False}
    return short


def reference_sizes(recipe: Mapping[str, Any]) -> Sizes:
    """Return the sizes with which Hugging Face's DeepseekV3 equals the recipe's model; raise RecipeError if no sizes
    fit.
    """
    config = look(recipe, (*LOADER, "config"), {})
    for key in ("reset_attention_mask", "reset_position_ids", "create_compressed_eod_mask"):
        if config.get(key):
            raise RecipeError(
                f"{'.'.join(LOADER)}.config.{key}: Hugging Face's DeepseekV3 lets tokens attend to the whole sample, "
                "also across documents; write False"
            )
    built = convert(View(Recipe(recipe)), load_schema())
    if not built.fields.get("multi_latent_attention") and look(recipe, (*MODEL, "multi_latent_attention")) is None:
        raise RecipeError(
            "model.model_config.model_type: this model has no latent attention, but the reference, Hugging Face's "
            "DeepseekV3, has it, so the two cannot be compared; to compare parallel layouts of this recipe instead, "
            "use tc3 accuracy equivalence"
        )
    one_stream(built.fields, "the reference, Hugging Face's DeepseekV3,")
    moved = any(callback["type"] == BIAS for callback in recipe.get("callbacks") or [])
    return sizes_of(built.fields, bool(built.fields["moe_router_enable_expert_bias"]) and moved)


def rope_dimensions(recipe: Mapping[str, Any]) -> int:
    """Return the number of dimensions of an attention head that RoPE rotates."""
    return int(look(recipe, (*MODEL, "qk_pos_emb_head_dim"), 0) or 0)


def numbers(recipe: Mapping[str, Any], *beside: str) -> dict[str, Any]:
    """Return the recipe without the sections in `beside`, and without the sections that cannot change numerical
    results.
    """
    return {key: value for key, value in recipe.items() if key not in ("output_dir", "checkpoint", *beside)}


ROOT = Path(__file__).resolve().parents[3]


class SideFailedError(Exception):
    """This error means that a compared training failed; the message holds the last line of the training's output and
    the path of its log file.
    """


def find_torch(python: str) -> None:
    """Raise ClusterError if `python` does not find torch or transformers, which are searched for but not imported,
    because importing them takes long.
    """
    try:
        done = subprocess.run([python, "-c", _FIND], capture_output=True, check=False)
    except OSError as error:
        raise ClusterError(f"--reference-python {python}: this program cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ClusterError(_no_torch(python))


def _no_torch(python: str) -> str:
    return (
        f"the reference needs torch and transformers, which {python} cannot import: install the extra `align` "
        "(pip install -e '.[align]'), or name with --reference-python a Python that has them"
    )


def run_mindformers(recipe: Mapping[str, Any], folder: Path, hyper: Hyper, weights: Arrays | None) -> Record:
    """Train `recipe` with MindFormers on one worker, and return the record of its losses and gradients. The training
    starts from `weights` (by MindFormers' names), or from the recipe's own initial weights if `weights` is None.

    Raises:
        RecipeError: the recipe is refused.
        SideFailedError: the run failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorder: dict[str, Any] = {"record": str(folder / "record.npz"), "weights": None}
    if weights is not None:
        recorder["weights"] = str(folder / "weights.npz")
        np.savez(recorder["weights"], **weights)
    plugins = {**(recipe.get("plugins") or {}), "align_recorder": recorder}
    dump_recipe({**recipe, "plugins": plugins}, folder / "recipe.yaml")
    command = [sys.executable, "-m", "tools.accuracy.align.worker"]
    run = folder / "run"
    start([*command, "--config", str(folder / "recipe.yaml"), "--run-dir", str(run)], folder / "mindformers.log", run)
    return of_mindformers(read(folder / "record.npz"), read_steps(run), hyper)


def run_reference(
    python: str, folder: Path, sizes: Sizes, hyper: Hyper, weights: Arrays, batch: Arrays, other: Record | None = None
) -> Record:
    """Train the reference from `weights` (by Hugging Face's names) on recorded batches. If `other`, the record of the
    MindFormers training, is given, also compute each step separately, from the state that MindFormers had before this
    step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = json.dumps({"sizes": sizes.as_json(), "hyper": asdict(hyper)})
    inputs = {**{f"weights/{name}": array for name, array in weights.items()},
              **{f"batch/{name}": array for name, array in batch.items()},
              **(_states(other) if other else {})}  # fmt: skip
    np.savez(folder / "job.npz", job=np.array(job), **inputs)
    command = [python, "-m", "tools.accuracy.reference.run", str(folder / "job.npz"), str(folder / "record.npz")]
    start(command, folder / "reference.log", folder)
    return of_reference(read(folder / "record.npz"), weights, batch)


def _states(record: Record) -> Arrays:
    out = {f"load/{step}/{layer}": load for step, loads in enumerate(record.loads) for layer, load in loads.items()}
    for step, state in enumerate(record.states):
        for kind, arrays in state.items():
            out.update({f"state/{step}/{kind}/{name}": array for name, array in arrays.items()})
    return out


def start(command: list[str], log: Path, run: Path) -> None:
    """Run a training as a separate process until it ends, and write its output to the file `log`.

    Raises:
        RecipeError: the process refused its input.
        ClusterError: torch is missing.
        SideFailedError: the process failed.
    """
    threads = str(len(os.sched_getaffinity(0)))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    quiet = {"GLOG_v": "3", "OMP_NUM_THREADS": threads, "LOG_MF_PATH": str(run / "logs"), **os.environ}
    quiet["PYTHONPATH"] = path
    with log.open("w", encoding="utf-8") as out:
        code = children.run_child(command, env=quiet, stdout=out, stderr=subprocess.STDOUT).returncode
    if code == 0:
        return
    if code == MISSING:
        raise ClusterError(_no_torch(command[0]))
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("tc3: ") for line in lines if line.startswith("tc3: ")]
    if code == REFUSED and told:
        raise RecipeError(told[-1])
    last = (told or lines or [""])[-1]
    raise SideFailedError(
        f"the training {log.stem!r} ended with exit code {code}: {last[-300:]} (the whole log: {log})"
    )

"""What a recipe of the CPU cannot have, data parallel (plugins/cpu_backend) or sharded (plugins/semi_auto_cpu)."""

from __future__ import annotations

from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath
from tools.recipe.view import MODEL, PARALLEL, RUNNER, View
from tools.schema.converter import Built

Rule = tuple[bool, KeyPath, str, str]  # whether it holds, where, what is right, why


def check_cpu(view: View, built: Built, found: Findings) -> None:
    """What the CPU refuses deep inside MindSpore, and what only CPU gets wrong in silence."""
    rules = _sharded(view) if view.sharded_on_cpu else _data_parallel(view, built)
    for holds, path, right, why in [*_always(view), *rules]:
        if not holds:
            found.error(path, "cannot run on CPU" + (f" ({why})" if why else ""), f"device_target CPU needs {right}")
    if view.get(("monitor_config", "monitor_on")) is True:
        found.error(("monitor_config", "monitor_on"), "cannot run on CPU", "False")


def _always(view: View) -> list[Rule]:
    mode, clip = view.get(("context", "mode"), 0), ("runner_wrapper", "use_clip_grad")
    unclipped = "True, with a max_grad_norm that no gradient reaches"
    return [
        (mode in (0, "GRAPH_MODE"), ("context", "mode"), "0", "PyNative is 20 times slower"),
        (not view.flag((*RUNNER, "sink_mode"), True), (*RUNNER, "sink_mode"), "False", "it multiplies the epochs"),
        (view.flag(clip, True), clip, unclipped, "a step cannot return None for the norm"),
    ]


def _data_parallel(view: View, built: Built) -> list[Rule]:
    """As `plugins.cpu_backend.adapter.check`."""
    fields, wrapper = built.fields, ("runner_wrapper", "type")
    mode = view.get(("parallel", "parallel_mode"), 1)
    return [
        (fields.get("compute_dtype") in ("float32", "fp32"), (*MODEL, "compute_dtype"), "float32", "no bf16 kernels"),
        (fields.get("fused_norm") is False, (*MODEL, "fused_norm"), "False", "no RmsNorm kernel"),
        (fields.get("hidden_act") == "swiglu", (*MODEL, "hidden_act"), "'swiglu'", "no fused kernel"),
        (mode in (0, "DATA_PARALLEL"), ("parallel", "parallel_mode"), "0 (data parallel) or 1 (semi-auto)", ""),
        (view.get(wrapper) == "MFTrainOneStepCell", wrapper, "MFTrainOneStepCell", ""),
        *(
            (view.get((*PARALLEL, key), 1) == 1, (*PARALLEL, key), "1, or parallel.parallel_mode: 1", "data parallel")
            for key in ("model_parallel", "pipeline_stage", "context_parallel")
        ),
        (
            view.ep == 1 or bool(view.get(("plugins", "hierarchical_ep"))),
            (*PARALLEL, "expert_parallel"),
            "1, or plugins.hierarchical_ep, or parallel.parallel_mode: 1",
            "MindFormers' dispatchers have no kernels in data parallel",
        ),
    ]


def _sharded(view: View) -> list[Rule]:
    level = ("context", "dataset_broadcast_opt_level")
    return [
        (view.get(level) == 0, level, "0", "other tensor-parallel ranks would be given no data"),
    ]

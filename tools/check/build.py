"""MindFormers' own TransformerConfig and layer split of a recipe, built in a process of its own.

The checks emulate what MindFormers does (`converter`, `stages`); this asks MindFormers itself, on CPU, without building
a network. It runs as `python -m tools.check.build`, recipes in and fields out as JSON, because importing mindformers
takes seconds, talks on stdout and writes log files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARK = "tc3-built "  # MindFormers prints on stdout too


class Builder:
    """Builds recipes in the background while the pure checks run."""

    def __init__(self, recipes: list[Mapping[str, Any]]):
        self.folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3", "LOCAL_DEFAULT_PATH": self.folder.name}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.check.build"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=self.folder.name, env=environment, text=True,
        )  # fmt: skip
        self.text = json.dumps([dict(recipe) for recipe in recipes])

    def results(self) -> list[dict[str, Any]] | None:
        """For each recipe ``{"fields": ..., "layers": ...}`` or ``{"error": text}``; None without MindFormers."""
        with self.folder:
            try:
                output, _ = self.process.communicate(self.text)
            finally:
                self.process.kill()  # of use after an interrupt only
        lines = [line for line in output.splitlines() if line.startswith(_MARK)]
        return json.loads(lines[-1].removeprefix(_MARK)) if lines else None


def main() -> None:
    """Read recipes on stdin, print what MindFormers builds of them."""
    recipes = json.load(sys.stdin)
    print(_MARK + json.dumps([_attempt(recipe) for recipe in recipes]))


def _attempt(recipe: dict[str, Any]) -> dict[str, Any]:
    try:
        return build(recipe)
    except Exception as error:  # whatever MindFormers raises is the finding
        return {"error": f"{type(error).__name__}: {error}"}


def build(recipe: dict[str, Any]) -> dict[str, Any]:
    """Fields of the TransformerConfig that MindFormers builds, and its layers [chunk][stage]. Imports mindformers."""
    import copy
    import dataclasses

    import mindspore as ms
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.build_config import get_model_config
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting
    from mindformers.tools.register import MindFormerConfig
    from mindformers.tools.register.template import ConfigTemplate

    plain = copy.deepcopy(recipe)
    semi = bool(plain.get("use_parallel")) and plain.get("parallel", {}).get("parallel_mode", 1) in (
        *(1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL"),
    )
    if not semi:  # as the trainer resets them
        sizes = ("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage")
        plain["parallel_config"] = {**plain.get("parallel_config", {}), "micro_batch_num": 1, "use_seq_parallel": False}
        plain["parallel_config"].update(dict.fromkeys(sizes, 1))
    ConfigTemplate.apply_template(plain)
    config = MindFormerConfig(**plain)
    ms.reset_auto_parallel_context()
    pipeline = (recipe.get("parallel") or {}).get("pipeline_config") if semi else None
    if pipeline:
        ms.set_auto_parallel_context(pipeline_config=dict(pipeline))
    _not_legacy(config)
    build_parallel_config(config)
    arguments = {"parallel_config": config.parallel_config, "batch_size": config.runner_config.batch_size}
    model = get_model_config(config.model, default_args=arguments)
    built = model.convert_to_transformer_config()
    setting = LayerSetting(built.num_layers, built.offset, built, built.virtual_pipeline_model_parallel_size or 1)
    fields = {item.name: _plain(getattr(built, item.name, None)) for item in dataclasses.fields(built)}
    return {"fields": fields, "layers": setting.layer_list.tolist()}


def _not_legacy(config: Any) -> None:
    """MindFormers asks its context whether it builds legacy models; without one the answer is yes."""
    from mindformers.core.context.build_context import MFContextOperator

    operator = MFContextOperator.get_mf_ctx_instance() or MFContextOperator(config)
    operator.set_context(use_legacy=config.get("use_legacy", True))


def _plain(value: Any) -> Any:
    """A field as JSON; MindSpore's dtypes by name."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


if __name__ == "__main__":
    main()

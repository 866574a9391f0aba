"""This module makes `schema.json`, which lists every key that the installed MindFormers knows. The keys are read from
MindFormers' own sources.

    python -m tools.schema.extract          # rewrite tools/schema/schema.json and recipe.schema.json

`tc3 check` reads schema.json and does not import mindformers, which would take seconds. The keys come from these
sources: `ConfigTemplate` (YAML sections that allow no other keys), the code that reads a section
(`tools.schema.sources.reads`), signatures of registered classes, the dataclass fields of TransformerConfig, and each
model's ConfigConverter.

`snippets.yaml` holds the lines of MindFormers and MindSpore on which the rules of `tc3 check` are based, because they
refuse or silently ignore a value: a snippet of each line, or a message of MindSpore's compiled C++ code. Each snippet
is looked up in the installed version, and the extraction fails if a snippet is missing, so that no rule remains after
its line is gone.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tools.schema.schema import spec_of
from tools.schema.sources import handlers, models, reads, registered, transformer

SCHEMA = Path(__file__).with_name("schema.json")
SNIPPETS = Path(__file__).with_name("snippets.yaml")
_INTERNAL = {  # names that the trainer or another class sets on, or reads from, a `config` that is not the recipe
    *("batch_size", "data_loader", "data_size", "device_num", "divisor", "drop_remainder", "dynamic_batch"),
    *("eod_reset", "input_columns", "local_rank", "micro_batch_num", "num_parallel_workers", "pad_token_id"),
    *("profile_cb", "rank_id", "remainder", "top_k", "trust_remote_code", "npu_num_per_node", "image_processor"),
    "moe_config",
}
_TYPED = {  # section -> registry it is built from
    "callbacks": "callback",
    "runner_wrapper": "wrapper",
    "optimizer": "optimizer",
    "lr_schedule": "lr",
    "data_loader": "dataset_loader",
    "dataset_task": "dataset",
    "trainer": "trainer",
}


def main() -> None:
    """Extract the schema from the installed MindFormers and MindSpore, and write the schema files of this
    repository.
    """
    from tools.schema.schema import SCHEMA_FILE, Schema, json_schema

    data = extract()
    SCHEMA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    SCHEMA_FILE.write_text(json_schema(Schema(data)), encoding="utf-8")
    print(f"{SCHEMA}: {SCHEMA.stat().st_size} bytes", file=sys.stderr)


def extract() -> dict[str, Any]:
    """Return the whole schema of the installed MindFormers and MindSpore; this function imports mindformers.

    Raises:
        LookupError: a line on which a rule of `tc3 check` is based is no longer in MindFormers.
    """
    import mindformers
    import mindspore

    site = Path(mindformers.__file__).parent.parent
    return {
        "versions": {"mindformers": importlib.metadata.version("mindformers"), "mindspore": mindspore.__version__},
        "sections": _sections(site),
        "typed": {section: registered(registry, site) for section, registry in _TYPED.items()},
        "handlers": handlers(site),
        "transformer": transformer(site),
        "models": models(site),
        "intended": _intended(),
        "choices": _choices(),
        "lines": _lines(site),
    }


def _lines(site: Path) -> dict[str, str]:
    """Return rule -> the place of its line, such as ``mindformers/...py:123``."""
    found = {}
    for file, snippets in yaml.safe_load(SNIPPETS.read_text(encoding="utf-8")).items():
        compiled = file.endswith(".so")
        lines = [(site / file).read_bytes()] if compiled else (site / file).read_bytes().splitlines()
        for rule, snippet in snippets.items():
            number = next((index for index, line in enumerate(lines, 1) if snippet.encode() in line), None)
            if number is None:
                raise LookupError(
                    f"rule {rule}: {file} no longer contains {snippet!r}; check whether the rule still holds"
                )
            found[rule] = f"{file}: {snippet}" if compiled else f"{file}:{number}"
    return found


def _sections(site: Path) -> dict[str, Any]:
    """Return the keys of all sections without `type`, as ConfigTemplate and the code that reads them name them."""
    from mindformers.core.config_args import MFContextConfig
    from mindformers.core.context.build_context import _MSContextApplier
    from mindformers.tools.register.template import CONFIG_NAME_TO_CLASS as TEMPLATES
    from mindformers.tools.register.template import StableRankConfig

    mf = site / "mindformers"
    trainer = [mf / "trainer" / name for name in ("base_trainer.py", "trainer.py")]
    context = [mf / "core" / "context" / f"{name}.py" for name in ("build_context", "parallel", "validators")]
    read = reads([*trainer, *context, mf / "core" / "parallel_config.py"], ["config", "mf_config"])
    dataset = [*trainer, *sorted((mf / "dataset").glob("*.py"))]
    read[""] |= reads([mf / "dataset" / "utils.py"], ["config"])[""]
    sections = {name: _template(TEMPLATES[name], site) for name in TEMPLATES if name != "general_config"}
    top = _template(TEMPLATES["general_config"], site)
    names = {*read[""], *TEMPLATES, *MFContextConfig.get_supported_kwargs(), "checkpoint", "grouped_lr_schedule"}
    top.update({key: {} for key in sorted(names - _INTERNAL - {"general_config"}) if key not in top})
    sections["monitor_config.stable_rank_config"] = _template(StableRankConfig, site)
    sections["monitor_config.health_checkpoint"] = _any(_health_keys(mf))
    sections[""] = top
    sections["checkpoint"] = _any(read["checkpoint"])
    sections["tensorboard"] = _any(read["tensorboard"])
    sections["grouped_lr_schedule"] = _any(["default", "grouped"])
    sections["model"] = _any({*read["model"], "arch"})
    keys = {key for _, names, _ in _MSContextApplier._migrate for key in names}
    affinity = reads([context[0]], ["context_config"]).get("", set())
    sections["context"].update({key: {} for key in keys | read["context"] | affinity})
    sections.update(_mindspore_sections(site))
    sections["parallel"].update({key: {} for key in read["parallel"] if key not in sections["parallel"]})
    sections["train_dataset"] = _any(_dataset_keys(dataset, read))
    builder = reads([mf / "dataset" / "dataloader" / "blended_megatron_dataloader.py"], ["config"], True)
    sections.update(_hf_sections(mf / "dataset"))
    sections["gpt_dataset"] = {key: _gpt_spec(key) for key in sorted(builder[""])}
    return {
        name: {key: keys[key] for key in sorted(keys) if not key.startswith("_")} for name, keys in sections.items()
    }


def _any(keys: Iterable[str]) -> dict[str, Any]:
    """Return keys of which only the name is known."""
    return {key: {} for key in sorted(keys)}


def _template(cls: Any, site: Path) -> dict[str, Any]:
    """Return keys and defaults of one ConfigTemplate class."""
    if not cls._raise_error_for_unexpected_key and cls.__name__ not in ("MsParallelConfig", "ContextConfig"):
        return {}
    keys = [key for key in vars(cls) if not key.startswith("_") and key != "stable_rank_config"]
    return {key: spec_of(default=getattr(cls, key)) for key in keys}


def _health_keys(mf: Path) -> list[str]:
    files = [mf / "trainer" / "base_trainer.py", mf / "core" / "callback" / "callback.py"]
    found = reads(files, ["config"]).get("monitor_config.health_checkpoint", set())
    return sorted({*found, "embedding_local_norm_threshold"})


def _dataset_keys(files: list[Path], read: dict[str, set[str]]) -> set[str]:
    inner = reads(files, ["dataset_config"])
    utils = reads(files, ["config"])
    keys = inner[""] | read["train_dataset"] | utils.get("train_dataset", set()) | {"data_loader"}
    return keys - {"data_loader_type", "device_num", "rank_id", "do_eval", "shard_id", "num_shards"}


def _hf_sections(folder: Path) -> dict[str, Any]:
    """Return keys of HFDataLoader beside its signature (its own, and what it passes on to `datasets.load_dataset`)."""
    import datasets

    own = reads([folder / "dataloader" / "hf_dataloader.py"], ["kwargs"])[""]
    passed = inspect.signature(datasets.load_dataset).parameters
    legacy = {"dataset_dir", "column_names", "type"}  # popped by name and dropped
    tokenizer = reads([folder / "handler" / "base_handler.py"], ["config"])[""]
    names = {*own, "load_func", *(key for key, item in passed.items() if item.kind != item.VAR_KEYWORD)} - legacy
    return {"hf_loader": _any(names), "tokenizer": _any(tokenizer)}


def _gpt_spec(key: str) -> dict[str, Any]:
    """Return the type of a GPTDatasetConfig field that a `data_loader.config` key is passed to."""
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDatasetConfig

    renamed = {"seed": "random_seed", "seq_length": "sequence_length", "compressed_eod_mask_length": "eod_pad_length"}
    fields = {item.name: item for item in dataclasses.fields(GPTDatasetConfig)}
    item = fields.get(renamed.get(key, key))
    if item is None:
        return {}
    default = None if item.default is dataclasses.MISSING else item.default
    return spec_of(annotation=item.type, default=default)


def _mindspore_sections(site: Path) -> dict[str, Any]:
    """Return keys that MindSpore's own context takes: `parallel` and its parts, `jit_config`, `ascend_config`."""
    auto = (site / "mindspore" / "parallel" / "_auto_parallel_context.py").read_text(encoding="utf-8")
    tree = ast.parse(auto)
    setters = next(node for node in ast.walk(tree) if _assigns(node, "_set_auto_parallel_context_func_map"))
    parallel: dict[str, Any] = {key.value: {} for key in setters.value.keys}  # type: ignore[attr-defined]
    context = ast.parse((site / "mindspore" / "context.py").read_text(encoding="utf-8"))
    jit = next(node for node in ast.walk(context) if _assigns(node, "jit_cfgs"))
    ascend = next(node for node in ast.walk(context) if _assigns(node, "ascend_cfg_modes"))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {
        "parallel": parallel,
        "parallel.pipeline_config": _any(_constants(classes["_PipelineConfig"])),
        "parallel.parallel_optimizer_config": _any(_constants(classes["_ParallelOptimizerConfig"])),
        "parallel.strategy_ckpt_config": _any(["load_file", "save_file", "only_trainable_params"]),
        "context.jit_config": {key: {"enum": values} for key, values in ast.literal_eval(jit.value).items()},  # type: ignore[attr-defined]
        "context.ascend_config": {key.value: {} for key in ascend.value.keys},  # type: ignore[attr-defined]
    }


def _assigns(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        and isinstance(node.value, ast.Dict)
    )


def _constants(node: ast.ClassDef) -> list[str]:
    return [item.value.value for item in node.body if isinstance(item, ast.Assign)]  # type: ignore[attr-defined]


def _intended() -> dict[str, str]:
    """Return MindFormers' other table of key names: what a key means where a model's converter forgot it."""
    from mindformers.parallel_core.transformer_config_utils import COMMON_CONFIG_MAPPING

    found = {}
    for sources, target in COMMON_CONFIG_MAPPING.items():
        for source in sources if isinstance(sources, tuple) else (sources,):
            found[source] = target if isinstance(target, str) else target[0]
    return found


def _choices() -> dict[str, list[Any]]:
    """Return enumerations that MindFormers holds in tables of its own."""
    from mindformers.parallel_core.training_graph.activation import ACTIVATION_MAP
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
    from mindformers.parallel_core.transformer_config import ms_dtype_mapping
    from mindformers.tools.utils import MODE, PARALLEL_MODE

    return {
        "hidden_act": sorted(ACTIVATION_MAP),
        "dtype": sorted(ms_dtype_mapping),
        "balancing": list(TopKRouter.SUPPORTED_LOAD_BALANCING_TYPES),
        "mode": list(MODE),
        "parallel_mode": list(PARALLEL_MODE),
    }


if __name__ == "__main__":
    main()

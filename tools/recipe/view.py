"""This module reads the values of a recipe that other modules use in computations. For a value of the wrong type, a
`View` returns a default, so that `tc3 check` can check the other values of a faulty recipe. A `View` also computes
sizes, such as the number of devices.

A recipe may contain the value `auto`, which `tools.layout.resolve` replaces. MindFormers cannot read such a recipe, and
no sizes can be computed from it, so `require_resolved` refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from plugins.batch_ramp.plan import Ramp, ramp_of
from plugins.errors import RecipeError
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from plugins.semi_auto_cpu.chosen import chosen, splits_model
from tools.hardware.units import GIB
from tools.pipeline.schedules import schedule_of
from tools.recipe.findings import refusal
from tools.recipe.load import KeyPath, Recipe, dotted, look

PARALLEL, MODEL, RUNNER = ("parallel_config",), ("model", "model_config"), ("runner_config",)
LOADER = ("train_dataset", "data_loader")
_MISSING = object()


@dataclass(frozen=True)
class View:
    """A `View` reads values and sizes of a recipe, such as the number of devices. For a value of the wrong type, a
    `View` returns a default.
    """

    recipe: Recipe

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """Return the value at the key path `path`, which may have any type."""
        return look(self.recipe, path, default)

    def has(self, path: KeyPath) -> bool:
        """Return whether the recipe contains the key path `path`."""
        return look(self.recipe, path, _MISSING) is not _MISSING

    def number(self, path: KeyPath, default: int) -> int:
        """Return the value at the key path `path` if it is a positive integer; return `default` for any other value."""
        value = self.get(path, default)
        return value if type(value) is int and value > 0 else default

    def flag(self, path: KeyPath, default: bool = False) -> bool:
        """Return the value at the key path `path` if it is a truth value; return `default` for any other value."""
        value = self.get(path, default)
        return value if isinstance(value, bool) else default

    @cached_property
    def parallel(self) -> bool:
        """Return whether the model is split over devices. Data parallelism does not split the model."""
        return self.flag(("use_parallel",)) and splits_model(self.get(("parallel", "parallel_mode"), 1))

    def _size(self, key: str) -> int:
        return self.number((*PARALLEL, key), 1)

    @cached_property
    def dp(self) -> int:
        """Return the data-parallel degree."""
        return self._size("data_parallel")

    @cached_property
    def tp(self) -> int:
        """Return the tensor-parallel degree."""
        return self._size("model_parallel")

    @cached_property
    def pp(self) -> int:
        """Return the number of pipeline stages."""
        return self._size("pipeline_stage")

    @cached_property
    def cp(self) -> int:
        """Return the context-parallel degree."""
        return self._size("context_parallel")

    @cached_property
    def ep(self) -> int:
        """Return the expert-parallel degree."""
        return self._size("expert_parallel")

    @cached_property
    def chunks(self) -> int:
        """Return the number of model chunks on a stage, which is pp_interleave_num if the pipeline is interleaved."""
        interleaved = self.flag(("parallel", "pipeline_config", "pipeline_interleave"))
        return self.number((*MODEL, "pp_interleave_num"), 1) if interleaved else 1

    @cached_property
    def devices(self) -> int:
        """Return the number of devices on which the recipe runs."""
        return self.dp * self.tp * self.pp * self.cp if self.flag(("use_parallel",)) else 1

    @cached_property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of a step. Without a pipeline, MindFormers resets the number of
        micro-batches to 1.
        """
        return self._size("micro_batch_num") if self.parallel and self.pp > 1 else 1

    @cached_property
    def accumulation(self) -> int:
        """Return the number of gradient accumulation steps, which have an effect only in semi-auto mode without a
        pipeline.
        """
        steps = self.number((*RUNNER, "gradient_accumulation_steps"), 1)
        return steps if self.parallel and self.pp == 1 else 1

    @cached_property
    def mask_documents(self) -> int:
        """Return the number of documents per sample that the compressed attention mask can hold."""
        config = (*LOADER, "config")
        older_name = self.number((*config, "compressed_eod_mask_length"), 128)
        return self.number((*config, "eod_pad_length"), older_name)

    @cached_property
    def masks_once(self) -> bool:
        """Return whether Megatron's loader makes the masks of the first sample only, and keeps them for all others."""
        keys = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return not any(self.flag((*LOADER, "config", key)) for key in keys)

    @cached_property
    def batch(self) -> int:
        """Return the number of samples in a micro-batch of a data-parallel rank."""
        return self.number((*RUNNER, "batch_size"), 1)

    @cached_property
    def global_batch(self) -> int:
        """Return the number of samples in a step, as the trainer computes it. If the batch grows during training,
        return the number of samples in the largest batch.
        """
        ranks = self.dp if self.parallel else self.devices
        return self.batch * ranks * self.micro_batches * self.accumulation

    @cached_property
    def ramp(self) -> Ramp:
        """Return how the batch size grows during training; without plugins.batch_ramp, the batch size is constant."""
        return ramp_of(self.recipe, self.global_batch)

    @cached_property
    def full_batch(self) -> bool:
        """Return whether every rank reads the whole global batch (full_batch), which MindFormers may turn on even if
        the recipe does not set it.
        """
        strategy = self.get(("parallel", "dataset_strategy"))
        config = (*LOADER, "config") if self.megatron else LOADER
        masks = (self.flag((*config, f"create_{name}_mask")) for name in ("attention", "compressed_eod"))
        none_filled_in = strategy is None and not self.megatron and not any(masks) and not self.packs
        return self.parallel and (strategy == "full_batch" or none_filled_in)

    @cached_property
    def packs(self) -> bool:
        """Return whether the data loader packs several conversations into a sample. If conversations are packed, the
        trainer turns on the attention mask.
        """
        handlers = self.get((*LOADER, "handler"))
        return isinstance(handlers, list) and any(
            isinstance(item, dict) and item.get("type") == "PackingHandler" for item in handlers
        )

    @cached_property
    def samples_key(self) -> KeyPath | None:
        """Return the key path at which the recipe limits the number of samples in a pass over the data. Return None if
        the recipe does not limit the number of samples.

        For Megatron's loader this is the key `sizes`; for HFDataLoader it is the key `n` of the last handler, if this
        handler has the type `take`.
        """
        handlers = self.get((*LOADER, "handler"))
        if self.megatron:
            return (*LOADER, "sizes", 0)
        last = handlers[-1] if isinstance(handlers, list) and handlers else None
        takes = isinstance(last, dict) and last.get("type") == "take"
        return (*LOADER, "handler", len(handlers) - 1, "n") if takes else None

    @cached_property
    def samples(self) -> int:
        """Return the number of samples in a pass over the data; return 0 if the recipe does not state this number."""
        count: Any = self.recipe
        try:
            for key in self.samples_key or ("",):
                count = count[key]
        except (KeyError, IndexError, TypeError):
            return 0
        return count if type(count) is int and count > 0 else 0

    @cached_property
    def instruction_files(self) -> list[str]:
        """Return the files of HFDataLoader's `data_files`, if the key holds one path or a list of paths."""
        files = self.get((*LOADER, "data_files"))
        named = [files] if isinstance(files, str) else files
        fits = isinstance(named, list) and all(isinstance(name, str) for name in named)
        return [*named] if fits and self.get((*LOADER, "type")) == "HFDataLoader" else []

    @cached_property
    def node(self) -> int:
        """Return the number of devices of a node."""
        return self.number((*MODEL, "npu_nums_per_device"), DEVICES_PER_NODE)

    @cached_property
    def scheduler(self) -> str:
        """Return the recipe's `pipeline_scheduler`, which is MindFormers' name of the pipeline schedule."""
        return str(self.get(("parallel", "pipeline_config", "pipeline_scheduler"), "1f1b"))

    @cached_property
    def schedule(self) -> str:
        """Return the pipeline schedule by its name in `tools.pipeline.schedules`."""
        return schedule_of(self.scheduler, self.chunks)

    @cached_property
    def on_cpu(self) -> bool:
        """Return whether the recipe runs on CPU."""
        return self.get(("context", "device_target"), "Ascend") == "CPU"

    @cached_property
    def sharded_on_cpu(self) -> bool:
        """Return whether the recipe runs on CPU with the same sharded graph as on Ascend (plugins/semi_auto_cpu)."""
        return chosen(self.recipe)

    @cached_property
    def cpu_classes(self) -> bool:
        """Return whether the recipe runs on CPU with data parallelism (plugins/cpu_backend)."""
        return self.on_cpu and not self.sharded_on_cpu

    @cached_property
    def keeps_placements(self) -> bool:
        """Return whether the recipe's layers record the device of each expert (plugins/expert_balance)."""
        return self.get(("plugins", "expert_balance")) not in (None, False)

    @cached_property
    def megatron(self) -> bool:
        """Return whether the recipe trains on a Megatron corpus (.bin and .idx files)."""
        return self.get((*LOADER, "type")) == "BlendedMegatronDatasetDataLoader"


def limit_of(recipe: Mapping[str, Any]) -> int:
    """Return `context.max_device_memory` in bytes (MindSpore counts 1 GB as 2^30).

    Raises:
        RecipeError: the value does not have the form of a size.
    """
    written = (recipe.get("context") or {}).get("max_device_memory")
    if written is None:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?GB", str(written))
    if match is None:
        raise refusal(recipe, ("context", "max_device_memory"), f"{str(written)!r} is not of the form 55.5GB")
    return int(float(match[1]) * GIB)


AUTO = "auto"
OFFSET = (*MODEL, "offset")  # `auto`, or a Megatron layout string
DISPATCH, OVERLAP = ("plugins", "hierarchical_ep"), ("plugins", "ep_overlap")
MODE, CHUNKS = (*DISPATCH, "mode"), (*OVERLAP, "chunks")


def unresolved(recipe: Mapping[str, Any]) -> list[KeyPath]:
    """Return the key paths of a recipe whose value is still `auto`."""
    written = look(recipe, OFFSET)
    return [OFFSET] * isinstance(written, str) + [path for path in (MODE, CHUNKS) if look(recipe, path) == AUTO]


def require_resolved(recipe: Recipe, *paths: KeyPath) -> None:
    """Raise an error if a value at one of the key paths `paths` is still `auto`; if `paths` is not given, all values of
    the recipe are checked.

    Raises:
        RecipeError: the message names the key, and the command that prints the recipe with values in place of `auto`.
    """
    for path in unresolved(recipe):
        if path in paths or not paths:
            raise RecipeError(
                f"{recipe.source or 'the recipe'}: {dotted(path)}: {look(recipe, path)} must first be replaced by a "
                "value; `tc3 recipe show` prints the recipe with such values"
            )

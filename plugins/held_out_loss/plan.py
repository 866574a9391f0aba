"""This module holds the settings of `plugins.held_out_loss`, and says how the held-out samples are divided over the
ranks, and to which file the results are written.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.all_ranks import has_loss, pipeline_of
from plugins.errors import DataError, RecipeError
from plugins.semi_auto_cpu.chosen import splits_model
from plugins.settings import WATCHES, Section, count_at, setting, value_at

KEY = "plugins.held_out_loss"


def _data_path(written: Any) -> str | tuple[str, ...]:
    """Return the prefix, or the prefixes, of a recipe; a list has no weights, which would mean nothing here."""
    if isinstance(written, str):
        return written
    if not isinstance(written, Sequence) or not written:
        raise RecipeError(
            f"{written!r} is not a path; write the path of the held-out data, or a list of the prefixes of Megatron "
            "corpora"
        )
    for entry in written:
        if _is_number(entry):
            raise RecipeError(
                f"{entry!r} is a number; write prefixes only, without weights, because the plugin reads the same "
                "number of samples from each corpus"
            )
        if not isinstance(entry, str) or not entry.strip():
            raise RecipeError(f"{entry!r} is not a path; write the prefix of a Megatron corpus")
    known: set[str] = set()
    for entry in written:
        if (path := os.path.normpath(entry)) in known:
            raise RecipeError(f"{entry!r} is in the list twice; write each corpus once")
        known.add(path)
    return tuple(written)


def _is_number(entry: Any) -> bool:
    try:
        return float(entry) is not None
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says which held-out data is evaluated, and how often."""

    KEY = KEY
    RIGHT = f"write data_path and every under it, or {KEY}: False"
    CHANGE = WATCHES

    data_path: str | tuple[str, ...] = setting(
        None,
        "the prefix of a Megatron .bin/.idx, a list of several, or a file of HFDataLoader's; must be written",
        "write a path",
        parse=_data_path,
    )
    samples: int | None = setting(
        None,
        "samples to read of each corpus; by default what one step reads, or all of a file of HFDataLoader's",
        "write a number of at least 1",
        least=1,
    )
    every: int = setting(None, "steps between evaluations; must be written", "write a number of at least 1", least=1)

    def agree(self) -> None:
        """Raise RecipeError if the settings do not say which data is evaluated, or when."""
        for name in ("data_path", "every"):
            if not getattr(self, name):
                raise RecipeError(
                    "the key is missing; the plugin needs data_path (which data) and every (steps between evaluations)",
                    f"{KEY}.{name}",
                )

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the path prefix of each held-out corpus, or the path of the file of held-out conversations."""
        return paths_of(self.data_path)

    @property
    def names(self) -> list[str] | None:
        """Return the names under which the losses of several corpora are recorded; return None if `data_path` is not a
        list.
        """
        return None if isinstance(self.data_path, str) else short_names(self.data_path)


def paths_of(data_path: Any) -> tuple[str, ...]:
    """Return the paths in a `data_path`, without entries that are not paths, such as the weights of a blend."""
    entries = [data_path] if isinstance(data_path, str) else data_path if isinstance(data_path, list | tuple) else []
    return tuple(entry for entry in entries if isinstance(entry, str))


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: the path's last part, with as many folders before it as distinguish this path from
    the other paths.
    """
    parts = [Path(os.path.normpath(path)).parts for path in paths]
    names = []
    for own in parts:
        others = [each for each in parts if each is not own]
        size = next((size for size in range(1, len(own)) if all(own[-size:] != each[-size:] for each in others)), 0)
        names.append(str(Path(*own[-size:])))  # 0: the whole path
    return names


@dataclass(frozen=True)
class Batches:
    """A `Batches` says how the samples of a step are divided over the ranks and their micro-batches.

    Attributes:
        samples: the number of samples in the whole step.
        micro: the number of micro-batches of a rank's step, by a pipeline or by gradient accumulation.
        stages, scheduler: the number of stages and the scheduler of the pipeline.
    """

    samples: int
    micro: int = 1
    stages: int = 1
    scheduler: str | None = None

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> Batches:
        """Return how a flat recipe or a MindFormerConfig divides the samples of a step over ranks and micro-batches."""
        degrees = (recipe.get("parallel_config") or {}) if recipe.get("use_parallel") else {}
        _, micro = stages_and_micro_batches(recipe)
        ranks = degrees.get("data_parallel") or 1
        return cls(recipe["runner_config"]["batch_size"] * micro * ranks, micro, *pipeline_of(recipe))

    def share_of(self, rank: int, ranks: int) -> float:
        """Return the weight of a rank's loss in the mean over the ranks; return 0 for a rank that does not compute the
        loss.
        """
        return self.stages / ranks if has_loss(rank, ranks, self.stages, self.scheduler) else 0.0


_ACCUMULATED = "runner_config.gradient_accumulation_steps"


def stages_and_micro_batches(recipe: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of pipeline stages and the number of micro-batches of a rank's step; a number that the recipe
    does not give is 1. Both numbers are 1 if MindSpore does not split the model over devices, because MindFormers then
    does not accumulate gradients.
    """
    if not (recipe.get("use_parallel") and splits_model(value_at(recipe, "parallel.parallel_mode", 1))):
        return 1, 1
    stages, _ = pipeline_of(recipe)
    return stages, count_at(recipe, "parallel_config.micro_batch_num" if stages > 1 else _ACCUMULATED)


IGNORED = -100  # the label of a token that no loss counts


def counted(batch: Mapping[str, np.ndarray]) -> int:
    """Return the number of tokens of a batch that are part of the loss.

    Args:
        batch: column -> [samples, tokens]; `loss_mask` and `labels` are used if they exist.
    """
    mask = np.ones(batch["input_ids"].shape, bool)
    if "loss_mask" in batch:
        mask &= batch["loss_mask"] > 0
    if "labels" in batch:
        mask &= batch["labels"] != IGNORED
    return int(mask.sum())


def whole_batches(asked: int | None, there: int, samples: int) -> int:
    """Return the number of batches that an evaluation reads, each with as many samples as a training step.

    Args:
        asked: the number of samples to read; None for all.
        there: the number of samples in the corpus; Megatron's loader may have more than it was asked for.
        samples: the number of samples in the step of all ranks.
    """
    return min(there if asked is None else asked, there) // samples


def weigh(tokens: Sequence[Sequence[float]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the weight of each batch in the mean over its corpus, and the weight of each corpus in the mean over all
    tokens.

    Args:
        tokens: the number of tokens in the loss, for each corpus and batch.

    Raises:
        DataError: a corpus has no token in the loss, so that its mean would be 0 / 0.
    """
    sums = np.array([np.sum(batches) for batches in tokens])
    if not sums.all():
        place = int(np.flatnonzero(sums == 0)[0])
        wrong = "has only tokens that the loss mask hides" if len(tokens[place]) else "has fewer samples than a step"
        raise DataError(
            f"held-out corpus {place + 1} of {len(tokens)} {wrong}; add data to it, or write {KEY}: False",
            f"{KEY}.data_path",
        )
    return [np.array(batches) / total for batches, total in zip(tokens, sums, strict=True)], sums / sums.sum()


def held_out_file(run_dir: str | Path) -> Path:
    """Return the file into which a run writes its held-out losses, with one JSON line for each evaluation."""
    return Path(run_dir) / "metrics" / "held_out.jsonl"


def due(step: int, every: int, total: int | None = None) -> bool:
    """Return whether a run evaluates after `step`, counted from the run's beginning; `total` is the run's last step, if
    it is known.

    A resumed run evaluates at the same steps as a run that was never interrupted. The agent calls the same function, so
    that it does not take an evaluation for a hang (`launch/agent/phases.py`).
    """
    return step % every == 0 or step == total


def check(settings: Any, global_batch: int, instructions: bool = False) -> Settings:
    """Return the settings of `plugins.held_out_loss` in a recipe; refuse settings with which nothing would be
    evaluated, or with which data would be evaluated that is not held out.

    Args:
        settings: the plugin's section.
        global_batch: samples of a step.
        instructions: whether `data_path` is a file of HFDataLoader's instead of a Megatron prefix.

    Raises:
        RecipeError: a setting is unknown, missing, or not a number of at least 1 (`samples`: at least one global
            batch).
        DataError: there is no corpus at a path of `data_path`.
    """
    ours = Settings.read(settings)
    check_samples(ours, global_batch)
    command = "instructions" if instructions else "prepare"
    for path in ours.paths:
        for suffix in ("",) if instructions else (".bin", ".idx"):
            if not Path(path + suffix).is_file():
                make = f"`tc3 data {command} --held-out 0.05 ...` writes such a file"
                wrong = f"{path}{suffix} does not exist; {make}, or `held_out_loss: False` leaves the plugin out"
                raise DataError(wrong, f"{KEY}.data_path")
    return ours


def check_samples(settings: Settings, global_batch: int) -> None:
    """Raise RecipeError if the plugin is to read fewer samples than the `global_batch` samples of a step, because an
    evaluation reads only whole batches.
    """
    if settings.samples is not None and settings.samples < global_batch:
        wrong = (
            f"{settings.samples} samples are fewer than the {global_batch} samples of a step; write at least "
            f"{global_batch}"
        )
        raise RecipeError(wrong, f"{KEY}.samples")


def check_files(recipe: Mapping[str, Any]) -> None:
    """Raise RecipeError if the held-out data is a list of files for HFDataLoader, because HFDataLoader would join all
    of these files into one data set.
    """
    written = value_at(recipe, f"{KEY}.data_path")
    if of_instructions(value_at(recipe, "train_dataset.data_loader", {})) and not isinstance(written, str | None):
        wrong = f"HFDataLoader reads its held-out data from one file, not from {written!r}; write the file's path"
        raise RecipeError(wrong, f"{KEY}.data_path")


def check_step(recipe: Mapping[str, Any]) -> None:
    """Raise RecipeError if the train step would not return the language model's loss separately from the other parts of
    the loss.
    """
    if stages_and_micro_batches(recipe)[1] > 1 and recipe.get("print_separate_loss") is False:
        raise RecipeError(
            f"with micro-batches {KEY} reads the language model's loss, which MindFormers reports separately from the "
            "other losses only if this key is True; write True",
            "print_separate_loss",
        )


def held_out_loader(loader: dict[str, Any], path: str, samples: int | None) -> dict[str, Any]:
    """Return a `train_dataset.data_loader` section that reads the held-out data as `loader` reads the training data.

    For Megatron's loader, the section reads all documents of another corpus. For HFDataLoader, the section reads
    another file through the same handlers: conversations are packed, and prompts masked, as in training. Without a
    number of `samples` HFDataLoader reads the whole file.
    """
    own = copy.deepcopy(loader)
    if not of_instructions(loader):
        own["sizes"] = [samples, 0, 0]
        own["config"].update(data_path=["1", path], split="1, 0, 0")
        for part in ("train", "valid", "test"):
            own["config"].pop(f"{part}_data_path", None)
        return own
    own["data_files"] = path
    handlers = [handler for handler in own.get("handler") or [] if handler["type"] not in ("take", "shuffle")]
    takes = [{"type": "take", "n": samples}] if samples else []
    own["handler"] = [*handlers, *takes]
    return own


def of_instructions(loader: Any) -> bool:
    """Return whether a data loader is an HFDataLoader, which reads files of conversations; the held-out data is then
    one file of conversations and not a list of Megatron prefixes.
    """
    return isinstance(loader, Mapping) and loader.get("type") == "HFDataLoader"

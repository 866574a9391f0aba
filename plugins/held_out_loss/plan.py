"""The settings of `plugins.held_out_loss`, and where its results go."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from plugins.errors import DataError, RecipeError
from plugins.settings import section_of, whole_number

KEY = "plugins.held_out_loss"
SETTINGS = ("data_path", "samples", "every")


def held_out_file(run_dir: str | Path) -> Path:
    """Return where a run writes its held-out losses, one JSON line each."""
    return Path(run_dir) / "metrics" / "held_out.jsonl"


def due(step: int, every: int, total: int | None = None) -> bool:
    """Return whether a run evaluates after `step`, counted from the run's beginning; `total`: its last step, if known.

    A resumed part evaluates at the steps of a run that was never interrupted. The agent, which must not take an
    evaluation for a hang, asks the same (`launch/agent/phases.py`).
    """
    return step % every == 0 or step == total


def check(settings: Any, global_batch: int, instructions: bool = False) -> None:
    """Refuse settings that would evaluate nothing or something else.

    Args:
        settings: the plugin's section.
        global_batch: samples of a step.
        instructions: whether `data_path` is a file of HFDataLoader's instead of a Megatron prefix.

    Raises:
        RecipeError: a setting that is unknown, missing, or not a number of at least 1 (`samples`: of at least one
            global batch; of instructions all that there are where it is missing).
        DataError: there is no corpus at `data_path`.
    """
    section = section_of(KEY, settings, SETTINGS, f"write {', '.join(SETTINGS)} under it, or {KEY}: False")
    wanted = [name for name in SETTINGS if name != "samples" or not instructions]
    for name in wanted:
        if name not in section:
            raise RecipeError(f"{KEY}.{name}: missing; the plugin needs {', '.join(wanted)}")
    for name, least in (("samples", global_batch), ("every", 1)):
        if name in section:
            whole_number(KEY, section, name, f"write a number of at least {least}", least)
    command = "instructions" if instructions else "prepare"
    for suffix in ("",) if instructions else (".bin", ".idx"):
        if not Path(settings["data_path"] + suffix).is_file():
            raise DataError(
                f"{KEY}.data_path: there is no {settings['data_path']}{suffix}; "
                f"`tc3 data {command} --held-out 0.05 ...` writes one, `held_out_loss: False` leaves the plugin off"
            )


def held_out_loader(loader: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a `train_dataset.data_loader` section that reads the held-out data as `loader` reads the training data.

    Megatron's loader reads another corpus. HFDataLoader another file, through the same handlers: conversations are
    packed, and prompts masked, as in training.
    """
    own = copy.deepcopy(loader)
    if not of_instructions(loader):
        own["sizes"] = [settings["samples"], 0, 0]
        own["config"]["data_path"] = ["1", settings["data_path"]]
        return own
    own["data_files"] = settings["data_path"]
    handlers = [handler for handler in own.get("handler") or [] if handler["type"] not in ("take", "shuffle")]
    takes = [{"type": "take", "n": settings["samples"]}] if "samples" in settings else []
    own["handler"] = [*handlers, *takes]
    return own


def of_instructions(loader: Any) -> bool:
    """Return whether a data loader reads files of its own form, of which one is held out, and no Megatron prefixes."""
    return bool(loader.get("type") == "HFDataLoader")

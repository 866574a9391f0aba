"""The settings of `plugins.held_out_loss`, and where its results go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.errors import DataError, RecipeError, did_you_mean

SETTINGS = ("data_path", "samples", "every")


def held_out_file(run_dir: str | Path) -> Path:
    """Where a run writes its held-out losses, one JSON line each."""
    return Path(run_dir) / "metrics" / "held_out.jsonl"


def check(settings: Mapping[str, Any], global_batch: int) -> None:
    """Refuse settings that would evaluate nothing or something else.

    Raises:
        RecipeError: a setting that is unknown, missing, or not a number of at least 1 (`samples`: of at least one
            global batch).
        DataError: there is no corpus at `data_path`.
    """
    for key in settings:
        if key not in SETTINGS:
            raise RecipeError(f"plugins.held_out_loss.{key}: no such setting{did_you_mean(key, list(SETTINGS))}")
    for key in SETTINGS:
        if key not in settings:
            raise RecipeError(f"plugins.held_out_loss.{key}: missing; the plugin needs {', '.join(SETTINGS)}")
    for key, least in (("samples", global_batch), ("every", 1)):
        if type(settings[key]) is not int or settings[key] < least:
            raise RecipeError(f"plugins.held_out_loss.{key}: a number of at least {least}, not {settings[key]!r}")
    for suffix in (".bin", ".idx"):
        if not Path(settings["data_path"] + suffix).is_file():
            raise DataError(
                f"plugins.held_out_loss.data_path: there is no {settings['data_path']}{suffix}; "
                "`tc3 data prepare --held-out 0.05 ...` writes one, `held_out_loss: False` leaves the plugin off"
            )

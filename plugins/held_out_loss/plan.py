"""The settings of `plugins.held_out_loss`, and where its results go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugins.errors import DataError, RecipeError
from plugins.settings import section_of, whole_number

KEY = "plugins.held_out_loss"
SETTINGS = ("data_path", "samples", "every")


def held_out_file(run_dir: str | Path) -> Path:
    """Where a run writes its held-out losses, one JSON line each."""
    return Path(run_dir) / "metrics" / "held_out.jsonl"


def check(settings: Any, global_batch: int) -> None:
    """Refuse settings that would evaluate nothing or something else.

    Raises:
        RecipeError: a setting that is unknown, missing, or not a number of at least 1 (`samples`: of at least one
            global batch).
        DataError: there is no corpus at `data_path`.
    """
    section = section_of(KEY, settings, SETTINGS, f"write {', '.join(SETTINGS)} under it, or {KEY}: False")
    for name in SETTINGS:
        if name not in section:
            raise RecipeError(f"{KEY}.{name}: missing; the plugin needs {', '.join(SETTINGS)}")
    for name, least in (("samples", global_batch), ("every", 1)):
        whole_number(KEY, section, name, f"write a number of at least {least}", least)
    for suffix in (".bin", ".idx"):
        if not Path(settings["data_path"] + suffix).is_file():
            raise DataError(
                f"{KEY}.data_path: there is no {settings['data_path']}{suffix}; "
                "`tc3 data prepare --held-out 0.05 ...` writes one, `held_out_loss: False` leaves the plugin off"
            )

"""A run's steps as TensorBoard scalars in RUN/tensorboard, beside its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugins.errors import DataError

FOLDER, _SUFFIX = "tensorboard", ".tc3"
SCALARS = (
    "loss",
    "lm_loss",
    "load_balancing_loss",
    "mtp_loss",
    "global_norm",
    "learning_rate",
    "seconds",
)


class Scalars:
    """Writes each step that it is given; what an earlier one wrote there is replaced.

    Raises:
        DataError: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, run_dir: Path):
        self.folder = run_dir / FOLDER
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise DataError("--tensorboard: tensorboard is not installed (pip install tensorboard)") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                old.unlink()
            self.writer: Any = EventFileWriter(str(self.folder), filename_suffix=_SUFFIX)
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be written ({error.strerror or error})") from None
        self.event, self.summary = Event, Summary

    def add(self, record: dict[str, Any]) -> None:
        """One step's record of metrics/."""
        values = [(name, record.get(name)) for name in SCALARS]
        tokens, seconds = record.get("tokens"), record.get("seconds")
        values.append(("tokens_per_second", tokens / seconds if tokens and seconds else None))
        known = [self.summary.Value(tag=name, simple_value=value) for name, value in values if value is not None]
        at = record.get("time") or 0.0
        self.writer.add_event(self.event(wall_time=at, step=record["step"], summary=self.summary(value=known)))

    def flush(self) -> None:
        """Let TensorBoard see what was added."""
        self.writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self.writer.close()

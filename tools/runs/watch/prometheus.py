"""A run's status as a text file for Prometheus, as node_exporter's textfile collector reads it (*.prom)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugins.errors import DataError
from tools.files.atomic import check_writable
from tools.runs.watch.status import Status

GAUGES = {
    "step": "Newest step that was made and stands",
    "total_steps": "Steps that the run is to make",
    "loss": "Training loss of the newest step, nats per token",
    "tokens_per_second": "Median speed of the newest steps",
    "goodput": "Time of steps that stand over the time since the first attempt's plan",
    "wall_seconds": "Time since the first attempt's plan",
    "attempt": "Number of the newest attempt, from 0",
    "failures": "Attempts that failed",
    "checkpoint_step": "Step of the newest whole checkpoint",
    "checkpoint_age": "Seconds from the newest whole checkpoint to the last sign of life",
    "last_sign": "When the run last wrote anything, seconds since 1970",
}


class Exporter:
    """Writes `path` anew at each status.

    Raises:
        DataError: prometheus-client is not installed, or `path` cannot be written or ends in something else than .prom.
    """

    def __init__(self, path: Path):
        if path.suffix != ".prom":
            raise DataError(f"--prometheus {path}: want a file that ends in .prom, for node_exporter reads no other")
        try:
            import prometheus_client
        except ImportError:
            remedy = "pip install prometheus-client, or pip install -e '.[metrics]' in the checkout"
            raise DataError(f"--prometheus {path}: prometheus-client is not installed ({remedy})") from None
        check_writable(path)
        self.path, self.client = path, prometheus_client

    def write(self, status: Status) -> None:
        """Write the whole file; what is not known is left out."""
        registry: Any = self.client.CollectorRegistry()

        def gauge(name: str, words: str, value: float, **labels: str) -> None:
            made = self.client.Gauge(f"tc3_run_{name}", words, ["run", *labels], registry=registry)
            made.labels(status.run, *labels.values()).set(value)

        for name, words in GAUGES.items():
            if (value := getattr(status, name)) is not None:
                gauge(name, words, value)
        gauge("state", "1 for the state that the run is in", 1, state=status.state)
        if status.phase:
            gauge("phase", "1 for the phase that its workers are in", 1, phase=status.phase)
        gauge("slow_ranks", "Ranks that are slower than their peers", len(status.slow_ranks))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.client.write_to_textfile(str(self.path), registry)
        except OSError as error:
            raise DataError(f"--prometheus {self.path}: cannot be written ({error.strerror or error})") from None

"""This module predicts every row of a measurements file from its configuration only, and compares predictions with
measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.estimate.efficiency import Efficiency
from tools.estimate.layer_model import work
from tools.estimate.memory.model import peak_memory, stage_memory, static_modules
from tools.estimate.memory.training_graph import EMBEDDING
from tools.estimate.published.rows import Row
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.model import flops_per_token

QUANTITIES = ("step_time_s", "tokens_per_s_per_device", "tflops_per_device", "mfu", "peak_memory_gb")


@dataclass(frozen=True)
class Prediction:
    """A `Prediction` holds the predicted values of one row of a measurements file; values that cannot be predicted are
    None, and `reason` states the cause.
    """

    row: Row
    step_time_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_device: float | None = None  # model FLOPs without recomputation, counted in the way of the row's source
    mfu: float | None = None  # share of the device's bf16 peak, from 0 to 1
    peak_memory_gb: float | None = None  # of the stage that needs the most, in units of 1e9 bytes
    reason: str | None = None
    step_error: float | None = None  # predicted / measured - 1; None without a measurement
    memory_error: float | None = None  # the same of the peak memory

    def as_json(self) -> dict[str, Any]:
        """Return the prediction as the dictionary that `--json` prints, whose form stays stable."""
        found: dict[str, Any] = {"id": self.row.id}
        found |= {name: getattr(self, name) for name in QUANTITIES}
        found |= {"reason": self.reason, "assumptions": list(self.row.assumptions)}
        if self.row.measured:
            found |= {"step_error": self.step_error, "memory_error": self.memory_error}
        return found


def predict(row: Row, efficiency: Efficiency | None = None) -> Prediction:
    """Return the prediction for one row of a measurements file. If `efficiency` is given, it is used instead of the
    efficiencies of the row's device type.
    """
    config = row.config
    if config is None:
        return Prediction(row, reason=row.reason)
    try:
        step = TimeModel(row.hardware, efficiency).step(config).total
    except RecipeError as error:
        return Prediction(row, reason=str(error))
    memory, reason = _memory(row)
    flops = _step_flops(row)
    rate = flops / step / config.devices
    seconds = step * row.samples / config.global_batch
    return Prediction(
        row,
        step_time_s=seconds,
        tokens_per_s_per_device=None if config.layer_only else config.tokens / step / config.devices,
        tflops_per_device=rate / 1e12,
        mfu=rate / row.hardware.peak_flops["bf16"],
        peak_memory_gb=None if memory is None else memory / 1e9,
        reason=reason,
        step_error=_error(seconds, measured_step(row, flops / config.global_batch)),
        memory_error=_error(memory, measured_memory(row)),
    )


def _memory(row: Row) -> tuple[float | None, str | None]:
    """Return bytes of the fullest device, or the reason why they are not known."""
    config = row.config
    assert config is not None
    if config.layer_only:
        return None, "one layer has no tokens/s, and what its benchmark keeps in memory is not said"
    try:
        if "activation_GiB_first_stage" in row.measured and "peak_memory_GiB" not in row.measured:
            # such sources count what is kept and nothing that a pass works with, and of the weights 12 h^2 a layer
            first = stage_memory(config, 0)
            embedding = sum(size for (_, name), size in static_modules(config, 0).items() if name == EMBEDDING)
            return first.static - embedding + first.activations, None
        return peak_memory(config), None
    except RecipeError as error:
        return None, f"memory: {error}"


def _step_flops(row: Row) -> float:
    """Return model FLOPs of a step; for a single layer those of its MLP, forward and twice backward."""
    config = row.config
    assert config is not None
    if config.layer_only:
        return 3 * work(config, "moe").flops * config.devices
    return flops_per_token(config.model, config.sequence, row.masked) * config.tokens


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def measured_seconds(row: Row) -> float | None:
    """Return the measured seconds of the row's step; return None if the row has no configuration or no step time."""
    if row.config is None:
        return None
    return measured_step(row, _step_flops(row) / row.config.global_batch)


def measured_step(row: Row, flops_per_sample: float) -> float | None:
    """Return the measured seconds of a row's training step; if the row states only the throughput, compute them from
    the throughput.
    """
    measured, config = row.measured, row.config
    assert config is not None
    for name in ("step_time_s", "derived_step_time_s", "implied_step_time_s"):
        if _number(measured, name):
            return measured[name]
    if _number(measured, "step_time_ms"):
        return measured["step_time_ms"] / 1e3
    if _number(measured, "forward_ms") and _number(measured, "backward_ms"):
        return (measured["forward_ms"] + measured["backward_ms"]) / 1e3
    for name in ("tokens_per_s_per_gpu", "tokens_per_s_per_device"):
        if _number(measured, name):
            return row.samples * config.sequence / (measured[name] * config.devices)
    work_done = row.samples * flops_per_sample / config.devices
    if _number(measured, "tflops_per_gpu"):
        return work_done / (measured["tflops_per_gpu"] * 1e12)
    if _number(measured, "mfu_percent"):
        return work_done / (measured["mfu_percent"] / 100 * row.hardware.peak_flops["bf16"])
    return None


def measured_memory(row: Row) -> float | None:
    """Return the measured bytes of the device that uses the most memory, if the row states them."""
    measured, config = row.measured, row.config
    assert config is not None
    if _number(measured, "peak_memory_GiB"):
        return measured["peak_memory_GiB"] * GIB
    if _number(measured, "param_opt_grad_GiB") and _number(measured, "activation_GiB_first_stage"):
        return (measured["param_opt_grad_GiB"] + measured["activation_GiB_first_stage"]) * GIB
    return None


def _number(measured: Mapping[str, Any], name: str) -> bool:
    value = measured.get(name)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def summary(predictions: Iterable[Prediction], field: str = "step_error") -> dict[str, dict[str, float]]:
    """Return the number of predictions ("rows") and the "mean" and "worst" absolute error, for all measurements
    together, for each device and for each group. Only those rows of measurements count to which efficiencies are
    fitted.
    """
    groups: dict[str, list[float]] = {"all": []}
    for prediction in predictions:
        error = getattr(prediction, field)
        if error is None or prediction.row.use != "fit":
            continue
        group = [f"group {prediction.row.group}"] if prediction.row.group else []
        for name in ("all", f"device {prediction.row.cluster}", *group):
            groups.setdefault(name, []).append(abs(error))
    return {
        name: {"rows": len(errors), "mean": sum(errors) / len(errors), "worst": max(errors)}
        for name, errors in groups.items()
        if errors
    }

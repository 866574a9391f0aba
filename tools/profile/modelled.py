"""The estimator's step by the terms that a profile is attributed to, for the stage that was profiled."""

from __future__ import annotations

from dataclasses import replace

from plugins.errors import RecipeError
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency
from tools.estimate.layer_time import Parts
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import layer_options
from tools.estimate.time_model import TimeModel
from tools.hardware import Hardware
from tools.profile.attribute import HOST, TERMS

_LAYER = {"matmul": ("matmul", "cut"), "attention": ("attention",), "elementwise": ("elementwise",)}


def stage_of(config: Configuration, rank: int | None) -> int | None:
    """The pipeline stage of a rank; None where the rank is not known and there are several."""
    if config.pp == 1:
        return 0
    if rank is None:
        return None
    if not 0 <= rank < config.devices:
        raise RecipeError(f"rank {rank}: the recipe has {config.devices} devices; is this profile of another recipe?")
    return rank // (config.devices // config.pp)


def modelled(config: Configuration, hardware: Hardware, efficiency: Efficiency, stage: int | None) -> dict[str, float]:
    """`TERMS` -> seconds; what recomputation repeats counts to its own term, and the sum is the step.

    Args:
        stage: of the pipeline; None: the slowest.
    """
    times = TimeModel(hardware, efficiency)
    step = times.step(config)
    if stage is None:
        forward, backward, _ = times.chunks(config)
        stage = int((forward + backward).sum(axis=0).argmax())
    parts = stage_parts(times, config, stage)
    lean = TimeModel(hardware, replace(efficiency, moe_s=0.0, weight_s=0.0))
    layers = stage_parts(lean, config, stage).fixed
    found = dict.fromkeys(TERMS, 0.0)
    for term, names in _LAYER.items():
        found[term] = sum(getattr(parts, name) for name in names)
    found.update({term: getattr(parts, term) for term in ("tp", "cp", "ep")})
    update = 0.0 if config.layer_only else times.optimizer(config, stage)
    found["optimizer"] = 0.0 if config.layer_only else lean.optimizer(config, stage)
    found["data"] = step.data_parallel
    found.update(zip(HOST, (layers, parts.fixed - layers, update - found["optimizer"], step.fixed), strict=True))
    found["pipeline"] = step.total - sum(found.values())
    return found


def stage_parts(times: TimeModel, config: Configuration, stage: int) -> Parts:
    """Seconds of all micro-batches of a stage by part, recomputation added to the part that it repeats."""
    total = dict.fromkeys(Parts.__dataclass_fields__, 0.0)
    layers = {kind: times.layer(config, kind) for kinds in config.stage_kinds(stage) for kind in set(kinds)}
    for chunk, every in enumerate(config.stage_kinds(stage)):
        options = iter(layer_options(config, chunk, stage, len(every)))
        for kind in every:
            layer = layers[kind]
            option = next(options) if kind in ("dense", "moe") else mtp_option(config)
            for name in total:
                runs = (layer.forward, layer.backward, layer.again(option))
                total[name] += config.micro_batches * sum(getattr(part, name) for part in runs)
    return Parts(**total)


def whole(config: Configuration, hardware: Hardware, efficiency: Efficiency, stage: int | None) -> dict[str, float]:
    """Seconds of layers' communication with what is hidden included, as far as the model tells it.

    Not of gradients and weights: the model hides these beside waiting, too, where a profile sees nothing hidden.
    """
    parts = stage_parts(TimeModel(hardware, replace(efficiency, hidden=0.0)), config, stage or 0)
    found = {"tp": parts.tp, "cp": parts.cp}
    if not (config.ep_cut or config.shared_beside or config.overlap_ep):
        found["ep"] = parts.ep
    return found

"""What fusing brings a recipe, as plain data: bytes and modelled seconds by part of the model and by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugins.operator_fusion.plan import Fusion
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import UNKNOWN as NO_RUN
from tools.estimate.efficiency import DeviceTimes, known_error
from tools.estimate.layer_model import work
from tools.fusion.count.tally import Tally
from tools.fusion.pieces import ONCE, Pieces
from tools.model.architecture import DENSE, MOE

NOT_KNOWN = (
    "kernels on Ascend were compared with nothing; MindSpore's own passes on a CPU were, by clusters and kernels "
    "(docs/fusion.md)",
    "the graph is the front end's: what the backend's other passes change before the fusion is not in it",
    "a composite (AddExt, SiLU, ...) counts as one kernel of its main part; of what it is opened into nothing is known",
    "each tensor is taken to be read and written once by each kernel; what stays in the L2 cache is not modelled",
)
CUBE = "level cube: how products are joined with what stands behind them is not modelled; counted as level vector"
QUICK = (
    "stages are put together from a layer of each kind: first stages of the 438B and the 1119B, compiled whole, have "
    "up to 1.3 % more kernels and 1 % more bytes (--stage compiles one whole)"
)
GRADIENTS_OFF = (
    "MindSpore registers both weight-gradient passes switched off (public sources; only --enable_pass turns them on), "
    "so bytes at stake, not saved"
)


def report_of(
    name: str, pieces: Pieces, fusion: Fusion, why: str, config: Configuration, times: DeviceTimes
) -> dict[str, Any]:
    """Everything, in bytes, operators and seconds of one device.

    Args:
        name: of the recipe. fusion, why: what is fused, and which key says so.
        times: of the cluster: the estimator's.
    """
    known = known_error(times.hardware)
    parts = [_part(part, pieces, config, times) for part in pieces.tallies]
    stages = [_stage(stage, pieces, times) for stage in pieces.stages]
    return {
        "recipe": name,
        "level": fusion.level,
        "disabled": list(fusion.disable),
        "why": why,
        "micro_batches": pieces.micro_batches,
        "cluster": times.hardware.name,
        "parts": parts,
        "stages": stages,
        "patterns": _patterns(pieces),
        "alone": _alone(pieces),
        "weight_gradients": _named(pieces, times),
        "launch_seconds": times.launching(1),
        "launch_certainty": times.hardware.origins["launch_s"].certainty,
        "known_error": known.as_json() if known else None,
        "error": f"single kernels: unknown; the estimator's step times are {known.words if known else NO_RUN}",
        "not_known": _not_known(pieces.quick, fusion),
    }


def _not_known(quick: bool, fusion: Fusion) -> list[str]:
    """What the numbers leave open."""
    return [*NOT_KNOWN, *([QUICK] if quick else []), *([CUBE] if fusion.level == "cube" else []), GRADIENTS_OFF]


def _part(part: str, pieces: Pieces, config: Configuration, times: DeviceTimes) -> dict[str, Any]:
    """One part: a micro-batch's passes and what runs once a step."""
    each, once = pieces.each(part), pieces.each(part, (ONCE,))
    found = {
        "part": part,
        "in_model": sum(has[part] for has in pieces.stages.values()),
        "micro_batch": _numbers(each, times),
        "passes": {name: tally.as_json() for name, tally in pieces.tallies[part].items()},
        "step": _numbers(once, times),
    }
    block = part.partition(",")[0].partition(" (")[0]
    if block in (DENSE, MOE) and (forward := pieces.tallies[part].get("forward")):
        found["estimator"] = _assumed(block, forward, config, times)
    return found


def _assumed(block: str, forward: Tally, config: Configuration, times: DeviceTimes) -> dict[str, Any]:
    """What the estimator takes a layer's forward to move outside products and attention, beside the graph's count."""
    assumed = work(config, block).elementwise
    unfused, fused = forward.before + forward.beside, forward.after + forward.beside
    return {
        "bytes": round(assumed),
        "factor": times.reached.unfused,
        "applied": not config.fused,
        "graph_unfused": round(unfused),
        "graph_fused": round(fused),
        "graph_factor": round(unfused / fused, 3) if fused else None,
        "graph_over_assumed": round(fused / assumed, 3) if assumed else None,
    }


def _numbers(tally: Tally, times: DeviceTimes) -> dict[str, Any]:
    saved = tally.before - tally.after
    return tally.as_json() | {
        "seconds_before": times.moving(tally.before),
        "seconds_after": times.moving(tally.after),
        "seconds_saved": times.moving(saved),
        "launch_seconds_saved": times.launching(tally.launches),
    }


def _stage(stage: int, pieces: Pieces, times: DeviceTimes) -> dict[str, Any]:
    return {"stage": stage, "parts": dict(pieces.stages[stage])} | _numbers(pieces.step(stage), times)


def _patterns(pieces: Pieces) -> list[dict[str, Any]]:
    """Kernels of several operators by part: how often in a micro-batch (of the optimizer: a step), bytes saved."""
    found = []
    for part, passes in pieces.tallies.items():
        for runs, names in (("micro-batch", [name for name in passes if name != ONCE]), (ONCE, [ONCE])):
            tally = pieces.each(part, names)
            found += [
                {"part": part, "runs": runs, "pattern": each, "kernels": round(count, 2), "bytes_saved": round(saved)}
                for each, count in tally.patterns.items()
                if (saved := tally.saved[each]) or count
            ]
    return sorted(found, key=lambda row: -row["bytes_saved"])


def _alone(pieces: Pieces) -> list[dict[str, Any]]:
    """What stays alone in a micro-batch, and why."""
    found = []
    for part in pieces.tallies:
        tally = pieces.each(part)
        found += [
            {"part": part, "operator": key[0], "why": key[1], "operators": round(count, 2), "bytes": round(size)}
            for key, count in tally.alone.items()
            if (size := tally.moved[key]) or count
        ]
    return sorted(found, key=lambda row: -row["bytes"])


def _named(pieces: Pieces, times: DeviceTimes) -> list[dict[str, Any]]:
    """Weight gradients by part: which pass would take them, what stands between, bytes of a micro-batch at stake."""
    found = []
    for part in pieces.tallies:
        tally = pieces.each(part, ("recompute", "gradient", "forward", ONCE))
        found += [
            {
                "part": part,
                "pass": key[0],
                "chain": key[1],
                "matches": not key[2],
                "why": key[2],
                "products": round(count, 2),
                "bytes": round(tally.named_bytes[key]),
                "seconds": times.moving(tally.named_bytes[key]),
            }
            for key, count in tally.named.items()
        ]
    return sorted(found, key=lambda row: (row["part"], -row["bytes"]))


def fullest(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stage of which fusing saves most."""
    stages: Sequence[Mapping[str, Any]] = report["stages"]
    return max(stages, key=lambda stage: stage["bytes_before"] - stage["bytes_after"])

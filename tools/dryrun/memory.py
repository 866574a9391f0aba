"""Memory of one device of a stage, by what holds it. Exact but for activations, which are an estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.dryrun.graph.passes import Pass, most_saved, waiting
from tools.dryrun.layout import ACCUMULATED, STATE, WEIGHT, Held, total
from tools.hardware.units import GIB

FITS, UNKNOWN, DOES_NOT_FIT, NO_LIMIT = "fits", "unknown", "does not fit", "no limit"


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
        weights: parameters in the type they are kept in, and buffers that no optimizer updates.
        state: the optimizer's.
        accumulated: gradients summed over micro-batches.
        gathered: weights in compute precision, gathered from the optimizer's shards for the whole step.
        saved: activations that wait for their backward, at the fullest moment (estimate).
        working: what is alive inside a pass beside them, at the fullest moment of both together (estimate).
        limit: `context.max_device_memory`; 0 when the recipe sets none.
    """

    weights: int
    state: int
    accumulated: int
    gathered: int
    saved: int
    working: int
    limit: int

    @property
    def exact(self) -> int:
        """What the compiled layouts and graph state."""
        return self.weights + self.state + self.accumulated + self.gathered

    @property
    def total(self) -> int:
        """All of it."""
        return self.exact + self.saved + self.working

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self) | {"exact": self.exact, "total": self.total}


def memory_of(held: Sequence[Held], graph: Mapping[str, Any], passes: Sequence[Pass], limit: int) -> Memory:
    """Memory of a stage whose layers are those of the compiled `graph` and whose passes run in this order.

    Its total is the peak of `tools.dryrun.graph.time_line.line_of`.
    """
    chunks = graph["activations"]
    saved = most_saved(passes, [chunk["saved"] for chunk in chunks])
    return Memory(
        weights=total(held, WEIGHT),
        state=total(held, STATE),
        accumulated=total(held, ACCUMULATED),
        gathered=sum(graph["kept"].values()),
        saved=saved,
        working=most_alive(passes, chunks) - saved,
        limit=limit,
    )


def most_alive(passes: Sequence[Pass], chunks: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of activations at the fullest moment: what waits for its backward, and what is alive in the pass that runs.

    A forward's own part of what waits is among what is alive in it, and counts once; what it received from the stage
    in front and keeps is there, too, though no operator of its own makes it.
    """
    most = max((chunk["backward"] for chunk in chunks), default=0)  # where no passes are known
    sizes = [chunk["saved"] for chunk in chunks]
    for before, item in zip(waiting(passes, sizes), passes, strict=True):
        chunk = chunks[item.chunk]
        inside = max(chunk["forward"], chunk["saved"]) if item.kind == "F" else chunk["backward"]
        most = max(most, before + inside)
    return most


def fit_of(memory: Mapping[str, int], limit: int, error: float = 0.0) -> str:
    """Whether a stage fits: one of `FITS`, `UNKNOWN`, `DOES_NOT_FIT`, `NO_LIMIT`.

    Args:
        error: most that the total may be off, as a share of it; what is exact is not.
    """
    if not limit:
        return NO_LIMIT
    if memory["exact"] > limit or memory["total"] * (1 - error) > limit:
        return DOES_NOT_FIT
    return UNKNOWN if memory["total"] * (1 + error) > limit else FITS


def unsure(stages: Sequence[Mapping[str, Any]], limit: int, error: float) -> list[str]:
    """A line for each stage that lies within the error of the limit."""
    where = f"within {error:.0%} of the limit of {limit / GIB:.1f}, as far as --quick may be off"
    return [
        f"context.max_device_memory: stage {stage['stage']}: unknown whether it fits: "
        f"{stage['memory']['total'] / GIB:.1f} GiB per device is {where}: run it at full depth, without --quick"
        for stage in stages
        if fit_of(stage["memory"], limit, error) == UNKNOWN
    ]


def over_limit(stages: Sequence[Mapping[str, Any]], limit: int, error: float = 0.0) -> list[str]:
    """Stages of a report that do not fit, with the keys that would mend it; one line for those that need the same."""
    needs: dict[tuple[str, str, str], list[str]] = {}
    for stage in stages if limit else ():
        memory = stage["memory"]
        if fit_of(memory, limit, error) != DOES_NOT_FIT:
            continue
        sure = memory["exact"] > limit
        largest = sorted(_MEND, key=lambda name: -memory[name])[:2]
        heavy = " and ".join(f"{_MEND[name][0]} ({memory[name] / GIB:.1f} GiB)" for name in largest)
        what = "without activations" if sure else "with activations (an estimate)"
        total = f"{memory['exact' if sure else 'total'] / GIB:.1f} GiB per device {what}"
        remedy = "; ".join(_MEND[name][1] for name in largest)
        needs.setdefault((total, heavy, remedy), []).append(str(stage["stage"]))
    return [
        f"context.max_device_memory: stage{'s' * (len(names) > 1)} {', '.join(names)}: {total}, the limit is "
        f"{limit / GIB:.1f}: most are {heavy}; {remedy}"
        for (total, heavy, remedy), names in needs.items()
    ]


_MEND = {  # part of memory -> its name, and the keys that make it smaller
    "weights": ("weights", "parallel.enable_parallel_optimizer: True shards them"),
    "state": ("optimizer state", "parallel.enable_parallel_optimizer: True shards it over data_parallel"),
    "accumulated": (
        "accumulated gradients",
        "a larger parallel_config.expert_parallel or, without a pipeline, "
        "parallel.parallel_optimizer_config.gradient_accumulation_shard: True makes them smaller",
    ),
    "gathered": (
        "gathered weights",
        "a larger parallel_config.expert_parallel, model_parallel or pipeline_stage makes them fewer",
    ),
    "saved": ("kept activations", "recompute_config.recompute: True, or a larger model_parallel or context_parallel"),
    "working": (
        "activations in a pass",
        "a larger parallel_config.model_parallel or context_parallel, or a smaller runner_config.batch_size",
    ),
}

"""One line of the result: a run with its predicted step, memory, and where its time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.estimate.configuration import Configuration
from tools.estimate.memory.model import layer_options, peak_memory
from tools.estimate.operators import PATTERNS, parts_of
from tools.estimate.step_time import PARTS, exposed_of
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.search.space.candidates import Candidate, candidate_of


@dataclass(frozen=True)
class Entry:
    """A run and what is predicted for it.

    Args:
        name: "recipe" for the recipe's own, "" for the search's.
        seconds: of a step, the schedule simulated; parts: the same by `PARTS`, which add up to it.
        peak: bytes of the heaviest stage.
        bound: no placement of this strategy is under these seconds; 0 where none was looked for.
        mfu: model FLOPs (no recomputation, causal attention) over the devices' peak.
    """

    name: str
    config: Configuration
    seconds: float
    parts: Mapping[str, float]
    peak: float
    bound: float
    mfu: float

    @property
    def candidate(self) -> Candidate:
        """Its place in the space."""
        return candidate_of(self.config)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        return self.config.tokens / self.seconds

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return exposed_of(self.parts)

    @property
    def layout(self) -> str:
        """``dp256 tp2 pp8 vpp2 ep16, 64 x 1``: as `tc3 check` writes it, number and samples of micro-batches."""
        c = self.config
        stages = f"pp{c.pp}" + (f" vpp{c.chunks}" if c.chunks > 1 else "")
        sizes = {f"dp{c.dp}": c.dp, f"tp{c.tp}": c.tp, stages: c.pp, f"cp{c.cp}": c.cp, f"ep{c.ep}": c.ep}
        words = " ".join(word for word, size in sizes.items() if size > 1)
        return f"{words or 'one device'}, {c.micro_batches} x {c.batch}"

    @property
    def recompute(self) -> str:
        """Layers that recompute, by option: ``full 16, select 30 of 54``."""
        config, counts = self.config, Counter[str]()
        for chunk, row in enumerate(config.layers):
            for stage, count in enumerate(row):
                for option in layer_options(config, chunk, stage, count):
                    counts.update(parts_of(option))
        words = [f"{name} {counts[name]}" for name in ("full", "select", *PATTERNS, "communication") if counts[name]]
        return f"{', '.join(words)} of {config.model.layers}" if words else "none"

    def as_json(self) -> dict[str, Any]:
        """For `--json`: degrees, tables, seconds, GiB."""
        c, recompute = self.config, self.config.recompute
        return {
            "name": self.name,
            **self.candidate._asdict(),
            "schedule": c.schedule,
            "layers": c.layers,
            "recompute": {name: getattr(recompute, name) for name in ("full", "select", "communication")}
            | dict(recompute.operators),
            "step_s": self.seconds,
            "bound_s": self.bound or None,
            "parts_s": dict(self.parts),
            "exposed_communication_s": self.exposed,
            "bubble": self.parts["bubble"] / self.seconds,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "peak_gib": self.peak / GIB,
        }


def entry_of(config: Configuration, times: TimeModel, name: str = "", bound: float = 0.0) -> Entry:
    """What is predicted for a run.

    Raises:
        RecipeError: its schedule has no model, or cannot run with these numbers.
    """
    step = times.step(config, simulated=True)
    return Entry(name, config, step.total, step.by_part, peak_memory(config), bound, times.mfu(config, step.total))


def why_faster(first: Entry, second: Entry) -> str:
    """The largest differences of two entries' times, in words: what the first saves, then what it pays."""
    saved = {name: second.parts[name] - first.parts[name] for name in PARTS}
    least = 0.02 * abs(second.seconds - first.seconds) + 1e-3
    gains = [name for name in sorted(PARTS, key=lambda name: -saved[name]) if saved[name] > least][:3]
    costs = [name for name in sorted(PARTS, key=lambda name: saved[name]) if saved[name] < -least][:2]
    words = [f"{saved[name]:.2f} s less {PARTS[name]}" for name in gains]
    paid = [f"{-saved[name]:.2f} s more {PARTS[name]}" for name in costs]
    total = f"{second.seconds - first.seconds:.2f} s per step"
    if not words:
        return f"{total}: the same within a hundredth"
    return f"{total}: {', '.join(words)}" + (f"; it pays {', '.join(paid)}" if paid else "")

"""Which dispatch mode and how many chunks a recipe should use on a cluster, and what each mode would cost.

Pure: a recipe and a hardware file in, numbers out. `tc3 ep-report` prints it; `auto` stands for its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.ep_overlap.plan import DIGITS, Choice, Chunks, Layer, choose
from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.topology import Topology, of_mesh
from plugins.hierarchical_ep.traffic import BreakEven, break_even
from tools.ep_report.shapes import Shape, shape_of
from tools.ep_report.step_time import Base, base_of, layer_of, links_of, runs
from tools.hardware import Hardware, load_hardware
from tools.recipe.load import Recipe

DEFAULT_HARDWARE = "atlas_800t_a2"
DEFAULT_SKEW = 1.2  # the busiest rank's load over the mean; assumed


@dataclass(frozen=True)
class ModeReport:
    """One dispatch mode. Bytes and `layer` of the busiest rank, per MoE layer and micro-batch, forward and backward.

    Args:
        inter_bytes, intra_bytes: over each class of links, the replay of recomputation included.
        choice: the best cut of the layer, see `plugins.ep_overlap.plan`.
        runs: how often a device runs an MoE layer in a step.
        base: the rest of the step.
    """

    mode: str
    inter_bytes: float
    intra_bytes: float
    choice: Choice
    runs: float
    base: Base = field(repr=False)

    @property
    def ep_seconds(self) -> float:
        """EP communication of a device and step, hidden or not."""
        return self.choice.ep_seconds * self.runs

    @property
    def exposed(self) -> tuple[float, float]:
        """Seconds of a device and step in which EP communication is waited for: without, with overlap."""
        return self.choice.exposed_before * self.runs, self.choice.exposed_after * self.runs

    @property
    def step(self) -> tuple[float, float]:
        """Seconds of a step without, with overlap."""
        return self.base.step(self.exposed[0]), self.base.step(self.exposed[1])

    @property
    def share_of_step(self) -> tuple[float, float]:
        """Exposed EP communication over the step, whose bubble stays in the step: without, with overlap."""
        return self.exposed[0] / self.step[0], self.exposed[1] / self.step[1]

    @property
    def share_of_communication(self) -> tuple[float, float]:
        """Exposed EP communication over all exposed communication: without, with overlap (report section 4.4)."""
        before, after = self.exposed
        return before / (before + self.base.others), after / (after + self.base.others)


@dataclass(frozen=True)
class Advice:
    """All modes of one recipe at one EP degree, and the setting to use.

    Args:
        modes: dispatch mode -> its report.
        mode, chunks, stride: the recommendation; chunks (1, 1) means no overlap, stride is the order of issue.
        why: one sentence.
    """

    shape: Shape
    hardware: Hardware
    topology: Topology
    skew: float
    modes: dict[str, ModeReport]
    mode: str
    chunks: Chunks
    stride: int
    break_even: BreakEven
    why: str

    @property
    def best(self) -> ModeReport:
        """The recommended mode."""
        return self.modes[self.mode]

    @property
    def settings(self) -> dict[str, Any]:
        """The `plugins:` section to write; without `ep_overlap` where cutting does not pay, and without stride 1."""
        settings: dict[str, Any] = {"hierarchical_ep": {"mode": self.mode}}
        if self.chunks != (1, 1):
            settings["ep_overlap"] = {"chunks": list(self.chunks)}
            if self.stride != 1:
                settings["ep_overlap"]["stride"] = self.stride
        return settings


def advise(
    recipe: dict[str, Any],
    hardware: Hardware | str = DEFAULT_HARDWARE,
    skew: float = DEFAULT_SKEW,
    modes: Sequence[str] = MODES,
    cuts: Sequence[Chunks] = (),
) -> Advice:
    """Compare dispatch modes and cuts for `recipe` on `hardware`.

    Args:
        recipe: a loaded recipe.
        hardware: a hardware file, or its name or path.
        skew: load of the busiest rank over the mean, at least 1.
        modes: the modes to choose from; one where the recipe fixes it.
        cuts: (b, s) to choose from; [(1, 1)] where the recipe does not overlap, empty for all that fit.

    Raises:
        RecipeError: there is no expert-parallel communication, sizes do not fit each other, or an argument is wrong.
    """
    hardware = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    for mode in modes:
        if mode not in MODES:
            hint = did_you_mean(mode, list(MODES))
            raise RecipeError(
                f"plugins.hierarchical_ep.mode: unknown mode {mode!r}, expected auto, {', '.join(MODES)}{hint}"
            )
    shape = shape_of(recipe if isinstance(recipe, Recipe) else Recipe(recipe), hardware)
    topology = of_mesh(shape.ep, hardware.devices_per_node, shape.experts)
    layers = {mode: layer_of(shape, hardware, topology, mode, skew) for mode in modes}
    base, links = base_of(shape, hardware, skew), links_of(hardware)
    sizes = (shape.batch, shape.rank_sequence)
    reports = {}
    for mode, layer in layers.items():
        choice = choose({mode: layer}, links, *sizes, cuts=cuts)
        reports[mode] = ModeReport(mode, *_bytes(layer), choice, runs(shape), base)
    # min keeps the first of equals: the simplest mode
    best = min(reports.values(), key=lambda report: round(report.choice.makespan_after, DIGITS))
    even = break_even(topology, shape.top_k, shape.hidden, shape.itemsize, skew)
    why = _why(best, topology, even, skew, shape.top_k)
    return Advice(
        shape,
        hardware,
        topology,
        skew,
        reports,
        mode=best.mode,
        chunks=best.choice.chunks,
        stride=best.choice.stride,
        break_even=even,
        why=why,
    )


def _bytes(layer: Layer) -> tuple[float, float]:
    """(inter, intra) bytes of a layer, forward and backward, with the replay of dispatch."""
    steps = [*layer.forward, *layer.backward]
    if layer.replay:
        steps += [step for step in layer.forward if step.name.startswith("dispatch")]
    return sum(step.inter_bytes for step in steps), sum(step.intra_bytes for step in steps)


def _why(best: ModeReport, topology: Topology, even: BreakEven, skew: float, top_k: int) -> str:
    """One sentence: the break-even in closed form, and what overlap hides."""
    choice = best.choice
    if topology.nodes == 1:
        text = f"EP {topology.ep} fits in one node, where every mode is the same All-to-All"
    else:
        text = (
            f"hierarchical moves nodes x (1 + m) / load = {topology.nodes} x {1 + even.metadata_ratio:.3f} / "
            f"{even.load:.3g} = {even.hierarchical_over_global:.2f} of the global All-to-All's inter-node bytes "
            f"(m: metadata; load: copies of a token, skew {skew:g} x top-{top_k}; break-even at {even.nodes_limit:.1f} "
            f"nodes, EP {even.ep_limit:.0f}), deduplicated {even.deduplicated_over_global:.2f}; "
            f"by time {best.mode} is the fastest"
        )
    if choice.chunks == (1, 1):
        return f"{text}, and chunks would cost more in launches than they hide."
    hidden = 1 - choice.exposed_fraction(choice.exposed_after)
    b, s = choice.chunks
    return f"{text}, and {b * s} chunks (batch {b} x sequence {s}) hide {hidden:.0%} of EP communication."

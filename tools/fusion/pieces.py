"""The parts of a model as a graph counts them, and how many of each a stage has, so that a step can be added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plugins.operator_fusion.plan import Fusion
from tools.dryrun.compile.rank import even_rows
from tools.dryrun.graph.activations import routed_rows
from tools.dryrun.graph.text import read_graph
from tools.dryrun.kinds import Kind
from tools.dryrun.quick import small_of
from tools.dryrun.stages import stages_of
from tools.fusion.count.parts import COMMON
from tools.fusion.count.tally import Tallies, Tally, tallies
from tools.recipe.load import Recipe
from tools.recipe.view import View

ONCE = "step"  # the pass that runs once a step; the others run once a micro-batch


@dataclass
class Pieces:
    """What was counted.

    Args:
        tallies: part ("dense", "moe", "mtp", "head", ...) -> pass -> its numbers, of one layer where it is one.
        stages: stage (-1: of a graph that was handed over) -> part -> how many of it the stage has.
        micro_batches: of a step.
        quick: whether stages are put together from kinds of layers.
    """

    micro_batches: int
    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)
    stages: dict[int, Counter[str]] = field(default_factory=dict)
    quick: bool = False

    def each(self, part: str, passes: Sequence[str] = ("forward", "recompute", "gradient")) -> Tally:
        """One part's numbers for a micro-batch."""
        found = Tally()
        for name in passes:
            found.add(self.tallies[part].get(name, Tally()))
        return found

    def step(self, stage: int) -> Tally:
        """A stage's numbers for a step."""
        found = Tally()
        for part, count in self.stages[stage].items():
            found.add(self.each(part), count * self.micro_batches)
            found.add(self.each(part, (ONCE,)), count)
        return found


def quick_pieces(recipe: Recipe, texts: Sequence[Path], fusion: Fusion) -> Pieces:
    """Every stage from the graphs of `quick_plan`.

    A kind's layers are the mean of those that were compiled in front of the last stage: the one there has operators of
    the loss beside it that say of no layer that they are its own.
    """
    view, small = View(recipe), small_of(recipe)
    found = Pieces(view.micro_batches * view.accumulation, quick=True)
    kinds = [kind for group in small.groups for kind in group]
    labels = _labels([kind for stage in small.kinds for chunk in stage for kind in chunk])
    counted = [_read(file, recipe, fusion) for file in texts]
    numbered = {str(number): labels[kind] for number, kind in enumerate(kinds)}
    ends: list[dict[str, dict[str, Tally]]] = []
    behind = Pieces(found.micro_batches)
    for pieces, several in ((behind, counted[-1:]), (found, counted[:-1])):
        compiled: Counter[str] = Counter()
        ends = [_add_means(pieces, one, numbered, compiled) for one in several] + ends
        _divide(pieces, compiled)
    found.tallies = behind.tallies | found.tallies
    for number, part in ((0, ends[0]), (-1, ends[-1])):
        for name, passes in part.items():
            if name != COMMON or number == 0:
                found.tallies[_end(name, number)] = passes
    for stage, chunks in zip(stages_of(view), small.kinds, strict=True):
        has = Counter(labels[kind] for chunk in chunks for kind in chunk)
        for end, number in (("embedding", 0), ("head", -1)):
            has.update(_end(name, number) for name in ends[number] if end in stage.ends and name != COMMON)
        has.update(name for name in ends[0] if name == COMMON)
        found.stages[stage.number] = has
    return found


def stage_pieces(recipe: Recipe, text: Path, fusion: Fusion, stage: int) -> Pieces:
    """One stage, exactly: its layers are means of their kind."""
    view = View(recipe)
    found = Pieces(view.micro_batches * view.accumulation)
    kinds = {
        str(first + place): kind
        for each in stages_of(view)
        for first, chunk in each.chunks
        for place, kind in enumerate(chunk)
    }
    has: Counter[str] = Counter()
    ends = _add_means(found, _read(text, recipe, fusion), kinds, has)
    _divide(found, has)
    found.tallies |= ends
    found.stages[stage] = has + Counter(ends.keys())
    return found


def _read(file: Path, recipe: Recipe, fusion: Fusion) -> Tallies:
    graph = read_graph(file)
    return tallies(graph, fusion, routed_rows(graph, even_rows(View(recipe))))


def _add_means(
    found: Pieces, counted: Tallies, labels: Mapping[str, str], has: Counter[str]
) -> dict[str, dict[str, Tally]]:
    """Add a graph's layers to their kinds, counting them in `has`; what is no layer is returned, by part and pass."""
    ends: dict[str, dict[str, Tally]] = {}
    has.update(labels[part] for part in dict.fromkeys(part for part, _ in counted) if part in labels)
    for (part, name), tally in counted.items():
        if part in labels:
            found.tallies.setdefault(labels[part], {}).setdefault(name, Tally()).add(tally)
        else:
            ends.setdefault(part, {})[name] = tally
    return ends


def _divide(found: Pieces, layers: Mapping[str, int]) -> None:
    """Sums over layers of a kind become means."""
    for label, passes in found.tallies.items():
        for name, tally in passes.items():
            mean = Tally()
            mean.add(tally, 1 / layers[label])
            passes[name] = mean


def _end(name: str, number: int) -> str:
    """The last stage of a model with MTP has the embedding, too."""
    return f"{name} (last stage)" if number == -1 and name == "embedding" else name


def _labels(kinds: Sequence[Kind]) -> dict[Kind, str]:
    """A name for each kind of layer; those of one block that are recomputed differently get numbers."""
    names: dict[Kind, str] = {}
    for kind in dict.fromkeys(kinds):
        label = f"{kind.block}, recomputed" if kind.whole else kind.block
        taken = sum(name == label or name.startswith(f"{label} (") for name in names.values())
        names[kind] = f"{label} ({taken + 1})" if taken else label
    return names

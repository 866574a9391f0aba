"""This module reports the savings of operator fusion for a recipe, as values fit for JSON: bytes and modelled seconds
by part of the model and by pipeline stage.

The bytes of each part of the model are counted in compiled graphs, and the bytes of a stage are the sum over its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.operator_fusion.plan import Fusion
from tools.dryrun.activations import routed_rows
from tools.dryrun.graph_text import read_graph
from tools.dryrun.plan import stages_of
from tools.dryrun.quick import Kind, small_of
from tools.dryrun.rank import even_rows
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import UNKNOWN as NO_RUN
from tools.estimate.efficiency import DeviceTimes, known_error
from tools.estimate.layer_model import work
from tools.fusion.tally import COMMON, Tallies, Tally, tallies
from tools.model import DENSE, MOE
from tools.recipe.load import Recipe
from tools.recipe.view import View

PASSES = ("forward", "recompute", "gradient")
ONCE = "step"  # the pass that runs once a step; the others run once a micro-batch


@dataclass
class Pieces:
    """A `Pieces` holds the numbers of operators, kernels and bytes of each part of the model, from which the report is
    computed.

    Args:
        tallies: part ("dense", "moe", "mtp", "head", ...) -> pass -> the numbers of operators, kernels and bytes of
            this part (of one layer, if the part is a kind of layer).
        stages: for each pipeline stage (-1 for a single given graph), the number of times that it has each part.
        micro_batches: the number of micro-batches of a step.
        quick: whether the numbers of a stage are the sums over single layers that were compiled in a smaller model.
    """

    micro_batches: int
    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)
    stages: dict[int, Counter[str]] = field(default_factory=dict)
    quick: bool = False

    def each(self, part: str, passes: Sequence[str] = PASSES) -> Tally:
        """Return the numbers of operators, kernels and bytes of one part of the model in one micro-batch."""
        found = Tally()
        for name in passes:
            found.add(self.tallies[part].get(name, Tally()))
        return found

    def step(self, stage: int) -> Tally:
        """Return the numbers of operators, kernels and bytes of one pipeline stage in a training step."""
        found = Tally()
        for part, count in self.stages[stage].items():
            found.add(self.each(part), count * self.micro_batches)
            found.add(self.each(part, (ONCE,)), count)
        return found


def quick_pieces(recipe: Recipe, texts: Sequence[Path], fusion: Fusion) -> Pieces:
    """Return the numbers of operators, kernels and bytes of every pipeline stage, computed from the graphs of a quick
    dry run, which compiles each kind of layer once.

    The numbers of a kind of layer are the mean over the layers of this kind that were compiled before the last stage,
    because on the last stage operators of the loss, which name no layer, would be counted to the layer.
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
    """Return the numbers of operators, kernels and bytes of one pipeline stage, counted in the stage's full graph. Each
    layer gets the mean numbers of all layers of the same kind.
    """
    view = View(recipe)
    found = Pieces(view.micro_batches * view.accumulation)
    chunks = (chunk for each in stages_of(view) for chunk in each.chunks)
    kinds = {str(first + place): kind for first, chunk in chunks for place, kind in enumerate(chunk)}
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
    """Add the layers of a graph to their kinds, and count them in `has`; return the operators that belong to no layer,
    by part and pass.
    """
    ends: dict[str, dict[str, Tally]] = {}
    has.update(labels[part] for part in dict.fromkeys(part for part, _ in counted) if part in labels)
    for (part, name), tally in counted.items():
        if part in labels:
            found.tallies.setdefault(labels[part], {}).setdefault(name, Tally()).add(tally)
        else:
            ends.setdefault(part, {})[name] = tally
    return ends


def _divide(found: Pieces, layers: Mapping[str, int]) -> None:
    """Divide the sums over the layers of a kind by the number of these layers."""
    for label, passes in found.tallies.items():
        for name, tally in passes.items():
            mean = Tally()
            mean.add(tally, 1 / layers[label])
            passes[name] = mean


def _end(name: str, number: int) -> str:
    """Return the name of a part of a stage; if a model has MTP, its last stage has the embedding, too, which gets a
    separate name.
    """
    return f"{name} (last stage)" if number == -1 and name == "embedding" else name


def _labels(kinds: Sequence[Kind]) -> dict[Kind, str]:
    """Return a name for each kind of layer; those of one block that are recomputed differently get numbers."""
    names: dict[Kind, str] = {}
    for kind in dict.fromkeys(kinds):
        label = f"{kind.block}, recomputed" if kind.whole else kind.block
        taken = sum(name == label or name.startswith(f"{label} (") for name in names.values())
        names[kind] = f"{label} ({taken + 1})" if taken else label
    return names


NOT_KNOWN = (
    "the predicted kernels were compared with those of MindSpore's own passes on a CPU, but not with kernels on Ascend "
    "(docs/fusion.md)",
    "the graph lacks the changes that other passes of MindSpore's backend make before the fusion",
    "a composite operator (AddExt, SiLU, ...) counts as one kernel, because the parts into which MindSpore expands it "
    "are not known",
    "each kernel is assumed to read and write each tensor once; the L2 cache is not modelled",
)
CUBE = "at level cube, the fusion of products with the operators after them is not modelled; level vector is counted"
QUICK = (
    "stages are composed from one layer of each kind: the first stages of the 438B and the 1119B, compiled whole, have "
    "up to 1.3 % more kernels and 1 % more bytes (--stage compiles a whole stage)"
)
GRADIENTS_OFF = (
    "MindSpore's public sources switch both weight-gradient passes off (only --enable_pass switches them on), so their "
    "bytes are at stake, but not saved"
)


def report_of(
    name: str, pieces: Pieces, fusion: Fusion, why: str, config: Configuration, times: DeviceTimes
) -> dict[str, Any]:
    """Return the whole report on operator fusion, in bytes, operators and seconds of one device.

    Args:
        name: the name of the recipe.
        fusion: the level of operator fusion and the operators that are left out.
        why: the reason for this level of fusion, such as the key of the recipe that sets it.
        times: the times that the estimator predicts for the cluster.
    """
    known = known_error(times.hardware)
    return {
        "recipe": name,
        "level": fusion.level,
        "disabled": list(fusion.disable),
        "why": why,
        "micro_batches": pieces.micro_batches,
        "cluster": times.hardware.name,
        "parts": [_part(part, pieces, config, times) for part in pieces.tallies],
        "stages": [
            {"stage": stage, "parts": dict(has), **_numbers(pieces.step(stage), times)}
            for stage, has in pieces.stages.items()
        ],
        "patterns": _patterns(pieces),
        "alone": _alone(pieces),
        "weight_gradients": _named(pieces, times),
        "launch_seconds": times.launching(1),
        "launch_certainty": times.hardware.origins["launch_s"].certainty,
        "known_error": known.as_json() if known else None,
        "error": f"single kernels: unknown; the estimator's step times are {known.words if known else NO_RUN}",
        "not_known": [*NOT_KNOWN, *[QUICK] * pieces.quick, *[CUBE] * (fusion.level == "cube"), GRADIENTS_OFF],
    }


def _part(part: str, pieces: Pieces, config: Configuration, times: DeviceTimes) -> dict[str, Any]:
    """Return the report on one part of the model: the passes of a micro-batch, and the work that is done once in a
    step.
    """
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
    """Return the bytes that the estimator assumes for a layer's forward pass outside matrix products and attention, and
    the bytes in the graph.
    """
    assumed = work(config, block).elementwise
    unfused, fused = forward.before + forward.beside, forward.after + forward.beside
    told = {"bytes": round(assumed), "factor": times.reached.unfused, "applied": not config.fused}
    return told | {
        "graph_unfused": round(unfused),
        "graph_fused": round(fused),
        "graph_factor": round(unfused / fused, 3) if fused else None,
        "graph_over_assumed": round(fused / assumed, 3) if assumed else None,
    }


def _numbers(tally: Tally, times: DeviceTimes) -> dict[str, Any]:
    sizes = {"before": tally.before, "after": tally.after, "saved": tally.before - tally.after}
    seconds = {f"seconds_{name}": times.moving(size) for name, size in sizes.items()}
    return tally.as_json() | seconds | {"launch_seconds_saved": times.launching(tally.launches)}


def _patterns(pieces: Pieces) -> list[dict[str, Any]]:
    """Return kernels of several operators by part: how often in a micro-batch (of the optimizer: a step), bytes
    saved.
    """
    runs = (("micro-batch", PASSES), (ONCE, (ONCE,)))
    tallies = ((part, name, pieces.each(part, names)) for part in pieces.tallies for name, names in runs)
    found = [
        {"part": part, "runs": name, "pattern": each, "kernels": round(count, 2), "bytes_saved": round(saved)}
        for part, name, tally in tallies
        for each, count in tally.patterns.items()
        if (saved := tally.saved[each]) or count
    ]
    return sorted(found, key=lambda row: -row["bytes_saved"])


def _alone(pieces: Pieces) -> list[dict[str, Any]]:
    """Return the operators of a micro-batch that no kernel fuses, with the reasons."""
    found = [
        {"part": part, "operator": operator, "why": why, "operators": round(count, 2), "bytes": round(size)}
        for part, tally in ((part, pieces.each(part)) for part in pieces.tallies)
        for (operator, why), count in tally.alone.items()
        if (size := tally.moved[operator, why]) or count
    ]
    return sorted(found, key=lambda row: -row["bytes"])


def _named(pieces: Pieces, times: DeviceTimes) -> list[dict[str, Any]]:
    """Return the weight gradients by part: the pass of MindSpore that aims at them, whether and why it does not match,
    and the bytes in a micro-batch that it would save.
    """
    found = [
        dict(zip(("part", "pass", "chain", "matches", "why"), (part, name, chain, not why, why), strict=True))
        | {
            "products": round(count, 2),
            "bytes": round(size := tally.named_bytes[name, chain, why]),
            "seconds": times.moving(size),
        }
        for part, tally in (
            (part, pieces.each(part, ("recompute", "gradient", "forward", ONCE))) for part in pieces.tallies
        )
        for (name, chain, why), count in tally.named.items()
    ]
    return sorted(found, key=lambda row: (row["part"], -row["bytes"]))


def fullest(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the report about the pipeline stage for which fusion saves the most bytes."""
    stages: Sequence[Mapping[str, Any]] = report["stages"]
    return max(stages, key=lambda stage: stage["bytes_before"] - stage["bytes_after"])

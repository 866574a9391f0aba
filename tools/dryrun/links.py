"""Whether the Sends of every pipeline link meet Receives, though a rank of each kind of stage only was compiled.

A link whose ends were both compiled is compared call by call, with tags (`check_order`). Of any other the ranks that
stand for its ends are compared: what one sends a stage on must be what the other receives from a stage back, and the
reverse. Tags name the very stages and are left out. In zero_bubble_v the chunks of a link come in an order of each
stage's own: there a stage cannot speak for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tools.dryrun.jobs import Plan

_KEY = "parallel.pipeline_config.pipeline_scheduler"


@dataclass(frozen=True)
class Links:
    """How the pairs of stages that send to each other were compared.

    Args:
        exact: pairs of which both ends were compiled.
        alike: pairs that other stages stand for.
        unknown: pairs that nothing was compiled for.
        problems: what does not meet, one line each.
    """

    exact: list[tuple[int, int]]
    alike: list[tuple[int, int]]
    unknown: list[tuple[int, int]]
    problems: list[str]

    def as_json(self) -> dict[str, int]:
        """Numbers of pairs."""
        return {"exact": len(self.exact), "alike": len(self.alike), "unknown": len(self.unknown)}


class _Rank:
    """What a compiled rank sends and receives, by how many stages on its peer is."""

    def __init__(self, result: Mapping[str, Any], per_stage: int):
        self.rank = result["rank"]
        self.stage, self.place = divmod(self.rank, per_stage)
        self.calls: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for item in result["graph"]["collectives"]:
            if "peer" in item:
                key = item["op"], item["peer"] // per_stage - self.stage
                self.calls.setdefault(key, []).append(item)

    def stream(self, op: str, distance: int, with_chunk: bool) -> list[str]:
        """Its Sends to, or Receives from, the stage that many stages on, as text to compare."""
        return [_text(item, with_chunk) for item in self.calls.get((op, distance), ())]


def check_links(plan: Plan, results: Sequence[Mapping[str, Any]], per_stage: int, alike: bool) -> Links:
    """Compare each link, by its own ends where they were compiled.

    Args:
        results: of the plan's jobs; a quick plan, whose stages are not the pipeline's, compares none.
        per_stage: devices of a stage.
        alike: whether a stage may stand for another.
    """
    ranks = [_Rank(result, per_stage) for result in results] if plan.job_of else []
    links = Links([], [], [], [])
    found: dict[tuple[_Rank, _Rank], list[tuple[int, int]]] = {}
    for ends in _links(len(plan.stages), ranks):
        own = _own(ends, ranks)
        jobs = [plan.job_of[stage] for stage in ends] if alike and ranks else [-1]
        if own:
            links.exact.append(ends)
            found.setdefault(own, []).append(ends)
        elif min(jobs) >= 0:
            links.alike.append(ends)
            found.setdefault((ranks[jobs[0]], ranks[jobs[1]]), []).append(ends)
        else:
            links.unknown.append(ends)
    for pair, stood in found.items():
        links.problems.extend(_differences(*pair, stood, len(plan.stages)))
    return links


def _links(stages: int, ranks: Sequence[_Rank]) -> list[tuple[int, int]]:
    """Neighbours, and stages further apart that a compiled rank names: the first and the last."""
    far = {
        (min(rank.stage, rank.stage + distance), max(rank.stage, rank.stage + distance))
        for rank in ranks
        for _, distance in rank.calls
        if abs(distance) > 1
    }
    return [(stage, stage + 1) for stage in range(stages - 1)] + sorted(far)


def _own(ends: tuple[int, int], ranks: Sequence[_Rank]) -> tuple[_Rank, _Rank] | None:
    """Compiled ranks of these very stages that are each other's peers."""
    pairs = ((one, other) for one in ranks for other in ranks if (one.stage, other.stage) == ends)
    return next((pair for pair in pairs if pair[0].place == pair[1].place), None)


def _differences(one: _Rank, other: _Rank, stood: Sequence[tuple[int, int]], stages: int) -> list[str]:
    """In which the two directions of a link, or of several with the same ranks for their ends, do not meet."""
    distance = stood[0][1] - stood[0][0]
    # between the last stage and the first, which are neighbours in a pipeline of two, a Send's chunk is not its
    # Receive's: activations go on to the next chunk
    with_chunk = distance == 1 and stages > 2
    names = ", ".join(f"{first} and {second}" for first, second in stood)
    lines = []
    for sender, receiver, away in ((one, other, distance), (other, one, -distance)):
        sent, taken = sender.stream("Send", away, with_chunk), receiver.stream("Receive", -away, with_chunk)
        line = _difference(sender.rank, sent, receiver.rank, taken)
        if not line and not sent:
            line = f"rank {sender.rank} sends nothing"
        if line:
            lines.append(f"{_KEY}: between stages {names}, as compiled for ranks {one.rank} and {other.rank}: {line}")
    return lines


def _difference(sender: int, sent: Sequence[str], receiver: int, taken: Sequence[str]) -> str:
    """The first Send that meets no equal Receive, or the first Receive without a Send."""
    for place, (ours, theirs) in enumerate(zip_longest(sent, taken), 1):
        if ours != theirs:
            return (
                f"rank {sender}'s Send {place} is {ours or 'not there'}, "
                f"rank {receiver}'s Receive {place} is {theirs or 'not there'}"
            )
    return ""


def _text(item: Mapping[str, Any], with_chunk: bool) -> str:
    """That in which a Send and its Receive agree, whichever stages they are of."""
    shape = "x".join(map(str, item["shape"])) or "one number"
    chunk = f", chunk {item['chunk']}" if with_chunk else ""
    return f"{shape} {item['dtype']}, micro-batch {item['micro']}{chunk}"

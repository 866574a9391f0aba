"""Compile the steps of `STEPS` (`dense.yaml` and so on) anew and keep what tests read:
python -m tests.tools.prove.renew [STEP ...].

`dense.ir.gz` is the final graph of rank 0, without what nobody reads. `dense.json` holds its report, and for each axis
the constants that the next rank along it has instead, and those of the last rank along every axis.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planted_spreads import in_step
from tools.dryrun.compiles import compile_all, text_of
from tools.dryrun.graph_text import GraphText, read_graph, whole_lines
from tools.dryrun.plan import Plan, plan_jobs, without_files
from tools.prove.mesh import Mesh
from tools.prove.report import mesh_for
from tools.recipe.load import load_recipe

HERE = Path(__file__).parent
STEPS = {"dense": ("tp", 2), "experts": ("tp", 2), "nodes": ("tp", 4), "ring": ("cp", 2),
         "documents": ("cp", 2)}  # fmt: skip  # the inner axis, of 2; dp
_KEPT = re.compile(r'\b(?:(?:group|group_ranks|op): "[^"]*"|functor: Functor\[\w+\])')


def stripped(lines: Iterable[str]) -> list[str]:
    """The lines that `read_graph` needs, and of the lines of Python the innermost."""
    found: list[str] = []
    for line in (each.rstrip("\n") for _, each in whole_lines(lines)):
        if line.startswith("      # In file"):
            place = re.match(r"      # In file (\S+?):(\d+)", line)
            assert place
            short = f"      # In file {'/'.join(Path(place[1]).parts[-2:])}:{place[2]}"
            if found[-1].startswith("      # In file"):
                found[-1] = short
            else:
                found.append(short)
        elif line.startswith("      :"):
            if not found[-1].startswith("      :"):  # the second such line holds symbolic shapes
                found.append(line)
        elif line.startswith("  %"):
            head = re.split(r" (?:\{instance name:|\w+_attrs: \{)", line, maxsplit=1)[0]
            kept = ", ".join(_KEPT.findall(line))
            found.append(f"{head} primitive_attrs: {{{kept}}}" if kept else head)
        elif line.startswith(("# IR entry", "subgraph @", "}", "      # Fullname")):
            found.append(line)
    return found


def peers_of(graph: GraphText, told: Mapping[str, Mapping[str, Mapping[str, str]]]) -> dict[str, GraphText]:
    """The graphs of the next ranks, from what differs in them."""
    found = {}
    for axis, graphs in told.items():
        own = dict(graph.graphs)  # nodes that are alike are the same objects: nobody changes them
        for name, nodes in graphs.items():
            own[name] = list(own[name])
            for number, head in nodes.items():
                own[name][int(number)] = replace(own[name][int(number)], head=head)
        found[axis] = replace(graph, graphs=own)
    return found


def degrees(step: str) -> list[tuple[str, int]]:
    """The ranks of tensor or context and data parallelism, closest first."""
    inner, data = STEPS[step]
    return [(inner, 2), ("dp", data)]


@functools.cache
def read(step: str = "dense") -> tuple[dict[str, Any], GraphText, Mesh, dict[str, GraphText]]:
    """The report of rank 0, its graph, its mesh and the graphs of the next ranks."""
    kept = json.loads((HERE / f"{step}.json").read_text("utf-8"))
    graph = read_graph(HERE / f"{step}.ir.gz")
    mesh = mesh_for([kept["result"]], [graph], degrees(step))
    return kept["result"], graph, mesh, peers_of(graph, kept["peers"])


def write(step: str, result: Mapping[str, Any], text: Path, peers: Mapping[str, Path]) -> None:
    """Keep what the tests read."""
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        data = "\n".join(stripped(lines)) + "\n"
    (HERE / f"{step}.ir.gz").write_bytes(gzip.compress(data.encode(), 9, mtime=0))
    names = ("rank", "stage", "groups", "held", "gradients", "layouts", "seeds")
    graph = read_graph(text)
    told: dict[str, dict[str, dict[int, str]]] = {}
    for axis, peer in in_step(graph, {axis: read_graph(file) for axis, file in peers.items()}).items():
        for name, nodes in graph.graphs.items():
            both = enumerate(zip(nodes, peer.graphs[name], strict=True))
            told.setdefault(axis, {})[name] = {number: two.head for number, (one, two) in both if one.head != two.head}
    kept = {"result": {name: result[name] for name in names}, "peers": told}
    (HERE / f"{step}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")


def main() -> None:
    """Compile rank 0 of each step and its neighbour along each axis, and write."""
    for step in sys.argv[1:] or STEPS:
        plan: Plan = plan_jobs(without_files(load_recipe(HERE / f"{step}.yaml")), (0,))
        result = compile_all(plan, 1, True, texts=True)[0]
        text = text_of(plan.jobs[0])
        mesh = mesh_for([result], [read_graph(text)], degrees(step))
        beside = {axis: replace(plan.jobs[0], rank=rank) for axis, rank in mesh.neighbours(0).items()}
        compile_all(replace(plan, jobs=list(beside.values())), 1, True, texts=True)
        write(step, result, text, {axis: text_of(job) for axis, job in beside.items()})


if __name__ == "__main__":
    main()

"""This module asks MindSpore's own passes about a graph on the CPU wheel: the DVM mode of graph kernels, up to the
kernel build.

The passes run and write the resulting graph; then the build fails, because a CPU has no DVM. Kernels are split by the
rules for CPUs (`cluster.CPU`), whatever the generator is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import ClusterError
from plugins.operator_fusion.plan import VARIABLE, VECTOR
from tools.dryrun.graph_text import GraphText, Node, read_graph
from tools.fusion.cluster import VIRTUAL, Operator, operators

PASSES = ("stage1_cluster", "stage3_split")
_BEFORE, _CLUSTERED = "cluster_3_graph_kernel_expander", "cluster_4_graph_kernel_cluster"
_SHRUNK, _SPLIT = "split_3_shrink", "split_4_graph_kernel_splitter"


def environment(expanded: Sequence[str] = ("Square",), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a process's compiles run the passes; `expanded` are composites that are opened
    first.
    """
    flags = f"--opt_level=2 --kernel_generator=DVM --enable_cluster_ops_only={','.join(VECTOR)}"
    flags += f" --enable_expand_ops_only={','.join(expanded)}" if expanded else ""
    return {**environ, VARIABLE: flags, "MS_DEV_DUMP_IR_PASSES": ",".join(PASSES), "GLOG_v": "4"}


@dataclass
class Answer:
    """This is a graph with the results of the passes.

    Args:
        before: its operators.
        clusters: places in it, of operators that compute; opened composites are left out, for what they consist of gets
            new names on the way.
        bodies: of each cluster, after the passes between: its operators, places whose results leave it, its kernels.
    """

    before: list[Operator]
    clusters: list[list[int]]
    bodies: list[tuple[list[Operator], list[int], list[list[int]]]]


def read_answers(folder: Path) -> list[Answer]:
    """Return every graph that was compiled into `folder` (MindSpore's save_graphs_path).

    Raises:
        ClusterError: there is none, or the passes did not come to their end.
    """
    stages = [sorted(folder.rglob(f"*_{stage}*.ir")) for stage in (_BEFORE, _CLUSTERED, _SHRUNK, _SPLIT)]
    if not stages[0] or len({len(files) for files in stages}) != 1:
        counts = [len(files) for files in stages]
        raise ClusterError(f"{folder}: {counts} texts of the passes: they did not run to their end")
    with tempfile.TemporaryDirectory() as scratch:
        return [_answer(*(read_text(file, Path(scratch)) for file in files)) for files in zip(*stages, strict=True)]


def ask(source: Path, folder: Path, arguments: Sequence[str] = (), timeout: float = 1200) -> list[Answer]:
    """Run the Python file `source`, which compiles a graph, and read what the passes made of it.

    Args:
        folder: where it lets MindSpore save graphs (save_graphs at 2 or above); its first argument, before `arguments`.

    Raises:
        ClusterError: it compiled nothing.
    """
    command = [sys.executable, str(source), str(folder), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)
    try:
        return read_answers(folder)
    except ClusterError as error:
        raise ClusterError(f"{error}; {source.name} says: {done.stderr.strip()[-500:]}") from None


def _answer(before: GraphText, clustered: GraphText, shrunk: GraphText, split: GraphText) -> Answer:
    nodes = before.graphs[before.root]
    owner = {node.scope: place for place, node in enumerate(nodes) if not node.calls and node.op not in VIRTUAL}
    inner = {name: {node.scope for node in body} for name, body in clustered.graphs.items() if name != clustered.root}
    clusters = [sorted(owner[scope] for scope in scopes & owner.keys()) for scopes in inner.values()]
    cut = {node.scope: name for name, body in split.graphs.items() if name != split.root for node in body}
    bodies = [_body(body, cut) for name, body in shrunk.graphs.items() if name != shrunk.root]
    return Answer(operators(nodes), sorted(filter(None, clusters)), bodies)


def _body(body: list[Node], cut: Mapping[str, str]) -> tuple[list[Operator], list[int], list[list[int]]]:
    """A cluster, and the kernels that its operators went to; one that was inlined again is a kernel by itself."""
    groups: dict[str, list[int]] = {}
    for place, node in enumerate(body):
        if node.op not in VIRTUAL:
            groups.setdefault(cut.get(node.scope, node.scope), []).append(place)
    outputs = {place for node in body if node.op == "MakeTuple" for place in node.operands}  # one result has no users
    return operators(body), sorted(outputs), sorted(groups.values())


def read_text(file: Path, scratch: Path) -> GraphText:
    """Return the operators of a text that a pass wrote. Lines below a graph's Return describe its operands, and do not
    belong to the operator.
    """
    kept, ended = [], False
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        ended = (ended or line.startswith("  Return(")) and line != "}"
        if not ended or line.startswith("  Return("):
            kept.append(line)
    plain = scratch / "graph.ir"
    plain.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return read_graph(plain)

"""This program plants faults of parallel training in compiled graphs; their author had not read the rules of `tc3
prove`.

    python -m benchmarks.blind_spreads RECIPE [--quick] [--set KEY=VALUE]

RECIPE is compiled as by `tc3 prove`; graphs in the cache are used again. Each fault is one that people make when they
write a sharded layer, a loss or an optimizer by hand, and is an edit of the graph on every rank; `planted_spreads.py`
has the faults by the rules' own author, and says what `named`, `elsewhere`, `unknown only` and `silent` mean. A line is
printed for each fault for which a graph has a place.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.planted_spreads import (
    DOUBTED,
    ELSEWHERE,
    NAMED,
    SILENT,
    Known,
    behind,
    copied,
    handed_on,
    in_step,
    names,
    of_one_weight,
    operators_at,
    ranks_at,
    root,
)
from plugins.errors import TC3Error
from tools.dryrun.collectives import attributes_of, generated_groups
from tools.dryrun.compiles import compile_all, text_of
from tools.dryrun.gradients import WRONG, judge_gradients
from tools.dryrun.graph_text import GraphText, arguments_of, read_graph
from tools.dryrun.plan import plan_jobs, without_files
from tools.dryrun.quick import quick_plan
from tools.layout.resolve import resolve
from tools.prove.cli import require_collectives
from tools.prove.mesh import Mesh
from tools.prove.report import mesh_for, prove_rank, ranks_of, report_of, scale_faults, type_stages, typing_of
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

Fault = Callable[[list[GraphText], Known], int]  # plants in the root of the rank's graph and its peers', returns where
_SUMS = ("AllReduce", "ReduceScatter", "AllGather", "AlltoAllV")


def place(graphs: list[GraphText], op: str, scope: str = "", without: str = "$^", start: int = 0) -> int:
    """Return the first operator of a kind in a scope; LookupError if there is none."""
    for number, node in enumerate(root(graphs[0])[start:], start):
        if node.op == op and re.search(scope, node.scope) and not re.search(without, node.scope):
            return number
    raise LookupError(f"no {op} in {scope or 'the graph'}")


def groups_of(graph: GraphText, known: Known) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the group and the ranks of each sum, gathering or exchange of a graph."""
    for node in root(graph):
        if node.op in _SUMS and "group" in attributes_of(node.text):
            yield str(attributes_of(node.text)["group"]), ranks_at(node, known)


def neighbours(graph: GraphText, known: Known) -> str:
    """Return the smallest group of ranks that lie next to each other."""
    found = [
        (len(ranks), name) for name, ranks in groups_of(graph, known) if len(ranks) > 1 and ranks[1] - ranks[0] == 1
    ]
    if not found:
        raise LookupError("no group of neighbours")
    return min(found)[1]


def apart(graph: GraphText, known: Known) -> str:
    """Return the largest group of ranks that do not lie next to each other."""
    found = [
        (len(ranks), name) for name, ranks in groups_of(graph, known) if len(ranks) > 1 and ranks[1] - ranks[0] > 1
    ]
    if not found:
        raise LookupError("no group of ranks that lie apart")
    return max(found)[1]


def regroup(graphs: list[GraphText], number: int, group: str) -> int:
    """Let a collective go over another group; LookupError if it is its own."""
    for graph in graphs:
        node = root(graph)[number]
        if attributes_of(node.text)["group"] == group:
            raise LookupError("it is the same group")
        node.text = re.sub(r'\bgroup: "[^"]*"', f'group: "{group}"', node.text)
    return number


def insert(graphs: list[GraphText], number: int, head: str, group: str = "") -> int:
    """Put an operator behind another one, whose result `{}` stands for, and which all users take from it."""
    for graph in graphs:
        nodes = root(graph)
        new = copy.deepcopy(nodes[number])
        new.op = head.partition("(")[0]
        new.head, new.operands, new.calls, new.binds = head.format(f"%{number}"), [number], [], ""
        if new.op in ("AllReduce", "AddExt", "SiLU"):
            own = new.types[1]
            rest = ", <Tensor[Float32], (), value=...>, <Int64, NoShape>" if new.op == "AddExt" else ""
            new.types = (f"{own[:-1]}{rest})", own)
        new.text = f'{new.head} primitive_attrs: {{group: "{group}", op: "sum"}}' if group else new.head
        nodes.append(new)
        behind(graph, number, len(nodes) - 1)
    return number + 1


def row_parallel(graphs: list[GraphText]) -> int:
    """Return what the ReduceScatter behind a layer takes whose inputs are cut: parts of a sum."""
    nodes = root(graphs[0])
    for node in (each for each in nodes if each.op == "ReduceScatter" and "Grad_" not in each.scope):
        if node.value is not None and nodes[node.value].op.startswith(("MatMul", "BatchMatMul")):
            return node.value
    raise LookupError("no row-parallel layer")


def bias_before_sum(graphs: list[GraphText], known: Known) -> int:
    """A row-parallel layer adds its bias on every rank before the sum."""
    return insert(graphs, row_parallel(graphs), "AddExt({}, Tensor(shape=[], dtype=Float32, value=0.5), I64(1))")


def silu_before_sum(graphs: list[GraphText], known: Known) -> int:
    """An activation is applied to the parts of a sum."""
    return insert(graphs, row_parallel(graphs), "SiLU({})")


def sum_of(graphs: list[GraphText], weight: str) -> int:
    """Return the first sum over ranks of a weight's gradient, which a pipeline adds up over micro-batches before."""
    nodes = root(graphs[0])
    for number, node in enumerate(nodes):
        own = node.op in ("AllReduce", "ReduceScatter") and "Gradients/" in node.scope and node.value is not None
        if own and re.search(rf"accu_grads\.\S*{weight}", nodes[node.value or 0].head):
            return number
    return place(graphs, "AllReduce", f"{weight}.*Mirror")


def norm_over_data(graphs: list[GraphText], known: Known) -> int:
    """The norm's weight under sequence parallelism is summed over the data only."""
    return regroup(graphs, sum_of(graphs, "layernorm"), apart(graphs[0], known))


def router_over_tensor(graphs: list[GraphText], known: Known) -> int:
    """The router's weight is summed over tp only."""
    return regroup(graphs, sum_of(graphs, "[rR]outer"), neighbours(graphs[0], known))


def columns_over_all(graphs: list[GraphText], known: Known) -> int:
    """A weight whose rows are cut over tp is summed over tp, too."""
    _, wide = max(((len(ranks), name) for name, ranks in groups_of(graphs[0], known)), default=(0, ""))
    for weight in ("linear_q_up_proj", "linear_qkv", "linear_fc1"):
        try:
            return regroup(graphs, sum_of(graphs, weight), wide)
        except LookupError:
            continue
    raise LookupError("no such weight")


def experts_gradient(graphs: list[GraphText]) -> int:
    """Return the member that holds the gradient of some experts' weight."""
    for number, node in enumerate(root(graphs[0])):
        if node.op == "GroupedMatmul" and re.search(r"I64\(3\), I64\(2\)", node.head):
            return next(
                n for n, user in enumerate(root(graphs[0])) if user.value == number and user.op == "TupleGetItem"
            )
    raise LookupError("no experts")


def experts_over_tensor(graphs: list[GraphText], known: Known) -> int:
    """The experts' gradients are summed over the ranks among which the experts are cut."""
    return insert(graphs, experts_gradient(graphs), "AllReduce({})", neighbours(graphs[0], known))


def experts_over_data(graphs: list[GraphText], known: Known) -> int:
    """The experts' gradients are summed over the data once more."""
    return insert(graphs, experts_gradient(graphs), "AllReduce({})", apart(graphs[0], known))


def gathers_exchanged(graphs: list[GraphText], known: Known) -> int:
    """Of two gatherings one behind the other, over tp and over dp, each goes over the other's group."""
    one = place(graphs, "AllGather", "layernorm", without="Grad")
    two = place(graphs, "AllGather", "layernorm", without="Grad", start=one + 1)
    names = [str(attributes_of(root(graphs[0])[number].text)["group"]) for number in (one, two)]
    if len({len(ranks_at(root(graphs[0])[number], known)) for number in (one, two)}) > 1:
        raise LookupError("the groups have different sizes")
    regroup(graphs, one, names[1])
    return regroup(graphs, two, names[0])  # the fault is seen here: this one gathers what the first has gathered


def rank_slices(graphs: list[GraphText], scope: str = "", op: str = "StridedSlice") -> tuple[int, int]:
    """Return a slice that starts elsewhere on the next rank along an axis, and the number of that rank's graph."""
    for number, node in enumerate(root(graphs[0])):
        if node.op == op and re.search(scope, node.scope):
            for peer, graph in enumerate(graphs[1:], 1):
                if root(graph)[number].head != node.head:
                    return number, peer
    raise LookupError(f"no {op} that depends on the rank")


def slices_swapped(graphs: list[GraphText], known: Known, scope: str = "", op: str = "StridedSlice") -> int:
    """Two neighbours take each other's piece."""
    number, peer = rank_slices(graphs, scope, op)
    own, other = root(graphs[0])[number].head, root(graphs[peer])[number].head
    for graph in graphs:
        root(graph)[number].head = other
    root(graphs[peer])[number].head = own
    return number


def rope_swapped(graphs: list[GraphText], known: Known) -> int:
    """Two neighbours have each other's rotary positions."""
    return slices_swapped(graphs, known, "ApplyRotaryPosEmb|rotary")


def queries_swapped(graphs: list[GraphText], known: Known) -> int:
    """Two neighbours see the tokens before and behind each other's queries."""
    return slices_swapped(graphs, known, op="FlashAttentionScore")


def every_second_slice(graphs: list[GraphText], known: Known) -> int:
    """The next rank starts a whole piece too far: every second piece is left out."""
    number, peer = rank_slices(graphs)
    own, other = root(graphs[0])[number].head, root(graphs[peer])[number].head
    texts = iter(re.findall(r"I64\((-?\d+)\)", own))

    def further(found: re.Match[str]) -> str:
        return f"I64({2 * int(found[1]) - int(next(texts))})"

    root(graphs[peer])[number].head = re.sub(r"I64\((-?\d+)\)", further, other)
    return number


def load_undivided(graphs: list[GraphText], known: Known) -> int:
    """The experts' mean load is summed over the ranks and not divided by their number."""
    number = place(graphs, "RealDiv", "[rR]outer", without="Grad")
    handed_on(graphs, number, known)
    return number


def vocabulary_swapped(graphs: list[GraphText], known: Known) -> int:
    """Two neighbours count the vocabulary from each other's first word."""
    return slices_swapped(graphs, known, op="Sub")


def balance_undivided(graphs: list[GraphText], known: Known) -> int:
    """The balancing loss is summed over the ranks and not divided by their number."""
    number = place(graphs, "RealDiv", "Router/Grad_RealDiv")
    handed_on(graphs, number, known)
    return number


def balance_not_summed_back(graphs: list[GraphText], known: Known) -> int:
    """The balancing loss counts on each rank only its own part of what the loads' sum hands back."""
    number = place(graphs, "AllReduce", "Router/Grad_AllReduce")
    handed_on(graphs, number, known)
    return number


def embedding_end(graphs: list[GraphText]) -> int:
    """Return the gradient of the embedding by one of its two uses."""
    first = place(graphs, "EmbeddingDenseBackward")
    return place(graphs, "EmbeddingDenseBackward", start=first + 1)


def embedding_end_summed_twice(graphs: list[GraphText], known: Known) -> int:
    """One of the embedding's two uses is summed over the data before the two are added and summed."""
    return insert(graphs, embedding_end(graphs), "AllReduce({})", apart(graphs[0], known))


def far_end(graphs: list[GraphText]) -> tuple[int, int, int]:
    """Return what another stage sends of the gradient of a weight of both, the own sum, and where they are added."""
    nodes = root(graphs[0])
    for number, node in enumerate(nodes):
        pair = nodes[node.value] if node.op == "AddN" and node.value is not None else None
        kinds = {nodes[each].op: each for each in pair.operands} if pair and pair.op == "MakeTuple" else {}
        own = kinds.get("ReduceScatter", kinds.get("AllReduce"))
        if "Receive" in kinds and own is not None:
            return kinds["Receive"], own, number
    raise LookupError("no weight of two stages")


def far_end_left_out(graphs: list[GraphText], known: Known) -> int:
    """The embedding's gradient of the other end of the pipeline is not added."""
    _, own, number = far_end(graphs)
    for graph in graphs:
        node = root(graph)[number]
        node.op, node.head, node.operands = "TensorMove", f"TensorMove(%{own})", [own]
    return number


def far_end_summed_again(graphs: list[GraphText], known: Known) -> int:
    """The embedding's gradient of the other end of the pipeline is summed over the data by both stages."""
    return insert(graphs, far_end(graphs)[0], "AllReduce({})", apart(graphs[0], known))


def gate_gradient_summed(graphs: list[GraphText], known: Known) -> int:
    """The gradient of columns that are cut over tp is summed over tp."""
    return insert(graphs, place(graphs, "SiLUGrad"), "AllReduce({})", neighbours(graphs[0], known))


def whole_gradient_summed(graphs: list[GraphText], known: Known) -> int:
    """A gradient that was gathered, and that all ranks hold whole, is summed over them."""
    number = place(graphs, "AllGather", "Grad_ReduceScatter|Grad_.*AllGather")
    return insert(graphs, number, "AllReduce({})", str(attributes_of(root(graphs[0])[number].text)["group"]))


def softmax_over_data(graphs: list[GraphText], known: Known) -> int:
    """The vocabulary is cut over tp, and the sum of its exponentials goes over dp."""
    number = place(graphs, "AllReduce", "_log_softmax", without="Grad")
    while 'op: "sum"' not in root(graphs[0])[number].text:
        number = place(graphs, "AllReduce", "_log_softmax", without="Grad", start=number + 1)
    return regroup(graphs, number, apart(graphs[0], known))


def softmax_own_largest(graphs: list[GraphText], known: Known) -> int:
    """Each rank takes the largest logit of its own columns."""
    number = place(graphs, "AllReduce", "_log_softmax", without="Grad")
    handed_on(graphs, number, known)
    return number


def mean_of_own_tokens(graphs: list[GraphText], known: Known) -> int:
    """Each rank divides its loss by the number of its own tokens."""
    number = place(graphs, "AllGather", "CrossEntropyLoss", without="Grad|softmax|nll")
    own = root(graphs[0])
    if own[own[number].value or 0].op == "AllReduce":  # that gathers the losses of the tokens, not their weights
        number = place(graphs, "AllGather", "CrossEntropyLoss", without="Grad|softmax|nll", start=number + 1)
    for graph in graphs:
        node = root(graph)[number]
        sizes = zip(node.outputs[0].shape, node.inputs[0].shape, strict=True)
        times = ", ".join(f"I64({whole // own})" for whole, own in sizes)
        node.op, node.head = "Tile", f"Tile({arguments_of(node.head)[0]}, ({times}))"
    return number


def rows_stay_in_backward(graphs: list[GraphText], known: Known) -> int:
    """In the backward pass the experts' rows are not exchanged."""
    number = place(graphs, "AlltoAllV", "Grad_")
    handed_on(graphs, number, known)
    return number


def counts_over_data(graphs: list[GraphText], known: Known) -> int:
    """The counts of rows are exchanged over the data, and the rows over the experts' ranks."""
    return regroup(graphs, place(graphs, "AlltoAll"), apart(graphs[0], known))


FAULTS: tuple[Fault, ...] = (
    bias_before_sum,
    silu_before_sum,
    norm_over_data,
    router_over_tensor,
    columns_over_all,
    experts_over_tensor,
    experts_over_data,
    gathers_exchanged,
    slices_swapped,
    rope_swapped,
    queries_swapped,
    every_second_slice,
    vocabulary_swapped,
    load_undivided,
    balance_undivided,
    balance_not_summed_back,
    embedding_end_summed_twice,
    far_end_left_out,
    far_end_summed_again,
    gate_gradient_summed,
    whole_gradient_summed,
    softmax_over_data,
    softmax_own_largest,
    mean_of_own_tokens,
    rows_stay_in_backward,
    counts_over_data,
)


@dataclass(frozen=True)
class Compiled:
    """A `Compiled` is a compiled rank: its report, its graph, and its next rank's graph along each axis."""

    result: dict[str, Any]
    graph: GraphText
    mesh: Mesh
    peers: Mapping[str, GraphText]

    @property
    def known(self) -> Known:
        """Return the ranks of each group of the graph."""
        own, generated = ranks_of(self.result, self.mesh.devices), generated_groups(self.graph)
        return lambda group: own(group) or generated.get(group)


@dataclass(frozen=True)
class Steps:
    """A `Steps` holds the compiled ranks of all kinds of stage, and the number of micro-batches of a step."""

    ranks: list[Compiled]
    micro_batches: int

    def report(self) -> dict[str, Any]:
        """Return what is said of them."""
        make = [partial(typing_of, each.result, each.graph, each.mesh, each.peers) for each in self.ranks]
        typings, differ = type_stages(make)
        results, per = [each.result for each in self.ranks], self.ranks[0].mesh.devices
        scales = scale_faults(results, self.micro_batches, per)
        told = [
            prove_rank(result, typing, scales[result["rank"]]) for result, typing in zip(results, typings, strict=True)
        ]
        return report_of("", results, told, differ, self.micro_batches, per, per)

    def faulty(self, fault: Fault) -> Iterator[tuple[set[str], Steps]]:
        """Yield the operators at a fault and the ranks with it, for each rank whose graph has a place for it."""
        for number, own in enumerate(self.ranks):
            unspoilt: list[GraphText] = []
            for name in own.graph.graphs:
                unspoilt = unspoilt or [copied(each) for each in (own.graph, *own.peers.values())]
                graphs = [replace(each, root=name) for each in unspoilt]
                try:
                    at = fault(graphs, own.known)
                except LookupError:  # the fault found no place, and has changed nothing
                    continue
                unspoilt = []
                operators = operators_at(graphs[0], at)
                graph, *others = (GraphText(own.graph.root, each.graphs, each.parameters) for each in graphs)
                copies = {n: found["copies"] for n, found in own.result["gradients"].items() if "copies" in found}
                gradients = judge_gradients(graph, own.known, copies, own.result["rank"])
                planted = Compiled(
                    {**own.result, "gradients": gradients}, graph, own.mesh, dict(zip(own.peers, others, strict=True))
                )
                yield operators, replace(self, ranks=[*self.ranks[:number], planted, *self.ranks[number + 1 :]])
                break


def said(report: Mapping[str, Any], operators: set[str]) -> str:
    """Return the word for what a report says of a fault at some operators."""
    if problems := report["problems"]:
        wrong = [own["name"] for stage in report["stages"] for own in stage["weights"] if own["verdict"] == WRONG]
        return NAMED if names(problems, operators) or of_one_weight(problems, wrong) else ELSEWHERE
    return DOUBTED if report["proven"] < report["weights"] else SILENT


def compiled(recipe: Path, overrides: Sequence[str], quick: bool) -> Steps:
    """Return the compiled ranks of a recipe, and those beside them; what the cache has is not compiled again."""
    loaded = resolve(without_files(apply_overrides(load_recipe(recipe), overrides)), partial(click.echo, err=True))
    require_collectives(loaded)
    plan = quick_plan(loaded) if quick else plan_jobs(loaded)
    results = compile_all(plan, 1, True, texts=True)
    graphs, small = [read_graph(text_of(job)) for job in plan.jobs], View(plan.jobs[0].recipe)
    mesh = mesh_for(results, graphs, [("tp", small.tp), ("cp", small.cp), ("dp", small.dp)])
    while (finer := mesh.refined(frozenset(mesh.sizes))) != mesh:  # as tc3 prove does if constants grow unevenly
        mesh = finer
    beside = [{axis: replace(job, rank=at) for axis, at in mesh.neighbours(job.rank).items()} for job in plan.jobs]
    compile_all(replace(plan, jobs=[job for own in beside for job in own.values()]), 1, True, texts=True)
    ranks = []
    for result, graph, own in zip(results, graphs, beside, strict=True):
        peers = {axis: read_graph(text_of(job)) for axis, job in own.items()}
        ranks.append(Compiled(result, graph, mesh, in_step(graph, peers)))
    return Steps(ranks, plan.micro_batches * small.accumulation)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path, exists=True))
@click.option("--quick", is_flag=True, help="Compile each kind of layer once.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option("--why", is_flag=True, help="Print the first problem, too.")
def main(recipe: Path, quick: bool, overrides: tuple[str, ...], why: bool) -> None:
    """Plant each fault in the compiled graphs of RECIPE; the exit code is 1 if one is silent."""
    try:
        steps, silent = compiled(recipe, overrides, quick), False
    except TC3Error as error:
        raise click.UsageError(str(error)) from None
    sound = steps.report()
    click.echo(f"Without a fault: {sound['proven']} of {sound['weights']} proven.\n\n| fault | said |\n|---|---|")
    for fault in FAULTS:
        for operators, faulty in steps.faulty(fault):
            report = faulty.report()
            word = said(report, operators)
            silent = silent or word == SILENT
            told = f" {sorted(operators)}: {[*report['problems'], *report['missing'].items()][:1]}" if why else ""
            click.echo(f"| {(fault.__doc__ or '').strip().rstrip('.')} | {word}{told} |")
            break
    sys.exit(silent)


if __name__ == "__main__":
    main()

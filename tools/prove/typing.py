"""This module finds for every value of a rank's compiled graph how the value is distributed over the ranks of the
device mesh.

`Typing` follows the operators from the parameters, whose layouts MindSpore states, to the value that the caller asks
for. In a pipeline the root graph calls the forward pass of a micro-batch, which returns its backward pass as a closure;
each call is examined with its own arguments. The result of a Receive has the spread with which compiled stages send
values of its shape in its direction (forward or backward). The gradient of a Reshape has the dimensions of the argument
of this Reshape. If an operator does not allow the spreads of its arguments, or has no rule, its result is a `Failure`,
and so are all values that are computed from it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.dryrun.collectives import attributes_of, generated_groups
from tools.dryrun.graph_text import GraphText, Node, arguments_of, listed, tensors
from tools.prove import balance, moves
from tools.prove.call import WAITS, Call, Value, is_only_averaged, literal, operands_of
from tools.prove.frame import PARAMETER, Closure, Direction, Failure, Frame, Sum
from tools.prove.mesh import COLLECTIVES, Mesh, Peers
from tools.prove.places import total_of
from tools.prove.rules import RULES, apply
from tools.prove.spread import Certain, Contradiction, Dim, NotKnown, Spread, Uncertain, plain

ADDED = "accu_grads."
_SUMMED = re.compile(r"ref_key=accu_grads\.([^,>]+)")
_KEEPS = frozenset(("MakeTuple", "Partial", "TupleGetItem", "Depend", "Load"))  # they hand on what has no spread
_STATED = ("SumExt", "ReduceSum", "MeanExt", "ReduceMean")  # their rules use the layouts that MindSpore states
_BY_ELEMENT = frozenset(("Cast", "Neg", "Square", "Sqrt", "Rsqrt", "Exp", "Sigmoid", "SiLU", "Muls", "Divs", "Load"))
_OF_THE_LOSS = "_NLLLoss"  # its hand-written backward multiplies by the ranks of the forward's sum


class Typing:
    """A `Typing` finds for all values of one compiled graph how they are distributed over the ranks (their spreads).

    Args:
        parameter: name of a parameter of the root graph -> its spread; it raises `NotKnown` for other names.
        ranks_of: group -> its global ranks, or None if they are unknown.
        received: the spreads of the values that compiled stages send.
        settled: by graph and operator, the dimensions of values with loose pieces, and the axes that these place.
    """

    def __init__(
        self,
        graph: GraphText,
        mesh: Mesh,
        parameter: Callable[[str], Spread],
        ranks_of: Callable[[str], tuple[int, ...] | None],
        peers: Peers,
        received: Mapping[Direction, Spread] | None = None,
        settled: Mapping[tuple[str, int], tuple[tuple[Dim, ...], frozenset[str]]] | None = None,
    ):
        self.graph, self.mesh, self.parameter, self.peers = graph, mesh, parameter, peers
        self.ranks_of, self.generated = ranks_of, generated_groups(graph)
        self.received = received or {}
        self.root = Frame(graph.root, {})
        self.frames = [self.root]
        self.added: dict[str, list[Value]] = {}
        self.adders: dict[str, list[tuple[Frame, int]]] = {}  # by weight: the operators whose results are added
        self.divided = frozenset[str]()  # the axes of the mesh that must be divided before some operators can be judged
        self.repeats = self._sums_of_the_loss()
        self.settled = settled or {}
        self.placed: dict[int, tuple[Dim, ...]] = {}  # by the identifier of a value, see `_keep_places`
        self.reshaped: dict[tuple[Any, ...], set[tuple[Dim, ...]]] = defaultdict(set)

    def of(self, number: int) -> Value:
        """Return how a value of the root graph is distributed over the ranks (its spread)."""
        return self._total(self._of(self.root, number))

    def _total(self, value: Value) -> Value:
        """Return what a variable has added up over micro-batches, and any other value unchanged."""
        return self.summed(value.weight) if isinstance(value, Sum) else value

    def _of(self, frame: Frame, number: int) -> Value:
        nodes = self.graph.graphs[frame.name]
        todo, needed = [number], set()
        while todo:
            place = todo.pop()
            if place not in needed and place not in frame.values:
                needed.add(place)
                todo += operands_of(nodes[place])
        for place in sorted(needed):
            frame.values[place] = self._value(frame, place, nodes[place])
        return frame.values[number]

    def _value(self, frame: Frame, number: int, node: Node) -> Value:
        arguments = arguments_of(node.head)
        name = frame.name_node(number, node, arguments)
        try:
            if node.calls:
                return self._call(frame, number, node)
            if node.op in WAITS:
                return None
            if node.op == "Receive":
                return self._receive(node)
            values: list[Value] = []
            types = listed(node.types[0][1:-1], "<([{", ">)]}")
            for place, text in enumerate(arguments):
                wanted = node.op != "Depend" or not place
                value = self._argument(frame, text, types[place] if place < len(types) else "") if wanted else None
                if node.op not in _KEEPS:
                    value = [*map(self._total, value)] if isinstance(value, list) else self._total(value)
                members = value if isinstance(value, list) and node.op not in _KEEPS else [value]
                failed = next((each for each in members if isinstance(each, Failure)), None)
                if failed and node.op not in ("MakeTuple", "Partial"):
                    return failed
                values.append(value)
            if node.op == "Partial":
                return Closure(node.binds, tuple(values[1:]), tuple(map(frame.named, arguments[1:])))
            uneven = self.peers.unevenness(frame.name, number) if node.op in RULES else None
            if uneven and not self.mesh.is_finest:  # an axis may stand for several, so that no rule can judge
                self.divided |= self._to_divide(uneven.over, values)
                raise NotKnown(uneven.says)
            differs = self.peers.differs(frame.name, number) if node.op in RULES else {}
            any_order = node.op == "AllGather" and is_only_averaged(self.graph.graphs[frame.name], number)
            axes = self.axes_of(node, any_order) if node.op in COLLECTIVES else ()
            balance.require_mean(self, frame, node, axes)
            offsets = self.peers.offsets(frame.name, number) if differs else {}
            names = tuple(map(frame.named, arguments))
            call = Call(node, name, values, self.mesh.sizes, differs, axes, self._repeats(frame, node), offsets, names)
            found = self.applied(call)
            self._keep_places(frame, call, arguments)
            if uneven:
                raise (Certain if RULES[node.op].takes_differing and uneven.counts else NotKnown)(uneven.says)
            found = self._settled(found, (frame.name, number), name)
            return self._in_the_forwards_dimensions(call, found) if node.op == "Reshape" else found
        except (Contradiction, NotKnown) as error:
            loose = error.loose if isinstance(error, Uncertain) else frozenset()
            return Failure(isinstance(error, Contradiction), frame.name, number, str(error), loose)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # a form that no rule expects
            return Failure(
                False, frame.name, number, f"its rule does not know this form ({type(error).__name__}: {error})"
            )

    def _settled(self, found: Value, operator: tuple[str, int], name: int) -> Value:
        """Return the result of an operator with its loose pieces in the dimensions that are known for them: by
        `settled`, or by an equal value, which may be recomputed.
        """
        dims, firm = self.settled.get(operator, (self.placed.get(name), frozenset(self.mesh.sizes)))
        if not isinstance(found, Spread) or not found.loose or not dims:
            return found
        here = moves.with_dims(found, dims)
        return replace(here, loose=here.loose - firm) if here.dims == dims else found

    def applied(self, call: Call) -> Value:
        """Return the result of an operator, by its rule."""
        return apply(call) if self.mesh.sizes else self._undivided(call)

    def _to_divide(self, over: frozenset[str], values: Sequence[Value]) -> frozenset[str]:
        """Return the axes of which one may stand for several, if the constants of an operator do not grow evenly.

        Args:
            over: the axes along which these constants grow. If none of them can be divided, the operator takes a part
                of its first argument, which is alike along the axis.
            values: the arguments of the operator.
        """
        taken = values[0].holes | values[0].partial if values and isinstance(values[0], Spread) else frozenset()
        every = frozenset(self.mesh.sizes)
        likely = (over, every - taken, every)
        return next((axes for axes in likely if self.mesh.refined(axes) != self.mesh), frozenset())

    def _keep_places(self, frame: Frame, call: Call, arguments: Sequence[str]) -> None:
        """Give the arguments of an operator whose layout MindSpore states the places of their loose pieces in this
        layout, and give these places to the values from which the arguments were computed element by element, so that
        the backward pass uses them, too.
        """
        x = call.values[0] if call.node.op in _STATED and call.values else None
        if not isinstance(x, Spread) or not re.fullmatch(r"%\d+", arguments[0]):
            return
        number, nodes = int(arguments[0][1:]), self.graph.graphs[frame.name]
        if not x.loose:
            if frame.names.get(number) in self.placed and call.states_another_cut(0):
                raise NotKnown("two operators state different layouts of one value")
            return
        settled = call.in_its_layout(0)
        if settled.loose:
            return
        while isinstance(own := frame.values.get(number), Spread) and (own.dims, own.loose) == (x.dims, x.loose):
            frame.values[number] = replace(own, dims=settled.dims, loose=frozenset())
            self.placed[frame.names[number]] = settled.dims
            if nodes[number].op not in _BY_ELEMENT or len(nodes[number].operands) != 1:
                break
            number = nodes[number].operands[0]

    def _in_the_forwards_dimensions(self, call: Call, found: Value) -> Value:
        """Return the spread of a Reshape's result.

        In the backward pass, a Reshape undoes a Reshape of the forward pass. Each piece then goes to the dimension in
        which the input of the forward Reshape has this piece. The shape on a rank does not show it: a dimension of one
        element may be whole, or cut into pieces of one element.
        """
        x = call.values[0]
        if not isinstance(x, Spread) or not isinstance(found, Spread):
            return found
        if "Gradients/" not in call.node.scope:
            self.reshaped[found.dims, x.shape].add(x.dims)
            return found
        known = self.reshaped.get((x.dims, found.shape), set())
        return moves.with_dims(found, *known) if len(known) == 1 else found

    def before(self, frame: Frame, node: Node) -> list[tuple[Frame, int]]:
        """Return the operators whose results are inputs of an operator, including operators of the calling graph."""
        found = [(frame, number) for number in operands_of(node)]
        for text in arguments_of(node.head):
            own, parameter = frame, PARAMETER.fullmatch(text)
            while parameter and parameter[1] in own.origins:
                own, text = own.origins[parameter[1]]
                parameter = PARAMETER.fullmatch(text)
            if own is not frame and (number := re.fullmatch(r"%(\d+)", text)):
                found.append((own, int(number[1])))
        return found

    def _undivided(self, call: Call) -> Value:
        """Return the result in a stage of one device. The one device holds every value whole, so where an operator has
        no rule for its inputs, the result is whole in its stated shape. Collectives with other ranks failed before.
        """
        try:
            return apply(call)
        except (NotKnown, KeyError, IndexError, TypeError, ValueError, AttributeError):
            found: list[Value] = [plain(each.shape) for each in call.node.outputs]
            if not found:
                raise
            return found[0] if len(found) == 1 else found

    def _call(self, frame: Frame, number: int, node: Node) -> Value:
        """Return what a subgraph returns that the operator calls, by name or as a closure."""
        direct = re.match(r"\s*call @", node.head)
        inside = node.head.partition("(")[2] if direct else node.head.rpartition("](")[2]
        target, bound = node.calls[0], ()
        names: tuple[int, ...] = ()
        if not direct:
            closure = frame.values.get(node.operands[0])
            if isinstance(closure, Failure):
                return closure
            if not isinstance(closure, Closure):
                raise NotKnown("it is unknown which graph this call runs")
            target, bound, names = closure.graph, closure.values, closure.names
        texts = [text for text in listed(inside.rpartition(")")[0]) if text]
        given = [self._argument(frame, text, "") for text in texts]
        parameters = self.graph.parameters[target]
        named = dict(zip(parameters, [*names, *map(frame.named, texts)], strict=False))
        inner = Frame(target, dict(zip(parameters, [*bound, *given], strict=False)), named)
        inner.origins = {each: (frame, text) for each, text in zip(parameters[len(bound) :], texts, strict=False)}
        self.frames.append(inner)
        frame.called[number] = inner
        nodes = self.graph.graphs[target]
        for each in nodes:
            weight = _SUMMED.search(each.types[1]) if each.op == "AssignAdd" else None
            if weight:
                text = arguments_of(each.head)[1]
                if re.fullmatch(r"%\d+", text):
                    self._of(inner, int(text[1:]))
                    self.adders.setdefault(weight[1], []).append((inner, int(text[1:])))
                self.added.setdefault(weight[1], []).append(self._argument(inner, text, ""))
        return self._of(inner, len(nodes) - 1)

    def _receive(self, node: Node) -> Value:
        direction = self.direction_of(node)
        if direction not in self.received:
            raise NotKnown(f"it is unknown how the other stage sends this value ({direction[0]})")
        return self.received[direction]

    def direction_of(self, node: Node) -> Direction:
        """Return the pass (forward or backward) to which a Send or Receive belongs, and the shape of the value that it
        sends or receives.
        """
        return "backward" if "Gradients/" in node.scope else "forward", node.outputs[0].shape

    def sent(self) -> dict[Direction, set[Spread | Failure]]:
        """Return the spreads of the values that the root graph sends to other stages, by pass (forward or backward) and
        shape; a value whose spread is not known has a failure instead.
        """
        found: dict[Direction, set[Spread | Failure]] = defaultdict(set)
        for number, node in enumerate(self.graph.graphs[self.graph.root]):
            if node.op != "Send":
                continue
            try:  # a Send may take a parameter itself: a weight that two stages use
                value = self.of(number if node.value is None else node.value)
            except (Contradiction, NotKnown):  # the report tells it with the weight
                continue
            if isinstance(value, (Spread, Failure)):
                found[self.direction_of(node)].add(value)
        return found

    def summed(self, weight: str) -> Value:
        """Return how a weight's gradient, accumulated over micro-batches, is distributed over the ranks before any sum
        over ranks.

        Raises:
            NotKnown: no operator adds to the variable of the accumulated gradient.
            Contradiction: micro-batches add values with different spreads.
        """
        for number, node in enumerate(self.graph.graphs[self.graph.root]):
            if node.calls and any("▸" in name or "◂" in name for name in node.calls):
                self.of(number)
        if not (found := self.added.get(weight, [])):
            raise NotKnown(f"no operator is known that adds to the gradient of {weight}")
        if failed := next((each for each in found if isinstance(each, Failure)), None):
            return failed
        return found[0] if all(each == found[0] for each in found) else total_of(found)

    def _argument(self, frame: Frame, text: str, types: str) -> Value:
        if number := re.fullmatch(r"%(\d+)", text):
            return frame.values.get(int(number[1]))
        if parameter := PARAMETER.fullmatch(text):
            if frame is not self.root:
                return frame.given.get(parameter[1])
            if parameter[2].startswith(ADDED):
                return Sum(parameter[2].removeprefix(ADDED))
            shape = next((each.shape for each in tensors(types)), ())
            if types and math.prod(shape) == 1:  # loss scale, learning rate and the like
                return plain(shape)
            return self.parameter(parameter[2])
        return literal(text)

    @property
    def asked(self) -> set[tuple[str, int]]:
        """Return all operators that were examined, with or without success, to find how their results are distributed
        over the ranks.
        """
        return {(frame.name, number) for frame in self.frames for number in frame.values}

    @property
    def failures(self) -> dict[tuple[str, int], Failure]:
        """Return the operators for which the distribution of the result over the ranks could not be determined, with
        the reasons.
        """
        values = {(frame.name, n): value for frame in self.frames for n, value in frame.values.items()}
        return {operator: value for operator, value in values.items() if isinstance(value, Failure)}

    def axes_of(self, node: Node, any_order: bool = False) -> tuple[str, ...]:
        """Return the axes of the device mesh that make up a collective's group; neighbouring ranks of the group differ
        along the last of these axes. Raise an error if the group's ranks are not in rising order, unless `any_order` is
        True.
        """
        group = str(attributes_of(node.text).get("group", ""))
        ranks = self.ranks_of(group) or self.generated.get(group)
        if ranks is None:
            raise NotKnown(f"it uses group {group!r}, whose ranks are unknown")
        if node.op != "AllReduce" and not any_order and list(ranks) != sorted(ranks):
            raise Contradiction(
                f"its group has ranks {', '.join(map(str, ranks[:4]))} in this order, but pieces are in the order of "
                "their ranks"
            )
        return self.mesh.of_group(sorted(ranks))

    def sums_of(self, weight: str) -> list[int]:
        """Return the collectives of the root graph that sum a weight's accumulated gradient over ranks."""
        nodes = self.graph.graphs[self.graph.root]
        sums = (number for number, node in enumerate(nodes) if node.op in COLLECTIVES and node.value is not None)
        return [number for number in sums if f"ref_key={ADDED}{weight}," in nodes[nodes[number].value or 0].types[1]]

    def losses(self) -> list[Spread]:
        """Return how the losses that the run reports are distributed over the ranks (their spreads); a loss that is
        equal on all ranks is left out.
        """
        found = []
        for node in self.graph.graphs[self.graph.root]:
            number = re.match(r"AssignAdd\(%para\d+_\w*loss, %(\d+)", node.head.removeprefix("PrimFunc_"))
            value = self.of(int(number[1])) if number else None
            if isinstance(value, Spread) and (value.partial or value.powers or value.greatest or value.holes):
                found.append(value)
        return found

    def sums_before(self, number: int) -> set[int]:
        """Return the last collectives before a value of the root graph, and the operators between them and the
        value.
        """
        nodes = self.graph.graphs[self.graph.root]
        found: set[int] = set()
        place: int | None = number
        while place is not None and nodes[place].op in (*COLLECTIVES, "Depend", "Load", "Cast", "TensorMove"):
            found.add(place)
            place = nodes[place].value
        return found

    def name_of(self, graph: str, number: int) -> str:
        """Return a text that helps a person to find an operator: its name, its number, and its line in the Python
        source. If the graph states no line, the text instead names the innermost cells (modules) that contain the
        operator.
        """
        node = self.graph.graphs[graph][number]
        cells = "/".join(node.scope.split("/")[-3:-1])
        return f"{node.op or 'call'} %{number} ({node.source or cells or 'no source is known'})"

    def _sums_of_the_loss(self) -> dict[str, frozenset[str]]:
        """Return scope of a loss -> the axes over which its forward sums."""
        found: dict[str, frozenset[str]] = {}
        for node in (node for nodes in self.graph.graphs.values() for node in nodes):
            if node.op == "AllReduce" and _OF_THE_LOSS in node.scope and "Gradients/" not in node.scope:
                found[node.scope.rpartition("/")[0]] = frozenset(self.axes_of(node))
        return found

    def _repeats(self, frame: Frame, node: Node) -> frozenset[str]:
        """Return the axes of the sum that a factor of the loss's backward pass stands for. The factor may have the name
        of an equal one elsewhere, so that what it multiplies says whether it is of a loss.
        """
        if node.op != "Muls" or not node.operands:
            return frozenset()
        factor = self.graph.graphs[frame.name][node.operands[0]]
        scopes = [each.scope for each in (factor, node) if _OF_THE_LOSS in each.scope and each.op in ("Mul", "Muls")]
        return self.repeats.get(scopes[0].rpartition("/")[0], frozenset()) if scopes else frozenset()

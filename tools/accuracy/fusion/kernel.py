"""A fused kernel as data: its operators in order, what each takes, and which results leave it.

Read from MindSpore's own text of a graph, so that a group can be computed again without the model around it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tools.dryrun.graph.text import Node, TensorType, arguments_of, tensors

Argument = tuple[str, object]  # ("input", place), ("step", place) or ("constant", number, tuple or array)

_KEEP_DIMS = re.compile(r"keep_dims: Bool\((\d)\)")
_ARRAY = re.compile(r"Tensor\(shape=\[([\d, ]*)\], dtype=(\w+), value=\s*\[?([^\]\[]*)\]?\)$")
_NUMBER = re.compile(r"[A-Z]\w*\(([-+\w.]+)\)")
_STEP = re.compile(r"%(\d+)$")
_SHAPED = ("BroadcastTo", "Reshape", "Cast")  # the result's type says what their other arguments do
_MOVES = ("Transpose", "BroadcastTo", "Reshape", "Assign")  # values stay as they are


class UnreadableError(Exception):
    """A group that cannot be computed again; the message says why."""


@dataclass(frozen=True)
class Step:
    """One operator.

    Args:
        op: name of its primitive. output: type and shape of its result.
        arguments: in order; constants are values, as nobody computes them.
        keep_dims: of a reduction.
    """

    op: str
    output: TensorType
    arguments: tuple[Argument, ...]
    keep_dims: bool = False

    @property
    def moves(self) -> bool:
        """Whether it computes nothing."""
        return self.op in _MOVES


@dataclass(frozen=True)
class Kernel:
    """A group of operators that become one kernel.

    Args:
        inputs: type and shape of what it takes from outside.
        outputs: places in `steps` of the results that leave it.
        where: MindSpore's path of its last operator.
    """

    inputs: tuple[TensorType, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    where: str = ""

    @property
    def name(self) -> str:
        """Its operators: ``"Mul-Mul-Add"``; repeated ones counted where it is long."""
        names = [step.op for step in self.steps]
        if len(names) <= 8:
            return "-".join(names)
        return "-".join(f"{op} x{names.count(op)}" for op in dict.fromkeys(names))

    @property
    def kind(self) -> str:
        """The same for kernels that compute the same on the same types, whatever their shapes."""
        steps = [(step.op, step.output.dtype, [a for a in step.arguments if a[0] != "constant"]) for step in self.steps]
        return repr(([kind.dtype for kind in self.inputs], steps, self.outputs))

    @property
    def elements(self) -> int:
        """Numbers that it takes and gives."""
        return sum(
            math.prod(kind.shape) for kind in (*self.inputs, *(self.steps[place].output for place in self.outputs))
        )

    @property
    def key(self) -> str:
        """The same for kernels that compute the same in the same shapes, wherever they stand."""
        return repr((self.inputs, self.steps, self.outputs))


def of_nodes(nodes: Sequence[Node], places: Collection[int], outputs: Collection[int]) -> Kernel:
    """The kernel that the nodes at `places` make; results at `outputs` leave it.

    Raises:
        UnreadableError: a constant that the text does not show, or an input that is no tensor.
    """
    chosen = sorted(places)
    number = {place: step for step, place in enumerate(chosen)}
    names: dict[str, tuple[int, TensorType]] = {}
    steps = []
    for place in chosen:
        node = nodes[place]
        types = node.types[0].removeprefix("(<").removesuffix(">)").split(">, <")
        pairs = list(zip(arguments_of(node.head), types, strict=False))
        values = [pair for pair in pairs if "Monad" not in pair[1]]  # a monad is an order, and no value
        values = values[:1] if node.op in _SHAPED else values
        taken = [_argument(text, kind, number, names) for text, kind in values]
        keeps = _KEEP_DIMS.search(node.text)
        steps.append(Step(node.op, node.outputs[0], tuple(taken), bool(keeps and keeps[1] == "1")))
    kept = tuple(number[place] for place in sorted(outputs))
    inputs = tuple(kind for _, kind in sorted(names.values(), key=lambda pair: pair[0]))
    return Kernel(inputs, tuple(steps), kept, nodes[chosen[-1]].scope)


def _argument(text: str, kind: str, steps: dict[int, int], names: dict[str, tuple[int, TensorType]]) -> Argument:
    """What an operator takes; a value from outside gets the next number in `names` when it is first seen."""
    match = _STEP.match(text)
    if match and int(match[1]) in steps:
        return "step", steps[int(match[1])]
    if not text.startswith("%") and "value=..." not in text:
        return "constant", constant(text)
    if not text.startswith("%"):
        raise UnreadableError("a constant whose values the graph's text leaves out")
    found = tensors(f"<{kind}>")
    if len(found) != 1:
        raise UnreadableError(f"an input that is no tensor: {kind[:60]}")
    place, _ = names.setdefault(text, (len(names), found[0]))
    return "input", place


def constant(text: str) -> object:
    """A constant from its text: ``F32(0.5)``, ``(I64(1), I64(0))`` or ``Tensor(shape=[1], dtype=Float32, value=[1])``.

    Raises:
        UnreadableError: it is none of them, or its values are cut short.
    """
    array = _ARRAY.match(text)
    try:
        if array:
            shape = [int(size) for size in re.findall(r"\d+", array[1])]
            words = array[3].split()
            values = [word == "True" if word in ("True", "False") else float(word) for word in words]
            return np.array(values, "bool" if array[2] == "Bool" else numpy_type(array[2])).reshape(shape)
        numbers = [_plain(word) for word in _NUMBER.findall(text)]
    except ValueError:
        raise UnreadableError(f"a constant {text[:60]}") from None
    if text.startswith("(") and (numbers or text == "()"):
        return tuple(numbers)
    if len(numbers) != 1:
        raise UnreadableError(f"a constant {text[:60]}")
    return numbers[0]


def _plain(word: str) -> float | int:
    return int(word) if re.fullmatch(r"[-+]?\d+", word) else float(word)


def numpy_type(dtype: str) -> str:
    """NumPy's type that holds MindSpore's: that of bfloat16 is float32."""
    return {"BFloat16": "float32"}.get(dtype, dtype.lower())

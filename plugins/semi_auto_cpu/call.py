"""What the C++ library tells of one launch of an operator, as arrays and constants.

A launch comes as JSON text (csrc/text.h) and as the addresses of its tensors. The text changes with shapes only, so it
is parsed once; the arrays are views of MindSpore's memory, good until the launch ends.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

# MindSpore's names of types
DTYPES = {
    "Bool": np.dtype(np.bool_),
    "Int8": np.dtype(np.int8),
    "Int16": np.dtype(np.int16),
    "Int32": np.dtype(np.int32),
    "Int64": np.dtype(np.int64),
    "UInt8": np.dtype(np.uint8),
    "UInt16": np.dtype(np.uint16),
    "UInt32": np.dtype(np.uint32),
    "UInt64": np.dtype(np.uint64),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Float16": np.dtype(np.float16),
    "Float32": np.dtype(np.float32),
    "Float64": np.dtype(np.float64),
}

# computes one operator: gets its name, attributes, own arguments, and the arrays to write its outputs to
Host = Callable[[str, dict[str, str], list[Any], list[np.ndarray]], None]


@dataclass(frozen=True)
class Tensor:
    """An input or output in MindSpore's memory; `buffer` is the ctypes array that its bytes are."""

    dtype: np.dtype
    shape: tuple[int, ...]
    buffer: type[ctypes.Array]

    def view(self, address: int | None) -> np.ndarray:
        """The tensor at `address` as an array that shares its memory."""
        if not address or not ctypes.sizeof(self.buffer):
            return np.empty(self.shape, self.dtype)
        return np.frombuffer(memoryview(self.buffer.from_address(address)), self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Constant:
    """An input that is no tensor."""

    value: Any


@dataclass(frozen=True)
class Call:
    """One operator with its shapes.

    Attributes:
        name: the operator as MindSpore's front end knows it;
        attrs: its attributes as MindSpore prints them;
        inputs, outputs: what MindSpore's kernel has, in its order;
        arguments: how the inputs make up the operator's own arguments: an index of `inputs`, a range of indices (a
            list of tensors) or a constant. None: they are the inputs.
    """

    name: str
    attrs: dict[str, str]
    inputs: tuple[Tensor | Constant, ...]
    outputs: tuple[Tensor | Constant, ...]
    arguments: tuple[int | range | Constant, ...] | None

    def take(self, addresses: Sequence[int | None]) -> list[Any]:
        """The operator's own arguments: arrays, lists of arrays and constants."""
        inputs = [_at(place, address) for place, address in zip(self.inputs, addresses, strict=False)]
        if self.arguments is None:
            return inputs
        return [_argument(argument, inputs) for argument in self.arguments]

    def results(self, addresses: Sequence[int | None]) -> list[np.ndarray]:
        """Where the operator's outputs go."""
        return [_at(place, address) for place, address in zip(self.outputs, addresses, strict=False)]


def _at(place: Tensor | Constant, address: int | None) -> Any:
    return place.view(address) if isinstance(place, Tensor) else place.value


def _argument(argument: int | range | Constant, inputs: list[Any]) -> Any:
    if isinstance(argument, Constant):
        return argument.value
    return inputs[argument] if isinstance(argument, int) else [inputs[place] for place in argument]


@lru_cache(maxsize=8192)
def parse(text: bytes) -> Call:
    """Read what csrc/kernel.cc writes.

    Raises:
        TypeError: a tensor of a type that NumPy and ml_dtypes do not have.
    """
    told = json.loads(text)
    return Call(
        told["name"],
        told["attrs"],
        tuple(_place(place) for place in told["inputs"]),
        tuple(_place(place) for place in told["outputs"]),
        _arguments(told["arguments"]) if "arguments" in told else None,
    )


def _place(told: dict[str, Any]) -> Tensor | Constant:
    if "value" in told:
        return Constant(_constant(told["value"]))
    if told["type"] not in DTYPES:
        raise TypeError(f"tensors of MindSpore's type {told['type']} have no NumPy type")
    return Tensor(DTYPES[told["type"]], tuple(told["shape"]), ctypes.c_uint8 * told["bytes"])


def _arguments(told: list[dict[str, Any]]) -> tuple[int | range | Constant, ...]:
    arguments: list[int | range | Constant] = []
    place = 0
    for argument in told:
        if "value" in argument:
            arguments.append(Constant(_constant(argument["value"])))
            continue
        count = argument.get("list", 1)
        arguments.append(range(place, place + count) if "list" in argument else place)
        place += count
    return tuple(arguments)


def _constant(told: Any) -> Any:
    """JSON has lists only; MindSpore's sequences of constants are tuples."""
    return tuple(map(_constant, told)) if isinstance(told, list) else told


def store(results: Any, outputs: Sequence[np.ndarray]) -> None:
    """Write what a kernel returned into MindSpore's memory, rounded to its types; None leaves an output untouched.

    Args:
        results: an array, or a tuple with one array or None for each output.
        outputs: the views of the outputs.

    Raises:
        ValueError: another number of results, or another number of elements, than MindSpore expects.
    """
    results = results if isinstance(results, tuple) else (results,)
    if len(results) > len(outputs):
        raise ValueError(f"{len(results)} results where MindSpore expects {len(outputs)}")
    for number, (result, output) in enumerate(zip(results, outputs, strict=False)):
        if result is None or result is output:
            continue
        if np.size(result) != output.size:
            raise ValueError(f"result {number} is {np.shape(result)} where MindSpore expects {output.shape}")
        np.copyto(output, np.reshape(result, output.shape), casting="unsafe")

"""This module is the Python side of the plugin's C++ library (`csrc/`): it registers the operators that Python
computes, and reads the arguments of each call.

A call of an operator arrives as JSON text (csrc/text.h) and as the addresses of its tensors. The text changes only if
shapes change, so it is parsed once (`parse`); the arrays are views of MindSpore's memory, which are valid until the
call ends.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from plugins.errors import ClusterError
from plugins.semi_auto_cpu import build
from plugins.semi_auto_cpu.ranks import Ranks

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
PASS = "tc3_front_end_done"
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, _POINTERS, _POINTERS, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t
)


@dataclass(frozen=True)
class Tensor:
    """A `Tensor` is an input or output of an operator in MindSpore's memory; `buffer` is the ctypes array of
    its bytes.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    buffer: type[ctypes.Array]

    def view(self, address: int | None) -> np.ndarray:
        """Return the tensor at `address` as an array that shares its memory."""
        if not address or not ctypes.sizeof(self.buffer):
            return np.empty(self.shape, self.dtype)
        return np.frombuffer(memoryview(self.buffer.from_address(address)), self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Constant:
    """A `Constant` is an input of an operator that is not a tensor."""

    value: Any


@dataclass(frozen=True)
class Call:
    """A `Call` is one operator of MindSpore's graph, with the shapes of its inputs and outputs.

    Attributes:
        name: the operator's name in MindSpore's front end;
        attrs: the operator's attributes as MindSpore prints them;
        inputs, outputs: the inputs and outputs of MindSpore's kernel, in its order;
        arguments: the operator's own arguments, each an index of `inputs`, a range of indices (a list of tensors) or a
            constant. None: they are the same as the inputs.
    """

    name: str
    attrs: dict[str, str]
    inputs: tuple[Tensor | Constant, ...]
    outputs: tuple[Tensor | Constant, ...]
    arguments: tuple[int | range | Constant, ...] | None

    def take(self, addresses: Sequence[int | None]) -> list[Any]:
        """Return the operator's own arguments: arrays, lists of arrays and constants."""
        inputs = [_at(place, address) for place, address in zip(self.inputs, addresses, strict=False)]
        if self.arguments is None:
            return inputs
        return [_argument(argument, inputs) for argument in self.arguments]

    def results(self, addresses: Sequence[int | None]) -> list[np.ndarray]:
        """Return the operator's outputs as NumPy arrays."""
        return [_at(place, address) for place, address in zip(self.outputs, addresses, strict=False)]


def _at(place: Tensor | Constant, address: int | None) -> Any:
    return place.view(address) if isinstance(place, Tensor) else place.value


def _argument(argument: int | range | Constant, inputs: list[Any]) -> Any:
    if isinstance(argument, Constant):
        return argument.value
    return inputs[argument] if isinstance(argument, int) else [inputs[place] for place in argument]


@lru_cache(maxsize=8192)
def parse(text: bytes) -> Call:
    """Return the operator call that csrc/kernel.cc has written as JSON.

    Raises:
        TypeError: a tensor has a type that NumPy and ml_dtypes do not have.
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
        raise TypeError(
            f"MindSpore's tensor type {told['type']} has no counterpart in NumPy, with which the CPU kernels compute"
        )
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
    """Return a constant read from JSON, with tuples in place of lists, because MindSpore's sequences of constants are
    tuples.
    """
    return tuple(map(_constant, told)) if isinstance(told, list) else told


def store(results: Any, outputs: Sequence[np.ndarray]) -> None:
    """Write a kernel's results into MindSpore's memory, rounded to the types of the outputs; None leaves an output
    unchanged.

    Args:
        results: an array, or a tuple with one array or None for each output.
        outputs: the views of the outputs.

    Raises:
        ValueError: the number of results or of elements differs from what MindSpore expects.
    """
    results = results if isinstance(results, tuple) else (results,)
    if len(results) > len(outputs):
        raise ValueError(f"the kernel returned {len(results)} results, but MindSpore expects {len(outputs)}")
    for number, (result, output) in enumerate(zip(results, outputs, strict=False)):
        if result is None or result is output:
            continue
        if np.size(result) != output.size:
            raise ValueError(f"result {number} has shape {np.shape(result)}, but MindSpore expects {output.shape}")
        np.copyto(output, np.reshape(result, output.shape), casting="unsafe")


class Library:
    """A `Library` is the loaded C++ library; each process has one, which `load` returns.

    Attributes:
        path: the file of the library;
        rank: the rank, for error messages;
        failure: the first exception that the Python code of an operator or of the pass raised. MindSpore then stops
            with an error of its own that has the same text.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rank = 0
        self.failure: BaseException | None = None
        self._host: Host = _no_host
        self._front_end_done: Callable[[], None] = lambda: None  # until `add_pass` replaces it
        self._missing: Callable[[dict[str, int]], None] = lambda nodes: None  # as well
        self._ranks: Ranks | None = None
        try:
            self._loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ClusterError(f"the library of semi_auto_cpu does not load: {error}; delete {path}") from None
        self._callback = _CALLBACK(self._answer)  # kept: ctypes would free it
        self._loaded.tc3_set_callback(self._callback)
        self._loaded.tc3_registered.restype = ctypes.c_char_p

    def set_host(self, function: Host, rank: int = 0) -> None:
        """Make `function(name, attrs, inputs, outputs)` compute, from now on, every operator that Python computes.

        MindSpore calls this function in its own threads. The inputs are the operator's own inputs, in their order:
        arrays, lists of arrays and constants; the outputs are arrays into which the results are written. The arrays
        share MindSpore's memory during the call only.
        """
        self._host, self.rank = function, rank

    def register(self, name: str) -> bool:
        """Make Python compute the operator `name` of MindSpore's graph; return whether MindSpore itself could compute
        it, too.
        """
        return bool(self._loaded.tc3_register(name.encode()))

    def registered(self) -> list[str]:
        """Return the names of the operators that Python computes on CPU, including those of the compiler pass."""
        return json.loads(self._loaded.tc3_registered())

    def replace(self, name: str, low: bool = False) -> None:
        """Make Python compute the operator `name`; the compiler pass renames the operator in each graph, so that
        MindSpore does not compute it.

        With `low`, Python computes the operator only where it reads or writes bfloat16 or float16.
        """
        self._loaded.tc3_replace(name.encode(), int(low))

    def add_pass(self, front_end_done: Callable[[], None], missing: Callable[[dict[str, int]], None]) -> None:
        """Make the library's compiler pass run at the end of MindSpore's front end in every later compilation.

        Args:
            front_end_done: a function that is called first; it sets MindSpore's target back to CPU.
            missing: a function that is called last, with each operator that has no CPU kernel and its number of nodes;
                if it raises an error, the compile ends.

        Raises:
            ClusterError: MindSpore refuses the pass.
        """
        from mindspore.graph import CustomPassType, register_custom_pass

        self._front_end_done, self._missing = front_end_done, missing
        if not register_custom_pass(PASS, str(self.path), "all", CustomPassType.FULL_GRAPH):
            raise ClusterError(
                f"MindSpore refused to register the compiler pass {PASS} of {self.path}; MindSpore's log says why"
            )

    def set_cluster(self, ranks: Ranks) -> None:
        """Set in MindSpore's C++ code the number of ranks of each group, and this process's rank in each group, for the
        time in which MindSpore compiles for Ascend.

        Without this call, MindSpore takes 2,048 as the size of every group. MindSpore replaces an AllReduce of a
        constant by a product with the size of the group, so the gradient of a mean over n data-parallel ranks would be
        too large by the factor 2,048 / n.
        """
        self._ranks = ranks
        self._loaded.tc3_register_cluster(ranks.rank)

    def _answer(self, text: bytes, inputs: Any, outputs: Any, error: Any, room: int) -> int:
        """Answer one call from C++; no exception may reach the C++ code."""
        try:
            if text.startswith(b'{"event"'):
                self._event(json.loads(text), outputs)
            else:
                one = parse(text)
                self._host(one.name, one.attrs, one.take(inputs), one.results(outputs))
        except BaseException as problem:  # also a KeyboardInterrupt has no other way out
            self._fail(problem, text, error, room)
            return 1
        return 0

    def _event(self, told: dict[str, Any], outputs: Any) -> None:
        if told["event"] == "front_end_done":
            self._front_end_done()
        elif told["event"] in ("group_size", "group_rank"):
            assert self._ranks is not None, "C++ asks only after set_cluster"
            answer = self._ranks.size_of if told["event"] == "group_size" else self._ranks.rank_in
            ctypes.cast(outputs[0], ctypes.POINTER(ctypes.c_uint))[0] = answer(told["group"])
        else:
            self._missing(told["nodes"])

    def _fail(self, problem: BaseException, text: bytes, error: Any, room: int) -> None:
        """Store and print an error, and pass its message to C++."""
        self.failure = self.failure or problem
        told = json.loads(text)
        where = f"rank {self.rank}, {told.get('name') or 'compiler pass, ' + told['event']}"
        print(f"semi_auto_cpu: {where} failed", file=sys.stderr)
        traceback.print_exception(problem)
        sys.stderr.flush()
        words = f"semi_auto_cpu: {where}: {type(problem).__name__}: {problem}".encode()[: room - 1]
        ctypes.memmove(error, words + b"\0", len(words) + 1)


def _no_host(name: str, attrs: dict[str, str], inputs: list[Any], outputs: list[Any]) -> None:
    raise RuntimeError("no host function is set: call Library.set_host before the first step")


@lru_cache(maxsize=1)
def load() -> Library:
    """Return the library of this process; compile it first if needed.

    Raises:
        ClusterError: the library cannot be compiled or loaded; the message says why, and how to mend it.
    """
    path = build.ensure()
    import mindspore  # noqa: F401  the library links against what this loads

    return Library(path)

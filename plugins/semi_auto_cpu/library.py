"""The C++ library of this plugin (`csrc/`) as Python sees it: who computes which operators."""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from plugins.errors import ClusterError
from plugins.semi_auto_cpu import build, call
from plugins.semi_auto_cpu.ranks import Ranks

PASS = "tc3_front_end_done"
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, _POINTERS, _POINTERS, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t
)


class Library:
    """The loaded library; there is one in a process, from `load`.

    Attributes:
        path: its file;
        rank: told in errors;
        failure: the first exception that Python's side of an operator or of the pass raised. MindSpore stops with its
            text, but as an error of its own.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rank = 0
        self.failure: BaseException | None = None
        self._host: call.Host = _no_host
        self._front_end_done: Callable[[], None] = _nothing
        self._missing: Callable[[dict[str, int]], None] = _nothing
        self._ranks: Ranks | None = None
        try:
            self._loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ClusterError(f"the library of semi_auto_cpu does not load: {error}; delete {path}") from None
        self._callback = _CALLBACK(self._answer)  # kept: ctypes would free it
        self._loaded.tc3_set_callback(self._callback)
        self._loaded.tc3_registered.restype = ctypes.c_char_p

    def set_host(self, function: call.Host, rank: int = 0) -> None:
        """From now on `function(name, attrs, inputs, outputs)` computes every operator that Python computes.

        It is called in threads of MindSpore. Inputs are the operator's own, in their order: arrays, lists of arrays
        and constants; outputs are arrays to be written. The arrays share MindSpore's memory during the call only.
        """
        self._host, self.rank = function, rank

    def register(self, name: str) -> bool:
        """Let Python compute the operator `name` as MindSpore's graph has it; returns whether MindSpore could, too."""
        return bool(self._loaded.tc3_register(name.encode()))

    def registered(self) -> list[str]:
        """The names of the operators that Python computes on CPU, those of the compiler pass among them."""
        return json.loads(self._loaded.tc3_registered())

    def replace(self, name: str, low: bool = False) -> None:
        """Let Python compute the operator `name` under a new name, which the pass gives it in each graph.

        `low`: only where it takes or gives bfloat16 or float16.
        """
        self._loaded.tc3_replace(name.encode(), int(low))

    def add_pass(self, front_end_done: Callable[[], None], missing: Callable[[dict[str, int]], None]) -> None:
        """Have the pass run in every later compilation, at the end of MindSpore's front end.

        Args:
            front_end_done: called first; sets MindSpore's target back to CPU.
            missing: called last with each operator that has no CPU kernel and its number of nodes; whatever it raises
                ends the compilation.

        Raises:
            ClusterError: MindSpore does not take the pass.
        """
        from mindspore.graph import CustomPassType, register_custom_pass

        self._front_end_done, self._missing = front_end_done, missing
        if not register_custom_pass(PASS, str(self.path), "all", CustomPassType.FULL_GRAPH):
            raise ClusterError(f"MindSpore does not take the compiler pass {PASS} of {self.path}; see its log")

    def set_cluster(self, ranks: Ranks) -> None:
        """Tell MindSpore's C++ how many ranks a group has, and which this one is, while it compiles for Ascend.

        Otherwise it takes 2,048 for every size. An AllReduce of a constant becomes a product with that number, so that
        the gradient of a plain mean over data-parallel ranks would be too large by 2,048 over their number.
        """
        self._ranks = ranks
        self._loaded.tc3_register_cluster(ranks.rank)

    def _answer(self, text: bytes, inputs: Any, outputs: Any, error: Any, room: int) -> int:
        """One call from C++, which an exception must not cross."""
        try:
            if text.startswith(b'{"event"'):
                self._event(json.loads(text), outputs)
            else:
                one = call.parse(text)
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
        """Keep, print and hand to C++ what went wrong."""
        self.failure = self.failure or problem
        told = json.loads(text)
        where = f"rank {self.rank}, {told.get('name') or 'compiler pass, ' + told['event']}"
        print(f"semi_auto_cpu: {where} failed", file=sys.stderr)
        traceback.print_exception(problem)
        sys.stderr.flush()
        words = f"semi_auto_cpu: {where}: {type(problem).__name__}: {problem}".encode()[: room - 1]
        ctypes.memmove(error, words + b"\0", len(words) + 1)


def _no_host(name: str, attrs: dict[str, str], inputs: list[Any], outputs: list[Any]) -> None:
    raise RuntimeError("no host function is set: Library.set_host comes before the first step")


def _nothing(*told: Any) -> None:
    """Until `add_pass`."""


@lru_cache(maxsize=1)
def load() -> Library:
    """The library of this process, compiled first if need be.

    Raises:
        ClusterError: it cannot be compiled or loaded; the message says why and what helps.
    """
    path = build.ensure()
    import mindspore  # noqa: F401  the library links against what this loads

    return Library(path)

"""This module gives a number to each Python function that a MindSpore graph calls through `ops.Custom`. A function has
the same number in every process, so that a process can load a graph that another process compiled.

MindSpore knows the function of `ops.Custom(func_type="pyfunc")` by its address in the process that compiled the graph.
Another process that loads this graph would look for a wrong address. In this module a function's number is a digest of
its name: its module, its qualified name and the values that it has captured, as in

    plugins.cpu_backend.expert_parallel._moving.<locals>.move(group=(0, 1), tag=3)

Functions of one name compute the same, in whatever process they were made; a function is refused if its name does not
contain every value with which it computes. The other values that such a function reads are code of this repository, of
which the compile cache's key has a digest, or belong to the process, as `transport.mesh()` does. The graph holds the
name of each function as an attribute of the operator: `names_in` reads the names without MindSpore, so that the compile
cache keeps no graph that calls any other function, and `require` refuses to load a graph with functions that this
process has not registered.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType
from typing import Any

from plugins.errors import ClusterError
from plugins.private_hooks import relies_on

NAME = "python_function"  # the attribute of an operator that holds its function's name
_CALLS = b"pyfunc"  # the type of an operator that calls a Python function; each has one number and one name
_NUMBER = re.compile(rb"\x0a\x05fn_id\x18([\x80-\xff]{0,9}[\x00-\x7f])")  # attributes in a MindIR file, see `names_in`
_NAMED = re.compile(rb"\x0a%c%s\x2a([\x80-\xff]{0,4}[\x00-\x7f])" % (len(NAME), NAME.encode()))
_functions: dict[int, tuple[str, FunctionType]] = {}  # by number: name and function


def _of_first(*dtypes):
    return dtypes[0]


def operator(function, shape, dtype=_of_first):
    """Return an `ops.Custom` operator that calls a Python function by a number which is the same in every process.

    Args:
        function: a function from NumPy arrays to arrays, defined by `def`, which may capture only immutable values.
        shape, dtype: functions as in `ops.Custom`, of the first input's dtype by default; they are called while a graph
            is compiled, and a loaded graph has their results.
    """
    from mindspore import ops
    from mindspore.ops.operations import _pyfunc_registry

    relies_on(ops.Custom.__init__, 'self.add_prim_attr("fn_id", func_id)')
    number = register(function)
    name, function = _functions[number]
    custom = ops.Custom(function, shape, dtype, func_type="pyfunc")
    _pyfunc_registry.add_pyfunc(number, function)
    custom.add_prim_attr("fn_id", number)
    custom.add_prim_attr(NAME, name)
    return custom


def register(function: Callable[..., Any]) -> int:
    """Register a function in this process, and return the number by which graphs call it.

    Functions with the same name and the same code share a number, because they compute the same.

    Raises:
        TypeError: the function's name would not identify all values with which it computes.
        ValueError: another function already has this number.
    """
    name = name_of(function)
    number = number_of(name)
    known, first = _functions.setdefault(number, (name, function))  # type: ignore[arg-type]
    if known != name or first.__code__ != function.__code__:
        raise ValueError(
            f"the Python functions {known} and {name} have the same hash, but a graph finds its functions by their "
            "hashes; rename one of the two functions"
        )
    return number


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function: its module, its qualified name, and the values that it has captured or has as
    defaults of its arguments.

    Raises:
        TypeError: the function was not made by `def`, or one of its captured values is mutable or has no exact text.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise TypeError(f"{function!r}: a graph can call only functions that were made by `def`")
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = [(name, cell.cell_contents) for name, cell in cells]
    known += [("defaults", function.__defaults__)] if function.__defaults__ else []
    known += (function.__kwdefaults__ or {}).items()
    where = f"{function.__module__}.{function.__qualname__}"
    values = [f"{name}={_text(value, f'{where}: {name}')}" for name, value in known]
    return f"{where}({', '.join(values)})"


def number_of(name: str) -> int:
    """Return the number by which graphs call the function of this name: 62 bits of the name's digest, plus 2 ** 62, so
    that the number is larger than any memory address.
    """
    return 1 << 62 | int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def names_in(graph: bytes) -> set[str] | None:
    """Return the names of the Python functions that a graph calls; return None if the graph calls, or may call, a
    function without a name.

    Args:
        graph: a file of MindSpore's compile cache. It is a Protocol Buffers message, in which an attribute consists of
            its name (field 1) and an integer (field 3, a varint) or a text (field 5). Only data of this form is read as
            a name.
    """
    numbers = [_varint(found[1]) for found in _NUMBER.finditer(graph)]
    names = []
    for found in _NAMED.finditer(graph):
        names.append(graph[found.end() : found.end() + _varint(found[1])].decode("utf-8", "replace"))
    if not graph.count(_CALLS) == graph.count(b"fn_id") == len(numbers) == graph.count(NAME.encode()) == len(names):
        return None
    return set(names) if {number_of(name) for name in names} == set(numbers) else None


def require(rank: int) -> None:
    """Refuse the cached graphs that this worker is about to load if they call a Python function that the worker has not
    registered. This function must be called after the network was built and before a graph is compiled.

    Raises:
        ClusterError: the graph calls such a function; the message names it.
    """
    own = os.environ.get("MS_COMPILER_CACHE_PATH")
    for file in sorted(Path(own, f"rank_{rank}").rglob("*.mindir")) if own else []:
        check(file, _functions)


def check(file: Path, known: Collection[int]) -> None:
    """Refuse a graph that calls a Python function whose number is not in `known`.

    Raises:
        ClusterError: the graph calls such a function; the message names it.
    """
    names = names_in(file.read_bytes())
    strange = ["one without a name"] if names is None else sorted(n for n in names if number_of(n) not in known)
    if strange:
        key = os.environ.get("TC3_COMPILE_CACHE_KEY", "of this recipe")
        raise ClusterError(
            f"{file}: this graph was compiled at an earlier start and calls a Python function that this worker does "
            f"not have: {strange[0]}; remove the folder {key} of the compile cache (TC3_COMPILE_CACHE, or "
            "output/compile_cache), or start without --compile-cache"
        )


def _text(value: Any, what: str) -> str:
    """Return the `repr` of an immutable value; this text identifies the value completely."""
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(_text(each, what) for each in value)})"
    if type(value) in (type(None), bool, int, float, str):
        return repr(value)
    raise TypeError(
        f"{what} is {value!r}, but a Python function that a graph calls may capture only values of type None, bool, "
        "int, float and str, and tuples of these values"
    )


def _varint(octets: bytes) -> int:
    """Return a number of Protocol Buffers: seven bits an octet, the lowest first."""
    return sum((octet & 0x7F) << 7 * place for place, octet in enumerate(octets))

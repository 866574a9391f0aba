"""Python functions in a graph: their names, what is read of them in a graph, and what is refused."""

import functools
import re
from pathlib import Path

import pytest

from plugins.cpu_backend import host_functions
from plugins.cpu_backend.host_functions import check, name_of, names_in, number_of, register, require
from plugins.errors import ClusterError

HERE, ROOT = f"{__name__}.", Path(__file__).resolve().parents[3]


def moving(group, tag):
    def move(rows, *, times=1):
        return group, tag, rows * times

    return move


def capturing(value):
    def function():
        return value

    return function


def alone(rows):
    return rows


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(host_functions, "_functions", {})


def varint(number):
    octets = b""
    while number > 127:
        octets += bytes([number & 127 | 128])
        number >>= 7
    return octets + bytes([number])


def text(name, value):
    """An attribute as MindSpore writes it."""
    return field(name.encode(), b"\x2a" + varint(len(value)) + value.encode() + b"\x80\x01\x08")


def integer(name, value):
    return field(name.encode(), b"\x18" + varint(value) + b"\x80\x01\x07")


def field(name, rest):
    whole = b"\x0a" + varint(len(name)) + name + rest
    return b"\x1a" + varint(len(whole)) + whole


def call(name=None, number=None):
    """A primitive that calls a function: with a name, or as MindSpore makes it, by an address."""
    named = text("python_function", name) if name is not None else b""
    number = integer("fn_id", (number_of(name) if name else 140_063_221_338_976) if number is None else number)
    return b"Custom" + text("func_type", "pyfunc") + named + text("func_name", "move") + number


def test_a_function_is_known_by_where_it_stands_and_what_it_captured():
    assert name_of(alone) == f"{HERE}alone()"
    assert name_of(moving((0, 2), 3)) == f"{HERE}moving.<locals>.move(group=(0, 2), tag=3, times=1)"
    assert name_of(capturing("a, b=1")) == f"{HERE}capturing.<locals>.function(value='a, b=1')"


def test_no_value_hides_behind_another():
    def made(defaults):
        def function(rows, times=2):
            return defaults, rows * times

        return function

    assert name_of(made(3)).endswith("function(defaults=3, defaults=(2))")


def test_its_number_is_the_same_in_every_process_and_no_address():
    assert number_of("plugins.cpu_backend.plan.grouped_matmul()") == 6372812382756195421
    assert all(2**62 <= number_of(str(name)) < 2**63 for name in range(1000))


def test_what_it_captures_tells_it_from_others():
    values = [0, 1, True, None, 1.0, 0.1 + 0.2, 0.3, "1", "", (), (1,), ((1,),), (1, 2), ((1, 2), 3), (1, (2, 3))]
    assert len({register(capturing(value)) for value in values}) == len(values)


def test_functions_that_are_made_again_keep_their_number():
    assert register(moving((0, 1), 3)) == register(moving((0, 1), 3)) != register(moving((0, 1), 4))


@pytest.mark.parametrize(
    "value", [[1], {}, {1}, moving, object(), (1, [2]), pytest, b"1"], ids=lambda value: type(value).__name__
)
def test_a_captured_value_that_can_change_is_refused(value):
    with pytest.raises(
        TypeError, match=r"capturing.<locals>.function: value is .* capture only values of type None, bool"
    ):
        register(capturing(value))


class Callable:
    def __call__(self, rows):
        return rows

    def method(self, rows):
        return rows


@pytest.mark.parametrize(
    "function",
    [lambda rows: rows, functools.partial(alone, 1), Callable(), Callable().method, len, Callable],
    ids=["lambda", "partial", "callable", "method", "built-in", "class"],
)
def test_what_is_no_plain_function_is_refused(function):
    with pytest.raises(TypeError, match="only functions that were made by `def`"):
        register(function)


def test_a_decorated_function_is_refused_for_what_its_wrapper_captured():
    def twice(function):
        @functools.wraps(function)
        def wrapper(rows):
            return function(function(rows))

        return wrapper

    register(alone)
    with pytest.raises(TypeError, match="alone: function is <function"):
        register(twice(alone))


def test_two_functions_of_one_name_are_refused():
    def first(rows):
        return rows

    def second(rows):
        return rows + 1

    second.__qualname__ = first.__qualname__
    assert name_of(first) == name_of(second)
    register(first)
    with pytest.raises(ValueError, match=r"first\(\) and .*first\(\) have the same hash, .*; rename one"):
        register(second)


def test_two_names_of_one_number_are_refused(monkeypatch):
    monkeypatch.setattr(host_functions, "number_of", lambda name: 1 << 62)
    register(moving((0, 1), 3))
    with pytest.raises(ValueError, match=r"tag=3.* and .*tag=4"):
        register(moving((0, 1), 4))


def test_the_names_in_a_graph():
    names = {name_of(moving((0, 1), tag)) for tag in range(3)} | {"f()", f"f(value='{'x' * 300}')"}
    graph = b"graph" + b"..".join(call(name) for name in [*names, "f()"]) + b"end"
    assert names_in(graph) == names
    assert names_in(b"a graph that calls none") == set()


@pytest.mark.parametrize(
    "graph",
    [
        call(),
        call("f()") + call(),
        call("f()", number=number_of("g()")),
        call("f()", number=140_063_221_338_976),
        call("f()") + integer("fn_id", number_of("f()")),
        call("f()") + text("func_type", "pyfunc"),
        call("f()") + text("python_function", "f()"),
        call("f()") + text("python_function", "g()"),
        integer("fn_id", number_of("f()")),
        text("func_type", "pyfunc"),
        text("imply_path", "/src/pyfunc.py"),
        call("f()").replace(b"\x18", b"\x20", 1),
    ],
    ids=lambda graph: re.sub(rb"[^ -~]+", b" ", graph).decode(),
)
def test_a_graph_with_a_function_of_its_process_has_no_names(graph):
    assert names_in(graph) is None
    assert names_in(b"before" + call("h()") + graph) is None


@pytest.fixture
def graph_of(tmp_path, monkeypatch):
    """Writes a rank's graph where MindSpore would load it from."""
    monkeypatch.setenv("MS_COMPILER_CACHE_PATH", str(tmp_path))
    monkeypatch.setenv("TC3_COMPILE_CACHE_KEY", "0123abcd")

    def write(rank, *names):
        file = tmp_path / f"rank_{rank}" / "graph_cache" / f"compile_cache_{len(names)}.mindir"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"..".join(map(call, names)))

    return write


def test_a_graph_whose_functions_are_there_is_loaded(graph_of):
    register(alone)
    register(moving((0, 1), 3))
    graph_of(1, name_of(alone), name_of(moving((0, 1), 3)))
    graph_of(0, "of another rank()")
    require(1)


def test_a_graph_is_refused_whose_function_this_worker_has_not_made(graph_of):
    register(alone)
    register(moving((0, 1), 3))
    graph_of(1, name_of(alone), name_of(moving((0, 1), 4)))
    with pytest.raises(ClusterError, match=r"compile_cache_2.mindir: .* have: .*move\(group=\(0, 1\), tag=4") as said:
        require(1)
    assert "remove the folder 0123abcd" in str(said.value)


def test_a_graph_with_an_address_is_refused(tmp_path):
    (tmp_path / "graph.mindir").write_bytes(call())
    with pytest.raises(ClusterError, match="does not have: one without a name"):
        check(tmp_path / "graph.mindir", {})


def test_operators_that_call_python_functions_are_made_here_only():
    sources = [path for top in ("launch", "plugins", "tools") for path in (ROOT / top).rglob("*.py")]
    makers = [path for path in sources if re.search(r"pyfunc|\bops\.Custom\b|\bCustom\(", path.read_text("utf-8"))]
    assert makers == [Path(host_functions.__file__)]


def test_nothing_is_asked_where_nothing_is_loaded(graph_of, monkeypatch):
    require(0)
    graph_of(0, "f()")
    monkeypatch.delenv("MS_COMPILER_CACHE_PATH")
    require(0)

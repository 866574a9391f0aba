"""Graphs with the answers of MindSpore's passes, as compact text: one graph a line, in a gzip file beside this one.

    {"seed": 3, "types": ["Float32 64 128", ...], "before": [...], "clusters": [[0, 1], ...],
     "bodies": [{"body": [...], "outputs": [...], "kernels": [...]}, ...]}

An operator is [name, type of its output, places that it takes from, types that it takes], with types by number; the
name of an opened composite is "".
"""

import gzip
import json
from pathlib import Path

from tests.tools.fusion.oracle import Answer
from tools.dryrun.graph_text import TensorType
from tools.fusion.cluster import Operator

HERE = Path(__file__).parent / "answers"


def write(name, answers):
    """Write `{label: Answer}`; the same answers give the same bytes."""
    text = "".join(_line(label, answer) + "\n" for label, answer in answers.items())
    HERE.mkdir(exist_ok=True)
    (HERE / name).write_bytes(gzip.compress(text.encode(), mtime=0))


def read(name):
    """`{label: Answer}` of a file."""
    lines = gzip.decompress((HERE / name).read_bytes()).decode().splitlines()
    return dict(map(_answer, lines))


def _line(label, answer):
    types = {}
    record = {
        "seed": label,
        "types": None,
        "before": _pack(answer.before, types),
        "clusters": answer.clusters,
        "bodies": [
            {"body": _pack(body, types), "outputs": outputs, "kernels": kernels}
            for body, outputs, kernels in answer.bodies
        ],
    }
    record["types"] = [" ".join(map(str, (tensor.dtype, *tensor.shape))) for tensor in types]
    return json.dumps(record, separators=(",", ":"))


def _pack(operators, types):
    def number(tensor):
        return types.setdefault(tensor, len(types))

    return [[op.name, number(op.output), list(op.inputs), [number(each) for each in op.takes]] for op in operators]


def _answer(line):
    record = json.loads(line)
    types = [_type(text) for text in record["types"]]

    def unpack(packed):
        return [
            Operator(name, types[output], tuple(inputs), tuple(types[each] for each in takes), name == "")
            for name, output, inputs, takes in packed
        ]

    bodies = [(unpack(each["body"]), each["outputs"], each["kernels"]) for each in record["bodies"]]
    return record["seed"], Answer(unpack(record["before"]), record["clusters"], bodies)


def _type(text):
    dtype, _, shape = text.partition(" ")
    return TensorType(dtype, tuple(map(int, shape.split())))

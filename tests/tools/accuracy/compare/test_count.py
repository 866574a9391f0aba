import pytest

from tools.accuracy.compare.count import Counter
from tools.accuracy.dumps.names import parse
from tools.accuracy.dumps.read_items import Entry, Item


def entry(key, inputs, outputs):
    items = [Item(f"input.{n}", "input", "float32", shape, (0, 0, 0, 0)) for n, shape in enumerate(inputs)]
    items += [Item(f"output.{n}", "output", "float32", shape, (0, 0, 0, 0)) for n, shape in enumerate(outputs)]
    return Entry(parse(key), tuple(items))


@pytest.mark.parametrize(
    ("place", "inputs", "outputs", "counts"),
    [
        ("fc.ColumnParallelLinear", [(128, 8, 2560)], [(128, 8, 512)], (2560, 512, 1024)),
        ("ln.RMSNorm", [(128, 8, 2560)], [(128, 8, 2560)], (2560, 2560, 1024)),
        ("core.CoreAttention", [(128, 8, 4, 48), (4096, 8, 4, 48)], [(128, 8, 192)], (4096, 4096, 1)),
        ("emb.VocabParallelEmbedding", [(8, 4096)], [(8, 4096, 64)], (1, 1, 32768)),
        ("drop.Dropout", [(128, 8, 2560)], [(128, 8, 2560)], (1, 1, 1)),
    ],
)
def test_cells(place, inputs, outputs, counts):
    forward = entry(f"Cell.a.{place}.forward.0", inputs, outputs)
    backward = entry(f"Cell.a.{place}.backward.0", outputs, inputs)
    gradient = Entry(parse(f"Cell.a.{place}.parameters_grad.0"), (Item("weight.0", "gradient", "float32"),))
    counter = Counter([forward, backward, gradient])
    found = tuple(counter.of(each, each.items[-1]) for each in (forward, backward, gradient))
    assert found == counts
    assert counter.of(forward, forward.items[0]) == 1  # an input is whoever's output it was


def test_a_cell_takes_the_largest_count_inside():
    inner = entry("Cell.layers.0.mlp.fc.Dense.forward.0", [(4, 20000)], [(4, 8)])
    outer = entry("Cell.layers.0.mlp.MLP.forward.0", [(4, 20000)], [(4, 8)])
    beside = entry("Cell.layers.0.gate.Gate.forward.0", [(4, 8)], [(4, 8)])
    counter = Counter([inner, outer, beside])
    assert [counter.of(each, each.items[-1]) for each in (inner, outer, beside)] == [20000, 20000, 1]


def test_functions_are_counted_call_by_call():
    calls = [entry(f"Functional.matmul.{n}.forward", [(4, size)], [(4, 4)]) for n, size in enumerate((8, 3000))]
    calls.append(entry("Functional.sum.0.forward", [(50, 60)], [(50,)]))
    counter = Counter(calls)
    assert [counter.of(each, each.items[-1]) for each in calls] == [8, 3000, 60]

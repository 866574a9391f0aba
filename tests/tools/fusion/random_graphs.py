"""Random graphs for MindSpore's passes: cells of elementwise operators, reductions, casts, and what DVM does not take.

    python tests/tools/fusion/random_graphs.py FOLDER SEED ...     compiles the cells of these seeds

The passes write their texts into FOLDER/SEED; MindSpore then fails to build kernels of DVM, which is expected.
"""

import importlib.util
import os
import random
import re
import sys
from pathlib import Path

ROWS, COLUMNS = 64, 128
LONG = 1000  # seeds from here on are single long chains, past the largest kernel
KNOTS = 2000  # seeds from here on are knots of short chains and transposes
TYPED = 3000  # seeds from here on have every type of a training, in operators that DVM takes of some types only
CHAINS = 4000  # seeds from here on are cut otherwise where chains are not joined before shared neighbours
SEEDS = (
    *range(240),
    *range(LONG, LONG + 3),
    *range(KNOTS, KNOTS + 60),
    *range(TYPED, TYPED + 40),
    *range(CHAINS, CHAINS + 12),
)  # those that are committed
HEAD = "import mindspore as ms\nfrom mindspore import ops\n\n\nclass Net(ms.nn.Cell):\n    def construct(self, x, y):\n"
TYPES = ("float32", "float16", "float64", "int32", "int64")  # float64 and int64 are none of DVM's
UNARY = ("exp", "abs", "sqrt", "neg", "square")


class Cell:
    """The lines of a cell while it grows: names of full tensors and of rows, each with its type."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.full, self.rows, self.lines = [("x", "float32"), ("y", "float32")], [], []

    def add(self, text, dtype, row=False):
        name = f"{'r' if row else 'v'}{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        (self.rows if row else self.full).append((name, dtype))

    def pick(self, among):
        return self.rng.choice(among[-6:])

    def alike(self, among, dtype):
        """A recent tensor of a type; there may be none."""
        found = [name for name, other in among[-8:] if other == dtype]
        return self.rng.choice(found) if found else None

    def grow(self):
        rng = self.rng
        (name, dtype), kind = self.pick(self.full), rng.random()
        floats = dtype.startswith("float")
        if kind < 0.12:
            to = rng.choice(TYPES)
            self.add(f"ops.cast({name}, ms.{to})", to)
        elif kind < 0.22 and dtype == "float32":
            self.add(f"ops.cos({name})", dtype)
        elif kind < 0.34 and dtype == "float32":
            self.add(f"ops.ReduceSum(True)({name}, -1)", dtype, row=True)
        elif kind < 0.40 and self.rows:
            row, dtype = rng.choice(self.rows)
            self.add(f"ops.{rng.choice(UNARY)}({row})", dtype, row=True)
        elif kind < 0.52 and self.alike(self.rows, dtype):
            self.add(f"{name} {rng.choice('+-*/')} {self.alike(self.rows, dtype)}", dtype)
        elif kind < 0.58 and dtype == "float32":
            self.add(f"ops.select({name} > 0.5, {name}, {self.alike(self.full, dtype)})", dtype)
        elif kind < 0.62 and dtype == "float32":
            self.add(f"ops.transpose(ops.transpose({name}, (1, 0)) * 2.0, (1, 0))", dtype)
        elif kind < 0.78:
            self.add(f"ops.{rng.choice(UNARY if floats else ('abs', 'neg', 'square'))}({name})", dtype)
        else:
            self.add(f"{name} {rng.choice('+-*')} {self.alike(self.full, dtype)}", dtype)


def tie(cell):
    """Sums of what stands a few lines before, of square tensors; a transpose is in no kernel with others."""
    rng = cell.rng
    for _ in range(rng.randint(6, 14)):
        taken = [name for name, _ in cell.full[2:][-5:]]
        few = rng.sample(taken, min(len(taken), rng.choice([0, 1, 1, 2, 2, 2])))
        kind = rng.random()
        if not few:
            cell.add(f"ops.{rng.choice(UNARY)}({rng.choice('xy')})", "float32")
        elif kind < 0.12:
            cell.add(f"ops.transpose({few[0]}, (1, 0))", "float32")
        elif kind < 0.24:
            cell.add(f"{few[0]} - ops.ReduceSum(True)({few[-1]}, -1)", "float32")
        elif len(few) == 1:
            cell.add(f"ops.{rng.choice(UNARY)}({few[0]})", "float32")
        else:
            cell.add(f"{few[0]} {rng.choice('+-*')} {few[1]}", "float32")


def mix(cell):
    """Casts into every type, and operators on what has come of them."""
    rng = cell.rng
    for _ in range(rng.randint(8, 24)):
        name, dtype = cell.pick(cell.full)
        kind, other = rng.random(), cell.alike(cell.full, dtype)
        if dtype == "bool":
            cell.add(f"ops.cast({name}, ms.{rng.choice(('float32', 'bfloat16', 'float16', 'int32'))})", "float32")
            cell.full[-1] = (cell.full[-1][0], cell.lines[-1].rpartition("ms.")[2].rstrip(")"))
        elif kind < 0.3:
            to = rng.choice(("float32", "float16", "bfloat16", "bfloat16", "int32"))
            cell.add(f"ops.cast({name}, ms.{to})", to)
        elif dtype == "bfloat16":  # a CPU has few kernels of it
            cell.add(f"{name} {rng.choice('+*')} {other}", dtype)
        elif kind < 0.4:
            cell.add(f"{name} {rng.choice(('>', '<', '>=', '<='))} {other}", "bool")
        elif kind < 0.48:
            cell.add(f"ops.select({name} > {other}, {name}, {other})", dtype)
        elif kind < 0.56:
            cell.add(f"ops.transpose({name}, (1, 0))", dtype)
        elif kind < 0.62 and dtype == "float32":
            cell.add(f"{name} - ops.ReduceSum(True)({name}, -1)", dtype)
        elif kind < 0.75 and dtype != "float16":
            cell.add(f"ops.{rng.choice(('maximum', 'minimum'))}({name}, {other})", dtype)
        elif kind < 0.85:
            cell.add(f"ops.{rng.choice(('abs', 'neg'))}({name})", dtype)
        else:
            cell.add(f"{name} {rng.choice('+-*')} {other}", dtype)


def wait(cell):
    """Two pairs of which one only can be joined, for each waits for the other's transpose; one is joined to a chain.

    The chain's head is a result, too, and so comes long before the rest of it; without one, the two would follow each
    other in MindSpore's order.
    """
    unary, sign = (lambda of: f"ops.{cell.rng.choice(UNARY)}({of})"), cell.rng.choice("+-*")
    cell.lines += [f"c = {unary('x')}", f"d = {unary('y')}", f"b = c {sign} ops.transpose(d, (1, 0))"]
    cell.lines += [f"e = d {sign} ops.transpose(c, (1, 0))", f"a = {unary('b')}"]
    cell.lines += [f"a = {unary('a')}" for _ in range(cell.rng.randint(0, 2))]
    return ["b", "e", "a"]


def share(cell):
    """A number that two rows take: they are its users of one size until one of them is joined to a whole tensor."""
    unary, few = (lambda of: f"ops.{cell.rng.choice(UNARY)}({of})"), cell.rng.sample("+-*", 2)
    cell.lines += ["r = ops.ReduceSum(True)(x, 1)", f"one = {unary('ops.ReduceSum(True)(y)')}"]
    cell.lines += [f"z = one {few[0]} r", f"p = one {few[1]} r"]
    cell.lines += [f"p = {unary('p')}" for _ in range(cell.rng.randint(0, 2))]
    cell.lines += [f"u = p {cell.rng.choice('+-*')} x"]
    return cell.rng.sample(["u", "z"], 2)


def source(seed):
    """The Python text of a cell."""
    cell = Cell(seed)
    if seed >= CHAINS:
        kept = (wait, share)[seed % 2](cell)
        return _text(cell, kept)
    if seed >= TYPED:
        mix(cell)
    elif seed >= KNOTS:
        tie(cell)
    elif seed >= LONG:
        for number in range(180 + 25 * (seed - LONG)):
            cell.add(f"ops.{cell.rng.choice(UNARY)}({cell.full[-1][0]}) * {1 + number}.0", "float32")
    else:
        for _ in range(cell.rng.randint(8, 30)):
            cell.grow()
    names = [name for name, _ in cell.full[2:]]
    kept = sorted({*names[-3:], *cell.rng.sample(names, min(2, len(names))), *(name for name, _ in cell.rows[-1:])})
    if KNOTS <= seed < TYPED:
        read = " ".join(cell.lines)
        kept = [name for name in names if len(re.findall(rf"\b{name}\b", read)) == 1]
    return _text(cell, kept)


def _text(cell, kept):
    return HEAD + "".join(f"        {line}\n" for line in cell.lines) + f"        return ({', '.join(kept)},)\n"


def main(folder, seeds):
    """Compile the cells of the seeds; each in a file of its own, for MindSpore reads the source of what it compiles."""
    import mindspore as ms

    ms.set_context(mode=0)
    ms.set_device("CPU")
    for seed in seeds:
        here = folder / str(seed)
        here.mkdir(parents=True)
        file = here / "net.py"
        file.write_text(source(seed))
        spec = importlib.util.spec_from_file_location(f"net{seed}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        ms.set_context(save_graphs=2, save_graphs_path=str(here))
        rows = COLUMNS if seed >= KNOTS else ROWS
        one = ms.Tensor(shape=(rows, COLUMNS), dtype=ms.float32, init=ms.common.initializer.One()).init_data()
        try:
            module.Net()(one, one + 1)
        except (RuntimeError, TypeError, ValueError) as error:
            (here / "said.txt").write_text(str(error))
    sys.stdout.flush()
    os._exit(0)  # a failed build leaves threads behind


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))

"""This program times the comparison of two dumps with `tc3 accuracy compare`, with `msprobe compare`, and only reading
the bytes.

    python benchmarks/accuracy_compare.py [--tensors 10000] [--folder DIR]

The program makes three dumps with as many tensors as a model has (64 KiB to 1 MiB each, float32) in msprobe's layout:
GOLDEN, a rerun with the same bits, and a dump whose tensors all differ from GOLDEN by rounding. The program prints a
table for RESULTS.md. "cold" means that the files' pages were dropped from memory before. The time of msprobe includes
its start.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tools.accuracy.dumps.compare import compare_dumps
from tools.accuracy.dumps.read import open_dump
from tools.accuracy.dumps.write import mark

SIZES = [(128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]  # 64 KiB to 1 MiB
SIDES = ("golden", "rerun", "rounded")


def write(folder, count):
    """Write the GOLDEN dump, its rerun with the same bits, and a dump whose tensors differ from GOLDEN by rounding.
    Every cell has one input and one output.
    """
    rng = np.random.default_rng(0)
    data = {}
    noise = {size: (1 + 1e-7 * rng.uniform(-5, 5, size)).astype(np.float32) for size in SIZES}
    for side in SIDES:
        (folder / side / "step0" / "rank0" / "dump_tensor_data").mkdir(parents=True)
    for number in range(count // 2):
        key = f"Cell.network.model.layers.{number // 20}.cell{number % 20}.Dense.forward.0"
        data[key] = {"input_args": [], "input_kwargs": {}, "output": [], "parameters": {}}
        for role, group in (("input", "input_args"), ("output", "output")):
            size = SIZES[rng.integers(len(SIZES))]
            values = rng.standard_normal(size, dtype=np.float32)
            name = f"{key}.{role}.0.npy"
            stats = [float(x) for x in (values.max(), values.min(), values.mean(), np.linalg.norm(values))]
            node = dict(zip(("Max", "Min", "Mean", "Norm"), stats, strict=True), shape=list(size), data_name=name)
            data[key][group].append({"type": "mindspore.Tensor", "dtype": "Float32", **node})
            for side in SIDES:
                file = folder / side / "step0" / "rank0" / "dump_tensor_data" / name
                np.save(file, values * noise[size] if side == "rounded" else values)
    for side in SIDES:
        rank = folder / side / "step0" / "rank0"
        head = {"task": "tensor", "level": "L0", "framework": "mindspore"}
        content = {**head, "dump_data_dir": str(rank / "dump_tensor_data"), "data": data}
        (rank / "dump.json").write_text(json.dumps(content))
        stack = {str(n): [[key], ["File model.py, line 1"]] for n, key in enumerate(data)}
        (rank / "stack.json").write_text(json.dumps(stack))
        (rank / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
        mark(folder / side, True)
    os.sync()


def files(folder):
    return sorted((folder / "step0" / "rank0" / "dump_tensor_data").glob("*.npy"))


def forget(*folders):
    """Drop the pages of the folders' files from memory, so that the next read of these files reads the disk."""
    for folder in folders:
        for file in files(folder):
            with file.open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(*folders):
    """Read every byte of the folders' files and compute nothing, as a baseline for the comparison."""
    buffer = bytearray(1 << 20)
    for folder in folders:
        for file in files(folder):
            with file.open("rb", buffering=0) as handle:
                while handle.readinto(buffer):
                    pass


def ours(golden, bench):
    report = compare_dumps(open_dump(golden), open_dump(bench))
    assert report.passed and len(report.rows) == len(files(golden))


def msprobes(golden, bench):
    out = golden.parent / f"msprobe_{bench.name}"
    command = [str(Path(sys.executable).with_name("msprobe")), "compare"]
    command += ["-tp", bench / "step0" / "rank0" / "dump.json", "-gp", golden / "step0" / "rank0" / "dump.json"]
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python", "GLOG_v": "3"}
    done = subprocess.run([*map(str, command), "-o", str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and list(out.glob("*.csv")) + list(out.glob("*.xlsx")), done.stdout + done.stderr


def timed(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10000)
    parser.add_argument(
        "--folder",
        type=Path,
        help="write the dumps to this folder for the time of the benchmark: about 1.2 MB for each tensor",
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        write(folder, options.tensors)
        golden, rerun, rounded = (folder / side for side in SIDES)
        size = sum(file.stat().st_size for file in files(golden))
        print(f"{options.tensors} tensors a side, {size / 1e9:.2f} GB a side\n")
        print("| what | pages | seconds | GB/s |\n|---|---|---:|---:|")
        for bench, name in ((rerun, "same bits"), (rounded, "all differ by rounding")):
            for pages in ("cold", "warm"):
                for what, function in (("read only", read), (f"tc3 accuracy compare, {name}", ours)):
                    if pages == "cold":
                        forget(golden, bench)
                    seconds = timed(function, golden, bench)
                    print(f"| {what} | {pages} | {seconds:.2f} | {2 * size / 1e9 / seconds:.2f} |", flush=True)
            seconds = timed(msprobes, golden, bench)
            print(f"| msprobe compare, {name} | warm | {seconds:.1f} | {2 * size / 1e9 / seconds:.3f} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

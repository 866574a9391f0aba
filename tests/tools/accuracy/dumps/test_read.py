"""Dumps that are broken, unlike or none, and what a comparison does not write into: refused, not compared."""

import json
import re
import shutil

import numpy as np
import pytest

from plugins.errors import DataError
from tests.tools.accuracy.dumps.dump_writer import run, write_dump
from tests.tools.accuracy.dumps.test_compare import invoke
from tools.accuracy.dumps import read, write
from tools.accuracy.dumps.compare import Report, compare_dumps
from tools.accuracy.dumps.read import open_dump


def truncated(folder):
    file = next(folder.rglob("*.npy"))
    file.write_bytes(file.read_bytes()[:-4])


def without_a_file(folder):
    next(folder.rglob("*.npy")).unlink()


def cut_json(folder):
    file = folder / "step0" / "rank0" / "dump.json"
    file.write_text(file.read_text()[:-100])


def node(change):
    def spoil(folder):
        file = folder / "step0" / "rank0" / "dump.json"
        content = json.loads(file.read_text())
        change(content["data"]["Cell.layers.0.linear.Dense.forward.0"]["output"][0])
        file.write_text(json.dumps(content))

    return spoil


def replaced(name, text):
    def spoil(folder):
        next(folder.rglob(name)).write_text(text, encoding="latin-1")

    return spoil


def entry(value):
    return json.dumps({"level": "L0", "task": "tensor", "data": {"Cell.a.B.forward.0": value}})


def a_folder(folder):
    file = folder / "step0" / "rank0" / "dump.json"
    file.unlink()
    file.mkdir()


def saved(values):
    return lambda folder: np.save(next(folder.rglob("*linear.Dense.forward.0.output.0.npy")), values)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (replaced("dump.json", "[]"), "has no 'level'"),
        (replaced("dump.json", "null"), "has no 'level'"),
        (replaced("dump.json", "x" * 9), "not msprobe's dump.json"),
        (replaced("dump.json", "[" * 100_000), "not msprobe's dump.json"),
        (replaced("dump.json", '{"level": 3, "task": "tensor", "data": {"a": {}}}'), "level 3 cannot be compared"),
        (replaced("dump.json", '{"level": "L0", "task": "md5", "data": {"a": {}}}'), "task 'md5' cannot be compared"),
        (replaced("dump.json", '{"level": "L0", "task": "tensor", "data": []}'), "no tensor was dumped"),
        (
            replaced("dump.json", entry(None)),
            "tensors of the call by their role .*, not 'None'",
        ),
        (replaced("dump.json", entry([1])), "tensors of the call by their role"),
        (a_folder, "Is a directory"),
        (node(lambda each: each.update(shape=None)), "shape None; the file is damaged"),
        (node(lambda each: each.update(shape=[float("nan"), 8])), "shape .nan, 8."),
        (node(lambda each: each.update(shape=[-4, 8])), "shape .-4, 8."),
        (node(lambda each: each.update(shape=[10**30])), "shape .1000"),
        (node(lambda each: each.pop("dtype")), "dtype None"),
        (node(lambda each: each.update(data_name="../../../../etc/passwd")), "data_name"),
        (node(lambda each: each.update(data_name=5)), "data_name 5"),
        (node(lambda each: each.update(Max="big")), "Max 'big'"),
        (node(lambda each: each.update(Norm=10**400)), "Norm '10000"),
        (replaced("tc3_dump.json", "[]"), "does not say whether the dump is complete"),
        (replaced("tc3_dump.json", "[" * 100_000), "the file is damaged and does not say whether the dump is complete"),
        (replaced("*linear.Dense.forward.0.output.0.npy", "1,2\n3,4\n"), "not a .npy file that can be read"),
        (
            replaced("*linear.Dense.forward.0.output.0.npy", "\x93NUMPY\x01\0\x0e\0{'descr': '<f4'\n"),
            "not a .npy file that can be read",
        ),
        (saved(np.ones(3)), r"shape \[3\], .* shape \[4, 8\], although the dump.json files"),
        (saved(np.array([["a"] * 8] * 4)), "must be a number or bool"),
        (saved(np.zeros((4, 8), [("a", "f4"), ("b", "i2")])), "must be a number or bool"),
        (truncated, "ends too early, so the dump is not complete"),
        (without_a_file, "No such file or directory.*dump.json names it"),
        (cut_json, "not msprobe's dump.json"),
    ],
)
def test_broken_dumps_exit_with_2(tmp_path, spoil, words):
    golden, bench = write_dump(tmp_path / "a", run()), write_dump(tmp_path / "b", run())
    spoil(bench)
    with pytest.raises(DataError, match=words):
        compare_dumps(open_dump(golden), open_dump(bench))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"level": "L1"}, "was dumped with --level L0, .* with --level L1: dump both with --level L0"),
        ({"task": "statistics"}, "was dumped with --task tensor, .* with --task statistics"),
        ({"ranks": 2}, "use `tc3 accuracy equivalence`"),
    ],
)
def test_unlike_dumps_are_refused(tmp_path, settings, words):
    golden, bench = write_dump(tmp_path / "a", run()), write_dump(tmp_path / "b", run(), **settings)
    with pytest.raises(DataError, match=words):
        compare_dumps(open_dump(golden), open_dump(bench))


def test_dumps_without_a_tensor_are_refused(tmp_path):
    for name in "ab":
        folder = tmp_path / name
        (folder / "rank_0" / "Net" / "0" / "0").mkdir(parents=True)
        (folder / read.CONFIGURATION).write_text("{}")
        write.mark(folder, True)
    result = invoke(tmp_path / "a", tmp_path / "b")
    assert isinstance(result.exception, DataError) and "hold no tensor" in str(result.exception)
    assert not Report("a", "b", "L2", "tensor", True, []).passed


def test_wrong_folders_get_one_message(tmp_path):
    dump = write_dump(tmp_path / "runs" / "a", run())
    (dump / "step0x").mkdir()
    for folder, words in (
        (dump / "step0", f"it is one step of a dump: give {dump}"),
        (dump / "step0" / "rank0", f"it is one rank of a dump: give {dump}"),
        (tmp_path / "runs", f"did you mean {dump}?"),
    ):
        with pytest.raises(DataError) as error:
            open_dump(folder)
        assert words in str(error.value)


def test_the_files_of_a_comparison_never_lie_in_a_dump(tmp_path):
    dump = write_dump(tmp_path / "a", run())
    for out in (dump, dump / "step0" / "new"):
        result = invoke(dump, dump, "--out", out)
        assert isinstance(result.exception, DataError) and "must not change" in str(result.exception)
    assert not list(dump.rglob("compare.json"))


def made(folder, level="L0", ranks=2):
    """A dump of two steps as `tc3 accuracy dump` leaves it, with the weights after the last step."""
    apart = {number: run(3)[number] for number in (0, 2)} if level == "L1" else None
    write_dump(folder, run(2 if apart else 3), level=level, ranks=ranks, weights=apart)
    write.mark(folder, True, steps=2, workers=ranks, level=level)
    return folder


@pytest.mark.parametrize(
    ("level", "lost", "words"),
    [
        ("L0", "step1", "made of 2 steps, but step 1 is missing"),
        ("L0", "step0", "made of 2 steps, but step 0 is missing"),
        ("L0", "step2", "the weights after the last step .step 2. are missing"),
        ("L1", "step1", "made of 2 steps, but step 1 is missing"),
        ("L1", "weights/step2", "the weights after the last step .step 2. are missing"),
        ("L0", "*/rank1", "2 ranks made the dump, but rank 1 is missing"),
        ("L0", "*/rank0", "2 ranks made the dump, but rank 0 is missing"),
    ],
)
def test_dumps_that_both_lack_the_same_are_not_equal(tmp_path, level, lost, words):
    for name in "ab":
        folder = made(tmp_path / name, level)
        assert open_dump(folder).ranks == [0, 1]
        for part in folder.glob(lost):
            shutil.rmtree(part)
    result = invoke(tmp_path / "a", tmp_path / "b")
    assert isinstance(result.exception, DataError) and re.search(words, str(result.exception))

"""A header may say only what safetensors itself would read: every byte of a file belongs to one tensor."""

import hashlib
import json
import os
import shutil
import tempfile
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file as whole

from launch.resume.checkpoints import check_save_path
from plugins.errors import CheckpointError
from plugins.sealed_checkpoint import plan
from plugins.sealed_checkpoint.plan import (
    REFUSED,
    TRACKER,
    adopt,
    global_batch_of,
    publish,
    remove_old,
    saving_folder,
    write_refusal,
    write_seal,
)
from tests.crashes import deaths, patch_os
from tools.checkpoint.scan import is_sealed, iterations, later_than, lies_in, newest_saved, scan_checkpoints, set_aside
from tools.checkpoint.tensor_files import Header, Made, read_headers, save_file


def save(root, step, sealed=True):
    folder = root / f"iteration_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "mini-model-0000000-0000001.safetensors").write_bytes(b"weights %d" % step)
    if sealed:
        write_seal(folder, 0, world_size=1, step=step)
    return folder


def test_no_folder_means_no_checkpoint(tmp_path):
    assert scan_checkpoints(tmp_path / "none") == (None, [])


def test_the_newest_complete_one_wins_and_worse_ones_are_named(tmp_path):
    save(tmp_path, 4)
    good = save(tmp_path, 8)
    corrupted = save(tmp_path, 12)
    (corrupted / "mini-model-0000000-0000001.safetensors").write_bytes(b"weights 13")
    unfinished = save(tmp_path, 100, sealed=False)

    best, skipped = scan_checkpoints(tmp_path)
    assert (best.path, best.step) == (good, 8)
    assert [path for path, _ in skipped] == [unfinished, corrupted]
    assert "did not finish" in skipped[0][1] and "corrupted" in skipped[1][1]


def test_a_complete_save_that_is_not_in_its_place_is_passed_over(tmp_path):
    good, newer = save(tmp_path, 4), save(saving_folder(tmp_path, "0001-a"), 8)
    best, skipped = scan_checkpoints(tmp_path)
    assert best.path == good and skipped == [(newer, "complete, and not in its place yet")]


def test_steps_beyond_eight_digits_still_sort_as_numbers(tmp_path):
    save(tmp_path, 99_999_999)
    newest = save(tmp_path, 100_000_000)
    assert scan_checkpoints(tmp_path)[0].path == newest


def test_only_faulty_ones(tmp_path):
    save(tmp_path, 4, sealed=False)
    best, skipped = scan_checkpoints(tmp_path)
    assert best is None and len(skipped) == 1


def test_what_is_left_behind_is_what_comes_after_or_all_of_another_run(tmp_path):
    first, second, third = (save(tmp_path / "own", step) for step in (4, 8, 100))
    assert later_than(tmp_path / "own", second) == [third]
    assert later_than(tmp_path / "own", save(tmp_path / "else", 50)) == [third, second, first]
    renamed = second.rename(second.with_name(f"set_aside_{second.name}"))
    assert later_than(tmp_path / "own", renamed) == [third], "its seals say the step"
    shutil.rmtree(renamed)
    assert later_than(tmp_path / "own", second) == [third], "its name says the step"


@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_behind_a_link_is_one_of_the_run(tmp_path, inside):
    """All checkpoints of the run were put aside, also the one from which the run was to go on."""
    root, (_, second, third) = tmp_path / "own", [save(tmp_path / "own", step) for step in (4, 8, 100)]
    link = tmp_path / "best"
    if inside:  # it was moved to another disk
        second.rename(link)
        link, second = second, link
    link.symlink_to(second)
    assert later_than(root, link) == [third]
    assert lies_in(link, root) and not lies_in(link, tmp_path / "else")


@pytest.mark.parametrize("look", [newest_saved, lambda root: scan_checkpoints(root)[0]])
def test_a_checkpoint_that_is_removed_after_it_was_read_is_passed_over(tmp_path, monkeypatch, look):
    """An agent looks while a worker that has not heard of the end still removes the oldest checkpoint."""
    kept, newest, fault = save(tmp_path, 4), save(tmp_path, 8), plan.fault

    def removed(folder, **given):
        found = fault(folder, **given)
        if folder == newest:
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(plan, "fault", removed)
    assert look(tmp_path).path == kept


@pytest.mark.parametrize("look", [adopt, scan_checkpoints, lambda root: check_save_path(root, False, False)])
@pytest.mark.parametrize("start", ["saving_0000-a", "moving_1"])
def test_a_folder_that_another_process_removes_while_it_is_looked_for_ends_nobody(tmp_path, monkeypatch, look, start):
    """Agents of several nodes set checkpoints aside at once; one of them ended with a FileNotFoundError."""
    folder, scandir = tmp_path / start, os.scandir
    folder.mkdir()

    def removed(path):
        if Path(path) == folder and folder.exists():
            folder.rmdir()
        return scandir(path)

    patch_os(monkeypatch, "scandir", removed)
    look(tmp_path)
    assert (start.startswith("moving") and look == scan_checkpoints) or not folder.exists()


def of_batch(root, attempt, step, batch):
    """Save a step of `batch` samples as an attempt does, before the checkpoint is put in its place."""
    folder = saving_folder(root, f"{attempt:04d}-x") / f"iteration_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "mini-model-0000000-0000001.safetensors").write_bytes(b"weights %d" % (step * batch))
    (folder / "common.json").write_text(json.dumps({"step_num": step, "global_batch_size": batch}))
    write_seal(folder, 0, world_size=1, step=step, made={"attempt": f"{attempt:04d}-x"})
    return folder


@pytest.mark.slow
@settings(max_examples=25)
@example([(2, 3, True), (4, 1, False), (2, 0, True)])  # step 16 of attempt 1 is not in its place, that of attempt 0 is
@given(st.lists(st.tuples(st.sampled_from([2, 4, 8]), st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_a_run_goes_on_from_where_it_had_come_furthest_whatever_the_batches(attempts):
    """With a larger batch MindFormers numbers steps anew from a smaller one; checkpoints of a smaller batch had larger
    numbers, so that each attempt began at the same one of them again, and none of the new ones was ever the newest.
    """
    with tempfile.TemporaryDirectory() as name:
        root, samples = Path(name), 0
        for attempt, (batch, saves, published) in enumerate(attempts):
            adopt(root)
            best, _ = scan_checkpoints(root)
            found = best and best.step * global_batch_of(best.path)
            assert (found or 0) == samples and samples % 8 == 0
            assert not best or (root / TRACKER).read_text() == str(best.step)
            for number in range(saves):
                samples += 16
                folder = of_batch(root, attempt, samples // batch, batch)
                if published or number < saves - 1:  # else a death comes before it
                    remove_old(root, publish(folder, root), 3, f"{attempt:04d}-x")
                    assert len(list(root.glob("iteration_*"))) <= 3


@pytest.mark.parametrize("end", ["_best", ".bak", " (copy)"])
def test_a_copy_that_a_user_has_named_is_neither_removed_nor_loaded(tmp_path, end):
    """It counted as the oldest checkpoint of the run, and was removed after the next saves."""
    copy = save(tmp_path, 9).rename(tmp_path / f"iteration_00000009{end}")
    (tmp_path / "iteration_00000001.tar").write_text("an archive")  # this file stopped every resume
    assert scan_checkpoints(tmp_path) == (None, [])
    for step in (2, 4, 6):
        remove_old(tmp_path, publish(of_batch(tmp_path, 1, step, 4), tmp_path), 1, "0001-x")
    assert scan_checkpoints(tmp_path)[0].step == 6 and is_sealed(copy)
    assert not (tmp_path / "iteration_00000004").exists()


def test_a_branch_leaves_behind_what_had_come_further_whatever_the_batches(tmp_path):
    one, two, three, four = (
        publish(of_batch(tmp_path, attempt, step, batch), tmp_path)
        for attempt, step, batch in ((0, 8, 4), (0, 16, 4), (1, 10, 8), (1, 12, 8))
    )
    assert later_than(tmp_path, two) == [four, three]
    assert later_than(tmp_path, one) == [four, three, two]
    assert later_than(tmp_path, four) == []
    renamed = three.rename(three.with_name(f"set_aside_{three.name}"))
    assert later_than(tmp_path, renamed) == [four]


def test_what_a_spike_guard_needs_is_counted_in_steps_of_the_present_batch(tmp_path):
    for attempt, step, batch in ((0, 12, 8), (1, 8, 16), (1, 9, 16), (1, 10, 16)):
        newest = publish(of_batch(tmp_path, attempt, step, batch), tmp_path)
    remove_old(tmp_path, newest, 2, "0001-x", skip=3)
    assert [folder.name[-2:] for folder in iterations(tmp_path)] == ["10", "08"], "from before step 9, which may spike"


def test_what_is_put_aside_is_found_no_more_and_nothing_is_lost(tmp_path):
    kept = save(tmp_path, 4)
    aside = set_aside(save(tmp_path, 8)), set_aside(save(tmp_path, 8)), set_aside(save(tmp_path, 8))
    assert scan_checkpoints(tmp_path)[0].path == kept
    assert len(set(aside)) == 3 and all(is_sealed(folder) for folder in aside)
    shutil.rmtree(aside[0])
    assert set_aside(save(tmp_path, 8)) == aside[0], "the first name that is free"
    assert set_aside(save(tmp_path, 8)) not in aside
    assert not is_sealed(save(tmp_path, 9, sealed=False))


@pytest.mark.parametrize("meant", [True, False])
def test_a_kill_while_a_checkpoint_is_set_aside_loses_none(tmp_path, meant):
    """One that was not meant kept the name under which no run finds it."""
    numbers = count()

    def fresh():
        root = tmp_path / str(next(numbers))
        save(root, 8)
        return root

    ends = set()
    for root, where in deaths(lambda root: set_aside(root / "iteration_00000008", lambda moved: meant), fresh):
        adopt(root)
        left = {folder.name for folder in root.iterdir() if is_sealed(folder)}
        assert len(left) == 1 and left <= {"iteration_00000008", "set_aside_iteration_00000008"}, where
        assert meant or left == {"iteration_00000008"}, where
        ends |= left
        set_aside(root / "iteration_00000008")
    assert len(ends) == 1 + meant


def written(path, header, size=16):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def tensor(first, last, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def test_tensors_one_after_the_other(tmp_path):
    content = {"__metadata__": {"format": "ms"}, "b": tensor(8, 16), "a": tensor(0, 8), "none": tensor(16, 16, (0,))}
    found = read_headers(written(tmp_path / "f", content))
    assert {name: header.bytes for name, header in found.items()} == {"b": 8, "a": 8, "none": 0}
    assert found["a"] == Header("F32", (2,), 8)


@pytest.mark.parametrize(
    "content",
    [
        {"a": tensor(-8, 0), "b": tensor(0, 16, (4,))},
        {"a": tensor(8, 0), "b": tensor(0, 16, (4,))},
        {"a": tensor(0, 16)},
        {"a": tensor(0, 8), "b": tensor(4, 16, (3,))},
        {"a": tensor(8, 16)},
        {"a": tensor(0, 16, (-4, -1))},
        {"a": tensor(0, 16, (2.0, 2))},
        {"a": tensor(0, 16, (4,), "F7")},
        {"a": tensor(0, 16, (4,), 3)},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
        {"a": [0, 16]},
        {"a": tensor(0, True * 16, (True, 4))},
        [],
        b"",
        b"[" * 100_000,
        b'{"a": 99',
    ],
)
def test_what_no_safetensors_file_says(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"not a complete safetensors file|known types are"):
        read_headers(written(tmp_path / "f", content))


TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
tensors = st.dictionaries(
    st.text("ab.é1", min_size=1, max_size=9),
    st.tuples(st.sampled_from(sorted(TYPES)), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 3)),
    min_size=1,
    max_size=6,
)


def made(kind, array, cuts):
    rows = [piece for piece in np.array_split(np.atleast_1d(array), cuts) if piece.size]
    return Made(kind, array.shape, lambda: iter(rows))


@settings(max_examples=60)
@given(tensors)
def test_it_is_the_packages_file(tmp_path_factory, drawn):
    folder, random = tmp_path_factory.mktemp("stream"), np.random.default_rng(0)
    arrays = {
        name: np.asarray(random.standard_normal(shape)).astype(TYPES[kind]) for name, (kind, shape, _) in drawn.items()
    }
    whole(arrays, folder / "whole", {"format": "pt"})
    found = save_file(
        {name: made(drawn[name][0], arrays[name], drawn[name][2]) for name in drawn}, folder / "own", {"format": "pt"}
    )
    content = (folder / "own").read_bytes()
    assert content == (folder / "whole").read_bytes()
    assert found == hashlib.sha256(content).hexdigest()


def test_pieces_that_are_not_the_tensor_are_no_file(tmp_path):
    wrong = Made("F32", (3,), lambda: iter([np.zeros(2, np.float32)]))
    with pytest.raises(AssertionError, match="a: 8 bytes instead of 12"):
        save_file({"a": wrong}, tmp_path / "own", {})


def test_a_refusal_counts_only_if_the_save_has_that_rank_and_a_refused_save_removes_nothing(tmp_path):
    old, middle, new = (save(tmp_path, step) for step in (4, 8, 12))
    (middle / f"{REFUSED}5").touch()  # of an earlier save of this step, on more ranks
    assert remove_old(tmp_path, new, keep=2) == [old]
    write_refusal(new, 0, "a weight is NaN")
    assert remove_old(tmp_path, new, keep=1) == [] and middle.exists()

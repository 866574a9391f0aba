import shutil

from plugins.sealed_checkpoint.plan import write_seal
from tools.checkpoint.scan import is_sealed, later_than, scan_checkpoints, set_aside


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


def test_what_is_put_aside_is_found_no_more_and_nothing_is_lost(tmp_path):
    kept = save(tmp_path, 4)
    aside = set_aside(save(tmp_path, 8)), set_aside(save(tmp_path, 8)), set_aside(save(tmp_path, 8))
    assert scan_checkpoints(tmp_path)[0].path == kept
    assert len(set(aside)) == 3 and all(is_sealed(folder) for folder in aside)
    shutil.rmtree(aside[0])
    assert set_aside(save(tmp_path, 8)) == aside[0], "the first name that is free"
    assert set_aside(save(tmp_path, 8)) not in aside
    assert not is_sealed(save(tmp_path, 9, sealed=False))

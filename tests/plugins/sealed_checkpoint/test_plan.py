import json
import os
import shutil

import pytest

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint import plan


@pytest.fixture
def checkpoint(tmp_path):
    """Two ranks' files, sealed by both."""
    for rank in (0, 1):
        for kind in ("model", "opt"):
            name = f"mini-{kind}-{rank:07d}-0000002.safetensors"
            (tmp_path / name).write_bytes(bytes(range(256)) * 40 * (rank + 1))
    (tmp_path / "common.json").write_text("{}")
    (tmp_path / "metadata.json").write_text("{}")
    for rank in (0, 1):
        plan.write_seal(tmp_path, rank, world_size=2, step=7)
    return tmp_path


def test_complete(checkpoint):
    assert plan.fault(checkpoint) is None
    assert plan.step_of(checkpoint) == 7


def test_every_file_is_sealed_exactly_once(checkpoint):
    sealed = [name for rank in (0, 1) for name in json.loads(plan.seal_file(checkpoint, rank).read_text())["files"]]
    assert sorted(sealed) == sorted(p.name for p in checkpoint.iterdir() if not p.name.startswith("seal_"))


@pytest.mark.parametrize("name", ["mini-model-0000001-0000002.safetensors", "common.json", "metadata.json"])
def test_a_missing_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    assert plan.fault(checkpoint) == f"{name} is missing"


def test_a_missing_seal_means_the_save_did_not_finish(checkpoint):
    plan.seal_file(checkpoint, 1).unlink()
    assert plan.fault(checkpoint) == "seal_rank_1.json is missing: the save did not finish"
    plan.seal_file(checkpoint, 0).unlink()
    assert "seal_rank_0.json is missing" in plan.fault(checkpoint)


def test_truncation_and_one_flipped_bit_are_named(checkpoint):
    victim = checkpoint / "mini-opt-0000000-0000002.safetensors"
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    assert plan.fault(checkpoint) == f"{victim.name} does not match its checksum: corrupted"
    victim.write_bytes(data[:-1])
    assert plan.fault(checkpoint).startswith(f"{victim.name} has {len(data) - 1} bytes instead of {len(data)}")


def test_what_cannot_be_read_is_named(checkpoint, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(plan, "checksum", refused)
    with pytest.raises(
        CheckpointError, match=r"0000000-0000002.safetensors: this path cannot be read \(Permission denied\)"
    ):
        plan.fault(checkpoint)
    plan.seal_file(checkpoint, 0).unlink()
    plan.seal_file(checkpoint, 0).mkdir()
    with pytest.raises(CheckpointError, match=r"seal_rank_0.json: this path cannot be read \(Is a directory\)"):
        plan.fault(checkpoint)


def test_a_seal_is_for_whoever_the_umask_allows(checkpoint):
    before = os.umask(0o027)
    try:
        seal = plan.write_seal(checkpoint, 1, world_size=2, step=7)
    finally:
        os.umask(before)
    assert seal.stat().st_mode & 0o777 == 0o640


def test_a_broken_seal_is_a_fault_not_a_crash(checkpoint):
    plan.seal_file(checkpoint, 0).write_text('{"world_size": ')
    assert "unreadable" in plan.fault(checkpoint)
    plan.seal_file(checkpoint, 0).write_text("[]")
    assert "unreadable" in plan.fault(checkpoint)


def test_nothing_to_seal_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="rank 0 of 1"):
        plan.write_seal(tmp_path, 0, world_size=1, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "world_size", "optimizer", "names"),
    [
        (0, 1, True, ["x-model-0000000-0000001.safetensors", "x-opt-0000000-0000001.safetensors", "common.json"]),
        (0, 1, False, ["x-model-0000000-0000001.safetensors", "common.json"]),
        (0, 16, False, ["x-model-0000000-0000016.safetensors", "common.json", "metadata.json"]),
        (11, 16, True, ["x-model-0000011-0000016.safetensors", "x-opt-0000011-0000016.safetensors"]),
    ],
)
def test_nothing_is_sealed_unless_all_is_there(tmp_path, rank, world_size, optimizer, names):
    assert plan.expected_files("x", rank, world_size, optimizer) == names
    for absent in names:
        for name in names:
            (tmp_path / name).write_text(name)
        (tmp_path / absent).rename(tmp_path / f"{absent}.tmp")
        with pytest.raises(CheckpointError, match=f"MindFormers did not write {absent}"):
            plan.write_seal(tmp_path, rank, world_size, 3, names)
        assert not plan.seal_file(tmp_path, rank).exists()
    (tmp_path / absent).write_text("")
    seal = plan.write_seal(tmp_path, rank, world_size, 3, names)
    assert sorted(json.loads(seal.read_text())["files"]) == sorted(names)


def test_nothing_is_removed_while_a_rank_has_not_sealed_the_newest(checkpoint, tmp_path):
    root = tmp_path.with_name("root")
    old, new = root / "iteration_00000004", root / "iteration_00000007"
    shutil.copytree(checkpoint, old)
    shutil.copytree(checkpoint, new)
    plan.seal_file(new, 1).rename(tmp_path / "later")
    assert plan.remove_old(root, new, keep=1) == [] and old.exists()
    (tmp_path / "later").rename(plan.seal_file(new, 1))
    assert plan.remove_old(root, new, keep=2) == [] and old.exists()
    assert plan.remove_old(root, new, keep=1) == [old] and not old.exists()
    assert plan.fault(new) is None and [path.name for path in root.iterdir()] == [new.name]


def saved(root, step, attempt=None, ranks=(0, 1), **more):
    """A checkpoint as an attempt saves it, in its own folder until `publish`."""
    folder = plan.saving_folder(root, attempt) / f"iteration_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "common.json").write_text("{}")
    for rank in (0, 1):
        (folder / f"mini-model-{rank:07d}-0000002.safetensors").write_text(f"{attempt} {step}")
    for rank in ranks:
        plan.write_seal(folder, rank, 2, step, made={"attempt": attempt, **more} if attempt else {})
    return folder


def kept(root):
    return [plan.iteration(folder) for folder in reversed(plan.iterations(root))]


def test_as_many_are_kept_however_many_attempts_have_saved_them(tmp_path):
    """Six attempts, each of which saves twice and dies in its third save; some before attempts had names."""
    for number, attempt in enumerate([None, None, "0002-a", "0003-b", "0010-c", "0011-d"]):
        for step in (10 * number + 1, 10 * number + 2):
            newest = plan.publish(saved(tmp_path, step, attempt), tmp_path)
            plan.remove_old(tmp_path, newest, 1, attempt)
            assert kept(tmp_path) == [step]
        saved(tmp_path, 10 * number + 3, attempt, ranks=[1])  # the kill comes before the other rank has sealed
    assert kept(tmp_path) == [52] and len(plan.unfinished(tmp_path)) == 1, "only of the last attempt"
    for attempt in ("0012-e", "0013-f"):
        plan.publish(saved(tmp_path, 60 + plan.number_of(attempt), attempt), tmp_path)
    plan.remove_old(tmp_path, tmp_path / "iteration_00000073", 2, "0013-f")
    assert kept(tmp_path) == [72, 73] and not plan.unfinished(tmp_path)


def test_what_nobody_sealed_is_put_aside_or_newer_is_not_removed(tmp_path):
    (tmp_path / "iteration_00000001").mkdir()
    aside = saved(tmp_path, 2).rename(tmp_path / "set_aside_iteration_00000002")
    newer = saved(tmp_path, 9)
    plan.remove_old(tmp_path, plan.publish(saved(tmp_path, 5, "0004-a"), tmp_path), 1, "0004-a")
    assert kept(tmp_path) == [1, 5, 9] and aside.exists() and newer.exists()


def test_a_late_rank_removes_and_replaces_nothing_of_the_attempts_that_followed_its_own(tmp_path):
    """Attempt 1 was held up at its save of step 8; attempt 2 began again at step 4, for a spike, and goes on."""
    late = saved(tmp_path, 8, "0001-a")
    plan.publish(saved(tmp_path, 6, "0002-b"), tmp_path)
    plan.publish(saved(tmp_path, 8, "0002-b"), tmp_path)
    assert plan.publish(late, tmp_path) is None
    assert plan.remove_old(tmp_path, tmp_path / "iteration_00000008", 1, "0001-a") == []
    assert kept(tmp_path) == [6, 8] and plan.made(tmp_path / "iteration_00000008") == {"attempt": "0002-b"}
    saved(tmp_path, 10, "0002-b", ranks=[0])
    plan.remove_old(tmp_path, plan.publish(saved(tmp_path, 9, "0001-c"), tmp_path), 1, "0001-c")
    assert "saving_0002-b" in [folder.parent.name for folder in plan.unfinished(tmp_path)]


def test_parts_of_two_attempts_are_no_whole_checkpoint(tmp_path):
    folder = saved(tmp_path, 8, "0001-a")
    assert plan.fault(folder) is None
    plan.write_seal(folder, 1, 2, 8, made={"attempt": "0002-b"})
    mixed = "its parts are of several attempts of the run (0001-a, 0002-b)"
    assert plan.fault(folder) == plan.fault(folder, (1, 2)) == mixed
    plan.write_seal(folder, 1, 2, 8)  # by a rank of before attempts had names
    assert plan.fault(folder) == "its parts are of several attempts of the run (0001-a, None)"


def test_seals_without_an_attempt_are_as_good_as_ever(tmp_path):
    folder = saved(tmp_path, 8)
    assert plan.fault(folder) is None and plan.made(folder) == {} and plan.step_of(folder) == 8


def test_a_save_that_its_attempt_could_not_put_in_its_place_is_not_lost(tmp_path):
    """The kill came after the last seal; what stands there is half of an attempt before."""
    saved(tmp_path, 8, ranks=[0])
    whole = saved(tmp_path, 8, "0001-a")
    saved(tmp_path, 12, "0001-a", ranks=[0])
    assert plan.adopt(tmp_path) == [tmp_path / "iteration_00000008"] and not whole.exists()
    assert plan.fault(tmp_path / "iteration_00000008") is None and kept(tmp_path) == [8]
    assert (tmp_path / plan.TRACKER).read_text() == "8"
    again = saved(tmp_path, 8, "0000-b")
    assert plan.adopt(tmp_path) == [] and again.exists(), "what is whole stays"


def test_a_rank_that_refuses_says_why(checkpoint):
    plan.write_refusal(checkpoint, 1, "w is not finite")
    assert plan.fault(checkpoint) == "w is not finite"
    assert plan.newest_of_rank(checkpoint.parent, 0) is None, "no iteration's name"


def test_the_newest_of_a_rank_is_one_that_it_has_sealed(tmp_path):
    for step in (4, 8, 12, 16):
        folder = tmp_path / f"iteration_{step:08d}"
        folder.mkdir()
        (folder / "mini-model-0000000-0000001.safetensors").touch()
        if step < 12:
            plan.write_seal(folder, 0, world_size=1, step=step)
    plan.write_refusal(tmp_path / "iteration_00000012", 0, "w is not finite")
    assert plan.newest_of_rank(tmp_path, 0) == tmp_path / "iteration_00000008"

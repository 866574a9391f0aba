import json
import os

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
    with pytest.raises(CheckpointError, match=r"0000000-0000002.safetensors: cannot be read \(Permission denied\)"):
        plan.fault(checkpoint)
    plan.seal_file(checkpoint, 0).unlink()
    plan.seal_file(checkpoint, 0).mkdir()
    with pytest.raises(CheckpointError, match=r"seal_rank_0.json: cannot be read \(Is a directory\)"):
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
        with pytest.raises(CheckpointError, match=f"{absent} not written"):
            plan.write_seal(tmp_path, rank, world_size, 3, names)
        assert not plan.seal_file(tmp_path, rank).exists()
    (tmp_path / absent).write_text("")
    seal = plan.write_seal(tmp_path, rank, world_size, 3, names)
    assert sorted(json.loads(seal.read_text())["files"]) == sorted(names)


def test_nothing_is_removed_while_a_rank_has_not_sealed_the_newest(checkpoint, tmp_path):
    old = tmp_path.with_name("old")
    old.mkdir()
    plan.seal_file(checkpoint, 1).rename(tmp_path / "later")
    assert plan.remove_old([old, checkpoint], checkpoint, keep=1) == 0 and old.exists()
    (tmp_path / "later").rename(plan.seal_file(checkpoint, 1))
    assert plan.remove_old([old, checkpoint], checkpoint, keep=2) == 0 and old.exists()
    assert plan.remove_old([old, checkpoint], checkpoint, keep=1) == 1 and not old.exists()
    assert plan.fault(checkpoint) is None


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

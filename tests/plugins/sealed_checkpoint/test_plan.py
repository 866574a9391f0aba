import json

import pytest

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


def test_a_broken_seal_is_a_fault_not_a_crash(checkpoint):
    plan.seal_file(checkpoint, 0).write_text('{"world_size": ')
    assert "unreadable" in plan.fault(checkpoint)
    plan.seal_file(checkpoint, 0).write_text("[]")
    assert "unreadable" in plan.fault(checkpoint)


def test_nothing_to_seal_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="rank 0 of 1"):
        plan.write_seal(tmp_path, 0, world_size=1, step=1)
    assert list(tmp_path.iterdir()) == []

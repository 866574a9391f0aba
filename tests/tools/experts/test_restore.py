"""Moved experts back in logical order: files against arrays that the test permutes itself."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import fault, made, write_seal
from tests.tools.checkpoint.saved import Saved, numbered
from tools.checkpoint.stored import moved, open_stored, read_placements, read_whole
from tools.checkpoint.tensor_files import read_headers
from tools.experts import restore
from tools.experts.cli import experts
from tools.experts.restore import restore_order, target_of
from tools.recipe.load import load_recipe
from tools.weights.convert_plan import KEPT
from tools.weights.inventory import SALVAGED

MODULE = "decoder.layers.1.mlp.experts"
WEIGHT, MOMENT = f"{MODULE}.weight1", f"adam_m.{MODULE}.weight1"


def in_slots(whole, slots):
    """Rows of experts in the order of slots: what a run that moved them saves."""
    rows = whole.reshape(len(slots), -1, *whole.shape[1:])
    there = np.empty_like(rows)
    there[slots] = rows
    return there.reshape(whole.shape)


def write(folder, slots, ranks, cuts=None, moment_cuts=None, height=2):
    """A sealed checkpoint with expert weights [experts * height, 4] in the order of `slots`; the logical arrays."""
    saved = Saved(folder / "checkpoint" / "iteration_00000006", ranks)
    cuts, moment_cuts = cuts or (ranks, 1), moment_cuts or (ranks, 1)
    weight = numbered(len(slots) * height, 4)
    for name, whole, cut, kind in (
        (WEIGHT, weight, cuts, "model"),
        (MOMENT, weight / 7, moment_cuts, "opt"),
    ):
        saved.put(name, in_slots(whole, slots), cut, [[rank] for rank in range(ranks)], kind)
    saved.put("norm.weight", numbered(4), (1,), [list(range(ranks))])
    for rank in range(ranks):
        saved.held[saved.file("model", rank)][f"{MODULE}.placement"] = np.array(slots, np.int32)
    path = saved.write()
    (path / "common.json").write_text("{}")
    for rank in range(ranks):
        write_seal(path, rank, ranks, 6)
    return path, {WEIGHT: weight, MOMENT: weight / 7, "norm.weight": numbered(4)}


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.permutations(range(8)), st.sampled_from([((4, 1), (4, 1)), ((2, 2), (2, 2)), ((4, 1), (1, 4)), ((1, 4), (2, 2))])
)
def test_every_row_comes_back_to_its_expert(tmp_path_factory, slots, cuts):
    folder, expected = write(tmp_path_factory.mktemp("run"), np.array(slots), 4, *cuts)
    if slots == sorted(slots):
        return
    assert restore_order(folder, target_of(folder)) == (1, [])
    arrays = read_whole(target_of(folder)).arrays
    for name, whole in expected.items():
        np.testing.assert_array_equal(arrays[name], whole)


def test_moments_that_the_optimizer_cuts_inside_an_expert(tmp_path):
    folder, expected = write(tmp_path, np.array([2, 0, 1, 3]), 8, (8, 1), (8, 1), height=6)
    restore_order(folder, target_of(folder))
    np.testing.assert_array_equal(read_whole(target_of(folder)).arrays[MOMENT], expected[MOMENT])


def test_the_samples_that_the_run_had_left_out_are_still_known(tmp_path):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    for rank in range(2):
        write_seal(folder, rank, 2, 6, made={"attempt": "0002-aa", "skipped": [[4, 8]]})
    restore_order(folder, target_of(folder))
    assert made(target_of(folder)) == {"skipped": [[4, 8]]}


def test_what_is_written_is_sealed_and_stands_in_logical_order(tmp_path):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    restore_order(folder, target_of(folder))
    assert target_of(folder) == tmp_path / "checkpoint_in_order" / "iteration_00000006"
    assert fault(target_of(folder)) is None and moved(read_placements(target_of(folder))) == []
    assert {path.name for path in target_of(folder).iterdir()} == before.keys()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "the checkpoint itself stays"


def test_the_recipe_of_the_weights_goes_along_to_any_folder(tmp_path):
    folder, _ = write(tmp_path / "run", np.array([1, 0, 3, 2]), 2)
    (tmp_path / "run" / "recipe.yaml").write_text("seed: 7\n")
    restore_order(folder, tmp_path / "once")
    assert load_recipe(tmp_path / "once" / KEPT)["seed"] == 7
    (folder / KEPT).write_text("seed: 8\n")
    restore_order(folder, tmp_path / "again")
    assert load_recipe(tmp_path / "again" / KEPT)["seed"] == 8, "that of the weights goes first"


def test_no_checkpoint_of_the_run_is_made_up(tmp_path):
    """A resume took such a folder for the newest checkpoint."""
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    (tmp_path / "recipe.yaml").write_text("seed: 7\n")
    for target, words in ((folder.with_name("iteration_00000009"), "would take"), (folder / "to", "in the checkpoint")):
        with pytest.raises(CheckpointError, match=words):
            restore_order(folder, target)
    restore_order(folder, target_of(folder))
    later = shutil.copytree(folder, folder.with_name("iteration_00000008"))
    restore_order(later, target_of(later))


def test_every_type_is_copied_or_refused_by_name(tmp_path):
    """Types that nothing here writes ended in a traceback."""
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    for kind in ("uint16", "uint32", "uint64"):
        save_file({"counter": np.array([3, 2**16 - 1], kind)}, folder / "more-model-0000000-0000002.safetensors")
        restore_order(folder, tmp_path / kind)
        found = load_file(tmp_path / kind / "more-model-0000000-0000002.safetensors")["counter"]
        assert found.dtype == kind and found.tolist() == [3, 2**16 - 1]
    header = b'{"x.weight": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}'
    file = folder / "more-model-0000000-0000002.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"88")
    with pytest.raises(CheckpointError, match=r"tc3 cannot write the data type of x\.weight \(F8_E4M3\); it can"):
        restore_order(folder, target_of(folder))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "seal_rank_1.json").unlink(), "not a complete checkpoint"),
        (lambda folder: target_of(folder).mkdir(parents=True), "exists already"),
        (lambda folder: [path.unlink() for path in folder.glob("*.safetensors")], "this is not a checkpoint"),
    ],
)
def test_what_is_refused(tmp_path, spoil, words):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    spoil(folder)
    with pytest.raises(CheckpointError, match=words):
        restore_order(folder, target_of(folder))


def test_an_error_of_the_caller_is_not_blamed_on_the_file_that_is_read(tmp_path):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    stored = open_stored(folder)
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left") as raised, stored.opened(sorted(stored.files)[0]):
        raise full
    assert raised.value is full


def test_a_checkpoint_that_a_run_removes_in_the_meantime_is_named(tmp_path):
    """As a run that trains does with its oldest one."""
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    with pytest.raises(CheckpointError, match=r"mini-\w+-\d+-\d+.safetensors: the file .*checkpoint.save_max"):
        restore_order(folder, target_of(folder), lambda name: shutil.rmtree(folder, ignore_errors=True))
    assert list(target_of(folder).parent.iterdir()) == []


def spoiled(folder, value=None):
    """Change a weight of rank 0: its lowest bit, or to `value`, which the seals then hold."""
    file = next(folder.glob("*-model-0000000-*"))
    start, content = read_headers(file)[WEIGHT].start, bytearray(file.read_bytes())
    if value is None:
        content[start] ^= 1
    else:
        content[start : start + 4] = np.float32(value).tobytes()
    file.write_bytes(content)
    if value is not None:
        for rank in range(2):
            write_seal(folder, rank, 2, 6)


@pytest.mark.parametrize(("value", "words"), [(None, "does not match its checksum"), (np.nan, "not finite")])
def test_damage_is_not_sealed_anew_and_what_is_salvaged_says_so(tmp_path, value, words):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    spoiled(folder, value)
    refused = CliRunner().invoke(experts, ["restore-order", str(folder)])
    assert isinstance(refused.exception, CheckpointError) and not target_of(folder).exists()
    assert words in str(refused.exception) and "--salvage" in str(refused.exception)
    done = CliRunner().invoke(experts, ["restore-order", str(folder), "--salvage"])
    assert done.exit_code == 0 and "SALVAGED from damaged weights: " in done.output
    assert words in json.loads((target_of(folder) / SALVAGED).read_text())["damaged"][0]


def test_nothing_to_restore_is_told(tmp_path):
    folder, _ = write(tmp_path, np.arange(4), 2)
    with pytest.raises(CheckpointError, match="nothing to restore"):
        restore_order(folder, target_of(folder))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_and_an_interrupt_leave_nothing(tmp_path, monkeypatch, error):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)

    def full(arrays, path):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(restore, "save_arrays", full)
    with pytest.raises(DataError if isinstance(error, OSError) else KeyboardInterrupt):
        restore_order(folder, target_of(folder))
    assert list(target_of(folder).parent.iterdir()) == []


def test_rows_that_are_no_experts_are_told(tmp_path):
    folder, _ = write(tmp_path, np.array([1, 0, 3, 2]), 2)
    file = next(folder.glob("*-model-0000000-*")).name
    with pytest.raises(CheckpointError, match="cannot be divided among 3 experts"):
        restore._restored(file, {MODULE: np.arange(3)}, open_stored(folder))


def test_muons_moment_comes_back_and_the_number_in_place_of_adams_stays(tmp_path):
    slots = np.array([2, 0, 3, 1])
    saved = Saved(tmp_path / "checkpoint" / "iteration_00000006", 2)
    weight = numbered(8, 4)
    for name in (WEIGHT, f"muon_m.{WEIGHT}"):
        kind = "opt" if name.startswith("muon") else "model"
        saved.put(name, in_slots(weight, slots), (2, 1), [[0], [1]], kind)
    for rank in range(2):
        saved.held[saved.file("model", rank)][f"{MODULE}.placement"] = slots.astype(np.int32)
        saved.held[saved.file("opt", rank)][MOMENT] = np.full(1, 7, np.float32)
    path = saved.write()
    (path / "common.json").write_text("{}")
    for rank in range(2):
        write_seal(path, rank, 2, 6)
    restore_order(path, target_of(path))
    arrays = read_whole(target_of(path)).arrays
    np.testing.assert_array_equal(arrays[f"muon_m.{WEIGHT}"], weight)
    np.testing.assert_array_equal(open_stored(target_of(path)).read_from(saved.file("opt", 1), MOMENT), [7])

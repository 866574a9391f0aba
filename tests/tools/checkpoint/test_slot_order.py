"""Checkpoints whose experts have moved: known by their placements."""

import numpy as np
import pytest

from plugins.errors import CheckpointError
from tests.tools.checkpoint.saved import Saved, numbered
from tools.checkpoint.slot_order import moved, read_placements, refuse_moved

LAYER = "decoder.layers.1.mlp.experts"


def saved(folder, *slots):
    """A checkpoint of as many ranks as there are placements given, one a rank."""
    checkpoint = Saved(folder / "iteration_00000004", len(slots))
    checkpoint.put("norm.weight", numbered(4), (1,), [list(range(len(slots)))])
    for rank, placement in enumerate(slots):
        checkpoint.held[checkpoint.file("model", rank)][f"{LAYER}.placement"] = np.array(placement, np.int32)
    return checkpoint.write()


def test_experts_that_moved_are_refused_without_the_plugin_only(tmp_path):
    folder = saved(tmp_path, [1, 0, 2, 3], [1, 0, 2, 3])
    assert moved(read_placements(folder)) == [LAYER]
    with pytest.raises(CheckpointError, match="restore-order"):
        refuse_moved(folder, balanced=False)
    refuse_moved(folder, balanced=True)


def test_the_newest_of_a_folder_of_iterations_is_looked_at(tmp_path):
    saved(tmp_path, [1, 0])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(CheckpointError, match="iteration_00000004: the experts of 1 layers have moved"):
        refuse_moved(tmp_path, balanced=False)


def test_experts_at_their_own_slots_and_checkpoints_without_experts_pass(tmp_path):
    refuse_moved(saved(tmp_path, [0, 1, 2, 3]), balanced=False)
    refuse_moved(tmp_path / "nothing", balanced=False)


@pytest.mark.parametrize(
    ("slots", "words"),
    [(([0, 0, 1, 2],), "a slot of its own"), (([0, 1], [1, 0]), "not that of the other ranks")],
)
def test_placements_that_cannot_be(tmp_path, slots, words):
    with pytest.raises(CheckpointError, match=words):
        read_placements(saved(tmp_path, *slots))


def test_a_file_that_is_cut_short_is_told(tmp_path):
    folder = saved(tmp_path, [0, 1])
    (file,) = folder.glob("*-model-*")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="not a complete safetensors"):
        read_placements(folder)
    refuse_moved(folder, balanced=False)

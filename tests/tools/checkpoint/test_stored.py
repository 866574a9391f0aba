"""Checkpoints of many ranks as whole arrays, against slices that the test cuts itself."""

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from plugins.errors import CheckpointError
from plugins.hyper_connections.plan import SUBLAYERS, WEIGHTS
from plugins.sealed_checkpoint.plan import fault, write_refusal, write_seal
from tests.tools.checkpoint.saved import Saved, numbered
from tools.checkpoint.stored import (
    PLACEMENT,
    kind_of,
    moments_of,
    moved,
    open_stored,
    read_placements,
    read_whole,
    refuse_moved,
)


@pytest.fixture
def four(tmp_path):
    """Four ranks: two stages of two; replicas, both axes cut, a moment that the optimizer splits."""
    saved = Saved(tmp_path / "iteration_00000004", 4)
    saved.put("embedding.weight", numbered(8, 4), (2, 1), [[0], [1]])
    saved.put("norm.weight", numbered(4), (1,), [[0, 1]])
    saved.put("both.weight", numbered(4, 6) + 100, (2, 2), [[0], [1], [2], [3]])
    saved.put("head.weight", numbered(8, 4) + 7, (1, 2), [[2], [3]])
    saved.put("adam_m.norm.weight", numbered(4) / 8, (2,), [[0], [1]], "opt")
    saved.put("step", np.float32(3).reshape(()), (), [[0, 1, 2, 3]], "opt")
    for rank in range(4):
        saved.held[saved.file("model", rank)]["router.bias"] = np.float32([rank])
    return saved


def test_slices_replicas_stages_and_sharded_moments_make_up_the_whole(four):
    whole = read_whole(four.write())
    assert whole.arrays.keys() == four.tensors.keys()
    for name, expected in (
        ("embedding.weight", numbered(8, 4)),
        ("norm.weight", numbered(4)),
        ("both.weight", numbered(4, 6) + 100),
        ("head.weight", numbered(8, 4) + 7),
        ("adam_m.norm.weight", numbered(4) / 8),
        ("step", np.float32(3)),
    ):
        np.testing.assert_array_equal(whole.arrays[name], expected)
    assert whole.differing == {}
    assert whole.ranks["norm.weight"] == (0, 1) and whole.ranks["head.weight"] == (2, 3)
    assert {rank: float(bias[0]) for rank, bias in whole.unlisted["router.bias"].items()} == {0: 0, 1: 1, 2: 2, 3: 3}


def test_copies_that_differ_are_told_by_rank(four):
    four.held[four.file("model", 1)]["norm.weight"] = numbered(4) * np.float32(1 + 1e-7)
    whole = read_whole(four.write())
    assert whole.differing == {"norm.weight": (1,)}
    np.testing.assert_array_equal(whole.arrays["norm.weight"], numbered(4))


def test_buffers_that_are_listed_and_never_saved_are_no_loss(four):
    listed = {"global_shape": [4], "axis_fragmentations": [1], "chunk": [{"global_offset": [0], "local_shape": [4]}]}
    entry = {"file_name": four.file("opt", 0), "storage_rank": 0, "rank_group": [0]}
    four.tensors["accu_grads.norm.weight"] = listed
    four.storage[str(("accu_grads.norm.weight", (0,)))] = [entry]
    assert "accu_grads.norm.weight" not in read_whole(four.write()).arrays
    four.held[four.file("opt", 0)]["accu_grads.norm.weight"] = numbered(4)
    assert "accu_grads.norm.weight" in read_whole(four.write()).arrays


def test_one_process_has_whole_tensors_and_no_metadata(tmp_path):
    folder = tmp_path / "iteration_00000001"
    folder.mkdir()
    save_file({"a": numbered(2, 3)}, folder / "mini-model-0000000-0000001.safetensors")
    save_file({"adam_m.a": numbered(2, 3)}, folder / "mini-opt-0000000-0000001.safetensors")
    whole = read_whole(folder)
    assert sorted(whole.arrays) == ["a", "adam_m.a"] and whole.differing == whole.unlisted == {}


def test_two_saves_of_one_process_in_one_folder_are_not_mixed(tmp_path):
    """Whichever file came last by its name was read."""
    for prefix, value in (("mini", 1), ("zebra", 2)):
        save_file({"a.weight": np.float32([value])}, tmp_path / f"{prefix}-model-0000000-0000001.safetensors")
    with pytest.raises(CheckpointError, match=r"zebra-model\S+: this file and mini-model-\S+ both hold a\.weight; one"):
        read_whole(tmp_path)


def test_one_rank_removes_what_a_save_on_more_ranks_has_left_in_the_folder(four):
    """Its metadata.json named the old files, and without it MindFormers would read all files that are there."""
    folder = four.write()
    save_file({"a.weight": numbered(4)}, folder / "mini-model-0000000-0000001.safetensors")
    write_seal(folder, 0, 1, 4)
    assert fault(folder) is None and [path.name for path in folder.glob("m*")] == [
        "mini-model-0000000-0000001.safetensors"
    ]
    np.testing.assert_array_equal(read_whole(folder).arrays["a.weight"], numbered(4))


def test_what_a_save_on_more_ranks_has_left_in_the_folder_is_not_read(four):
    """A worker without an attempt saves a step again into the folder of the save in which the run was killed."""
    folder = four.write()
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    write_refusal(folder, 3, "half a save")
    again = Saved(folder, 2)
    again.put("a.weight", numbered(4), (2,), [[0], [1]])
    for rank in (0, 1):
        again.held[again.file("model", rank)][f"experts.{PLACEMENT}"] = np.int32([1, 0])
    again.write()
    for rank in (0, 1):
        write_seal(folder, rank, 2, 4)
    assert fault(folder) is None and moved(read_placements(folder)) == ["experts"]
    np.testing.assert_array_equal(read_whole(folder).arrays["a.weight"], numbered(4))


def test_types_of_sixteen_bits_are_kept(tmp_path):
    saved = Saved(tmp_path / "iteration_00000001", 2)
    saved.put("a", numbered(4).astype("bfloat16"), (2,), [[0], [1]])
    whole = read_whole(saved.write())
    assert whole.arrays["a"].dtype == "bfloat16"


def lose_slice(four):
    del four.tensors["both.weight"]["chunk"][2]


def lose_storage(four):
    del four.storage[str(("both.weight", (3,)))]


def lose_tensor(four):
    del four.held[four.file("model", 3)]["head.weight"]


def lose_file(four):
    del four.held[four.file("model", 1)]


def another_shape(four):
    four.held[four.file("model", 3)]["head.weight"] = numbered(4, 4)


def uneven(four):
    four.tensors["both.weight"]["global_shape"] = [5, 6]


def one_slice_more(four):
    four.tensors["norm.weight"]["chunk"].append({"global_offset": [1], "local_shape": [4]})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_slice, "both.weight .* do not make up the whole"),
        (lose_storage, "both.weight: metadata.json names no file that holds slice 3"),
        (lose_tensor, "model-0000003-0000004.safetensors: the file does not hold head.weight"),
        (lose_file, "model-0000001-0000004.safetensors: the file does not hold embedding.weight"),
        (another_shape, r"head.weight has shape \[4, 4\], but a slice of it must have \[8, 2\]"),
        (uneven, "both.weight .* do not make up the whole"),
        (one_slice_more, "norm.weight .* do not make up the whole"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_told(four, spoil, message):
    spoil(four)
    with pytest.raises(CheckpointError, match=message):
        read_whole(four.write())


def test_what_is_no_checkpoint_is_refused(four, tmp_path):
    with pytest.raises(CheckpointError, match="no safetensors"):
        read_whole(tmp_path / "none")
    folder = four.write()
    (folder / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not MindFormers' metadata"):
        read_whole(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="several ranks wrote here"):
        read_whole(folder)
    (folder / "mini-model-0000002-0000004.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_whole(folder)


@st.composite
def layouts(draw):
    """World size, and tensors: cuts, length of a slice by axis, copies of each slice, the ranks in any order."""
    world = draw(st.sampled_from([1, 2, 4, 8]))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        axes = draw(st.integers(1, 3))
        cuts = [draw(st.sampled_from([1, 2, 3, 4])) for _ in range(axes)]
        lengths = [draw(st.integers(1, 3)) for _ in range(axes)]
        held_by = st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True)
        tensors.append((cuts, lengths, [draw(held_by) for _ in range(math.prod(cuts))]))
    return world, tensors


@given(layouts())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost_and_nothing_duplicated(tmp_path_factory, layout):
    world, tensors = layout
    saved, wholes = Saved(tmp_path_factory.mktemp("any") / "iteration_00000001", world), {}
    for number, (cuts, lengths, ranks_of) in enumerate(tensors):
        whole = numbered(*(count * length for count, length in zip(cuts, lengths, strict=True)))
        used, ranks = set(), []
        for held_by in ranks_of:  # a rank holds one slice of a tensor
            free = [rank for rank in held_by if rank not in used]
            used |= set(free)
            ranks.append(free)
        if not all(ranks):
            continue
        saved.put(f"tensor.{number}", whole, tuple(cuts), ranks)
        wholes[f"tensor.{number}"] = whole
    if not wholes:
        return
    read = read_whole(saved.write())
    assert read.arrays.keys() == wholes.keys() and read.differing == {}
    for name, whole in wholes.items():
        np.testing.assert_array_equal(read.arrays[name], whole)


NAME = "linear.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda content: content.update(state_dict_metadata=[]),
            "all: this entry does not describe a tensor",
        ),
        (
            lambda content: content["state_dict_metadata"].update({NAME: 2.5}),
            f"{NAME}: .* does not describe a tensor",
        ),
        (lambda content: _tensor(content).update(global_shape="4"), f"{NAME}: .* does not describe a tensor"),
        (
            lambda content: _tensor(content).update(axis_fragmentations=[0, 1]),
            f"{NAME}: .* does not describe a tensor",
        ),
        (
            lambda content: _tensor(content)["chunk"][0].update(local_shape=[2, [2]]),
            f"{NAME}: .* does not describe a tensor",
        ),
        (
            lambda content: _tensor(content)["chunk"][0].update(global_offset=[]),
            f"{NAME}: .* does not describe a tensor",
        ),
        (lambda content: _slice(content).pop("file_name"), f"{NAME}.*: .* does not describe a slice"),
        (lambda content: _slice(content).update(storage_rank=None), f"{NAME}.*: .* does not describe a slice"),
    ],
)
def test_damaged_metadata_are_refused(tmp_path, spoil, words):
    saved = Saved(tmp_path / "iteration_00000002", 2)
    saved.put(NAME, numbered(4, 2), (2, 1), [[0], [1]])
    folder = saved.write()
    assert open_stored(folder).tensors[NAME].cuts == (2, 1)
    file = folder / "metadata.json"
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words) as caught:
        _ = open_stored(folder).tensors
    assert str(file) in str(caught.value)


def _tensor(content):
    return content["state_dict_metadata"][NAME]


def _slice(content):
    (entry, *_), *_ = content["storage_data"].values()
    return entry


LAYER = "decoder.layers.1.mlp.experts"


def saved(folder, *slots):
    """A checkpoint of as many ranks as there are placements given, one a rank."""
    checkpoint = Saved(folder / "iteration_00000004", len(slots))
    checkpoint.put("norm.weight", numbered(4), (1,), [list(range(len(slots)))])
    for rank, placement in enumerate(slots):
        checkpoint.held[checkpoint.file("model", rank)][f"{LAYER}.placement"] = np.array(placement, np.int32)
    return checkpoint.write()


def test_a_folder_in_the_place_of_metadata_is_named(four):
    folder = four.write()
    (folder / "metadata.json").unlink()
    (folder / "metadata.json").mkdir()
    with pytest.raises(CheckpointError, match=r"metadata\.json: the file cannot be read \(Is a directory\)"):
        read_whole(folder)


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
    [
        (([0, 0, 1, 2],), "not a permutation of the experts' slots"),
        (([0, 1], [1, 0]), "differs from the placement in the files of other ranks"),
    ],
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


def test_muon_keeps_one_moment_of_a_layers_matrix_and_adamws_of_the_rest():
    matrix, vector = "decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
    muon, adam = {"type": "Muon"}, {"type": "AdamW"}
    assert moments_of(muon, matrix, 2) == (f"muon_m.{matrix}",)
    assert moments_of(adam, matrix, 2) == (f"adam_m.{matrix}", f"adam_v.{matrix}")
    for name, axes in ((vector, 1), ("embedding.word_embeddings.weight", 2), ("output_layer.weight", 2)):
        assert moments_of(muon, name, axes) == moments_of(adam, name, axes) == (f"adam_m.{name}", f"adam_v.{name}")
    assert {kind_of(each) for name in (matrix, vector) for each in moments_of(muon, name, 2)} == {"optimizer"}
    assert kind_of("decoder.layers.1.self_attention.core_attention.max_logits_val") == "other"


def test_the_prefix_of_the_files_does_not_say_what_is_in_them(tmp_path):
    """Weights in files with such a prefix (`checkpoint.prefix`) were taken for moments, and moments for weights."""
    saved = Saved(tmp_path, 1, "of-model-opt-2-model-1")
    saved.put("linear.weight", numbered(4), (1,), [[0]])
    saved.put("adam_m.linear.weight", numbered(4), (1,), [[0]], "opt")
    assert open_stored(saved.write(), weights_only=True).tensors.keys() == {"linear.weight"}


def test_gates_of_hyper_connections_are_weights():
    """Weights of hyper-connections do not end in `weight`; averages and merges left them out for that reason."""
    names = [f"decoder.layers.0.{cell}.{name}" for cell in SUBLAYERS for name in WEIGHTS]
    assert {kind_of(name) for name in names} == {"weights"} and len(names) == 6
    assert {kind_of(each) for name in names for each in moments_of({"type": "AdamW"}, name, 1)} == {"optimizer"}

"""metadata.json as a crash or an editor leaves it: refused by name, whatever stands in it."""

import json

import pytest

from plugins.errors import CheckpointError
from tests.tools.checkpoint.saved import Saved, numbered
from tools.checkpoint.stored import open_stored

NAME = "linear.weight"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: content.update(state_dict_metadata=[]), "all: MindFormers' metadata describe no tensor so"),
        (lambda content: content["state_dict_metadata"].update({NAME: 2.5}), f"{NAME}: .* no tensor so"),
        (lambda content: _tensor(content).update(global_shape="4"), f"{NAME}: .* no tensor so"),
        (lambda content: _tensor(content).update(axis_fragmentations=[0, 1]), f"{NAME}: .* no tensor so"),
        (lambda content: _tensor(content)["chunk"][0].update(local_shape=[2, [2]]), f"{NAME}: .* no tensor so"),
        (lambda content: _tensor(content)["chunk"][0].update(global_offset=[]), f"{NAME}: .* no tensor so"),
        (lambda content: _slice(content).pop("file_name"), f"{NAME}.*: .* no slice so"),
        (lambda content: _slice(content).update(storage_rank=None), f"{NAME}.*: .* no slice so"),
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

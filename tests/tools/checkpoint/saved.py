"""Checkpoint folders of many ranks, as MindFormers writes them."""

import json
import math

import numpy as np
from safetensors.numpy import save_file

from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.hugging_face_names import table
from tools.weights.hugging_face_sizes import sizes_of


class Saved:
    """A checkpoint folder as MindFormers writes it, slice by slice."""

    def __init__(self, folder, world_size, prefix="mini"):
        self.folder, self.world_size, self.prefix = folder, world_size, prefix
        self.held = {}
        self.tensors, self.storage = {}, {}
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, kind, rank):
        return f"{self.prefix}-{kind}-{rank:07d}-{self.world_size:07d}.safetensors"

    def put(self, name, whole, cuts, ranks_of, kind="model"):
        """Cut `whole` into `cuts`, and give slice i to `ranks_of[i]`."""
        part = tuple(length // count for length, count in zip(whole.shape, cuts, strict=True))
        chunks = []
        for place, index in enumerate(np.ndindex(*cuts)):
            spans = tuple(slice(i * length, (i + 1) * length) for i, length in zip(index, part, strict=True))
            chunks.append({"global_offset": [place], "local_shape": list(part)})
            entries = []
            for rank in ranks_of[place]:
                self.held.setdefault(self.file(kind, rank), {})[name] = np.array(whole[spans], order="C")
                entries.append(
                    {"file_name": self.file(kind, rank), "storage_rank": rank, "rank_group": list(ranks_of[place])}
                )
            self.storage[str((name, (place,)))] = entries
        known = {"global_shape": list(whole.shape), "axis_fragmentations": list(cuts), "chunk": chunks}
        self.tensors[name] = known

    def write(self):
        for name, arrays in self.held.items():
            save_file(arrays, self.folder / name)
        content = {"state_dict_metadata": self.tensors, "storage_data": self.storage}
        (self.folder / "metadata.json").write_text(json.dumps(content))
        return self.folder


def numbered(*shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def of_two_ranks(folder, recipe, states=("adam_m", "adam_v")):
    """Write what two ranks save of a recipe's model, without seals and with all values zero: experts are cut in two,
    all other tensors are copied. The optimizer keeps `states` of each weight.
    """
    checkpoint = Saved(folder, 2)
    for each in table(sizes_of(convert(View(recipe), load_schema()).fields, bias_updated=False)):
        cut = ".experts." in each.mindformers
        cuts = (1 + cut, *(1,) * (len(each.shape) - 1))
        ranks = [[0], [1]] if cut else [[0, 1]]
        checkpoint.put(each.mindformers, np.zeros(each.shape, np.float32), cuts, ranks)
        for prefix in states if each.trained else ():
            moment = f"{prefix}.{each.mindformers}"
            checkpoint.put(moment, np.zeros(each.shape, np.float32), cuts, ranks, kind="opt")
    checkpoint.put("global_step", np.zeros(1, np.int32), (1,), [[0, 1]], kind="opt")
    (folder / "common.json").write_text('{"step_num": 4, "global_step": 4, "global_batch_size": 8}')
    return checkpoint.write()

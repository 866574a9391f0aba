"""What is written here, MindFormers' own loader reads: the same bits as by its online way, in fewer files."""

from unittest import mock

import numpy as np
import pytest

from tests.tools.weights.reshard.drawn import LAYOUTS, ONE, draw, laid_out
from tools.checkpoint.whole import read_whole
from tools.recipe.load import load_recipe
from tools.weights.reshard.plan import plan_stored
from tools.weights.source import open_source


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Layout -> an iteration of the same numbers in it."""
    root = tmp_path_factory.mktemp("layouts")
    one = root / "drawn" / "checkpoint" / "iteration_00000003"
    draw(one)
    return {name: laid_out(one, recipe, root / name) for name, recipe in {**LAYOUTS, "one": ONE}.items()}


def loaded(folder, wanted, rank):
    """name -> array as MindFormers' ReshardLoader gives it to `rank` of the run that would save `wanted`; and files."""
    from mindformers.checkpoint import reshard
    from mindformers.checkpoint.metadata import load_metadata

    metas, _ = load_metadata(str(wanted / "metadata.json"))
    ranks = {name: each[0].layout.to_dict()["rank_list"] for name, each in metas.items() if name != "global_step"}
    own = {name: metas[name][0] for name in ranks if rank in ranks[name]}
    source, files = load_metadata(str(folder / "metadata.json"))
    opened, load = [], reshard.ms_load_checkpoint

    def counted(path, **options):
        opened.append(path)
        return load(path, **options)

    patched = mock.patch.object(reshard, "get_real_rank", lambda: rank)
    with patched, mock.patch.object(reshard, "ms_load_checkpoint", counted):
        found = reshard.ReshardLoader(str(folder), own, source, files).load()
    return {name: value.asnumpy() for name, value in found.items() if str(value.dtype) != "BFloat16"}, opened


@pytest.mark.parametrize(
    ("old", "new"), [("tp2", "zero"), ("zero", "pp2"), ("pp2", "ep2"), ("ep2", "one"), ("one", "tp2")]
)
def test_online_and_offline_give_each_rank_the_same_bits(folders, old, new):
    moves = plan_stored(open_source(folders[old]), load_recipe({**LAYOUTS, "one": ONE}[new])).plan.moves
    whole = read_whole(folders["one"]).arrays
    for rank in range(1 if new == "one" else 2):
        online, _ = loaded(folders[old], folders[new], rank)
        offline, opened = loaded(folders[new], folders[new], rank)
        held = {move.name: move for move in moves if rank in move.new.ranks and move.dtype == "F32"}
        assert online.keys() == offline.keys() == held.keys() and len(held) > 30
        for name, move in held.items():
            (place,) = [place for place, ranks in enumerate(move.new.holders) if rank in ranks]
            index = np.unravel_index(place, move.new.cuts)
            spans = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, move.new.part, strict=True))
            expected = np.ascontiguousarray(whole[name][spans])
            assert expected.tobytes() == online[name].tobytes() == offline[name].tobytes(), (name, rank)
        if new == "pp2":
            assert len(opened) == 2 and all(f"-{rank:07d}-0000002" in path for path in opened), "its own files alone"

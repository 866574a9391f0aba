"""Ulysses as MindFormers 1.9.0 compiles it: time and memory against sums by hand, and what it does not compile.

`tc3 dryrun` of the 105B recipe with equal widths, dp4 tp2 cp4: keys and values are gathered over cp 4 with
ulysses_degree_in_cp 4 as with 1, and what a forward hands to its backward is the same to the byte.
"""

from dataclasses import replace

import pytest

from plugins.errors import RecipeError
from tests.tools.search.space.test_candidates import request
from tools.ep_report.advise import advise
from tools.estimate.activations import saved
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster
from tools.estimate.time_model import TimeModel
from tools.model.architecture import Latent, Model
from tools.model.ulysses import require_ulysses
from tools.recipe.load import load_recipe
from tools.search.ranking.rank import rank
from tools.search.space.request import request_of

# heads of 64 + 64 numbers for queries and keys, 128 for values
MODEL = Model(
    ("dense",),
    hidden=2048,
    heads=32,
    kv_heads=32,
    head_dim=0,
    ffn=8192,
    vocab=32000,
    latent=Latent(0, 512, 64, 64, 128),
)
RUN = Configuration(MODEL, dp=1, tp=2, cp=4, layers=((1,),), sequence=32768, training_graph=True, keep_gathered=True)
TOKENS, HEADS = 32768 // 4, 32 // 2  # of a device
KEYS = TOKENS * HEADS * (128 + 128) * 2  # bytes of its keys and values; as many of queries and results
TIMES = TimeModel(cluster("atlas_800t_a2"))


def seconds(size, ranks, stride):
    """Of a collective, what is hidden beside computation left out."""
    return TIMES._collective(size, ranks, stride) * (1 - TIMES.reached.hidden)


def test_time_by_hand():
    def cp(degree):
        layer = TIMES.layer(replace(RUN, ulysses=degree), "dense")
        assert layer.backward.cp == layer.forward.cp  # what was gathered is kept
        return layer.forward.cp

    gathered = seconds(4 * KEYS, 4, 2)  # keys and values of the whole sequence
    assert cp(1) == pytest.approx(gathered)
    assert cp(4) == pytest.approx(gathered + seconds(2 * KEYS, 4, 2))  # queries, keys, values and results of a device
    assert cp(2) == pytest.approx(gathered + seconds(2 * KEYS, 2, 2))


def test_what_is_kept_is_the_whole_sequences_keys_whatever_the_degree():
    one, two, four = (saved(replace(RUN, ulysses=degree), "dense") for degree in (1, 2, 4))
    assert one == two == four
    assert one - saved(replace(RUN, cp=1, dp=4, sequence=32768 // 4), "dense") == 3 * KEYS


def test_without_ranks_for_the_heads_nothing_is_cut():
    assert replace(RUN, cp=1, dp=4, ulysses=4).head_parts == 1
    assert replace(RUN, cp=8, ulysses=4).head_parts == 4


def test_the_ranking_knows_it():
    asked = request(limits=["cp=4"], cap=1e15)
    plain, cut = (rank(replace(asked, ulysses=degree)) for degree in (1, 4))
    known = {tuple(cut.at(index).candidate): index for index in range(len(cut.seconds))}
    shared = [
        (index, known[key]) for index in range(len(plain.seconds)) if (key := tuple(plain.at(index).candidate)) in known
    ]
    assert shared and all(cut.seconds[there] != plain.seconds[here] for here, there in shared)


@pytest.mark.parametrize(
    ("file", "words"),
    [("telechat3_438b/context_32k", "values of 128 numbers as if"), ("telechat3_36b/pretrain_8k", "outside of MLA")],
)
def test_what_mindformers_does_not_compile_is_refused_before_the_search(file, words):
    recipe = load_recipe(f"recipes/{file}.yaml")
    asked = request_of(recipe, "atlas_800t_a2")
    require_ulysses(recipe, asked.base.model, asked.ulysses)
    recipe["parallel_config"]["ulysses_degree_in_cp"] = 2
    asked = request_of(recipe, "atlas_800t_a2")
    assert asked.base.ulysses == 2
    with pytest.raises(RecipeError, match=rf"ulysses_degree_in_cp: .*{words}.*write 1"):
        require_ulysses(recipe, asked.base.model, asked.ulysses)


def test_ep_report_knows_the_parts_of_heads():
    recipe = load_recipe("recipes/telechat3_438b/context_32k.yaml")
    whole = advise(recipe).modes["global"]
    recipe["parallel_config"]["ulysses_degree_in_cp"] = 2
    parts = advise(recipe).modes["global"]
    assert parts.whole.by_part["cp"] > whole.whole.by_part["cp"] and parts.exposed == whole.exposed

"""What several residual streams change in a prediction: work, bytes between stages, what a layer keeps."""

import copy

import pytest

from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_model import work
from tools.estimate.memory.training_graph import LAYER_INPUT, STREAMS, kept_parts
from tools.estimate.time_model import TimeModel
from tools.hardware import load_hardware
from tools.layout.resolve import resolve
from tools.model import CONNECTIONS, multiplied
from tools.recipe.load import load_recipe

A3 = load_hardware("atlas_900_a3")


def configuration(streams):
    recipe = copy.deepcopy(load_recipe("recipes/xing4_29b/pretrain_4k.yaml"))
    recipe["plugins"] = {"hyper_connections": {"streams": streams}}
    return from_recipe(resolve(recipe))


PLAIN, FOUR = configuration(1), configuration(4)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_work_of_a_layer_has_the_flops_of_the_model(kind):
    more = work(FOUR, kind).flops - work(PLAIN, kind).flops
    tokens, layers = FOUR.rank_tokens, FOUR.model.layers
    assert more * layers == pytest.approx(2 * tokens * multiplied(FOUR.model)[CONNECTIONS])


@pytest.mark.parametrize("kind", ["mtp", "head", "embedding"])
def test_what_has_one_stream_is_as_it_was(kind):
    assert work(FOUR, kind) == work(PLAIN, kind) and kept_parts(FOUR, kind) == kept_parts(PLAIN, kind)


def test_stages_send_four_times_as_much():
    model = TimeModel(A3)
    sent = [model.sending(FOUR.rank_tokens * width * 2, FOUR.devices) for width in (3584, 4 * 3584)]
    assert [model.transfer(PLAIN), model.transfer(FOUR)] == pytest.approx(sent) and sent[1] > 2 * sent[0]


def test_a_layer_keeps_its_streams_or_its_wider_input():
    assert FOUR.training_graph
    held, hidden = FOUR.rank_tokens, FOUR.model.hidden
    assert kept_parts(FOUR, "moe", "full") == {LAYER_INPUT: 2 * held * 4 * hidden}
    plain, four = kept_parts(PLAIN, "moe"), kept_parts(FOUR, "moe")
    more = four.pop(STREAMS)
    # of both sublayers: streams in bfloat16, and in float32 for the gates and for the sum, each a copy of its own
    assert 1 < more / (2 * held * 4 * hidden * (2 + 4 + 4)) < 1.2
    assert {name: four[name] - plain[name] for name in plain} == dict.fromkeys(plain, 0)

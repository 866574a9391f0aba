"""Layers that are recomputed one by one, in the sharded graph of a step of one stage (docs/memory.md)."""

import pytest
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore.context import ParallelMode

from plugins import telechat3_moe
from plugins.cpu_backend.model import on_cpu
from tests.plugins.test_output_biases import config


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mode", [ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.STAND_ALONE])
def test_a_graph_with_all_layers_in_one_has_layers_that_share_nothing(monkeypatch, whole, mode):
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)
    plain = config()
    plain.disable_lazy_inline = whole
    monkeypatch.setattr(telechat3_moe, "_get_parallel_mode", lambda: mode)
    layers = telechat3_moe.gpt_model(plain, on_cpu).decoder.layers
    shares_nothing = whole and mode == ParallelMode.SEMI_AUTO_PARALLEL
    assert {type(layer) for layer in layers} == {telechat3_moe.InTurn if shares_nothing else TransformerLayer}

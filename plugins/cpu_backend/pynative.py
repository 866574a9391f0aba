"""This module replaces code of MindFormers' training graph that works only in graphs, so that the model also runs in
PyNative on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindformers.parallel_core.training_graph.transformer.moe.shared_experts import SharedExpertMLPInterleaved
from mindspore import ops
from mindspore.ops.auto_generate import gen_ops_prim
from mindspore.ops.operations import debug_ops

Hook = tuple[Any, str, str, Callable[..., Any]]  # the arguments of plugins.private_hooks.replace


def stand_ins() -> list[Hook]:
    """Return the replacements of MindFormers' and MindSpore's functions that the current device needs."""
    found: list[Hook] = [
        (debug_ops.Morph, "__call__", "Morph is only supported in GRAPH_MODE", _call_morph),
        (SharedExpertMLPInterleaved, "construct", "output_bias = super().construct(hidden_states)", _shared_experts),
    ]
    if ms.get_context("device_target") == "CPU":
        found += [
            (gen_ops_prim.OneHotExt, "__call__", "pyboost_one_hot_ext", _call_one_hot),
            (gen_ops_prim.ZerosLikeExt, "__call__", "zeros_like_ext", _call_zeros_like),
        ]
    return found


def _call_morph(self, *args):
    """`ops.Morph` is a function that the graph compiler keeps whole until it has sharded the graph; here nothing is."""
    return self.__morph_fn__(*args)


def _call_one_hot(self, tensor, num_classes, on_value, off_value):
    """`OneHotExt` has a CPU kernel in graphs only; `OneHot` has one in PyNative too."""
    return ops.OneHot(self.axis)(tensor, num_classes, on_value, off_value)


def _call_zeros_like(self, tensor, dtype=None):
    """The same of `ZerosLikeExt`."""
    return ops.zeros_like(tensor, dtype=dtype)


def _shared_experts(self, hidden_states):
    """MindFormers unpacks three values into two names here, which the graph compiler lets pass and Python does not."""
    output, bias, _ = super(SharedExpertMLPInterleaved, self).construct(hidden_states)
    if self.use_shared_expert_gate:
        gate = self.sigmoid(self.shared_experts_gate(self.cast(hidden_states, self.router_dense_type)))
        output = self.mul_shared_gate(output, self.cast(gate, self.compute_dtype))
    return output, bias

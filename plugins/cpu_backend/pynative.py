"""This module replaces code of MindFormers' training graph that works only in graph mode, so that the model also runs
in PyNative mode on CPU, where hooks can read the output of each module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.transformer.moe.shared_experts import SharedExpertMLPInterleaved
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import gen_ops_prim
from mindspore.ops.operations import debug_ops

from plugins.private_hooks import replaced

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
    """Call the function of `ops.Morph`, which the graph compiler keeps whole until it has sharded the graph; in
    PyNative nothing is sharded.
    """
    return self.__morph_fn__(*args)


def _call_one_hot(self, tensor, num_classes, on_value, off_value):
    """Call `OneHot` instead of `OneHotExt`, which has a CPU kernel only in graphs."""
    return ops.OneHot(self.axis)(tensor, num_classes, on_value, off_value)


def _call_zeros_like(self, tensor, dtype=None):
    """Call `zeros_like` instead of `ZerosLikeExt`, which has a CPU kernel only in graphs."""
    return ops.zeros_like(tensor, dtype=dtype)


def _shared_experts(self, hidden_states):
    """Compute the shared experts; MindFormers' method unpacks three values into two names, which only the graph
    compiler accepts.
    """
    output, bias, _ = super(SharedExpertMLPInterleaved, self).construct(hidden_states)
    if self.use_shared_expert_gate:
        gate = self.sigmoid(self.shared_experts_gate(self.cast(hidden_states, self.router_dense_type)))
        output = self.mul_shared_gate(output, self.cast(gate, self.compute_dtype))
    return output, bias


@contextmanager
def pynative():
    """Switch to PyNative mode until the `with` block ends, and replace code that works only in graph mode."""
    with ExitStack() as stack:
        for hook in stand_ins():
            stack.enter_context(replaced(*hook))
        stack.callback(ms.set_context, mode=ms.GRAPH_MODE)
        ms.set_context(mode=ms.PYNATIVE_MODE)
        yield


@contextmanager
def counters_kept(network):
    """Save the parameters that a forward pass changes without training, such as the counters of experts' loads, and
    restore them when the `with` block ends.
    """
    counters = [(param, param.asnumpy().copy()) for param in network.get_parameters() if not param.requires_grad]
    try:
        yield
    finally:
        for param, value in counters:
            param.set_data(Tensor(value))


@contextmanager
def without_recomputation(network):
    """Let PyNative call the modules themselves, instead of the wrappers that it makes for recomputation in the backward
    pass: these wrappers lose outputs that are None.
    """
    made = [(cell, cell._recompute_cell) for _, cell in network.cells_and_names() if cell._recompute_cell is not None]
    try:
        for cell, _ in made:
            cell._recompute_cell = None
        yield
    finally:
        for cell, recomputed in made:
            cell._recompute_cell = recomputed


def module_outputs(network, batch):
    """Return the logits of a batch, and a dictionary from each module to its output [B, S, ...], in the order in which
    the modules compute.

    The network is in evaluation mode; the modules are those of tools/accuracy/reference/forward.py.
    """
    trace = Trace(network)
    try:
        with pynative(), without_recomputation(network):
            logits = network(*batch)
    finally:
        trace.close()
    return logits, trace.out


class Trace:
    """A `Trace` is a set of hooks on the modules of a GPTModel that record the modules' outputs as [B, S, ...]."""

    def __init__(self, network):
        self.out, self.handles = {}, []
        gpt = next(cell for _, cell in network.cells_and_names() if isinstance(cell, GPTModel))
        self._hook(gpt.embedding, "embedding")
        self._hook(gpt.decoder.final_layernorm, "final_norm")
        layers = list(gpt.decoder.layers)
        if gpt.mtp_process:
            layers += [layer.transformer_layer for layer in gpt.mtp.layers]
        for number, layer in enumerate(layers):
            where = f"layers.{number}"
            self._hook(layer, f"{where}.output")
            self._hook(layer.input_layernorm, f"{where}.input_norm")
            self._hook(layer.self_attention, f"{where}.attention")
            self._hook(layer.pre_mlp_layernorm, f"{where}.post_norm")
            self._hook(layer.mlp, f"{where}.mlp")
            core = layer.self_attention.core_attention
            self.handles.append(core.register_forward_hook(self._attention(where, core.heads, core.groups)))
            if hasattr(layer.mlp, "router"):
                if getattr(layer.mlp, "shared_experts", None) is not None:
                    self._hook(layer.mlp.shared_experts, f"{where}.shared_expert")
                experts = layer.mlp.router.expert_dim
                self.handles.append(layer.mlp.router.register_forward_hook(self._router(where, experts)))

    def close(self):
        """Remove the hooks from the modules."""
        for handle in self.handles:
            handle.remove()

    def _hook(self, cell, name):
        def note(cell, inputs, output):
            self._note(name, output[0] if isinstance(output, (tuple, list)) else output)

        self.handles.append(cell.register_forward_hook(note))

    def _attention(self, where, heads, groups):
        def note(cell, inputs, output):
            for name, tensor, count in zip(("query", "key", "value"), inputs[:3], (heads, groups, groups), strict=True):
                self._note(f"{where}.{name}", tensor.reshape(tensor.shape[0], tensor.shape[1], count, -1))
            self._note(f"{where}.context", output)

        return note

    def _router(self, where, experts):
        def note(cell, inputs, output):
            chosen, weights = (tensor.asnumpy().reshape(-1, tensor.shape[-1]) for tensor in output[:2])
            dense = np.zeros((len(chosen), experts), np.float32)
            np.put_along_axis(dense, chosen, weights, axis=1)
            self.out.setdefault(f"{where}.router", dense)

        return note

    def _note(self, name, tensor):
        """Return a tensor [S, B, ...] as [B, S, ...]."""
        self.out.setdefault(name, tensor.asnumpy().swapaxes(0, 1).copy())

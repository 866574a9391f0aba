"""This module enables `plugins.hyper_connections` of a recipe: it builds the layers of a model with n residual streams
(docs/hyper-connections.md).

The layers are replaced through MindFormers' own hook, the module of a layer's ModuleSpec. Between layers, and between
pipeline stages, the streams are one tensor [S, B, n h], in which the streams are concatenated. The first layer makes
this tensor from the embedding, and the last layer returns the mean of the streams, so that embedding, last norm, head
and MTP layer remain MindFormers' own.

The computations of single tokens (gates, Sinkhorn, sums over streams) run on each device for its own tokens, in `Morph`
as MindFormers' linear layers do; with sequence or context parallelism, tokens are split over these ranks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Constant, initializer
from mindspore.ops.operations import Morph

from plugins import telechat3_moe
from plugins.edited_classes import ALL
from plugins.hyper_connections.plan import CLIP, EPSILON, KEY, WEIGHTS, Settings, active, check, gates
from plugins.private_hooks import relies_on

for _line in (
    "attention_output_with_bias, attention_loss = self.self_attention(",
    "mlp_output, mlp_output_bias, extra_loss = self.mlp(",
    "return output, context, extra_loss, attention_loss",
):
    relies_on(TransformerLayer, _line)


def enable(config, settings) -> None:
    """Make models that are built later for `config` (a MindFormerConfig) have as many residual streams as `settings`
    gives.

    Raises:
        RecipeError: a setting is wrong, or the recipe has a feature that does not work with several streams.
    """
    ours = check(settings, config)
    active[:] = [ours] if ours.streams > 1 else []
    if ours.streams == 1:  # H_res is 1, and MindFormers' own layers add with it
        return
    telechat3_moe.use_edited_model(config, KEY, ALL)
    telechat3_moe.use_layer(HyperConnectedLayer, settings=ours)
    telechat3_moe.spare(KEY, WEIGHTS[1:])  # hc_fn is drawn


def along_of(config) -> str:
    """Return "cp_tp" if MindFormers splits sequences between layers over context- and tensor-parallel ranks, and
    "None" if it does not split them.
    """
    return "cp_tp" if config.sequence_parallel or (config.context_parallel_size or 1) > 1 else "None"


def _on_tokens(function: Callable[..., Any], shape: Callable[..., list[int]], dtype: Any, weights: int, along: str):
    """Return `function` as an operator of tensors [S, B, ...] followed by `weights` weights; each device computes its
    own tokens.

    Args:
        shape: a function from the shapes of all inputs to the shape of the result.
        dtype: the dtype of the result; None: that of the first input.
        along: the split of sequences ("cp_tp" or "None").
    """

    def infer_shape(*shapes):
        return shape(*shapes)

    def infer_dtype(*dtypes):
        return dtype if dtype is not None else dtypes[0]

    tokens = function.__code__.co_argcount - 1 - weights  # without self
    morph = Morph(function, infer_shape, infer_dtype).add_prim_attr("self_define_shard", True)
    whole = layout(along, "dp", "None")
    sizes = (("None", "None"), ("None",), ("None",))
    morph.shard(
        in_strategy=(*[whole] * tokens, *(layout(*size) for size in sizes[:weights])),
        out_strategy=(whole,),
    )
    return morph


class HyperConnection(nn.Cell):
    """A `HyperConnection` computes the gates of one sublayer, and the products of the residual streams with these
    gates.

    Args:
        config: TransformerConfig.
        settings: the settings of the plugin.
    """

    def __init__(self, config, settings: Settings):
        super().__init__()
        self.streams, self.hidden = settings.streams, config.hidden_size
        self.iterations, self.eps = settings.sinkhorn_iterations, config.layernorm_epsilon
        self.compute_dtype = config.compute_dtype
        self.residual_dtype = ms.float32 if config.fp32_residual_connection else config.compute_dtype
        count = gates(self.streams)
        self.hc_fn = Parameter(config.init_method((count, self.streams * self.hidden)), name="hc_fn")
        small = {"parallel_optimizer": False}  # as the weights of norms
        self.hc_base = Parameter(initializer("zeros", (count,), config.params_dtype), name="hc_base", **small)
        start = initializer(Constant(settings.initial_scale), (3,), config.params_dtype)
        self.hc_scale = Parameter(start, name="hc_scale", **small)
        self.product, self.mix_in, self.mix = ops.MatMul(transpose_b=True), ops.BatchMatMul(), ops.BatchMatMul()
        self.mean, self.sum, self.largest = (
            kind(keep_dims=True) for kind in (ops.ReduceMean, ops.ReduceSum, ops.ReduceMax)
        )
        along = along_of(config)
        wide, narrow = self.streams * self.hidden, self.hidden
        self.gates_of = _on_tokens(
            self.compute_gates, lambda x, *_: [x[0], x[1], count], ms.float32, weights=3, along=along
        )
        self.read = _on_tokens(self.compute_read, lambda x, _: [x[0], x[1], narrow], None, weights=0, along=along)
        self.write = _on_tokens(self.compute_write, lambda x, *_: [x[0], x[1], wide], None, weights=0, along=along)

    def construct(self, streams):
        """Return the gates float32 [S, B, 2n + n n] of the streams [S, B, n h]: H_pre, H_post, and H_res row by row."""
        return self.gates_of(streams, self.hc_fn, self.hc_base, self.hc_scale)

    def compute_gates(self, streams, fn, base, scale):
        """Return the gates of a device's tokens."""
        n, shape = self.streams, streams.shape
        x = ops.cast(streams, ms.float32)
        # divided by the root mean square behind the product, as mHC's section 4.3.1, so that no copy of x is kept
        inverse = ops.rsqrt(self.mean(ops.square(x), -1) + self.eps)
        flat = ops.reshape(ops.cast(streams, self.compute_dtype), (-1, shape[-1]))
        w = self.product(flat, ops.cast(fn, self.compute_dtype))
        w = ops.reshape(ops.cast(w, ms.float32), (shape[0], shape[1], n * (2 + n))) * inverse
        base = ops.cast(base, ms.float32)
        scale = ops.cast(scale, ms.float32)
        pre = ops.sigmoid(w[:, :, :n] * scale[0:1] + base[:n])
        post = ops.sigmoid(w[:, :, n : 2 * n] * scale[1:2] + base[n : 2 * n]) * 2.0
        mix = ops.reshape(w[:, :, 2 * n :] * scale[2:3] + base[2 * n :], (shape[0], shape[1], n, n))
        mix = ops.minimum(ops.maximum(mix, -CLIP), CLIP)
        mix = ops.exp(mix - ops.stop_gradient(self.largest(mix, -1)))
        for _ in range(self.iterations):
            mix = mix / (self.sum(mix, -1) + EPSILON)
            mix = mix / (self.sum(mix, -2) + EPSILON)
        return ops.concat((pre, post, ops.reshape(mix, (shape[0], shape[1], n * n))), -1)

    def compute_read(self, streams, found):
        """Return the input of a sublayer, H_pre x [S, B, h]."""
        shape = streams.shape
        x = ops.reshape(streams, (shape[0], shape[1], self.streams, self.hidden))
        pre = ops.cast(ops.reshape(found[:, :, : self.streams], (shape[0], shape[1], 1, self.streams)), x.dtype)
        return ops.reshape(self.mix_in(pre, x), (shape[0], shape[1], self.hidden))

    def compute_write(self, streams, output, found):
        """Return H_res x + H_post y [S, B, n h] for the output y [S, B, h] of a sublayer."""
        shape, n, kind = streams.shape, self.streams, self.residual_dtype
        x = ops.cast(ops.reshape(streams, (shape[0], shape[1], n, self.hidden)), kind)
        y = ops.cast(ops.reshape(output, (shape[0], shape[1], 1, self.hidden)), kind)
        post = ops.cast(ops.reshape(found[:, :, n : 2 * n], (shape[0], shape[1], n, 1)), kind)
        mix = ops.cast(ops.reshape(found[:, :, 2 * n :], (shape[0], shape[1], n, n)), kind)
        mixed = self.mix(mix, x) + post * y
        return ops.cast(ops.reshape(mixed, shape), self.compute_dtype)


class HyperConnectedLayer(TransformerLayer):
    """A `HyperConnectedLayer` is a transformer layer that reads from and writes to n residual streams.

    Args:
        settings: the settings of the plugin. The other arguments are those of TransformerLayer.
    """

    def __init__(self, config, submodules, layer_number=1, hidden_dropout=None, settings=None):
        super().__init__(config, submodules, layer_number, hidden_dropout)
        self.first, self.last = layer_number == 0, layer_number == config.num_layers - 1
        self.in_turn = telechat3_moe.recomputes_at_once(config)  # see `InTurn`
        self.attn_hc, self.ffn_hc = HyperConnection(config, settings), HyperConnection(config, settings)
        self.streams, self.hidden = settings.streams, config.hidden_size
        along = along_of(config)
        wide = self.streams * self.hidden
        self.average = ops.ReduceMean()
        self.expand = _on_tokens(self.copies, lambda x: [x[0], x[1], wide], None, weights=0, along=along)
        self.contract = _on_tokens(self.mean, lambda x: [x[0], x[1], self.hidden], None, weights=0, along=along)

    def copies(self, x):
        """Return n equal residual streams [S, B, n h], each of which is x [S, B, h]."""
        return ops.concat([x] * self.streams, -1)

    def mean(self, x):
        """Return the mean [S, B, h] of the streams [S, B, n h]."""
        shape = x.shape
        return self.average(ops.reshape(x, (shape[0], shape[1], self.streams, self.hidden)), 2)

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        context=None,
        context_mask=None,
        rotary_pos_emb=None,
        prefix_keys_values=None,
        extra_loss=0.0,
        actual_seq_len=None,
        sharded_key=None,
        sharded_value=None,
        attention_loss=0.0,
    ):
        """Return the streams [S, B, n h] after the layer (after the last layer their mean, [S, B, h]), and the other
        values that TransformerLayer returns.
        """
        if self.in_turn:
            rotary_pos_emb, actual_seq_len = telechat3_moe.after_input(hidden_states, rotary_pos_emb, actual_seq_len)
        streams = self.expand(hidden_states) if self.first else hidden_states
        found = self.attn_hc(streams)
        normed = self.input_layernorm(self.attn_hc.read(streams, found))
        if self.use_mla:
            output, attention_loss = self.self_attention(
                normed,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                prefix_keys_values=prefix_keys_values,
                actual_seq_len=actual_seq_len,
                attention_loss=attention_loss,
            )
        else:
            output = self.self_attention(
                normed,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                prefix_keys_values=prefix_keys_values,
                actual_seq_len=actual_seq_len,
            )
        bias = None
        if isinstance(output, tuple):
            output, bias = output
        if bias is not None:
            output = self.add_bias(output, bias)
        streams = self.attn_hc.write(streams, self.hidden_states_dropout(output), found)
        found = self.ffn_hc(streams)
        normed = self.pre_mlp_layernorm(self.ffn_hc.read(streams, found))
        output, bias, extra_loss = self.mlp(normed, extra_loss=extra_loss)
        if bias is not None:
            output = self.add_bias(output, bias)
        streams = self.ffn_hc.write(streams, self.hidden_states_dropout(output), found)
        if self.last:
            streams = self.contract(streams)
        return streams, context, extra_loss, attention_loss

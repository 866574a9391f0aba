"""Faults that were written, with the stage and module that each should get, before `tc3 accuracy diagnose` saw them.

docs/bug-zoo.md keeps the rate of their first judgement apart: whoever changes the command's rules afterwards, by these
faults, has seen them. Those of several ranks are run as MindSpore's sharded graph, or data parallel, on two CPU
processes, and compared with one process of the same model.
"""

from __future__ import annotations

import numpy as np

from tests.zoo.fault import BUILT, after_biases, before_training, fault, in_bfloat16, in_norm

ms = ops = SumExt = None  # set in the workers, by `fault.enable`

# one process


@fault(
    "Megatron-LM #5047", "the auxiliary loss is printed whole, and its gradient is half", "gradients", module="router"
)
def megatron_5047(config):
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    TopKRouter.right_balancing = TopKRouter._expert_load_balancing
    TopKRouter._expert_load_balancing = _half_gradient


def _half_gradient(self, scores, top_indices, alpha):
    loss = self.right_balancing(scores, top_indices, alpha)
    return loss * 0.5 + ops.stop_gradient(loss) * 0.5


@fault(
    "DiM-DiffusionMamba #5",
    "a resume starts the schedule's count anew",
    "resume",
    module="step",
    resumed=True,
    same_graph=True,
)
def dim_5(config):
    before_training("^global_step$", np.zeros_like)


@fault(
    "own: a default in place of the recipe's key",
    "the second moments decay by 0.999, and not by 0.95",
    *BUILT,
    "update",
)
def own_default_betas(config):
    from mindformers.core.optim.adamw import AdamW

    right = AdamW.__init__

    def wrong(self, *arguments, **more):
        right(self, *arguments, **{**more, "betas": (0.9, 0.999)})

    AdamW.__init__ = wrong


@fault("own: DeepSeek-V3 chooses by biased scores only", "experts are weighted by their biased scores, too", "forward")
def own_biased_weights(config):
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    TopKRouter.right_topk = TopKRouter._topk_with_bias
    TopKRouter._topk_with_bias = _weights_with_bias


def _weights_with_bias(self, router_prob, router_prob_with_bias):
    return self.right_topk(router_prob_with_bias, router_prob_with_bias)


@fault("torchtitan #3686", "the loads are never cleared", "routers", module="router", same_graph=True)
def torchtitan_3686(config):
    after_biases(lambda router, load, bias: router.expert_load.set_data(ms.Tensor(load)))


@fault("torchtitan #1506", "the biases are centred after each step", "routers", module="router", same_graph=True)
def torchtitan_1506(config):
    def centre(router, load, bias):
        new = np.array(router.expert_bias.asnumpy())
        router.expert_bias.set_data(ms.Tensor(new - new.mean(dtype=np.float32)))

    after_biases(centre)


@fault(
    "own: a checkpoint in the compute type",
    "a resume has weights that were rounded to bfloat16",
    "resume",
    resumed=True,
    same_graph=True,
)
def own_rounded_save(config):
    before_training(r"^(?!adam_).*\.weight\d?$", in_bfloat16)


@fault("own: clipping by weight", "each gradient is clipped by its own norm", "norm and clipping", module="norm")
def own_clipped_alone(config):
    in_norm(_clipped_alone)


def _clipped_alone(self, x):
    squares, clipped = (), ()
    for each in x:
        square = SumExt()(ops.square(each), ())
        squares += (square,)
        norm = ops.sqrt(square).reshape((1,))
        clipped += (each * ops.minimum(self.clip_norm / (norm + 1e-6), ops.ones_like(norm)),)
    return clipped, ops.sqrt(ops.stack(squares).sum()).reshape((1,))


@fault("mindformers 25e7961d7", "attention's scores are scaled by another mscale", "forward", module="attention")
def mindformers_25e7961d7(config):
    from mindformers.parallel_core.training_graph.transformer import multi_latent_attention

    multi_latent_attention._yarn_get_mscale = lambda scale, mscale: 1.1


@fault(
    "own: a key that nobody reads",
    "the experts' outputs are not multiplied by routed_scaling_factor",
    *BUILT,
    "forward",
)
def own_no_scaling_factor(config):
    config.model.model_config.routed_scaling_factor = 1.0


@fault("own: two rolls", "MTP rolls its inputs and labels by one token too many", "forward", module="mtp")
def own_rolled_twice(config):
    from mindformers.parallel_core.training_graph.transformer.multi_token_prediction import MultiTokenPredictionBlock

    MultiTokenPredictionBlock.right_roll = MultiTokenPredictionBlock.roll_tensor
    MultiTokenPredictionBlock.roll_tensor = _rolled_twice


def _rolled_twice(self, tensor):
    return self.right_roll(self.right_roll(tensor))


@fault("own: a name's pattern that matches too much", "the routers' weights are frozen", "start", module="router")
def own_frozen_router(config):
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    right = TopKRouter.__init__

    def wrong(self, *arguments, **more):
        right(self, *arguments, **more)
        self.weight.requires_grad = False

    TopKRouter.__init__ = wrong


# two ranks


@fault(
    "Megatron-LM #1446",
    "norms' gradients are not added up over tensor parallel ranks",
    "gradients",
    module="norms",
    layout="tp2",
)
def megatron_1446(config):
    from mindspore.ops._grad_experimental.grad_base import bprop_getters
    from mindspore.ops._grad_experimental.grad_comm_ops import get_bprop_mirror_operator
    from mindspore.ops.operations.comm_ops import _MirrorOperator

    @bprop_getters.register(_MirrorOperator)
    def of_norms_left_out(self):
        right = get_bprop_mirror_operator(self)

        def bprop(x, out, dout):
            return (dout,)

        return bprop if "norm" in str(self.get_attr_dict().get("mirror_user_id")) else right


@fault("mindformers 448e6ba01", "gradients are added up over the ranks, and not averaged", "gradients", layout="dp2")
def mindformers_448e6ba01(config):
    from mindspore.ops._grad_experimental.grad_base import bprop_getters
    from mindspore.ops.operations.comm_ops import _VirtualDiv

    @bprop_getters.register(_VirtualDiv)
    def undivided(self):
        def bprop(x, out, dout):
            return (dout,)

        return bprop


@fault(
    "pytorch #160285",
    "experts' gradients are twice as large with expert parallelism",
    "gradients",
    module="experts",
    layout="ep2",
)
def pytorch_160285(config):
    from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM

    FFNGroupedGEMM.right_experts = FFNGroupedGEMM.experts_forward
    FFNGroupedGEMM.experts_forward = _twice_the_gradient


def _twice_the_gradient(self, tokens, counts, w1, w2):
    twice1, twice2 = w1 * 2 - ops.stop_gradient(w1), w2 * 2 - ops.stop_gradient(w2)
    return self.right_experts(tokens, counts, twice1, twice2)


@fault("Automodel #1260", "the dispatched tokens' gradients do not come back", "gradients", layout="ep2")
def automodel_1260(config):
    from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM

    FFNGroupedGEMM.right_experts = FFNGroupedGEMM.experts_forward
    FFNGroupedGEMM.experts_forward = _nothing_comes_back


def _nothing_comes_back(self, tokens, counts, w1, w2):
    return self.right_experts(ops.stop_gradient(tokens), counts, w1, w2)


@fault(
    "own: RoPE by the rank's own positions",
    "rank 1 rotates its half of the sequence as rank 0 does",
    "gradients",
    module="attention",
    layout="cp2",
)
def own_first_positions(config):
    from mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding import (
        RotaryEmbedding,
    )
    from mindformers.tools.utils import get_real_group_size, get_real_rank

    RotaryEmbedding.right = RotaryEmbedding.construct
    RotaryEmbedding.ahead = (get_real_group_size() - get_real_rank()) * 32
    RotaryEmbedding.construct = _ahead


def _ahead(self, max_seq_len, offset=0, position_ids=None):
    return self.right(max_seq_len, offset + self.ahead, position_ids)


@fault(
    "Megatron-LM #5077",
    "a resume exchanges the shards of two ranks",
    "resume",
    resumed=True,
    layout="tp2",
    same_graph=True,
)
def megatron_5077(config):
    before_training(r"^(?!adam_).*linear_proj\.weight$", lambda value: np.roll(value, value.shape[1] // 2, 1))


@fault("mindformers 448e6ba01", "gradients of micro-batches are added up, and not averaged", "gradients", layout="pp2")
def mindformers_448e6ba01_micro_batches(config):
    from mindformers.wrapper.wrapper import MFPipelineWithLossScaleCell

    right = MFPipelineWithLossScaleCell.__init__

    def wrong(self, *arguments, **more):
        right(self, *arguments, **more)
        self.degree = 1 / self.micro_size

    MFPipelineWithLossScaleCell.__init__ = wrong


@fault(
    "own: a loop over the first stage's layers",
    "the last stage's biases never move",
    "routers",
    module="layers.1.router",
    layout="pp2",
    same_graph=True,
)
def own_first_stage_only(config):
    from mindformers.tools.utils import get_real_rank

    if get_real_rank():
        after_biases(lambda router, load, bias: router.expert_bias.set_data(ms.Tensor(bias)))


@fault(
    "torchtitan #166", "each data-parallel rank starts from its own weights", "start", layout="data2", same_graph=True
)
def torchtitan_166(config):
    from mindformers.tools.utils import get_real_rank

    def drawn(value):
        return np.random.default_rng(1).normal(0, 0.02, value.shape).astype(np.float32)

    if get_real_rank():
        before_training(r"^(?!adam_).*linear_proj\.weight$", drawn)


@fault(
    "torchtitan #1114",
    "each rank moves its biases by its own loads",
    "routers",
    module="router",
    layout="data2",
    same_graph=True,
)
def torchtitan_1114(config):
    from plugins.cpu_backend import model

    model.average_loads = lambda network: None


@fault(
    "own: the sampler takes rank 0 everywhere",
    "both data-parallel ranks read the same samples",
    "samples",
    module="data",
    layout="data2",
    same_graph=True,
)
def own_same_samples(config):
    from mindformers.dataset import base_dataset

    base_dataset.get_real_rank = lambda: 0


# one process with Muon


@fault(
    "own: a list of moments with AdamW's names only",
    "a resume goes on with fresh momentum of Muon's matrices",
    "resume",
    resumed=True,
    layout="muon",
    same_graph=True,
)
def own_fresh_momentum(config):
    before_training(r"^muon_m\.", np.zeros_like)


@fault(
    "own: the factor is taken of the wrong side",
    "Muon moves a matrix by the root of its shorter side",
    "update",
    layout="muon",
)
def own_shorter_side(config):
    from mindformers.core.optim import muon

    muon.max = _shorter


def _shorter(rows, columns):
    return rows if rows < columns else columns

"""Faults of public threads that were written, with the stage and module that each should get, by somebody who had not
read the rules of `tc3 accuracy diagnose`, and committed before the command had been run on any of them.
"""

from __future__ import annotations

import numpy as np

from tests.zoo.fault import BUILT, after_biases, fault, in_bfloat16, in_groups, in_monitor, in_norm, in_samples

ms = ops = Normal = initializer = apply_global_norm = get_square_sum = _adamw_opt = (
    None  # set in the workers, by `fault.enable`
)

# state that only later steps see


@fault(
    "torchtitan #4148",
    "tokens of an evaluation after step 2 count as loads of step 3",
    "routers",
    module="router",
    same_graph=True,
)
def torchtitan_4148(config):
    updates = []

    def evaluate(router, load, bias):
        updates.append(router)
        if updates.count(router) == 2:
            router.expert_load.set_data(ms.Tensor(load[::-1].copy()))

    after_biases(evaluate)


@fault("Megatron-LM #1482", "biases are kept in bfloat16", "routers", module="router", same_graph=True)
def megatron_1482(config):
    def rounded(router, load, bias):
        router.expert_bias.set_data(ms.Tensor(in_bfloat16(np.array(router.expert_bias.asnumpy()))))

    after_biases(rounded)


@fault("Fast-LLM #545", "norms are decayed as matrices are", *BUILT, "update", module="norms")
def fast_llm_545(config):
    def wrong(groups, weights):
        decay = max(group["weight_decay"] for group in groups)
        return [{**group, "weight_decay": decay} for group in groups]

    in_groups(wrong)


@fault("miles #1627", "a resume moves the schedule forward twice", "update", resumed=True)
def miles_1627(config):
    from mindformers.core.lr.lr_schedule import ConstantWarmUpLR

    ConstantWarmUpLR.right_rate = ConstantWarmUpLR.construct
    ConstantWarmUpLR.construct = _rate_ahead


def _rate_ahead(self, global_step):
    return self.right_rate(global_step + 2)


@fault("tt-metal #53212", "after a resume the moments' bias is corrected as in the first steps", "update", resumed=True)
def tt_metal_53212(config):
    from mindformers.core.optim.adamw import AdamW

    AdamW.construct = _corrected_anew


def _corrected_anew(self, gradients):
    decay, rate = self.get_weight_decay(), self.get_lr()
    self.assignadd(self.global_step, self.global_step_increase_tensor)
    moved = ops.partial(_adamw_opt, self.beta1, self.beta2, self.eps, self.global_step - 2, rate)
    moments = self.exp_avg, self.exp_avg_sq
    return self.hyper_map(moved, decay, self._parameters, gradients, moments[0], moments[1], self.optim_filter)


@fault(
    "torchtitan #2864",
    "after a resume the samples come in another order",
    "samples",
    module="data",
    resumed=True,
    same_graph=True,
)
def torchtitan_2864(config):
    in_samples(place=lambda idx: 31 - idx if idx >= 8 else idx)


# a step of one process


@fault(
    "Megatron-LM #3159",
    "MTP's gradient is divided by the tokens of the unrolled mask, and its loss is not",
    "gradients",
    module="mtp",
)
def megatron_3159(config):
    from mindformers.parallel_core.training_graph.loss_func import VocabParallelCrossEntropy

    right = VocabParallelCrossEntropy.__init__

    def wrong(self, *arguments, **more):
        right(self, *arguments, **more)
        self.share = 63 / 64 if more.get("loss_tag") == "mtp" else 1.0

    VocabParallelCrossEntropy.__init__ = wrong
    VocabParallelCrossEntropy.right_construct = VocabParallelCrossEntropy.construct
    VocabParallelCrossEntropy.construct = _under_weighted


def _under_weighted(self, vocab_parallel_logits, target, input_mask=None, label_smoothing=None):
    loss = self.right_construct(vocab_parallel_logits, target, input_mask, label_smoothing)
    return loss * self.share + ops.stop_gradient(loss) * (1 - self.share)


@fault("Automodel #1852", "the router's input is normalised twice", "forward", module="router")
def automodel_1852(config):
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    TopKRouter.right_gating = TopKRouter.gating
    TopKRouter.gating = _normalised_again


def _normalised_again(self, inputs):
    return self.right_gating(inputs * ops.rsqrt(ops.mean(ops.square(inputs), -1, True) + 1e-2))


# two ranks


@fault(
    "DeepSpeed #8478",
    "the experts' part of the global norm is averaged over the ranks that hold them",
    "norm and clipping",
    module="norm",
    layout="ep2",
)
def deepspeed_8478(config):
    in_norm(_experts_averaged)


def _experts_averaged(self, x):
    squares = ()
    for each in x:
        square = get_square_sum(each)
        squares += (square * 0.5 if len(each.shape) == 2 and each.shape[0] in (1024, 2048) else square,)
    norm = ops.sqrt(ops.addn(squares))
    limited = ops.select(self.greater_equal(norm, self.clip_norm), norm, self.clip_norm)
    return self.hyper_map(ops.partial(apply_global_norm, self.clip_norm, limited), x), norm


@fault(
    "Megatron-LM #1464",
    "attention's gradients of its values are wrong with context parallelism",
    "gradients",
    module="attention",
    layout="cp2",
)
def megatron_1464(config):
    from mindformers.parallel_core.training_graph.transformer.multi_latent_attention import MultiLatentAttention

    for kind in MultiLatentAttention.__subclasses__():
        kind.right_tensors = kind.get_query_key_value_tensors
        kind.get_query_key_value_tensors = _values_wrong


def _values_wrong(self, hidden_states, rotary_pos_emb=None):
    query, key, value = self.right_tensors(hidden_states, rotary_pos_emb=rotary_pos_emb)
    return query, key, value * 1.5 - ops.stop_gradient(value) * 0.5


@fault(
    "Megatron-Bridge #5840",
    "a row-parallel weight is drawn with the deviation of its shard",
    "start",
    module="attention",
    layout="tp2",
    same_graph=True,
)
def megatron_bridge_5840(config):
    in_monitor("on_train_begin", lambda step, number: _drawn_again(step, "linear_proj.weight", 0.02 * 2**0.5))


def _drawn_again(step, name, deviation):
    """The graph draws its weights when it is sharded: give those with `name` another initializer."""
    for each in step.optimizer.parameters:
        if name in each.name and len(each.shape) == 2:
            each.set_data(initializer(Normal(deviation), each.shape, each.dtype))


@fault(
    "Modalities #426",
    "each stage draws its weights with a seed of its own",
    "start",
    module="layers.1",
    layout="pp2",
    same_graph=True,
)
def modalities_426(config):
    from mindformers.tools.utils import get_real_rank

    if get_real_rank():
        in_monitor("on_train_begin", lambda step, number: _drawn_again(step, "layers.1.", 0.02))


@fault(
    "Megatron-LM #6492",
    "from step 2 on a rank does not gather what the other has updated",
    "update",
    module="attention",
    layout="data2",
    same_graph=True,
)
def megatron_6492(config):
    from mindformers.tools.utils import get_real_rank

    last = {}

    def stale(step, number):
        for each in step.optimizer.parameters:
            if get_real_rank() and each.name.endswith("linear_proj.weight"):
                if number > 1:
                    each.set_data(ms.Tensor(last[each.name]))
                last[each.name] = np.array(each.asnumpy())

    in_monitor("on_train_step_end", stale)

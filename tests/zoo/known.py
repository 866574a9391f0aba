"""The first faults: whoever wrote the rules of `tc3 accuracy diagnose` wrote these, and mended the rules by them."""

from __future__ import annotations

import numpy as np

from tests.zoo.fault import BUILT, before_training, fault, in_groups, in_norm, in_samples

ms = ops = SumExt = None  # set in the workers, by `fault.enable`

# optimizer


@fault("mindformers 1f24be654", "no weight decay after the first weight that has none", "update")
def mindformers_1f24be654(config):
    def wrong(groups, weights):
        names = [each.name for each in weights]
        without = {each.name for group in groups if not group["weight_decay"] for each in group["params"]}
        first = min(names.index(name) for name in without)
        decayed = next(group for group in groups if group["weight_decay"])
        late = [each for each in decayed["params"] if names.index(each.name) > first]
        decayed["params"] = [each for each in decayed["params"] if names.index(each.name) <= first]
        next(group for group in groups if not group["weight_decay"])["params"].extend(late)
        return groups

    in_groups(wrong)


@fault(
    "mindformers 25c381167",
    "weights of one dimension count twice in the global norm",
    "norm and clipping",
    module="norm",
)
def mindformers_25c381167(config):
    in_norm(_replicated_twice)


@fault("Megatron-LM #5916", "experts are left out of the global norm", "norm and clipping", module="norm")
def megatron_5916(config):
    in_norm(_without_experts)


def _replicated_twice(self, x):
    from_norms = ()
    for each in x:
        square = SumExt()(ops.square(each), ())
        from_norms += (square * 2 if len(each.shape) == 1 else square,)
    return _clipped(self, x, from_norms)


def _without_experts(self, x):
    squares = ()
    for each in x:
        square = SumExt()(ops.square(each), ())
        squares += (square * 0 if len(each.shape) == 2 and each.shape[0] == 2048 else square,)
    return _clipped(self, x, squares)


def _clipped(self, x, squares):
    norm = ops.sqrt(ops.stack(squares).sum()).reshape((1,))
    factor = ops.minimum(self.clip_norm / (norm + 1e-6), ops.ones_like(norm))
    clipped = ()
    for each in x:
        clipped += (each * factor,)
    return clipped, norm


@fault("own: the schedule's rate is multiplied twice", "weights move with half of the printed rate", "update")
def own_half_rate(config):
    from mindformers.core.optim.adamw import AdamW

    AdamW.right_lr = AdamW.get_lr
    AdamW.get_lr = _half_rate


def _half_rate(self):
    return self.right_lr() * 0.5


# routers


@fault(
    "mindformers dd5e945e8",
    "the loads are cleared before the biases are moved by them",
    "routers",
    module="router",
    same_graph=True,
)
def mindformers_dd5e945e8(config):
    from mindformers.core.callback.callback import TopkBiasBalanceCallback

    right = TopkBiasBalanceCallback._update_topk_bias

    def wrong(self, network):
        for each in network.get_parameters():
            if each.name.endswith("expert_load"):
                ops.assign(each, ops.zeros_like(each))
        right(self, network)

    TopkBiasBalanceCallback._update_topk_bias = wrong


@fault("own: DeepSeek-V3's rule with the other sign", "biases move towards loaded experts", *BUILT, "routers")
def own_bias_sign(config):
    config.model.model_config.moe_router_bias_update_rate *= -1


@fault(
    "own: the loop over routers ends with the decoder",
    "the MTP layer's bias never moves",
    "routers",
    module="mtp",
    same_graph=True,
)
def own_mtp_bias_stands(config):
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel

    right = GPTModel.update_topk_bias

    def wrong(self, steps=1):
        kept, self.config.mtp_num_layers = self.config.mtp_num_layers, 0
        found = right(self, steps)
        self.config.mtp_num_layers = kept
        return found

    GPTModel.update_topk_bias = wrong


@fault("own: counters under recomputation", "each pass counts its choices twice", "routers", module="router")
def own_loads_twice(config):
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    TopKRouter.right_load = TopKRouter._update_expert_load
    TopKRouter._update_expert_load = _load_twice


def _load_twice(self, expert_index):
    self.right_load(expert_index)
    self.right_load(expert_index)


@fault(
    "Megatron-LM #5798", "the sequence auxiliary loss is divided by the micro-batch size", "forward", module="router"
)
def megatron_5798(config):
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    TopKRouter.right_balancing = TopKRouter._expert_load_balancing
    TopKRouter._expert_load_balancing = _divided


def _divided(self, scores, top_indices, alpha):
    return self.right_balancing(scores, top_indices, alpha) / 4


# model


@fault("torchtitan #4117", "another RoPE than the recipe's", *BUILT, "forward")
def torchtitan_4117(config):
    config.model.model_config.rope_theta = 500.0


@fault("torchtitan #4054", "no gradient from the shared expert to what is below it", "gradients")
def torchtitan_4054(config):
    from mindformers.parallel_core.training_graph.transformer.moe.shared_experts import SharedExpertMLPInterleaved

    SharedExpertMLPInterleaved.right_construct = SharedExpertMLPInterleaved.construct
    SharedExpertMLPInterleaved.construct = _without_gradient


def _without_gradient(self, hidden_states):
    return self.right_construct(ops.stop_gradient(hidden_states))


@fault(
    "Megatron-LM #5844", "weights stand at another initialisation, and success is reported", "start", same_graph=True
)
def megatron_5844(config):
    def drawn(value):
        return np.random.default_rng(1).normal(0, 0.02, value.shape).astype(np.float32)

    before_training(r"^(?!adam_).*experts\.weight1$", drawn)


# data


@fault("mindformers 477621fde", "positions of another sample", "samples", module="data", same_graph=True)
def mindformers_477621fde(config):
    def wrong(sample, idx):
        tokens, labels, mask, positions, *more = sample
        return (tokens, labels, mask, np.roll(positions, idx % 4), *more)

    in_samples(wrong)


@fault(
    "mindformers c86dce8cc",
    "after a resume the data of earlier steps are read again",
    "samples",
    module="data",
    resumed=True,
    same_graph=True,
)
def mindformers_c86dce8cc(config):
    in_samples(place=lambda idx: idx - 4 if idx >= 4 else idx)


@fault(
    "transformers, 2024: accumulation",
    "half of the tokens are left out of the loss",
    "samples",
    module="data",
    same_graph=True,
)
def transformers_2024_loss_mask(config):
    def wrong(sample, idx):
        tokens, labels, mask, *more = sample
        mask = mask.copy()
        mask[: len(mask) // 2] = 0
        return (tokens, labels, mask, *more)

    in_samples(wrong)


# what a resume restores


@fault(
    "Megatron-LM #761",
    "the first moments of two experts are exchanged by a resume",
    "resume",
    module="experts",
    resumed=True,
    same_graph=True,
)
def megatron_761(config):
    def exchanged(value):
        half = value.shape[0] // 16
        value[:half], value[half : 2 * half] = value[half : 2 * half].copy(), value[:half].copy()
        return value

    before_training(r"^adam_m\..*experts\.weight1$", exchanged)


@fault(
    "KempnerForge #202",
    "a resume puts the first half of the experts into the second",
    "resume",
    module="experts",
    resumed=True,
    same_graph=True,
)
def kempnerforge_202(config):
    def twice(value):
        value[len(value) // 2 :] = value[: len(value) // 2]
        return value

    before_training(r"^(?!adam_).*experts\.weight", twice)


@fault(
    "MindFormers' default no_load_optim", "a resume goes on with fresh moments", "resume", resumed=True, same_graph=True
)
def own_fresh_moments(config):
    before_training(r"^adam_[mv]\.", np.zeros_like)


@fault(
    "own: a bias is in no checkpoint's list",
    "a resume leaves the routers' biases at 0",
    "resume",
    module="router",
    resumed=True,
    same_graph=True,
)
def own_bias_not_restored(config):
    before_training(r"\.expert_bias$", np.zeros_like)

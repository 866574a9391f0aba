"""Public faults that trained wrongly without an error, each put into a run of one process by a function named after its
source.

A fault is injected when the plugins have been enabled and before MindFormers builds the model, the data, the optimizer
and the callbacks. What a fault replaces is compiled with the graph, so that its functions stand in this file, and not
in lambdas. The recipe that the run writes is the one without the fault: whoever diagnoses does not see it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FAULTS: dict[str, Fault] = {}
BUILT = ("configuration",)  # of faults in what is built: this rung came after them, and names them better


@dataclass(frozen=True)
class Fault:
    """This is one fault.

    Args:
        source: where it was reported. what: it does. inject: puts it in; called with the run's MindFormerConfig.
        rungs: of the ladder that name it rightly. module: a part of the right module's name.
        resumed: whether the run with the fault goes on from the second step of the faultless one.
        layout: of `tests/zoo/run.py` in which it is executed; "" is one process.
        same_graph: whether it leaves the compiled graph as it is, so that the faultless one is loaded.
        unseen: whether it was written before the rules of the command had seen it.
    """

    source: str
    what: str
    inject: Callable[[Any], None]
    rungs: tuple[str, ...]
    module: str = ""
    resumed: bool = False
    layout: str = ""
    same_graph: bool = False
    unseen: bool = False


def fault(source: str, what: str, *rungs: str, **more: Any):
    """Return a decorator that adds a function to `FAULTS` under its name."""

    def add(inject: Callable[[Any], None]) -> Callable[[Any], None]:
        unseen = inject.__module__.endswith("unseen")
        FAULTS[inject.__name__] = Fault(source, what, inject, rungs, unseen=unseen, **more)
        return inject

    return add


# optimizer


@fault("mindformers 1f24be654", "no weight decay after the first weight that has none", "update")
def mindformers_1f24be654(config):
    from mindformers.trainer import base_trainer

    right = base_trainer.get_optimizer_grouped_parameters

    def wrong(model=None, **more):
        groups = right(model=model, **more)
        names = [each.name for each in model.trainable_params()]
        without = {each.name for group in groups if not group["weight_decay"] for each in group["params"]}
        first = min(names.index(name) for name in without)
        decayed = next(group for group in groups if group["weight_decay"])
        late = [each for each in decayed["params"] if names.index(each.name) > first]
        decayed["params"] = [each for each in decayed["params"] if names.index(each.name) <= first]
        next(group for group in groups if not group["weight_decay"])["params"].extend(late)
        return groups

    base_trainer.get_optimizer_grouped_parameters = wrong


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


def in_norm(construct):
    from mindformers.core.clip_grad import ClipGradNorm

    ClipGradNorm.construct = construct


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
    def spoil(step):
        for each in step.optimizer.parameters:
            if "experts.weight1" in each.name:
                each.set_data(ms.Tensor(np.random.default_rng(1).normal(0, 0.02, each.shape).astype(np.float32)))

    before_training(spoil)


# data


@fault("mindformers 477621fde", "positions of another sample", "samples", module="data", same_graph=True)
def mindformers_477621fde(config):
    def wrong(sample, idx):
        tokens, labels, mask, positions, *more = sample
        return (tokens, labels, mask, np.roll(positions, idx % 4), *more)

    _samples(wrong)


@fault(
    "mindformers c86dce8cc",
    "after a resume the data of earlier steps are read again",
    "samples",
    module="data",
    resumed=True,
    same_graph=True,
)
def mindformers_c86dce8cc(config):
    _samples(None, 4)


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

    _samples(wrong)


def _samples(change, back=0):
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset

    right = GPTDataset.__getitem__

    def wrong(self, idx):
        sample = right(self, idx - back if idx >= back else idx)
        return change(sample, idx) if change else sample

    GPTDataset.__getitem__ = wrong


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
    def spoil(step):
        for each in step.optimizer.get_parameters():
            if each.name.startswith("adam_m.") and "experts.weight1" in each.name:
                value = np.array(each.asnumpy())
                half = value.shape[0] // 16
                value[:half], value[half : 2 * half] = value[half : 2 * half].copy(), value[:half].copy()
                each.set_data(ms.Tensor(value))

    before_training(spoil)


@fault(
    "KempnerForge #202",
    "a resume puts the first half of the experts into the second",
    "resume",
    module="experts",
    resumed=True,
    same_graph=True,
)
def kempnerforge_202(config):
    def spoil(step):
        for each in step.optimizer.parameters:
            if "experts.weight" in each.name:
                value = np.array(each.asnumpy())
                half = value.shape[0] // 2
                value[half:] = value[:half]
                each.set_data(ms.Tensor(value))

    before_training(spoil)


@fault(
    "MindFormers' default no_load_optim", "a resume goes on with fresh moments", "resume", resumed=True, same_graph=True
)
def own_fresh_moments(config):
    def spoil(step):
        for each in step.optimizer.get_parameters():
            if each.name.startswith(("adam_m.", "adam_v.")):
                each.set_data(ms.Tensor(np.zeros(each.shape, np.float32)))

    before_training(spoil)


@fault(
    "own: a bias is in no checkpoint's list",
    "a resume leaves the routers' biases at 0",
    "resume",
    module="router",
    resumed=True,
    same_graph=True,
)
def own_bias_not_restored(config):
    def spoil(step):
        for each in step.network.get_parameters():
            if each.name.endswith("expert_bias"):
                each.set_data(ms.Tensor(np.zeros(each.shape, np.float32)))

    before_training(spoil)


def before_training(spoil):
    """Call `spoil` with the train step when a training begins, before it is recorded."""
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from plugins.private_hooks import train_step

    kind = MindFormerModuleType.CALLBACK
    monitor = MindFormerRegister.get_cls(kind, "MFLossMonitor")

    class Spoiling(monitor):
        def on_train_begin(self, run_context):
            spoil(train_step(run_context.original_args()))
            super().on_train_begin(run_context)

    MindFormerRegister.register_cls(Spoiling, kind, alias="MFLossMonitor")


def enable(config, name) -> None:
    """Put one fault into a run; called as a plugin's `enable`."""
    global ms, ops, SumExt
    import mindspore as ms
    from mindspore import ops
    from mindspore.ops.auto_generate import SumExt

    from tests.zoo import unseen

    unseen.compiled_with()
    if name:
        FAULTS[name].inject(config)

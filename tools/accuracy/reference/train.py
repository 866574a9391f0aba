"""This module trains Hugging Face's DeepseekV3ForCausalLM with MTP layers, counts of the tokens of each expert, and a
trace of every module's output. The module needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from tools.accuracy.reference.start import Hyper
from tools.weights.hugging_face_names import Arrays
from tools.weights.hugging_face_sizes import Sizes

Loads = Mapping[int, np.ndarray]
_ATTENTION = "tc3_traced"
PARTS = ("loss", "lm_loss", "mtp_loss", "aux_loss")
BIAS = "e_score_correction_bias"


class MtpLayer(nn.Module):
    """An `MtpLayer` is DeepSeek-V3's multi-token prediction module (section 2.2 of its technical report), under the
    names of its checkpoints, without the copies of embedding and head.
    """

    def __init__(self, config: DeepseekV3Config, number: int):
        super().__init__()
        self.enorm = deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer = deepseek.DeepseekV3DecoderLayer(config, number)
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.layer = [layer]  # in a list: its modules are registered above, under the checkpoint's names
        self.shared_head = nn.ModuleDict({"norm": deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Return hidden states [B, S, h], from the next tokens' embeddings and the main model's states."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.shared_head["norm"](self.layer[0](joined, **attention))


class Reference:
    """A `Reference` is the Hugging Face model with given weights, which runs in float32.

    Attributes:
        model: DeepseekV3ForCausalLM; MTP layers are appended to its layers, and it does not run them itself.
        routed: layer -> (scores [T, E], chosen experts [T, k], weights [T, k]) of the last forward pass.
    """

    def __init__(self, sizes: Sizes, weights: Arrays):
        self.sizes = sizes
        self.routed: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.trace: dict[str, torch.Tensor] | None = None
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = self._attend
        config = DeepseekV3Config(**sizes.hf)
        config._attn_implementation = _ATTENTION
        self.model = DeepseekV3ForCausalLM(config).float()
        self.mtp = [MtpLayer(config, sizes.layers + layer) for layer in range(sizes.mtp_layers)]
        self.model.model.layers.extend(self.mtp)
        for name, module in self.model.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = sizes.latent_eps
            if isinstance(module, deepseek.DeepseekV3TopkRouter):
                module.register_forward_hook(self._remember_routing(int(name.split(".")[2])))
        tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
        self.model.load_state_dict(tensors, strict=True)
        self._trace_modules()

    def losses(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the `loss`, its parts, and the `logits` [B, S, v] of a batch of `input_ids` and `labels` (already
        shifted), int64 [B, S], and `loss_mask`, float32 [B, S].
        """
        ids, labels, mask = batch["input_ids"], batch["labels"], batch["loss_mask"]
        inner = self.model.model
        hidden = inner(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden)
        parts = {"lm_loss": masked_mean(logits, labels, mask), "mtp_loss": torch.zeros(())}
        for layer in self.mtp:
            ids, labels, mask = _rolled(ids), _rolled(labels), _rolled(mask)
            hidden = layer(inner.embed_tokens(ids), hidden, **self._attention_arguments(hidden))
            loss = masked_mean(self.model.lm_head(hidden), labels, mask)
            parts["mtp_loss"] = parts["mtp_loss"] + self.sizes.mtp_factor / len(self.mtp) * loss
        batch_size = len(ids)
        balance = [self._balance(scores, chosen, batch_size) for scores, chosen, _ in self.routed.values()]
        parts["aux_loss"] = sum(balance, torch.zeros(()))  # of no router, if all layers are dense
        return {"loss": parts["lm_loss"] + parts["mtp_loss"] + parts["aux_loss"], **parts, "logits": logits}

    def _balance(self, scores: torch.Tensor, chosen: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Return DeepSeek-V3's sequence-wise balance loss (equations 17 to 20), mean over the samples."""
        experts, topk = scores.shape[-1], chosen.shape[-1]
        share = (scores / scores.sum(-1, keepdim=True)).view(batch_size, -1, experts).mean(1)
        picked = nn.functional.one_hot(chosen, experts).sum(1).view(batch_size, -1, experts)
        frequency = experts / topk * picked.float().mean(1)
        return self.sizes.aux_coefficient * (frequency * share).sum(-1).mean()

    def counts(self, layer: int) -> torch.Tensor:
        """Return how many tokens of the last forward pass chose each expert of a layer."""
        scores, chosen, _ = self.routed[layer]
        return torch.bincount(chosen.flatten(), minlength=scores.shape[-1])

    def move_bias(self, loads: Loads) -> None:
        """Move the routers' biases: down for an expert with more than its share of the tokens, up for one with less.
        MindFormers' `loads` (layer -> share of each expert, [E]), if given, replace the reference's own counts, so that
        only the rule is compared.
        """
        for layer, (scores, chosen, _) in self.routed.items():
            counts = self.counts(layer)
            if layer in loads:
                counts = torch.from_numpy(np.round(loads[layer] * chosen.numel()))
            short = torch.sign(chosen.numel() - counts * scores.shape[-1])  # integers: equal is exactly equal
            gate = self.model.model.layers[layer].mlp.gate
            gate.e_score_correction_bias += self.sizes.bias_rate * short.float()

    def _attention_arguments(self, hidden: torch.Tensor) -> dict[str, Any]:
        positions = torch.arange(hidden.shape[1])[None]
        return {
            "attention_mask": causal_mask(hidden.shape[1]),
            "position_embeddings": self.model.model.rotary_emb(hidden, positions),
        }

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        mask = causal_mask(query.shape[2])
        out = deepseek.eager_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        if self.trace is not None:
            where = f"layers.{module.layer_idx}"
            for name, tensor in (("query", query), ("key", key), ("value", value)):
                self.trace[f"{where}.{name}"] = tensor.transpose(1, 2)
            self.trace[f"{where}.context"] = out[0].flatten(2)
        return out

    def _remember_routing(self, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            chosen, weights = output
            scores = nn.functional.linear(inputs[0].reshape(-1, module.weight.shape[1]), module.weight).sigmoid()
            self.routed[layer] = (scores, chosen, weights)
            self._note(f"layers.{layer}.router", torch.zeros_like(scores).scatter(1, chosen, weights))

        return hook

    def _trace_modules(self) -> None:
        inner = self.model.model
        names: dict[Any, str] = {inner.embed_tokens: "embedding", inner.norm: "final_norm"}
        for number, layer in enumerate(inner.layers):
            where = f"layers.{number}"
            names[layer.layer[0] if isinstance(layer, MtpLayer) else layer] = f"{where}.output"
            names[layer.input_layernorm] = f"{where}.input_norm"
            names[layer.self_attn] = f"{where}.attention"
            names[layer.post_attention_layernorm] = f"{where}.post_norm"
            names[layer.mlp] = f"{where}.mlp"
            if self.sizes.is_moe(number):
                names[layer.mlp.shared_experts] = f"{where}.shared_expert"
        for module, name in names.items():
            module.register_forward_hook(self._noting(name))

    def _noting(self, name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._note(name, output[0] if isinstance(output, tuple) else output)

        return hook

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if self.trace is not None:
            self.trace.setdefault(name, tensor)


def masked_mean(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the tokens that the loss mask includes."""
    each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def causal_mask(length: int) -> torch.Tensor:
    """Return the attention mask [1, 1, S, S]: 0 where a token may attend, and the smallest number elsewhere."""
    smallest = torch.finfo(torch.float32).min
    return torch.full((length, length), smallest).triu(1)[None, None]


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor[:, 1:], torch.zeros_like(tensor[:, :1])), dim=1)


def run(reference: Reference, hyper: Hyper, batches: Arrays) -> Arrays:
    """Train the reference on `batches` (each column [steps, B, S]), and return the arrays of a record."""
    record = forward(reference, batches)
    model = reference.model
    optimizer = optimizer_of(model, hyper)
    curves: dict[str, list[float]] = {name: [] for name in (*PARTS, "global_norm", "learning_rate")}
    for index, rate in enumerate(hyper.rates):
        losses, norm = differentiate(reference, optimizer, batch_of(batches, index))
        if index == 0:
            gradients = {name: array(weight.grad) for name, weight in model.named_parameters()}
            record.update({f"gradient/{name}": gradient for name, gradient in gradients.items()})
        step(reference, optimizer, hyper, rate)
        for name in PARTS:
            curves[name].append(losses[name])
        curves["global_norm"].append(norm)
        curves["learning_rate"].append(rate)
        if index + 1 == hyper.first_update:
            record.update({f"updated/{name}": array(value) for name, value in model.state_dict().items()})
    return {**record, **{f"curve/{name}": np.array(values) for name, values in curves.items()}}


def single_steps(
    reference: Reference, hyper: Hyper, batches: Arrays, states: Sequence[dict[str, Arrays]], loads: Sequence[Arrays]
) -> Arrays:
    """Compute every training step separately, each from the state that the MindFormers training had before this step,
    so that rounding errors do not accumulate over steps.

    Args:
        states: the states before each step and after the last one: `weight`, and Adam's `moment` and `square`, by name.
        loads: for each step, layer -> share of the choices that each expert got on the other side, [E].

    Returns:
        Arrays [steps]: `loss`; `update`, the distance of the next weights from the other side's, relative to the size
            of the update (L2 over all weights); `bias`, the largest difference of a router's bias, updated with the
            other side's counts if these differ; `moved`, the number of choices that went to another expert, out of
            `choices`; `tokens`, the number of tokens in the loss.
    """
    model = reference.model
    out: dict[str, list[float]] = {name: [] for name in ("loss", "update", "bias", "moved", "choices", "tokens")}
    for index, rate in enumerate(hyper.rates):
        before, after = states[index]["weight"], states[index + 1]["weight"]
        model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in before.items()}, strict=True)
        optimizer = optimizer_of(model, hyper)
        for name, weight in model.named_parameters() if index else ():
            optimizer.state[weight] = {
                "step": torch.tensor(float(index)),
                "exp_avg": torch.from_numpy(states[index]["moment"][name].copy()),
                "exp_avg_sq": torch.from_numpy(states[index]["square"][name].copy()),
            }
        batch = batch_of(batches, index)
        losses, _ = differentiate(reference, optimizer, batch)
        theirs = {int(layer): load for layer, load in loads[index].items()}
        step(reference, optimizer, hyper, rate, theirs)
        got = {name: array(value) for name, value in model.state_dict().items()}
        out["loss"].append(losses["loss"])
        out["update"].append(_relative_step(got, before, after))
        biases = [name for name in got if name.endswith(BIAS)]
        out["bias"].append(max((float(np.abs(got[name] - after[name]).max()) for name in biases), default=0.0))
        moved, choices = _moved(reference, loads[index])
        out["moved"].append(moved)
        out["choices"].append(choices)
        out["tokens"].append(float(batch["loss_mask"].sum()))
    return {name: np.array(values) for name, values in out.items()}


def differentiate(
    reference: Reference, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> tuple[dict[str, float], float]:
    """Return the parts of a batch's loss, and the global gradient norm. After the call, each weight of the model holds
    its gradient.
    """
    optimizer.zero_grad()
    losses = reference.losses(batch)
    losses["loss"].backward()
    for weight in reference.model.parameters():  # an expert without tokens: MindFormers' gradient is 0, and decays
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in reference.model.parameters()]
    norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
    return {name: float(losses[name].detach()) for name in PARTS}, float(norm)


def step(
    reference: Reference, optimizer: torch.optim.Optimizer, hyper: Hyper, rate: float, loads: Loads | None = None
) -> None:
    """Clip the gradients, update the weights, and update the routers' biases (by `move_bias`, which uses `loads` if
    they are given).
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    if hyper.clip:
        torch.nn.utils.clip_grad_norm_(reference.model.parameters(), hyper.clip)
    optimizer.step()
    with torch.no_grad():
        reference.move_bias(loads or {})


def forward(reference: Reference, batches: Arrays) -> Arrays:
    """Return losses, logits and every traced output of the first batch, without training."""
    reference.trace = {}
    with torch.no_grad():
        losses = reference.losses(batch_of(batches, 0))
    record = {f"trace/{name}": array(tensor) for name, tensor in reference.trace.items()}
    reference.trace = None
    for name in [name for name in record if name.endswith(".router")]:  # [T, E] -> [B, S, E]
        record[name] = record[name].reshape(*batches["input_ids"].shape[1:], -1)
    record["trace/logits"] = array(losses["logits"])
    return record


def optimizer_of(model: torch.nn.Module, hyper: Hyper) -> torch.optim.AdamW:
    """Return torch's AdamW for a model; weight decay is not applied to weights of one dimension."""
    weights = list(model.parameters())
    decayed = [weight for weight in weights if weight.dim() > 1]
    others = [weight for weight in weights if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": hyper.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=hyper.betas, eps=hyper.eps, foreach=False)


def batch_of(batches: Arrays, index: int) -> dict[str, torch.Tensor]:
    """Return the batch of one step as tensors [B, S]."""
    ids, labels = (torch.from_numpy(batches[name][index].astype(np.int64)) for name in ("input_ids", "labels"))
    return {"input_ids": ids, "labels": labels, "loss_mask": torch.from_numpy(batches["loss_mask"][index])}


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return a torch tensor as a float32 array."""
    return tensor.detach().float().numpy().copy()


def _relative_step(got: Arrays, before: Arrays, after: Arrays) -> float:
    """Return L2 distance of two states of all weights, over the distance that the other side moved."""
    weights = [name for name in got if not name.endswith(BIAS)]
    apart = np.sqrt(sum(float(np.square(got[name] - after[name], dtype=np.float64).sum()) for name in weights))
    far = np.sqrt(sum(float(np.square(after[name] - before[name], dtype=np.float64).sum()) for name in weights))
    return float(apart / far) if far else float(apart)


def _moved(reference: Reference, loads: Arrays) -> tuple[float, float]:
    """Return (choices that went to another expert, choices) of the last forward pass, over all layers."""
    moved = choices = 0.0
    for layer, (_, chosen, _) in reference.routed.items():
        choices += chosen.numel()
        if str(layer) in loads:
            theirs = torch.from_numpy(np.round(loads[str(layer)] * chosen.numel()))
            moved += float((reference.counts(layer) - theirs).abs().sum()) / 2
    return moved, choices

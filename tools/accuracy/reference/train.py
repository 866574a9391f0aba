"""Forward, backward, AdamW: the reference's run, recorded. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tools.accuracy.reference.hyper import Hyper
from tools.accuracy.reference.model import Loads, Reference
from tools.weights.hugging_face.names import Arrays

PARTS = ("loss", "lm_loss", "mtp_loss", "aux_loss")
BIAS = "e_score_correction_bias"


def run(reference: Reference, hyper: Hyper, batches: Arrays) -> Arrays:
    """Train on `batches` and record what `tools.accuracy.align.record` describes.

    Args:
        batches: `input_ids`, `labels` and `loss_mask`, each [steps, B, S].
    """
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
    """Every step by itself, from the other side's state: what no accumulated rounding can excuse.

    Args:
        states: before each step and after the last: `weight`, and Adam's `moment` and `square`, by name.
        loads: for each step, layer -> share of the choices that each expert got on the other side, [E].

    Returns:
        `loss` of each step; `update`, how far the next weights are from the other side's, relative to how far they
        moved (L2 over all); `bias`, the largest difference of a router's bias, moved by the other side's counts where
        these differ; `moved`, choices of an expert that went to another one, out of `choices`; `tokens` that count in
        the loss. Each [steps].
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
        out["bias"].append(max(float(np.abs(got[name] - after[name]).max()) for name in got if name.endswith(BIAS)))
        moved, choices = _moved(reference, loads[index])
        out["moved"].append(moved)
        out["choices"].append(choices)
        out["tokens"].append(float(batch["loss_mask"].sum()))
    return {name: np.array(values) for name, values in out.items()}


def differentiate(
    reference: Reference, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> tuple[dict[str, float], float]:
    """(parts of the loss, global norm) of a batch; the gradients stay in the weights."""
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
    """Clip, update the weights, move the routers' biases; `loads` as in `Reference.move_bias`."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if hyper.clip:
        torch.nn.utils.clip_grad_norm_(reference.model.parameters(), hyper.clip)
    optimizer.step()
    with torch.no_grad():
        reference.move_bias(loads or {})


def forward(reference: Reference, batches: Arrays) -> Arrays:
    """The first batch without training: logits and every module's output."""
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
    """torch's AdamW; weights of one dimension are not decayed."""
    weights = list(model.parameters())
    decayed = [weight for weight in weights if weight.dim() > 1]
    others = [weight for weight in weights if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": hyper.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=hyper.betas, eps=hyper.eps, foreach=False)


def batch_of(batches: Arrays, index: int) -> dict[str, torch.Tensor]:
    """The tensors of one step."""
    ids, labels = (torch.from_numpy(batches[name][index].astype(np.int64)) for name in ("input_ids", "labels"))
    return {"input_ids": ids, "labels": labels, "loss_mask": torch.from_numpy(batches["loss_mask"][index])}


def array(tensor: torch.Tensor) -> np.ndarray:
    """float32, detached."""
    return tensor.detach().float().numpy().copy()


def _relative_step(got: Arrays, before: Arrays, after: Arrays) -> float:
    """L2 distance of two states of all weights, over the distance that the other side moved."""
    weights = [name for name in got if not name.endswith(BIAS)]
    apart = np.sqrt(sum(float(np.square(got[name] - after[name], dtype=np.float64).sum()) for name in weights))
    far = np.sqrt(sum(float(np.square(after[name] - before[name], dtype=np.float64).sum()) for name in weights))
    return float(apart / far) if far else float(apart)


def _moved(reference: Reference, loads: Arrays) -> tuple[float, float]:
    """(choices that went to another expert, choices) of the last forward pass, over all layers."""
    moved = choices = 0.0
    for layer, (_, chosen, _) in reference.routed.items():
        choices += chosen.numel()
        if str(layer) in loads:
            theirs = torch.from_numpy(np.round(loads[str(layer)] * chosen.numel()))
            moved += float((reference.counts(layer) - theirs).abs().sum()) / 2
    return moved, choices

"""This module defines how the two trainings of `tc3 accuracy align` start: initial weights that are the same on every
machine and show faults, and optimizer and learning rates, computed independently of MindFormers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from plugins.step_record.plan import BETAS
from tools.weights.hugging_face_names import Arrays, hugging_face_shapes
from tools.weights.hugging_face_sizes import Sizes

SMALL = 0.02  # the recipes' initializer_range, or twice that
# queries, keys and logits of order 1, so that attention is far from uniform and its scale and positions matter
_LARGE = ("q_b_proj.weight", "q_proj.weight", "kv_b_proj.weight", "lm_head.weight")
SCHEDULES = ("ConstantWarmUpLR", "CosineWithWarmUpLR")


def initial_weights(sizes: Sizes, seed: int) -> Arrays:
    """Return float32 weights by Hugging Face's names. Norms are not 1 and biases are not 0, so that leaving one out
    changes the results. All other weights are small, because with unit variance rounding would change the loss of step
    20 by 1e-3.
    """
    return {name: draw(name, shape, seed) for name, shape in hugging_face_shapes(sizes).items()}


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return a weight's initial float32 values, which depend only on name, shape and seed."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith("e_score_correction_bias"):
        values = SMALL * normal
    elif len(shape) == 1:
        values = 1 + 0.1 * normal
    else:
        values = normal / np.sqrt(shape[1]) if name.endswith(_LARGE) else SMALL * normal
    return values.astype(np.float32)


def nudged(weights: Arrays) -> Arrays:
    """Return the weights with each element moved by one unit in its last place, which shows the effect of rounding."""
    random = np.random.default_rng(0)

    def nudge(array: np.ndarray) -> np.ndarray:
        towards = np.where(random.random(array.shape) < 0.5, np.inf, -np.inf).astype(np.float32)
        return np.nextafter(array, towards)

    return {name: nudge(array) for name, array in weights.items()}


@dataclass(frozen=True)
class Hyper:
    """A `Hyper` holds the parameters of AdamW with decoupled decay; `clip` is the largest global norm (0: none)."""

    rates: list[float]
    betas: tuple[float, float]
    eps: float
    decay: float
    clip: float

    @property
    def first_update(self) -> int:
        """Return the first step (from 1) whose learning rate is not 0; earlier steps change no weight."""
        return next((step for step, rate in enumerate(self.rates, 1) if rate > 0), len(self.rates))


def hyper_of(recipe: Mapping[str, Any], steps: int) -> Hyper:
    """Return AdamW's parameters and the learning rates of `steps` steps; raise RecipeError for a setting that the
    reference does not support.
    """
    optimizer, wrapper = recipe["optimizer"], recipe["runner_wrapper"]
    if optimizer["type"] != "AdamW":
        raise RecipeError(
            "optimizer.type: tc3's reference training with Hugging Face's DeepseekV3 supports only AdamW, not "
            f"{optimizer['type']!r}"
        )
    if recipe.get("grouped_lr_schedule"):
        raise RecipeError(
            "grouped_lr_schedule: tc3's reference training with Hugging Face's DeepseekV3 has one learning rate for "
            "all weights; leave this section out"
        )
    if wrapper.get("scale_sense", 1.0) != 1.0:
        raise RecipeError(
            "runner_wrapper.scale_sense: tc3's reference training with Hugging Face's DeepseekV3 does not scale the "
            "loss; write 1.0"
        )
    schedule, betas = recipe["lr_schedule"], optimizer.get("betas") or BETAS
    return Hyper(
        rates=[rate(schedule, step) for step in range(steps)],
        betas=(float(betas[0]), float(betas[1])),
        eps=float(optimizer.get("eps", 1e-8)),
        decay=float(optimizer.get("weight_decay", 0.0)),
        clip=float(wrapper.get("max_grad_norm", 1.0)) if wrapper.get("use_clip_grad") else 0.0,
    )


def rate(schedule: Mapping[str, Any], step: int) -> float:
    """Return the learning rate of a step (from 0); raise RecipeError for a schedule that the reference does not
    support.
    """
    kind = schedule["type"]
    if kind not in SCHEDULES:
        raise RecipeError(
            "lr_schedule.type: tc3's reference training with Hugging Face's DeepseekV3 supports only "
            f"{' and '.join(SCHEDULES)}, not {kind!r}"
        )
    if schedule.get("learning_rate") is None:
        raise RecipeError("lr_schedule.learning_rate: the key is missing; write the rate that the warm-up reaches")
    peak, start = float(schedule["learning_rate"]), float(schedule.get("warmup_lr_init") or 0.0)
    total = schedule.get("total_steps") or 0
    ratio = schedule.get("warmup_ratio")
    warmup = int(total * ratio) if ratio is not None else schedule.get("warmup_steps") or 0
    if step < warmup:
        return start + (peak - start) * step / warmup
    if kind == "ConstantWarmUpLR":
        return peak
    last = float(schedule.get("lr_end") or 0.0)
    if step >= (schedule.get("decay_steps") or total):
        return last
    turns = float(schedule.get("num_cycles") or 0.5)
    cosine = 0.5 * (1 + math.cos(2 * math.pi * turns * (step - warmup) / max(1, total - warmup)))
    return last + (peak - last) * max(0.0, cosine)

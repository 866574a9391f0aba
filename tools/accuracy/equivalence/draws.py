"""Executed strategies that no table lists: small layouts drawn at random, each against one process.

A drawn layout is legal, by the rules of MindFormers for the recipe's toy model: whatever `tc3 train` refuses of it, or
whatever differs from one process, is a fault of something.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from plugins.errors import RecipeError
from tools.accuracy.equivalence.sharding import TWO_STAGES, Sharding
from tools.accuracy.equivalence.strategies import Case, batch_of

SCHEDULES = ("1f1b", "gpipe", "seqpipe", "zero_bubble_v")
TRIES = 100_000


def draw_cases(recipe: Mapping[str, Any], count: int, seed: int, most: int) -> list[Case]:
    """Different layouts of a recipe of `one_worker`, the same for the same arguments.

    Args:
        most: processes of a layout.

    Raises:
        RecipeError: there are not so many.
    """
    numbers = random.Random(seed)
    found: dict[Sharding, None] = {}
    for _ in range(TRIES):
        if len(found) == count:
            break
        sharding = _draw(numbers)
        if 2 <= sharding.workers <= most and not misfit(sharding, recipe):
            found[sharding] = None
    if len(found) < count:
        raise RecipeError(f"--draws {count}: this recipe has only {len(found)} layouts on at most {most} processes")
    return [
        Case(f"draw_{seed}_{number}", sharding.words, sharding=sharding) for number, sharding in enumerate(found, 1)
    ]


def _draw(numbers: random.Random) -> Sharding:
    """Any combination; what one part has no use for is drawn away."""
    choose = numbers.choice
    tp, dp, cp, pp = choose((1, 2, 2, 4)), choose((1, 2, 2, 4)), choose((1, 1, 2)), choose((1, 1, 2, 4))
    vpp = choose((1, 1, 2)) if pp > 1 else 1
    schedule = choose(SCHEDULES) if vpp > 1 else "1f1b"
    micro, accumulate = (choose((2, 4)), 1) if pp > 1 else (1, choose((1, 1, 2)))
    moe, mtp = choose((False, True)), choose((False, False, True))
    return Sharding(
        tp=tp,
        dp=dp,
        cp=cp,
        pp=pp,
        ep=choose((1, 2, 4)) if moe else 1,
        sp=tp > 1 and (moe or choose((True, False))),
        vpp=vpp,
        micro=micro,
        schedule=schedule,
        zero=dp > 1 and choose((True, True, False)),
        recompute=choose((False, False, True)),
        accumulate=accumulate,
        moe=moe,
        mtp=mtp,
        layers=max(pp * vpp, 2) * choose((1, 1, 2)),
        aux=moe and max(dp, cp, micro, accumulate) == 1 and choose((False, True)),
        groups=choose((0, 0, 4)) if moe else 0,
        shared=choose((0, 0, 2)) if moe else 0,
        length=choose((0, 0, 48, 96)),
        known=TWO_STAGES if mtp and pp > 1 else "",
    )


def misfit(sharding: Sharding, recipe: Mapping[str, Any]) -> str:
    """Why a layout is not legal for the model, or cannot be compared; empty when it can."""
    model = recipe["model"]["model_config"]
    length = sharding.length or model["seq_length"]
    heads, experts = model["num_attention_heads"], model["n_routed_experts"]
    rules = {
        "attention heads cannot be cut": heads % (sharding.tp * sharding.cp),
        "the sequence cannot be cut": length % (sharding.tp * sharding.cp),
        "experts cannot be dealt": (sharding.dp * sharding.tp) % sharding.ep or experts % sharding.ep,
        "experts want sequence parallelism": sharding.moe and sharding.tp > 1 and not sharding.sp,
        "groups of experts cannot be cut": sharding.groups and experts % sharding.groups,
        "layers cannot be cut": sharding.layers % (sharding.pp * sharding.vpp),
        "too few micro-batches": sharding.micro < sharding.pp,
        "a schedule of chunks wants two stages and four micro-batches": sharding.schedule != "1f1b"
        and (sharding.pp, sharding.vpp, sharding.micro) != (2, 2, 4),
        "the auxiliary loss is taken per rank and micro-batch": sharding.aux
        and max(sharding.dp, sharding.cp, sharding.micro, sharding.accumulate) > 1,
        "accumulated gradients of experts without a copy are lost": sharding.zero
        and sharding.moe
        and sharding.accumulate > 1
        and sharding.ep == sharding.dp * sharding.cp * sharding.tp,  # tools/check: lost_gradients
    }
    return next((words for words, wrong in rules.items() if wrong), "") or sharding.misfit(batch_of(recipe))

"""Whether a profile can be of a recipe's run: its layers, its attention kernels, its matmuls' FLOPs."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.errors import DataError
from tools.estimate.configuration import Configuration
from tools.estimate.layer_model import work
from tools.profile.kernels import Profile
from tools.profile.kinds import layer_numbers, term_of
from tools.profile.shapes import matmul_of

_MOST = 0.6  # of the matmuls' seconds, whose shapes must be known to compare FLOPs
_ALIKE = 2.0  # FLOPs of kernels over the model's: blocks of grouped matmuls multiply zeros, too


def require_match(profile: Profile, config: Configuration, stage: int | None) -> None:
    """Refuse a profile of another run.

    Raises:
        DataError: it names other layers than the recipe's stage has, or holds too many or too few kernels for it.
    """
    stages = list(range(config.pp)) if stage is None else [stage]
    named = layer_numbers(profile.step.kernels)
    have = [set(config.layer_numbers(place)) for place in stages]
    if named and named not in have:
        raise DataError(
            f"{profile.source}: names layers {_span(named)}, but the recipe has {_span(have[0])}"
            f"{f' on stage {stages[0]}' if config.pp > 1 else ''}: it is of another recipe or another rank"
        )
    _attention(profile, config, stages)
    _flops(profile, config, stages)


def _attention(profile: Profile, config: Configuration, stages: Sequence[int]) -> None:
    """Gradients of fused attention: one a layer and micro-batch; context parallelism may cut them further."""
    kernels = [kernel for kernel in profile.step.kernels if "flashattentionscoregrad" in kernel.kind.lower()]
    count, steps = sum(kernel.count for kernel in kernels), profile.step.repeats
    if not count or config.cp > 1:
        return
    wanted = [config.micro_batches * _attended(config, stage) for stage in stages]
    if count not in [steps * each for each in wanted]:
        more = count / wanted[0] if wanted[0] else 0.0
        advice = f"; if the profile holds {more:.0f} steps, say --steps {more:.0f}" if more == int(more) > 1 else ""
        raise DataError(
            f"{profile.source}: {count} FlashAttentionScoreGrad kernels, but the recipe's layers and micro-batches "
            f"make {steps * wanted[0]} in {steps} step{'s' if steps > 1 else ''}{advice}"
        )


def _attended(config: Configuration, stage: int) -> int:
    return sum(kind not in ("embedding", "head") for chunk in config.stage_kinds(stage) for kind in chunk)


def _flops(profile: Profile, config: Configuration, stages: Sequence[int]) -> None:
    """FLOPs of the matmuls whose shapes are known, as long as these are most of them."""
    kernels = [kernel for kernel in profile.step.kernels if term_of(kernel, config) == "matmul"]
    known = [(matmul_of(kernel), kernel) for kernel in kernels]
    seen = sum(kernel.seconds for matmul, kernel in known if matmul)
    if not seen or seen < _MOST * sum(kernel.seconds for kernel in kernels):
        return
    done = sum(matmul.flops * kernel.count for matmul, kernel in known if matmul) / profile.step.repeats
    wanted = [flops(config, stage) for stage in stages]
    if not any(1 / _ALIKE < done / each < _ALIKE for each in wanted if each):
        raise DataError(
            f"{profile.source}: its matmuls do {done:.3g} FLOPs a step, but the recipe's {wanted[0]:.3g}: another "
            "batch, sequence, layout or number of steps"
        )


def flops(config: Configuration, stage: int) -> float:
    """Matmul FLOPs of a stage's step without recomputation: forward and twice that backward."""
    kinds = [kind for chunk in config.stage_kinds(stage) for kind in chunk]
    return 3 * config.micro_batches * sum(matmul.flops for kind in kinds for matmul in work(config, kind).matmuls)


def _span(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ", ".join(map(str, ordered)) or "none"

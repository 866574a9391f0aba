"""This module checks that a profile belongs to a run of the given recipe, and compares the profiled step with the
predicted step.

The layers, the number of attention kernels and the FLOPs of matmuls in the profile must agree with the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import DataError, RecipeError
from tools.check.check import require_sound
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency, cluster, cluster_file, efficiency_of
from tools.estimate.from_recipe import from_recipe
from tools.estimate.layer_model import work
from tools.hardware import Hardware
from tools.hardware.load import read_yaml
from tools.layout.resolve import resolve
from tools.profile.attribute import Measured, attribute, stage_of
from tools.profile.fit import CPU_START, Fit, fit, host_content
from tools.profile.kernels import Profile, layer_numbers, matmul_of, term_of
from tools.profile.read import read_profile
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

_MOST = 0.6  # of the matmuls' seconds, whose shapes must be known to compare FLOPs
_ALIKE = 2.0  # FLOPs of kernels over the model's: blocks of grouped matmuls multiply zeros, too


def require_match(profile: Profile, config: Configuration, stage: int | None) -> None:
    """Raise an error if the profile belongs to a run of another recipe.

    Raises:
        DataError: the profile names other layers than the recipe's stage has, or holds too many or too few kernels for
            this stage.
    """
    stages = list(range(config.pp)) if stage is None else [stage]
    named = layer_numbers(profile.step.kernels)
    have = [set(config.layer_numbers(place)) for place in stages]
    if named and named not in have:
        raise DataError(
            f"{profile.source}: the profile names layers {_span(named)}, but the recipe has {_span(have[0])}"
            f"{f' on stage {stages[0]}' if config.pp > 1 else ''}: the profile is of another recipe or another rank"
        )
    _attention(profile, config, stages)
    _flops(profile, config, stages)


def _attention(profile: Profile, config: Configuration, stages: Sequence[int]) -> None:
    """Check the number of gradients of fused attention: one for each layer and micro-batch, or a multiple if context
    parallelism divides them further.
    """
    kernels = [kernel for kernel in profile.step.kernels if "flashattentionscoregrad" in kernel.kind.lower()]
    count, steps = sum(kernel.count for kernel in kernels), profile.step.repeats
    if not count or config.cp > 1:
        return
    wanted = [config.micro_batches * _attended(config, stage) for stage in stages]
    if count not in [steps * each for each in wanted]:
        more = count / wanted[0] if wanted[0] else 0.0
        advice = f"; if the profile holds {more:.0f} steps, give --steps {more:.0f}" if more == int(more) > 1 else ""
        raise DataError(
            f"{profile.source}: the profile has {count} FlashAttentionScoreGrad kernels, but the recipe's layers and "
            f"micro-batches need {steps * wanted[0]} in {steps} step{'s' if steps > 1 else ''}{advice}"
        )


def _attended(config: Configuration, stage: int) -> int:
    return sum(kind not in ("embedding", "head") for chunk in config.stage_kinds(stage) for kind in chunk)


def _flops(profile: Profile, config: Configuration, stages: Sequence[int]) -> None:
    """Check the FLOPs of the matmuls whose shapes are known, if these are most matmuls."""
    kernels = [kernel for kernel in profile.step.kernels if term_of(kernel, config) == "matmul"]
    known = [(matmul_of(kernel), kernel) for kernel in kernels]
    seen = sum(kernel.seconds for matmul, kernel in known if matmul)
    if not seen or seen < _MOST * sum(kernel.seconds for kernel in kernels):
        return
    done = sum(matmul.flops * kernel.count for matmul, kernel in known if matmul) / profile.step.repeats
    wanted = [flops(config, stage) for stage in stages]
    if not any(1 / _ALIKE < done / each < _ALIKE for each in wanted if each):
        raise DataError(
            f"{profile.source}: the profile's matmuls do {done:.3g} FLOPs a step, but the recipe's matmuls do "
            f"{wanted[0]:.3g}; the profile was made with another batch, sequence length, layout or number of steps"
        )


def flops(config: Configuration, stage: int) -> float:
    """Return the FLOPs of a stage's matmuls in one step without recomputation, forward and backward."""
    kinds = [kind for chunk in config.stage_kinds(stage) for kind in chunk]
    return 3 * config.micro_batches * sum(matmul.flops for kind in kinds for matmul in work(config, kind).matmuls)


def _span(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ", ".join(map(str, ordered)) or "none"


@dataclass(frozen=True)
class Study:
    """A `Study` holds a profile, the configuration of its run, and the profiled step divided into the estimator's
    terms.

    Args:
        stage: the pipeline stage that was profiled; None if the run has several stages and the folder does not name the
            rank.
    """

    profile: Profile
    config: Configuration
    stage: int | None
    measured: Measured


def run_of(recipe: Path, overrides: tuple[str, ...]) -> Configuration:
    """Return the configuration of the run that a recipe with overrides describes; values that are `auto` are resolved.

    Raises:
        RecipeError: the recipe cannot be read, or `tc3 check` refuses it.
    """
    resolved = resolve(apply_overrides(load_recipe(recipe), overrides))
    require_sound(resolved)
    return from_recipe(resolved)


def study(folder: Path, config: Configuration, steps: int | None = None) -> Study:
    """Read the profile in a folder, check that it belongs to the run `config`, and divide its step into the estimator's
    terms.

    Raises:
        DataError: the folder holds no profile, or the profile is of another run.
        RecipeError: the profile's rank is not one of the recipe's ranks.
    """
    profile = read_profile(folder, steps)
    stage = stage_of(config, profile.rank)
    require_match(profile, config, stage)
    return Study(profile, config, stage, attribute(profile, config))


def fitted(found: Study, cluster_name: str | None, like: str | None, name: str) -> tuple[Fit, dict[str, Any], str]:
    """Return the efficiencies that were fitted to a profile, and the content and the name of the hardware file to which
    they belong.

    Args:
        cluster_name: the name of a cluster or the path of its file; None: the default cluster for an Ascend profile,
            and this host itself for a CPU profile.
        like: the cluster with whose efficiencies the fit begins if the file states no efficiencies.
        name: the name of the new cluster.
    """
    if cluster_name is None and found.profile.device == "CPU":
        content = host_content(found.profile, found.config, name)
        hardware, start, called = _hardware(content, name), CPU_START, "the profiled CPU"
    else:
        called = cluster_name or ""
        hardware, start = cluster(called), start_of(called, like)
        content = read_yaml(cluster_file(called), RecipeError)
    return fit(found.profile, found.measured, found.config, hardware, start, found.stage), content, called


def start_of(cluster_name: str, like: str | None) -> Efficiency:
    """Return the efficiencies with which the fit to a profile begins.

    Raises:
        RecipeError: the efficiencies of the cluster are unknown, and `like` names no other cluster.
    """
    hardware = cluster(cluster_name)
    try:
        return efficiency_of(cluster(like) if like else hardware, any_version=True)
    except RecipeError as error:
        raise RecipeError(f"{error} with --like") from None


def _hardware(content: dict[str, Any], name: str) -> Hardware:
    """Return the hardware of a file that is not written yet."""
    import tempfile

    from tools.hardware import load_hardware

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return load_hardware(path)

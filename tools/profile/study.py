"""A profile beside the recipe that it is of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import RecipeError
from tools.auto.resolve import resolve
from tools.check.check import require_sound
from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Efficiency, cluster, cluster_file, efficiency_of
from tools.estimate.from_recipe import from_recipe
from tools.hardware import Hardware
from tools.hardware.own_yaml import read_yaml
from tools.profile.attribute import Measured, attribute
from tools.profile.fit import Fit, fit
from tools.profile.kernels import Profile
from tools.profile.match import require_match
from tools.profile.modelled import stage_of
from tools.profile.own_host import START, host_content
from tools.profile.read import read_profile
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides


@dataclass(frozen=True)
class Study:
    """A profile, the run that it is of, and its step by term.

    Args:
        stage: of the pipeline that was profiled; None where there are several and the folder does not say the rank.
    """

    profile: Profile
    config: Configuration
    stage: int | None
    measured: Measured


def run_of(recipe: Path, overrides: tuple[str, ...]) -> Configuration:
    """The run that a recipe describes, its open values resolved.

    Raises:
        RecipeError: it cannot be read, or `tc3 check` refuses it.
    """
    resolved = resolve(apply_overrides(load_recipe(recipe), overrides))
    require_sound(resolved)
    return from_recipe(resolved)


def study(folder: Path, config: Configuration, steps: int | None = None) -> Study:
    """Read a profile and hold it against its recipe.

    Raises:
        DataError: there is no profile, or it is of another run.
        RecipeError: its rank is none of the recipe's.
    """
    profile = read_profile(folder, steps)
    stage = stage_of(config, profile.rank)
    require_match(profile, config, stage)
    return Study(profile, config, stage, attribute(profile, config))


def fitted(found: Study, cluster_name: str | None, like: str | None, name: str) -> tuple[Fit, dict[str, Any], str]:
    """The efficiencies of a study, with the content of the hardware file that they belong to, and what that is called.

    Args:
        cluster_name: a cluster or its file; None: of an Ascend profile the default, of a CPU's this host itself.
        like: a cluster whose efficiencies to start from, where the file has none.
        name: of the new cluster.
    """
    if cluster_name is None and found.profile.device == "CPU":
        content = host_content(found.profile, found.config, name)
        hardware, start, called = _hardware(content, name), START, "the profiled CPU"
    else:
        called = cluster_name or ""
        hardware, start = cluster(called), start_of(called, like)
        content = read_yaml(cluster_file(called), RecipeError)
    return fit(found.profile, found.measured, found.config, hardware, start, found.stage), content, called


def start_of(cluster_name: str, like: str | None) -> Efficiency:
    """The efficiencies that a fit begins with.

    Raises:
        RecipeError: the cluster has none and `like` names no other.
    """
    hardware = cluster(cluster_name)
    try:
        return efficiency_of(cluster(like) if like else hardware)
    except RecipeError as error:
        raise RecipeError(f"{error} with --like") from None


def _hardware(content: dict[str, Any], name: str) -> Hardware:
    """The hardware of a file that is not written yet."""
    import tempfile

    from tools.hardware import load_hardware

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return load_hardware(path)

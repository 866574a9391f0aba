"""`plugins.operator_fusion` of a recipe as the flags of MindSpore's graph kernels. Pure (report section 4.5).

MindSpore 2.9.0 has graph kernels on where the target is Ascend and `jit_level` is O1, with `fusion_ops_level` 0
(vector operators only), and reads any other wish from one environment variable when it compiles.

The first part lists the operators that the graph kernels may fuse for DVM, by the level of `fusion_ops_level` that
takes them in. It is from MindSpore's public sources: `clusterable_ops_with_level_dvm` of graph_kernel_cluster_cloud.cc
and `expand_ops_with_level_dvm` of graph_kernel_expander_cloud.cc. The compiled lists of a wheel cannot be asked. Of
the vector operators, 25 were seen in clusters of 2.9.0's passes (docs/fusion.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.errors import ClusterError, RecipeError, did_you_mean
from plugins.settings import section_of

VECTOR = (
    "Abs", "Add", "Assign", "BroadcastTo", "Cast", "Ceil", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterEqual",
    "IsFinite", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul", "Neg",
    "NotEqual", "Pow", "RealDiv", "Reciprocal", "ReduceSum", "Rsqrt", "Select", "Sqrt", "Sub", "Transpose", "Trunc",
)  # fmt: skip
CUBE = ("BatchMatMul", "GroupedMatmul", "MatMul", "Reshape")
# composite operators, which are opened into the ones above before anything is fused
EXPANDED = (
    "AcoshExt", "Adam", "AdamApplyOneWithDecay", "AdamApplyOneWithDecayAssign", "AddExt", "AddN", "Addcmul", "AsinhExt",
    "AssignAdd", "BiasAdd", "BiasAddGrad", "ClipByNormNoDivSum", "Cosh", "DivMod", "EluExt", "Erf", "FastGeLU",
    "FastGeLUGrad", "FillV2", "GeLU", "GeLUGrad", "HShrink", "HSigmoid", "HSwish", "LeakyReLUExt", "MeanExt", "Muls",
    "OnesLike", "ReLU", "ReduceMean", "ReluGrad", "RsqrtGrad", "SiLU", "SiLUGrad", "Sigmoid",
    "SigmoidCrossEntropyWithLogits", "SigmoidCrossEntropyWithLogitsGrad", "SigmoidGrad", "Sinh", "SoftplusExt",
    "SqrtGrad", "Square", "SquaredDifference", "SubExt", "SumExt", "Tanh", "TanhGrad", "Tile", "ZerosLike",
    "ZerosLikeExt",
)  # fmt: skip


KEY = "plugins.operator_fusion"
SETTINGS = ("level", "disable")
VARIABLE = "MS_DEV_GRAPH_KERNEL_FLAGS"
LEVELS = ("off", "vector", "cube")
NEEDED = "O1"  # the jit level with which Ascend has graph kernels
JIT_LEVEL = "context.jit_config.jit_level"
OWN_KEYS = ("graph_kernel_flags", "enable_graph_kernel")  # of `context`: MindSpore's own switches


@dataclass(frozen=True)
class Fusion:
    """What is fused: up to `level`, but for the operators of `disable`."""

    level: str
    disable: tuple[str, ...] = ()

    @property
    def flags(self) -> str:
        """Return the value of `VARIABLE`: all that the level means is written out, whatever the defaults are."""
        if self.level == "off":
            return "--opt_level=0"
        flags = ["--opt_level=2", f"--fusion_ops_level={LEVELS.index(self.level) - 1}"]
        for flag, known in (("disable_cluster_ops", {*VECTOR, *CUBE}), ("disable_expand_ops", set(EXPANDED))):
            named = [name for name in self.disable if name in known]
            flags += [f"--{flag}={','.join(named)}"] if named else []
        return " ".join(flags)


def read(settings: Any) -> Fusion:
    """Return the section `{level: off|vector|cube, disable: [Operator, ...]}` of a recipe; `level` must be written.

    YAML reads a bare `off` as False, which is taken for it.

    Raises:
        RecipeError: an unknown key, level or operator, or one that this level does not fuse.
    """
    right = f"write level: {', '.join(LEVELS)} under it, or {KEY}: False"
    section = section_of(KEY, settings, SETTINGS, right, needs=("level",))
    level = "off" if section["level"] is False else section["level"]
    if level not in LEVELS:
        raise RecipeError(
            f"{KEY}.level: {level!r} is none of {', '.join(LEVELS)}{did_you_mean(str(level), list(LEVELS))}"
        )
    return Fusion(level, _disabled(section.get("disable", []), level))


def _disabled(names: Any, level: str) -> tuple[str, ...]:
    key = f"{KEY}.disable"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise RecipeError(f"{key}: {names!r}; write a list of operators, such as [Exp, ReduceSum]")
    if names and level == "off":
        raise RecipeError(f"{key}: nothing is fused with level off; leave it out")
    known = [*VECTOR, *CUBE, *EXPANDED]
    for name in names:
        if name not in known:
            raise RecipeError(f"{key}: DVM fuses no operator {name!r}{_meant(str(name), known)}")
        if name in CUBE and level == "vector":
            raise RecipeError(f"{key}: {name} is fused only with level cube; leave it out")
    return tuple(dict.fromkeys(names))


def _meant(name: str, known: list[str]) -> str:
    """`did_you_mean`, whatever the letters' case."""
    alike = [each for each in known if each.lower() == name.lower()]
    return f" (did you mean {alike[0]!r}?)" if alike else did_you_mean(name, known)


def chosen(recipe: Mapping[str, Any]) -> Fusion | None:
    """Return what a recipe asks for; None where it leaves MindSpore its defaults.

    Raises:
        RecipeError: see `read`.
    """
    settings = (recipe.get("plugins") or {}).get("operator_fusion", False)
    return None if settings is False else read(settings)


def check(recipe: Mapping[str, Any]) -> Fusion | None:
    """`chosen`, if the rest of the recipe goes with it.

    Raises:
        RecipeError: see `read`; on Ascend another jit level, and MindSpore's own switches beside this one.
    """
    fusion = chosen(recipe)
    context = recipe.get("context") or {}
    if fusion is None or not _on_ascend(context):
        return fusion
    for key in OWN_KEYS:
        if context.get(key):
            raise RecipeError(f"context.{key}: {context[key]!r} is overruled by {KEY}; leave one of them out")
    level = (context.get("jit_config") or {}).get("jit_level")
    if fusion.level != "off" and level != NEEDED:
        found = "is not written" if level is None else f"is {level!r}"
        raise RecipeError(f"{JIT_LEVEL}: {found}, and {KEY} needs {NEEDED!r}: no other level fuses operators by DVM")
    return fusion


def environment(recipe: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that the workers of `recipe` need; none where the plugin is off, or the target is no Ascend.

    Args:
        environ: where the recipe is launched.

    Raises:
        RecipeError: see `check`.
        ClusterError: `environ` has other flags: one of the two would be dropped in silence.
    """
    fusion = check(recipe)
    if fusion is None or not _on_ascend(recipe.get("context") or {}):
        return {}
    exported = environ.get(VARIABLE)
    if exported and exported.split() != fusion.flags.split():
        raise ClusterError(f"{VARIABLE}={exported!r}, and {KEY} asks for {fusion.flags!r}: unset it, or {KEY}: False")
    return {VARIABLE: fusion.flags}


def refuse_other(recipe: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuse what `environment` refuses, before anything is started.

    Raises:
        RecipeError, ClusterError: see `environment`.
    """
    environment(recipe, environ)


def _on_ascend(context: Mapping[str, Any]) -> bool:
    return bool(context.get("device_target", "Ascend") == "Ascend")

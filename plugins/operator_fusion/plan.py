"""This module turns `plugins.operator_fusion` of a recipe into the flags of MindSpore's graph kernels. The module is
pure Python; section 4.5 of the TeleChat3-MoE report describes operator fusion.

MindSpore 2.9.0 enables graph kernels if the target is Ascend and `jit_level` is O1, with `fusion_ops_level` 0 (vector
operators only), and reads all other settings from one environment variable when it compiles.

The first part lists the operators that the graph kernels may fuse for DVM, by the level of `fusion_ops_level` that
includes them. The list is taken from MindSpore's public sources: `clusterable_ops_with_level_dvm` of
graph_kernel_cluster_cloud.cc and `expand_ops_with_level_dvm` of graph_kernel_expander_cloud.cc. The lists in the
compiled library of a wheel cannot be read. 25 of the vector operators were seen in clusters of 2.9.0's passes
(docs/fusion.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from plugins.errors import ClusterError, RecipeError, did_you_mean
from plugins.settings import Section, setting, value_at

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
VARIABLE = "MS_DEV_GRAPH_KERNEL_FLAGS"
LEVELS = ("off", "vector", "cube")
NEEDED = "O1"  # the jit level with which Ascend has graph kernels
JIT_LEVEL = "context.jit_config.jit_level"
OWN_KEYS = ("graph_kernel_flags", "enable_graph_kernel")  # of `context`: MindSpore's own switches


def _operators(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise RecipeError(f"{names!r} is not a list; write a list of operators, such as [Exp, ReduceSum]")
    known = [*VECTOR, *CUBE, *EXPANDED]
    for name in names:
        if name not in known:
            raise RecipeError(f"DVM does not fuse operator {name!r}{_meant(str(name), known)}")
    return tuple(dict.fromkeys(names))


def _meant(name: str, known: list[str]) -> str:
    """Return the result of `did_you_mean`, computed without regard to upper and lower case."""
    alike = [each for each in known if each.lower() == name.lower()]
    return f" (did you mean {alike[0]!r}?)" if alike else did_you_mean(name, known)


@dataclass(frozen=True)
class Fusion(Section):
    """A `Fusion` says what is fused: all operators that `level` fuses, except the operators of `disable`."""

    KEY = KEY
    RIGHT = f"write level: {', '.join(LEVELS)} under it, or {KEY}: False"
    CHANGE = ("numbers", "fuses other operators into one kernel, which rounds once where they rounded one by one")

    level: str = setting(MISSING, "what is fused: see below", choices=LEVELS, bare=(False, "off"))
    disable: tuple[str, ...] = setting((), "operators that are not fused", parse=_operators)

    def agree(self) -> None:
        """Raise RecipeError if `disable` names operators that the chosen `level` does not fuse."""
        key = f"{KEY}.disable"
        if self.disable and self.level == "off":
            raise RecipeError("level: off fuses nothing, so no fusion can be disabled; leave disable out", key)
        for name in self.disable:
            if name in CUBE and self.level == "vector":
                raise RecipeError(
                    f"{name} is fused only with level: cube, so it cannot be disabled at another level; leave it out "
                    "of disable",
                    key,
                )

    @property
    def flags(self) -> str:
        """Return the value of the environment variable `VARIABLE`, with every flag of the level, so that the value does
        not depend on MindSpore's defaults.
        """
        if self.level == "off":
            return "--opt_level=0"
        flags = ["--opt_level=2", f"--fusion_ops_level={LEVELS.index(self.level) - 1}"]
        for flag, known in (("disable_cluster_ops", {*VECTOR, *CUBE}), ("disable_expand_ops", set(EXPANDED))):
            named = [name for name in self.disable if name in known]
            flags += [f"--{flag}={','.join(named)}"] if named else []
        return " ".join(flags)


def chosen(recipe: Mapping[str, Any]) -> Fusion | None:
    """Return the settings of `plugins.operator_fusion` in a recipe; return None if the recipe keeps MindSpore's
    defaults.

    Raises:
        RecipeError: see `Fusion.read`.
    """
    settings = value_at(recipe, KEY, False)
    return None if settings is False else Fusion.read(settings)


def check(recipe: Mapping[str, Any]) -> Fusion | None:
    """Return the settings of `plugins.operator_fusion` in a recipe (`chosen`), if they do not contradict other keys of
    the recipe.

    Raises:
        RecipeError: see `Fusion.read`; on Ascend also if the recipe has another jit level, or MindSpore's own switches
            in addition to this one.
    """
    fusion = chosen(recipe)
    context = recipe.get("context") or {}
    if fusion is None or not _on_ascend(context):
        return fusion
    for key in OWN_KEYS:
        if context.get(key):
            raise RecipeError(
                f"MindSpore ignores {context[key]!r}, because {KEY} sets the fusion; leave out this key or the plugin",
                f"context.{key}",
            )
    level = value_at(recipe, JIT_LEVEL)
    if fusion.level != "off" and level != NEEDED:
        found = "the key is missing" if level is None else f"the level is {level!r}"
        raise RecipeError(
            f"{found}, but only the level {NEEDED!r} fuses operators by DVM; write {NEEDED!r}, or {KEY}: False",
            JIT_LEVEL,
        )
    return fusion


def environment(recipe: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that the workers of `recipe` need; the result is empty if the plugin is off, or
    the target is not Ascend.

    Args:
        environ: the environment in which the recipe is launched.

    Raises:
        RecipeError: see `check`.
        ClusterError: `environ` has other flags, so that one of the two would be dropped silently.
    """
    fusion = check(recipe)
    if fusion is None or not _on_ascend(recipe.get("context") or {}):
        return {}
    exported = environ.get(VARIABLE)
    if exported and exported.split() != fusion.flags.split():
        raise ClusterError(
            f"the environment sets {VARIABLE}={exported!r}, but {KEY} asks for {fusion.flags!r}: unset the variable, "
            f"or write {KEY}: False"
        )
    return {VARIABLE: fusion.flags}


def _on_ascend(context: Mapping[str, Any]) -> bool:
    return bool(context.get("device_target", "Ascend") == "Ascend")

"""This module describes the kernels that MindSpore's profiler recorded, in the same form for every device. The module
assigns the time of each kernel to a term of the estimator, such as matmul or attention.

All times are in seconds. Shapes are those that the profiler recorded, one tuple for each tensor; () if the profiler did
not record them.

The term to which a kernel's time belongs follows from its type, its scope and its communication group; the sizes of a
matrix product follow from the shapes of its tensors.

The types of kernels are the operator types of CANN (kernel_details.csv) or of MindSpore on CPU; scopes consist of
MindFormers' cell names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tools.estimate.configuration import Configuration
from tools.estimate.layer_model import Matmul

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Kernel:
    """A `Kernel` is one execution of an operator that the profiler recorded. In a profile without a time line, a
    `Kernel` stands for all executions of one operator.

    Args:
        name: the name of the operator, with the framework's scope if the profiler knows it
            ("Default/.../layers-CellList/3-.../MatMul-op0").
        kind: the operator's type, such as MatMulV3 or hcom_allGather_.
        core: the unit that ran the kernel, such as AI_CORE, AI_VECTOR_CORE, AI_CPU, HCCL; "Host" on a CPU.
        ranks: the global ranks of a collective's group; () if they are unknown.
        count: the number of executions.
    """

    name: str
    kind: str
    core: str
    start: float
    seconds: float
    inputs: Shapes = ()
    outputs: Shapes = ()
    ranks: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Step:
    """A `Step` holds the kernels of one profiled step in the order of their starts, and the length of the step in
    seconds. The length of a step includes the time in which no kernel runs.

    If a profile does not separate its steps, a `Step` holds the kernels of `repeats` steps, and each kernel has its
    seconds divided by `repeats`.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    repeats: int = 1


@dataclass(frozen=True)
class Profile:
    """A `Profile` holds what the profiler wrote into a folder: the kernels of one step, and facts about the run.

    Args:
        source: the folder of the profile, for messages.
        device: "Ascend" or "CPU".
        step: the step that is examined: the step of median length; on a CPU, a step composed of undisturbed executions.
        steps: the number of recorded steps.
        timed: whether kernels have start times, so that it is known which kernels run at the same time.
        rank: the rank of the profiled device, if the folder names it.
        exposed: (seconds of communication that computation does not hide, hidden seconds), for a profile without a time
            line.
        notes: sentences about data that were missing, or that were read although they are irregular.
    """

    source: str
    device: str
    step: Step
    steps: int
    timed: bool = True
    rank: int | None = None
    exposed: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def matmul_of(kernel: Kernel) -> Matmul | None:
    """Return the sizes of the matrix product that a matmul kernel computes. Return None if the kernel's shapes do not
    determine the sizes of the product.

    The tensors of grouped matmuls have the shapes [rows, depth] and [experts, depth, columns]; the rows are assumed to
    be evenly distributed over the experts.
    """
    sizes = [shape for shape in kernel.inputs if len(shape) >= 2][:2]
    if len(sizes) < 2:
        return None
    one, two = sizes
    if len(one) == 2 and len(two) == 3 and one[1] in two[1:]:
        columns = two[2] if one[1] == two[1] else two[1]
        return Matmul(one[0] / two[0], columns, one[1], two[0])
    if len(two) == 2 and len(one) > 2:
        one = (prod(one[:-1]), one[-1])
    if len(one) != len(two):
        return None
    depth = _depth(one[-2:], two[-2:], kernel.outputs)
    if depth is None:
        return None
    return Matmul(one[-2] * one[-1] / depth, two[-2] * two[-1] / depth, depth, max(prod(one[:-2]), prod(two[:-2])))


def _depth(one: tuple[int, ...], two: tuple[int, ...], outputs: Shapes) -> int | None:
    """Return the size that both factors of a product share and that its result does not have; None if several sizes are
    possible.
    """
    common = [size for size in set(one) if size in two]
    if outputs and len(outputs[0]) >= 2:
        rows, columns = outputs[0][-2:]
        common = [size for size in common if (one[0] * one[1] * two[0] * two[1]) == size * size * rows * columns]
    return common[0] if len(common) == 1 else None


COMPUTE = ("matmul", "attention", "elementwise", "optimizer")
COMMUNICATION = ("tp", "cp", "ep", "data", "pipeline")
OTHER = "not attributed"
_COLLECTIVE = re.compile(r"hcom_|hccl|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|batchsendrecv", re.I)
_GATHER = re.compile(r"all_?gather|reduce_?scatter", re.I)
_POINT_TO_POINT = re.compile(r"hcom_(send|receive|batch_?send)|sendrecv|\b(send|receive)-op", re.I)
_ATTENTION = re.compile(r"flash_?attention|fusedinferattention|promptflash|core_attention|_softmaxbackward", re.I)
_MATMUL = re.compile(r"matmul|\bgmm", re.I)
_OPTIMIZER = re.compile(r"optimizer|clipgrad|adam|global_?norm|npu(get|clear)float|allfinite", re.I)
# the step's own cell, around the network: overflow of gradients and their norm
_AROUND = re.compile(r"^Default/[^/]+$")
_VECTOR = re.compile(
    r"add|mul|sub|div|cast|transpose|slice|concat|split|norm|swi?glu|swish|silu|gelu|rope|rotary|softmax|gather|scatter|"
    r"index|reduce|tile|broadcast|exp|log|sigmoid|pow|sqrt|neg|zeros|ones|fill|mask|select|less|greater|equal|sort|topk|"
    r"cumsum|onehot|permut|routing|pad|move|memset|memcpy|dropout|assign|square|trans|sum|mean|max|min|fused_|range",
    re.I,
)
_VECTOR_CORES = ("AI_VECTOR_CORE", "MIX_AIV", "AIV", "AI_CORE", "MIX_AIC", "AIC", "Host", "N/A", "")
# routing and the sums over a token's experts, which lose their scope on a CPU; weights have two dimensions
_ROUTING = re.compile(r"sort|topk|gather|floordiv|onehot", re.I)
_WEIGHT = 2
_HEADS = 4  # dimensions of queries, keys and scores: batch, heads, two of the product
LAYER = re.compile(r"layers-CellList/(\d+)-")
_NETWORK = re.compile(r"Default/network")
_MTP = re.compile(r"mtp-|MultiTokenPrediction")
_EXPERTS = re.compile(r"MoELayer|/experts-|/router-|[Dd]ispatcher|shared_experts")


def communicates(kernel: Kernel) -> bool:
    """Return whether the kernel moves data between devices."""
    return kernel.core in ("HCCL", "COMMUNICATION") or bool(_COLLECTIVE.search(kernel.kind) or sends(kernel))


def sends(kernel: Kernel) -> bool:
    """Return whether the kernel is a send or receive between pipeline stages."""
    return bool(_POINT_TO_POINT.search(kernel.kind) or _POINT_TO_POINT.search(kernel.name))


def term_of(kernel: Kernel, config: Configuration) -> str:
    """Return the estimator's term (such as "matmul") to which a kernel's time belongs, or `OTHER` if the term is
    unknown.
    """
    if communicates(kernel):
        return _of_group(kernel, config)
    words = _words(kernel)
    if kernel.core == "Host" and _MATMUL.search(words) and kernel.inputs:
        # scopes of gradients mislead: MindSpore shares their graphs, and experts' stand under core_attention
        return "attention" if len(kernel.inputs[0]) == _HEADS else "matmul"
    if _ATTENTION.search(kernel.name) or _ATTENTION.search(words):
        return "attention"
    if _OPTIMIZER.search(kernel.name) or _OPTIMIZER.search(words):
        return "optimizer"
    if _MATMUL.search(words):
        return "matmul"
    if kernel.core == "Host":
        if "/" not in kernel.name:  # no part of a graph: callbacks
            return OTHER
        return "optimizer" if _around(kernel) else "elementwise"
    if kernel.core in _VECTOR_CORES and (kernel.core.endswith("V") or "VECTOR" in kernel.core or _VECTOR.search(words)):
        return "elementwise"
    return OTHER


def expanded(kernel: Kernel) -> bool:
    """Return whether the graph compiler made the kernel by expanding an operator into several operators. The scope of a
    kernel from an expanded operator does not name the module of the model to which the kernel belongs.
    """
    return kernel.name.startswith("Expand/")


def _around(kernel: Kernel) -> bool:
    """Return whether a kernel belongs to the cell of the whole step, and not to a layer whose scope was lost."""
    if not _AROUND.match(kernel.name):
        return False
    lost = _ROUTING.search(kernel.kind) or any(len(shape) > _WEIGHT for shape in kernel.inputs)
    return kernel.core != "Host" or not lost


def _words(kernel: Kernel) -> str:
    """Return the type of a kernel; for older profiles, which do not state the type, return its name."""
    return kernel.name if kernel.kind in ("", "N/A") else kernel.kind


def _of_group(kernel: Kernel, config: Configuration) -> str:
    """Return the term of a collective, found by its operator, by the ranks of its group, or because the run has only
    one kind of parallelism.
    """
    if sends(kernel):
        return "pipeline"
    if re.search(r"all_?to_?all", kernel.kind, re.I):
        return "ep" if config.ep > 1 else "cp" if config.cp > 1 else OTHER
    if len(kernel.ranks) > 1:
        return _of_ranks(kernel, config)
    if _OPTIMIZER.search(kernel.name):
        return "data"
    copies = config.devices // config.pp // config.tp // config.cp
    kinds = {"tp": config.tp, "cp": config.cp, "data": max(copies, config.dp)}
    left = [name for name, ranks in kinds.items() if ranks > 1]
    return left[0] if len(left) == 1 and config.ep == 1 else OTHER


def _of_ranks(kernel: Kernel, config: Configuration) -> str:
    """Return the term of a collective by the size and stride of its group: neighbouring ranks mean tensor parallelism,
    larger strides context parallelism and then data parallelism.

    A hierarchical dispatch gathers rows along the ranks with the same place on every node of an EP group, and
    scatters sums along them. Other kinds of parallelism that make the same group are not told apart.
    """
    ranks = kernel.ranks
    strides = {after - before for before, after in pairwise(ranks)}
    size, stride = len(ranks), strides.pop() if len(strides) == 1 else 0
    inside = config.tp * config.cp
    if size == config.tp and stride == 1:
        return "tp"
    if size == config.cp and stride == config.tp:
        return "cp"
    across = size * stride == config.ep and ranks[0] // config.ep == ranks[-1] // config.ep
    gathers = stride != inside and _GATHER.search(_words(kernel))  # an AllReduce is of a gradient's copies
    if config.ep_mode == "hierarchical" and across and (gathers or _EXPERTS.search(kernel.name)):
        return "ep"
    if stride == inside or size in (config.dp, config.dp * config.cp, config.dp * inside) or stride == 0:
        return "data"
    return "data" if stride % config.tp == 0 else OTHER


def place(kernel: Kernel) -> str | None:
    """Return the part of the model that a kernel's scope names: "moe", "layer" or "optimizer". Return None if the scope
    of the kernel names no part of the model.

    On a CPU the function returns "step" for the parts of the network that are not layers: embedding, head and loss.
    """
    if LAYER.search(kernel.name) or _MTP.search(kernel.name):
        return "moe" if _EXPERTS.search(kernel.name) else "layer"
    if _OPTIMIZER.search(kernel.name) or _around(kernel):
        return "optimizer"
    return "step" if kernel.core == "Host" and _NETWORK.search(kernel.name) else None


def layer_numbers(kernels: tuple[Kernel, ...]) -> set[int]:
    """Return the numbers of the decoder layers that the scopes of kernels name, without the layers of MTP blocks."""
    return {int(found[1]) for kernel in kernels if not _MTP.search(kernel.name)
            for found in [LAYER.search(kernel.name)] if found}  # fmt: skip

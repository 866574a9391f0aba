"""Which term of the estimator a kernel's time belongs to, by its type, its scope and its communication group.

Types are CANN's (kernel_details.csv) and MindSpore's CPU operators; scopes are MindFormers' cell names.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tools.estimate.configuration import Configuration
from tools.profile.kernels import Kernel

COMPUTE = ("matmul", "attention", "elementwise", "optimizer")
COMMUNICATION = ("tp", "cp", "ep", "data", "pipeline")
OTHER = "not attributed"
_COLLECTIVE = re.compile(r"hcom_|hccl|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|batchsendrecv", re.I)
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
    """Whether it moves data between devices."""
    return kernel.core in ("HCCL", "COMMUNICATION") or bool(_COLLECTIVE.search(kernel.kind) or sends(kernel))


def sends(kernel: Kernel) -> bool:
    """Whether it is a send or receive between pipeline stages."""
    return bool(_POINT_TO_POINT.search(kernel.kind) or _POINT_TO_POINT.search(kernel.name))


def term_of(kernel: Kernel, config: Configuration) -> str:
    """The term that a kernel's time belongs to, or `OTHER`."""
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
    """Whether it is a part of an operator that the graph compiler took apart, which names no cell."""
    return kernel.name.startswith("Expand/")


def _around(kernel: Kernel) -> bool:
    """Whether it stands in the step's own cell, and not in a layer that lost its scope."""
    if not _AROUND.match(kernel.name):
        return False
    lost = _ROUTING.search(kernel.kind) or any(len(shape) > _WEIGHT for shape in kernel.inputs)
    return kernel.core != "Host" or not lost


def _words(kernel: Kernel) -> str:
    """A kernel's type; of older profiles, which leave it out, its name."""
    return kernel.name if kernel.kind in ("", "N/A") else kernel.kind


def _of_group(kernel: Kernel, config: Configuration) -> str:
    """The term of a collective: by what it does, its group's ranks, or because only one kind of parallelism is left."""
    if sends(kernel):
        return "pipeline"
    if re.search(r"all_?to_?all", kernel.kind, re.I):
        return "ep" if config.ep > 1 else "cp" if config.cp > 1 else OTHER
    if len(kernel.ranks) > 1:
        return _of_ranks(kernel.ranks, config)
    if _OPTIMIZER.search(kernel.name):
        return "data"
    copies = config.devices // config.pp // config.tp // config.cp
    kinds = {"tp": config.tp, "cp": config.cp, "data": max(copies, config.dp)}
    left = [name for name, ranks in kinds.items() if ranks > 1]
    return left[0] if len(left) == 1 and config.ep == 1 else OTHER


def _of_ranks(ranks: tuple[int, ...], config: Configuration) -> str:
    """By size and stride: tensor parallelism next to each other, then context, then data parallelism.

    Two kinds of parallelism that make the same group are not told apart.
    """
    strides = {after - before for before, after in pairwise(ranks)}
    size, stride = len(ranks), strides.pop() if len(strides) == 1 else 0
    inside = config.tp * config.cp
    if size == config.tp and stride == 1:
        return "tp"
    if size == config.cp and stride == config.tp:
        return "cp"
    if stride == inside or size in (config.dp, config.dp * config.cp, config.dp * inside) or stride == 0:
        return "data"
    return "data" if stride % config.tp == 0 else OTHER


def place(kernel: Kernel) -> str | None:
    """Where a kernel's scope puts it: "moe" or "layer", "optimizer"; None where its name says nothing.

    On a CPU "step" for what of the network is no layer: embedding, head and loss.
    """
    if LAYER.search(kernel.name) or _MTP.search(kernel.name):
        return "moe" if _EXPERTS.search(kernel.name) else "layer"
    if _OPTIMIZER.search(kernel.name) or _around(kernel):
        return "optimizer"
    return "step" if kernel.core == "Host" and _NETWORK.search(kernel.name) else None


def layer_numbers(kernels: tuple[Kernel, ...]) -> set[int]:
    """The decoder layers that scopes name; the layers of an MTP block have numbers of their own."""
    return {int(found[1]) for kernel in kernels if not _MTP.search(kernel.name)
            for found in [LAYER.search(kernel.name)] if found}  # fmt: skip

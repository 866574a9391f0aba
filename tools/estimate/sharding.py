"""How a run cuts one weight over its devices, and who shares what of the optimizer's state for it."""

from __future__ import annotations

from tools.estimate.configuration import Configuration
from tools.model.weights import Weight


def cut(weight: Weight, config: Configuration) -> int:
    """Over how many ranks the weight itself is cut."""
    if weight.split == "experts":
        return config.ep * (config.tp if config.expert_tp else 1)
    return config.tp if weight.split else 1


def copies(weight: Weight, config: Configuration) -> int:
    """Ranks of a stage that hold the same part of it."""
    return config.dp * config.tp * config.cp // cut(weight, config)


def group(weight: Weight, config: Configuration) -> int:
    """How many of these share shards; MindSpore shards nothing where `shard_size` does not divide them."""
    held, size = copies(weight, config), config.shard_size
    return held if not config.shard_optimizer or not size else 1 if held % size else size


def shards(weight: Weight, config: Configuration) -> int:
    """Over how many the optimizer spreads it: its group, or none where it does not divide or is small."""
    sharing = group(weight, config)
    rows = weight.rows // (1 if weight.split == "columns" else cut(weight, config))
    small = 4 * weight.size // cut(weight, config) < config.shard_threshold
    return 1 if not config.shard_optimizer or small or rows % sharing else sharing

"""This module reads `plugins.expert_balance` of a recipe, and checks whether experts can be counted and moved; every
default is defined here.

`Settings.read` reads the section; `check` refuses a recipe in which a move would fail in the middle of a run, or would
move only a part of the tensors that belong to an expert. `tc3 check` and the launch of a run call these functions. The
module needs no MindSpore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plugins.errors import RecipeError
from plugins.settings import WATCHES, Section, setting

KEY = "plugins.expert_balance"
METHODS = ("swaps", "aligned", "greedy", "random")
_BUDGETED = ("swaps", "aligned")  # plan from the placement there is, and may stop anywhere
_OPTIMIZERS = ("AdamW", "Muon")  # the executor knows their moments of a weight, and not PMA's averages


_SHARE = "write a share from 0 to below 1, such as "


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says how often experts move, by which method, and what is recorded."""

    KEY = KEY
    RIGHT = (
        "write every, method, moves, gate, memory, record, routers, spare under it (or {} for the defaults), or "
        f"{KEY}: False"
    )
    CHANGE = ("layout", "routes tokens between devices differently")

    every: int = setting(
        20, "steps between plans; 0 records only", "write steps between plans, 0 to record only", least=0
    )
    method: str = setting(
        "swaps",
        "`swaps`: swaps experts of the present placement; `aligned`: swaps only between equal places of two devices; "
        "`greedy`: plans from scratch, as EPLB and MindFormers do; `random`: shuffles, for tests",
        choices=METHODS,
    )
    moves: int | None = setting(
        None,
        "largest number of experts of a layer that a plan moves; null: no limit (`swaps` and `aligned`)",
        "write null, or a number from 2 on: one swap moves two experts",
        least=2,
        null=True,
    )
    gate: float = setting(
        0.01,
        "a layer moves only if its predicted max/mean falls by at least this share",
        f"{_SHARE}0.01",
        least=0,
        below=1,
    )
    memory: float = setting(
        0.8,
        "share of the old prediction that a step keeps; the prediction is an exponential moving average",
        f"{_SHARE}0.8",
        least=0,
        below=1,
    )
    record: bool = setting(True, "write `metrics/expert_load.jsonl`", "write True or False", change=WATCHES)
    routers: bool = setting(
        True,
        "write `metrics/routers.jsonl`: load, entropy, change and idle experts of each router, and alarms",
        "write True or False",
        change=WATCHES,
    )
    spare: int = setting(
        0,
        "slots of a device for copies of other devices' hot experts; data-parallel CPU workers only",
        "write slots of a device for copies, or 0 for none",
        least=0,
    )

    def agree(self) -> None:
        """Raise RecipeError if `moves` is set for a method that ignores it, or if the plugin would neither move experts
        nor record loads.
        """
        if self.moves is not None and self.method not in _BUDGETED:
            raise RecipeError(
                f"method {self.method} plans every placement from scratch, so it cannot obey a limit on moves; write "
                "moves: null, or method: swaps",
                f"{KEY}.moves",
            )
        if not self.every and not self.record and not self.routers:
            raise RecipeError(
                "with every: 0, record: False and routers: False the plugin neither moves experts nor records "
                f"anything; write {KEY}: False to leave it out",
                KEY,
            )
        if self.spare and not self.every:
            raise RecipeError(
                "copies of experts are planned together with moves, but every: 0 plans no moves; write every: 20, "
                "or spare: 0",
                f"{KEY}.spare",
            )
        if self.spare and not self.record:
            raise RecipeError(
                "a resumed run reads from the record which experts had copies, but record is False; write record: "
                "True, or spare: 0",
                f"{KEY}.spare",
            )


read = Settings.read


def moves(section: object) -> bool:
    """Return whether a recipe's `plugins.expert_balance` moves experts; None and False mean that the plugin is off."""
    return section is not None and section is not False and bool(read(section).every)


def without_moves(section: object) -> object:
    """Return a recipe's section `plugins.expert_balance` with which experts stay on their devices: a section that only
    records or, if `section` records nothing, False. A section that `Settings` refuses is returned unchanged.
    """
    ours, _ = Settings.look(section)
    if ours is None or not isinstance(section, Mapping):
        return section
    none = {"every": 0, **({"spare": 0} if ours.spare else {})}  # copies are planned together with moves
    return {**section, **none} if ours.record or ours.routers else False


def check(ours: Settings, *, counts: bool, expert_parallel: int, optimizer: str, experts: int, sharded: bool) -> None:
    """Refuse recipes in which a move of experts would fail in the middle of a run, or would move only some of the
    tensors that belong to an expert.

    Args:
        counts: whether the routers count their tokens (`moe_router_enable_expert_bias`).
        expert_parallel: the number of ranks that share the experts.
        optimizer: the type of the optimizer.
        experts: the number of experts of a layer.
        sharded: whether MindSpore shards the graph, on CPU or Ascend.

    Raises:
        RecipeError: a setting is wrong; the message names the key and a right value.
    """
    every = f"{KEY}.every"
    if not counts:
        raise RecipeError(
            "the router counts the tokens of each expert only if model.model_config.moe_router_enable_expert_bias is "
            f"True; set that key to True, or write {KEY}: False",
            KEY,
        )
    if ours.every and expert_parallel == 1:
        raise RecipeError(
            "experts cannot move, because each worker holds all of them (parallel_config.expert_parallel: 1); write "
            "0 to only record loads",
            every,
        )
    if ours.every and optimizer not in _OPTIMIZERS:
        raise RecipeError(
            f"only the optimizer states of {' and '.join(_OPTIMIZERS)} can move with an expert, and this recipe has "
            f"{optimizer}; write optimizer.type: {_OPTIMIZERS[0]}, or every: 0 to only record loads",
            every,
        )
    if ours.spare and sharded:
        raise RecipeError(
            "copies of experts train on data-parallel CPU workers only (context.device_target: CPU, "
            "parallel.parallel_mode: 0), because in a sharded graph nothing sends the weights of an expert to its "
            "copies; write 0. `tc3 experts report RUN --spare N` says how much copies would gain",
            f"{KEY}.spare",
        )
    if ours.spare > (others := experts - experts // expert_parallel):
        raise RecipeError(
            f"{ours.spare} spare slots of a device are more than the {others} experts on all other devices; write "
            f"{others} at most",
            f"{KEY}.spare",
        )

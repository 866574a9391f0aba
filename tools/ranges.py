"""This module defines the allowed ranges of numbers in command-line options and in recipes, and the options that many
commands have.

A number outside its range is a typing error or has a wrong unit (bytes for GiB), and some such numbers would keep a
tool busy for hours or exhaust its memory. The ranges are wide: they allow ten times the largest cluster that anybody
has built. No range contains NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import click


class Range(NamedTuple):
    """A `Range` is the range of allowed values of a number. The bounds are allowed values, too, except for the lower
    bound if `above` is True.

    Attributes:
        low, high: the bounds, in the unit of the number.
        whole: whether it must be an integer.
        above: whether it must lie above `low`.
    """

    low: float
    high: float
    whole: bool = True
    above: bool = False

    def refusal(self, value: Any) -> str | None:
        """Return what is wrong with `value`, as a text that follows the value's name in an error message. Return None
        if the value is in the range.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is not a number; {self.words}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"is not finite; {self.words}"
        if self.whole and value != int(value):
            return f"is not a whole number; {self.words}"
        return None if self.holds(value) else f"is out of range; {self.words}"

    def holds(self, value: float) -> bool:
        """Return whether `value` lies between the bounds."""
        return self.low < value <= self.high if self.above else self.low <= value <= self.high

    @property
    def words(self) -> str:
        """Return the range in words, such as ``"a whole number from 1 to 1,000,000"``."""
        kind = "a whole number" if self.whole else "a number"
        start = f"above {_plain(self.low)} and at most" if self.above else f"from {_plain(self.low)} to"
        return f"it must be {kind} {start} {_plain(self.high)}"


def short(value: Any) -> str:
    """Return a value as text for a message, without most digits of a number that has many."""
    text = str(value)
    return text if len(text) <= 30 else f"{text[:12]}... ({len(text)} digits)"


def _plain(number: float) -> str:
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:g}"


# what options of the command line may be, by what they count
RANGES = {
    "devices": Range(1, 1_000_000),
    "global_batch_size": Range(1, 10_000_000),
    "layers": Range(1, 10_000),
    "micro_batches": Range(1, 100_000),
    "steps": Range(1, 1_000_000_000),
    "curve_steps": Range(2, 1_000_000),  # of runs whose losses are compared
    "tokens": Range(1, 1e18),
    "vocab_size": Range(257, 10_000_000),
    "workers": Range(1, 4_096),
    "window": Range(1, 1_000_000),
    "reruns": Range(1, 1_000),
    "seed": Range(0, 2**32 - 1),
    "port": Range(1, 65_535),
    "restarts": Range(0, 100_000),
    "spares": Range(0, 100_000),  # hosts beyond those that a run needs
    "slots": Range(0, 100_000),  # of a device, for copies of experts
    "rows": Range(1, 1_000),  # of a table, a ranking, a report
    "seconds": Range(1e-6, 1_000_000, whole=False),
    "pause": Range(0.1, 86_400, whole=False),  # seconds between two looks
    "patience": Range(1, 86_400, whole=False),  # seconds for one host's answer
    "file_gb": Range(0.001, 10_000, whole=False),  # of a file of weights
    "files": Range(1, 256),  # written at once
    "stage": Range(0, 999),
    "effort": Range(1, 100_000),  # of a placement, tools.layout.budget
    "memory_gib": Range(0.001, 10_000, whole=False),
    "share": Range(0, 1, whole=False),
    "margin": Range(0, 0.9, whole=False),  # of a limit, that is to stay free
    "generated": Range(1, 100_000),  # tokens behind a prompt
    "temperature": Range(0, 1_000, whole=False),
    "top_k": Range(1, 10_000_000),
    "top_p": Range(0, 1, whole=False, above=True),
    "skew": Range(1, 1_000, whole=False),  # the busiest rank's load over the mean
}


_SHARE = Range(0, 1, whole=False)
_DEGREE = Range(1, 100_000)
_WIDTH = Range(1, 10_000_000)
_COUNT = Range(0, 1_000_000_000)
_FACTOR = Range(0, 10_000, whole=False)
_RATE = Range(0, 100, whole=False)
_TOKEN_ID = Range(-1_000_000_000, 1_000_000_000)
# what numbers of a recipe may be, by key, or by section and key where one name means two things. Wide: zero and
# negative numbers pass wherever MindFormers gives them a meaning. What else MindFormers refuses is `tools.check`'s, and
# the ranges of plugins' settings stand in the classes of the settings.
RECIPE: dict[str, Range] = {
    **dict.fromkeys(("data_parallel", "model_parallel", "context_parallel", "expert_parallel"), RANGES["devices"]),
    **dict.fromkeys(("pipeline_stage", "seq_split_num", "ulysses_degree_in_cp"), Range(1, 1_000)),
    **dict.fromkeys(("micro_batch_num", "micro_batch_interleave_num"), RANGES["micro_batches"]),
    **dict.fromkeys(("gradient_aggregation_group", "npu_nums_per_device"), _DEGREE),
    **dict.fromkeys(("batch_size", "global_batch_size", "gradient_accumulation_steps"), RANGES["global_batch_size"]),
    **dict.fromkeys(("num_hidden_layers", "num_layers"), RANGES["layers"]),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "mtp_num_layers"), Range(0, 10_000)),
    **dict.fromkeys(("moe_layer_freq", "recompute"), Range(0, 10_000)),
    **dict.fromkeys(("select_recompute", "select_comm_recompute"), Range(0, 10_000)),
    "offset": Range(-10_000, 10_000),
    "pp_interleave_num": Range(1, 100),
    "vocab_size": Range(1, 10_000_000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "ffn_hidden_size", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "kv_lora_rank"), _WIDTH),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_head_dim", "qk_nope_head_dim", "v_head_dim"), _WIDTH),
    **dict.fromkeys(("qk_pos_emb_head_dim", "qk_rope_head_dim"), _WIDTH),
    "q_lora_rank": Range(0, 10_000_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_query_groups"), _DEGREE),
    **dict.fromkeys(("n_routed_experts", "num_moe_experts", "expert_num", "num_experts_per_tok"), Range(0, 100_000)),
    **dict.fromkeys(("n_shared_experts", "shared_expert_num", "n_group", "topk_group"), Range(0, 100_000)),
    **dict.fromkeys(("seq_length", "max_position_embeddings", "max_length"), Range(1, 1_000_000_000)),
    **dict.fromkeys(("original_max_position_embeddings", "eod_pad_length"), Range(1, 1_000_000_000)),
    "compressed_eod_mask_length": Range(1, 1_000_000_000),
    **dict.fromkeys(("eod", "pad", "bos_token_id", "eos_token_id", "pad_token_id", "ignore_token_id"), _TOKEN_ID),
    "sizes": Range(0, 1e15),
    "epochs": Range(1, 1_000_000_000),
    "sink_size": Range(-1, 1_000_000_000),
    **dict.fromkeys(("stop_step", "warmup_steps", "warmup_epochs", "decay_steps", "per_print_times"), _COUNT),
    "total_steps": Range(-1, 1_000_000_000),
    **dict.fromkeys(("save_interleaved_steps", "save_max"), Range(1, 1_000_000_000)),
    **dict.fromkeys(("save_checkpoint_steps", "keep_checkpoint_max"), _COUNT),
    **dict.fromkeys(("step_interval", "eval_step_interval", "scale_window"), Range(1, 1_000_000_000)),
    **dict.fromkeys(("num_parallel_workers", "prefetch_size", "reshard_worker_num"), RANGES["workers"]),
    **dict.fromkeys(("transform_process_num", "num_dataset_builder_threads"), RANGES["workers"]),
    "seed": RANGES["seed"],
    "device_id": RANGES["devices"]._replace(low=0),
    "max_call_depth": Range(1, 1_000_000_000),
    "parallel_optimizer_threshold": _COUNT,  # KiB
    "optimizer_weight_shard_size": RANGES["devices"]._replace(low=-1),
    **dict.fromkeys(("max_device_memory", "mempool_block_size"), RANGES["memory_gib"]),  # written as "55GB"
    **dict.fromkeys(("learning_rate", "lr_end", "warmup_lr_init", "base_lr", "eta_min"), _RATE),
    **dict.fromkeys(("weight_decay", "topk_bias_update_rate", "moe_router_bias_update_rate"), _RATE),
    **dict.fromkeys(("warmup_ratio", "decay_ratio", "attention_dropout", "hidden_dropout", "betas"), _SHARE),
    **dict.fromkeys(("beta1", "beta3", "partial_rotary_factor", "rotary_percent"), _SHARE),
    "eps": Range(0, 1, whole=False, above=True),
    **dict.fromkeys(("rms_norm_eps", "layernorm_epsilon"), _SHARE),
    "max_grad_norm": Range(0, 1_000_000, whole=False),
    **dict.fromkeys(("scale_sense", "loss_scale_value", "loss_scale"), Range(0, 2**64, whole=False, above=True)),
    **dict.fromkeys(("initializer_range", "init_method_std"), _RATE),
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_factor"), _FACTOR),
    **dict.fromkeys(("mtp_loss_scaling_factor", "routed_scaling_factor", "moe_router_topk_scaling_factor"), _FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim", "scale_factor"), _FACTOR),
    **dict.fromkeys(("beta_fast", "beta_slow"), Range(0, 1_000_000, whole=False)),
    **dict.fromkeys(("rope_theta", "rotary_base"), Range(0, 1e15, whole=False, above=True)),
    **dict.fromkeys(("rotary_scaling_factor", "rope_scaling.factor"), Range(0, 1_000_000, whole=False, above=True)),
}


def recipe_range(words: Sequence[str]) -> Range | None:
    """Return the range of allowed values of a number in a recipe, given its key path without list indices; return None
    if no range is defined, as for the settings of a plugin, whose class defines it.
    """
    if not words or words[0] == "plugins":
        return None
    return RECIPE.get(".".join(words[-2:])) or RECIPE.get(words[-1])


class Number(click.ParamType):
    """A `Number` is the type (of the library `click`) of an option whose number must lie in a range of `RANGES`. The
    option's value is an int if the range allows only whole numbers.
    """

    def __init__(self, name: str) -> None:
        self.range = RANGES[name]
        self.name = "integer" if self.range.whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Parse the number and check that the number is in the range.

        Raises:
            click.BadParameter: not a number, not finite or out of range.
        """
        try:
            number = value if isinstance(value, int | float) else _parse(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number; {self.range.words}", param, ctx)
        refusal = self.range.refusal(number)
        if refusal:
            self.fail(f"{value} {refusal}", param, ctx)
        return int(number) if self.range.whole else float(number)


class Tokens(Number):
    """A `Tokens` is the type (of the library `click`) of an option for a number of tokens, such as 300M, 1.5B, 10T or
    2e12.
    """

    def __init__(self) -> None:
        super().__init__("tokens")
        self.name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Read the unit in a text, and parse the number as `Number` does; ``1.5B`` is exactly 1,500,000,000.

        Raises:
            click.BadParameter: not of that form, no whole number, or out of range.
        """
        text = str(value).strip()
        power = {"K": 3, "M": 6, "B": 9, "T": 12}.get(text[-1:].upper(), 0)
        try:
            number = Decimal(text[:-1] if power else text).scaleb(power)
        except ArithmeticError:  # of the decimals: no number, or one beyond all
            self.fail(f"{value!r} is not a number of tokens: write 2000000, 300M, 1.5B, 10T or 2e12", param, ctx)
        if not number.is_finite() or number.adjusted() > 30:
            return super().convert(float(number), param, ctx)
        return super().convert(int(number) if number == int(number) else float(number), param, ctx)


class Folder(click.Path):
    """A `Folder` is the type (of the library `click`) of an option that names a folder to which a command writes. An
    empty name, such as that of an unset variable of a script, is refused, because it would mean the working folder.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path of the folder.

        Raises:
            click.BadParameter: the name is empty.
        """
        if value == "":
            self.fail("the name is empty; write the path of a folder, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


def is_number(text: str) -> bool:
    """Return whether a text is a number as Python reads it, "nan" and "inf" included."""
    try:
        float(text)
        return True
    except ValueError:
        return False


def _parse(text: str) -> int | float:
    """Return the number that a text holds; the digits of an integer stay exact."""
    try:
        return int(text)
    except ValueError:
        return float(text)


overrides_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has."
)
jobs_option = click.option(
    "--jobs",
    type=Number("workers"),
    help="Run this many compiles at the same time.  [default: as many as fit into memory]",
)
steps_option = click.option(
    "--steps",
    type=Number("steps"),
    help="Train this many steps in total; the recipe's number of samples is changed to match.",
)
no_bind_option = click.option(
    "--no-bind", is_flag=True, help="Do not bind workers to cores, but let Linux and MindSpore choose the cores."
)

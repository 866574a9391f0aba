"""This module checks numbers of a recipe that must fit each other: devices, parallel degrees, shapes, batches, heads.
Each rule of this module names the line of MindFormers' code that requires the rule.

Attention heads have widths, and tensor and context parallelism divide the heads. For context parallelism that exchanges
heads (`ulysses_degree_in_cp`), dry runs showed that MindFormers 1.9.0 does not pass the degree to flash attention: keys
and values are still gathered over all context-parallel ranks, in addition to the exchange of heads; and most models do
not compile.
"""

from __future__ import annotations

import math
from typing import Any

from plugins.batch_ramp.plan import scheduled
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from tools.check.groups import SHARD, SIZES, refused_group, splits_over
from tools.estimate.from_recipe import DEGREE, compiles_sharded_gradients, not_compiled, shards_gradients
from tools.model import model_of
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath, dotted
from tools.recipe.view import LOADER, MODEL, PARALLEL, View
from tools.schema.converter import Built

_COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]
_STRATEGY, _BROADCAST = ("parallel", "dataset_strategy"), (*LOADER, "use_broadcast_data")
_SHARD_SIZE = ("parallel", "parallel_optimizer_config", SHARD)


def check_arithmetic(view: View, built: Built, found: Findings) -> None:
    """Check every rule that concerns only sizes of the recipe, and add the violations to `found`."""
    _experts(view, built, found)
    _router(view, built, found)
    _shared(view, built, found)
    check_heads(view, built, found)
    _batches(view, found)
    _dataset(view, built, found)
    _schedule(view, found)
    if view.parallel:
        _divisions(view, built, found)
        _groups(view, built, found)
        _nodes(view, built, found)
        _strategy(view, found)
        _fill(view, built, found)
        _optimizer_shard(view, found)
        _endless_compile(view, built, found)
        _lost_gradients(view, built, found)


def _experts(view: View, built: Built, found: Findings) -> None:
    experts, topk = built.number("num_moe_experts"), built.number("moe_router_topk")
    layers, dense = built.number("num_layers"), built.number("first_k_dense_replace")
    if experts and topk > experts:
        found.error(
            (*MODEL, "num_experts_per_tok"),
            f"a token cannot choose {topk} of {experts} experts",
            f"write at most {experts}",
        )
    if dense > layers:
        wrong = f"the model has only {layers} layers, not {dense}"
        found.error((*MODEL, "first_k_dense_replace"), wrong, f"write at most {layers}", rule="dense_replace")
    frequency = built.fields.get("moe_layer_freq")
    if dense and type(frequency) is int and frequency > 1:
        wrong = "the key cannot be combined with first_k_dense_replace"
        found.error((*MODEL, "moe_layer_freq"), wrong, "write 1", rule="layer_freq")
    template = [0] * dense + [1] * (layers - dense)
    if isinstance(frequency, list) and (frequency != template if dense else len(frequency) != layers):
        wrong = f"the list does not describe {layers} layers of which the first {dense} are dense"
        found.error((*MODEL, "moe_layer_freq"), wrong, "leave the key out", rule="layer_freq_list")
    if experts and view.parallel:
        both = math.gcd(experts, view.dp * view.tp)
        right = f"write {max(each for each in range(1, min(both, view.ep) + 1) if both % each == 0)}"
        if experts % view.ep:
            wrong = f"{experts} experts cannot be divided over {view.ep} ranks"
            found.error((*PARALLEL, "expert_parallel"), wrong, right, rule="ep_experts")
        if view.dp * view.tp % view.ep:
            wrong = f"{view.ep} does not divide data_parallel x model_parallel = {view.dp} x {view.tp}"
            found.error((*PARALLEL, "expert_parallel"), wrong, right, rule="ep_devices")
    elif view.parallel and view.ep > 1 and not experts:
        found.error((*PARALLEL, "expert_parallel"), "the model has no experts", "write 1")


def _router(view: View, built: Built, found: Findings) -> None:
    """Check the keys of group-limited routing."""
    groups, chosen = built.number("moe_router_num_groups"), built.number("moe_router_group_topk")
    experts, topk = built.number("num_moe_experts"), built.number("moe_router_topk")
    if not experts or not chosen:
        return
    path = (*MODEL, "topk_group")
    if not groups:
        found.error(path, "the key needs n_group", "set n_group, or write topk_group: 0", rule="group_topk")
    elif experts % groups:
        found.error(
            (*MODEL, "n_group"), f"{experts} experts cannot be divided into {groups} groups", rule="group_experts"
        )
    elif chosen > groups:
        found.error(
            path,
            f"a token cannot choose {chosen} of {groups} groups",
            f"write at most {groups}",
            rule="group_topk_fits",
        )
    elif topk % chosen:
        found.error(path, f"{chosen} does not divide num_experts_per_tok {topk}", rule="topk_group_divides")


def _shared(view: View, built: Built, found: Findings) -> None:
    """Check the number of shared experts against their width; MindFormers builds them by the width."""
    width, each = built.number("moe_shared_expert_intermediate_size"), built.number("moe_ffn_hidden_size")
    path = next((path for name in ("n_shared_experts", "shared_expert_num") if view.has(path := (*MODEL, name))), None)
    if path is None or not width or not built.number("num_moe_experts"):
        return
    count, key = built.number("shared_expert_num"), "moe_shared_expert_intermediate_size"
    if view.get(path) == 0:
        wrong = f"0 has no effect, because {key} is {width}, and MindFormers builds shared experts of that width"
        found.error(path, wrong, f"write {key}: null, or the number of shared experts here", rule="shared_width")
    elif count and width != count * each:
        wrong = (
            f"{count} experts of moe_intermediate_size {each} are {count * each} wide together, but {key} is {width}"
        )
        found.warning(
            path, f"{wrong}, which is what MindFormers builds", f"write {key}: {count * each}", "shared_width"
        )


def _divisions(view: View, built: Built, found: Findings) -> None:
    """Check what tensor and context parallelism cut into equal parts."""
    tp, cp, seq = view.tp, view.cp, built.number("seq_length")
    for key, name in (
        *(("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"), ("intermediate_size", "ffn_hidden_size")),
        ("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ):
        size = built.number(name)
        if size and size % tp:
            found.error(
                (*MODEL, key), f"{size} cannot be divided over {tp} tensor-parallel ranks", f"write a multiple of {tp}"
            )
    if seq % cp:
        found.error((*PARALLEL, "context_parallel"), f"{cp} does not divide seq_length {seq}")
    elif view.flag((*PARALLEL, "use_seq_parallel")) and seq % (tp * cp):
        wrong = f"sequence parallelism cannot cut seq_length {seq} into {tp} x {cp} equal parts"
        found.error((*PARALLEL, "use_seq_parallel"), wrong)


def _groups(view: View, built: Built, found: Findings) -> None:
    """Check that MindSpore supports the number of devices, and that it can create the communication groups of the
    parallel degrees.
    """
    if not splits_over(view.devices):
        wrong = f"the degrees make {view.devices} devices, and MindSpore splits a model over {SIZES} only"
        found.error((*PARALLEL, "data_parallel"), wrong, "write degrees whose product is such a number")
    elif refused := refused_degree(view, built):
        path, wrong = refused
        if view.sharded_on_cpu:
            right = "write powers of two for the degrees that divide a server of 8 devices"
            if path == _SHARD_SIZE:
                right = "write a power of two, or -1 to shard over as many ranks as possible"
            found.error(path, wrong, right)
        else:
            found.note(path, f"{wrong}, so that tc3 dryrun cannot compile the recipe")


def refused_degree(view: View, built: Built) -> tuple[KeyPath, str] | None:
    """Return the key of a parallel degree that leads to a communication group which MindSpore refuses without an NPU,
    and the reason; return None if there is no such group.
    """
    ep = view.ep if built.number("num_moe_experts") and view.dp * view.tp % view.ep == 0 else 1
    refused = refused_group(view.dp, view.cp, view.tp, ep, _shard_size(view))
    if refused is None:
        return None
    ranks = f"{refused.ranks} ranks that are {refused.stride} apart"
    wrong = f"without an NPU MindSpore makes no communication group of {ranks}, as they lie differently on servers"
    return _SHARD_SIZE if refused.key == SHARD else (*PARALLEL, refused.key), wrong


def _shard_size(view: View) -> int:
    """Return `optimizer_weight_shard_size`; 0 if the optimizer is not sharded, or shards over all ranks."""
    size = view.get(_SHARD_SIZE)
    return size if type(size) is int and view.flag(("parallel", "enable_parallel_optimizer")) else 0


def _nodes(view: View, built: Built, found: Findings) -> None:
    """Check tensor-parallel and expert groups against the node: npu_nums_per_device devices."""
    node = built.number("npu_nums_per_device", DEVICES_PER_NODE)
    if view.tp > node or (view.devices >= node and node % view.tp):
        wrong = f"{view.tp} tensor-parallel ranks do not fit into a node of {node} devices"
        found.warning(
            (*PARALLEL, "model_parallel"),
            wrong,
            f"write a divisor of {node}, because tensor parallelism communicates in every layer",
        )
    if (experts := built.number("num_moe_experts")) and view.ep > node and view.ep % node:
        wrong = f"an expert group of {view.ep} devices does not fill a whole number of nodes of {node} devices"
        right = f"write a divisor of the {experts} experts that also is a divisor or a multiple of {node}"
        found.warning((*PARALLEL, "expert_parallel"), wrong, right)


def _batches(view: View, found: Findings) -> None:
    steps = view.number(("runner_config", "gradient_accumulation_steps"), 1)
    path = ("runner_config", "gradient_accumulation_steps")
    if steps > 1 and not view.parallel:
        found.error(
            path,
            f"MindFormers silently replaces {steps} by 1 outside semi-auto parallel mode",
            "write 1",
            rule="accumulation_alone",
        )
    elif steps > 1 and view.pp > 1:
        wrong = f"MindFormers silently replaces {steps} by 1 in a pipeline"
        found.error(path, wrong, "write 1, and raise micro_batch_num", rule="accumulation_pipeline")
    micro = view.number((*PARALLEL, "micro_batch_num"), 1)
    if view.parallel and view.pp == 1 and micro > 1:
        wrong = f"MindFormers replaces {micro} by 1 without a pipeline"
        found.error((*PARALLEL, "micro_batch_num"), wrong, "write 1", rule="micro_without_pipeline")
    for key, value in {"data_parallel": view.dp, "expert_parallel": view.ep}.items():
        if value > 1 and not view.flag(("use_parallel",)):
            wrong, right = f"{value} has no effect without use_parallel", "write use_parallel: True, or write 1 here"
            found.error((*PARALLEL, key), wrong, right)
    if view.cpu_classes and view.devices == 1 and view.flag(("use_parallel",)):
        wrong, right = "MindSpore fails with a CPU worker that is alone in its group", "write use_parallel: False"
        found.error(("use_parallel",), wrong, right)
    for key, value in {"model_parallel": view.tp, "pipeline_stage": view.pp, "context_parallel": view.cp}.items():
        if value > 1 and not view.parallel:
            wrong = f"MindFormers silently replaces {value} by 1 outside semi-auto parallel mode"
            found.error(
                (*PARALLEL, key),
                wrong,
                "write 1 here, or set parallel_mode: 1 and use_parallel: True",
                rule="accumulation_alone",
            )


def _fill(view: View, built: Built, found: Findings) -> None:
    """Check that there are enough micro-batches for the stages; MindSpore's schedulers differ in whether they require
    it. With lazy inline, which MindFormers switches on in a pipeline, MindSpore schedules what is not interleaved as
    seqpipe, which takes any number above one; so does gpipe.
    """
    path, micro = (*PARALLEL, "micro_batch_num"), view.micro_batches
    if micro >= view.pp or view.scheduler == "zero_bubble_v":
        return
    wrong, rule = f"{micro} micro-batches do not fill {view.pp} stages", ""
    interleaved = view.flag(("parallel", "pipeline_config", "pipeline_interleave"))
    if micro == 1:
        rule = "micro_one"
    elif interleaved and view.scheduler == "1f1b":
        rule = "micro_interleaved"
    elif view.scheduler in ("seqvpp", "seqsmartvpp"):
        rule = "micro_seqvpp"
    elif not interleaved and built.fields.get("disable_lazy_inline") is True:
        rule = "micro_not_inlined"
    if rule:
        found.error(path, f"{wrong}, as MindSpore requires for this schedule", f"write at least {view.pp}", rule=rule)
    else:
        idle = 1 - micro / (micro + view.pp - 1)
        found.warning(
            path, f"{wrong}, so that a stage is idle for about {idle:.0%} of a step", f"write at least {view.pp}"
        )


def columns_of(view: View) -> list[str]:
    """Return the names of the columns that Megatron's GPTDataset returns with the recipe's mask settings."""
    if view.flag((*LOADER, "config", "create_compressed_eod_mask")):
        return [*_COLUMNS, "actual_seq_len"]
    return [*_COLUMNS, "attention_mask"] if view.flag((*LOADER, "config", "create_attention_mask"), True) else _COLUMNS


def _dataset(view: View, built: Built, found: Findings) -> None:
    """Check the dataset's samples against the model's input."""
    seq = built.number("seq_length")
    if not view.megatron:  # handlers of HFDataLoader cut samples to a length of their own
        handlers = view.get((*LOADER, "handler"))
        for index, handler in enumerate(handlers if isinstance(handlers, list) else []):
            length = handler.get("seq_length") if isinstance(handler, dict) else None
            if type(length) is int and length != seq:
                wrong = f"the samples have {length} tokens, but the model has seq_length {seq}"
                found.error((*LOADER, "handler", index, "seq_length"), wrong, f"write {seq}")
        return
    wanted = columns_of(view)
    path = (*LOADER, "config", "seq_length")
    length = view.get(path)
    if type(length) is int and length != seq:
        found.error(path, f"the samples have {length} tokens, but the model has seq_length {seq}", f"write {seq}")
    elif length is None:
        found.error((*LOADER, "config"), "seq_length is missing in this section", f"write seq_length: {seq}")
    for key in ("input_columns", "construct_args_key"):
        columns = view.get(("train_dataset", key))
        if isinstance(columns, list) and columns != wanted and set(map(str, columns)) != set(wanted):
            wrong = f"{columns} are not the columns that the dataset returns"
            found.error(("train_dataset", key), wrong, f"write {wanted}", rule="columns")
    sizes = view.get((*LOADER, "sizes"))
    if isinstance(sizes, list) and sizes and type(sizes[0]) is int and 0 <= sizes[0] < view.global_batch:
        wrong = f"{sizes[0]} samples are fewer than the {view.global_batch} samples of one step"
        found.error((*LOADER, "sizes"), wrong, "ask for more samples", rule="dataset_size")


def _strategy(view: View, found: Findings) -> None:
    """Check dataset_strategy against data_parallel and the columns; MindFormers fills one in where there is none."""
    strategy, advice = view.get(_STRATEGY), f"write [[{view.dp}, 1], ...]" + ", or leave the key out" * view.megatron
    asks = view.megatron or (view.get((*LOADER, "type")) == "HFDataLoader" and view.flag(_BROADCAST, True))
    if view.full_batch and asks and view.devices > 1:
        wrong = "'full_batch' is not a list of lists of numbers, by which the loader finds the ranks that read data"
        found.error(_STRATEGY, wrong, advice, rule="strategy_whole")
        return
    if strategy is None or (strategy == "full_batch" and view.flag(("parallel", "full_batch"), True)):
        return
    if not isinstance(strategy, list) or not all(_whole(row) for row in strategy):
        found.error(_STRATEGY, f"{strategy!r} is not a list of lists of numbers", advice, rule="strategy_list")
        return
    wrong_rows = [row for row in strategy if row[0] != view.dp]
    if wrong_rows:
        wrong = f"the value cuts the batch into {wrong_rows[0][0]} parts, but data_parallel is {view.dp}"
        found.error(_STRATEGY, wrong, f"write {view.dp} as the first number of every entry", rule="strategy_dp")
        return
    columns = columns_of(view) if view.megatron else view.get(("train_dataset", "input_columns"))
    if not isinstance(columns, list):
        return
    right = [[view.dp, 1, 1, 1] if name == "attention_mask" else [view.dp, 1] for name in columns]
    if len(strategy) != len(right):
        wrong = f"the list has {len(strategy)} entries for {len(right)} columns ({', '.join(map(str, columns))})"
        found.error(_STRATEGY, wrong, f"write {right}", rule="strategy_list")
        return
    for row, wanted, column in zip(strategy, right, columns, strict=True):
        if len(row) != len(wanted) or any(part != 1 for part in row[1:]):
            found.error(_STRATEGY, f"{row} does not fit the column {column}", f"write {wanted}", rule="strategy_list")


def _endless_compile(view: View, built: Built, found: Findings) -> None:
    """Report sharded gradients of several micro-batches, which MindSpore does not finish compiling, and several
    micro-batches without lazy inline, which MindSpore does not compile, whether gradients are sharded or not.
    """
    path, lazy_inline = (*MODEL, "disable_lazy_inline"), built.fields.get("disable_lazy_inline") is not True
    if not lazy_inline and view.accumulation > 1:
        wrong = "without lazy inline MindSpore 2.9.0 does not compile gradient_accumulation_steps above 1"
        found.error(path, wrong, "write False", rule="accumulation_not_inlined")
    elif not lazy_inline and view.pp > 1:
        found.warning(path, "MindSpore 2.9.0 compiled no pipeline that was tried without lazy inline", "write False")
    if shards_gradients(view) and not compiles_sharded_gradients(view.pp, lazy_inline, view.accumulation):
        section = ("parallel", "parallel_optimizer_config")
        level = view.get((*section, "optimizer_level")) == "level2"
        path = (*section, "optimizer_level" if level else "gradient_accumulation_shard")
        wrong = "MindSpore 2.9.0 does not finish compiling sharded gradients of several micro-batches"
        right = "leave the key out; a larger parallel_config.expert_parallel also makes gradients smaller"
        found.error(path, wrong, f"{right}, see docs/memory.md", rule="endless_compile")


def _lost_gradients(view: View, built: Built, found: Findings) -> None:
    """Report weights of which no other rank has a copy, whose accumulated gradients nobody reads. MindSpore 2.9.0 hands
    a weight's accumulated gradient on where it reduces it. One that it need not reduce gets zeros, and with optimizer
    sharding MindFormers takes what is handed on instead of what was accumulated. A pipeline is another pass of
    MindSpore, and right.
    """
    if view.accumulation == 1 or not view.flag(("parallel", "enable_parallel_optimizer"), False):
        return
    whole, experts = without_copies(view.dp, view.tp, view.cp, view.ep, built.number("num_moe_experts"))
    if whole:
        weights, right = "weights that model_parallel cuts" if view.tp > 1 else "all weights", ""
    elif experts:
        weights, right = "experts", "write a smaller parallel_config.expert_parallel, or "
    else:
        return
    wrong = (
        f"with enable_parallel_optimizer the gradients of {weights} become zero, because no other rank has a "
        "copy of them"
    )
    right += "write parallel.enable_parallel_optimizer: False, or write 1 here"
    found.error(("runner_config", "gradient_accumulation_steps"), wrong, right, rule="lost_gradients")


def without_copies(dp: int, tp: int, cp: int, ep: Any, experts: int) -> tuple[bool, Any]:
    """Return two results: whether no weight has a copy on another rank, and whether no expert has one; `ep` may be an
    array.
    """
    return dp * cp == 1, (ep == dp * tp * cp) & (experts > 0)


def _whole(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(item) is int and item > 0 for item in row)


def _optimizer_shard(view: View, found: Findings) -> None:
    """Check that optimizer_weight_shard_size divides a weight's copies, and how the level settles the gradients."""
    section = ("parallel", "parallel_optimizer_config")
    gradients, level = (*section, "gradient_accumulation_shard"), view.get((*section, "optimizer_level"))
    if view.has(gradients) and level in ("level1", "level3"):
        wrong = f"MindSpore refuses this key, True or False, together with optimizer_level {level}"
        right = "leave the key out" + ", or write optimizer_level: level2" * (view.pp == 1)
        found.error(gradients, wrong, right, rule="optimizer_level_gradients")
    elif view.get(gradients) is False and level == "level2":
        wrong = "optimizer_level level2 silently sets this key to True"
        found.error(gradients, wrong, "write True, or leave the key out")
    if level == "level3":
        more = (
            'MindSpore 2.9.0 failed to compile every pipeline that was tried with level3 ("The pointer[context] is '
            'null"), and '
        ) * (view.pp > 1)
        found.warning(
            (*section, "optimizer_level"), f"{more}the memory model does not know level3", "see docs/memory.md"
        )
    path, size = _SHARD_SIZE, view.get(_SHARD_SIZE)
    copies = view.dp * view.cp
    if type(size) is int and size != -1:
        if size < 1:
            found.error(
                path,
                f"{size} is neither -1 nor a number of ranks",
                "write -1 to shard over as many ranks as possible",
                rule="optimizer_shard",
            )
        elif copies % size:
            found.error(path, f"{size} does not divide the {copies} data-parallel copies", rule="optimizer_shard")


def _schedule(view: View, found: Findings) -> None:
    """Check the warm-up of the learning rate against the steps of the schedule and of the run."""
    key = ("lr_schedule", "warmup_steps")
    by_ratio = view.get(("lr_schedule", "warmup_ratio")) is not None  # which MindFormers takes in its place
    warmup, total = 0 if by_ratio else view.number(key, 0), view.number(("lr_schedule", "total_steps"), 0)
    epochs = view.number(("runner_config", "epochs"), 1)
    trained = epochs * view.ramp.steps_of(view.samples)
    if 0 < total < warmup:
        wrong = f"the warm-up of {warmup} steps is longer than the {total} steps of the schedule"
        found.error(key, wrong, "write less than total_steps")
    elif 0 < scheduled(view.recipe, view.ramp, trained) < warmup:
        wrong = f"the run ends after {trained} steps, within the warm-up of {warmup} steps"
        found.warning(key, wrong, f"write a smaller number, or more samples ({dotted(view.samples_key or ())})")
    rates = (("lr_schedule",), ("grouped_lr_schedule",), ("optimizer", "learning_rate"))
    if all(view.get(path) is None for path in rates):
        found.error(("optimizer",), "the recipe has neither lr_schedule nor learning_rate", "write a schedule")


_ALGORITHM = (*PARALLEL, "context_parallel_algo")


def check_heads(view: View, built: Built, found: Findings) -> None:
    """Check every rule about the number of attention heads, and add the violations to `found`."""
    heads, hidden = built.number("num_attention_heads"), built.number("hidden_size")
    tp = view.tp if view.parallel else 1
    ulysses = view.number(DEGREE, 1) if view.parallel else 1
    latent = bool(built.fields.get("multi_latent_attention"))
    groups = 0 if latent else built.number("num_query_groups")
    right = f"write {math.gcd(heads, groups, tp)}"
    if heads % tp:
        wrong = f"{heads} heads cannot be divided over {tp} tensor-parallel ranks"
        found.error((*PARALLEL, "model_parallel"), wrong, right, rule="heads_tp")
    elif heads % (tp * ulysses):
        wrong = f"{heads} heads cannot be divided over model_parallel x ulysses_degree_in_cp = {tp} x {ulysses}"
        found.error(DEGREE, wrong, "write a smaller degree", rule="heads_cp")
    if view.parallel and view.cp % max(ulysses, 1):
        fit = f"write {math.gcd(ulysses, view.cp, heads // math.gcd(heads, tp))}"
        found.error(DEGREE, f"{ulysses} does not divide context_parallel {view.cp}", fit, rule="heads_cp")
    _ulysses(view, built, found)
    if latent:
        query = built.number("qk_head_dim") + built.number("qk_pos_emb_head_dim")
        if built.number("v_head_dim") > query:
            wrong = f"the value is larger than qk_head_dim + qk_pos_emb_head_dim = {query}"
            found.error((*MODEL, "v_head_dim"), wrong, rule="v_head_dim")
        if built.number("qk_pos_emb_head_dim") % 2:
            found.error(
                (*MODEL, "qk_pos_emb_head_dim"), "RoPE rotates pairs of numbers, so that this size must be even"
            )
        groups = view.number((*MODEL, "num_key_value_heads"), heads)
        if groups < heads:
            wrong = f"{groups} has no effect, because latent attention has a key and a value of each of {heads} heads"
            right = f"write {heads}, or multi_latent_attention: False for a model without latent attention"
            # it does nothing in a recipe that asks for latent attention; without that, the user means grouped queries
            tell = found.warning if view.get((*MODEL, "multi_latent_attention")) else found.error
            tell((*MODEL, "num_key_value_heads"), wrong, right)
    else:
        if groups and heads % groups:
            found.error((*MODEL, "num_key_value_heads"), f"{heads} heads cannot be divided into {groups} groups")
        if groups and groups % tp:
            wrong = f"{groups} key-value heads cannot be divided over {tp} tensor-parallel ranks"
            found.error((*PARALLEL, "model_parallel"), wrong, right)
        if heads and hidden % heads:  # even where head_dim is given
            found.error((*MODEL, "num_attention_heads"), f"hidden_size {hidden} cannot be divided by {heads} heads")


def _ulysses(view: View, built: Built, found: Findings) -> None:
    """Warn of Ulysses settings that have no effect, and refuse those that do not compile."""
    try:
        model = model_of(built.fields)
    except (KeyError, TypeError, ValueError):
        model = None
    degree = view.number(DEGREE, 1) if view.parallel else 1
    if view.get(_ALGORITHM) == "ulysses_cp" and view.parallel and degree == 1 < view.cp:
        wrong = (
            "ulysses_cp has no effect on its own: MindFormers reads only ulysses_degree_in_cp, and with a degree of 1 "
            "it gathers keys and values"
        )
        found.warning(_ALGORITHM, wrong, "write colossalai_cp, which names what runs", rule="heads_cp")
    if degree <= 1 or view.cp % degree or (model and model.heads % (view.tp * degree)):
        return  # nothing, or said already
    refused = not_compiled(model) if model else None
    if refused:
        found.error(DEGREE, refused[0], "write 1", rule=refused[1])
    else:
        wrong = (
            "MindFormers still gathers keys and values over all context-parallel ranks, and exchanges heads in addition"
        )
        found.warning(DEGREE, wrong, "write 1")

"""Rows whose `config` is what a MindFormers model card links: `model`, `moe`, `parallel`, `recompute`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.estimate.configuration import Configuration, Recompute, Table, even_layers, spread
from tools.estimate.published.stacks import Unexpressed, public_class
from tools.hardware.units import short_dtype
from tools.model.architecture import Model, pattern_of
from tools.pipeline.schedules import schedule_of


def mindformers_row(config: Mapping[str, Any]) -> tuple[Configuration, int, list[str]]:
    """(configuration, samples of the row's step, assumptions).

    Raises:
        Unexpressed: LoRA, or a model whose dimensions are not known.
    """
    if config.get("lora"):
        raise Unexpressed("LoRA trains a few weights only; that is not modelled")
    parallel, written = config["parallel"], config["model"]
    assumed: list[str] = []
    model = _model(written, config.get("moe") or {}, assumed)
    dp, tp, pp, cp = (parallel.get(name) or 1 for name in ("dp", "tp", "pp", "cp"))
    chunks = written.get("pp_interleave_num") or 1
    layers = _layers(model.layers, written.get("offset") or 0, pp, chunks)
    runs = parallel.get("micro_batch_num") if pp > 1 else parallel.get("gradient_accumulation")
    samples = config.get("global_batch") or dp * config["batch_size"] * (runs or 1)
    made = Configuration(
        model=model,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=parallel.get("ep") or 1,
        layers=layers,
        schedule=schedule_of("1f1b", chunks if pp > 1 else 1),
        sequence=written["seq_length"],
        batch=config["batch_size"],
        micro_batches=runs or 1,
        dtype=short_dtype(written.get("compute_dtype"), "bf16"),
        recompute=_recompute(config.get("recompute") or {}, layers),
        sequence_parallel=bool(parallel.get("use_seq_parallel")),
        shard_optimizer=bool(parallel.get("enable_parallel_optimizer")),
        shard_threshold=64 * 1024,
        wide_gradients=written.get("param_init_type") == "float32",
        flash=written.get("use_flash_attention") is not False,
        fused=False,
        overlap_dp=True,
        keep_gathered=True,
    )
    if samples != made.global_batch:
        assumed.append(f"a step of {made.global_batch} samples; the row speaks of {samples}, for the same throughput")
    return made, samples, assumed


def _model(written: Mapping[str, Any], moe: Mapping[str, Any], assumed: list[str]) -> Model:
    kind = str(written.get("type"))
    layers, hidden = written.get("num_layers"), written.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise Unexpressed(f"not given: layers and hidden size of {kind}")
    known = public_class(kind, layers, hidden)
    heads = written.get("num_heads") or known.get("heads")
    vocab = written.get("vocab_size") or known.get("vocab")
    if not heads or not vocab:
        raise Unexpressed(f"not given: heads and vocabulary of {kind}")
    ffn = written.get("intermediate_size") or known.get("ffn") or _llama_width(written, hidden)
    if known:
        assumed.append("sizes that the row leaves out are those of the public model")
    experts = moe.get("expert_num") or 1
    routed = experts if experts > 1 else 0
    return Model(
        pattern=pattern_of(layers, routed),
        hidden=hidden,
        heads=heads,
        kv_heads=written.get("n_kv_heads") or known.get("kv_heads") or heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        experts=routed,
        top_k=moe.get("num_experts_chosen") or 1 if routed else 0,
        expert_ffn=ffn if routed else 0,
        shared_ffn=(moe.get("shared_expert_num") or 0) * ffn if routed else 0,
    )


def _llama_width(written: Mapping[str, Any], hidden: int) -> int:
    """Llama's own rule: two thirds of four times the hidden size, rounded up."""
    width = int(8 * hidden / 3 * (written.get("ffn_dim_multiplier") or 1))
    step = written.get("multiple_of") or 256
    return step * -(-width // step)


def _layers(total: int, offset: Any, pp: int, chunks: int) -> Table:
    """[chunks][stages] from MindFormers' offset; as even as can be where it does not fit."""
    if offset == 0 or offset is None:
        return even_layers(total, pp, chunks)
    rows = offset if isinstance(offset[0], list) else [offset]
    base = total // (pp * chunks)
    table = tuple(tuple(base + extra for extra in row) for row in rows)
    if len(table) != chunks or sum(map(sum, table)) != total:
        raise Unexpressed(f"offset {offset} does not place {total} layers on {pp} stages x {chunks} chunks")
    return table


def _recompute(written: Mapping[str, Any], layers: Table) -> Recompute:
    return Recompute(
        full=spread(written.get("recompute"), layers),
        select=spread(written.get("select_recompute"), layers),
        communication=spread(written.get("select_comm_recompute"), layers),
        replay_tp=written.get("mp_comm_recompute") is not False,
    )

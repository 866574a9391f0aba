"""Rows of torchtitan ("FSDP32 TP8") and of Megatron Core's benchmark of one MoE layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tools.estimate.configuration import Configuration, even_layers
from tools.estimate.published.row_defaults import interleaved, recomputation
from tools.estimate.published.stacks import Unexpressed, public_model
from tools.model.architecture import Model, pattern_of
from tools.pipeline.schedules import schedule_of


def titan_row(config: Mapping[str, Any]) -> tuple[Configuration, int, list[str]]:
    """torchtitan: "FSDP32 TP8", samples of a data-parallel rank, technique."""
    degrees = {name: int(size) for name, size in re.findall(r"([A-Za-z]+)[ =]*(\d+)", config["parallel"])}
    unknown = sorted(set(degrees) - {"FSDP", "TP", "PP", "CP", "HSDP", "DP"})
    if unknown:
        raise Unexpressed(f"parallel: {', '.join(unknown)} is not known")
    tp, pp, cp = (degrees.get(name, 1) for name in ("TP", "PP", "CP"))
    model = public_model(str(config["model"]))
    technique = f"{config.get('technique', '')} {config.get('precision', '')}".lower()
    assumed = [] if config.get("seq") else ["sequence 8,192, torchtitan's default"]
    dp, samples = config["devices"] // (tp * pp * cp), config["local_batch"]
    # `pipeline_parallel_microbatches` was the number of stages where nobody said (until April 2025)
    micro_batches = pp if pp > 1 and samples % pp == 0 else samples if pp > 1 else 1
    if pp > 1:
        assumed.append(f"{micro_batches} micro-batches, the number of stages as its default was")
    chunks = 1
    if pp > 1 and "interleaved" in f"{technique} {config.get('schedule', '')}".lower():
        chunks = interleaved(model.layers, pp, micro_batches, assumed)
    layers = even_layers(model.layers, pp, chunks)
    made = Configuration(
        model=model,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        layers=layers,
        schedule=schedule_of("1f1b", chunks),
        sequence=config.get("seq") or 8192,
        batch=samples // micro_batches,
        micro_batches=micro_batches,
        dtype="fp8" if "fp8" in technique or "float8" in technique else "bf16",
        recompute=recomputation(str(config.get("recompute", "")).split()[-1], layers, "operators"),
        shard_gradients=True,
        shard_weights=True,
        # F.cross_entropy of fp32 logits: in compute precision, as fp32, the log-softmax and two gradients, of which the
        # allocator gives the first one the memory of the fp32 logits; in loss parallel (DTensors) one result more
        logit_bytes=20 if tp > 1 else 14,
        fused="eager" not in technique,
        overlap_tp="async" in technique,
        overlap_dp=True,
        contiguous=cp > 1,
    )
    return made, dp * samples, assumed


def layer_row(config: Mapping[str, Any]) -> tuple[Configuration, int, list[str]]:
    """One MoE layer's MLP alone, forward and backward."""
    model = Model(
        pattern=pattern_of(1, config["experts"]),
        hidden=config["hidden"],
        heads=1,
        kv_heads=1,
        head_dim=1,
        ffn=0,
        vocab=1,
        experts=config["experts"],
        top_k=config["topk"],
        expert_ffn=config["moe_ffn"],
        shared_ffn=config.get("shared_ffn") or 0,
    )
    tp, ep = config.get("tp") or 1, config["ep"]
    made = Configuration(
        model=model,
        dp=max(1, ep // tp),
        tp=tp,
        ep=ep,
        layers=((1,),),
        sequence=config["seq"],
        batch=config["micro_batch"],
        dtype="fp8" if "fp8" in str(config.get("precision")).lower() else "bf16",
        ep_mode={"a2a": "global", "hybridep": "hybridep"}.get(config["dispatcher"], "deepep"),
        layer_only=True,
    )
    return made, made.global_batch, ["routing is even"]

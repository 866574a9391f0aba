"""This module converts published rows of measurements to descriptions of training runs. Values that a row does not
state are assumed to be the defaults of the publisher's software.

Each source of rows has one set of settings. Rules choose the values that a row does not state, and these rules do not
use the row's measurement.

Sources of the settings: the papers of Megatron-LM (arXiv 2104.04473, 2205.05198), the defaults of Megatron Core and
Megatron-Bridge, the Llama 3 and DeepSeek-V3 reports; all of these are quoted from memory, except for the values that
the rows state.

Rows of torchtitan ("FSDP32 TP8") and of Megatron Core's benchmark of one MoE layer are parsed from their text, and rows
of MindFormers model cards from the files that the card links: `model`, `moe`, `parallel`, `recompute`.

Megatron-Bridge's performance recipes have settings for MoE models that its tables of results do not show.

The settings of dispatcher, overlap, recomputed operators and CUDA graphs were read in the repository of Megatron-Bridge
(perf_recipes of deepseek, qwen and gpt_oss, and the configurations before them, releases r0.1.0 to r0.6.0 of October
2025 to August 2026). The rules for rows of Megatron-Bridge depend only on device, release and model. Token drop of
Megatron-Bridge pads to a capacity factor of 1, so each expert gets the average number of rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tools.estimate.configuration import Configuration, Recompute, Table, even_layers, spread
from tools.hardware.units import short_dtype
from tools.model import Latent, Model, pattern_of
from tools.pipeline.schedules import schedule_of

MODELS = Path(__file__).parent / "models.yaml"


class Unexpressed(Exception):
    """An `Unexpressed` error holds the reason why a row of measurements cannot be expressed as a `Configuration`."""


@dataclass(frozen=True)
class Settings:
    """A `Settings` holds the settings of the software with which a publisher measured its runs;
    `tools.estimate.configuration` explains the settings that it shares with a `Configuration`.
    """

    masked: bool = False  # published FLOPs include the masked half of attention
    recompute: str = "none"  # if the row does not state it
    selective: str = "attention"
    precision: str = "bf16"
    dropout: bool = False
    tied: bool = False
    sequence_parallel: bool = True
    shard_optimizer: bool = True
    shard_gradients: bool = False
    flash: bool = True
    schedule: str = ""
    ep_mode: str = "deepep"
    overlap: bool = True  # of tp, dp and pp communication with computation (MindFormers: only dp)
    overlap_ep: bool = False
    # the layout of its graph mode: whole shared experts, gathered activations kept, fp32 residual
    mindformers: bool = False
    node_limit: int = 0
    overlap_tp_backward: bool = False
    wide_gradients: bool = True
    interleaved: bool = True  # also without a value of vpp, because the source has no column for it
    logit_bytes: int = 6
    spare_gradients: bool = False
    cp_exchanges_heads: bool = False


_GROUPS = {
    group: Settings(**values)
    for group, values in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}


def settings_of(group: str, cluster: str) -> Settings:
    """Return the software settings of a group of published measurements. For an unknown group, return the settings of
    the software that usually runs on the cluster.
    """
    return _GROUPS.get(group) or (_GROUPS["ascend_reports"] if cluster.startswith("atlas") else Settings())


@lru_cache(maxsize=1)
def _models() -> dict[str, Any]:
    return yaml.safe_load(MODELS.read_text(encoding="utf-8"))


def public_model(name: str) -> Model:
    """Return the public model whose name a row of published measurements states.

    Raises:
        Unexpressed: models.yaml has no such model, or the model cannot be expressed.
    """
    for entry in _models()["models"]:
        if re.search(entry["match"], name.lower().replace("_", " ").replace("llama 3", "llama3")):
            if "unsupported" in entry:
                raise Unexpressed(f"model {name}: {entry['unsupported']} is not modelled")
            return _model(entry)
    raise Unexpressed(f"model {name}: its dimensions are not given, and models.yaml does not know it")


def public_class(kind: str, layers: int, hidden: int) -> dict[str, Any]:
    """Return the sizes of a model that its model card in MindFormers does not state; return {} if they are unknown."""
    for entry in _models()["classes"]:
        if (entry["type"], entry["layers"], entry["hidden"]) == (kind, layers, hidden):
            return entry
    return {}


def _model(entry: dict[str, Any]) -> Model:
    sizes = {key: value for key, value in entry.items() if key not in ("match", "parameters", "type")}
    if "latent" in sizes:
        sizes["latent"] = Latent(**sizes["latent"])
    pattern = pattern_of(sizes.pop("layers"), sizes.get("experts", 0), sizes.pop("dense_layers", 0))
    return Model(pattern, **sizes)


def micro_batch(samples: int, pp: int, micro_batches: int | None, assumed: list[str]) -> int:
    """Return the assumed number of samples in a micro-batch for a row of measurements that does not state this
    number.
    """
    if micro_batches:
        return max(1, samples // micro_batches)
    batch = 1
    while pp == 1 and batch < 4 and samples % (2 * batch) == 0:
        batch *= 2
    assumed.append(f"micro-batch {batch} (1 in a pipeline, else up to 4)")
    return batch


def interleaved(layers: int, pp: int, micro_batches: int, assumed: list[str]) -> int:
    """Return the assumed number of interleaved chunks for a row of measurements that does not state it: the smallest
    number above 1 that divides the layers of a stage.
    """
    if pp == 1:
        return 1
    each = -(-layers // pp)
    chunks = next((count for count in range(2, each + 1) if each % count == 0), 1)
    chunks = chunks if micro_batches >= pp else 1
    assumed.append(f"vpp {chunks} (fewest above 1 that divide a stage's layers)")
    return chunks


def recomputation(words: str, layers: Table, selective: str) -> Recompute:
    """Return the recompute settings that a text such as "full_recompute_no_sp" describes; other texts mean no
    recomputation.
    """
    if words.startswith("full"):
        return Recompute(full=layers)
    return Recompute(select=layers, selective=selective) if "selective" in words else Recompute()


def titan_row(config: Mapping[str, Any]) -> tuple[Configuration, int, list[str]]:
    """Return the configuration of a row of torchtitan's measurements, derived from the row's layout (such as "FSDP32
    TP8"), its local batch size in samples, and its technique (such as "torch.compile + Float8").
    """
    degrees = {name: int(size) for name, size in re.findall(r"([A-Za-z]+)[ =]*(\d+)", config["parallel"])}
    unknown = sorted(set(degrees) - {"FSDP", "TP", "PP", "CP", "HSDP", "DP"})
    if unknown:
        raise Unexpressed(f"parallel: {', '.join(unknown)} is not known")
    tp, pp, cp = (degrees.get(name, 1) for name in ("TP", "PP", "CP"))
    model = public_model(str(config["model"]))
    technique = f"{config.get('technique', '')} {config.get('precision', '')}".lower()
    assumed = [] if config.get("seq") else ["sequence 8,192, torchtitan's default"]
    dp, samples = config["devices"] // (tp * pp * cp), config["local_batch"]
    written = [degrees[name] for name in ("FSDP", "HSDP", "DP") if name in degrees]
    if written and math.prod(written) != dp:
        every = math.prod(degrees.values())
        raise Unexpressed(f"parallel: {config['parallel']} is {every} devices, and the row has {config['devices']}")
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
    """Return the configuration of a benchmark row that runs only the MLP of one MoE layer, forward and backward."""
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


_BLACKWELL = ("b200", "b300", "gb200", "gb300")
_GRAPHED = "26.06"  # the first release with full-iteration CUDA graphs and fused operators (recipes of June 2026)


def release(row: str) -> str:
    """Return the software release, such as "26.04.01", that the id of a row of measurements names; return "" if the id
    names no release.
    """
    found = re.match(r"[a-z]+_(\d\d\.\d\d(?:\.\d\d)?)_", row)
    return found[1] if found else ""


def as_recipes_have_it(row: str, cluster: str, config: Configuration, assumed: list[str]) -> Configuration:
    """Return the configuration of a row of Megatron-Bridge's measurements, completed with settings of Megatron-Bridge's
    recipe. The function adds the settings from the recipe to the list `assumed`.
    """
    if not config.model.experts:
        return config
    if cluster == "h100" and not config.model.latent and not config.model.biased:
        return _qwen_on_h100(row, config, assumed)
    if cluster not in _BLACKWELL:
        return config
    if release(row) >= _GRAPHED and cluster in ("gb200", "gb300") and config.dtype == "mxfp8":
        assumed.append("one CUDA graph a step, fused operators, HybridEP overlapped, as its recipe has it")
        return replace(config, graphs="step", overlap_ep=True, ep_mode="hybridep")
    if not config.model.biased:
        beside = config.overlap_ep and cluster in ("b200", "b300")
        assumed.append(f"HybridEP, {'' if beside else 'not '}overlapped, as its recipe has it")
        # DeepSeek-V3's have graphs on GB200, where its dispatch is overlapped and by now on B300, Qwen3's everywhere
        graphed = cluster == "gb200" or beside or (cluster == "b300" and release(row) >= "26.04.01")
        graphs = "layers" if graphed or not config.model.latent else ""
        return replace(config, overlap_ep=beside, ep_mode="hybridep", graphs=graphs)
    return _gpt_oss(release(row), cluster, config, assumed)


def _qwen_on_h100(row: str, config: Configuration, assumed: list[str]) -> Configuration:
    """Return Qwen3 235B on H100: All-to-All in every release. From 25.11 on it runs beside another micro-batch, and
    tensor-parallel communication only; 25.09, with token drop, has it the other way round.
    """
    beside = "tokendrop" not in row
    assumed.append(f"All-to-All dispatch, {'' if beside else 'not '}overlapped, as its recipe has it")
    return replace(config, ep_mode="global", overlap_ep=beside, overlap_tp=not beside)


def _gpt_oss(version: str, cluster: str, config: Configuration, assumed: list[str]) -> Configuration:
    """Return GPT-OSS on Blackwell, but for what runs in one graph. Until 26.02 its recipes have EP 64 everywhere; the
    table says EP 8 of 25.11 on B200. 26.02.01 has EP 8 in nodes of 8 and names HybridEP, but does not apply it; 26.04
    does, and 26.04.01 takes it back on B200 and GB200.
    """
    if cluster == "b200" and "" < version < "26.02.01" and config.ep != 64:
        assumed.append(f"EP 64, as its recipe has it (the table says {config.ep})")
        config = replace(config, ep=64)
    hybrid = version >= "26.04" and (version == "26.04" or cluster == "b300")
    beside = version >= "26.04" and cluster == "gb200"
    again = Recompute(select=config.layers) if cluster in ("b200", "gb200") else config.recompute
    assumed.append(
        f"dispatch {'HybridEP' if hybrid else 'All-to-All'}{', overlapped' if beside else ''}, norms and activations "
        f"{'' if again.select else 'not '}recomputed, as its recipe has it"
    )
    mode = "hybridep" if hybrid else "global"
    return replace(config, ep_mode=mode, overlap_ep=beside, recompute=again, graphs="" if again.select else "layers")


def mindformers_row(config: Mapping[str, Any]) -> tuple[Configuration, int, list[str]]:
    """Convert a row of measurements from a MindFormers model card to (configuration, samples in a step, assumptions).

    Raises:
        Unexpressed: the row's run uses LoRA, or the dimensions of its model are not known.
    """
    if config.get("lora"):
        raise Unexpressed("LoRA trains a few weights only; that is not modelled")
    parallel, written = config["parallel"], config["model"]
    assumed: list[str] = []
    model = _model_of_card(written, config.get("moe") or {}, assumed)
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


def _model_of_card(written: Mapping[str, Any], moe: Mapping[str, Any], assumed: list[str]) -> Model:
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
    """Return the width by Llama's own rule: two thirds of four times the hidden size, rounded up."""
    width = int(8 * hidden / 3 * (written.get("ffn_dim_multiplier") or 1))
    step = written.get("multiple_of") or 256
    return step * -(-width // step)


def _layers(total: int, offset: Any, pp: int, chunks: int) -> Table:
    """Return [chunks][stages] from MindFormers' offset; as even as can be where it does not fit."""
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

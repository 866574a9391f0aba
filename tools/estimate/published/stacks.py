"""What a measurement's software is taken to do where its row does not say: one set of settings for each source.

Sources of the settings: the papers of Megatron-LM (arXiv 2104.04473, 2205.05198), the defaults of Megatron Core and
Megatron-Bridge, the Llama 3 and DeepSeek-V3 reports; all recalled but for what the rows themselves note.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tools.model.architecture import Latent, Model, pattern_of

MODELS = Path(__file__).parent / "models.yaml"


class Unexpressed(Exception):
    """Why a row cannot be a configuration."""


@dataclass(frozen=True)
class Settings:
    """Settings of a source.

    Args:
        masked: published FLOPs count the masked half of attention, too.
        recompute, selective: what is recomputed where the row does not say; see `configuration.Recompute`.
        mindformers: graph mode's layout (whole shared experts, gathered activations kept, fp32 residual).
        node_limit: see `configuration.Model`.
        overlap_tp_backward, wide_gradients: see `configuration.Configuration`.
        interleaved: a row without vpp is interleaved all the same (its source leaves the column out).
        logit_bytes, spare_gradients, cp_exchanges_heads: see `configuration.Configuration`.
        overlap: tensor-, data- and pipeline-parallel communication runs beside computation (MindFormers: data only).
    """

    masked: bool = False
    recompute: str = "none"
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
    overlap: bool = True
    overlap_ep: bool = False
    mindformers: bool = False
    node_limit: int = 0
    overlap_tp_backward: bool = False
    wide_gradients: bool = True
    interleaved: bool = True
    logit_bytes: int = 6
    spare_gradients: bool = False
    cp_exchanges_heads: bool = False


_GPT3 = Settings(
    masked=True,
    precision="fp16",
    dropout=True,
    tied=True,
    sequence_parallel=False,
    shard_optimizer=False,
    flash=False,
    overlap=False,
)
_ASCEND = Settings(recompute="full", selective="norms", ep_mode="hierarchical", overlap=False, mindformers=True)
_GROUPS = {
    "megatron_sc21": replace(_GPT3, wide_gradients=False),
    "korthikanti22": replace(_GPT3, overlap_tp_backward=True),
    "mcore_h100_r0.8": Settings(masked=True),
    "megatron_bridge": Settings(precision="bf16", interleaved=False, wide_gradients=False, spare_gradients=True),
    # the flags of SimuMax's own Megatron scripts: no overlap, All-to-All dispatch, no interleaving, CP by All-to-All;
    # Transformer Engine 2.11, whose fused cross entropy (the rows' "cef") writes gradients over the bf16 logits
    "simumax_b200": Settings(
        precision="bf16",
        overlap=False,
        ep_mode="global",
        interleaved=False,
        logit_bytes=2,
        spare_gradients=True,
        cp_exchanges_heads=True,
    ),
    # GPT with dropout, without sequence parallelism and without gradients added up inside matmuls
    "megatron_tests": Settings(dropout=True, sequence_parallel=False, interleaved=False),
    "llama3_405b": Settings(shard_gradients=True),
    "deepseek_v3": Settings(
        selective="norms", recompute="selective", schedule="zero_bubble_v", overlap_ep=True, node_limit=4
    ),
    "ascend_reports": _ASCEND,
}


def settings_of(group: str, cluster: str) -> Settings:
    """The settings of a group, or of what usually runs on the cluster."""
    return _GROUPS.get(group) or (_ASCEND if cluster.startswith("atlas") else Settings())


@lru_cache(maxsize=1)
def _models() -> dict[str, Any]:
    return yaml.safe_load(MODELS.read_text(encoding="utf-8"))


def public_model(name: str) -> Model:
    """A public model by the name that a row writes.

    Raises:
        Unexpressed: models.yaml has no such model, or it cannot be expressed.
    """
    for entry in _models()["models"]:
        if re.search(entry["match"], name.lower().replace("_", " ").replace("llama 3", "llama3")):
            if "unsupported" in entry:
                raise Unexpressed(f"model {name}: {entry['unsupported']} is not modelled")
            return _model(entry)
    raise Unexpressed(f"model {name}: its dimensions are not given, and models.yaml does not know it")


def public_class(kind: str, layers: int, hidden: int) -> dict[str, Any]:
    """Dimensions that a MindFormers card leaves out; {} where they are not known."""
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

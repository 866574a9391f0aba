"""What Megatron-Bridge's performance recipes set for MoE models beyond what its tables of results show.

Read in its repository (perf_recipes of deepseek, qwen and gpt_oss, and the configurations before them, releases r0.1.0
to r0.6.0 of October 2025 to August 2026): dispatcher, overlap, recomputed operators, CUDA graphs. Rules by device,
release and model only. Its token drop has a capacity factor of 1 and pads to it: experts get their average rows.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tools.estimate.configuration import Configuration, Recompute

_BLACKWELL = ("b200", "b300", "gb200", "gb300")
_GRAPHED = "26.06"  # the first release with full-iteration CUDA graphs and fused operators (recipes of June 2026)


def release(row: str) -> str:
    """Release of the software, such as "26.04.01", from a row's id; "" where it names none."""
    found = re.match(r"[a-z]+_(\d\d\.\d\d(?:\.\d\d)?)_", row)
    return found[1] if found else ""


def as_recipes_have_it(row: str, cluster: str, config: Configuration, assumed: list[str]) -> Configuration:
    """The configuration of a row of the tables with what its recipe sets; says so in `assumed`."""
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
    """Qwen3 235B on H100: All-to-All in every release.

    From 25.11 on it runs beside another micro-batch, and tensor-parallel communication alone; 25.09, with token drop,
    has it the other way round.
    """
    beside = "tokendrop" not in row
    assumed.append(f"All-to-All dispatch, {'' if beside else 'not '}overlapped, as its recipe has it")
    return replace(config, ep_mode="global", overlap_ep=beside, overlap_tp=not beside)


def _gpt_oss(version: str, cluster: str, config: Configuration, assumed: list[str]) -> Configuration:
    """GPT-OSS on Blackwell, but for what runs in one graph.

    Until 26.02 its recipes have EP 64 everywhere; the table says EP 8 of 25.11 on B200. 26.02.01 has EP 8 in nodes of 8
    and names HybridEP, but does not apply it; 26.04 does, and 26.04.01 takes it back on B200 and GB200.
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

"""Which schedules MindFormers 1.9.0 on MindSpore 2.9.0 can run, and how a recipe asks for them (`docs/schedules.md`).

All others are simulated only; one is asked for by the environment. No recipe can be written for any of them.
"""

from __future__ import annotations

from tools.pipeline.schedules import PAPER_SCHEDULES

BY_ENVIRONMENT = "interleaved_1f1b_less_memory"
_REFUSED = {
    BY_ENVIRONMENT: "the environment asks for it (ENABLE_LESS_MEM_VPP=1), no key of a recipe does",
    "seqvpp": "MindFormers refuses it without seq_split_num, and seq_split_num in graph mode",
    "interleaved_1f1b_pairs": "MindSpore has pp_1f1b_overlap, but which pairs it builds was not seen",
    "dual_pipe": "it holds the model twice, which no recipe can say",
    **dict.fromkeys(("zb_h1", "zb_h2"), "MindSpore splits weight gradients off in zero_bubble_v alone"),
    **dict.fromkeys(
        ("zb_v", "v_half", "v_min", "dual_pipe_v"), "of pipelines in a V MindSpore has zero_bubble_v alone"
    ),
}


def why_not(schedule: str) -> str:
    """Why no recipe can ask for a schedule; "" where MindFormers runs it."""
    assert set(PAPER_SCHEDULES) <= set(_REFUSED)
    return _REFUSED.get(schedule, "")


def interleaves(schedule: str, chunks: int) -> bool:
    """What `pipeline_interleave` must say: MindFormers takes schedulers other than 1f1b only with it."""
    return chunks > 1 or not (schedule == "1f1b" or schedule.startswith("interleaved_1f1b"))

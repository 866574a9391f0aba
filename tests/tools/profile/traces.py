"""Synthetic Ascend profiles: the CSV files that a device would leave if it ran exactly as the estimator says.

Written by hand from the columns in SOURCES.md; no device made them.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

from tools.estimate.layer_model import work
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import layer_options
from tools.estimate.time_model import TimeModel
from tools.profile.attribute import modelled, whole

COLUMNS = ["Step ID", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)",
           "Block Num", "Input Shapes", "Output Shapes"]  # fmt: skip
TRACE = ["Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free", "Stage", "Bubble",
         "Communication(Not Overlapped and Exclude Receive)", "Preparing"]  # fmt: skip
EPOCH = 1_795_418_422_975_426  # microseconds, as of the clock of a host


class Trace:
    """A `Trace` writes the step of one device, kernel by kernel."""

    def __init__(self, config, hardware, efficiency, stage, scoped=True):
        self.config, self.stage, self.scoped = config, stage, scoped
        self.times = TimeModel(hardware, efficiency)
        self.terms = modelled(config, hardware, efficiency, stage)
        raw = whole(config, hardware, efficiency, stage)
        self.hidden = {"cp": raw["cp"] - self.terms["cp"]}
        self.lean = TimeModel(hardware, replace(efficiency, moe_s=0.0))
        self.rows, self.groups, self.now, self.number = [], {}, 0.0, 0
        self.free = self.computing = self.communicating = self.overlapped = 0.0

    def build(self):
        micro = self.config.micro_batches
        for _ in range(micro):
            for chunk, every in enumerate(self.config.stage_kinds(self.stage)):
                options = iter(layer_options(self.config, chunk, self.stage, len(every)))
                numbers = iter(self.config.layer_numbers(self.stage))
                for kind in every:
                    decoder = kind in ("dense", "moe")
                    scope = f"layers-CellList/{next(numbers)}-TransformerLayer" if decoder else ""
                    scope = "mtp-MultiTokenPredictionBlock/layers-CellList/0-Layer" if kind == "mtp" else scope
                    option = next(options) if decoder else mtp_option(self.config)
                    self.layer(kind, scope, option)
        self.communicate("hcom_receive_", "", self.terms["pipeline"], ())
        self.communicate("hcom_reduceScatter_", "Default/optimizer-AdamW", self.terms["data"], self.ranks("data"))
        self.compute("AdamW", "AI_VECTOR_CORE", "Default/optimizer-AdamW", self.terms["optimizer"])
        self.gap(self.terms["host of the step"])
        return self

    def layer(self, kind, scope, option):
        layer, lean = (times.layer(self.config, kind) for times in (self.times, self.lean))
        matmuls = work(self.config, kind).matmuls
        for top, part, thin, score in (
            ("Default", layer.forward, lean.forward, "FlashAttentionScore"),
            ("Gradients/Default", layer.backward, lean.backward, "FlashAttentionScoreGrad"),
            ("recompute_Default", layer.recomputed[option], lean.recomputed[option], "FlashAttentionScore"),
        ):
            own = f"{top}/network/{scope}/self_attention"
            moe = f"{top}/network/{scope}/mlp-MoELayer/experts-Experts" if part.fixed - thin.fixed else own
            self.compute("Add", "AI_VECTOR_CORE", own, part.elementwise)
            self.gap(thin.fixed)
            self.compute(score, "MIX_AIC", own, part.attention)
            self.gap(part.fixed - thin.fixed)
            each = 0 if top.startswith("recompute") else 2 if top.startswith("Grad") else 1
            for matmul in matmuls:
                for _ in range(each):
                    seconds = self.times.multiplying(self.config, matmul)
                    kind_ = "GroupedMatmul" if matmul.times > 1 else "MatMulV3"
                    self.compute(kind_, "AI_CORE", moe, seconds, shapes(matmul))
            if not each:
                self.compute("MatMulV3", "AI_CORE", moe, part.matmul)
            self.communicate("hcom_allGather_", moe, part.tp, self.ranks("tp"))
            self.communicate("hcom_allGather_", moe, part.cp, self.ranks("cp"))
            self.communicate("hcom_alltoallv_", moe, part.ep, self.ranks("tp"))

    def ranks(self, term):
        tp, cp, dp = self.config.tp, self.config.cp, self.config.dp
        first = self.stage * (self.config.devices // self.config.pp)
        size, stride = {"tp": (tp, 1), "cp": (cp, tp), "data": (dp, tp * cp)}[term]
        return tuple(range(first, first + size * stride, stride))

    def gap(self, seconds):
        self.now += seconds
        self.free += seconds

    def compute(self, kind, core, scope, seconds, sizes=("", "")):
        if seconds <= 0:
            return
        name = f"{scope}/{kind}-op{self.number}" if self.scoped else f"{kind}-op{self.number}"
        for term in self.hidden:
            beside = min(self.hidden[term], seconds)
            if beside > 1e-7:
                self.hidden[term] -= beside
                self.overlapped += beside
                self.row("hcom_allGather_", "HCCL", scope, self.now, beside, ("", ""), self.ranks(term))
                break
        self.rows.append([name, kind, core, self.now, seconds, *sizes])
        self.now += seconds
        self.computing += seconds
        self.number += 1

    def communicate(self, kind, scope, seconds, ranks):
        if seconds <= 0:
            return
        self.row(kind, "HCCL", scope, self.now, seconds, ("", ""), ranks)
        self.now += seconds
        self.communicating += seconds

    def row(self, kind, core, scope, start, seconds, sizes, ranks):
        name = f"{kind}_{hash(ranks) % 1000}_{self.number}_1"
        self.groups[name] = ranks
        self.number += 1
        self.rows.append([name, kind, core, start, seconds, *sizes])

    def write(self, folder, rank, steps=2):
        """The files of some equal steps below `folder`; returns it."""
        place = Path(folder) / f"rank_{rank}" / "host_1_ascend_ms" / "ASCEND_PROFILER_OUTPUT"
        place.mkdir(parents=True)
        with (place / "kernel_details.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(COLUMNS)
            for step in range(steps):
                for name, kind, core, start, seconds, *sizes in self.rows:
                    micro = f"{(start + step * self.now) * 1e6:.3f}"
                    whole_, part = micro.split(".")
                    stamp = f"{EPOCH + int(whole_)}.{part}\t"
                    out.writerow([step, name, kind, core, stamp, f"{seconds * 1e6:.6f}", 0, 24, *sizes])
        with (place / "step_trace_time.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(TRACE)
            for step in range(steps):
                sent = self.communicating + self.overlapped
                sums = (self.computing, self.communicating, self.overlapped, sent, self.free)
                out.writerow([step, *(f"{seconds * 1e6:.6f}" for seconds in sums), 0, 0, 0, 0])
        members = {name: ranks for name, ranks in self.groups.items() if ranks}
        (place / "communication.json").write_text(json.dumps(
            {"step0": {"p2p": {}, "collective": {f"{name}@{hash(ranks)}": {} for name, ranks in members.items()}}}
        ))  # fmt: skip
        (place.parent / "profiler_metadata.json").write_text(json.dumps({"parallel_group_info": {
            str(hash(ranks)): {"group_name": "x", "group_rank": 0, "global_ranks": list(ranks)}
            for ranks in members.values()
        }}))  # fmt: skip
        return Path(folder)


def shapes(matmul):
    """Input and output shapes as the profiler writes them."""
    rows, columns, depth, times = (round(size) for size in (matmul.rows, matmul.columns, matmul.depth, matmul.times))
    if times > 1:
        return f'"{rows * times},{depth};{times},{depth},{columns}"', f'"{rows * times},{columns}"'
    return f'"{rows},{depth};{depth},{columns}"', f'"{rows},{columns}"'

"""This module prints the case of the report's sections 4.3 and 4.4 as a table: ``python -m benchmarks.report_case``.

The report gives two numbers: at EP 16 the hierarchical dispatch trains about 15 % faster than the global All-to-All,
and overlap cuts EP's share of communication time from 30 % to 5 %. It does not say for which model, mesh, micro-batch
or sequence length. This module lists the recipes' meshes with EP 16, 32, 64 and 128, and the model's prediction for
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from plugins.errors import RecipeError
from tools.estimate.configuration import DEFAULT_SKEW, Cut
from tools.estimate.efficiency import UNKNOWN, known_error
from tools.estimate.efficiency import cluster as find_cluster
from tools.estimate.loads import uniform
from tools.estimate.time_model import TimeModel
from tools.experts.cost import arrow, assumptions
from tools.hardware import DEFAULT_HARDWARE, Hardware
from tools.layout.advise import Advice, ModeReport, advise
from tools.ranges import Number
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MODELS, DEGREES = ("105b", "438b", "1119b"), (16, 32, 64, 128)
REPORT_GAIN, REPORT_BEFORE, REPORT_AFTER = 0.15, 0.30, 0.05  # report sections 4.3 and 4.4
MORE_CHUNKS = 4
REPORT_STEP = 39.969  # seconds of a step of 438B on 4,096 devices (report table 5, tool-generated)
_TITLE = """# The report's case, modelled

Made by `python -m benchmarks.report_case > benchmarks/report_case.md`; nothing here was measured.
"""
_HEADER = (
    *("model", "EP", "nodes", "mesh", "between nodes, MB: global", "hierarchical", "deduplicated"),
    *("hierarchical faster than global by", "deduplicated by", "EP exposed, of communication", "of the step"),
    *("exposed EP left by overlap", "overlap faster by"),
)


@dataclass(frozen=True)
class Case:
    """A `Case` is one row of the table: a model at a degree of expert parallelism. `advice` is None if the degree is
    not possible, for the reason `refused`.
    """

    model: str
    ep: int
    mesh: str
    advice: Advice | None = None
    refused: str = ""

    @property
    def known(self) -> Advice:
        """Return the advice for a degree of expert parallelism that is possible."""
        assert self.advice is not None
        return self.advice

    def gain(self, mode: str) -> float:
        """Return how much more throughput `mode` has than the global All-to-All, both without overlap."""
        return self.known.modes["global"].step[0] / self.known.modes[mode].step[0] - 1

    @property
    def hierarchical(self) -> ModeReport:
        """Return the results of the report's dispatch mode, `hierarchical`."""
        return self.known.modes["hierarchical"]


def cases(hardware: Hardware, skew: float = DEFAULT_SKEW) -> list[Case]:
    """Return all rows; if data x tensor parallel ranks do not hold an EP group, data parallelism grows until they
    do.
    """
    return [_case(model, ep, hardware, skew) for model in MODELS for ep in DEGREES]


def _case(model: str, ep: int, hardware: Hardware, skew: float) -> Case:
    recipe = load_recipe(RECIPES / f"telechat3_{model}" / "pretrain_4k.yaml")
    view = View(recipe)
    dp = view.dp
    while dp * view.tp % ep:
        dp += 1
    overrides = [f"parallel_config.expert_parallel={ep}", f"parallel_config.data_parallel={dp}"]
    mesh = f"dp{dp}{'*' * (dp != view.dp)} tp{view.tp} pp{view.pp}"
    try:
        return Case(model, ep, mesh, advise(apply_overrides(recipe, overrides), hardware, uniform(skew)))
    except RecipeError as error:
        return Case(model, ep, mesh, refused=str(error).partition("expert_parallel: ")[2].partition(";")[0])


def markdown(rows: Sequence[Case]) -> str:
    """Return the table as Markdown, and below it where the model disagrees with the report."""
    lines = [_TITLE, "| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", *_remarks([row for row in rows if row.advice])]) + "\n"


def _cells(row: Case) -> list[str]:
    if row.advice is None:
        return [row.model, str(row.ep), "-", row.mesh, row.refused, *["-"] * (len(_HEADER) - 5)]
    report = row.hierarchical
    before, after = report.exposed
    return [
        *(row.model, str(row.ep), str(row.advice.topology.nodes), row.mesh),
        *(f"{mode.inter_bytes / 1e6:,.1f}" for mode in row.advice.modes.values()),
        *(f"{100 * row.gain(mode):+.1f} %" for mode in ("hierarchical", "deduplicated")),
        *(arrow(report.share_of_communication), arrow(report.share_of_step), f"{after / before:.0%}"),
        f"{100 * _overlap_gain(row):+.1f} %",
    ]


def _remarks(rows: Sequence[Case]) -> list[str]:
    """Return sentences that a reader needs to judge the table."""
    advice = rows[0].known
    known = known_error(advice.hardware)
    at16 = [row for row in rows if row.ep == 16]
    gains = ", ".join(f"{100 * row.gain('hierarchical'):.0f} % ({row.model})" for row in at16)
    shares = ", ".join(f"{arrow(row.hierarchical.share_of_communication)} ({row.model})" for row in at16)
    left = ", ".join(f"{row.hierarchical.exposed[1] / row.hierarchical.exposed[0]:.0%} ({row.model})" for row in at16)
    faster = ", ".join(f"{_overlap_gain(row):.0%} ({row.model})" for row in at16)
    loses = ", ".join(f"{row.model} at EP {row.ep}" for row in rows if row.gain("hierarchical") < 0)
    reported = REPORT_AFTER / (1 - REPORT_AFTER) / (REPORT_BEFORE / (1 - REPORT_BEFORE))
    return [
        f"All numbers are modelled for {advice.hardware.name}, busiest rank {advice.skew:g} x the mean, bf16, sequence "
        "4,096, micro-batch 1. Bytes: busiest rank, one layer and micro-batch, both directions and the replay of "
        "recomputation. Gains: without overlap. The last four columns are of hierarchical dispatch, without -> with "
        f"overlap. `*`: data parallelism raised from the recipe's, to hold the EP group. {assumptions(advice)}. "
        f"Step times are {known.words if known else UNKNOWN}.",
        "",
        f"* Gain at EP 16: the report says about {REPORT_GAIN:.0%}, the model {gains}. No gain was fitted, and "
        "one row that agrees proves little: the gain is the All-to-All's share of the step, so it moves with all "
        "that the report does not state, such as mesh and sequence length, and with what is assumed here, such as that "
        "an All-to-All between nodes is as fast as a lone pair.",
        *_against_table_5(at16),
        f"* EP's share of communication at EP 16: the report says {REPORT_BEFORE:.0%} -> {REPORT_AFTER:.0%}, the model "
        f"{shares}. The shares differ because the denominator does: the model counts TP, PP and DP traffic at nominal "
        "speed, while a profile also counts waiting for slower ranks and stages as communication. What does not depend "
        f"on the denominator is how much exposed EP time overlap leaves: {reported:.0%} by the report's two shares, if "
        f"all other communication stays, {left} by the model with the chunks that make the step shortest, and "
        f"{_with_chunks(at16, MORE_CHUNKS)} with {MORE_CHUNKS}.",
        "* Overlap has a price: a chunk's matmuls have fewer rows, and small matmuls reach less of the peak (fitted to "
        "matmuls of whole layers, so a guess for grouped ones). This is why few chunks win: the steps with overlap "
        f"are {faster} faster than without it. The report gives no step time for overlap alone. The model is "
        "optimistic, too: links and matmuls run at full speed beside each other.",
        "* What recomputation repeats is dispatch and the All-to-All inside a node that brings outputs back (found by "
        "compiling).",
        f"* Hierarchical is slower than global for {loses or 'no row'}: the AllGather grows with the number of nodes, "
        "the All-to-All with top-k. The report speaks of EP 16 only.",
    ]


def _with_chunks(rows: Sequence[Case], parts: int) -> str:
    """Return the share of the exposed time of expert-parallel communication that remains with `parts` chunks of the
    sequence.
    """
    words = []
    for row in rows:
        config = replace(row.known.config, ep_mode="hierarchical")
        cut = TimeModel(row.known.hardware).step(replace(config, ep_cut=Cut((1, parts))), simulated=True)
        words.append(f"{cut.by_part['ep'] / row.hierarchical.exposed[0]:.0%} ({row.model})")
    return ", ".join(words)


def _overlap_gain(row: Case) -> float:
    before, after = row.hierarchical.step
    return before / after - 1


def _against_table_5(rows: Sequence[Case]) -> list[str]:
    """Return a sentence with the gain for a 438B step as long as the step in the report's Table 5."""
    found = [row for row in rows if row.model == "438b" and row.advice]
    if not found:
        return []
    row = found[0]
    saved = row.known.modes["global"].step[0] - row.hierarchical.step[0]
    return [
        f"* The report's own 438B step took {REPORT_STEP:.1f} s (table 5; its EP degree and dispatch are not given); "
        f"the model says {row.hierarchical.step[0]:.1f} s hierarchical, {row.hierarchical.step[1]:.1f} s with overlap. "
        f"The {saved:.1f} s that it saves over global would be {saved / REPORT_STEP:.0%} of the measured step, one of "
        "those that efficiencies are fitted to."
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--cluster",
    default=DEFAULT_HARDWARE,
    show_default=True,
    metavar="NAME|FILE",
    help="Predict the step on this cluster.",
)
@click.option(
    "--skew",
    default=DEFAULT_SKEW,
    show_default=True,
    type=Number("skew"),
    help="Assume this load of the busiest rank, divided by the mean load.",
)
def main(cluster: str, skew: float) -> None:
    """Print the table as markdown."""
    click.echo(markdown(cases(find_cluster(cluster), skew)), nl=False)


if __name__ == "__main__":
    main()

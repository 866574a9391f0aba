"""A predicted step beside a measured one, term by term, and the gap by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from tools.profile.attribute import HOST, TERMS, Measured
from tools.profile.kinds import OTHER

WORDS = {  # term -> in words, and what to look at where it takes longer than predicted, or less long
    "matmul": ("matmuls, recomputation included", "their shapes and dtypes: small dimensions, padding, casts"),
    "attention": ("attention", "is it the fused kernel, with the mask compressed; the sequence of the profiled rank"),
    "elementwise": ("other operators", "what is not fused (tc3 fusion), casts, transposes, copies"),
    "optimizer": ("optimizer", "the sharding of its state, fused AdamW, the norm of gradients"),
    "tp": ("tensor-parallel communication", "whether the group lies inside a node; a slow link"),
    "cp": ("context-parallel communication", "its algorithm, and what hides it"),
    "ep": ("expert-parallel communication", "uneven experts (tc3 experts), the dispatch mode (tc3 ep-report)"),
    "data": ("gradients and weights", "overlap with the backward pass; the groups of the optimizer's shards"),
    "pipeline": ("pipeline: bubble, sends, waiting", "the schedule, uneven stages, a rank that is late (stragglers)"),
    "host of layers": ("host: gaps in layers", "cores of the worker (tc3 affinity), jit_level, launches"),
    "host of experts": ("host: gaps in experts", "host synchronisation on routed sizes"),
    "host of the optimizer": ("host: gaps in the optimizer", "the number of weights, fused AdamW, jit_level"),
    "host of the step": ("host: gaps beside layers", "data loading, callbacks, logging"),
    OTHER: ("not attributed", "the kernels named below"),
}


@dataclass(frozen=True)
class Line:
    """A term; measured is None where only the step's length is known.

    Args:
        factor: by which the term alone would have to be off to explain the whole gap; None where it cannot.
    """

    term: str
    predicted: float
    measured: float | None
    factor: float | None = None

    @property
    def gap(self) -> float | None:
        """Measured less predicted seconds."""
        return None if self.measured is None else self.measured - self.predicted


def lines(predicted: Mapping[str, float], measured: Measured) -> list[Line]:
    """The terms that either side has, the largest gap first; the host's in one where names do not split it."""
    terms = dict(measured.terms)
    expected = {term: predicted.get(term, 0.0) for term in TERMS}
    if not measured.scoped:
        last = HOST[-1]
        for side in (terms, expected):
            side[last] = sum(side.pop(name) for name in HOST)
    found = [Line(term, expected[term], terms[term]) for term in terms if terms[term] or abs(expected[term]) > 1e-9]
    return sorted(found, key=lambda line: -abs(line.gap or 0.0))


def lines_of_total(predicted: Mapping[str, float], seconds: float) -> list[Line]:
    """The terms of the prediction, the largest first, where only a step's seconds are known."""
    gap = seconds - sum(predicted.values())
    found = []
    for term, part in predicted.items():
        factor = (part + gap) / part if part > 1e-9 and part + gap > 0 else None
        if part > 1e-9:
            found.append(Line(term, part, None, factor))
    return sorted(found, key=lambda line: -line.predicted)


def table(rows: Sequence[Line], head: str = "predicted s") -> Table:
    """The terms as a table; the last row is their sum."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("term", no_wrap=True)
    known = all(line.measured is not None for line in rows)
    for name in (head, "measured s", "gap s", "of the gap" if known else "alone"):
        shown.add_column(name, justify="right", no_wrap=True)
    every = sum(line.gap or 0.0 for line in rows)
    for line in rows:
        shown.add_row(WORDS[line.term][0], *_cells(line, every))
    if known:
        total = Line("", sum(line.predicted for line in rows), sum(line.measured or 0.0 for line in rows))
        shown.add_row("step", *_cells(total, every))
    return shown


def _cells(line: Line, every: float) -> list[str]:
    if line.measured is None or line.gap is None:
        alone = f"x {line.factor:.2f}" if line.factor else "cannot be it"
        return [f"{line.predicted:.4g}", "unknown", "unknown", alone]
    share = f"{line.gap / every:+.0%}" if abs(every) > 1e-9 else "-"
    return [f"{line.predicted:.4g}", f"{line.measured:.4g}", f"{line.gap:+.4g}", share]


def advice(rows: Sequence[Line], total: float) -> list[str]:
    """The gaps of more than a hundredth of the step by name, the largest first, and where to look."""
    found = []
    for line in rows:
        if line.gap is not None and abs(line.gap) > 0.01 * total:
            way = "longer" if line.gap > 0 else "shorter"
            words, look = WORDS[line.term]
            found.append(f"{words}: {abs(line.gap):.4g} s {way} than predicted; look at {look}")
    return found

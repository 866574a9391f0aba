"""Every named fault is found, and found where it is; what is right is not."""

import numpy as np
import pytest

from tests.tools.accuracy.emulate.small import SMALL, STRATEGIES, reference
from tests.tools.accuracy.operators.mutations import MUTATIONS
from tools.accuracy.emulate.kernels import Kernels
from tools.accuracy.emulate.run import emulate
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.equivalence.compare import compare, describe_ranks, finding_text


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found_where_it_is(name):
    fault = MUTATIONS[name]
    wrong = emulate(SMALL, fault.strategy, kernels=fault.kernels, world=fault.world())
    first = compare(wrong, reference(0, 1)).findings[0]
    assert (first.step, first.phase, first.module, first.tensor) == (1, fault.phase, fault.module, fault.tensor)
    assert first.ranks == fault.expected_ranks()


def test_the_group_that_decays_wrongly_is_named_whole():
    fault = MUTATIONS["weight decay applied to the wrong group"]
    findings = compare(emulate(SMALL, fault.strategy, kernels=fault.kernels), reference(0, 1)).findings
    changed = {f"{f.module}.{f.tensor}" for f in findings if f.tensor.startswith("change of")}
    assert len(changed) == 2 * 4 + 1 and all("norm" in name for name in changed)


def test_what_is_not_finite_on_both_sides_is_found():
    class Broken(Kernels):
        def softmax(self, rank, scores):
            return super().softmax(rank, scores) * np.nan

    both = [emulate(SMALL, strategy, kernels=Broken()) for strategy in (Strategy(tp=2), Strategy())]
    first = compare(*both).findings[0]
    assert (first.module, first.tensor, first.error) == ("layers.0.attention", "softmax", np.inf)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_same_strategy_without_the_fault_is_clean(name):
    assert compare(emulate(SMALL, MUTATIONS[name].strategy), reference(0, 1)).findings == ()


@pytest.mark.parametrize("seed", range(10))
def test_ten_clean_runs_of_other_weights_and_data(seed):
    """Each strategy is met with at least three seeds, and three steps so that the optimizer's state counts."""
    for index, strategy in enumerate(STRATEGIES):
        if index % 3 == seed % 3:
            comparison = compare(emulate(SMALL, strategy, steps=3, seed=seed), reference(seed, 3))
            assert comparison.findings == () and comparison.tensors > 500, strategy
            assert comparison.used < 1e-3, "float64 on both sides leaves nearly all of the tolerance"


def test_a_finding_reads_as_a_sentence():
    fault = MUTATIONS["wrong RoPE offset under sequence split"]
    first = compare(emulate(SMALL, fault.strategy, kernels=fault.kernels), reference(0, 1)).findings[0]
    text = finding_text(first, fault.strategy)
    assert text.startswith("forward of step 1, layers.0.attention: rope of keys, ranks 1, 3 (cp 1): error ")
    assert text.endswith("Usually: position offset of a rank's part of the sequence")


@pytest.mark.parametrize(
    ("ranks", "strategy", "text"),
    [
        ([0], Strategy(), "the only rank"),
        ([0, 1], Strategy(dp=2), "all ranks"),
        ([2, 3], Strategy(dp=2, tp=2), "ranks 2-3 (dp 1)"),
        ([1, 3], Strategy(dp=2, tp=2), "ranks 1, 3 (tp 1)"),
        ([5], Strategy(pp=2, dp=2, tp=2), "rank 5 (pp 1, dp 0, tp 1)"),
        ([0, 3], Strategy(dp=2, tp=2), "ranks 0, 3"),
    ],
)
def test_ranks_are_named_by_what_they_share(ranks, strategy, text):
    assert describe_ranks(ranks, strategy) == text

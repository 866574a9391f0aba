"""Swapping as a third choice: against all plans of a small instance, over bandwidths, and a published tendency."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.errors import RecipeError
from tests.tools.layout.test_place import DENSE, MOE, TIMES, configuration
from tools.estimate.configuration import Configuration, Recompute
from tools.estimate.efficiency import cluster
from tools.estimate.memory.activations import saved, saved_parts
from tools.estimate.memory.model import all_stages
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.optimise import optimise
from tools.layout.place import place
from tools.layout.problem import pipeline_instance
from tools.model import Model, pattern_of
from tools.search.ranking.swapping import (
    HIDDEN,
    WHOLE,
    hidden_bytes,
    place_swapping,
    prices_of,
    swapped,
    with_swapping,
)

many = settings(max_examples=80)


LAYERS = 4


def by_layers(seconds, forward, backward, prefetch=1, passes=40):
    """Seconds that a forward and a backward of LAYERS layers last beyond their computation, in the long run.

    A link takes its transfers in the order in which they are asked for: a layer's bytes are to leave when its forward
    ends, and to come back when the operation starts that is `prefetch` before its backward.
    """
    now, starts, done, outs, marks = 0.0, [0.0] * prefetch, [], [], []
    free = {"out": 0.0, "in": 0.0}
    for _ in range(passes):
        for index in range(2 * LAYERS):
            if index >= LAYERS:
                asked = starts[-prefetch]
                for end in [end for end in outs if end <= asked]:  # asked for before this fetch
                    outs.remove(end)
                    free["out"] = max(free["out"], end) + seconds
                free["in"] = max(free["in"], asked) + seconds
                now = max(now, free["in"])
            starts.append(now)
            now += forward if index < LAYERS else backward
            if index < LAYERS:
                outs.append(now)
        marks.append(now)
    half = passes // 2
    done = (marks[-1] - marks[half - 1]) / (passes - half)
    return done - LAYERS * (forward + backward)


@many
@given(st.integers(0, 12), st.integers(1, 8), st.integers(1, 8))
def test_price_against_a_link_that_moves_layer_by_layer(seconds, forward, backward):
    """A backward's first layer is fetched behind a forward, the others behind a backward."""
    got = LAYERS * swapped(20, 20, seconds, backward).extra_backward
    simulated = by_layers(seconds, forward, backward)
    assert abs(got - simulated) <= abs(forward - backward) + 1e-9
    assert by_layers(seconds, forward, backward, prefetch=2) <= simulated + 1e-9


def test_by_hand():
    """400 MB of 1 GB at 25 GB/s: 16 ms each way; a backward of 12 ms leaves 4 ms exposed."""
    found = swapped(1e9, 0.4e9, 0.016, 0.012)
    assert (found.extra_backward, found.activation, found.once) == pytest.approx((0.004, 0.6e9, 0.8e9))
    assert swapped(1e9, 0.4e9, 0.012, 0.012).extra_backward == 0


def linked(bytes_per_s):
    link = replace(TIMES.hardware.host_link, bytes_per_s=bytes_per_s)
    return TimeModel(replace(TIMES.hardware, host_link=link))


def tight(config, share):
    """Bytes between what everything kept needs (1) and what everything recomputed does (0)."""
    runs = [replace(config, recompute=one) for one in (Recompute(full=config.layers), Recompute())]
    least, most = (max(memory.peak for memory in all_stages(run)) for run in runs)
    return least + share * (most - least)


def run(**more):
    return configuration(training_graph=True, sequence=4096, pp=4, chunks=1, **more)


def test_more_bandwidth_never_costs_time_and_none_brings_nothing():
    config = run()
    cap = tight(config, 0.6)
    found = [place_swapping(config, linked(speed), cap, Budget(2.0)) for speed in (1.0, 1e10, 1e15)]
    assert [one.without_s for one in found] == [found[0].without_s] * 3
    assert found[0].with_s == found[0].without_s and found[0].by_stage == (0, 0, 0, 0)
    assert found[0].with_s > found[2].with_s
    assert all(one.with_s <= one.without_s and one.peak <= cap for one in found)
    assert sum(found[2].by_stage) > 0 and sum(found[2].layers.values()) == config.model.layers
    assert found[2].with_s >= place(config, TIMES, 1e15, Budget(1.0)).step_s * 0.98  # with all the memory there is


def test_no_link_no_price():
    bare = TimeModel(replace(TIMES.hardware, host_link=None))
    with pytest.raises(RecipeError, match="no host_link"):
        place_swapping(run(), bare, GIB, Budget(1.0))


@pytest.mark.parametrize("speed", [2e9, 2e10, 1e12])
def test_the_choice_is_the_best_of_all_plans(speed):
    model = linked(speed)
    config = run(model=replace(DENSE, pattern=DENSE.pattern[:5]))
    plain = pipeline_instance(config, model, GIB, True)
    instance = with_swapping(plain, prices_of(config, model))
    assert WHOLE in {option.name for option in instance.types[0].options}
    size = len(instance.columns)
    plans = [
        np.array(chosen).T
        for layers in set(itertools.permutations((1, 1, 1, 2)))
        for chosen in itertools.product(*(counts(size, count) for count in layers))
    ]
    plans = np.array(plans)
    assert instance.well_formed(plans).all()
    instance = replace(instance, cap=float(np.quantile(instance.peak_memory(plans).max(axis=1), 0.3)))
    plans = plans[instance.fits(plans)]
    best = instance.step_times(plans).min()
    outcome = optimise(instance, Budget(3.0))
    assert outcome.time == pytest.approx(best, rel=1e-6)
    assert len(plans) > 100


def counts(options, layers):
    return [
        [chosen.count(option) for option in range(options)]
        for chosen in itertools.combinations_with_replacement(range(options), layers)
    ]


def test_options_have_the_price_of_the_link():
    model, config = linked(5e9), run()
    plain = pipeline_instance(config, model, GIB, True)
    instance = with_swapping(plain, prices_of(config, model))
    layer, whole = model.layer(config, "moe"), saved(config, "moe")
    options = {option.name: option for option in instance.types[-1].options}
    moved = whole - saved(config, "moe", "full")
    expected = swapped(whole, moved, moved / 5e9, layer.backward.total)
    assert options[WHOLE].extra_backward == pytest.approx(1000 * expected.extra_backward)
    assert options[WHOLE].activation * GIB == pytest.approx(saved(config, "moe", "full"))
    assert options[HIDDEN].extra_backward == 0
    hidden = whole - options[HIDDEN].activation * GIB
    assert hidden == hidden_bytes(saved_parts(config, "moe").values(), layer.backward.total, model)
    assert hidden <= 5e9 * layer.backward.total
    most = max(price.once for kind in ("dense", "moe") for price in prices_of(config, model)[kind].values())
    np.testing.assert_allclose((instance.static - plain.static) * GIB, most)


def test_half_of_the_activations_are_free_in_most_configurations():
    """PipeOffload (arXiv 2503.01328): at least half can be offloaded at negligible overhead in most, all in some."""
    times, shares = TimeModel(cluster("a100_80g")), []
    for hidden, sequence in itertools.product((4096, 6144, 8192, 12288), (2048, 4096, 8192, 16384)):
        heads = hidden // 128
        model = Model(
            pattern_of(4), hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, ffn=4 * hidden, vocab=51200
        )
        config = Configuration(model, pp=4, layers=((1,) * 4,), sequence=sequence, micro_batches=16)
        carried = times.hardware.host_link.bytes_per_s * times.layer(config, "dense").backward.total
        shares.append(min(1.0, carried / saved(config, "dense")))
    assert sum(share >= 0.5 for share in shares) > len(shares) / 2
    assert max(shares) == 1.0
    assert shares[0] == min(shares[::4])  # wider layers compute more for each byte


def test_layers_that_alternate_are_not_placed():
    kinds = replace(MOE, pattern=tuple(("dense", "moe")[n % 2] for n in range(8)))
    with pytest.raises(RecipeError, match="alternate"):
        place_swapping(run(model=kinds), TIMES, GIB, Budget(1.0))

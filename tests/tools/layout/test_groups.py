"""Recomputation by groups of operators: the instance against the estimator, and what `place` makes of it."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tools.layout.test_place import DENSE, MOE, TIMES, configuration
from tools.estimate.configuration import PATTERNS, Recompute, joined, offered
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import all_stages, layer_options, stage_memory
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.floor import floor_of
from tools.layout.place import (
    configuration_of,
    eased,
    group_ways,
    place,
    recomputed_table,
    with_table,
)
from tools.layout.problem import by_price, pipeline_instance
from tools.pipeline.simulate import Durations, simulate

NAMES = ("select", *PATTERNS)


def run(model=MOE, **more):
    return configuration(model, training_graph=True, sequence=4096, **more)


@st.composite
def planned_groups(draw):
    """A run and a plan of it whose chunks name groups in MindFormers' order."""
    model = draw(st.sampled_from([MOE, DENSE, replace(MOE, mtp=1)]))
    pp, chunks = draw(st.sampled_from([(2, 1), (4, 1), (2, 2)]))
    config = run(model, pp=pp, chunks=chunks, tp=draw(st.sampled_from([1, 2])), ep=1 if model is DENSE else 4)
    full = draw(st.booleans())
    instance = pipeline_instance(config, TIMES, 64 * GIB, full, False, by_price(config, TIMES))
    order = instance.order
    plan, first = np.zeros((len(instance.columns), pp * chunks), int), 0
    for chunk, count in enumerate(itertools.chain(*config.layers)):
        kinds = model.pattern[first : first + count]
        first += count
        for kind, option in zip(
            kinds,
            sorted(draw(st.lists(st.sampled_from(order), min_size=count, max_size=count)), key=order.index),
            strict=True,
        ):
            index = [one.name for one in instance.types].index(kind)
            names = [one.name for one in instance.types[index].options]
            plan[instance.type_columns(index).start + names.index(option), chunk] += 1
    return config, instance, plan


@settings(max_examples=40)
@given(planned_groups())
def test_the_instance_with_groups_is_the_estimator(case):
    config, instance, plan = case
    assert instance.well_formed(plan[None])[0]
    found = configuration_of(config, instance, plan)
    assume(not config.model.mtp or mtp_option(found) == "none")  # the instance is that of MTP kept
    forward, backward, _ = TIMES.chunks(found)
    arrival = instance.by_stage(instance.ends - type(instance).__mro__[1].ends.func(instance))
    expected = np.stack([forward.ravel(), backward.ravel()]) * 1000 + arrival
    np.testing.assert_allclose(instance.by_stage(instance.times(plan)), expected)
    peaks = [memory.peak for memory in all_stages(found)]
    assert (instance.peak_memory(plan[None])[0] * GIB >= np.array(peaks) * (1 - 1e-9)).all()


def test_each_group_frees_at_a_higher_price_than_those_before():
    config = run()
    groups = by_price(config, TIMES)
    assert set(groups) == set(NAMES)
    instance = pipeline_instance(config, TIMES, GIB, False, False, groups)
    whole = instance.types[-1].options
    assert [option.name for option in whole] == ["none", *("+".join(groups[:n]) for n in range(1, len(groups) + 1))]
    steps = [
        (more.extra_backward - less.extra_backward) / (less.activation - more.activation)
        for less, more in itertools.pairwise(whole)
    ]
    assert steps == sorted(steps)
    assert whole[-1].extra_backward < 1000 * TIMES.layer(config, "moe").recomputed["full"].total


def with_tables(config, tables):
    """The run in which every stage names so many layers of each group; one chunk on each stage."""
    full, select, *groups = (((tables[name],) * config.pp,) for name in ("full", *NAMES))
    return replace(config, recompute=Recompute(full, select, operators=tuple(zip(PATTERNS, groups, strict=True))))


def best_of_all_tables(config, cap):
    """(Seconds of the pipeline, tables) of the fastest of all counts of all groups, layers as they are (1F1B)."""
    best = (float("inf"), None)
    layer = {kind: TIMES.layer(config, kind) for kind in ("dense", "moe")}
    forward = TIMES.chunks(replace(config, recompute=Recompute()))[0]

    @functools.cache
    def price(kind, option):
        return layer[kind].backward.total + layer[kind].again(option).total

    outside = TIMES.chunks(replace(config, recompute=Recompute()))[1][0] - [
        sum(price(kind, "none") for kind in kinds if kind in layer) for kinds in map(kinds_of(config), range(config.pp))
    ]
    chosen = []
    for stage in range(config.pp):
        kinds = [kind for kind in kinds_of(config)(stage) if kind in layer]
        found = [(float("inf"), None)]
        for counts in itertools.product(range(len(kinds) + 1), repeat=len(NAMES) + 1):
            tables = dict(zip((*NAMES, "full"), counts, strict=True))
            options = [
                "full" if n < tables["full"] else joined(name for name in NAMES if n < tables[name])
                for n in range(len(kinds))
            ]
            seconds = outside[stage] + sum(price(*pair) for pair in zip(kinds, options, strict=True))
            if seconds < found[-1][0] and stage_memory(with_tables(config, tables), stage).peak <= cap:
                found.append((seconds, tables))
        chosen.append(found[-1])
    if all(tables for _, tables in chosen):
        backward = np.array([[seconds for seconds, _ in chosen]])
        times = Durations(forward, backward, backward / 2, TIMES.transfer(config), "none")
        best = simulate("1f1b", config.micro_batches, times).makespan, [tables for _, tables in chosen]
    return best


def kinds_of(config):
    return lambda stage: [kind for chunk in config.stage_kinds(stage) for kind in chunk]


# with little memory a stage that recomputes nothing needs what the working memory of recomputation would take
@pytest.mark.parametrize("share", [0.2, 0.25, 0.35, 0.6])
def test_no_tables_are_much_faster(share):
    config = run(
        replace(MOE, pattern=MOE.pattern[:6]), pp=2, chunks=1, ep=1, dp=1, tp=1, micro_batches=4, layers=((3, 3),)
    )
    most, least = (
        max(m.peak for m in all_stages(replace(config, recompute=one)))
        for one in (Recompute(), Recompute(full=config.layers))
    )
    cap = least + share * (most - least)
    found = place(config, TIMES, cap, Budget(8.0), groups=True)
    reference, tables = best_of_all_tables(replace(config, layers=found.configuration.layers), cap)
    reached = TIMES.step(found.configuration, simulated=True).pipeline
    assert found.bound_s <= found.step_s - reached + reference  # the bound is that of all tables
    floor = min(floor_of(pipeline_instance(config, TIMES, cap, *way))[0] / 1000 for way in group_ways(config, TIMES))
    assert found.bound_s - (found.step_s - reached) > floor * (1 + 1e-4), "not only what one stage takes"
    assert reference * (1 - 1e-9) <= reached <= 1.002 * reference, (found.configuration.recompute, tables)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_groups_keep_the_cap_and_never_cost_time(share):
    config = run(pp=4, chunks=1)
    most, least = (
        max(m.peak for m in all_stages(replace(config, recompute=one)))
        for one in (Recompute(), Recompute(full=config.layers))
    )
    cap = least + share * (most - least)
    without, found = place(config, TIMES, cap, Budget(1.0)), place(config, TIMES, cap, Budget(2.0), groups=True)
    assert found.step_s <= without.step_s
    assert found.bound_s <= found.step_s
    assert max(m.peak for m in all_stages(found.configuration)) <= cap
    assert found.configuration.recompute.operators  # else this compares nothing
    assert eased(found.configuration, TIMES, cap) == found.configuration


def test_easing_leaves_out_what_is_not_needed():
    config = run(pp=2, chunks=1)
    every = replace(
        config, recompute=Recompute(select=config.layers, operators=tuple((n, config.layers) for n in PATTERNS))
    )
    cap = max(m.peak for m in all_stages(replace(every, recompute=replace(every.recompute, select=None))))
    found = eased(every, TIMES, cap)
    assert max(m.peak for m in all_stages(found)) <= cap
    assert TIMES.chunks(found)[1].sum() < TIMES.chunks(every)[1].sum()
    for name in NAMES:
        table = recomputed_table(found, name)
        for stage, count in enumerate(table[0]):
            if count:
                fewer = with_table(found, name, (tuple(c - (s == stage) for s, c in enumerate(table[0])),))
                assert max(stage_memory(fewer, stage).peak, 0) > cap, (name, stage)


def test_a_layer_has_all_groups_that_count_it():
    config = run(pp=2, chunks=1, layers=((5, 4),))
    recompute = Recompute(
        full=((1, 0),), select=((2, 0),), operators=(("attention", ((3, 0),)), ("experts", ((4, 1),)))
    )
    config = replace(config, recompute=recompute)
    assert layer_options(config, 0, 0, 5) == [
        "full",
        "select+attention+experts",
        "attention+experts",
        "experts",
        "none",
    ]
    assert layer_options(config, 0, 1, 4) == ["experts", "none", "none", "none"]


def test_where_nothing_is_known_there_is_no_choice():
    assert offered(configuration()) == () and group_ways(configuration(), TIMES) == []
    assert "attention" not in offered(run(cp=2)) and "experts" not in offered(run(DENSE, ep=1))

"""The instance against the estimator; what `place` returns keeps the cap by the estimator's own word."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline_search import plan_of
from tools.estimate.configuration import Configuration, Recompute, even_layers
from tools.estimate.efficiency import cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.activations import mtp_option
from tools.estimate.memory.model import all_stages, layer_options, peak_memory, stage_memory
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout import place as layout_place
from tools.layout.budget import Budget
from tools.layout.optimise import optimise
from tools.layout.place import (
    GOALS,
    configuration_of,
    place,
    screen,
)
from tools.layout.problem import pipeline_instance, table_of
from tools.model import Latent, Model, pattern_of
from tools.pipeline.schedules import pairs_up
from tools.recipe.load import load_recipe

TIMES = TimeModel(cluster("atlas_800t_a2"))
LATENT = Latent(query_rank=48, kv_rank=32, nope=16, rope=8, value=16)
DENSE = Model(pattern_of(9), hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=768, vocab=4096)
MOE = replace(DENSE, pattern=pattern_of(9, 16, 2), latent=LATENT, experts=16, top_k=4, expert_ffn=256, shared_ffn=256)


def configuration(model=MOE, pp=2, chunks=2, micro_batches=8, layers=None, **more):
    more = {"schedule": "interleaved_1f1b" if chunks > 1 else "1f1b", **more}
    fixed = {"dp": 4, "tp": 2, "ep": 4 if model.experts else 1, "keep_gathered": True, "shared_whole": True}
    table = layers or even_layers(model.layers, pp, chunks)
    return Configuration(model, pp=pp, layers=table, micro_batches=micro_batches, **{**fixed, "sequence": 512, **more})


@st.composite
def planned(draw):
    """A configuration and a plan of it: layers in model order, options in MindFormers' order."""
    model = draw(
        st.sampled_from(
            [DENSE, MOE, replace(MOE, mtp=1), replace(MOE, pattern=pattern_of(9, 16)), replace(DENSE, mtp=1)]
        )
    )
    pp, chunks = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (2, 3)]))
    every = ["interleaved_1f1b", "seqpipe", "zero_bubble_v", "zb_v", "v_half", "interleaved_1f1b_pairs"]
    schedule = draw(st.sampled_from(every)) if pp > 1 and chunks == 2 else None
    config = configuration(
        model,
        pp,
        chunks,
        schedule=schedule or ("interleaved_1f1b" if chunks > 1 else "1f1b"),
        micro_batches=draw(st.sampled_from([8, 10] if schedule else [4, 6, 8])),
        overlap_pp=draw(st.booleans()),
        fp32_residual=draw(st.booleans()),
        shard_optimizer=draw(st.booleans()),
        ep_mode=draw(st.sampled_from(["global", "hierarchical"])),
        sequence_parallel=draw(st.booleans()),
        batch=draw(st.sampled_from([1, 2])),
        training_graph=draw(st.booleans()),
    )
    full, mtp = draw(st.sampled_from([(False, False), (True, False), *[(True, True)] * model.mtp]))
    instance = pipeline_instance(config, TIMES, 64 * GIB, full, mtp)
    size = pp * chunks
    least = [0, *[1] * (size - 2), 0][-size:]  # the first chunk may be empty, and the last one unless it has MTP
    least[-1] = instance.last_layers if pp > 1 else 0
    spare = model.layers - sum(least)
    cuts = sorted(draw(st.lists(st.integers(0, spare), min_size=size - 1, max_size=size - 1)))
    counts = [each + b - a for each, a, b in zip(least, [0, *cuts], [*cuts, spare], strict=True)]
    names = [[option.name for option in kind.options] for kind in instance.types]
    plan, first = np.zeros((len(instance.columns), size), int), 0
    for chunk, count in enumerate(counts):
        kinds = model.pattern[first : first + count]
        first += count
        order = ["full", "select", "communication", "none"]
        options = sorted(
            draw(st.lists(st.sampled_from(order[not full :]), min_size=count, max_size=count)), key=order.index
        )
        for kind, option in zip(kinds, options, strict=True):
            index = [kind.name for kind in instance.types].index(kind)
            if option not in names[index]:
                option = "none"
            plan[instance.type_columns(index).start + names[index].index(option), chunk] += 1
    plan = expressible(instance, plan)
    assert instance.well_formed(plan[None])[0]
    return config, instance, plan, counts, mtp


def expressible(instance, plan):
    """The plan [K, C] with the last chunk's option where there is one, and each chunk in an order of options that
    MindFormers can express: the strongest that comes after makes those before it as strong.
    """
    found, last = np.zeros_like(plan), plan.shape[1] - 1
    for chunk in range(plan.shape[1]):
        strongest = len(instance.order)
        for index in reversed(range(len(instance.types))):
            columns = instance.type_columns(index)
            places = {instance.order.index(option.name): n for n, option in enumerate(instance.types[index].options)}
            weakest = strongest
            for strength, number in sorted(places.items()):
                count = plan[columns.start + number, chunk]
                if not count:
                    continue
                taken = max([one for one in places if one <= min(strength, weakest)], default=None)
                if taken is None:  # nothing of this type is as strong: let the later ones do less
                    return expressible(instance, _weaker(instance, plan, chunk))
                if chunk == last and instance.last_option and 0 in places:
                    taken = 0
                found[columns.start + places[taken], chunk] += count
                strongest = min(strongest, taken)
    return found


def _weaker(instance, plan, chunk):
    """The plan with nothing recomputed in a chunk."""
    found = plan.copy()
    for index, kind in enumerate(instance.types):
        columns = instance.type_columns(index)
        none = columns.start + [option.name for option in kind.options].index("none")
        found[columns, chunk], found[none, chunk] = 0, plan[columns, chunk].sum()
    return found


@pytest.mark.slow
@settings(max_examples=60)
@given(planned())
def test_the_instance_is_the_estimator(case):
    config, instance, plan, counts, mtp = case
    found = configuration_of(config, instance, plan)
    assert found.layers == table_of(config, counts)
    forward, backward, _ = TIMES.chunks(found)
    arrival = instance.by_stage(instance.ends - type(instance).__mro__[1].ends.func(instance))
    expected = np.stack([forward.ravel(), backward.ravel()]) * 1000 + arrival
    times = instance.by_stage(instance.times(plan))
    # a plan that repeats its last layer where the instance takes MTP as kept: less memory, more time than it says
    exact = not config.model.mtp or (mtp_option(found) == "full") == mtp
    if exact:
        np.testing.assert_allclose(times[:2], expected)
        if len(times) == 3:
            np.testing.assert_allclose(times[2], TIMES.weight_gradients(found).ravel() * 1000)
    else:
        assert not mtp and (times[:2] <= expected * (1 + 1e-9)).all()
    pipeline = TIMES.step(found, simulated=True).pipeline * 1000
    if pairs_up(config.schedule):  # what pairs hide the instance leaves out; what a repeated MTP takes, too
        assert pipeline <= instance.step_times(plan[None])[0] * (1 + 1e-9) or not config.overlap_pp or not exact
        exact = False
    if (config.overlap_pp or config.pp == 1) and exact:
        assert instance.step_times(plan[None])[0] == pytest.approx(pipeline)
    elif not pairs_up(config.schedule):
        assert instance.step_times(plan[None])[0] <= pipeline * (1 + 1e-9)
    peaks = np.array([memory.peak for memory in all_stages(found)]) / GIB
    assert (instance.peak_memory(plan[None])[0] >= peaks * (1 - 1e-12)).all()
    if exact:
        np.testing.assert_allclose(instance.peak_memory(plan[None])[0], peaks)


def test_options_come_back_as_mindformers_reads_them():
    config = configuration(layers=((3, 2), (2, 2)))
    instance = pipeline_instance(config, TIMES, 64 * GIB, full=True)
    plan = np.zeros((len(instance.columns), 4), int)
    for name, chunk, count in [
        (("dense", "full"), 0, 2),
        (("moe", "select"), 0, 1),
        (("moe", "none"), 1, 2),
        (("moe", "select"), 2, 1),
        (("moe", "communication"), 2, 1),
        (("moe", "communication"), 3, 1),
        (("moe", "none"), 3, 1),
    ]:
        names = [(instance.types[t].name, instance.types[t].options[o].name) for t, o in instance.columns]
        plan[names.index(name), chunk] = count
    found = configuration_of(config, instance, plan)
    assert found.layers == ((3, 2), (2, 2))
    assert found.recompute.full == ((2, 0), (0, 0))
    assert found.recompute.select == ((3, 0), (1, 0))
    assert found.recompute.communication == ((0, 0), (2, 1))
    assert layer_options(found, 0, 0, 3) == ["full", "full", "select"]
    assert layer_options(found, 1, 0, 2) == ["select", "communication"]
    assert layer_options(found, 1, 1, 2) == ["communication", "none"]


@pytest.mark.parametrize("full", [False, True])
def test_an_order_that_mindformers_cannot_express_is_no_plan(full):
    """Of all ways to recompute a chunk of two dense and two MoE layers, those that come back from tables as given."""
    config = configuration(pp=2, chunks=1)
    instance = pipeline_instance(config, TIMES, 64 * GIB, full=full)
    names = [(instance.types[t].name, instance.types[t].options[o].name) for t, o in instance.columns]
    dense, moe = ([name for kind, name in names if kind == own] for own in ("dense", "moe"))
    seen = set()
    for options in itertools.product(*[itertools.combinations_with_replacement(own, 2) for own in (dense, moe)]):
        row = [instance.order.index(option) for pair in options for option in sorted(pair, key=instance.order.index)]
        plan = np.zeros((len(names), 2), int)
        for kind, pair in zip(("dense", "moe"), options, strict=True):
            for option in pair:
                plan[names.index((kind, option)), 0] += 1
        plan[names.index(("moe", "none")), 1] = 5
        good = bool(instance.well_formed(plan[None])[0])
        assert good == (row == sorted(row)), options
        seen.add(good)
        if good:
            found = configuration_of(config, instance, plan)
            assert sorted(layer_options(found, 0, 0, 4)) == sorted(itertools.chain(*options))
    assert seen == {True, False}


@pytest.mark.parametrize("way", [(False, False), (True, False), (True, True)])
def test_no_plan_of_the_optimiser_is_dropped_where_mtp_makes_the_last_chunk_long(way):
    """MTP goes where the last layer is. With an empty last chunk the instance said 51 GiB, and the stage before had 83:
    the plan was dropped in silence, and everything was recomputed instead.
    """
    model = replace(MOE, mtp=1, vocab=65536)  # the head and MTP take longer than a stage's layers
    config = configuration(model, pp=4, chunks=2, micro_batches=8)
    free, least = (peak_memory(replace(config, recompute=one)) for one in (Recompute(), Recompute(full=config.layers)))
    cap = (free + least) / 2
    instance = pipeline_instance(config, TIMES, cap, *way)
    assert optimise(replace(instance, last_layers=0), Budget(1)).plan[:, -1].sum() == 0  # it would be empty
    plan = optimise(instance, Budget(1)).plan
    assert plan[:, -1].sum() > 0
    found = configuration_of(config, instance, plan)
    assert (instance.peak_memory(plan[None])[0] >= [m.peak / GIB * (1 - 1e-12) for m in all_stages(found)]).all()
    assert instance.step_times(plan[None])[0] <= TIMES.step(found, simulated=True).pipeline * 1000 * (1 + 1e-9)


def test_a_placement_with_mtp_says_that_nothing_was_dropped():
    model = replace(MOE, mtp=1, vocab=65536)
    config = configuration(model, pp=4, chunks=2, micro_batches=8)
    config = replace(config, recompute=Recompute(full=config.layers))
    cap = (peak_memory(replace(config, recompute=Recompute())) + peak_memory(config)) / 2
    found = place(config, TIMES, cap, Budget(1))
    assert found.dropped == () and found.step_s < 0.97 * TIMES.step(config, simulated=True).total


def test_a_plan_over_the_cap_by_the_memory_model_is_named(monkeypatch):
    config = configuration(pp=2, chunks=1, recompute=Recompute())
    cap = 0.95 * peak_memory(config)
    monkeypatch.setattr(
        layout_place,
        "pipeline_instance",
        lambda *rest, **more: pipeline_instance(*rest[:2], 64 * GIB, *rest[3:], **more),
    )
    found = place(config, TIMES, cap, Budget(0.1))
    assert found.configuration is None and len(found.dropped) == 2
    assert "was dropped, because stage" in found.dropped[0] and "by the memory model" in found.dropped[0]


def test_a_placement_keeps_the_cap_in_the_update():
    """An unsharded optimizer divides all gradients after the passes, which takes more than recomputed activations did.
    The head takes the time of several layers, so that layers move to the first stage.
    """
    recipe = load_recipe("recipes/telechat3_105b/pretrain_4k.yaml")
    sizes = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 151936}
    sizes |= {"n_routed_experts": 160, "moe_intermediate_size": 1408, "moe_shared_expert_intermediate_size": 2816}
    recipe["model"]["model_config"].update(sizes, seq_length=6144, num_nextn_predict_layers=0, offset=0)
    recipe["parallel_config"].update(pipeline_stage=2, model_parallel=1, data_parallel=8, expert_parallel=4)
    recipe["parallel_config"].update(micro_batch_num=6, context_parallel=2, use_seq_parallel=False)
    recipe["parallel"]["enable_parallel_optimizer"] = False
    recipe["runner_config"]["batch_size"] = 2
    config = replace(from_recipe(recipe), recompute=Recompute())
    cap, fitting, seconds = 55 * GIB, {}, []
    for stage, count in itertools.product((0, 1), range(1, 24)):
        layers = ((count, 24 - count),) if stage == 0 else ((24 - count, count),)
        for full in range(count + 1):
            own = replace(config, layers=layers, recompute=Recompute(full=((full, full),)))
            if stage_memory(own, stage).peak <= cap:
                fitting[stage, count] = full
                break
    for count in range(1, 24):
        if (0, count) in fitting and (1, 24 - count) in fitting:
            full = Recompute(full=((fitting[0, count], fitting[1, 24 - count]),))
            one = replace(config, layers=((count, 24 - count),), recompute=full)
            seconds.append(TIMES.step(one, simulated=True).total)
    beat = 1.02 * min(seconds)  # with a goal, the patterns of stages can give back a plan
    for found in (place(config, TIMES, cap, Budget(1.0)), screen(config, TIMES, cap), screen(config, TIMES, cap, beat)):
        assert found.dropped == () and found.least_s <= found.step_s <= min(seconds) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_a_placement_keeps_the_cap_and_beats_the_even_one(pp, chunks):
    config = configuration(pp=pp, chunks=chunks, recompute=Recompute())
    free = peak_memory(config)
    everything = replace(config, recompute=Recompute(full=config.layers))
    least = peak_memory(everything)
    cap = (free + least) / 2
    found = place(config, TIMES, cap, Budget(1.5))
    assert max(found.peak_bytes) <= cap
    assert found.peak_bytes == tuple(memory.peak for memory in all_stages(found.configuration))
    assert found.bound_s <= found.step_s == TIMES.step(found.configuration, simulated=True).total
    if peak_memory(everything) <= cap:
        assert found.step_s <= TIMES.step(everything, simulated=True).total
    assert found.configuration.recompute != Recompute()


def test_no_placement_of_a_tiny_model_is_faster():
    config = configuration(replace(DENSE, pattern=pattern_of(5)), pp=2, chunks=1, micro_batches=4)
    cap = peak_memory(config) * 0.93
    found = place(config, TIMES, cap, Budget(6))
    best = min(step for step, peak in every_placement(config) if peak <= cap)
    assert found.step_s == pytest.approx(best, rel=1e-6)


def every_placement(config):
    for first in range(6):
        layers = ((first, 5 - first),)
        tables = [tuple(itertools.product(*[range(count + 1) for count in layers[0]]))] * 2
        for full, select in itertools.product(*tables):
            recompute = Recompute(full=(full,) if any(full) else None, select=(select,) if any(select) else None)
            one = replace(config, layers=layers, recompute=recompute)
            yield TIMES.step(one, simulated=True).total, peak_memory(one)


def test_chunks_of_one_stage_repeat_no_more_communication_than_the_run():
    run = configuration(pp=1, chunks=2, recompute=Recompute(replay_tp=False))
    found = place(run, TIMES, 0.9 * peak_memory(run), Budget(0.3))
    assert found.configuration.recompute.full and not found.configuration.recompute.replay_tp


@pytest.mark.parametrize(("chunks", "share"), [(1, 0.05), (1, 0.6), (2, 0.3), (1, 1.0)])
def test_layers_that_alternate_stay_and_recompute_the_least(chunks, share):
    config = configuration(replace(MOE, pattern=pattern_of(4, 16, 0, 2)), chunks=chunks, micro_batches=4)
    config = replace(config, recompute=Recompute(full=config.layers))
    most = peak_memory(replace(config, recompute=Recompute()))
    cap = (1 - share) * peak_memory(config) + share * most
    best = float("inf")
    every = [[(f, s) for s in range(count + 1) for f in range(s + 1)] for row in config.layers for count in row]
    for pairs in itertools.product(*every):
        full, select = (
            tuple(row[first : first + 2] for first in range(0, len(row), 2)) if any(row) else None
            for row in zip(*pairs, strict=True)
        )
        one = replace(config, recompute=Recompute(full=full, select=select))
        if peak_memory(one) <= cap:
            best = min(best, TIMES.step(one, simulated=True).total)
    for found in (screen(config, TIMES, cap), place(config, TIMES, cap, Budget(0.1))):
        assert found.configuration.layers == config.layers and max(found.peak_bytes) <= cap
        assert found.least_s <= found.step_s <= 1.005 * best
    assert (found.configuration.recompute == Recompute()) == (share == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "chunks", "layers", "cap"), [(4, 2, 14, 0.9), (3, 2, 11, 0.85)])
def test_bounds_by_whole_layers_rise_with_their_effort_and_stay_true(pp, chunks, layers, cap):
    """A little effort proves a bound under the time to beat, more of it a closer one; none is over what is placed."""
    model = replace(MOE, pattern=pattern_of(layers, 16, 1), vocab=16384)
    config = configuration(model, pp, chunks, micro_batches=3 * pp)
    room = cap * peak_memory(config)
    best = place(config, TIMES, room, Budget(2)).step_s
    found = [screen(config, TIMES, room, best * (1 + 1e-6), effort=effort) for effort in (0.001, 0.03, 0.1, 2.0)]
    bounds = [one.least_s / best for one in found]
    assert bounds == sorted(bounds) and bounds[-1] <= 1 + 1e-6
    assert bounds[0] < GOALS[0] <= max(bounds[1:3]) < 1, "by divided layers, then a share of the time to beat"
    assert all(one.spent <= 1.5 * effort for one, effort in zip(found[1:], (0.03, 0.1, 2.0), strict=True))


def test_what_cannot_fit_says_what_is_missing():
    found = place(configuration(), TIMES, 0.01 * GIB, Budget(4))
    assert found.configuration is None
    assert found.step_s == float("inf")
    assert "the least cap that any plan keeps is 0.0549" in found.why


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "zb_v"])
def test_a_v_is_placed_as_every_placement_tried_one_by_one_says(schedule):
    config = configuration(
        replace(MOE, pattern=pattern_of(5, 16), vocab=16384), chunks=2, micro_batches=4, schedule=schedule
    )
    cap = 0.97 * peak_memory(config) / GIB
    found = place(config, TIMES, cap * GIB, Budget(0.3))
    fastest = float("inf")
    for layers in itertools.product(range(6), repeat=4):
        if sum(layers) != 5 or 0 in layers[1:]:  # MindFormers wants a layer in all but the first, as the offset is read
            continue
        every = replace(config, layers=(layers[:2], (layers[3], layers[2])))
        for full in itertools.product(*(range(count + 1) for row in every.layers for count in row)):
            table = (full[:2], full[2:])
            tried = replace(every, recompute=Recompute(full=table if any(full) else None))
            if peak_memory(tried) <= cap * GIB:
                fastest = min(fastest, TIMES.step(tried, simulated=True).total)
    assert found.configuration is not None and max(found.peak_bytes) <= cap * GIB
    assert found.least_s <= found.step_s <= fastest * (1 + 1e-9)


def test_the_last_chunk_of_a_v_holds_a_layer_however_heavy_the_head_is():
    model = replace(MOE, pattern=pattern_of(5, 16), vocab=1 << 20)
    rows = [
        place(configuration(model, chunks=2, micro_batches=4, schedule=schedule), TIMES, 999 * GIB, Budget(0.3))
        for schedule in ("zero_bubble_v", "interleaved_1f1b")
    ]
    turned, straight = (found.configuration.layers for found in rows)
    assert turned[1][0] == 1 and straight[1][1] == 0


def test_the_layers_of_a_v_go_down_and_up_again():
    config = configuration(pp=3, chunks=2, schedule="zero_bubble_v")
    instance = pipeline_instance(config, TIMES, 64 * GIB, full=False)
    assert instance.stage_of.tolist() == [0, 1, 2, 2, 1, 0]
    plan = np.zeros((len(instance.columns), 6), int)
    plan[0, 0], plan[-1] = 2, [0, 1, 1, 2, 2, 1]
    assert configuration_of(config, instance, plan).layers == ((2, 1, 1), (1, 2, 2))
    assert (plan_of(instance, instance.to_solution(plan)) == plan).all()


@pytest.mark.slow
def test_the_438b_case_fits_its_45_gb():
    config = from_recipe(load_recipe("recipes/telechat3_438b/pretrain_4k.yaml"))
    found = place(config, TIMES, 45 * GIB, Budget(1))
    assert max(found.peak_bytes) <= 45 * GIB
    assert found.step_s < TIMES.step(config, simulated=True).total

"""Terms that explain what published runs differ by: each costs or saves time in the direction that it must."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import cluster
from tools.estimate.layer_model import Matmul, cast_bytes, score_passes, work
from tools.estimate.published.bridge_recipes import as_recipes_have_it, release
from tools.estimate.published.device_types import START
from tools.estimate.time_model import TimeModel
from tools.model.architecture import Latent, Model, pattern_of

MODEL = Model(pattern_of(8), hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000)
MOE = replace(MODEL, pattern=pattern_of(8, 64), experts=64, top_k=8, expert_ffn=1024)
LATENT = replace(MOE, latent=Latent(512, 512, 128, 64, 128))
BIASED = replace(MOE, biased=True)
TIMES = TimeModel(cluster("gb200"), START)


def run(model=MODEL, **changed):
    return Configuration(**{"model": model, "dp": 8, "layers": ((8,),), "micro_batches": 4, **changed})


def seconds(**changed):
    return TIMES.step(run(**changed)).total


@given(st.sampled_from([2, 4, 8, 16]))
def test_the_last_of_contiguous_parts_attends_to_all(cp):
    balanced = run(dp=1, cp=cp, sequence=65536)
    apart = replace(balanced, contiguous=True)
    share = work(apart, "dense").attention / work(balanced, "dense").attention
    # by counting: the last rank's queries see all keys before them
    part = 64 // cp
    seen = [sum(range(first, first + part)) + part / 2 for first in range(0, 64, part)]
    assert share == pytest.approx(max(seen) / (sum(seen) / cp))
    assert TIMES.step(apart).total > TIMES.step(balanced).total


def test_without_context_parallelism_parts_are_the_whole():
    assert work(run(contiguous=True), "dense") == work(run(), "dense")


def test_precision_is_faster_by_fewer_bits_and_slower_by_blocks():
    bf16, fp8, mxfp8, nvfp4 = (seconds(dtype=dtype, batch=4) for dtype in ("bf16", "fp8", "mxfp8", "nvfp4"))
    blocks = TimeModel(cluster("gb200"), replace(START, blocks=0.5)).step(run(dtype="mxfp8", batch=4)).total
    assert bf16 > fp8 and bf16 > mxfp8 > nvfp4 and blocks > mxfp8


def test_hardware_without_a_precision_computes_in_bf16():
    old = TimeModel(cluster("a100_80g"), START)
    assert old._share("nvfp4") == old._share("bf16") == START.matmul
    assert old._peak("mxfp8") == old._peak("bf16")


def test_casts_move_what_matmuls_take_in():
    matmul = Matmul(100, 30, 20, times=2)
    forward = cast_bytes(run(dtype="mxfp8"), [matmul])
    assert 3 * forward == pytest.approx(4 * 2 * 100 * (20 + 30))
    assert cast_bytes(run(), [matmul]) == 0 == cast_bytes(run(dtype="fp8"), [replace(matmul, high=True)])


def test_graphs_launch_less():
    kinds = [seconds(model=MOE, ep=8, graphs=graphs) for graphs in ("", "layers", "step")]
    assert kinds[0] > kinds[1] > kinds[2]


def test_sorting_on_the_way_saves_traffic():
    modes = [seconds(model=MOE, ep=8, ep_mode=mode) for mode in ("global", "deepep", "hybridep")]
    assert modes[0] > modes[1] > modes[2]


@settings(max_examples=20)
@given(st.floats(0.3, 0.9), st.floats(1.01, 1.5), st.sampled_from(["link", "network", "attention", "matmul", "memory"]))
def test_more_of_anything_reached_takes_no_longer(value, factor, name):
    config = run(model=MOE, dp=144, ep=144 // 9, tp=2, sequence=8192)
    slow, fast = (
        TimeModel(cluster("h100"), replace(START, **{name: share})).step(config).total
        for share in (value, min(1.0, value * factor))
    )
    assert fast <= slow


def test_links_inside_and_between_nodes_have_factors_of_their_own():
    inside, between = run(dp=1, tp=8), run(dp=64, tp=1)
    h100 = cluster("h100")
    for config, name, other in ((inside, "link", "network"), (between, "network", "link")):
        slower = TimeModel(h100, replace(START, **{name: 0.3})).step(config).total
        same = TimeModel(h100, replace(START, **{other: 0.9})).step(config).total
        assert slower > TimeModel(h100, START).step(config).total
        assert name == "network" or same == pytest.approx(TimeModel(h100, START).step(config).total)


def test_backward_of_unfused_scores_moves_less_than_twice_as_much():
    assert 1 < score_passes(run()) < 2 and 1 < score_passes(run(model=replace(MODEL, dropout=True))) < 2


def test_sums_of_gradients_cost_where_an_expert_has_few_rows():
    few, many = run(model=MOE, ep=1, dp=1, batch=1, sequence=512), run(model=MOE, ep=1, dp=1, batch=16, sequence=4096)

    def share(config):
        with_sums = TIMES.layer(config, "moe").backward.total
        return with_sums / TIMES.layer(replace(config, shard_weights=True), "moe").backward.total

    assert share(few) > 1.1 > 1.02 > share(many)


def test_a_release_is_read_from_the_id():
    assert release("new_26.04.01_DGX-B200_DeepSeekV3") == "26.04.01" and release("torchtitan_4") == ""


@pytest.mark.parametrize(
    ("row", "name", "model", "expected"),
    [
        ("new_26.06_x", "gb300", MOE, ("step", "hybridep", True)),
        ("new_26.04_x", "gb300", MOE, ("layers", "hybridep", False)),
        ("new_26.04_x", "h800", MOE, ("", "deepep", False)),
        ("mbridge_25.11_x", "h100", MOE, ("", "global", True)),
        ("mbridge_25.09_(tokendrop)", "h100", MOE, ("", "global", False)),
        ("mbridge_25.09_x", "h100", LATENT, ("", "deepep", False)),
        ("new_26.04_x", "b300", LATENT, ("", "hybridep", False)),
        ("new_26.04.01_x", "b300", LATENT, ("layers", "hybridep", False)),
        ("new_26.02.01_x", "b300", BIASED, ("layers", "global", False)),
        ("new_26.04_x", "b300", BIASED, ("layers", "hybridep", False)),
        ("mbridge_26.04_x", "b200", BIASED, ("", "hybridep", False)),
        ("mbridge_26.04.01_x", "b200", BIASED, ("", "global", False)),
        ("mbridge_26.04.01_x", "gb200", BIASED, ("", "global", True)),
    ],
)
def test_recipes_of_a_release_say_what_its_table_does_not(row, name, model, expected):
    assumed, written = [], run(model=model, ep=8, dtype="bf16" if model.biased else "mxfp8", ep_mode="deepep")
    found = as_recipes_have_it(row, name, written, assumed)
    assert (found.graphs, found.ep_mode, found.overlap_ep) == expected
    assert bool(assumed) == (found != written)


@pytest.mark.parametrize(("row", "name", "ep"), [("25.11", "b200", 64), ("26.04", "b200", 8), ("25.11", "gb200", 8)])
def test_where_a_table_contradicts_its_recipe_the_recipe_is_taken_and_said(row, name, ep):
    assumed = []
    found = as_recipes_have_it(f"mbridge_{row}_x", name, run(model=BIASED, dp=64, ep=8), assumed)
    assert found.ep == ep and ("the table says 8" in assumed[0]) == (ep == 64)


def test_experts_exchanges_leave_through_one_port_and_gradients_through_all():
    b300 = cluster("b300")
    joined = replace(b300, inter_node=replace(b300.inter_node, ports=1))
    slow, fast = TimeModel(b300, START), TimeModel(joined, START)
    config, gradients = run(model=MOE, dp=64, ep=64), run(dp=64)
    assert slow.exposed(config).waited.forward == pytest.approx(2 * fast.exposed(config).waited.forward, rel=0.05)
    assert slow.step(gradients).total == fast.step(gradients).total


@given(st.sampled_from([8, 64, 128, 256]))
def test_unfused_products_are_narrow_matmuls_that_move_their_scores(width):
    hardware, config = cluster("gb200"), run(model=replace(MODEL, head_dim=width), flash=False)
    found = TIMES.layer(config, "dense").forward.attention
    scores = MODEL.heads * config.batch * config.sequence**2
    product = Matmul(config.sequence, config.sequence, width, times=2 * MODEL.heads * config.batch)
    computing = product.flops / (hardware.peak_flops["bf16"] * START.matmul * width / (width + START.half_size))
    assert found == pytest.approx(max(computing, 2 * 2 * scores / hardware.hbm_bytes_per_s))
    # what the softmax reads and writes is counted apart
    assert TIMES._scores(config) * hardware.hbm_bytes_per_s * START.memory == pytest.approx(2 * 2 * scores)

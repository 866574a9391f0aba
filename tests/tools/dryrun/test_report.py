"""These tests check how much a device sends, and the report in a terminal."""

import copy
import io

import pytest
from rich.console import Console

from plugins.errors import DataError
from tools.dryrun.plan import plan_jobs
from tools.dryrun.render import draw, notes, render
from tools.dryrun.report import BETWEEN, INSIDE, report_of, traffic_of
from tools.files.figure import check_ending
from tools.hardware.units import GIB
from tools.recipe.load import load_recipe

LARGE = "telechat3_105b/pretrain_4k.yaml"
GROUPS = [[0, 1, 2, 3], [0, 8], [0, 16]]


def item(op, group, size, role="forward", **more):
    return {"op": op, "group": group, "role": role, "bytes": size, **more}


@pytest.mark.parametrize(
    ("op", "sent"), [("AllGather", 75), ("ReduceScatter", 75), ("AllReduce", 150), ("AlltoAllV", 75), ("Barrier", 0)]
)
def test_volume_of_an_operator(op, sent):
    (line,) = traffic_of({"groups": GROUPS, "collectives": [item(op, 0, 100)]}, step=1, compiled=1, node=8)
    assert (line["bytes"], line["calls"], line["link"]) == (sent, 1, INSIDE)


def test_lines_add_up_by_kind_and_scale_with_the_micro_batches():
    calls = [item("AllGather", 1, 100), item("AllGather", 1, 100), item("AllGather", 1, 100, role="step")]
    lines = traffic_of({"groups": GROUPS, "collectives": calls}, step=32, compiled=2, node=8)
    assert [(line["role"], line["calls"], line["bytes"]) for line in lines] == [("forward", 32, 1600), ("step", 1, 50)]
    assert {line["link"] for line in lines} == {BETWEEN}


def test_a_send_goes_to_its_peer_and_repeats_with_its_micro_batch():
    more = {"role": "step", "me": 0, "dtype": "Float32", "shape": [10], "chunk": 0}
    sends = [item("Send", 2, 10, peer=16, micro=micro, **more) for micro in range(2)]
    once = item("Send", 2, 10, peer=1, micro=None, **more)
    lines = traffic_of({"groups": GROUPS, "collectives": [*sends, once]}, step=8, compiled=2, node=8)
    assert [(line["bytes"], line["link"]) for line in lines] == [(80, BETWEEN), (10, INSIDE)]


def test_an_embedding_that_two_stages_share_goes_between_them_once_a_step():
    """The Sends of rank 0 of the 105B recipe at 32K, compiled with 16 of 128 micro-batches."""
    more = {"role": "step", "me": 0, "chunk": 0}
    sends = [item("Send", 2, 4096 * 2560 * 4, peer=224, micro=0, dtype="Float32", shape=[4096, 2560], **more)]
    for micro in range(16):
        sends.append(item("Send", 2, 512 * 2560 * 2, peer=32, micro=micro, dtype="BFloat16", shape=[512, 2560], **more))
        sends.append(item("Send", 2, 4, peer=32, micro=micro, dtype="Float32", shape=[1], **more))
    (line,) = traffic_of({"groups": GROUPS, "collectives": sends}, step=128, compiled=16, node=8)
    assert (line["calls"], line["bytes"] >> 20) == (257, 40 + 320)


def test_routed_sizes_are_marked():
    (line,) = traffic_of(
        {"groups": GROUPS, "collectives": [item("AlltoAllV", 0, 8, routed=True)]}, step=1, compiled=1, node=8
    )
    assert line["routed"]


MEMORY = {"weights": 1, "state": 2, "accumulated": 6, "gathered": 3, "saved": 1, "working": 1, "update": 0}
STAGE = {
    "stage": 0,
    "compiled_rank": 0,
    "compiled": True,
    "layers": 6,
    "memory": {name: size * GIB for name, size in MEMORY.items()}
    | {"exact": 12 * GIB, "total": 14 * GIB, "limit": 20 * GIB},
    "host": 0,
    "peak": {"bytes": 14 * GIB, "pass": "B 3.0", "owners": [{"part": "state", "module": "experts", "bytes": GIB}]},
    "flops": {"forward": 10**15, "recompute": 10**15, "gradient": 2 * 10**15},
    "traffic": [
        {"op": "AlltoAllV", "role": "forward", "ranks": 8, "link": "inside a node", "calls": 96,
         "bytes": 5 * GIB, "routed": True},
        {"op": "AllReduce", "role": "step", "ranks": 32, "link": "between nodes", "calls": 1, "bytes": GIB},
    ],
}  # fmt: skip
NORM = {"weights": 66, "once": 66, "otherwise": []}
SCALE = {"weights": 66, "right": 66, "wrong": [], "unknown": []}
REPORT = {
    "recipe": "a.yaml",
    "quick": False,
    "quick_error": None,
    "fit": "fits",
    "compiled": True,
    "devices": 64,
    "layout": {"dp": 4, "tp": 8, "pp": 2, "cp": 1, "ep": 8, "chunks": 1},
    "schedule": "1f1b",
    "schedule_model_equals_graph": True,
    "micro_batches": {"step": 256, "compiled": 4},
    "parameters": {"compiled": 1000, "check": 1000},
    "stages": [STAGE, {**STAGE, "stage": 1, "compiled": False}],
    "links": {"exact": 1, "alike": 0, "unknown": 0},
    "groups": {"all": 14, "compared": 2},
    "loads": None,
    "exchange": None,
    "hccl": {"communicators": 8, "bytes": 8 * 400 << 20},
    "gradients": {"weights": 66, "right": 66, "wrong": [], "unknown": [], "norm": NORM, "scale": SCALE},
    "left_out": [],
    "problems": [],
}


def shown(report):
    console = Console(file=io.StringIO(), width=160)
    render(report, console)
    return console.file.getvalue()


def test_a_clean_report():
    text = shown(REPORT)
    assert "stage 0 is fullest in B 3.0: 14.0 GiB, of them state: experts 1.0" in text
    assert "64 virtual devices, dp4 tp8 pp2 ep8" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("1="))
    assert [word for word in row.split() if word != "│"] == [
        *("1=", "6", "1.00", "2.00", "6.00", "3.00", "1.00", "1.00", "14.00", "20.00", "4.00"),
    ]
    assert "5.00*" in text and "1,000 (as tc3 check counts)" in text
    assert "1 of 1 links between stages compared" in text and "2 of 14 groups" in text


@pytest.mark.parametrize(
    ("name", "ranks", "left_out"),
    [
        (LARGE, (0,), "stages 1, 2, 3, 4, 5, 6, 7:"),
        (LARGE, (0, 33), "stages 5, 6, 7:"),  # docs/dryrun.md names these
        (LARGE, None, ""),
        ("mini/pretrain_pp2.yaml", (0,), ""),  # of CPU workers, whose memory no dry run judges
    ],
)
def test_stages_that_ranks_leave_out_are_named_and_their_fit_is_unknown(name, ranks, left_out):
    recipe = load_recipe(f"recipes/{name}")
    plan = plan_jobs(recipe, ranks)
    results = [{"rank": job.rank, "stage": job.stage, "held": [], "seconds": 1.0} for job in plan.jobs]
    report = report_of(recipe, plan, results, 8)
    assert report["problems"] == report["left_out"] and len(report["problems"]) == bool(left_out)
    assert all(f"{left_out} unknown whether it fits: no rank" in line for line in report["problems"])
    assert (report["fit"] == "fits") == (ranks is None)


def test_stages_that_were_left_out_do_not_hide_what_the_compiled_ones_say():
    line = "context.max_device_memory: stage 1: unknown whether it fits"
    text = shown({**REPORT, "fit": "unknown", "left_out": [line], "problems": [line]})
    assert line in text and "1 of 1 links between stages compared" in text and "unknown: the fullest" not in text
    assert "links between stages compared" not in shown({**REPORT, "problems": ["a rank waits for ever"]})


def test_brackets_in_a_name_are_shown():
    """The terminal's markup would leave them out."""
    text = shown({**REPORT, "recipe": "runs[v2]/a.yaml", "loads": {"words": ["loads of b[red].npz: they fit"]}})
    assert "runs[v2]/a.yaml: 64 virtual devices" in text and "loads of b[red].npz: they fit" in text


def test_uneven_loads_and_moves_stand_below_the_table():
    words = ["loads: it fits at even loads, and up to a max/mean of 1.70", "a log: 1 of 4,000 steps needs more"]
    moving = {"stage": 3, "bytes": GIB // 2, "held": 13 * GIB, "fit": "fits"}
    text = shown({**REPORT, "loads": {"words": words}, "exchange": moving})
    assert all(line in text for line in words) and "that uneven loads add is modelled" in text
    assert "takes 0.50 GiB to move experts of stage 3: fits" in text
    assert "HCCL needs at least 3.1 GiB outside the limit, for any loads: 8 communicators" in text
    bad = {**REPORT, "loads": {"words": words}, "problems": [f"under the loads: does not fit: {words[1]}"]}
    assert shown(bad).count("1 of 4,000 steps") == 1


def test_state_in_the_hosts_memory_is_said():
    assert "optimizer.swap" not in shown(REPORT)
    assert "optimizer.swap keeps 3.0 GiB" in shown({**REPORT, "stages": [STAGE, {**STAGE, "host": 3 * GIB}]})


def test_a_total_of_the_update_is_said():
    memory = {**STAGE["memory"], "update": 8 * GIB, "total": 17 * GIB}
    text = shown({**REPORT, "stages": [STAGE, {**STAGE, "stage": 1, "memory": memory}]})
    assert "stage 1 is the memory of the optimizer's update after all passes, which needs up to 8.00 GiB" in text
    assert "optimizer's update after" not in shown(REPORT)


def test_what_was_concluded_is_said():
    text = " ".join(notes(REPORT))
    assert "4 of 256 micro-batches" in text and "1 as rank 0" in text and "equals the model of schedule 1f1b" in text
    unknown = {**REPORT, "schedule_model_equals_graph": False}
    assert "is not known, or differs from" in " ".join(notes(unknown))
    assert notes({**REPORT, "quick": True, "quick_error": 0.03})[0].startswith("quick: each kind of layer")


def test_problems_and_a_count_that_differs():
    report = copy.deepcopy(REPORT)
    report |= {"problems": ["parallel: group of 2 [0, 1]: wrong"], "parameters": {"compiled": 1000, "check": 999}}
    text = shown(report)
    assert "parallel: group of 2 [0, 1]: wrong" in text and "tc3 check: 999" in text
    assert "links" not in text


def test_gradients_are_counted_and_what_is_unknown_is_said():
    assert "gradients: those of 66 of 66 weights of the compiled ranks are summed once" in shown(REPORT)
    unknown = [f"rank 0 (stage 0): layer {layer}: its gradient comes from Custom" for layer in range(5)]
    norm = {"weights": 66, "once": 65, "otherwise": ["rank 1 (stage 1): embedding: is counted, too"]}
    scale = {"weights": 66, "right": 65, "wrong": [], "unknown": ["rank 0 (stage 0): norm: its gradient is multiplied"]}
    found = {"weights": 66, "right": 61, "wrong": [], "unknown": unknown, "norm": norm, "scale": scale}
    text = shown({**REPORT, "gradients": found})
    assert "65 of 66 weights are divided once by the loss scale" in text and "norm: its gradient is mult" in text
    assert "the elements of 65 of 66 weights are counted once" in text and "embedding: is counted, too" in text
    assert "61 of 66 weights" in text and "unknown: rank 0 (stage 0): layer 2: its" in text
    assert "unknown: 2 more lines" in text


def test_links_that_were_not_compared_are_counted():
    some = shown({**REPORT, "links": {"exact": 2, "alike": 1, "unknown": 4}})
    assert "3 of 7 links between stages compared" in some and "4 links were not compared" in some
    quick = shown({**REPORT, "quick": True, "quick_error": 0.03, "links": {"exact": 0, "alike": 0, "unknown": 7}})
    assert "of the pipeline's 7 links none was compared" in quick and "Receives fit" not in quick
    assert "fits: the fullest stage, 0, takes 70% of the limit (--quick may be off by 3%)" in quick
    alone = shown({**REPORT, "links": {"exact": 0, "alike": 0, "unknown": 0}})
    assert "links" not in alone and "in the same order" in alone


def test_the_picture_of_a_quick_run_has_no_empty_half(tmp_path):
    quick = {**REPORT, "quick": True, "stages": [{**STAGE, "traffic": []}]}
    drawn = draw(quick, tmp_path / "a.svg").read_text()
    assert "GiB on a device" in drawn and "sent by a device" not in drawn
    assert "sent by a device" in draw(REPORT, tmp_path / "b.svg").read_text()


def test_the_picture_is_the_same_for_the_same_numbers(tmp_path):
    first, second = (draw(REPORT, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    assert b"gathered weights" in first and b"between nodes" in first
    with pytest.raises(DataError, match="the file must end in"):
        check_ending(tmp_path / "a.pdf")

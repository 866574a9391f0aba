import pytest

from tools.dryrun.traffic import BETWEEN, INSIDE, traffic_of

GROUPS = [[0, 1, 2, 3], [0, 8], [0, 16]]


def item(op, group, size, role="forward", **more):
    return {"op": op, "group": group, "role": role, "bytes": size, **more}


@pytest.mark.parametrize(
    ("op", "sent"), [("AllGather", 75), ("ReduceScatter", 75), ("AllReduce", 150), ("AlltoAllV", 75), ("Barrier", 0)]
)
def test_volume_of_an_operator(op, sent):
    (line,) = traffic_of({"groups": GROUPS, "collectives": [item(op, 0, 100)]}, scale=1, node=8)
    assert (line["bytes"], line["calls"], line["link"]) == (sent, 1, INSIDE)


def test_lines_add_up_by_kind_and_scale_with_the_micro_batches():
    calls = [item("AllGather", 1, 100), item("AllGather", 1, 100), item("AllGather", 1, 100, role="step")]
    lines = traffic_of({"groups": GROUPS, "collectives": calls}, scale=16, node=8)
    assert [(line["role"], line["calls"], line["bytes"]) for line in lines] == [("forward", 32, 1600), ("step", 1, 50)]
    assert {line["link"] for line in lines} == {BETWEEN}


def test_a_send_goes_to_its_peer_and_repeats_with_its_micro_batch():
    send = item("Send", 2, 10, role="step", me=0, peer=16, micro=0)
    once = item("Send", 2, 10, role="step", me=0, peer=1, micro=None)
    lines = traffic_of({"groups": GROUPS, "collectives": [send, once]}, scale=4, node=8)
    assert [(line["bytes"], line["link"]) for line in lines] == [(40, BETWEEN), (10, INSIDE)]


def test_routed_sizes_are_marked():
    (line,) = traffic_of({"groups": GROUPS, "collectives": [item("AlltoAllV", 0, 8, routed=True)]}, scale=1, node=8)
    assert line["routed"]

import pytest

from tools.dryrun.traffic import BETWEEN, INSIDE, traffic_of

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

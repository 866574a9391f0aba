"""Stages that tell rank 0 what they save; that a resume finds it is shown in tests/training/test_muon.py."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from plugins.sealed_checkpoint.stage_metadata import of_all_stages


def test_rank_0_gets_the_list_of_every_rank_from_its_own_stage(tmp_path):
    """Three stages of two ranks. What a rank is told of other stages is wrong, and of its own it is right."""
    meeting = Barrier(6)

    def view(rank):
        return {one: {"tensor": one} if one // 2 == rank // 2 else None for one in range(6)}

    def save(rank):
        return of_all_stages(tmp_path, view(rank), rank, 6, 3, meeting.wait)

    with ThreadPoolExecutor(6) as ranks:
        found = list(ranks.map(save, range(6)))
    assert found[0] == {one: {"tensor": one} for one in range(6)}
    assert found[3] == {2: {"tensor": 2}, 3: {"tensor": 3}}
    assert list(tmp_path.iterdir()) == []

import pytest

from tools.estimate.memory.model import all_stages
from tools.layout.place import Placement
from tools.search.ranking import workers


def stand_in(config, model, *rest, **more):
    """A placement that leaves everything as it is, and counts as the best there is."""
    peaks = tuple(memory.peak for memory in all_stages(config))
    seconds = model.step(config, simulated=True).total
    return Placement(config, seconds, 0.9 * seconds, peaks, least_s=seconds)


@pytest.fixture
def stand_in_placement(monkeypatch):
    """Let the search run in one process and place nothing: its bounds say that no other candidate is faster."""
    monkeypatch.setattr(workers, "processes", lambda: 1)
    monkeypatch.setattr(workers, "screen", stand_in)
    monkeypatch.setattr(workers, "place", stand_in)
    monkeypatch.setattr(workers, "floor_seconds", lambda *_: float("inf"))

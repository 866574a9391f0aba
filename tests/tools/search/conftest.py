import pytest

from tools.estimate.memory.model import all_stages
from tools.layout.place import Placement
from tools.search.ranking import run


def stand_in(config, model, cap, budget, seed=0):
    """A placement that leaves everything as it is."""
    peaks = tuple(memory.peak for memory in all_stages(config))
    seconds = model.step(config, simulated=True).total
    return Placement(config, seconds, 0.9 * seconds, peaks)


@pytest.fixture
def alone(monkeypatch):
    """One process, and no pipeline optimiser: by its bounds no other candidate is faster."""
    monkeypatch.setattr(run, "processes", lambda: 1)
    monkeypatch.setattr(run, "place", stand_in)
    monkeypatch.setattr(run, "bounds_of", lambda request, ranked, *_: [float("inf")] * len(ranked))

from pathlib import Path

import pytest

from plugins.errors import RecipeError
from plugins.hierarchical_ep import settings
from plugins.hierarchical_ep.plan import MODES
from tools.schema.values import MODEL


@pytest.mark.parametrize("rank", [0, 5, 15, 16, 31])
def test_a_rank_knows_its_group_and_its_place(rank):
    ours = settings.read({"mode": "hierarchical"}, expert_parallel=16, devices_per_node=8, experts=32, rank=rank)
    assert ours.ranks == tuple(range(rank // 16 * 16, rank // 16 * 16 + 16))
    assert ours.ranks[ours.rank] == rank
    assert (ours.topology.nodes, ours.topology.devices_per_node) == (2, 8)


@pytest.mark.parametrize(
    ("written", "expert_parallel", "experts", "message"),
    [
        ({"mode": "hierachical"}, 16, 32, "did you mean 'hierarchical'"),
        ({"mode": "auto", "hardwere": "x"}, 16, 32, "did you mean 'hardware'"),
        ({}, 16, 32, "write `mode:`"),
        (True, 16, 32, "write `mode:`"),
        ({"mode": "global"}, 12, 32, "use 8 or 16"),
        ({"mode": "global"}, 16, 40, "does not divide the 40 routed experts"),
    ],
)
def test_wrong_settings_are_refused(written, expert_parallel, experts, message):
    with pytest.raises(RecipeError, match=message):
        settings.read(written, expert_parallel, 8, experts, rank=0)


def test_the_dispatchers_of_mindformers_stand_once():
    """Their modes are this plugin's, and their names are known to the schema."""
    assert set(settings.DISPATCHERS.values()) < set(MODES)
    assert {settings.DISPATCHER_OF[mode]: mode for mode in settings.DISPATCHER_OF} == settings.DISPATCHERS
    assert set(settings.DISPATCHERS) < set(MODEL["moe_token_dispatcher_type"]["enum"])
    root = Path(__file__).resolve().parents[3]
    sources = [path for folder in ("plugins", "tools") for path in (root / folder).rglob("*.py")]
    named = {path.name for path in sources if '"alltoall' in path.read_text()}
    assert named == {"settings.py", "values.py", "lines.py"}, "a third one, which no tool knows more of; a quotation"

import pytest

from plugins.errors import RecipeError
from plugins.expert_balance.settings import Settings, read


def test_an_empty_section_has_the_defaults():
    assert read({}) == Settings(20, "swaps", None, 0.01, 0.8, True, True, 0)


def test_what_is_written_is_read():
    written = {"every": 3, "method": "aligned", "moves": 8, "gate": 0, "memory": 0.5, "record": True, "routers": False}
    written["spare"] = 2
    assert read(written) == Settings(**written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (True, "expert_balance: False"),
        ({"evry": 2}, "did you mean 'every'"),
        ({"every": -1}, "0 to record only"),
        ({"every": 2.0}, "0 to record only"),
        ({"method": "swap"}, "did you mean 'swaps'"),
        ({"method": None}, "is none of"),
        ({"moves": 1}, "one swap moves two"),
        ({"moves": True}, "one swap moves two"),
        ({"moves": 8, "method": "greedy"}, "ignores a limit"),
        ({"gate": 1}, "share from 0 to below 1"),
        ({"gate": "1 %"}, "share from 0 to below 1"),
        ({"memory": -0.1}, "share from 0 to below 1"),
        ({"memory": float("nan")}, "share from 0 to below 1"),
        ({"memory": True}, "share from 0 to below 1"),
        ({"record": 1}, "write True or False"),
        ({"every": 0, "record": False, "routers": False}, "neither moves"),
        ({"spare": -1}, "slots of a device"),
        ({"spare": 1.0}, "slots of a device"),
        ({"spare": 1, "every": 0}, "planned together with moves"),
        ({"spare": 1, "record": False}, "reads from the record"),
    ],
)
def test_wrong_settings_are_refused(written, message):
    with pytest.raises(RecipeError, match=message):
        read(written)

import pytest

from plugins.errors import RecipeError
from plugins.hierarchical_ep.plan import MODES
from tools.auto.advise import advise
from tools.auto.resolve import resolve
from tools.recipe.load import load_recipe

RECIPE = "recipes/telechat3_438b/pretrain_4k_ep_overlap.yaml"


def resolved(**plugins):
    """The recipe with these plugins, resolved, and what was said."""
    recipe, said = load_recipe(RECIPE), []
    recipe["plugins"] = plugins
    return resolve(recipe, said.append), said


def test_auto_becomes_what_the_report_recommends():
    recipe, said = resolved(hierarchical_ep={"mode": "auto"}, ep_overlap={"chunks": "auto"})
    advice = advise(load_recipe(RECIPE))
    assert recipe["plugins"]["hierarchical_ep"]["mode"] == advice.mode
    assert recipe["plugins"]["ep_overlap"] == {"chunks": list(advice.chunks), "stride": advice.stride}
    assert len(said) == 2 and advice.mode in said[0] and str(list(advice.chunks)) in said[1]
    assert resolve(recipe, said.append) == recipe and len(said) == 2, "resolved is resolved"


def test_what_is_written_stays():
    recipe, said = resolved(hierarchical_ep={"mode": "global"}, ep_overlap={"chunks": [1, 2]})
    assert said == [] and recipe["plugins"]["hierarchical_ep"] == {"mode": "global"}
    recipe, _ = resolved(hierarchical_ep={"mode": "deduplicated"}, ep_overlap={"chunks": "auto"})
    assert recipe["plugins"]["hierarchical_ep"]["mode"] == "deduplicated"
    recipe, _ = resolved(hierarchical_ep={"mode": "auto"}, ep_overlap={"chunks": [1, 2], "stride": 3})
    assert recipe["plugins"]["ep_overlap"] == {"chunks": [1, 2], "stride": 3}
    assert recipe["plugins"]["hierarchical_ep"]["mode"] in MODES


def test_nothing_to_resolve_without_the_plugin():
    assert resolved(held_out_loss=False)[1] == []
    assert resolved(hierarchical_ep=False, ep_overlap={"chunks": [1, 2]})[1] == []


def test_chunks_of_nothing_are_refused():
    """They stayed `auto`, and the launch failed later, in the plugin."""
    with pytest.raises(RecipeError, match=r"ep_overlap.yaml: plugins.ep_overlap: it cuts what .*hierarchical_ep does"):
        resolved(hierarchical_ep=False, ep_overlap={"chunks": "auto"})


def test_errors_name_the_file():
    with pytest.raises(RecipeError, match=r"_4k_ep_overlap.yaml: plugins.hierarchical_ep.mode: unknown mode 'atuo'"):
        resolved(hierarchical_ep={"mode": "atuo"})
    with pytest.raises(RecipeError, match="atlas"):
        resolved(hierarchical_ep={"mode": "auto", "hardware": "atlas_800t_a3"})

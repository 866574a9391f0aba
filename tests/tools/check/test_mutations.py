"""Spoilt recipes are refused, sound ones are not, and nothing ends in a traceback."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from plugins.errors import RecipeError
from tests.tools.check.mutations import LOADER, MODEL, has, mutations, plain, put, text_of
from tools.check.check import check_recipe

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = ("base", "card.yaml")
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if not {*SKIPPED} & {*path.parts[-2:]})
FAST = int(os.environ.get("TC3_MUTATIONS", "30"))
SLOW = int(os.environ.get("TC3_MUTATIONS_SLOW", "60"))
CHILD = SLOW * 3 // 10  # of a recipe that inherits from one of the same folder
WANTED = 0.98  # of the mutations
# MindFormers cannot build these; check lets them pass for what their card says, and a copy has no card
# these say a few keys of another recipe anew, and inherit all else that can be spoilt
CHILDREN = [path for path in RECIPES if "base_config: ./" in path.read_text()]
FEW = [path for path in RECIPES if path.match("mini/pretrain.yaml") or path.match("telechat3_105b/pretrain_4k.yaml")]

LEGAL = [  # changes of a hyper-parameter that any recipe allows
    (("seed",), 7),
    (("optimizer", "weight_decay"), 0.05),
    (("optimizer", "betas"), [0.9, 0.98]),
    (("optimizer", "eps"), 1e-7),
    (("lr_schedule", "learning_rate"), 1.0e-4),
    (("runner_wrapper", "max_grad_norm"), 0.5),
    ((*MODEL, "initializer_range"), 0.006),
    ((*MODEL, "rms_norm_eps"), 1e-6),
    ((*MODEL, "attention_dropout"), 0.1),
    ((*MODEL, "mtp_loss_factor"), 0.3),
    ((*MODEL, "moe_aux_loss_coeff"), 0.0001),
    ((*MODEL, "routed_scaling_factor"), 2.5),
    ((*LOADER, "config", "seed"), 99),
    (("recompute_config", "recompute"), True),
    (("recompute_config", "select_recompute"), True),
    (("checkpoint", "save_interleaved_steps"), 50),
    (("checkpoint", "prefix"), "other"),
    (("train_dataset", "num_parallel_workers"), 4),
]


def name(path):
    return f"{path.parent.name}/{path.stem}"


def refusal(recipe, folder):
    """Return why a recipe, or the text of a recipe, is refused; return None if it is accepted."""
    file = folder / "recipe.yaml"
    if isinstance(recipe, str):
        file.write_text(recipe, encoding="utf-8")
        recipe = file
    try:
        errors = check_recipe(recipe).errors
    except RecipeError as error:
        return str(error)
    return str(errors[0]) if errors else None


def score(recipe, count, folder, as_text=False):
    """(mutations tried, descriptions of those that were accepted); as text: each is read from a file."""
    tried, accepted = [], []

    @settings(
        max_examples=count, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(mutations(recipe))
    def one(mutation):
        description, spoilt = mutation
        tried.append(description)
        if refusal(text_of(spoilt) if as_text and isinstance(spoilt, dict) else spoilt, folder) is None:
            accepted.append(description)

    one()
    return len(tried), accepted


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_an_unspoilt_recipe_is_not_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert check_recipe(path).errors == []
    assert refusal(text_of(plain(path)), tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("path", FEW, ids=name)
def test_some_spoilt_recipes_are_refused(path, tmp_path):
    tried, accepted = score(plain(path), FAST, tmp_path, as_text=True)
    assert len(accepted) <= max(1, (1 - WANTED) * tried), accepted


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RECIPES if path not in CHILDREN], ids=name)
def test_spoilt_recipes_are_refused(path, tmp_path):
    tried, accepted = score(plain(path), SLOW, tmp_path)
    assert tried >= SLOW // 2
    assert len(accepted) <= (1 - WANTED) * tried, accepted


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({path.parent for path in CHILDREN}), ids=lambda folder: folder.name)
def test_spoilt_children_are_refused(folder, tmp_path):
    """Of all children in a folder together, and of none more than one; what is taken of several alike counts once."""
    scores = [score(plain(path), CHILD, tmp_path) for path in CHILDREN if path.parent == folder]
    assert all(tried >= CHILD // 2 and len(accepted) <= 1 for tried, accepted in scores), scores
    accepted = {description for _, found in scores for description in found}
    assert len(accepted) <= max(1, (1 - WANTED) * sum(tried for tried, _ in scores)), accepted


@pytest.mark.parametrize("path", FEW, ids=name)
def test_legal_changes_pass(path, tmp_path):
    legal_changes_pass(path, tmp_path, text_of)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RECIPES if path not in FEW], ids=name)
def test_legal_changes_pass_everywhere(path, tmp_path):
    legal_changes_pass(path, tmp_path)


def legal_changes_pass(path, tmp_path, written=lambda recipe: recipe):
    recipe = plain(path)
    for key, value in LEGAL:
        if has(recipe, key):
            assert refusal(written(put(recipe, key, value)), tmp_path) is None, key

"""Cards and catalogue: complete, true to the recipes, current."""

import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from launch.run.effective import FULL_SIZE
from launch.run.script import Launch, launch_script
from plugins.errors import RecipeError
from tests.recipes.oracles import RECIPES, ROOT, all_recipes, load
from tests.recipes.test_numbers import CARDS, ENTRIES
from tools.doctor import cli as doctor  # its import enters every check
from tools.doctor.checks import CHECKS
from tools.recipe import catalogue as command
from tools.recipe.catalogue import MEASURES, ROLES, catalogue, load_card, load_cards, why_modelled

ASSUMED = [
    (card, entry, key_path, reason)
    for card in CARDS.values()
    for entry in card.entries
    for key_path, reason in {**card.assumed, **entry.assumed}.items()
]
CONFLICTS = [(card, conflict) for card in CARDS.values() for conflict in card.conflicts]
# what a context stage may change of the pre-training it goes on from; everything else is inherited
CONTEXT_MAY_CHANGE = {
    "output_dir",
    "lr_schedule.type",
    "lr_schedule.learning_rate",
    "lr_schedule.lr_end",
    "lr_schedule.warmup_steps",
    "lr_schedule.warmup_ratio",
    "lr_schedule.total_steps",
    "train_dataset.input_columns",
    "train_dataset.construct_args_key",
    "train_dataset.data_loader.sizes",
    "train_dataset.data_loader.config.seq_length",
    "train_dataset.data_loader.config.data_path",
    "train_dataset.data_loader.config.create_compressed_eod_mask",
    "train_dataset.data_loader.config.reset_position_ids",
    "train_dataset.data_loader.config.eod_pad_length",
    "parallel_config.data_parallel",
    "parallel_config.model_parallel",
    "parallel_config.expert_parallel",  # and it follows from data_parallel x model_parallel
    "parallel_config.use_seq_parallel",
    "parallel_config.pipeline_stage",
    "parallel_config.context_parallel",
    "parallel_config.context_parallel_algo",
    "parallel_config.micro_batch_num",
    "parallel.dataset_strategy",
    "model.model_config.seq_length",
    "model.model_config.offset",
    "model.model_config.position_embedding_type",
    "model.model_config.max_position_embeddings",
    "model.model_config.rope_theta",
    "model.model_config.rotary_scaling_factor",
    "model.model_config.rope_scaling.rope_type",
    "model.model_config.rope_scaling.factor",
    "model.model_config.rope_scaling.original_max_position_embeddings",
    "model.model_config.rope_scaling.beta_fast",
    "model.model_config.rope_scaling.beta_slow",
    "model.model_config.rope_scaling.mscale",
    "model.model_config.rope_scaling.mscale_all_dim",
    "model.model_config.use_attn_mask_compression",
    "model.model_config.use_eod_attn_mask_compression",
    "checkpoint.save_interleaved_steps",
    "checkpoint.load_path",
    "checkpoint.no_load_optim",
    "plugins.attention_balance.window",
    "plugins.yarn.attention_factor",
}


def leaves(tree, path=()):
    """(key path with dots, value) of every value that is no mapping."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


def test_every_recipe_is_on_a_card():
    assert sorted(ENTRIES) == all_recipes()


@pytest.mark.parametrize(("card", "entry", "key_path", "reason"), ASSUMED)
def test_what_a_card_assumes_stands_in_the_recipe(card, entry, key_path, reason):
    assert key_path in dict(leaves(load(str(entry.file.relative_to(RECIPES))))), f"{card.file}: {entry.file.name}"
    assert len(reason.split()) >= 3, f"{card.file}: {key_path}: {reason!r} is no reasoning"


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_source_names_where_it_stands(card):
    assert card.sources
    for source in card.sources:
        assert set(source) == {"fact", "at"}, f"{card.file}: {source}"
        assert min(len(text.strip()) for text in source.values()) > 10, f"{card.file}: {source}"


def value_of(card, file, key):
    """Return the value that the recipe `file` beside a card has for the key of a conflict."""
    name = f"{card.file.parent.name}/{file}"
    return ENTRIES[name].global_batch_size if key == "global_batch_size" else dict(leaves(load(name)))[key]


@pytest.mark.parametrize(
    ("card", "conflict"), CONFLICTS, ids=[f"{card.file.parent.name}-{conflict.key}" for card, conflict in CONFLICTS]
)
def test_a_conflict_names_both_values_their_sources_and_the_reason(card, conflict):
    assert conflict.ours != conflict.other
    assert value_of(card, conflict.recipe, conflict.key) == conflict.ours
    for text in (conflict.ours_at, conflict.other_at, conflict.why):
        assert len(text.split()) >= 3, f"{card.file}: {conflict.key}: {text!r}"
    assert conflict.ours_at != conflict.other_at
    if conflict.child:
        assert value_of(card, conflict.child, conflict.key) == conflict.other


def test_the_acceptance_recipe_changes_only_what_the_card_says():
    """Its learning rate, batch, steps, MTP, bias rate and split of the layers; the devices follow from the batch."""
    card = CARDS["telechat3_105b"]
    before, after = (dict(leaves(load(f"telechat3_105b/pretrain_4k{ending}.yaml"))) for ending in ("", "_acceptance"))
    told = {conflict.key for conflict in card.conflicts if conflict.child == "pretrain_4k_acceptance.yaml"}
    follows = {"output_dir", "parallel_config.data_parallel", "parallel.dataset_strategy"}
    follows |= {"lr_schedule.lr_end", "train_dataset.data_loader.sizes"}
    changed = {key for key in after if key not in before or after[key] != before[key]}
    assert changed == (told - {"global_batch_size"}) | follows


@pytest.mark.parametrize("name", [name for name in all_recipes() if "context" in name])
def test_a_context_recipe_changes_only_what_its_stage_is_about(name):
    whole = "_report" * name.endswith("_report.yaml")
    first = next(RECIPES.glob(f"{name.split('/')[0]}/pretrain_?k{whole}.yaml"))
    before, after = dict(leaves(load(str(first.relative_to(RECIPES))))), dict(leaves(load(name)))
    assert set(before) <= set(after)
    changed = {key for key in after if key not in before or after[key] != before[key]}
    assert changed <= CONTEXT_MAY_CHANGE


def test_a_context_stage_goes_on_from_the_one_before():
    for name in all_recipes():
        if "context" in name or "finetune" in name:
            origin = load(name)["checkpoint"]["load_path"].removesuffix("/checkpoint")
            stages = list((RECIPES / name).parent.glob("[pc][ro]*_*.yaml"))
            if name == "mini/finetune.yaml":  # begins with what a newcomer has
                assert f"--run-dir {Path(origin)})" in (ROOT / "launch" / "quickstart").read_text()
                continue
            assert (ROOT / origin).resolve() in [(ROOT / FULL_SIZE.run_dir(path)).resolve() for path in stages], name
            assert origin in [load(str(path.relative_to(RECIPES)))["output_dir"] for path in stages], name


def test_only_minis_claim_to_have_trained():
    for entry in ENTRIES.values():
        claims = {item["claim"] for item in entry.status}
        trained = [item["how"] for item in entry.status if item["claim"] == "trained-on-cpu-mini"]
        assert trained or entry.kind != "mini"
        as_mini = f"tc3 train {entry.file.relative_to(ROOT)} --mini"
        assert entry.kind == "mini" or all(how.startswith(as_mini) for how in trained)
        assert ("modelled" in claims) == (entry.kind == "modelled") == bool(entry.why)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_says_what_its_launches_do_to_a_host(card):
    """A launch applies what its script does; `tc3 doctor` checks what it has a check for, less those of NPUs on CPU."""
    launched = [entry for entry in card.entries if entry.kind != "modelled"]
    assert bool(card.host_measures) == (card.kind != "modelled")
    for entry in launched:
        recipe = load(str(entry.file.relative_to(RECIPES)))
        on_cpu = recipe["context"].get("device_target") == "CPU"
        checked = {name for name in CHECKS if not (on_cpu and CHECKS[name].npu)}
        text = launch_script(Launch("r.yaml", "run"), recipe)
        bound = "] || BIND=yes\n" in text and "python -m launch.run.cores" in text
        applies = {"core_binding"} if bound else set()
        wanted = {name: "applied" if name in applies else "checked" for name in MEASURES}
        assert card.host_measures == {
            name: role
            for name, role in wanted.items()
            if role == "applied" or checked.intersection(MEASURES[name].checks)
        }


def test_the_measures_are_those_of_the_page_and_of_the_checks():
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert doctor.MODULES
    for name, measure in MEASURES.items():
        assert measure.role in ROLES and set(measure.checks) <= set(CHECKS), name
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {measure.gain} |" in row and f"| {measure.role}" in row, row
        assert all(f"`{check}`" in row for check in measure.checks), row


def test_the_catalogue_is_current():
    assert (RECIPES / "README.md").read_text() == catalogue(RECIPES), "stale: python -m tools.recipe.catalogue"
    assert CliRunner().invoke(command.main, ["--check"]).exit_code == 0


def test_only_yaml_beside_the_catalogue():
    assert {path.suffix for path in RECIPES.glob("*/*")} == {".yaml"}
    assert [path.name for path in RECIPES.iterdir() if path.is_file()] == ["README.md"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("claim: assumed", "claim: trained", "'trained' is not a claim"),
        ("claim: assumed", "claim: 3", "3 is not a claim"),
        ("claim: assumed", "claim: compiled-virtual-many", "is not a claim"),
        ("claim: assumed", "claim: proven-virtual-", "is not a claim"),
        ("kind: full", "kind: ful", "did you mean 'full'"),
        ("sources:", "source:", "source: no such key (did you mean 'sources'?)"),
        ("        what:", "        on:", "no such key"),  # YAML reads a plain `on` as True
        ("  finetune_4k.yaml:", "  finetune_8k.yaml:", "does not exist in the card's folder"),
        ("    devices: 256\n", "", "devices: the key is missing"),
        ("    other_at: *acceptance\n", "", "conflicts[0].other_at: the key is missing"),
        (
            "isolation: checked",
            "isolation: done",
            "host_measures.isolation: 'done' is not a valid value; write one of applied, checked",
        ),
        ("idle_threshold:", "idle_treshold:", "no such key (did you mean 'idle_threshold'?)"),
        ("    child: pretrain_4k_acc", "    child: pretrain_8k_acc", "does not exist in the card's folder"),
    ],
)
def test_a_wrong_card_is_refused_by_name(tmp_path, monkeypatch, old, new, message):
    shutil.copytree(RECIPES / "telechat3_105b", tmp_path / "telechat3_105b")
    card = tmp_path / "telechat3_105b/card.yaml"
    text = card.read_text()
    assert old in text
    card.write_text(text.replace(old, new, 1))
    with pytest.raises(RecipeError, match=r"card\.yaml") as error:
        load_card(card)
    assert message in str(error.value)
    monkeypatch.setattr(command, "RECIPES", tmp_path)
    assert CliRunner().invoke(command.main, ["--check"]).exit_code == 2


@pytest.mark.parametrize("place", ["status", "conflicts"])
def test_a_card_with_an_empty_list_is_refused_and_no_check_of_a_recipe_ends_with_it(tmp_path, place):
    shutil.copytree(RECIPES / "telechat3_105b", tmp_path / "telechat3_105b")
    card = tmp_path / "telechat3_105b/card.yaml"
    content = yaml.safe_load(card.read_text())
    (content["recipes"]["finetune_4k.yaml"] if place == "status" else content)[place] = None if place == "status" else 3
    card.write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError, match=rf"{place}: \w+ is not a list"):
        load_card(card)
    assert why_modelled([str(card.with_name("finetune_4k.yaml"))]) == ""


def test_a_compiled_claim_names_its_devices(tmp_path):
    shutil.copytree(RECIPES / "telechat3_105b", tmp_path / "telechat3_105b")
    card = tmp_path / "telechat3_105b/card.yaml"
    text = card.read_text()
    for claim in ("compiled-virtual-256", "proven-virtual-256"):
        card.write_text(text.replace("claim: assumed", f"claim: {claim}", 1))
        assert load_cards(tmp_path)[0].entries[0].status[0]["claim"] == claim

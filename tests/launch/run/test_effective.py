"""These tests check which keys `--steps` changes, and how the number of conversations limits the steps of a run."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from launch.run import effective
from launch.run.effective import FULL_SIZE, Size, effective_recipe, fitted_to_conversations, steps_overrides
from launch.run.summary import words_to_go_on
from plugins.errors import DataError, RecipeError
from plugins.packed_labels.plan import pack
from tools.check.check import check_recipe
from tools.data import instructions as conversations
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View


def test_steps_of_instructions_are_what_the_last_handler_takes():
    recipe = load_recipe("recipes/mini/finetune.yaml")
    found = steps_overrides(recipe, 5)
    assert found[:2] == ["train_dataset.data_loader.handler.2.n=20", "lr_schedule.total_steps=5"]
    assert steps_overrides(recipe, None) == []


@pytest.mark.parametrize("handlers", [[], [{"type": "PackingHandler"}], [{"type": "take"}], None])
def test_without_it_the_data_decides_and_steps_cannot_be_set(handlers):
    data = {"data_loader": {"type": "HFDataLoader", "handler": handlers}}
    recipe = Recipe({"train_dataset": data, "runner_config": {"batch_size": 4}})
    with pytest.raises(RecipeError, match=r"--steps cannot work.*a last handler of type `take`"):
        steps_overrides(recipe, 5)


@pytest.mark.parametrize(
    ("steps", "warmup"),
    [(3, ["lr_schedule.warmup_steps=1"]), (19, ["lr_schedule.warmup_steps=1"]), (20, []), (300, [])],
)
def test_a_warm_up_longer_than_all_steps_becomes_its_share_of_them(steps, warmup, capsys):
    recipe = load_recipe("recipes/mini/pretrain.yaml")  # 20 of 300 steps
    found = steps_overrides(recipe, steps)
    assert [each for each in found if "warmup" in each] == warmup
    said = f"{steps} steps: a warm-up of 1, not 20 steps" if warmup else ""
    assert capsys.readouterr().err.startswith(said)
    flat = apply_overrides(recipe, found)
    assert [line for line in check_recipe(flat).errors if "warmup" in str(line)] == []


def test_steps_of_a_batch_that_grows_ask_for_their_samples():
    recipe = load_recipe("recipes/mini/pretrain_ramp.yaml")  # 50 steps of 2, 4 and 6 samples, then of 8
    assert steps_overrides(recipe, 60)[:2] == ["train_dataset.data_loader.sizes.0=140", "lr_schedule.total_steps=18"]
    recipe["plugins"]["batch_ramp"]["learning_rate"] = "steps"
    assert steps_overrides(recipe, 160)[:2] == ["train_dataset.data_loader.sizes.0=680", "lr_schedule.total_steps=160"]


def test_a_warm_up_that_the_user_sets_stays():
    given = ("lr_schedule.warmup_steps=50",)
    recipe = apply_overrides(load_recipe("recipes/mini/pretrain.yaml"), given)
    assert not any("warmup" in each for each in steps_overrides(recipe, 20, given))
    given = ("lr_schedule={warmup_steps: 50}",)
    assert not any("warmup" in each for each in steps_overrides(recipe, 20, given))


DATA = "train_dataset.data_loader"


@pytest.mark.parametrize(
    ("name", "own", "after"),
    [
        ("pretrain", [f"{DATA}.sizes.0=400"], []),
        ("pretrain", [f"{DATA}.sizes=[400, 8, 8]"], [f"{DATA}.sizes=[800, 8, 8]"]),
        ("pretrain", ["lr_schedule.total_steps=50"], []),
        ("pretrain", ["lr_schedule={total_steps: 50, warmup_steps: 7}"], ["lr_schedule.warmup_steps=7"]),
        ("pretrain", ["runner_config.epochs=2", "runner_config.batch_size=4"], ["runner_config.batch_size=4"]),
        ("pretrain_ramp", [f"{DATA}.sizes.0=140"], []),
        ("finetune", [f"{DATA}.handler.2.n=40"], []),
        ("finetune", [f"{DATA}.handler.2={{n: 40}}"], []),
    ],
)
def test_the_command_that_goes_on_contradicts_no_override_of_the_user(name, own, after):
    """It named both `--steps` and the user's own number of samples, and was refused."""
    file = Path(f"recipes/mini/{name}.yaml")
    recipe = effective_recipe(file, tuple(own), None, Path("RUN"))
    words = words_to_go_on(["tc3", "train", str(file)], tuple(own), Path("RUN"), False, recipe, None, "", 100)
    sets = [value for option, value in pairwise(words) if option == "--set"]
    assert words[-2:] == ["--steps", "100"] and sets == after
    longer = effective_recipe(file, tuple(sets), 100, Path("RUN"))
    assert View(longer).ramp.steps_of(View(longer).samples) == 100


def test_the_command_that_goes_on_keeps_the_overrides_where_it_names_no_steps():
    own = (f"{DATA}.sizes.0=400", "lr_schedule={total_steps: 50}")
    recipe = effective_recipe(Path("recipes/mini/pretrain.yaml"), own, None, Path("RUN"))
    assert words_to_go_on(["tc3"], own, Path("RUN"), False, recipe, None, "")[3:] == ["--set", own[0], "--set", own[1]]


WORDS = ["send", "gather", "reduce", "drop", "keep", "the", "tensor", "token", "expert", "rank", "of", "every", "stage"]
FILES, HELD_OUT = "train_dataset.data_loader.data_files", "plugins.held_out_loss"
FOLDER = "train_dataset.data_loader.handler.0.tokenizer.pretrained_model_dir"


def talk(count, longest=60):
    """Conversations of many lengths, some of which do not fit into a sample."""
    return [
        {
            "instruction": " ".join(WORDS[(i + j) % len(WORDS)] for j in range(1 + (7 * i) % longest)),
            "input": "the rank" if i % 3 == 0 else "",
            "output": " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1 + (11 * i) % longest)),
        }
        for i in range(count)
    ]


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of words and bytes, with a token before each text as many have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words = [conversations.SYSTEM, conversations.WITH_INPUT, conversations.WITHOUT_INPUT]
    own.train_from_iterator([row["instruction"] for row in talk(50)] + 5 * words, trainer)
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    place = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>").save_pretrained(place)
    return place


@pytest.fixture
def recipe(folder, tmp_path):
    """A function: recipes/mini/finetune.yaml on so many conversations and held-out ones."""

    def make(count=60, held_out=30, *more):
        files = written(tmp_path / "mine.jsonl", talk(count)), written(tmp_path / "held.jsonl", talk(held_out))
        sets = [f"{FILES}={files[0]}", f"{HELD_OUT}.data_path={files[1]}", f"{FOLDER}={folder}"]
        return apply_overrides(load_recipe("recipes/mini/finetune.yaml"), [*sets, *more])

    return make


@pytest.mark.parametrize("length", [130, 150, 200, 512])
def test_samples_are_those_that_the_run_packs(folder, length):
    from mindformers.dataset.handler import AlpacaInstructDataHandler
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    maker = AlpacaInstructDataHandler.__new__(AlpacaInstructDataHandler)
    maker.seq_length, maker.padding, maker.use_legacy, maker.ignore_token_id = length, False, False, -100
    maker.tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = talk(70)
    made = [{name: column.tolist() for name, column in maker.process(row).items()} for row in rows]
    packed = pack(made, True, length, 0, -100)
    found = conversations.samples(rows, length, Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert found == [len(ends) for ends in packed["actual_seq_len"]] and len(found) > 3


def test_the_templates_are_mindformers():
    from mindformers.dataset.handler import AlpacaInstructDataHandler as Alpaca

    assert (Alpaca.system, Alpaca.prompt_with_input, Alpaca.prompt_without_input) == (
        conversations.SYSTEM,
        conversations.WITH_INPUT,
        conversations.WITHOUT_INPUT,
    )


def test_what_there_is_is_taken_and_said(recipe, capsys):
    """The recipe takes 800 samples; "the data makes 20 samples, `take` wants 64" came from a worker after 27 s."""
    found = fitted_to_conversations(recipe(), None)
    taken, steps = found["train_dataset"]["data_loader"]["handler"][-1]["n"], found["lr_schedule"]["total_steps"]
    assert 0 < taken == 4 * steps < 800 and found["lr_schedule"]["warmup_steps"] < steps
    said = capsys.readouterr().err
    assert f"{FILES}: " in said and f"{steps} steps" in said


def test_a_recipe_that_there_is_enough_for_stays(recipe):
    given = recipe(60, 30, "train_dataset.data_loader.handler.2.n=8", "lr_schedule.total_steps=2")
    assert fitted_to_conversations(given, None) == given == fitted_to_conversations(given, 2)


@pytest.mark.parametrize(
    ("count", "held_out", "more", "steps", "words"),
    [
        (60, 30, (), 200, (FILES, "--steps 200 takes 800", "--steps ")),
        (2, 30, (), None, (FILES, "a step takes 4", "runner_config.batch_size=")),
        (60, 2, (), None, (f"{HELD_OUT}.data_path", "a step takes 4", f"--set {HELD_OUT}=False")),
        (60, 30, (f"{HELD_OUT}.samples=640",), None, (f"{HELD_OUT}.samples: 640", f"--set {HELD_OUT}.samples=")),
        (60, 30, ("nowhere",), None, (FOLDER, "this folder does not exist", "launch/quickstart")),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_key_and_a_remedy(recipe, count, held_out, more, steps, words):
    given = recipe(count, held_out, *(each for each in more if "=" in each))
    if "nowhere" in more:
        given["train_dataset"]["data_loader"]["handler"][0]["tokenizer"]["pretrained_model_dir"] = "nowhere"
    if steps:
        given["train_dataset"]["data_loader"]["handler"][-1]["n"] = 4 * steps
    with pytest.raises(DataError) as error:
        fitted_to_conversations(given, steps)
    assert str(error.value).startswith(words[0]) and all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_compressed_mask_has_room_for_the_conversations_of_each_sample_that_is_read(recipe, monkeypatch):
    """MindFormers ended the run in the step that reads the first larger sample."""
    loader, mask = "train_dataset.data_loader", "create_compressed_eod_mask"
    given = recipe(60, 30)
    section = given["train_dataset"]["data_loader"]
    section.update({mask: True, "compressed_eod_mask_length": 128})
    for handler in section["handler"][:2]:
        handler["seq_length"] = 1024
    fitted_to_conversations(given, None)
    section["compressed_eod_mask_length"] = 2
    with pytest.raises(RecipeError, match=rf"{loader}\.compressed_eod_mask_length: the mask has room for 2 ") as error:
        fitted_to_conversations(given, None)
    assert f"a sample of {HELD_OUT}.data_path" in str(error.value)
    given["plugins"]["held_out_loss"] = False
    with pytest.raises(RecipeError, match=rf"a sample of {FILES} holds [0-9]+; write [0-9]+, or more") as error:
        fitted_to_conversations(given, None)
    section["compressed_eod_mask_length"] = int(re.search("write ([0-9]+)", str(error.value))[1])
    fitted_to_conversations(given, None)
    monkeypatch.setattr(effective, "count_samples", lambda *_: [1] * 1000 + [99])
    fitted_to_conversations(given, None)
    section["handler"].insert(2, {"type": "shuffle", "seed": 1})
    with pytest.raises(RecipeError, match=r"holds 99; write 99, or more"):
        fitted_to_conversations(given, None)
    section[mask], section["compressed_eod_mask_length"] = False, 2
    fitted_to_conversations(given, None)


@pytest.mark.parametrize(("made", "advice"), [(3, "or --set runner_config.batch_size=1"), (1, "add conversations")])
def test_the_batch_that_is_advised_fits_all_ranks(recipe, monkeypatch, made, advice):
    """A step of 2 ranks has 2 such batches: the number of all samples was advised, which makes too large a step."""
    monkeypatch.setattr(effective, "count_samples", lambda *given: [1] * made if "mine" in str(given) else None)
    given = recipe(2)
    given["use_parallel"] = True
    given["parallel_config"] = {**(given.get("parallel_config") or {}), "data_parallel": 2}
    with pytest.raises(DataError) as error:
        fitted_to_conversations(given, None)
    assert "a step takes 8 samples" in str(error.value) and str(error.value).endswith(advice)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON: column 2: expecting property name"),
        ("[" * 100_000, "is not JSON that can be read: its brackets are nested too deep"),
        ("[1]", "is not a mapping"),
        ('{"instruction": "a"}', "has no text under 'output'"),
        ('{"prompt": "a", "output": "b"}', "has no text under 'instruction'"),
        ('{"instruction": 3, "output": "b"}', "has no text under 'instruction'"),
        ('{"instruction": "a", "output": " "}', "has no text under 'output'"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(recipe, tmp_path, line, words):
    given = recipe()
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(talk(1)[0]) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"mine\.jsonl:2: ") as error:
        fitted_to_conversations(given, None)
    assert words in str(error.value) and "the file must hold lines such as" in str(error.value)


def test_a_line_ends_where_json_lines_end(recipe, tmp_path):
    """U+2028 and U+0085 may stand in a JSON string; texts from the web have them."""
    rows = [row | {"output": f"{row['output']}\u2028and\x85so on"} for row in talk(60)]
    given = recipe()
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "mine.jsonl").write_text(text + "\r\n", encoding="utf-8", newline="")
    assert fitted_to_conversations(given, None) != given


def test_a_file_that_is_not_utf_8_is_named_with_its_byte(recipe, tmp_path):
    given = recipe()
    (tmp_path / "mine.jsonl").write_bytes(b'{"instruction": "\xff"}')
    with pytest.raises(
        DataError, match=r"mine\.jsonl: the file is not JSON: byte 18 is not UTF-8; the file must hold lines such as"
    ):
        fitted_to_conversations(given, None)


def test_what_is_missing_is_left_to_those_who_look_for_files(recipe, tmp_path):
    given = recipe()
    (tmp_path / "mine.jsonl").unlink()
    assert fitted_to_conversations(given, None) == given


@pytest.mark.parametrize("attempts", [True, False])  # a run of a script has none
def test_the_recipe_that_a_run_keeps_goes_on_in_that_run_and_a_copy_saves_elsewhere(tmp_path, capsys, attempts):
    """The kept recipe names the folder into which its run saved: another run was refused there, or removed it."""
    run = tmp_path / "run"
    kept = effective_recipe(Path("recipes/mini/pretrain.yaml"), (), None, run)
    (run / "attempts" if attempts else run).mkdir(parents=True)
    dump_recipe(kept, run / "recipe.yaml")
    dump_recipe(kept, tmp_path / "copy.yaml")
    assert FULL_SIZE.run_dir(run / "recipe.yaml") == run
    assert Size(mini=True).run_dir(run / "recipe.yaml") == Path("output/run-recipe-mini")
    for file in (run / "recipe.yaml", tmp_path / "copy.yaml"):
        again = effective_recipe(file, (), None, tmp_path / "other")
        assert again["checkpoint"]["save_path"] == str(tmp_path / "other" / "checkpoint")
        told = f"{run}/checkpoint is where a run in {run} saves; this run saves in its own folder"
        assert (told in capsys.readouterr().err) == (file.parent != run)
    own = effective_recipe(tmp_path / "copy.yaml", ("checkpoint.save_path=/saves",), None, tmp_path / "other")
    assert own["checkpoint"]["save_path"] == "/saves"

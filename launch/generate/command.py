"""This module is the command `tc3 generate`: it prints how a trained model continues a prompt, token by token."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from launch.generate.session import Logits, answering_model, continuation
from launch.generate.text import Sampling, Spoken, draw, harmless, likeliest, tokenizer_of
from launch.resume.model import weights_of
from plugins import of_the_model
from plugins.errors import CheckpointError, DataError, RecipeError
from plugins.lora.plan import KEY as LORA
from plugins.lora.plan import Settings, is_adapter
from plugins.settings import value_at
from tools.checkpoint.scan import scan_checkpoints
from tools.checkpoint.stored import kind_of
from tools.data.tokenizer import Coder, Tokenizer
from tools.layout.resolve import resolve
from tools.ranges import Number
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import compute_on_cpu, leave_ascend
from tools.recipe.override import apply_overrides
from tools.recipe.view import LOADER, look
from tools.schema.versions import require_verified, unverified_option
from tools.weights.convert_plan import KEPT, recipe_beside, refuse_lost_biases, settings_of_run
from tools.weights.merge import require_adapters
from tools.weights.source import Source, open_source

LARGEST = 1_000_000_000  # parameters: 4 GB in float32
RECIPE = "recipe.yaml"  # of a run, in its folder
PROMPT_HELP = (
    "Let the model continue this text; the option may be repeated. With an empty TEXT ('') the model writes "
    "a new document from the start."
)
TEMPERATURE_HELP = (
    "Divide the logits by this number before a token is drawn; 0 always takes the likeliest token.  [default: 1]"
)


@dataclass(frozen=True)
class Chosen:
    """A `Chosen` holds the weights that the user has chosen; `recipe` is the resolved recipe of their model."""

    source: Source
    recipe: Recipe

    @property
    def weights(self) -> Path:
        """Return the folder of the chosen weights."""
        return self.source.path

    @property
    def sizes(self) -> dict[str, Any]:
        """Return two sizes of the model: `seq_length` is the length of its context, `vocab_size` the number of its
        token ids.
        """
        return self.recipe["model"]["model_config"]


def choose(path: Path, recipe_file: Path | None) -> Chosen:
    """Return the newest checkpoint of a run, or the weights at `path`.

    Args:
        path: a run's folder, an iteration, other weights in MindFormers' names, or a Hugging Face folder.
        recipe_file: the model's recipe; None for that of the run to which `path` belongs.

    Raises:
        CheckpointError: there are no weights, incomplete ones, or those of another model.
        RecipeError: there is no recipe, or its model cannot run in one CPU process.
    """
    if (path / RECIPE).is_file() and not any(path.glob("*.safetensors")):
        recipe_file = recipe_file or path / RECIPE
        path = _newest_checkpoint(path)
    source = open_source(path)
    if source.form == "one file":
        raise CheckpointError(f"{path}: this is a single file; give the folder of the checkpoint to which it belongs")
    if reason := source.seal_fault(checksums=False):
        raise CheckpointError(f"{path}: this is not a complete checkpoint: {reason}; give another checkpoint")
    recipe = resolve(load_recipe(recipe_file or recipe_beside(path)))
    _refuse_model(recipe, source)
    if value_at(recipe, LORA, False) is not False and not any(map(is_adapter, source.headers)):
        recipe = apply_overrides(recipe, [f"{LORA}=False"])  # the adapters are merged, or the training has not begun
        if not (source.path / KEPT).exists():  # which would say that these are not the weights before the training
            click.echo(f"{source.path} has no adapters, so {LORA} of the recipe is left out", err=True)
    file, changed = settings_of_run(source.path, recipe)
    if changed:
        click.echo(
            f"--recipe {recipe_file}: the recipe differs from {file}, the recipe of {source.path}: "
            f"{'; '.join(changed)}. The text is not that of the trained model; leave --recipe out",
            err=True,
        )
    return Chosen(source, recipe)


def _newest_checkpoint(run: Path) -> Path:
    """Return the newest complete checkpoint of a run, in whichever folder the run saves; the run's folder may have
    moved since.
    """
    saves = look(load_recipe(run / RECIPE), ("checkpoint", "save_path"))
    roots = [run / "checkpoint", *([Path(saves)] if isinstance(saves, str) and saves else [])]
    for root in roots:
        best, skipped = scan_checkpoints(root)
        for folder, reason in skipped:
            click.echo(f"skipping checkpoint {folder}: {reason}", err=True)
        if best:
            return best.path
    raise CheckpointError(f"{run}: {roots[0]} holds no complete checkpoint, because the run has not saved one yet")


def _refuse_model(recipe: Recipe, source: Source) -> None:
    """Raise CheckpointError for weights of another model, RecipeError for a model that is too large."""
    if not isinstance(look(recipe, ("model", "model_config", "seq_length")), int):
        raise RecipeError(
            f"{recipe.source}: model.model_config.seq_length: the key is missing; write the number of tokens of the "
            "model's context"
        )
    refuse_lost_biases(source, recipe)
    adapters, chosen = any(map(is_adapter, source.headers)), value_at(recipe, LORA, False)
    if adapters and chosen is not False:
        require_adapters(source, Settings.read(chosen), recipe)
    elif adapters:
        raise CheckpointError(
            f"{source.path}: the checkpoint holds LoRA adapters, but {recipe.source} does not have {LORA}: with "
            "--recipe name the recipe that trained this checkpoint (for a run of tc3 train: recipe.yaml in the "
            "run's folder)"
        )
    wanted, held = weights_of(recipe), _weights_held(source)
    if wanted and held and held != wanted:
        raise CheckpointError(
            f"{source.path}: the checkpoint holds {held:,} weights, but the model of {recipe.source} has {wanted:,}: "
            "with --recipe name the recipe of this checkpoint's model (for a run of tc3 train: recipe.yaml in the "
            "run's folder)"
        )
    if (wanted or held or 0) > LARGEST:
        size = wanted or held or 0
        raise RecipeError(
            f"{recipe.source}: the model has {size:,} parameters ({size * 4 / 1e9:,.0f} GB in float32), but tc3 "
            f"generate takes models of at most {LARGEST:,} parameters, because it computes the whole context again "
            "for each token, in one CPU process. `tc3 weights convert` writes weights that vLLM, SGLang and "
            "transformers can serve"
        )


def _weights_held(source: Source) -> int | None:
    """Return the number of elements of weights in MindFormers' names, without adapters; None for a Hugging Face folder,
    which is compared tensor by tensor.
    """
    if source.form == "Hugging Face":
        return None
    own = (name for name in source.headers if kind_of(name) == "weights" and not is_adapter(name))
    return sum(math.prod(source.headers[name].shape) for name in own)


def forward_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the part of `recipe` on which logits depend, with float32 as data type and without settings of devices and
    parallelism.

    The MTP layer is removed: it reads the decoder's output, and no logit depends on it. Only the plugins that change
    what the model computes stay; the other plugins change where and how fast values are computed, not the values. A
    text is treated as one document.
    """
    flat = copy.deepcopy(dict(recipe))
    leave_ascend(flat)
    model = flat["model"]["model_config"]
    compute_on_cpu(model)
    model.update(batch_size=1, num_nextn_predict_layers=0, use_eod_reset=False)
    flat["runner_config"]["batch_size"] = 1
    data = look(flat, (*LOADER, "config"), {})
    data.update(reset_attention_mask=False, reset_position_ids=False, create_compressed_eod_mask=False)
    flat.update(plugins=of_the_model(flat), callbacks=[], checkpoint={"save_path": "", "load_path": ""})
    flat["resume_training"] = False
    return flat


@dataclass(frozen=True)
class Text:
    """A `Text` is the text generated for a prompt. The field `ended` is "document" if the model generated its
    end-of-document token, and "tokens" if the limit on tokens was reached.
    """

    prompt: str
    text: str
    ids: list[int]
    prompt_tokens: int
    ended: str
    seconds: float


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("weights", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help=PROMPT_HELP)
@click.option(
    "--tokens",
    type=Number("generated"),
    default=64,
    show_default=True,
    help="Generate at most this many tokens for each prompt.",
)
@click.option("--temperature", type=Number("temperature"), help=TEMPERATURE_HELP)
@click.option("--top-k", type=Number("top_k"), metavar="N", help="Draw each token only from the N likeliest tokens.")
@click.option(
    "--top-p",
    type=Number("top_p"),
    help="Draw each token only from the smallest set of likeliest tokens whose probabilities add up to this number.",
)
@click.option(
    "--seed",
    type=Number("seed"),
    help="Draw tokens with this random seed; the same seed gives the same text.  [default: 0]",
)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Read the model's configuration from this recipe.  [default: the run's recipe]",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Use the tokenizer in this folder.  [default: the corpus's tokenizer]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the prompts, the generated texts and their token ids as JSON at the end.",
)
@unverified_option
def generate(
    weights: Path,
    prompts: tuple[str, ...],
    tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    recipe: Path | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Generate text with a small trained model, to see what it has learnt.

    RUN is a run's folder, whose newest complete checkpoint is used. CHECKPOINT is an iteration in any layout, a folder
    of other weights in MindFormers' names, or a Hugging Face folder. Each token is the most probable one, unless
    --temperature, --top-k, --top-p or --seed ask for sampling.
    """
    require_verified()
    how = sampling_of(temperature, top_k, top_p, seed)
    chosen = choose(weights, recipe)
    found = tokenizer_of(chosen.recipe, chosen.weights, tokenizer)
    _check_tokenizer(found, chosen)
    texts = []
    with answering_model(forward_recipe(chosen.recipe), chosen.weights) as logits:
        voice = Voice(logits, found, int(chosen.sizes["seq_length"]), tokens, not as_json)
        for number, prompt in enumerate(prompts):
            if number:
                voice.say("\n")
            random = np.random.default_rng([seed or 0, number])
            texts.append(voice.go_on(prompt, partial(draw, how=how, random=random) if how else likeliest))
    _print_end(chosen, how, seed or 0, texts, as_json)


def sampling_of(temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None) -> Sampling | None:
    """Return the sampling settings from the options; None means that the most probable token is always taken. Raise
    UsageError if the options contradict each other.
    """
    drawing = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
    given = [name for name, value in drawing.items() if value is not None]
    if temperature == 0 and given:
        raise click.UsageError(
            f"--temperature 0 takes the likeliest token, but {given[0]} draws at random: leave one of them out"
        )
    if not temperature and not given:
        return None
    return Sampling(temperature or 1.0, top_k or 0, 1.0 if top_p is None else top_p)


def _check_tokenizer(tokenizer: Tokenizer, chosen: Chosen) -> None:
    """Raise DataError for a tokenizer with ids that the model does not know."""
    known = int(chosen.sizes["vocab_size"])
    if tokenizer.vocab_size > known:
        raise DataError(
            f"{tokenizer.spec.folder}: this tokenizer has {tokenizer.vocab_size:,} ids, but the model of "
            f"{chosen.weights} has only {known:,}: name the model's own tokenizer with --tokenizer"
        )


class Voice:
    """A `Voice` holds a running model and its tokenizer, and generates the continuations of texts.

    Args:
        logits: the logits of the model.
        window: the number of tokens that the model sees.
        most: the largest number of tokens of an answer.
        aloud: whether the prompt, and the text while it is generated, are printed.
    """

    def __init__(self, logits: Logits, tokenizer: Tokenizer, window: int, most: int, aloud: bool):
        self.logits, self.tokenizer, self.window, self.most, self.aloud = logits, tokenizer, window, most, aloud
        self.coder = Coder(tokenizer.spec)

    def go_on(self, prompt: str, choose: Callable[[np.ndarray], int]) -> Text:
        """Generate and return the text with which the model continues `prompt`."""
        before = self.coder.encode([prompt])[0] or [self.tokenizer.eod_id]  # a document begins where one has ended
        if len(before) > self.window:
            click.echo(f"the prompt has {len(before)} tokens; the model sees the last {self.window}", err=True)
        self.say(prompt, bold=True)
        ids, parts, began = [], [], time.monotonic()
        spoken = Spoken(self.coder, before)
        for token in continuation(self._known, choose, before, self.window, self.most, self.tokenizer.eod_id):
            ids.append(token)
            if token != self.tokenizer.eod_id:
                parts.append(spoken.push(token))
                self.say(parts[-1])
        parts.append(spoken.rest())
        self.say(parts[-1] + "\n")
        ended = "document" if ids[-1] == self.tokenizer.eod_id else "tokens"
        return Text(prompt, "".join(parts), ids, len(before), ended, time.monotonic() - began)

    def say(self, text: str, bold: bool = False) -> None:
        """Print a piece of text immediately, without waiting for the end of the line."""
        if self.aloud and text:
            click.secho(harmless(text), nl=False, bold=bold)
            sys.stdout.flush()

    def _known(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of the ids that stand for text; a model may have more ids, which fill up its embedding.

        Raises:
            CheckpointError: a logit is not a number. The largest of such logits would be the first id, which ends a
                document.
        """
        found = self.logits(ids)[: self.tokenizer.vocab_size]
        if np.isnan(found).any():
            raise CheckpointError(
                "the model's logits are not numbers (NaN), so no token can be chosen; `tc3 weights inspect --values` "
                "shows whether the weights are finite"
            )
        return found


def _print_end(chosen: Chosen, how: Sampling | None, seed: int, texts: list[Text], as_json: bool) -> None:
    """Print on stderr which weights and settings made the texts, or print all results as JSON."""
    if as_json:
        drawn = {**asdict(how), "seed": seed} if how else None
        made: dict[str, Any] = {"checkpoint": str(chosen.weights), "step": chosen.source.step, "sampling": drawn}
        click.echo(json.dumps({**made, "texts": [asdict(text) for text in texts]}))
        return
    tokens, seconds = sum(len(text.ids) for text in texts), sum(text.seconds for text in texts)
    step = "" if chosen.source.step is None else f", step {chosen.source.step:,}"
    way = f"drawn with seed {seed}" if how else "each the likeliest"
    ended = sum(text.ended == "document" for text in texts)
    ends = f"; {ended} of {len(texts)} came to the end of a document" if ended else ""
    click.echo(f"({chosen.weights}{step}: {tokens} tokens, {way}, {tokens / seconds:,.0f} a second{ends})", err=True)

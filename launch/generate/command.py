"""`tc3 generate`: what a trained mini makes of a prompt, token by token."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from launch.generate.chosen import Chosen, choose
from launch.generate.forward import forward_recipe
from launch.generate.loop import Logits, continuation
from launch.generate.sampling import Sampling, draw, likeliest
from launch.generate.session import model_of
from launch.generate.text import Spoken, harmless, tokenizer_of
from plugins.errors import DataError
from tools.data.tokenizer import Coder, Tokenizer
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option

PROMPT_HELP = "Text to go on with; repeat it for more. '' begins a document."
TEMPERATURE_HELP = "Draw by chance instead of taking the likeliest; below 1 more careful, above 1 bolder.  [default: 1]"


@dataclass(frozen=True)
class Text:
    """What became of a prompt: `ended` is `document` where the model ended it, else `tokens`."""

    prompt: str
    text: str
    ids: list[int]
    prompt_tokens: int
    ended: str
    seconds: float


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("weights", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help=PROMPT_HELP)
@click.option("--tokens", type=Number("generated"), default=64, show_default=True, help="At most so many more.")
@click.option("--temperature", type=Number("temperature"), help=TEMPERATURE_HELP)
@click.option("--top-k", type=Number("top_k"), help="Draw from the K likeliest tokens.")
@click.option("--top-p", type=Number("top_p"), help="Draw from the likeliest that have this share together.")
@click.option("--seed", type=Number("seed"), help="Of the draws: the same one gives the same text.  [default: 0]")
@click.option("--recipe", type=click.Path(path_type=Path), help="Of the model.  [default: that of the run]")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Its folder.  [default: that of the corpus]")
@click.option("--json", "as_json", is_flag=True, help="Print prompts, texts and ids as JSON, at the end.")
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
    """Let a trained mini go on with a text: see what it has learnt.

    RUN is a run's folder (its newest whole checkpoint is taken), CHECKPOINT one iteration of any layout, other weights
    in MindFormers' names, or a Hugging Face folder. Each token is the likeliest one, unless --temperature, --top-k,
    --top-p or --seed ask for chance.
    """
    require_verified()
    how = sampling_of(temperature, top_k, top_p, seed)
    chosen = choose(weights, recipe)
    found = tokenizer_of(chosen.recipe, chosen.weights, tokenizer)
    _fits(found, chosen)
    texts = []
    with model_of(forward_recipe(chosen.recipe), chosen.weights) as logits:
        voice = Voice(logits, found, chosen.length, tokens, not as_json)
        for number, prompt in enumerate(prompts):
            if number:
                voice.say("\n")
            texts.append(voice.go_on(prompt, _chooser(how, seed or 0, number)))
    _end(chosen, how, seed or 0, texts, as_json)


def sampling_of(temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None) -> Sampling | None:
    """How the options ask to draw; None: always the likeliest. Raises UsageError where they contradict each other."""
    drawing = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
    given = [name for name, value in drawing.items() if value is not None]
    if temperature == 0 and given:
        raise click.UsageError(f"--temperature 0 takes the likeliest token, {given[0]} draws: leave one out")
    if not temperature and not given:
        return None
    return Sampling(temperature or 1.0, top_k or 0, 1.0 if top_p is None else top_p)


def _chooser(how: Sampling | None, seed: int, number: int) -> Callable[[np.ndarray], int]:
    """What takes a token from its logits, for one of several prompts."""
    return likeliest if how is None else partial(draw, how=how, random=np.random.default_rng([seed, number]))


def _fits(tokenizer: Tokenizer, chosen: Chosen) -> None:
    """Raise DataError for a tokenizer with ids that the model does not know."""
    if tokenizer.vocab_size > chosen.vocabulary:
        raise DataError(
            f"{tokenizer.spec.folder}: {tokenizer.vocab_size:,} ids, and the model of {chosen.weights} knows "
            f"{chosen.vocabulary:,}: not its tokenizer; name that: --tokenizer"
        )


class Voice:
    """A model with its tokenizer, that goes on with texts.

    Args:
        logits: of the model. window: tokens that it looks back. most: tokens of an answer. aloud: whether prompt and
            text are printed while they come.
    """

    def __init__(self, logits: Logits, tokenizer: Tokenizer, window: int, most: int, aloud: bool):
        self.logits, self.tokenizer, self.window, self.most, self.aloud = logits, tokenizer, window, most, aloud
        self.coder = Coder(tokenizer.spec)

    def go_on(self, prompt: str, choose: Callable[[np.ndarray], int]) -> Text:
        """The text behind `prompt`."""
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
        """Print a piece of text at once."""
        if self.aloud and text:
            click.secho(harmless(text), nl=False, bold=bold)
            sys.stdout.flush()

    def _known(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of the ids that stand for text; a model may have more, to fill its embedding."""
        return self.logits(ids)[: self.tokenizer.vocab_size]


def _end(chosen: Chosen, how: Sampling | None, seed: int, texts: list[Text], as_json: bool) -> None:
    """What it was made by: on stderr, or all of it as JSON."""
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

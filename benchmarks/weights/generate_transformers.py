"""This program checks that a run generates the same greedy tokens here and, after an export, in transformers, for a few
prompts.

    python benchmarks/weights/generate_transformers.py output/quickstart [--reference-python PYTHON]

PYTHON has torch and transformers (the extra `align`). `tc3 weights convert` exports the weights with the tokenizer;
transformers loads the exported folder, and its `generate` does not sample. At the first token that differs, the program
prints by how much the chosen token was the most probable one, which shows whether the difference is a tie within
rounding or a mistake.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.generate.command import choose  # noqa: E402
from launch.generate.text import tokenizer_of  # noqa: E402

TC3 = str(Path(sys.executable).with_name("tc3"))
PROMPTS = ("    def __init__(self", "def read(self", "if not isinstance(", "import os\nimport ", "class Test", "# ")
REFERENCE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, tokens, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
coder, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).float()
found = []
for prompt in prompts:
    ids = coder(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                          eos_token_id=coder.eos_token_id, pad_token_id=coder.eos_token_id,
                          return_dict_in_generate=True, output_logits=True)
    best = [logits[0].topk(2).values for logits in made.logits]
    found.append({"ids": made.sequences[0, ids.shape[1]:].tolist(), "margins": [float(a - b) for a, b in best]})
print("FOUND" + json.dumps(found))
"""


def exported(run: Path, folder: Path) -> None:
    """Write the newest checkpoint of `run` as a Hugging Face folder, with its tokenizer."""
    chosen = choose(run, None)
    tokenizer = tokenizer_of(chosen.recipe, chosen.weights, None).spec.folder
    subprocess.run([TC3, "weights", "convert", str(chosen.weights), str(folder), "--tokenizer", tokenizer], check=True)


def here(weights: Path, tokens: int, *more: str) -> list[list[int]]:
    """Return the token ids that `tc3 generate` generates for each prompt."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [TC3, "generate", str(weights), "--tokens", str(tokens), "--json", *more, *prompts]
    return [each["ids"] for each in json.loads(subprocess.check_output(command, text=True))["texts"]]


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--reference-python", default=sys.executable, help="Use this Python, which has torch and transformers.")
@click.option("--tokens", default=64, help="Generate this many tokens after each prompt.")
def main(run: Path, reference_python: str, tokens: int) -> None:
    """Compare, prompt by prompt."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        exported(run, folder)
        ours = here(run, tokens)
        command = [reference_python, "-c", REFERENCE, str(folder), str(tokens), json.dumps(PROMPTS)]
        answer = subprocess.check_output(command, text=True)
        theirs = json.loads(answer.partition("FOUND")[2])
    for prompt, mine, other in zip(PROMPTS, ours, theirs, strict=True):
        other["ids"] = other["ids"][: len(mine)]  # we stop where the document ends
        apart = next(
            (place for place, pair in enumerate(zip(mine, other["ids"], strict=True)) if len(set(pair)) > 1), None
        )
        least = min(other["margins"][: len(mine)])
        if apart is None:
            click.echo(f"{prompt!r}: {len(mine)} tokens equal; the closest choice by {least:.3g}")
        else:
            click.echo(f"{prompt!r}: token {apart + 1} of {len(mine)} differs; there by {other['margins'][apart]:.3g}")


if __name__ == "__main__":
    main()

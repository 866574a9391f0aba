"""This module is the command `tc3 data`. The commands of this group prepare and verify a corpus, and show how evenly
the corpus loads the devices of a recipe.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from plugins.errors import DataError
from tools.data.sources import FOLDER_SUFFIXES, Corpus
from tools.process.children import terminate_as_interrupt
from tools.process.waiting import TerminalReporter
from tools.ranges import Number

DEFAULT_VOCAB = 2048
SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}

INPUT_HELP = (
    "Read this file or folder; the option may be repeated. A text file is one document. In a file of JSON lines "
    "(.jsonl .ndjson .json) each line is one document. Text files and JSON lines may be compressed (.gz). In a "
    "folder and its sub-folders, the files that match --glob are read or, without --glob, those whose names end in "
    f"{' '.join(FOLDER_SUFFIXES)}. stdlib stands for the sources of Python's standard library."
)
OUTPUT_HELP = (
    "Write the tokens to PREFIX.bin and PREFIX.idx, and facts about the corpus (such as token counts and sources) to "
    "PREFIX.json; a missing folder is created."
)
TOKENIZER_HELP = (
    "`bytes` trains a byte-level BPE tokenizer on the corpus and saves it as PREFIX_tokenizer/. DIR is the folder "
    "of a Hugging Face tokenizer, such as the PREFIX_tokenizer/ of an earlier run."
)
VOCAB_HELP = f"Give the tokenizer that --tokenizer bytes trains this vocabulary size.  [default: {DEFAULT_VOCAB}]"
HELD_OUT_HELP = (
    "Hold out this fraction of the documents: write them to the corpus PREFIX_heldout, not to the corpus PREFIX."
)
DTYPE_HELP = (
    "Store token ids in this data type. auto chooses uint16 if the vocabulary has fewer than 65,500 ids, and int32 "
    "otherwise."
)
WORKERS_HELP = "Tokenize with this many processes. The output is the same for every N.  [default: the number of cores]"
INSTRUCTIONS_INPUT = (
    "Read Python sources from this file or folder with its sub-folders, or from Python's standard library (stdlib); "
    "the option may be repeated."
)
INSTRUCTIONS_OUTPUT = (
    "Write the instructions to PREFIX.jsonl, one JSON object with the keys instruction, input and output per line; a "
    "missing folder is created."
)
INSTRUCTIONS_HELD_OUT = (
    "Hold out this fraction of the Python modules: write their functions to PREFIX_heldout.jsonl, not to PREFIX.jsonl. "
    "From stdlib, `tc3 data prepare` with the same --held-out and --seed holds out the same modules."
)


@click.group(context_settings=SETTINGS)
def data() -> None:
    """Turn a corpus into the Megatron .bin/.idx files that MindFormers trains on, and check these files.

    Start with Python's own standard library, which every machine has:

        tc3 data prepare --input stdlib --output output/stdlib --held-out 0.05
    """


@data.command(context_settings=SETTINGS, short_help="Tokenize a corpus into Megatron .bin and .idx files.")
@click.option("--input", "inputs", multiple=True, required=True, metavar="FILE|DIR|stdlib", help=INPUT_HELP)
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="PREFIX", help=OUTPUT_HELP)
@click.option("--tokenizer", default="bytes", metavar="bytes|DIR", help=TOKENIZER_HELP)
@click.option("--vocab-size", type=Number("vocab_size"), metavar="N", help=VOCAB_HELP)
@click.option(
    "--eod-token",
    metavar="TOKEN",
    help="End each document with this token of the tokenizer in DIR.  [default: that tokenizer's eos_token]",
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Let transformers run the Python code in DIR to load its tokenizer."
)
@click.option("--jsonl-key", default="text", metavar="KEY", help="Read the text from this field of each JSON line.")
@click.option(
    "--glob",
    "globs",
    multiple=True,
    metavar="PATTERN",
    help="Read only the files of a folder that match this pattern, e.g. '*.py'; the option may be repeated.",
)
@click.option("--held-out", type=Number("share"), default=0.0, metavar="FRACTION", help=HELD_OUT_HELP)
@click.option(
    "--seed",
    type=Number("seed"),
    default=1234,
    help="Choose the documents of --held-out at random with this seed.",
)
@click.option("--dtype", type=click.Choice(["auto", "uint16", "int32"]), default="auto", help=DTYPE_HELP)
@click.option("--workers", type=Number("workers"), metavar="N", help=WORKERS_HELP)
@click.option("--strict", is_flag=True, help="Stop at a broken line or at invalid UTF-8 instead of skipping it.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout.")
def prepare(
    inputs: tuple[str, ...],
    output: Path,
    tokenizer: str,
    vocab_size: int | None,
    jsonl_key: str,
    globs: tuple[str, ...],
    workers: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write a corpus as Megatron .bin/.idx files. Each document ends with an end-of-document token.

    The command reads the written files back and compares them with the source before the files appear under PREFIX; an
    interrupted or failed run leaves no file under PREFIX. The command names, skips and counts lines and files that are
    not documents.
    """
    from tools.data.prepare import PrepareOptions
    from tools.data.prepare import prepare as run

    if flags["held_out"] == 1:
        raise click.UsageError("--held-out 1 leaves nothing to train on; give a share below 1, such as 0.01")
    if tokenizer == "bytes" and (flags["eod_token"] or flags["trust_remote_code"]):
        raise DataError(
            "--eod-token and --trust-remote-code work only with --tokenizer DIR; leave them out, or give "
            "--tokenizer DIR"
        )
    if tokenizer != "bytes" and vocab_size is not None:
        raise DataError(
            f"--vocab-size works only with --tokenizer bytes, because the vocabulary of {tokenizer} is fixed"
        )
    options = PrepareOptions(
        corpus=Corpus(inputs, jsonl_key, globs),
        output=output,
        tokenizer=tokenizer,
        vocab_size=DEFAULT_VOCAB if vocab_size is None else vocab_size,
        workers=workers or len(os.sched_getaffinity(0)),
        **flags,
    )
    with terminate_as_interrupt(), TerminalReporter() as reporter:
        summary = run(options, reporter)
    click.echo(json.dumps(summary, indent=2) if as_json else _describe(output, summary))


@data.command(
    context_settings=SETTINGS,
    short_help="Make an instruction data set for fine-tuning from the docstrings of Python sources.",
)
@click.option("--input", "inputs", multiple=True, required=True, metavar="FILE|DIR|stdlib", help=INSTRUCTIONS_INPUT)
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="PREFIX", help=INSTRUCTIONS_OUTPUT)
@click.option("--held-out", type=Number("share"), default=0.0, metavar="FRACTION", help=INSTRUCTIONS_HELD_OUT)
@click.option(
    "--seed",
    type=Number("seed"),
    default=1234,
    help="Use this seed for the random choice of the held-out Python modules and for the random order of the output's "
    "lines.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout.")
def instructions(inputs: tuple[str, ...], output: Path, as_json: bool, **flags: Any) -> None:
    """Make instructions for fine-tuning from Python sources. A function's signature is the question, and the first
    paragraph of its docstring is the answer.

    The same input gives the same file on every machine. MindFormers' AlpacaInstructDataHandler reads such files.
    """
    from tools.data.instructions import Options, write
    from tools.data.sources import Skips

    if flags["held_out"] == 1:
        raise click.UsageError("--held-out 1 leaves nothing to train on; give a share below 1, such as 0.05")
    options = Options(corpus=Corpus(inputs, globs=("*.py",)), output=output, **flags)
    with terminate_as_interrupt(), TerminalReporter() as reporter:
        reporter.start("reading Python sources", 0)
        summary = write(options, Skips(reporter=reporter))
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    for split in options.files():
        click.echo(f"{summary[split]['file']}: {summary[split]['instructions']:,} instructions")


@data.command(
    context_settings=SETTINGS,
    short_help="Check that PREFIX.bin and PREFIX.idx agree with PREFIX.json and with the corpus from which they "
    "were made.",
)
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="FILE|DIR|stdlib",
    help="Read the corpus from this file or folder, if it is no longer where PREFIX.json says; the option may be "
    "repeated.",
)
@click.option(
    "--tokenizer", metavar="DIR", help="Read the tokenizer from DIR, if it is no longer where PREFIX.json says."
)
@click.option(
    "--sample",
    type=Number("share"),
    default=1.0,
    metavar="FRACTION",
    help="Compare this fraction of the documents with the corpus; file sizes, token ids and the checksum are always "
    "checked completely.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON on stdout.")
@click.pass_context
def verify(
    context: click.Context, prefix: Path, inputs: tuple[str, ...], tokenizer: str | None, sample: float, as_json: bool
) -> None:
    """Check that PREFIX.bin and PREFIX.idx are complete, unchanged since they were written, and equal to their source
    files.

    The command decodes the documents and compares them with the source files that still exist. If the tokenizer does
    not keep all text, the command encodes the source files again and compares the token ids; the result says which of
    the two comparisons was made. The exit code is 1 if the check finds an error.
    """
    from tools.data.outputs import checked_sidecar
    from tools.data.tokenizer import load
    from tools.data.verify import verify as run

    sidecar = checked_sidecar(prefix)
    corpus = Corpus(inputs, sidecar["jsonl_key"], tuple(sidecar["globs"])) if inputs else None
    with TerminalReporter() as reporter:
        reporter.start("loading the tokenizer", 0)
        trusted = sidecar["tokenizer"]["trust_remote_code"]
        loaded = load(tokenizer, sidecar["eod_token"], trusted) if tokenizer else None
        report = run(prefix, corpus, loaded, sample, reporter)
    for line in report.findings + report.notes:
        click.echo(line, err=True)
    verdict = "WRONG" if report.findings else "ok"
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else f"{verdict}: {report.summary()}")
    context.exit(1 if report.findings else 0)


def _describe(prefix: Path, summary: dict[str, Any]) -> str:
    lines = [_line(prefix, summary)]
    if "heldout" in summary:
        lines.append(_line(Path(f"{prefix}_heldout"), summary["heldout"]))
    lines += [
        f"tokenizer: {summary['tokenizer']['path']}, vocabulary {summary['vocab_size']:,},"
        f" a document ends with {summary['eod_token']} = {summary['eod_id']}",
        f"in a recipe: data_path: ['1', '{prefix}'], eod: {summary['eod_id']}, pad: -1,"
        f" vocab_size: {summary['vocab_size']} or more",
    ]
    return "\n".join(lines)


def _line(prefix: Path, sidecar: dict[str, Any]) -> str:
    return f"{prefix}.bin/.idx: {sidecar['documents']:,} documents, {sidecar['tokens']:,} tokens, {sidecar['dtype']}"
